"""Admit requests from a lease: amounts that one worker has reserved in the limits store for its requests of the next second. Pure.

The rules: a lease admits only what was reserved before, so all gateways together never admit more than the limits. A request counts at the
time of its lease, at most ``DURATION`` seconds before it arrived. Each period of a budget counts the requests that arrived in it: a lease
ends with the period in which it was reserved. A lease that has ended admits nothing. It returns what no request holds, and each open
request has a separate reservation afterwards.

A lease is as large as the recent demand, but takes at most one of ``PARTS`` equal parts of what is left of a limit. If that is not enough
for ``LEAST`` requests, there is no lease, and the store decides about each request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import NamedTuple

import msgspec

from gateway.limits.decision import Amounts, Holder, bucket_state
from gateway.limits.states import StoreResult
from gateway.limits.windows import BudgetState, seconds_left_in_period

DURATION = 1.0
"""Seconds for which a lease admits requests."""
LEAST = 16
"""Requests of a lease, and requests in ``DURATION`` seconds from which on there is a lease."""
MOST = 1000
"""Requests of a lease. The store copies its reservation for those that are still open at its end, in one script."""
PARTS = 16
"""A lease takes at most one of these parts of what is left of a limit."""
_GROWTH = 1.5  # a lease is larger than the demand, so that it rarely ends early
_FASTEST = 4.0  # most times that a lease grows because the last one ended early


class Ended(NamedTuple):
    """The settlement of a lease: what is no longer reserved, what was used of it, and the open requests, which keep the rest."""

    reserved: Amounts
    used: Amounts
    open_requests: tuple[str, ...]


class Lease(msgspec.Struct, eq=False):
    """Amounts that were reserved from each of the holders. ``expires`` is monotonic. ``known`` includes these amounts as used.

    ``requests``, ``tokens`` and ``cost`` are what is left, negative if requests have used more than they had reserved.
    """

    identity: str
    holders: tuple[Holder, ...]
    granted: Amounts
    began: float
    expires: float
    known: StoreResult
    requests: int = 0
    tokens: int = 0
    cost: int = 0
    _smallest: tuple[int, int, int] = (0, 0, 0)
    _used_requests: int = 0
    _used_tokens: int = 0
    _used_cost: int = 0
    _open: dict[str, Amounts] = {}

    def __post_init__(self) -> None:
        granted = self.granted
        self._smallest = self.requests, self.tokens, self.cost = granted.requests, granted.tokens, granted.cost

    def admit(self, request: str, amounts: Amounts) -> bool:
        """Reserve amounts for a request by its id. Returns whether they are left."""
        requests, tokens, cost = self.requests - amounts.requests, self.tokens - amounts.tokens, self.cost - amounts.cost
        if requests < 0 or tokens < 0 or cost < 0:
            return False
        self.requests, self.tokens, self.cost = requests, tokens, cost
        smallest = self._smallest
        if requests < smallest[0] or tokens < smallest[1] or cost < smallest[2]:
            self._smallest = min(requests, smallest[0]), min(tokens, smallest[1]), min(cost, smallest[2])
        self._open[request] = amounts
        return True

    def settle(self, request: str, used: Amounts) -> bool:
        """Replace what a request has reserved by what it has used. Returns False if the request holds nothing of this lease."""
        reserved = self._open.pop(request, None)
        if reserved is None:
            return False
        self.requests += reserved.requests - used.requests
        self.tokens += reserved.tokens - used.tokens
        self.cost += reserved.cost - used.cost
        self._used_requests += used.requests
        self._used_tokens += used.tokens
        self._used_cost += used.cost
        return True

    @property
    def is_overdrawn(self) -> bool:
        """Whether requests have used more than the lease has."""
        return self.tokens < 0 or self.cost < 0

    def end(self) -> Ended:
        """End the lease and return what is to be settled."""
        used = Amounts(self._used_requests, 0, self._used_tokens, self._used_cost)
        reserved = Amounts(self.requests + used.requests, 0, self.tokens + used.tokens, self.cost + used.cost)
        open_requests, self._open = tuple(self._open), {}
        self.expires = -1.0
        return Ended(reserved, used, open_requests)

    @property
    def demand(self) -> Amounts:
        """The most that requests have taken from the lease at a time."""
        requests, tokens, cost = self._smallest
        granted = self.granted
        return Amounts(
            granted.requests - min(requests, self.requests),
            0,
            granted.tokens - min(tokens, self.tokens),
            granted.cost - min(cost, self.cost),
        )

    def is_small(self, amounts: Amounts) -> bool:
        """Check whether a request is small for this lease: if it does not fit, the lease is nearly used up."""
        granted = self.granted
        return 4 * amounts.tokens <= granted.tokens and 4 * amounts.cost <= granted.cost

    def current(self) -> StoreResult:
        """Return what is known now: what is left of the lease is not used."""
        requests, tokens, cost = max(self.requests, 0), max(self.tokens, 0), max(self.cost, 0)
        full_times = [
            (limits, requests_full - requests * limits.request_seconds, tokens_full - tokens * limits.token_seconds)
            for limits, requests_full, tokens_full in self.known.full_times
        ]
        budgets = [(holder, _with_less(state, cost if state.budget.is_cost else tokens)) for holder, state in self.known.budgets]
        return StoreResult(None, full_times, budgets)


def _with_less(state: BudgetState, amount: int) -> BudgetState:
    return BudgetState(state.budget, state.window, max(state.used - amount, 0.0), state.reset)


def can_lease(holders: Sequence[Holder]) -> bool:
    """Check whether requests of these holders may be admitted from a lease: no limit counts requests in flight or sessions."""
    return bool(holders) and all(each.limits.concurrent is None and not any(window.number for window in each.windows) for each in holders)


def next_amounts(demand: Amounts, seconds: float, known: StoreResult, now: float) -> Amounts | None:
    """Return the amounts of the next lease after a demand in some seconds; None if it would be too small.

    ``known`` is what the store has reported at this moment.
    """
    if demand.requests < LEAST:
        return None
    scale = min(_GROWTH * min(DURATION / max(seconds, DURATION / _FASTEST), _FASTEST), MOST / demand.requests)
    left = _left(known, now)
    requests, tokens, cost = (
        int(min(ceil(wanted * scale), part // PARTS))
        for wanted, part in zip((demand.requests, demand.tokens, demand.cost), left, strict=True)
    )
    enough = requests >= LEAST and tokens * demand.requests >= LEAST * demand.tokens and cost * demand.requests >= LEAST * demand.cost
    return Amounts(requests, 0, tokens, cost) if enough else None


_UNLIMITED = float(1 << 62)


def _left(known: StoreResult, now: float) -> tuple[float, float, float]:
    """Return the requests, the tokens and the cost that are left of the tightest limit of each kind."""
    requests, tokens, cost = [float(MOST * PARTS)], [_UNLIMITED], [_UNLIMITED]
    for limits, requests_full, tokens_full in known.full_times:
        if limits.requests_per_minute is not None:
            requests.append(bucket_state(limits.requests_per_minute, requests_full, now).remaining)
        if limits.tokens_per_minute is not None:
            tokens.append(bucket_state(limits.tokens_per_minute, tokens_full, now).remaining)
    for _, state in known.budgets:
        if not state.budget.soft:
            (cost if state.budget.is_cost else tokens).append(state.remaining)
    return min(requests), min(tokens), min(cost)


def seconds_of_lease(holders: Iterable[Holder], wall: float) -> float:
    """Return for how many seconds a lease admits that was reserved at ``wall`` seconds since the epoch, by the store's clock."""
    periods = (seconds_left_in_period(window, wall) for holder in holders for window in holder.windows)
    return min([DURATION, *periods])
