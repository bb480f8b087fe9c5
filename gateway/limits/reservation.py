"""Reserve what one request may use of its key's limits, and settle it when the request is finished.

The rules: amounts that follow from the headers are reserved before the body is read, the other amounts when the model and the size are
known. Every reservation, in this gateway's memory or in the store, is settled once, before the client gets the end of its response. So
sequential requests of a client never block each other, whichever worker gets the next one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from itertools import repeat
from math import inf
from operator import itemgetter
from time import monotonic, time
from typing import Any

import msgspec

from gateway.api.errors import Refusal
from gateway.api.media_urls import InlineMedia
from gateway.api.settlement import Settlement
from gateway.api.usage import Usage
from gateway.limits import estimate, headers
from gateway.limits.buckets import BucketsFullError
from gateway.limits.estimate import HardBudgets, TokenEstimate
from gateway.limits.headers import Layout
from gateway.limits.lease import Lease
from gateway.limits.limiter import KeyLimits, Limiter
from gateway.limits.messages import refusal
from gateway.limits.redis.leases import LeasedHolders
from gateway.limits.redis.result import StoreResult
from gateway.limits.redis.store import StoreUnavailableError
from gateway.limits.rules import Amounts, Holder
from gateway.limits.sessions import session_of
from gateway.limits.windows import BudgetState, ExceededLimit, Moment, moment
from gateway.snapshot.snapshot import Key, Model

_STATE = itemgetter(1)  # of a holder and the state of its budget
_NOTHING, _UNWEIGHED, _NO_TOKENS = Amounts(), TokenEstimate(), Usage()


class Reservation(msgspec.Struct, eq=False):
    """The reservation of one request of a key with limits. It counts for the day on which the request arrived."""

    _limiter: Limiter
    _limits: KeyLimits
    _request_id: str
    _headers: Mapping[bytes, bytes]
    _arrived: Moment
    _shown_holders: Sequence[Holder]
    _layout: Layout | None
    _model: Model | None = None
    _estimate: TokenEstimate = _UNWEIGHED
    _has_reserved_tokens: bool = False
    _reserved: Sequence[tuple[Holder, Amounts]] = ()
    _bucket_ends: dict[int, float] = {}
    _result: StoreResult | None = None
    _lease: Lease | None = None
    _sessions: Sequence[Holder] = ()

    def reserve_request(self) -> Awaitable[None] | None:
        """Reserve a request and a concurrent slot before the body is read. Raises Refusal.

        Returns what is left to be awaited, None in memory: a coroutine costs as much as the reservation.
        """
        limits, store = self._limits, self._limiter.store
        if store is None:
            self._reserve_in_memory(limits.on_arrival, self._arrived)
        elif limits.is_known_on_arrival:
            return self._reserve_from_lease(limits.on_arrival, limits.leased(store, None))
        else:
            self._apply_result(store.cached_refusal(limits.for_all_models, monotonic()))
        return None

    def estimate_usage(self, document: dict[str, Any], path: str, size: int, media: InlineMedia, model: Model) -> None:
        """Estimate what a request will use, and apply the limit on its response. Raises Refusal.

        ``size`` and ``media``: of the body as the client sent it.
        """
        self._model = model
        if self._limits.max_tokens_limits:
            estimate.apply_max_tokens(document, path, self._limits.max_tokens(model))
        if self._limits.session_owners:
            self._find_session(document)
        before, self._estimate = self._estimate, estimate.estimate(document, path, size, media)
        if self._limits.has_hard_budgets:
            self._bound_response(document, path, model, before)

    def estimate_form(self, model: Model) -> int | None:
        """Estimate the usage of a form, which is unknown. Returns the most tokens that its response may have."""
        self._model, self._estimate = model, TokenEstimate(prompt=1)
        if self._limits.session_owners:
            self._find_session({})
        most, budgets, context = self._limits.max_tokens(model), self._hard_budgets(model), self._limiter.max_model_len.get(model.id)
        if budgets is None or context is None:
            return most
        self._estimate, fits = estimate.bound_form(self._estimate, budgets, context)
        return fits if most is None else min(most, fits)

    def _bound_response(self, document: dict[str, Any], path: str, model: Model, before: TokenEstimate) -> None:
        """Limit the response to what the request reserves of hard budgets. ``before``: the estimate for the previous model."""
        budgets = self._hard_budgets(model)
        if budgets is not None:
            most = before.completion // before.choices if self._has_reserved_tokens else None
            context = self._limiter.max_model_len.get(model.id)
            self._estimate = estimate.bound_response(document, path, self._estimate, budgets, context, most)

    def holders(self, model: Model) -> Sequence[Holder]:
        """Return all holders that count the request for a model, its sessions included."""
        return (*self._limits.for_model(model)[1], *self._sessions)

    def _hard_budgets(self, model: Model) -> HardBudgets | None:
        """Return the hard budgets that count requests for a model; None without one."""
        limiter = self._limiter
        holders = self.holders(model)
        left, whole = limiter.buckets.hard_capacity(holders, self._arrived) if limiter.store is None else limiter.reported_capacity(holders)
        has_budget = whole.tokens < inf or (whole.cost < inf and model.price is not None)
        return HardBudgets(left, whole, model.price) if has_budget else None

    def _find_session(self, document: Mapping[str, Any]) -> None:
        """Find the counts of the request's session, once. Raises Refusal."""
        name = session_of(self._headers, document)
        if name is None or self._sessions:
            return
        try:
            self._sessions = self._limiter.session_holders(self._limits, name)
        except BucketsFullError:
            raise Refusal("overloaded", "The budgets of sessions can't be counted at the moment.") from None

    def reserve_tokens(self) -> Awaitable[None] | None:
        """Reserve the tokens, and the amounts for the model's own limits. Called again for each fallback model. Raises Refusal.

        Returns what is left to be awaited, as ``reserve_request`` does.
        """
        limits, model = self._limits, self._model
        assert model is not None
        if limits.is_known_on_arrival:
            return None
        for_model, holders, layout = limits.for_model(model)
        if self._sessions:
            layout = None
            for_model, holders = (*for_model, *self._sessions), (*holders, *self._sessions)
        all_amounts = estimate.reserved_amounts(self._estimate, model.price)
        if self._has_reserved_tokens:
            return self._change_model(for_model, holders, all_amounts)
        self._has_reserved_tokens = True
        reserved = list(zip(holders, repeat(all_amounts)))
        store = self._limiter.store
        if store is not None and not self._reserved:
            return self._reserve_from_lease(reserved, None if self._sessions else limits.leased(store, model))
        self._shown_holders, self._layout, tokens = holders, layout, Amounts(0, 0, all_amounts.tokens, all_amounts.cost)
        if self._reserved:
            more = list(zip(limits.counting_tokens, repeat(tokens)))
            if for_model:
                more += zip(for_model, repeat(all_amounts))
        else:
            more = reserved  # nothing was reserved on arrival: all limits are for models, or there was a store
        self._reserve_in_memory(more, self._now())
        self._reserved = reserved
        return None

    async def _change_model(self, for_model: Sequence[Holder], remaining: Sequence[Holder], all_amounts: Amounts) -> None:
        """Release what only the previous model counted, and reserve what this model counts."""
        lease, self._lease = self._lease, None
        if lease is not None and self._limiter.store is not None:
            self._limiter.store.leases.end(lease)  # from here on the request has a separate reservation
        released = [(holder, amounts) for holder, amounts in self._reserved if holder not in remaining]
        retained = self._reserved = [(holder, amounts) for holder, amounts in self._reserved if holder in remaining]
        self._settle(released, _NOTHING)
        already = {holder for holder, _ in retained}
        wanted = [(holder, all_amounts) for holder in for_model if holder not in already]
        if self._result is None:
            self._shown_holders, self._layout = remaining, None
            self._reserve_in_memory(wanted, self._now())
            self._reserved = [*retained, *wanted]
        else:
            await self._reserve_in_store(wanted)

    def _now(self) -> Moment:
        """Return the current time, but the day on which the request arrived."""
        then = self._arrived
        return Moment(monotonic(), then.wall, then.periods, then.period_ends)

    def _reserve_in_memory(self, wanted: Sequence[tuple[Holder, Amounts]], at: Moment) -> None:
        """Reserve in this gateway's memory. Raises Refusal."""
        exceeded = self._limiter.buckets.reserve(wanted, at, self._bucket_ends)
        if exceeded is not None:
            raise self._refusal(*exceeded)
        self._reserved = wanted

    def _reserve_from_lease(self, wanted: Sequence[tuple[Holder, Amounts]], leased: LeasedHolders | None) -> Awaitable[None] | None:
        """Reserve from the lease of the holders and return None, or return what is left to be awaited."""
        if leased is not None and (lease := leased.admit(self._request_id, wanted[0][1], monotonic())) is not None:
            self._lease, self._result, self._reserved = lease, lease.known, wanted
            self._limiter.count_admission("lease")
            return None
        return self._reserve_in_store(wanted, leased)

    async def _reserve_in_store(self, wanted: Sequence[tuple[Holder, Amounts]], leased: LeasedHolders | None = None) -> None:
        """Reserve in the store; in memory if the store is unavailable and the configuration allows it. Raises Refusal."""
        store = self._limiter.store
        if not wanted or store is None:  # a reload has removed the store
            return
        try:
            result = await store.admit(self._request_id, wanted)
        except StoreUnavailableError:
            if store.settings.refuses:
                self._limiter.count_refusal(self._limits.key, "store")
                raise Refusal("overloaded", "The limits of this key can't be counted at the moment.") from None
            if self._result is None:  # otherwise the rest is settled in the store
                self._shown_holders, self._layout = tuple(holder for holder, _ in wanted), None
                self._reserve_in_memory(wanted, self._now())
            return
        before = self._result
        if before is not None and self._reserved:
            result = result._replace(full_times=(*before.full_times, *result.full_times), budgets=(*before.budgets, *result.budgets))
        self._limiter.count_evictions(self._limits.key, result.evicted)
        self._apply_result(result)
        self._reserved = (*self._reserved, *wanted)
        self._limiter.count_admission("call")
        if leased is not None:
            leased.count_call(wanted[0][1], result, monotonic())

    def _apply_result(self, result: StoreResult | None) -> None:
        """Store the result of the store. Raises Refusal."""
        self._result = result
        if result is not None:
            self._limiter.note_budgets(result.budgets)
        if result is not None and result.exceeded is not None:
            raise self._refusal(*result.exceeded)

    def _refusal(self, holder: Holder, exceeded: ExceededLimit) -> Refusal:
        self._limiter.count_refusal(self._limits.key, exceeded.reason)
        return refusal(holder.name, exceeded, self._estimate, None if self._model is None else self._model.price)

    # Settlement

    @property
    def is_unsettled(self) -> bool:
        """Whether something is still reserved."""
        return bool(self._reserved)

    @property
    def counts_tokens(self) -> bool:
        """Whether a limit on tokens or cost counts the request."""
        return not self._limits.is_known_on_arrival

    @property
    def estimated_prompt(self) -> int | None:
        """The estimated tokens of the prompt; None if no limit counts tokens."""
        return self._estimate.prompt if self.counts_tokens else None

    def settle(self, settlement: Settlement, status: int) -> None:
        """Replace what was reserved by what the request has used. ``status``: the HTTP status sent. A second call does nothing."""
        reserved, self._reserved = self._reserved, ()
        if not reserved:
            return
        price = None if self._model is None else self._model.price
        used = estimate.used_amounts(settlement.usage or _NO_TOKENS, price, estimate.counts_as_request(status))
        self._settle(reserved, used)

    def _settle(self, reserved: Sequence[tuple[Holder, Amounts]], used: Amounts) -> None:
        if self._result is None:
            self._limiter.buckets.settle(reserved, self._bucket_ends, used, self._arrived, monotonic())
        elif self._lease is not None and self._lease.settle(self._request_id, used):
            if self._lease.is_overdrawn and self._limiter.store is not None:
                self._limiter.store.leases.end(self._lease)  # what it lacks is charged now
        elif reserved and self._limiter.store is not None:
            self._limiter.store.settle(self._request_id, reserved, used)

    def header_lines(self) -> bytes:
        """Return the rate-limit headers, as lines, for the holders that counted the request."""
        result = self._result
        limiter, layout = self._limiter, self._layout
        buckets, at = limiter.buckets, moment(monotonic(), time())
        if (
            result is None
            and layout is not None
            and (laid_out := headers.laid_out_lines(layout, buckets.cells, at, limiter.warn_at)) is not None
        ):
            return laid_out
        if self._lease is not None:
            result = self._lease.current()
        lines = headers.header_lines(buckets.full_times(self._shown_holders) if result is None else result.full_times, at.now)
        if not self._limits.has_budgets:
            return lines
        states: Sequence[tuple[Holder, BudgetState]]
        if result is not None:
            states = result.budgets
        else:
            states = [(holder, state) for holder in self._shown_holders for state in buckets.budget_states(holder, at)]
        if self._limits.has_soft_budgets:
            limiter.report_soft_budgets(states)
        return lines + headers.budget_lines(map(_STATE, states), limiter.warn_at)


def reservation_of(limiter: Limiter, key: Key, request_id: str, fields: Mapping[bytes, bytes]) -> Reservation:
    """Return the reservation for a request of a key with limits. ``fields``: the headers of the request."""
    limits = limiter.limits_of(key)
    return Reservation(limiter, limits, request_id, fields, moment(monotonic(), time()), limits.for_all_models, limits.layout)
