"""Counts that several gateways share, in a Redis or Valkey.

The rules: a request costs the store one script when it is admitted and one, which nobody waits for, when it is over; nobody waits
for a store that is away, and it is tried again beside the requests; what could not be told it is told when it is back.

No part of this asks asyncio for the current task, since requests run without one. Replies come in the order of the commands,
so one look a few times a second at the oldest is enough to see that they do not come.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import NamedTuple, cast

from gateway.limits import rules, scripts
from gateway.limits.meters import Holder
from gateway.limits.resp import NoReplyError, Parser, Reply, ReplyError, argument, array, command
from gateway.limits.rules import Ask, Refused
from gateway.state import Limits, LimitsStore
from upstream.story import Signal

LEASE = 10.0
"""Seconds after which the places of a gateway that died are free again."""
_READING = 0.001  # seconds in which the loop looks at what has arrived
_RENEW_EVERY = LEASE / 3
_RETRY_EVERY = 1.0
_UNSENT = 10_000  # settlements that are kept while the store is away
_PREFIX = "vllm-gateway:"
REASONS = (
    "requests_per_minute",
    "tokens_per_minute",
    "tokens_per_day",
    "tokens_per_month",
    "cost_per_day",
    "cost_per_month",
    "concurrent",
)
"""The limits that are counted, by which refusals are, too; in the order of the script's arguments."""
_log = logging.getLogger("vllm_gateway.limits")


class StoreAwayError(Exception):
    """The store can't be asked."""


class Reserved(NamedTuple):
    """When something was reserved in a holder's buckets, and until when it is missing there, as the script counts (microseconds)."""

    at: int
    requests_end: int
    tokens_end: int


class Answer(NamedTuple):
    """What the store says to a request: why not, or that it was admitted on that day in that month; how the minute's limits stand; and,
    by the holders' names, what the script is to be told when it is settled."""

    refused: tuple[Holder, Refused] | None
    day: int
    month: int
    standings: Sequence[tuple[Limits, float, float]]
    reserved: Mapping[str, Reserved]


class Pending:
    """A command whose reply is awaited. ``again`` are the bytes for a store that does not know the script any more."""

    __slots__ = ("again", "on_reply", "reply", "sent", "signal")

    def __init__(self, again: Callable[[], bytes] | None) -> None:
        self.signal = Signal()
        self.reply: Reply = None
        self.again = again
        self.on_reply: Callable[[Reply], None] | None = None
        self.sent = monotonic()

    def tell(self, reply: Reply) -> None:
        self.reply = reply
        if self.on_reply is not None:
            self.on_reply(reply)
        self.signal.tell()


class Line(asyncio.Protocol):
    """One connection: commands go out at once, replies are told in their order."""

    transport: asyncio.Transport

    def __init__(self, patience: float, on_lost: Callable[[Line, str], None]) -> None:
        self._patience = patience
        self._on_lost = on_lost
        self._parser = Parser()
        self._pending: deque[Pending] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, data: bytes, again: Callable[[], bytes] | None = None) -> Pending:
        """Send a command."""
        pending = Pending(again)
        self._pending.append(pending)
        self.transport.write(data)
        return pending

    def data_received(self, data: bytes) -> None:
        try:
            for reply in self._parser.feed(data):
                self._told(reply)
        except (NoReplyError, IndexError) as error:
            self.fail(f"it sent what is no reply: {error}")

    def _told(self, reply: Reply) -> None:
        pending = self._pending.popleft()
        if isinstance(reply, ReplyError) and pending.again is not None and str(reply).startswith("NOSCRIPT"):
            self._pending.append(pending)
            self.transport.write(pending.again())
            pending.again = None
            return
        pending.tell(reply)
        if isinstance(reply, ReplyError):
            self.fail(str(reply))

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(f"it closed the connection{f': {error}' if error else ''}")

    def check(self, now: float) -> None:
        """Give it up if a reply is overdue, unless it is here and this process was too late to read it."""
        if self._pending and now - self._pending[0].sent > self._patience:
            asyncio.get_running_loop().call_later(_READING, self._give_up, self._pending[0])

    def _give_up(self, oldest: Pending) -> None:
        if self._pending and self._pending[0] is oldest:
            self.fail("it does not answer")

    def fail(self, reason: str) -> None:
        """It is of no use any more: everybody who waits is told so."""
        self.transport.abort()
        lost, self._pending = self._pending, deque()
        self._on_lost(self, reason)
        for pending in lost:
            pending.tell(ReplyError(reason))


