"""The rate-limit headers of the response to a request with a reservation."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from time import monotonic, time

from gateway.limits.decision import Holder
from gateway.limits.headers import WARNING, budget_lines, header_lines, laid_out_lines
from gateway.limits.reservation import Reservation
from gateway.limits.windows import BudgetState, moment

_STATE = itemgetter(1)  # of a holder and the state of its budget


def reservation_lines(reservation: Reservation) -> bytes:
    """Return the headers, as lines, for the holders that counted the request."""
    result, limiter, layout = reservation.result, reservation.limiter, reservation.layout
    buckets, at = limiter.buckets, moment(monotonic(), time())
    if result is None and layout is not None and (laid_out := laid_out_lines(layout, buckets.cells, at, limiter.warn_at)) is not None:
        return laid_out
    if reservation.lease is not None:
        result = reservation.lease.current()
    lines = header_lines(buckets.full_times(reservation.shown_holders) if result is None else result.full_times, at.now)
    if not reservation.limits.has_budgets:
        return lines
    states: Sequence[tuple[Holder, BudgetState]]
    if result is not None:
        states = result.budgets
    else:
        states = [(holder, state) for holder in reservation.shown_holders for state in buckets.budget_states(holder, at)]
    if reservation.limits.has_soft_budgets:
        limiter.report_soft_budgets(states)
    of_budgets = budget_lines(map(_STATE, states), limiter.warn_at)
    if WARNING in of_budgets:
        holder, state = max(states, key=lambda each: each[1].share)
        reservation.nearest_limit = f"{int(state.share * 100)}% of {state.budget.name} of {holder.name.partition(' for ')[0]}"
    return lines + of_budgets
