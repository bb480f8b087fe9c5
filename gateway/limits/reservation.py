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
from gateway.limits.estimate import Outcome, Tokens
from gateway.limits.messages import refusal
from gateway.limits.redis_store import Answer, StoreAwayError
from gateway.limits.rules import Ask, Moment, Refused
from gateway.snapshot.snapshot import Model

if TYPE_CHECKING:
    from gateway.limits.limiter import Counted, Limiter

ARRIVAL = Ask(requests=1, slots=1)
"""What is asked for before anything of the body is read."""
_NOTHING, _UNWEIGHED = Ask(), Tokens()


class Permit(msgspec.Struct, eq=False):
    """Made for each request of a key that has limits, at a moment, of whose day it counts."""

    _limiter: Limiter
    _counted: Counted
    _identity: str
    _then: Moment
    _judging: Sequence[Holder]
    _model: Model | None = None
    _guess: Tokens = _UNWEIGHED
    _claimed: bool = False
    _reserved: Sequence[tuple[Holder, Ask]] = ()
    _ends: dict[int, float] = {}
    _answer: Answer | None = None

    async def arrive(self) -> None:
        """Ask for a request and a place, before anything of the body is read. Raises Refusal."""
        counted, store = self._counted, self._limiter.store
        if store is None:
            self._take(counted.arriving, self._then)
        elif counted.is_early:
            await self._ask(counted.arriving)
        else:
            self._heed(store.known(counted.always, monotonic()))

    def weigh(self, document: dict[str, Any], path: str, body: bytes | bytearray, model: Model) -> None:
        """Guess what a body will use that is about to be sent, and hold it to the largest answer that is allowed. Raises Refusal."""
        self._model = model
        if self._counted.caps:
            estimate.cap(document, path, self._counted.max_tokens(model))
        self._guess = estimate.estimate(document, path, body)

    def weigh_in_steps(self, document: dict[str, Any], path: str, body: bytes | bytearray, model: Model) -> Generator[None, None, None]:
        """The same for a large body, in steps."""
        self._model = model
        if self._counted.caps:
            estimate.cap(document, path, self._counted.max_tokens(model))
        self._guess = yield from estimate.estimate_in_steps(document, path, body)

    def weigh_form(self, model: Model) -> int | None:
        """Nothing is known of what a form will use. Returns how many tokens its answer may have."""
        self._model, self._guess = model, Tokens(prompt=1)
        return self._counted.max_tokens(model) if self._counted.caps else None

    async def claim(self) -> None:
        """Ask for the tokens, and for what the model's own limits count; again for each further model. Raises Refusal."""
        counted, model = self._counted, self._model
        assert model is not None
        if counted.is_early:
            return
        of_model, everybody = counted.of_model(model)
        whole = estimate.ask(self._guess, model.price, 1, 1)
        if self._claimed:
            await self._move(of_model, everybody, whole)
            return
        self._claimed = True
        reserved = [(holder, whole) for holder in everybody]
        if self._limiter.store is not None and not self._reserved:
            await self._ask(reserved)
            return
        self._judging, tokens = everybody, Ask(0, 0, whole.tokens, whole.cost)
        if self._reserved:
            more = [(holder, tokens) for holder in counted.weighing]
            if of_model:
                more += [(holder, whole) for holder in of_model]
        else:
            more = reserved  # nobody was asked when it came: all limits are for models, or there was a store then
        self._take(more, self._now())
        self._reserved = reserved

    async def _move(self, of_model: Sequence[Holder], stays: Sequence[Holder], whole: Ask) -> None:
        """Give back what only the model before counted, and ask for what this one does."""
        left = [(holder, ask) for holder, ask in self._reserved if holder not in stays]
        kept = self._reserved = [(holder, ask) for holder, ask in self._reserved if holder in stays]
        self._settle(left, _NOTHING)
        held = {holder for holder, _ in kept}
        wanted = [(holder, whole) for holder in of_model if holder not in held]
        if self._answer is None:
            self._judging = stays
            self._take(wanted, self._now())
            self._reserved = [*kept, *wanted]
        else:
            await self._ask(wanted)

    def _now(self) -> Moment:
        """The time, but of the day on which it came."""
        then = self._then
        return Moment(monotonic(), then.wall, then.day, then.month)

    def _take(self, wanted: Sequence[tuple[Holder, Ask]], at: Moment) -> None:
        """In this gateway's own memory. Raises Refusal."""
        refused = self._limiter.meters.take(wanted, at, self._ends)
        if refused is not None:
            raise self._refusal(*refused)
        self._reserved = wanted

    async def _ask(self, wanted: Sequence[tuple[Holder, Ask]]) -> None:
        """In the store; in memory while it is away, if that is allowed."""
        store = self._limiter.store
        if not wanted or store is None:  # a store that a reload has taken away is told nothing more
            return
        try:
            answer = await store.admit(self._identity, wanted)
        except StoreAwayError:
            if store.place.refuses:
                self._limiter.count(self._counted.key, "store")
                raise Refusal("overloaded", "The limits of this key can't be counted at the moment.") from None
            if self._answer is None:  # or the rest of it is settled there
                self._judging = tuple(holder for holder, _ in wanted)
                self._take(wanted, self._now())
            return
        before = self._answer
        if before is not None and self._reserved:
            answer = answer._replace(standings=(*before.standings, *answer.standings))
        self._heed(answer)
        self._reserved = (*self._reserved, *wanted)

    def _heed(self, answer: Answer | None) -> None:
        """Remember what the store says. Raises Refusal."""
        self._answer = answer
        if answer is not None and answer.refused is not None:
            raise self._refusal(*answer.refused)

    def _refusal(self, holder: Holder, refused: Refused) -> Refusal:
        self._limiter.count(self._counted.key, refused.reason)
        return refusal(holder.name, refused, self._guess, None if self._model is None else self._model.price)

    # The end

    @property
    def holds(self) -> bool:
        """Whether something is still to be settled."""
        return bool(self._reserved)

    def settle(self, outcome: Outcome) -> None:
        """Put what the request has used in the place of what was reserved for it. A second time means nothing."""
        reserved, self._reserved = self._reserved, ()
        if not reserved:
            return
        model = self._model
        price = None if model is None else model.price
        self._settle(reserved, estimate.ask(estimate.used(outcome, self._guess), price, estimate.counts_as_request(outcome)))

    def _settle(self, reserved: Sequence[tuple[Holder, Ask]], used: Ask) -> None:
        if self._answer is None:
            self._limiter.meters.settle(reserved, self._ends, used, self._then, monotonic())
        elif reserved and self._limiter.store is not None:
            self._limiter.store.settle(self._identity, reserved, used)

    def lines(self) -> bytes:
        """How the minute's limits that the request was judged by stand, as lines of an answer's head."""
        if self._answer is not None:
            return headers.lines(self._answer.standings, monotonic())
        return headers.lines(self._limiter.meters.buckets(self._judging), monotonic())
