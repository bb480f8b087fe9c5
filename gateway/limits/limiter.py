"""The limits of a worker's keys: who counts for which holders, and where the counts are.

The rule: what a request of a key without limits pays is one look at the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from secrets import token_hex
from time import monotonic, time

from gateway.limits import estimate
from gateway.limits.buckets import Holder, Meters, MetersFullError
from gateway.limits.redis_store import REASONS, Store
from gateway.limits.reservation import ARRIVAL, Permit
from gateway.limits.rules import moment
from gateway.snapshot.snapshot import Allowance, Key, Limits, Model, Snapshot
from gateway.telemetry.metrics import WorkerMetrics

Holders = tuple[Holder, ...]

_WEIGHING = frozenset(REASONS) - {"requests_per_minute", "concurrent"}

_FOR_SUBJECTS = 0.75
"""The part of the meters' room that tokens' subjects may fill; what the configuration names, later too, always has some."""


class Counted:
    """Whom the requests of one key, of this id, count for. ``is_early``: all of it is known before the body is."""

    __slots__ = ("_allowances", "_of_models", "always", "arriving", "caps", "is_early", "key", "weighing")

    def __init__(self, key: str, meters: Meters, allowances: tuple[Allowance, ...], part: float = 1.0) -> None:
        self.key = key
        holders = [(each, meters.holder(each.holder, each.limits, part)) for each in allowances if _named(each.limits)]
        self.always = tuple(holder for each, holder in holders if each.models is None)
        self.arriving = tuple((holder, ARRIVAL) for holder in self.always)
        self.weighing = tuple(holder for holder in self.always if not _WEIGHING.isdisjoint(_named(holder.limits)))
        self.is_early = not self.weighing and len(self.always) == len(holders)
        self._allowances = holders
        self._of_models: dict[str, tuple[Holders, Holders]] = {}
        self.caps = tuple(each for each in allowances if each.limits.max_tokens is not None)

    def of_model(self, model: Model) -> tuple[Holders, Holders]:
        """Who counts for this model beside those who always do, and all together."""
        found = self._of_models.get(model.id)
        if found is None:
            own = tuple(holder for each, holder in self._allowances if each.models is not None and _covers(each, model))
            found = self._of_models[model.id] = own, (*self.always, *own)
        return found

    def max_tokens(self, model: Model) -> int | None:
        """How many tokens an answer of this model may have at most."""
        return estimate.smallest(each.limits.max_tokens for each in self.caps if _covers(each, model))


def _named(limits: Limits) -> tuple[str, ...]:
    """The limits that are set, of those that are counted."""
    return tuple(name for name in REASONS if getattr(limits, name) is not None)


def _covers(allowance: Allowance, model: Model) -> bool:
    return allowance.models is None or model.is_in(allowance.models)


class Limiter:
    """What a worker asks about limits. ``meters`` outlive it; the store is opened and closed with the configuration. ``on_store`` is called
    as ``Store`` has it."""

    def __init__(self, metrics: WorkerMetrics, meters: Meters, on_store: Callable[[str | None], None]) -> None:
        self.meters = meters
        self._on_store = on_store
        self.store: Store | None = None
        self._metrics = metrics
        self._name = token_hex(8)
        self._counted: dict[str, Counted] = {}
        self._subjects: dict[tuple[str, str | None], Counted] = {}  # of tokens, in the team that each is in

    def take(self, snapshot: Snapshot) -> None:
        """Serve by this snapshot from now on. What has been used stays used."""
        self._counted = {key.id: Counted(key.id, self.meters, key.allowances) for key in snapshot.keys if key.allowances}
        for key in snapshot.keys:
            for reason in _reasons(key):
                self._metrics.cells("limited_total", key.id, reason)
        self._subjects = {}
        place = snapshot.limits_store
        if self.store is not None and place is not None and self.store.place.counts == place.counts:
            self.store.place = place  # what it holds for requests, and owes, goes on, whoever has limits now
            return
        self.close()
        if place is not None and snapshot.uses_store:
            self.store = Store(place, self._name, self._on_store)

    def permit(self, key: Key, identity: str) -> Permit:
        """For one request, known by its id, of a key that has limits."""
        counted = self._counted[key.id] if key.entry is None else self._of_subject(key, key.entry)
        return Permit(self, counted, identity, moment(monotonic(), time()), counted.always)

    def _of_subject(self, key: Key, entry: str) -> Counted:
        """A token's subject is counted from its first request on: for itself as long as there is room, and with its entry otherwise."""
        known = self._subjects.get((key.id, key.team))
        if known is None:
            try:
                known = Counted(entry, self.meters, key.allowances, _FOR_SUBJECTS)
            except MetersFullError:
                known = self._counted.get(entry) or Counted(entry, self.meters, ())
            self._subjects[key.id, key.team] = known
        return known

    def count(self, key: str, reason: str) -> None:
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
