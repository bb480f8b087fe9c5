"""One request's share of the limits of its key: asked for when it comes, and settled when it is over.

The rules: what needs only the head is asked before the body is read, the rest when the model and the size are known;
whatever was taken, in this gateway's memory or in the store, is settled once, by the request's record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from time import monotonic, time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gateway.errors import Refusal
from gateway.limits import estimate, headers, rules
from gateway.limits.estimate import Tokens
from gateway.limits.meters import Holder
from gateway.limits.rules import Ask, Meter, Moment, Refused
from gateway.limits.store import Answer, StoreAwayError
from gateway.record import Record
from gateway.state import Limits, Model

if TYPE_CHECKING:
    from gateway.limits.limiter import Counted, Limiter

_ONE = Ask(requests=1, slots=1)


class Permit:
    """Made for each request of a key that has limits."""

    __slots__ = ("_answer", "_counted", "_guess", "_identity", "_is_claimed", "_key", "_limiter", "_meters", "_model", "_reserved", "_then")

    def __init__(self, limiter: Limiter, key: str, counted: Counted, identity: str) -> None:
        self._limiter = limiter
        self._key = key
        self._counted = counted
        self._identity = identity
        self._model: Model | None = None
        self._guess = Tokens()
        self._is_claimed = False
        self._meters: dict[int, tuple[Limits, Meter]] = {}
        self._reserved: Sequence[tuple[Holder, Ask]] = ()
        self._answer: Answer | None = None
        self._then = Moment(monotonic(), time())

    async def arrive(self) -> None:
        """Ask for a request and a place, before anything of the body is read. Raises Refusal."""
        counted, store = self._counted, self._limiter.store
        if store is None:
            self._take([(holder, _ONE) for holder in counted.always])
        elif counted.is_early:
            await self._ask([(holder, _ONE) for holder in counted.always])
        else:
            self._heed(store.known(counted.always, monotonic()))

    def weigh(self, document: dict[str, Any], path: str, body: bytes, model: Model) -> None:
        """Guess what a body will use that is about to be sent, and hold it to the largest answer that is allowed. Raises Refusal."""
        self._model = model
        limit = self._counted.max_tokens(model)
        if limit is not None:
            estimate.cap(document, path, limit)
        self._guess = estimate.estimate(document, path, body)

    def weigh_form(self, model: Model) -> None:
        """Nothing is known of what a form will use."""
        self._model, self._guess = model, Tokens(prompt=1)

    async def claim(self) -> None:
        """Ask for the tokens, and for what the model's own limits count; again for each further model. Raises Refusal."""
        counted, model = self._counted, self._model
        assert model is not None
        if counted.is_early:
            return
        of_model, whole = counted.of_model(model), estimate.ask(self._guess, model.price, requests=1, slots=1)
        if self._is_claimed:
            await self._move(of_model, whole)
            return
        self._is_claimed = True
        if self._limiter.store is not None and not self._reserved:
            await self._ask([(holder, whole) for holder in (*counted.always, *of_model)])
        else:
            more = [(holder, whole._replace(requests=0, slots=0)) for holder in counted.weighing]
            self._take([*more, *((holder, whole) for holder in of_model)])

    async def _move(self, of_model: Sequence[Holder], whole: Ask) -> None:
        """Give back what only the model before counted, and ask for what this one does."""
        stays = (*self._counted.always, *of_model)
        left = [(holder, ask) for holder, ask in self._reserved if holder not in stays]
        kept = self._reserved = [(holder, ask) for holder, ask in self._reserved if holder in stays]
        self._give_back(left, Ask())
        held = {holder for holder, _ in kept}
        wanted = [(holder, whole) for holder in of_model if holder not in held]
        if self._answer is None:
            self._take(wanted)
        else:
            await self._ask(wanted)

    def _take(self, wanted: Sequence[tuple[Holder, Ask]]) -> None:
        """In this gateway's own memory."""
        if not wanted:
            return
        at = self._then._replace(now=monotonic())  # it is of the day on which it came
        taken = self._limiter.meters.take(wanted, at)
        for (holder, _), meter in zip(wanted, taken.meters, strict=True):
            self._meters[holder.meter] = holder.limits, meter
        if taken.refused is not None:
            raise self._refusal(*taken.refused)
        self._reserved = _joined(self._reserved, wanted) if self._reserved else wanted

    async def _ask(self, wanted: Sequence[tuple[Holder, Ask]]) -> None:
        """In the store; in memory while it is away, if that is allowed."""
        store = self._limiter.store
        assert store is not None
        if not wanted:
            return
        try:
            answer = await store.admit(self._identity, wanted)
        except StoreAwayError:
            if store.refuses:
                self._limiter.count(self._key, "store")
                raise Refusal("overloaded", "The limits of this key can't be counted at the moment.") from None
            if self._answer is None:  # or the rest of it is settled there
                self._take(wanted)
            return
        before = self._answer
        if before is not None and self._reserved:
            answer = answer._replace(day=before.day, month=before.month, standings=(*before.standings, *answer.standings))
        self._heed(answer)
        self._reserved = (*self._reserved, *wanted)

    def _heed(self, answer: Answer | None) -> None:
        """Remember what the store says. Raises Refusal."""
        self._answer = answer
        if answer is not None and answer.refused is not None:
            raise self._refusal(*answer.refused)

    def _refusal(self, holder: Holder, refused: Refused) -> Refusal:
        self._limiter.count(self._key, refused.reason)
        return refusal(holder.name, refused)

    # The end

    def settle(self, record: Record) -> None:
        """Put what the request has used in the place of what was reserved for it."""
        if not self._reserved:
            return
        reserved, self._reserved = self._reserved, ()
        price = self._model.price if self._model is not None else None
        requests = 1 if estimate.counts_as_request(record) else 0
        used = estimate.ask(estimate.used(record, self._guess), price, requests=requests)
        self._give_back(reserved, used)

    def _give_back(self, reserved: Sequence[tuple[Holder, Ask]], used: Ask) -> None:
        store = self._limiter.store
        if not reserved:
            return
        if self._answer is None:
            self._limiter.meters.settle(reserved, used, self._then, monotonic())
        elif store is not None:
            store.settle(self._identity, reserved, used, self._answer)

    def lines(self) -> bytes:
        """How the minute's limits stand, as lines of an answer's head: as they were when the request was judged."""
        return headers.lines(self._meters.values() if self._answer is None else self._answer.standings, monotonic())


