"""The limits of the requests of one key: which holders count them, for each model.

The rule: what follows from the configuration is computed once, so that a request only reads it.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.limits import headers
from gateway.limits.decision import RATES, Amounts, Holder
from gateway.limits.end_users import EndUser
from gateway.limits.lease import can_lease
from gateway.limits.redis.leases import LeasedHolders
from gateway.limits.redis.store import RedisStore
from gateway.limits.shared_counts import Buckets, UserCounts
from gateway.limits.windows import windows_of
from gateway.snapshot.snapshot import Allowance, Limits, Model

ARRIVAL = Amounts(requests=1, slots=1)
"""Reserved before the body is read."""
PART_FOR_SUBJECTS = 0.75
"""Part of the shared memory for end users, the subjects of tokens among them. The rest stays free for configured holders."""
Holders = tuple[Holder, ...]


class KeyLimits:
    """The holders that count the requests of one key, or of one end user of a key.

    ``is_known_on_arrival``: all amounts are known before the body is read. ``reads_body``: the body may name further holders: a session,
    or the end user. ``holders`` are all of them, each with its allowance. ``counts``: where requests reserve in memory.
    ``end_user``: None for a key without limits of end users. ``users`` are the end user's own holders by name.
    """

    def __init__(
        self,
        key: str,
        buckets: Buckets,
        allowances: tuple[Allowance, ...],
        part: float = 1.0,
        end_user: EndUser | None = None,
        users: Mapping[str, Holder] = {},
    ) -> None:
        self.key = key
        self.end_user = end_user
        self.counts: Buckets | UserCounts = UserCounts(buckets) if users else buckets
        counted = (each for each in allowances if is_counted(each.limits))
        holders = [(each, users.get(each.holder) or buckets.holder(each.holder, each.limits, part)) for each in counted]
        self.for_all_models = tuple(holder for each, holder in holders if each.models is None)
        self.on_arrival = tuple((holder, ARRIVAL) for holder in self.for_all_models)
        self.counting_tokens = tuple(holder for holder in self.for_all_models if holder.counts_tokens)
        self.session_owners = tuple((each.holder, each.limits.session) for each in allowances if each.limits.session is not None)
        self.reads_body = bool(self.session_owners) or (end_user is not None and end_user.is_awaited)
        is_known = not self.counting_tokens and len(self.for_all_models) == len(holders) and not self.reads_body
        self.is_known_on_arrival = is_known and not (end_user is not None and end_user.is_of_body)
        budgets = [budget for _, holder in holders for window in holder.windows for budget in window.budgets]
        self.has_budgets = bool(self.session_owners or budgets)
        self.has_hard_budgets = bool(self.session_owners) or not all(budget.soft for budget in budgets)
        self.has_soft_budgets = any(budget.soft for budget in budgets)
        self.holders = tuple(holders)
        self.layout = headers.layout_of(self.for_all_models)
        self._for_models: dict[str, tuple[Holders, Holders, headers.Layout | None]] = {}
        self._leased: dict[str | None, LeasedHolders | None] = {}
        self.max_tokens_limits = tuple(each for each in allowances if each.limits.max_tokens is not None)

    def for_model(self, model: Model) -> tuple[Holders, Holders, headers.Layout | None]:
        """Return the additional holders for a model, all holders together, and the layout of their headers."""
        if (found := self._for_models.get(model.id)) is None:
            own = tuple(holder for each, holder in self.holders if each.models is not None and _covers(each, model))
            found = self._for_models[model.id] = own, (*self.for_all_models, *own), headers.layout_of((*self.for_all_models, *own))
        return found

    def leased(self, store: RedisStore, model: Model | None) -> LeasedHolders | None:
        """Return the leases for a model, or for requests on arrival; None if these requests must not be admitted from a lease."""
        name = None if model is None else model.id
        if name not in self._leased:
            holders = self.for_all_models if model is None else self.for_model(model)[1]
            self._leased[name] = LeasedHolders(store.leases, holders) if can_lease(holders) else None
        return self._leased[name]

    def max_tokens(self, model: Model) -> int | None:
        """Return the largest number of tokens that a response of this model may have."""
        limits = (each.limits.max_tokens for each in self.max_tokens_limits if _covers(each, model))
        return min((limit for limit in limits if limit is not None), default=None)


def is_counted(limits: Limits) -> bool:
    """Check whether limits need counts: all but the length of a response."""
    return bool(windows_of(limits)) or any(getattr(limits, name) is not None for name in RATES)


def _covers(allowance: Allowance, model: Model) -> bool:
    return allowance.models is None or model.is_in(allowance.models)
