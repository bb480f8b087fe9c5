"""The limits of the keys in one worker: which holders count a request, and where the counts are.

The rule: a request of a key without limits costs one attribute look-up.
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

_TOKEN_LIMITS = frozenset(COUNTED_LIMITS) - {"requests_per_minute", "concurrent"}

PART_FOR_SUBJECTS = 0.75
"""Part of the shared memory for the subjects of tokens. The rest stays free for configured holders."""


class KeyLimits:
    """The holders that count the requests of one key. ``is_known_on_arrival``: all amounts are known before the body is read."""

    __slots__ = (
        "_allowances",
        "_for_models",
        "counting_tokens",
        "for_all_models",
        "is_known_on_arrival",
        "key",
        "max_tokens_limits",
        "on_arrival",
    )

    def __init__(self, key: str, buckets: Buckets, allowances: tuple[Allowance, ...], part: float = 1.0) -> None:
        self.key = key
        holders = [(each, buckets.holder(each.holder, each.limits, part)) for each in allowances if _set_limits(each.limits)]
        self.for_all_models = tuple(holder for each, holder in holders if each.models is None)
        self.on_arrival = tuple((holder, ARRIVAL) for holder in self.for_all_models)
        self.counting_tokens = tuple(holder for holder in self.for_all_models if not _TOKEN_LIMITS.isdisjoint(_set_limits(holder.limits)))
        self.is_known_on_arrival = not self.counting_tokens and len(self.for_all_models) == len(holders)
        self._allowances = holders
        self._for_models: dict[str, tuple[Holders, Holders]] = {}
        self.max_tokens_limits = tuple(each for each in allowances if each.limits.max_tokens is not None)

    def for_model(self, model: Model) -> tuple[Holders, Holders]:
        """Return the additional holders for a model, and all holders together."""
        found = self._for_models.get(model.id)
        if found is None:
            own = tuple(holder for each, holder in self._allowances if each.models is not None and _covers(each, model))
            found = self._for_models[model.id] = own, (*self.for_all_models, *own)
        return found

    def max_tokens(self, model: Model) -> int | None:
        """Return the largest number of tokens that a response of this model may have."""
        return estimate.smallest(each.limits.max_tokens for each in self.max_tokens_limits if _covers(each, model))


def _set_limits(limits: Limits) -> tuple[str, ...]:
    """Return the names of the counted limits that are set."""
    return tuple(name for name in COUNTED_LIMITS if getattr(limits, name) is not None)


def _covers(allowance: Allowance, model: Model) -> bool:
    return allowance.models is None or model.is_in(allowance.models)


class Limiter:
    """The limits of all keys of a worker. ``buckets`` outlive it; the store follows the configuration.

    ``on_store`` is called as ``on_change`` of ``RedisStore``.
    """

    def __init__(self, metrics: WorkerMetrics, buckets: Buckets, on_store: Callable[[str | None], None]) -> None:
        self.buckets = buckets
        self._on_store = on_store
        self.store: RedisStore | None = None
        self._metrics = metrics
        self._name = token_hex(8)
        self._by_key: dict[str, KeyLimits] = {}
        self._subjects: dict[tuple[str, str | None], KeyLimits] = {}  # of tokens, by subject and team

    def apply_snapshot(self, snapshot: Snapshot) -> None:
        """Use the limits of this snapshot from now on. Usage so far stays counted."""
        self._by_key = {key.id: KeyLimits(key.id, self.buckets, key.allowances) for key in snapshot.keys if key.allowances}
        for key in snapshot.keys:
            for reason in _reasons(key):
                self._metrics.cells("limited_total", key.id, reason)
        self._subjects = {}
        settings = snapshot.limits_store
        if self.store is not None and settings is not None and self.store.settings.counts == settings.counts:
            self.store.settings = settings  # its reservations and unsent settlements stay
            return
        self.close()
        if settings is not None and snapshot.uses_store:
            self.store = RedisStore(settings, self._name, self._on_store)

    def reservation(self, key: Key, identity: str) -> Reservation:
        """Return the reservation for a request, by its id, of a key with limits."""
        limits = self._by_key[key.id] if key.entry is None else self._limits_of_subject(key, key.entry)
        return Reservation(self, limits, identity, moment(monotonic(), time()), limits.for_all_models)

    def _limits_of_subject(self, key: Key, entry: str) -> KeyLimits:
        """Return the holders of a token's subject, which exist from its first request on.

        If the shared memory is full, the subject counts as its configured entry.
        """
        known = self._subjects.get((key.id, key.team))
        if known is None:
            try:
                known = KeyLimits(entry, self.buckets, key.allowances, PART_FOR_SUBJECTS)
            except BucketsFullError:
                known = self._by_key.get(entry) or KeyLimits(entry, self.buckets, ())
            self._subjects[key.id, key.team] = known
        return known

    def count_refusal(self, key: str, reason: str) -> None:
        """Count a refused request."""
        self._metrics.cells("limited_total", key, reason)[0] += 1

    def tick(self) -> None:
        """Check the store. Called four times a second."""
        if self.store is not None:
            self.store.tick()

    def close(self) -> None:
        """Close the store."""
        if self.store is not None:
            self.store.close()
            self.store = None


def _reasons(key: Key) -> Iterator[str]:
    for allowance in key.allowances:
        yield from _set_limits(allowance.limits)
