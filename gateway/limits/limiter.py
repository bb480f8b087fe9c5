"""The limits of the keys in one worker: which holders count a request, and where the counts are.

The rule: a request of a key without limits costs one attribute look-up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from secrets import token_hex
from time import monotonic, time

from gateway.api.errors import Refusal
from gateway.limits.decision import RATES, Holder
from gateway.limits.end_users import fixed_holders
from gateway.limits.key_limits import PART_FOR_SUBJECTS, Holders, KeyLimits, is_counted
from gateway.limits.redis.store import RedisStore, StoreUnavailableError
from gateway.limits.refusals import limit_text
from gateway.limits.shared_counts import Buckets, BucketsFullError
from gateway.limits.states import HolderRates, LimitState, limit_states
from gateway.limits.user_limits import NO_USER, UserLimits, counts_users
from gateway.limits.user_table import note_store_use
from gateway.limits.windows import BudgetState, Capacity, Window, hard_capacity, moment, session_window, windows_of
from gateway.snapshot.link import StoredKeys
from gateway.snapshot.snapshot import Allowance, Key, Snapshot
from gateway.telemetry.metrics import WorkerMetrics
from upstream.http.write_batching import WriteBatch

_log = logging.getLogger("vllm_gateway.limits")

_MOST_REPORTED = 10_000  # budgets, and exceeded soft budgets, that are remembered


class Limiter:
    """The limits of all keys of a worker. ``buckets`` outlive it; the store follows the configuration.

    ``on_store`` is called as ``on_change`` of ``RedisStore``.
    """

    def __init__(
        self, metrics: WorkerMetrics, buckets: Buckets, on_store: Callable[[str | None], None], write_batch: WriteBatch | None = None
    ) -> None:
        self.buckets = buckets
        self._write_batch = write_batch
        self._on_store = on_store
        self.store: RedisStore | None = None
        self.end_users = UserLimits(buckets, metrics)
        self._metrics = metrics
        self._name = token_hex(8)
        self._by_key: dict[str, KeyLimits] = {}
        self._subjects: dict[tuple[str, str | None], KeyLimits] = {}  # of tokens, by subject and team
        self._exceeded: set[tuple[str, str]] = set()
        self._reported: dict[tuple[str, str, bool], tuple[float, float]] = {}
        """The use of a budget that the store has reported last, and until when it counts. By holder, window, and whether it is a cost."""
        self.max_model_len: Mapping[str, int] = {}
        """The context length of each model whose servers report it, by its ID."""
        self.warn_at = 1.0
        """Responses have a warning once this share of a budget is used."""

    def apply_snapshot(self, snapshot: Snapshot, stored: Mapping[str, Key] = {}) -> None:
        """Use the limits of this snapshot for new requests. Usage so far stays counted.

        ``stored`` are the store's keys by ID. Only those that were used get new limits here; the others get theirs on their first request.
        """
        used = (stored[name] for name in self._by_key if name in stored)
        self._by_key = {
            key.id: KeyLimits(key.id, self.buckets, key.allowances)
            for key in (*used, *snapshot.keys)
            if key.allowances and not counts_users(key)
        }
        self.end_users.apply_keys(snapshot.keys)
        for key in snapshot.keys:
            for reason in _reasons(key):
                self._metrics.cells("limited_total", key.id, reason)
            if any(allowance.limits.session is not None for allowance in key.allowances):
                self._metrics.cells("session_evictions_total", key.id)
        self._subjects = {}
        self._exceeded = set()
        self.warn_at = snapshot.warn_at
        settings = snapshot.limits_store
        if self.store is not None and settings is not None and self.store.settings.counts == settings.counts:
            self.store.settings = settings  # its reservations and unsent settlements stay
            self.store.leases.end_all()  # they are from the former limits
            return
        self.close()
        if settings is not None and snapshot.uses_store:
            self.store = RedisStore(settings, self._name, self._on_store, self._write_batch)

    def apply_stored_keys(self, message: StoredKeys) -> None:
        """Use the limits of these keys of the store for new requests. Usage so far stays counted."""
        self.end_users.forget()
        for identity in message.removed:
            self._by_key.pop(identity, None)
        for key in message.changed:
            # A request in flight may look up the limits of the former key. It finds these, and does not store the former ones again.
            if self._by_key.pop(key.id, None) is None:
                continue
            if key.allowances and not counts_users(key):
                with suppress(BucketsFullError):  # its next request is refused
                    self._by_key[key.id] = KeyLimits(key.id, self.buckets, key.allowances)
            if self.store is not None:
                self.store.leases.end_all()  # they are from the former limits

    def note_budgets(self, states: Sequence[tuple[Holder, BudgetState]]) -> None:
        """Remember the use of budgets that the store has reported."""
        reported, now = self._reported, monotonic()
        for holder, state in states:
            name = holder.name, state.window, state.budget.is_cost
            if name not in reported and len(reported) >= _MOST_REPORTED:
                del reported[next(iter(reported))]
            reported[name] = state.used, now + state.reset

    def reported_capacity(self, holders: Iterable[Holder]) -> tuple[Capacity, Capacity]:
        """Return what is left of the hard budgets of these holders in the store, and the whole budgets.

        It is the store's last report to this worker. A window without a report counts as unused.
        """
        now = monotonic()

        def used(holder: Holder, window: Window, *, is_cost: bool) -> float:
            use, until = self._reported.get((holder.name, window.name, is_cost), (0.0, 0.0))
            return use if until > now else 0.0

        windows = ((holder, window) for holder in holders for window in holder.windows)
        return hard_capacity(
            (window, used(holder, window, is_cost=False), used(holder, window, is_cost=True)) for holder, window in windows
        )

    async def states(self, key: Key, identity: str, fields: Mapping[bytes, bytes] = {}, user: str | None = None) -> list[LimitState]:
        """Return the state of each limit that a request of a key is subject to, by the id of the request.

        ``fields``: its headers. ``user``: the end user, if the bodies of its requests name it. Raises Refusal if a state cannot be known.
        """
        if not key.allowances:
            return []
        limits, now = self.end_users.shown(key, fields, user) if counts_users(key) else self.limits_of(key), monotonic()
        if (counts := await self._counts_in_store(limits, identity)) is None:
            at, buckets = moment(now, time()), self.buckets
            counts = [(buckets.rates(holder), buckets.budget_states(holder, at)) for _, holder in limits.holders]
        found = [
            state
            for (allowance, _), (rates, budgets) in zip(limits.holders, counts, strict=True)
            for state in limit_states(allowance, rates, budgets, now)
        ]
        uncounted = [each for each in key.allowances if each.users is None and not is_counted(each.limits)]
        return [*found, *(state for each in uncounted for state in limit_states(each, None, (), now))]

    async def _counts_in_store(self, limits: KeyLimits, identity: str) -> Sequence[tuple[HolderRates, Sequence[BudgetState]]] | None:
        """Return the counts of the holders in the store; None without a store, or while it is unavailable. Raises Refusal."""
        if self.store is None or not limits.holders:
            return None
        holders = [holder for _, holder in limits.holders]
        try:
            result = await self.store.read(identity, holders)
        except StoreUnavailableError:
            if self.store.settings.refuses:
                raise Refusal("overloaded", "The limits of this key can't be counted at the moment.") from None
            return None
        if limits.end_user is not None:
            note_store_use(self.buckets, holders, result)  # the store remembers this end user too
        budgets = [[state for owner, state in result.budgets if owner == holder] for holder in holders]
        rates = (HolderRates(requests, tokens, None) for _, requests, tokens in result.full_times)
        return list(zip(rates, budgets, strict=True))

    def limits_of(self, key: Key, fields: Mapping[bytes, bytes] = {}) -> KeyLimits:
        """Return the limits of a request of a key that has some. ``fields``: its headers. Raises Refusal.

        The holders of a token's subject exist from its first request on. If the shared memory is full, it counts as its configured entry.
        """
        if key.entry is None:
            try:
                return self._by_key[key.id]
            except KeyError:
                return self.end_users.on_arrival(key, fields) if counts_users(key) else self._limits_of_stored(key)
        if (known := self._subjects.get((key.id, key.team))) is None:
            if counts_users(key):
                return self.end_users.on_arrival(key, fields)
            entry = key.entry
            try:
                known = KeyLimits(entry, self.buckets, key.allowances, PART_FOR_SUBJECTS)
            except BucketsFullError:
                known = self._by_key.get(entry) or KeyLimits(entry, self.buckets, ())
            self._subjects[key.id, key.team] = known
        return known

    def _limits_of_stored(self, key: Key) -> KeyLimits:
        """Return the limits of a key of the store, which exist from its first request on. Without memory for its counts, it is refused."""
        try:
            found = self._by_key[key.id] = KeyLimits(key.id, self.buckets, key.allowances)
        except BucketsFullError:
            raise Refusal("overloaded", "The limits of this key can't be counted at the moment.") from None
        return found

    def session_holders(self, limits: KeyLimits, session: str) -> Holders:
        """Return the holders of a request's session: of its key, and of its team."""
        found = []
        for owner, budget in limits.session_owners:
            holder, evicted = self.buckets.session(owner, budget, session, time())
            found.append(holder)
            self.count_evictions(limits.key, evicted)
        return tuple(found)

    def count_evictions(self, key: str, sessions: int) -> None:
        """Count sessions that were forgotten because the table of sessions is full."""
        if sessions:
            self._metrics.cells("session_evictions_total", key)[0] += sessions

    def count_admission(self, source: str) -> None:
        """Count a request that the store has admitted, by a ``call`` for this request or by a ``lease``."""
        self._metrics.cells("limits_store_admissions_total", source)[0] += 1

    def count_refusal(self, key: str, reason: str) -> None:
        """Count a refused request."""
        self._metrics.cells("limited_total", key, reason)[0] += 1

    def report_soft_budgets(self, states: Iterable[tuple[Holder, BudgetState]]) -> None:
        """Log each soft budget that is exceeded, once until it is within its limit again."""
        for holder, state in states:
            budget, known = state.budget, (holder.name, state.budget.name)
            if budget.soft and state.used <= budget.limit:
                self._exceeded.discard(known)
            elif budget.soft and known not in self._exceeded:
                if len(self._exceeded) >= _MOST_REPORTED:
                    self._exceeded.clear()  # subjects of tokens are many; some are reported again
                self._exceeded.add(known)
                _log.warning("the soft budget of %s is exceeded (%s)", limit_text(budget.name, budget.limit), holder.name)

    def tick(self) -> None:
        """Check the state of the store, and whether control wants to write. Called four times a second."""
        self.buckets.tick()
        if self.store is not None:
            self.store.tick()

    def stop_leases(self) -> None:
        """Return what is leased, and lease no more: the worker is about to exit."""
        if self.store is not None:
            self.store.leases.stop()

    def close(self) -> None:
        """Close the store."""
        if self.store is not None:
            self.store.close()
            self.store = None


def _reasons(key: Key) -> Iterator[str]:
    """Yield the reason of each refusal that is possible for a key."""
    for allowance in key.allowances:
        yield from (name for name in RATES if getattr(allowance.limits, name) is not None)
        if allowance.users is not None and allowance.users.missing == "refused":
            yield NO_USER
        if (session := allowance.limits.session) is not None:
            yield from (budget.name for budget in session_window(session, 0).budgets)
        yield from (budget.name for window in windows_of(allowance.limits) for budget in window.budgets if not budget.soft)


def shown_budgets(buckets: Buckets, allowances: Iterable[Allowance]) -> Iterator[tuple[str, BudgetState]]:
    """Yield each budget of keys and teams once, with the name of its holder, for an observer. They are counted in memory.

    End users have no such budgets, except those that several end users share.
    """
    at = moment(monotonic(), time())
    for name, limits in {each.holder: each.limits for some in allowances for each in fixed_holders(some)}.items():
        if windows_of(limits):
            yield from ((name, state) for state in buckets.shown_states(name, limits, at))
