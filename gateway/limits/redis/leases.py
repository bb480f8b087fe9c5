"""Keep this worker's leases in the limits store: reserve them, and return them when they end.

The rule: a lease ends after a second, or earlier: when it is used up, when a period of a budget ends, before a request of one of its
holders is refused, at a reload or a drain, or when the connection to the store is lost. It is settled like the reservation of a request:
the settlement is sent until the store acknowledges it, and counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic

from gateway.limits.decision import Amounts, Holder
from gateway.limits.lease import DURATION, LEAST, Lease, next_amounts, seconds_of_lease
from gateway.limits.states import StoreResult

OnResult = Callable[[StoreResult | None, float, float], None]
"""Called with a result, None if nothing was reserved, the ``monotonic`` time of the command, and the store's time, since the epoch."""
_RETRY = DURATION / 4
"""Seconds after a lease was too small or refused until the next one is tried."""


@dataclass(eq=False, slots=True)
class Leases:
    """The open leases of a worker. ``reserve`` and ``settle``: those of the store."""

    _reserve: Callable[[str, Sequence[tuple[Holder, Amounts]], OnResult], None]
    _settle: Callable[[str, Sequence[tuple[Holder, Amounts]], Amounts, Sequence[str]], None]
    _names: Iterator[str]
    _open: dict[str, Lease] = field(default_factory=dict)
    _by_holder: dict[str, dict[str, Lease]] = field(default_factory=dict)
    _stopped: bool = False

    def request(self, holders: tuple[Holder, ...], amounts: Amounts, on_lease: Callable[[Lease | None], None]) -> None:
        """Request a lease. ``on_lease`` is called with it, or with None if it was not reserved."""
        identity, wanted = next(self._names), [(holder, amounts) for holder in holders]

        def on_result(result: StoreResult | None, sent: float, wall: float) -> None:
            if result is None:
                on_lease(None)
                return
            lease = Lease(identity, holders, amounts, sent, sent + seconds_of_lease(holders, wall), result)
            self._open[identity] = lease
            for holder in holders:
                self._by_holder.setdefault(holder.name, {})[identity] = lease
            if self._stopped:
                self.end(lease)
            on_lease(lease)

        if self._stopped:
            on_lease(None)
        else:
            self._reserve(identity, wanted, on_result)

    def end(self, lease: Lease) -> None:
        """End a lease and return what is left of it. A second call does nothing."""
        if self._open.pop(lease.identity, None) is None:
            return
        for holder in lease.holders:
            others = self._by_holder[holder.name]
            del others[lease.identity]
            if not others:
                del self._by_holder[holder.name]
        ended = lease.end()
        self._settle(lease.identity, [(holder, ended.reserved) for holder in lease.holders], ended.used, ended.open_requests)

    def end_those_of(self, holders: Iterable[Holder]) -> bool:
        """End the leases of any of these holders. Returns whether there were any."""
        found = {identity: lease for holder in holders for identity, lease in self._by_holder.get(holder.name, {}).items()}
        for lease in found.values():
            self.end(lease)
        return bool(found)

    def end_all(self) -> None:
        """End all leases."""
        for lease in tuple(self._open.values()):
            self.end(lease)

    def stop(self) -> None:
        """End all leases and reserve no more: this worker is about to exit."""
        self._stopped = True
        self.end_all()

    def tick(self, now: float) -> None:
        """End the leases that have expired. Called four times a second."""
        for lease in tuple(self._open.values()):
            if now >= lease.expires:
                self.end(lease)


class LeasedHolders:
    """Holders that count the same requests of a key, and the lease of this worker from all of them.

    Each request that the store decides is counted as demand, until there is a lease.
    """

    __slots__ = ("_counted", "_holders", "_is_requested", "_lease", "_leases", "_not_before", "_since")

    def __init__(self, leases: Leases, holders: tuple[Holder, ...]) -> None:
        self._leases = leases
        self._holders = holders
        self._lease: Lease | None = None
        self._counted = Amounts()
        self._since = self._not_before = 0.0
        self._is_requested = False

    def admit(self, request: str, amounts: Amounts, now: float) -> Lease | None:
        """Admit a request from the lease. Returns the lease; None if the store has to decide."""
        if (lease := self._lease) is None:
            return None
        if now < lease.expires:
            if lease.admit(request, amounts):
                return lease
            if not lease.is_small(amounts):
                return None
        self._counted, self._since, self._lease = lease.demand, lease.began, None
        self._leases.end(lease)
        return None

    def count_call(self, amounts: Amounts, known: StoreResult, now: float) -> None:
        """Count a request that the store has admitted, and request a lease if there is enough demand. ``known`` is from its reply."""
        if self._lease is not None or self._is_requested:
            return
        counted = self._counted
        if now - self._since > 2 * DURATION:
            self._since, counted = now, Amounts()
        self._counted = Amounts(counted.requests + amounts.requests, 0, counted.tokens + amounts.tokens, counted.cost + amounts.cost)
        if self._counted.requests < LEAST or now < self._not_before:
            return
        if (wanted := next_amounts(self._counted, now - self._since, known, now)) is None:
            self._not_before = now + _RETRY
        else:
            self._is_requested = True
            self._leases.request(self._holders, wanted, self._use)

    def _use(self, lease: Lease | None) -> None:
        self._is_requested, self._lease = False, lease
        self._counted, self._since = Amounts(), 0.0
        if lease is None:
            self._not_before = monotonic() + _RETRY