def _joined(before: Sequence[tuple[Holder, Ask]], more: Sequence[tuple[Holder, Ask]]) -> Sequence[tuple[Holder, Ask]]:
    """What was reserved of each holder in two steps, as if in one."""
    asks = {holder.meter: (holder, ask) for holder, ask in before}
    for holder, ask in more:
        held = holder.meter in asks
        asks[holder.meter] = holder, Ask(1, 1, ask.tokens, ask.cost) if held else ask
    return tuple(asks.values())


_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "concurrent": "{:g} requests at once",
        "requests_per_minute": "{:g} requests per minute",
        "tokens_per_minute": "{:g} tokens per minute",
        "tokens_per_day": "{:g} tokens per day",
        "tokens_per_month": "{:g} tokens per month",
        "cost_per_day": "a cost of {:g} per day",
        "cost_per_month": "a cost of {:g} per month",
    }
)


def refusal(holder: str, refused: Refused) -> Refusal:
    """A limit that is reached, as the client is told. A client that comes back after ``retry-after`` finds room."""
    seconds = max(math.ceil(refused.wait or 0), 1)
    message = f"The limit of {_WORDS[refused.reason].format(refused.limit)} is reached ({holder}). Try again in {seconds} s."
    told = {"retry-after": str(seconds)}
    if refused.reason in rules.QUOTAS:
        return Refusal("insufficient_quota", message, headers=told | {"x-should-retry": "false"})  # what OpenAI's SDKs heed
    return Refusal("rate_limit_exceeded", message, headers=told)
