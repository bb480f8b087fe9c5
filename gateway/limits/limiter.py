"""The limits of a worker's keys: who counts for which holders, and where the counts are.

The rule: what a request of a key without limits pays is one look at the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from secrets import token_hex
from time import monotonic, time

from gateway.limits import estimate
from gateway.limits.buckets import Buckets, BucketsFullError, Holder
from gateway.limits.redis_store import COUNTED_LIMITS, RedisStore
from gateway.limits.reservation import ARRIVAL, Reservation
from gateway.limits.rules import moment
from gateway.snapshot.snapshot import Allowance, Key, Limits, Model, Snapshot
from gateway.telemetry.metrics import WorkerMetrics

Holders = tuple[Holder, ...]

_WEIGHING = frozenset(COUNTED_LIMITS) - {"requests_per_minute", "concurrent"}

_FOR_SUBJECTS = 0.75
"""The part of the meters' room that tokens' subjects may fill; what the configuration names, later too, always has some."""


class KeyLimits:
    """Whom the requests of one key, of this id, count for. ``is_early``: all of it is known before the body is."""

    __slots__ = ("_allowances", "_for_models", "caps", "counting_tokens", "for_all_models", "is_known_on_arrival", "key", "on_arrival")

    def __init__(self, key: str, meters: Buckets, allowances: tuple[Allowance, ...], part: float = 1.0) -> None:
        self.key = key
        holders = [(each, meters.holder(each.holder, each.limits, part)) for each in allowances if _named(each.limits)]
        self.for_all_models = tuple(holder for each, holder in holders if each.models is None)
        self.on_arrival = tuple((holder, ARRIVAL) for holder in self.for_all_models)
        self.counting_tokens = tuple(holder for holder in self.for_all_models if not _WEIGHING.isdisjoint(_named(holder.limits)))
        self.is_known_on_arrival = not self.counting_tokens and len(self.for_all_models) == len(holders)
        self._allowances = holders
        self._for_models: dict[str, tuple[Holders, Holders]] = {}
        self.caps = tuple(each for each in allowances if each.limits.max_tokens is not None)

    def for_model(self, model: Model) -> tuple[Holders, Holders]:
        """Who counts for this model beside those who always do, and all together."""
        found = self._for_models.get(model.id)
        if found is None:
            own = tuple(holder for each, holder in self._allowances if each.models is not None and _covers(each, model))
            found = self._for_models[model.id] = own, (*self.for_all_models, *own)
        return found

    def max_tokens(self, model: Model) -> int | None:
        """How many tokens an answer of this model may have at most."""
        return estimate.smallest(each.limits.max_tokens for each in self.caps if _covers(each, model))


def _named(limits: Limits) -> tuple[str, ...]:
    """The limits that are set, of those that are counted."""
    return tuple(name for name in COUNTED_LIMITS if getattr(limits, name) is not None)


def _covers(allowance: Allowance, model: Model) -> bool:
    return allowance.models is None or model.is_in(allowance.models)


class Limiter:
    """What a worker asks about limits. ``meters`` outlive it; the store is opened and closed with the configuration. ``on_store`` is called
    as ``RedisStore`` has it."""

    def __init__(self, metrics: WorkerMetrics, meters: Buckets, on_store: Callable[[str | None], None]) -> None:
        self.meters = meters
        self._on_store = on_store
        self.store: RedisStore | None = None
        self._metrics = metrics
        self._name = token_hex(8)
        self._by_key: dict[str, KeyLimits] = {}
        self._subjects: dict[tuple[str, str | None], KeyLimits] = {}  # of tokens, in the team that each is in

    def apply_snapshot(self, snapshot: Snapshot) -> None:
        """Serve by this snapshot from now on. What has been used stays used."""
        self._by_key = {key.id: KeyLimits(key.id, self.meters, key.allowances) for key in snapshot.keys if key.allowances}
        for key in snapshot.keys:
            for reason in _reasons(key):
                self._metrics.cells("limited_total", key.id, reason)
        self._subjects = {}
        place = snapshot.limits_store
        if self.store is not None and place is not None and self.store.settings.counts == place.counts:
            self.store.settings = place  # what it holds for requests, and owes, goes on, whoever has limits now
            return
        self.close()
        if place is not None and snapshot.uses_store:
            self.store = RedisStore(place, self._name, self._on_store)

    def reservation(self, key: Key, identity: str) -> Reservation:
        """For one request, known by its id, of a key that has limits."""
        counted = self._by_key[key.id] if key.entry is None else self._limits_of_subject(key, key.entry)
        return Reservation(self, counted, identity, moment(monotonic(), time()), counted.for_all_models)

    def _limits_of_subject(self, key: Key, entry: str) -> KeyLimits:
        """A token's subject is counted from its first request on: for itself as long as there is room, and with its entry otherwise."""
        known = self._subjects.get((key.id, key.team))
        if known is None:
            try:
                known = KeyLimits(entry, self.meters, key.allowances, _FOR_SUBJECTS)
            except BucketsFullError:
                known = self._by_key.get(entry) or KeyLimits(entry, self.meters, ())
            self._subjects[key.id, key.team] = known
        return known

    def count_refusal(self, key: str, reason: str) -> None:
        """Count a request that was refused."""
        self._metrics.cells("limited_total", key, reason)[0] += 1

    def tick(self) -> None:
        """What is done a few times a second."""
        if self.store is not None:
            self.store.tick()

    def close(self) -> None:
        """Leave the store."""
        if self.store is not None:
            self.store.close()
            self.store = None


def _reasons(key: Key) -> Iterator[str]:
    for allowance in key.allowances:
        yield from _named(allowance.limits)
