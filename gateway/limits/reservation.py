"""One request's share of the limits of its key: asked for when it comes, and settled when it is over.

The rules: what needs only the head is asked before the body is read, the rest when the model and the size are known;
whatever was taken, in this gateway's memory or in the store, is settled once, before the client has the end of its answer: whoever
asks one request after the other is never in its own way, whichever worker takes the next.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.api.errors import Refusal
from gateway.limits import estimate, headers
from gateway.limits.buckets import Holder
from gateway.limits.estimate import Outcome, TokenEstimate
from gateway.limits.messages import refusal
from gateway.limits.redis_store import StoreResult, StoreUnavailableError
from gateway.limits.rules import Amounts, ExceededLimit, Moment
from gateway.snapshot.snapshot import Model

if TYPE_CHECKING:
    from gateway.limits.limiter import KeyLimits, Limiter

ARRIVAL = Amounts(requests=1, slots=1)
"""What is asked for before anything of the body is read."""
_NOTHING, _UNWEIGHED = Amounts(), TokenEstimate()


class Reservation(msgspec.Struct, eq=False):
    """Made for each request of a key that has limits, at a moment, of whose day it counts."""

    _limiter: Limiter
    _limits: KeyLimits
    _request_id: str
    _arrived: Moment
    _shown_holders: Sequence[Holder]
    _model: Model | None = None
    _estimate: TokenEstimate = _UNWEIGHED
    _has_reserved_tokens: bool = False
    _reserved: Sequence[tuple[Holder, Amounts]] = ()
    _ends: dict[int, float] = {}
    _result: StoreResult | None = None

    async def reserve_request(self) -> None:
        """Ask for a request and a place, before anything of the body is read. Raises Refusal."""
        counted, store = self._limits, self._limiter.store
        if store is None:
            self._reserve_in_memory(counted.on_arrival, self._arrived)
        elif counted.is_known_on_arrival:
            await self._reserve_in_store(counted.on_arrival)
        else:
            self._apply_result(store.cached_refusal(counted.for_all_models, monotonic()))

    def estimate_usage(self, document: dict[str, Any], path: str, body: bytes | bytearray, model: Model) -> None:
        """Guess what a body will use that is about to be sent, and hold it to the largest answer that is allowed. Raises Refusal."""
        self._model = model
        if self._limits.caps:
            estimate.apply_max_tokens(document, path, self._limits.max_tokens(model))
        self._estimate = estimate.estimate(document, path, body)

    def estimate_usage_in_steps(
        self, document: dict[str, Any], path: str, body: bytes | bytearray, model: Model
    ) -> Generator[None, None, None]:
        """The same for a large body, in steps."""
        self._model = model
        if self._limits.caps:
            estimate.apply_max_tokens(document, path, self._limits.max_tokens(model))
        self._estimate = yield from estimate.estimate_in_steps(document, path, body)

    def estimate_form(self, model: Model) -> int | None:
        """Nothing is known of what a form will use. Returns how many tokens its answer may have."""
        self._model, self._estimate = model, TokenEstimate(prompt=1)
        return self._limits.max_tokens(model) if self._limits.caps else None

    async def reserve_tokens(self) -> None:
        """Ask for the tokens, and for what the model's own limits count; again for each further model. Raises Refusal."""
        counted, model = self._limits, self._model
        assert model is not None
        if counted.is_known_on_arrival:
            return
        of_model, everybody = counted.for_model(model)
        whole = estimate.amounts_of(self._estimate, model.price, 1, 1)
        if self._has_reserved_tokens:
            await self._change_model(of_model, everybody, whole)
            return
        self._has_reserved_tokens = True
        reserved = [(holder, whole) for holder in everybody]
        if self._limiter.store is not None and not self._reserved:
            await self._reserve_in_store(reserved)
            return
        self._shown_holders, tokens = everybody, Amounts(0, 0, whole.tokens, whole.cost)
        if self._reserved:
            more = [(holder, tokens) for holder in counted.counting_tokens]
            if of_model:
                more += [(holder, whole) for holder in of_model]
        else:
            more = reserved  # nobody was asked when it came: all limits are for models, or there was a store then
        self._reserve_in_memory(more, self._now())
        self._reserved = reserved

    async def _change_model(self, of_model: Sequence[Holder], stays: Sequence[Holder], whole: Amounts) -> None:
        """Give back what only the model before counted, and ask for what this one does."""
        left = [(holder, ask) for holder, ask in self._reserved if holder not in stays]
        kept = self._reserved = [(holder, ask) for holder, ask in self._reserved if holder in stays]
        self._settle(left, _NOTHING)
        held = {holder for holder, _ in kept}
        wanted = [(holder, whole) for holder in of_model if holder not in held]
        if self._result is None:
            self._shown_holders = stays
            self._reserve_in_memory(wanted, self._now())
            self._reserved = [*kept, *wanted]
        else:
            await self._reserve_in_store(wanted)

    def _now(self) -> Moment:
        """The time, but of the day on which it came."""
        then = self._arrived
        return Moment(monotonic(), then.wall, then.day, then.month)

    def _reserve_in_memory(self, wanted: Sequence[tuple[Holder, Amounts]], at: Moment) -> None:
        """In this gateway's own memory. Raises Refusal."""
        refused = self._limiter.meters.reserve(wanted, at, self._ends)
        if refused is not None:
            raise self._refusal(*refused)
        self._reserved = wanted

    async def _reserve_in_store(self, wanted: Sequence[tuple[Holder, Amounts]]) -> None:
        """In the store; in memory while it is away, if that is allowed."""
        store = self._limiter.store
        if not wanted or store is None:  # a store that a reload has taken away is told nothing more
            return
        try:
            answer = await store.admit(self._request_id, wanted)
        except StoreUnavailableError:
            if store.settings.refuses:
                self._limiter.count_refusal(self._limits.key, "store")
                raise Refusal("overloaded", "The limits of this key can't be counted at the moment.") from None
            if self._result is None:  # or the rest of it is settled there
                self._shown_holders = tuple(holder for holder, _ in wanted)
                self._reserve_in_memory(wanted, self._now())
            return
        before = self._result
        if before is not None and self._reserved:
            answer = answer._replace(standings=(*before.standings, *answer.standings))
        self._apply_result(answer)
        self._reserved = (*self._reserved, *wanted)

    def _apply_result(self, answer: StoreResult | None) -> None:
        """Remember what the store says. Raises Refusal."""
        self._result = answer
        if answer is not None and answer.refused is not None:
            raise self._refusal(*answer.refused)

    def _refusal(self, holder: Holder, refused: ExceededLimit) -> Refusal:
        self._limiter.count_refusal(self._limits.key, refused.reason)
        return refusal(holder.name, refused, self._estimate, None if self._model is None else self._model.price)

    # The end

    @property
    def is_unsettled(self) -> bool:
        """Whether something is still to be settled."""
        return bool(self._reserved)

    def settle(self, outcome: Outcome) -> None:
        """Put what the request has used in the place of what was reserved for it. A second time means nothing."""
        reserved, self._reserved = self._reserved, ()
        if not reserved:
            return
        model = self._model
        price = None if model is None else model.price
        self._settle(
            reserved, estimate.amounts_of(estimate.used_tokens(outcome, self._estimate), price, estimate.counts_as_request(outcome))
        )

    def _settle(self, reserved: Sequence[tuple[Holder, Amounts]], used: Amounts) -> None:
        if self._result is None:
            self._limiter.meters.settle(reserved, self._ends, used, self._arrived, monotonic())
        elif reserved and self._limiter.store is not None:
            self._limiter.store.settle(self._request_id, reserved, used)

    def header_lines(self) -> bytes:
        """How the minute's limits that the request was judged by stand, as lines of an answer's head."""
        if self._result is not None:
            return headers.header_lines(self._result.standings, monotonic())
        return headers.header_lines(self._limiter.meters.full_times(self._shown_holders), monotonic())