class Store:
    """The store as a relay knows it. It is opened by the first request that needs it."""

    def __init__(self, place: LimitsStore) -> None:
        self.refuses = place.refuses
        self._place = place
        self._line: Line | None = None
        self._opening: asyncio.Task[None] | None = None
        self._opened_at = 0.0
        self._comers: list[Signal] = []
        self._was_up: bool | None = None
        self._unsent: deque[bytes] = deque(maxlen=_UNSENT)
        self._leases: dict[str, tuple[str, ...]] = {}
        self._renewed = 0.0
        self._known: dict[str, tuple[float, Answer]] = {}

    # Asking

    async def admit(self, identity: str, wanted: Sequence[tuple[Holder, Ask]]) -> Answer:
        """Take what is asked of each holder, or nothing. Raises StoreAwayError."""
        line = self._line or await self._first_line()
        pending = line.send(*_script(scripts.ADMIT, *_admission(identity, wanted)))
        try:
            await pending.signal
        except asyncio.CancelledError:
            pending.on_reply = lambda reply: self._undo(identity, wanted, reply)
            raise
        return self._understood(identity, wanted, pending.reply)

    def known(self, holders: Sequence[Holder], now: float) -> Answer | None:
        """A refusal that was told before and still holds: that of a bucket of requests, which fills evenly."""
        for holder in holders:
            until, answer = self._known.get(holder.name, (0.0, None))
            if answer is not None and answer.refused is not None and now < until:
                who, refused = answer.refused
                return answer._replace(refused=(who, refused._replace(wait=until - now)))
        return None

    def settle(self, identity: str, reserved: Sequence[tuple[Holder, Ask]], used: Ask, answer: Answer) -> None:
        """Put what was used in the place of what was reserved; nobody waits for it."""
        held = self._leases.pop(identity, ())
        if left := tuple(key for key in held if key not in {_keys(holder)[1] for holder, _ in reserved}):
            self._leases[identity] = left
        data, again = _script(scripts.SETTLE, *_settlement(identity, reserved, used, answer))
        if self._line is not None:
            self._line.send(data, again)
        else:
            self._unsent.append(again())

    def _understood(self, identity: str, wanted: Sequence[tuple[Holder, Ask]], reply: Reply) -> Answer:
        if not isinstance(reply, list):
            raise StoreAwayError
        answer = _answer([holder for holder, _ in wanted], cast(list[int], reply), monotonic())
        if answer.refused is None:
            leases = tuple(_keys(holder)[1] for holder, ask in wanted if ask.slots and holder.limits.concurrent is not None)
            if leases:
                self._leases[identity] = (*self._leases.get(identity, ()), *leases)
        elif answer.refused[1].reason == "requests_per_minute":
            self._known[answer.refused[0].name] = monotonic() + (answer.refused[1].wait or 0), answer
        return answer

    def _undo(self, identity: str, wanted: Sequence[tuple[Holder, Ask]], reply: Reply) -> None:
        """The client left while the store was asked, and it has said yes."""
        try:
            answer = self._understood(identity, wanted, reply)
        except StoreAwayError:
            return
        if answer.refused is None:
            self.settle(identity, wanted, Ask(), answer)

    # Being there

    def tick(self) -> None:
        """Called a few times a second: give up what does not answer, try again, keep the leases."""
        now = monotonic()
        if self._line is not None:
            self._line.check(now)
        if self._line is not None and now - self._renewed > _RENEW_EVERY:
            self._renew(self._line, now)
        if self._opening is not None and self._was_up is None and now - self._opened_at > self._place.patience:
            self._away("it does not answer")
            self._welcome()
        if self._line is None and now - self._opened_at > _RETRY_EVERY:
            self._open()

    def _renew(self, line: Line, now: float) -> None:
        self._renewed = now
        held = [(key, identity) for identity, keys in self._leases.items() for key in keys]
        if held:
            line.send(*_script(scripts.RENEW, [key for key, _ in held], [LEASE, *(identity for _, identity in held)]))

    async def _first_line(self) -> Line:
        """The connection, for those who come before the first attempt is over. Raises StoreAwayError."""
        if self._opening is None and self._was_up is None:
            self._open()
        if self._opening is not None and self._was_up is None:
            comer = Signal()
            self._comers.append(comer)
            await comer
        if self._line is None:
            raise StoreAwayError
        return self._line

    def _open(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        self._opened_at = monotonic()
        self._opening = asyncio.get_running_loop().create_task(self._try_to_open())

    async def _try_to_open(self) -> None:
        try:
            line = await self._connected()
        except (OSError, ReplyError) as error:
            self._opening = None
            self._away(str(error))
        else:
            self._opening = None
            self._up(line)
        self._welcome()

    async def _connected(self) -> Line:
        """A connection that is ready for scripts. Raises OSError and ReplyError."""
        place, loop = self._place, asyncio.get_running_loop()
        if place.path is not None:
            _, line = await loop.create_unix_connection(lambda: Line(place.patience, self._lost), place.path)
        else:
            context = ssl.create_default_context() if place.tls else None
            _, line = await loop.create_connection(lambda: Line(place.patience, self._lost), place.host, place.port, ssl=context)
        try:
            for pending in [line.send(each) for each in _greeting(place)]:
                await pending.signal
                if isinstance(pending.reply, ReplyError):
                    raise pending.reply
        except BaseException:
            line.transport.abort()
            raise
        return line

    def _up(self, line: Line) -> None:
        if self._was_up is False:
            _log.warning("the limits' store at %s is back", self._place)
        self._line, self._was_up = line, True
        self._renewed = 0.0  # what is in flight may have lost its places
        while self._unsent:
            line.send(self._unsent.popleft())

    def _lost(self, line: Line, reason: str) -> None:
        if line is self._line:
            self._line = None
            self._opened_at = monotonic()
            self._away(reason)

    def _away(self, reason: str) -> None:
        if self._was_up is not False:
            meanwhile = "requests of limited keys are refused" if self.refuses else "each gateway counts by itself"
            _log.warning("the limits' store at %s is away (%s); meanwhile %s", self._place, reason, meanwhile)
        self._was_up = False
        self._known.clear()

    def _welcome(self) -> None:
        """Let those go on who came before it was known whether the store is there."""
        comers, self._comers = self._comers, []
        for comer in comers:
            comer.tell()

    def close(self) -> None:
        """Leave it."""
        if self._opening is not None:
            self._opening.cancel()
        line, self._line = self._line, None
        if line is not None:
            line.fail("the gateway has left it")
        self._welcome()


# On the wire


def _greeting(place: LimitsStore) -> list[bytes]:
    who = [] if place.password is None else [command("AUTH", *([place.user] if place.user else []), place.password)]
    where = [command("SELECT", place.database)] if place.database else []
    return [*who, *where, *(command("SCRIPT", "LOAD", each) for each in (scripts.ADMIT, scripts.SETTLE, scripts.RENEW))]


_DIGESTS = {script: argument(scripts.digest(script)) for script in (scripts.ADMIT, scripts.SETTLE, scripts.RENEW)}
_EVALSHA, _EVAL = argument("EVALSHA"), argument("EVAL")


def _script(script: str, keys: Sequence[str], arguments: Sequence[str | float]) -> tuple[bytes, Callable[[], bytes]]:
    """The bytes that run a script by its digest, and what makes those that bring the script along."""
    rest = b"".join(map(argument, (len(keys), *keys, *arguments)))
    count = 3 + len(keys) + len(arguments)
    return array((_EVALSHA, _DIGESTS[script], rest), count), lambda: array((_EVAL, argument(script), rest), count)


def _keys(holder: Holder) -> tuple[str, str]:
    """Of a holder's meter and of its leases."""
    return f"{_PREFIX}{holder.name}", f"{_PREFIX}{holder.name} leases"


def _admission(identity: str, wanted: Sequence[tuple[Holder, Ask]]) -> tuple[list[str], list[str | float]]:
    keys: list[str] = []
    arguments: list[str | float] = [identity, LEASE]
    for holder, ask in wanted:
        keys += _keys(holder)
        arguments += [getattr(holder.limits, name) or 0 for name in REASONS]
        arguments += (ask.requests, ask.slots, ask.tokens, ask.cost)
    return keys, arguments


def _settlement(identity: str, reserved: Sequence[tuple[Holder, Ask]], used: Ask, answer: Answer) -> tuple[list[str], list[str | float]]:
    keys: list[str] = []
    arguments: list[str | float] = [identity, answer.day, answer.month]
    for holder, ask in reserved:
        keys += _keys(holder)
        arguments += rules.owed(holder.limits, ask, used)
        arguments += rules.owed_of_calendar(holder.limits, ask, used) if holder.limits.calendar else (0, 0, 0, 0)
        arguments += answer.reserved[holder.name]
    return keys, arguments


def _answer(holders: Sequence[Holder], reply: Sequence[int], now: float) -> Answer:
    """The script's reply: who refuses (counted from 1, 0: nobody) and why, milliseconds to wait, the day, the month, its time, and of
    each holder the milliseconds until its buckets are full and the ends of what was reserved in them."""
    who, why, wait, day, month, at, *rest = reply
    standings, reserved = [], {}
    for holder, requests, tokens, *ends in zip(holders, rest[::4], rest[1::4], rest[2::4], rest[3::4], strict=True):
        standings.append((holder.limits, now + requests / 1000, now + tokens / 1000))
        reserved[holder.name] = Reserved(at, *ends)
    if not who:
        return Answer(None, day, month, standings, reserved)
    holder, reason = holders[who - 1], REASONS[why - 1]
    limit = getattr(holder.limits, reason)
    refusal = holder, Refused(reason, limit, None if reason == "concurrent" else wait / 1000)
    return Answer(refusal, day, month, standings, reserved)
