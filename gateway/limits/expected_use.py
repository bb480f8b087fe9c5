"""Estimate what a request will use of its key's limits, and limit its response to that.

The rule: this is done before the body is serialized, because it sets the limit on the response in the document that is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from gateway.api.errors import Refusal
from gateway.api.media_urls import InlineMedia
from gateway.limits.estimate import HardBudgets, TokenEstimate, apply_max_tokens, bound_form, bound_response, estimate
from gateway.limits.reservation import Reservation
from gateway.limits.sessions import session_of
from gateway.limits.shared_counts import BucketsFullError
from gateway.snapshot.snapshot import Model


def estimate_request(
    reservation: Reservation, document: dict[str, Any], path: str, size: int, media: InlineMedia, model: Model, user: object = None
) -> None:
    """Estimate what a request with a JSON body will use, and apply the limit on its response. Raises Refusal.

    ``path``: at the server. ``size``, ``media`` and the field ``user``: of the body as the client sent it.
    """
    limits = reservation.limits
    reservation.model = model
    if limits.max_tokens_limits:
        apply_max_tokens(document, path, limits.max_tokens(model))
    if limits.reads_body:
        _find_holders(reservation, document, user)
        limits = reservation.limits
    estimated = estimate(document, path, size, media)
    if limits.has_hard_budgets and (budgets := _hard_budgets(reservation, model)) is not None:
        # A fallback reserves no more for its response than the previous model did.
        before = reservation.estimated
        most = before.completion // before.choices if reservation.has_reserved_tokens else None
        estimated = bound_response(document, path, estimated, budgets, reservation.limiter.max_model_len.get(model.id), most)
    reservation.estimated = estimated


def estimate_form(reservation: Reservation, model: Model) -> int | None:
    """Estimate the usage of a form, which is unknown. Returns the most tokens that its response may have. Raises Refusal."""
    estimated = TokenEstimate(prompt=1)
    reservation.model, reservation.estimated = model, estimated
    if reservation.limits.reads_body:
        _find_holders(reservation, {}, None)
    most, budgets = reservation.limits.max_tokens(model), _hard_budgets(reservation, model)
    context = reservation.limiter.max_model_len.get(model.id)
    if budgets is None or context is None:
        return most
    reservation.estimated, fits = bound_form(estimated, budgets, context)
    return fits if most is None else min(most, fits)


def _hard_budgets(reservation: Reservation, model: Model) -> HardBudgets | None:
    """Return the hard budgets that count requests for a model; None without one."""
    limiter, holders = reservation.limiter, reservation.holders(model)
    if limiter.store is None:
        left, whole = limiter.buckets.hard_capacity(holders, reservation.arrived)
    else:
        left, whole = limiter.reported_capacity(holders)
    has_budget = whole.tokens < inf or (whole.cost < inf and model.price is not None)
    return HardBudgets(left, whole, model.price) if has_budget else None


def _find_holders(reservation: Reservation, document: Mapping[str, Any], user: object) -> None:
    """Find the counts of the end user and of the session that the body names, once. Raises Refusal."""
    if (end_user := reservation.limits.end_user) is not None and end_user.is_awaited:
        reservation.add_user(user)
    if not reservation.limits.session_owners:
        return
    name = session_of(reservation.fields, document)
    if name is None or reservation.sessions:
        return
    try:
        reservation.sessions = reservation.limiter.session_holders(reservation.limits, name)
    except BucketsFullError:
        raise Refusal("overloaded", "The budgets of sessions can't be counted at the moment.") from None
