"""Assign the usage that the ledger recorded before a start to the holders of limits, so that budgets survive a restart. Pure.

The rule: a row counts for the holders that a new request of its key, team and model would count for. A model's other names come from the
current
configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gateway.limits import end_users
from gateway.limits.windows import Moment, counted_periods, counted_starts, moment, period_of, windows_of
from gateway.snapshot.identity import subject_id, subject_prefix
from gateway.snapshot.snapshot import Allowance, Model, PerUser, Snapshot


class UsedSince(NamedTuple):
    """Sums of ledger rows with the same key, team and model: tokens, and cost in nano-units.

    ``slot`` is the number of the last start of a period or slice that is not after these rows. ``user`` is the end user
    in the ledger, if any limit counts end users.
    """

    key: str
    team: str | None
    model: str | None
    slot: int
    tokens: int
    cost: int
    user: str | None = None


PeriodUse = dict[tuple[str, int], tuple[int, int]]
"""Tokens and cost by the name of a window and the number of a period or slice of it."""


class HolderUse(NamedTuple):
    """The use of a holder. ``entry`` is the configured entry of a token's subject; None for other holders.

    ``end_user`` is the name of the end user that the holder counts, and ``of_users`` the configured limits of all end users.
    """

    allowance: Allowance
    used: PeriodUse
    entry: Allowance | None = None
    end_user: str | None = None
    of_users: Allowance | None = None


def beyond(used: PeriodUse, known: Mapping[tuple[str, int], tuple[int, int]]) -> PeriodUse:
    """Return by how much a use exceeds the known use; nothing is negative."""
    found: PeriodUse = {}
    for period, (tokens, cost) in used.items():
        known_tokens, known_cost = known.get(period, (0, 0))
        more = max(tokens - known_tokens, 0), max(cost - known_cost, 0)
        if any(more):
            found[period] = more
    return found


class Budgets:
    """The holders of a snapshot with budgets, by key and team.

    ``keys`` and ``teams`` are their IDs; ``entries`` are the keys that tokens may use.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._models: Mapping[str, Model] = {model.id: model for model in snapshot.models}
        self._configured = {key.id: key for key in snapshot.keys}
        self._stores_field = snapshot.ledger_user
        of_tokens = {entry for issuer in snapshot.issuers for entry in issuer.keys}
        by_key, by_team = {}, {team: _with_budget(allowances) for team, allowances in snapshot.teams.items()}
        for key in snapshot.keys:
            own = [each for each in key.allowances if each.holder.startswith("key ")]
            by_key[key.id] = _with_budget(own)
            if key.team is not None:
                by_team[key.team] = _with_budget(each for each in key.allowances if each not in own)
        self._by_key: Mapping[str, Sequence[Allowance]] = {key: found for key, found in by_key.items() if found}
        self._by_team: Mapping[str, Sequence[Allowance]] = {team: found for team, found in by_team.items() if found}
        self.keys, self.teams = frozenset(self._by_key), frozenset(self._by_team)
        self.entries = self.keys & of_tokens
        self._subjects = tuple(subject_prefix(entry) for entry in of_tokens)
        self._entry_of = {subject_prefix(entry): entry for entry in self.entries}

    @property
    def counts_users(self) -> bool:
        """Whether any limit counts end users."""
        return any(each.users is not None for found in (*self._by_key.values(), *self._by_team.values()) for each in found)

    def __bool__(self) -> bool:
        return bool(self._by_key or self._by_team)

    def counted_starts(self, at: Moment) -> tuple[float, ...]:
        """Return the starts of the periods and slices that count at a moment, in seconds since the epoch, the earliest first."""
        allowances = (each for found in (*self._by_key.values(), *self._by_team.values()) for each in found)
        windows = {window for each in allowances for window in windows_of(each.limits)}
        return tuple(sorted({start for window in windows for start in counted_starts(window, at)}))

    def use_by_holder(self, rows: Iterable[UsedSince], starts: Sequence[float], at: Moment) -> dict[str, HolderUse]:
        """Return the use of each holder that counts at a moment, by its name. ``starts``: of ``counted_starts`` for this moment."""
        found: dict[str, HolderUse] = {}
        moments = [moment(0.0, start) for start in starts]
        for row in rows:
            for holder in self._holders(row):
                one = found.setdefault(holder.allowance.holder, holder)
                for window in windows_of(one.allowance.limits):
                    period = period_of(window, moments[row.slot])
                    if period in counted_periods(window, at):
                        tokens, cost = one.used.get((window.name, period), (0, 0))
                        one.used[window.name, period] = tokens + row.tokens, cost + row.cost
        return found

    def _holders(self, row: UsedSince) -> Iterator[HolderUse]:
        """Yield the holders that a row counts for, without use."""
        shared = ((each, None) for each in self._by_team.get(row.team or "", ()))
        for each, entry in (*self._of_key(row.key), *shared):
            if each.users is not None:
                yield from self._of_user(each, each.users, row)
            elif self._covers(each, row.model):
                yield HolderUse(each, {}, entry)

    def _of_user(self, allowance: Allowance, users: PerUser, row: UsedSince) -> Iterator[HolderUse]:
        """Yield the holder of the end user of a row, as far as the ledger has stored who it is."""
        owner, key = end_users.owner_of(allowance.holder), self._configured.get(row.key)
        if key is None:
            is_subject = row.key.startswith(self._subjects)
            name = end_users.shown_name(row.key) if is_subject else end_users.named_by_header(row.user or "")
        elif key.user_header is not None or key.anonymous:
            name = None if key.anonymous else end_users.named_by_header(row.user or "")
        elif self._stores_field:
            name = end_users.counted_name(row.user or "")
        else:
            return
        if name is not None:
            yield HolderUse(replace(allowance, holder=end_users.user_of(owner, name), users=None), {}, None, name, allowance)
        elif users.missing == "shared":
            yield HolderUse(replace(allowance, holder=end_users.without_user(owner), users=None), {})

    def _of_key(self, key: str) -> Iterator[tuple[Allowance, Allowance | None]]:
        """Yield the key's own allowances. The subject of a token also has the allowance of its entry."""
        if key in self._configured:
            yield from ((each, None) for each in self._by_key.get(key, ()))
            return
        prefix = max((prefix for prefix in self._entry_of if key.startswith(prefix)), key=len, default=None)
        if prefix is not None:
            entry = self._entry_of[prefix]
            own, subject = f"key {entry}", f"key {subject_id(entry, key[len(prefix) :])}"
            for each in self._by_key[entry]:
                yield (each, None) if each.users is not None else (replace(each, holder=subject + each.holder[len(own) :]), each)

    def _covers(self, allowance: Allowance, model: str | None) -> bool:
        if allowance.models is None:
            return True
        if model is None:
            return False
        known = self._models.get(model) or Model(model, ())
        return known.is_in(allowance.models)


def _with_budget(allowances: Iterable[Allowance]) -> list[Allowance]:
    return [each for each in allowances if windows_of(each.limits)]
