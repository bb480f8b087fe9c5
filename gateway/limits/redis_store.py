"""Counts that several gateways share, in a Redis or Valkey.

The rules: a request costs the store one script when it is admitted and one, which nobody waits for, when it is over; nobody waits
for a store that is away, and it is tried again beside the requests; what could not be told it is told when it is back.

What is sent may have been read by the store or not when it is given up, and may still be read at any time later. So who asks says
until when, by the store's clock, and nothing is taken after that; and what was used is told until the store says that it has heard,
since what it has heard before means nothing to it.

No part of this asks asyncio for the current task, since requests run without one. Replies come in the order of the commands,
so one look a few times a second at the oldest is enough to see that they do not come.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import NamedTuple, cast

from gateway.limits import rules, scripts
from gateway.limits.buckets import Holder
from gateway.limits.resp import Parser, ProtocolError, Reply, ReplyError, argument, array, command
from gateway.limits.rules import Amounts, ExceededLimit
from gateway.snapshot.snapshot import Limits, LimitsStore
from upstream.http.inline_task import Signal

LEASE = 10.0
"""Seconds after which the places of a gateway that died are free again."""
_READING = 0.001  # seconds in which the loop looks at what has arrived
_RENEW_EVERY = LEASE / 3
_RETRY_EVERY = 1.0  # longer than a store may take: what it was asked before is over by then
_OWED = 10_000  # settlements that are kept while the store is away
_LATE, _NOBODY = -1, 0  # who refuses, as the script says it
_PREFIX = "vllm-gateway:"
COUNTED_LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "tokens_per_day",
    "tokens_per_month",
    "cost_per_day",
    "cost_per_month",
    "concurrent",
)
"""The limits that are counted, by which refusals are, too; in the order of the script's arguments."""
_STATES = re.compile(r"(?:^|-)(?:OOM|READONLY|MISCONF|LOADING|BUSY|MASTERDOWN|NOREPLICAS|NOAUTH) ")  # older ones tell it behind ERR
_log = logging.getLogger("vllm_gateway.limits")


class StoreUnavailableError(Exception):
    """The store can't be asked."""


class StoreResult(NamedTuple):
    """What the store says to a request: why not, or that it was admitted; and how the minute's limits stand."""

    refused: tuple[Holder, ExceededLimit] | None
    standings: Sequence[tuple[Limits, float, float]]


class ReplyLostError(ReplyError):
    """The connection was given up before the reply came: what was sent was run, will be, or never."""


class StoreClock:
    """The store's clock, by this process's own: as exact as a reply is quick, and never ahead of it but for one that was set back.

    A reply proves that it was written at some time between when its command was sent and now; what was known before is believed as
    far as it can be true. So no reply that is slow spoils what a quick one has told, and a clock that is set is followed at once.
    """

    __slots__ = ("_ahead",)

    def __init__(self) -> None:
        self._ahead = -inf

    def synchronize(self, told: float, sent: float, now: float) -> None:
        """Learn from a reply: the store's time, in seconds since the epoch, and when it was sent for and read, by ``monotonic``."""
        self._ahead = min(max(self._ahead, told - now), told - sent)

    def time_at(self, moment: float) -> float:
        """What it says at a moment of ``monotonic``."""
        return moment + self._ahead


class PendingCommand:
    """A command whose reply is awaited. ``again`` are the bytes for a store that does not know the script any more."""

    __slots__ = ("on_reply", "reply", "sent", "signal", "with_script")

    def __init__(self, again: Callable[[], bytes] | None) -> None:
        self.signal = Signal()
        self.reply: Reply = None
        self.with_script = again
        self.on_reply: Callable[[Reply], None] | None = None
        self.sent = monotonic()

    def resolve(self, reply: Reply) -> None:
        self.reply = reply
        if self.on_reply is not None:
            self.on_reply(reply)
        self.signal.set()


class StoreConnection(asyncio.Protocol):
    """One connection: commands go out at once, replies are told in their order."""

    transport: asyncio.Transport

    def __init__(self, patience: float, on_lost: Callable[[StoreConnection, str], None]) -> None:
        self._timeout = patience
        self._on_lost = on_lost
        self._parser = Parser()
        self._pending: deque[PendingCommand] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, data: bytes, again: Callable[[], bytes] | None = None) -> PendingCommand:
        """Send a command."""
        pending = PendingCommand(again)
        self._pending.append(pending)
        self.transport.write(data)
        return pending

    def data_received(self, data: bytes) -> None:
        try:
            for reply in self._parser.feed(data):
                self._receive(reply)
        except (ProtocolError, IndexError) as error:
            self.fail(f"it sent what is no reply: {error}")

    def _receive(self, reply: Reply) -> None:
        pending = self._pending.popleft()
        if isinstance(reply, ReplyError) and pending.with_script is not None and str(reply).startswith("NOSCRIPT"):
            self._pending.append(pending)
            self.transport.write(pending.with_script())
            pending.with_script = None
            return
        pending.resolve(reply)
        if isinstance(reply, ReplyError):
            self.fail(str(reply))

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(f"it closed the connection{f': {error}' if error else ''}")

    def check(self, now: float) -> None:
        """Give it up if a reply is overdue, unless it is here and this process was too late to read it."""
        if self._pending and now - self._pending[0].sent > self._timeout:
            asyncio.get_running_loop().call_later(_READING, self._give_up, self._pending[0])

    def _give_up(self, oldest: PendingCommand) -> None:
        if self._pending and self._pending[0] is oldest:
            self.fail("it does not answer")

    def fail(self, reason: str) -> None:
        """It is of no use any more: everybody who waits is told so."""
        self.transport.abort()
        lost, self._pending = self._pending, deque()
        self._on_lost(self, reason)
        for pending in lost:
            pending.resolve(ReplyLostError(reason))


class RedisStore:
    """The store as a worker knows it, which has a name that no other has. It is opened by the first request that needs it.

    ``place`` may become another way to the same counts. ``on_change`` is called with the error when the store is away or away for
    another reason, and with None when it is back.
    """

    def __init__(self, place: LimitsStore, worker: str, on_change: Callable[[str | None], None]) -> None:
        self.settings = place
        self._on_change = on_change
        self._reason: str | None = None
        self._reserved = f"{_PREFIX}reserved {worker}"
        self._clock = StoreClock()
        self._open_connection: StoreConnection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._opened_at = 0.0
        self._waiting: list[Signal] = []
        self._is_available: bool | None = None
        self._unacknowledged: dict[int, tuple[bytes, Callable[[], bytes]]] = {}
        self._settled = 0
        self._leases: dict[str, tuple[str, ...]] = {}
        self._renewed = 0.0
        self._cached_refusals: dict[str, tuple[float, StoreResult]] = {}

    # Asking

    async def admit(self, identity: str, wanted: Sequence[tuple[Holder, Amounts]]) -> StoreResult:
        """Take what is asked of each holder, or nothing. Raises StoreUnavailableError."""
        pending = await self._run_admission(identity, wanted)
        if _is_late(pending.reply) and monotonic() - pending.sent < self.settings.patience:  # its clock was set, as is known now
            pending = await self._run_admission(identity, wanted)
        return self._apply_reply(identity, wanted, pending.reply)

    async def _run_admission(self, identity: str, wanted: Sequence[tuple[Holder, Amounts]]) -> PendingCommand:
        """The script, with its reply or why there is none. Raises StoreUnavailableError."""
        line = self._open_connection or await self._connection()
        pending = line.send(*_script(scripts.ADMIT, *_admission(identity, wanted, self._reserved, self._not_after())))
        try:
            await pending.signal
        except asyncio.CancelledError:
            pending.on_reply = lambda reply: self._release(identity, wanted, reply)
            raise
        if isinstance(pending.reply, list):
            self._clock.synchronize(cast(int, pending.reply[3]) / 1_000_000, pending.sent, monotonic())
        else:
            self._release(identity, wanted, pending.reply)
        return pending

    def _not_after(self) -> float:
        """Until when the store may run what is sent to it now, by its clock."""
        return self._clock.time_at(monotonic() + self.settings.patience)

    def cached_refusal(self, holders: Sequence[Holder], now: float) -> StoreResult | None:
        """A refusal that was told before and still holds: that of a bucket of requests, which fills evenly, by limits that are the same."""
        for holder in holders:
            until, answer = self._cached_refusals.get(holder.name, (0.0, None))
            if answer is not None and answer.refused is not None and now < until:
                who, refused = answer.refused
                if who == holder:
                    return answer._replace(refused=(who, refused._replace(wait=until - now)))
        return None

    def settle(self, identity: str, reserved: Sequence[tuple[Holder, Amounts]], used: Amounts) -> None:
        """Put what was used in the place of what was reserved, if it was; nobody waits for it."""
        held = self._leases.pop(identity, ())
        if left := tuple(key for key in held if key not in {_keys(holder)[1] for holder, _ in reserved}):
            self._leases[identity] = left
        self._settled += 1
        self._unacknowledged[self._settled] = _script(scripts.SETTLE, *_settlement(identity, reserved, used, self._reserved))
        if len(self._unacknowledged) > _OWED:
            del self._unacknowledged[next(iter(self._unacknowledged))]
        if self._open_connection is not None:
            self._send_settlement(self._open_connection, self._settled)

    def _send_settlement(self, line: StoreConnection, settlement: int) -> None:
        """Of one that is owed, until it is heard."""
        line.send(*self._unacknowledged[settlement]).on_reply = lambda reply: self._acknowledge(settlement, reply)

    def _acknowledge(self, settlement: int, reply: Reply) -> None:
        if not isinstance(reply, ReplyLostError) and not _is_temporary(reply):
            self._unacknowledged.pop(settlement, None)

    def _apply_reply(self, identity: str, wanted: Sequence[tuple[Holder, Amounts]], reply: Reply) -> StoreResult:
        """What a reply says. Raises StoreUnavailableError: there is none, or the store has got to it too late."""
        if not isinstance(reply, list) or _is_late(reply):
            raise StoreUnavailableError
        answer = _parse_result(wanted, cast(list[int], reply), monotonic())
        if answer.refused is None:
            leases = tuple(_keys(holder)[1] for holder, ask in wanted if ask.slots and holder.limits.concurrent is not None)
            if leases:
                self._leases[identity] = (*self._leases.get(identity, ()), *leases)
        elif answer.refused[1].reason == "requests_per_minute":
            self._cached_refusals[answer.refused[0].name] = monotonic() + (answer.refused[1].wait or 0), answer
        return answer

    def _release(self, identity: str, wanted: Sequence[tuple[Holder, Amounts]], reply: Reply) -> None:
        """Nobody has been waiting for what the store says: it was yes, or may have been."""
        if isinstance(reply, ReplyLostError) or (isinstance(reply, list) and reply[0] == _NOBODY):
            self.settle(identity, wanted, Amounts())

    # Being there

    def tick(self) -> None:
        """Called a few times a second: give up what does not answer, try again, keep the leases."""
        now = monotonic()
        if self._open_connection is not None:
            self._open_connection.check(now)
        if self._open_connection is not None and now - self._renewed > _RENEW_EVERY:
            self._renew_leases(self._open_connection, now)
        if self._opening is not None and self._is_available is None and now - self._opened_at > self.settings.patience:
            self._mark_unavailable("it does not answer")
            self._resume_waiting()
        if self._open_connection is None and now - self._opened_at > _RETRY_EVERY:
            self._open()

    def _renew_leases(self, line: StoreConnection, now: float) -> None:
        self._renewed = now
        held = [(key, identity) for identity, keys in self._leases.items() for key in keys]
        if held:
            arguments: list[str | float] = [LEASE, self._not_after(), *(identity for _, identity in held)]
            pending = line.send(*_script(scripts.RENEW, [key for key, _ in held], arguments))
            pending.on_reply = lambda reply: self._leases_renewed(reply, pending.sent)

    def _leases_renewed(self, told: Reply, sent: float) -> None:
        """Whether or not it was too late for it, the next time will be right: nobody else may ask the store for long."""
        if isinstance(told, int):
            self._clock.synchronize(told / 1_000_000, sent, monotonic())

    async def _connection(self) -> StoreConnection:
        """The connection, for those who come before the first attempt is over. Raises StoreUnavailableError."""
        if self._opening is None and self._is_available is None:
            self._open()
        if self._opening is not None and self._is_available is None:
            comer = Signal()
            self._waiting.append(comer)
            await comer
        if self._open_connection is None:
            raise StoreUnavailableError
        return self._open_connection

    def _open(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        self._opened_at = monotonic()
        self._opening = asyncio.get_running_loop().create_task(self._try_to_open())

    async def _try_to_open(self) -> None:
        try:
            line = await self._connect()
        except (OSError, ReplyError) as error:
            self._opening = None
            self._mark_unavailable(str(error))
        else:
            self._opening = None
            self._mark_available(line)
        self._resume_waiting()

    async def _connect(self) -> StoreConnection:
        """A connection that is ready for scripts. Raises OSError and ReplyError."""
        place, loop = self.settings, asyncio.get_running_loop()
        if place.path is not None:
            _, line = await loop.create_unix_connection(lambda: StoreConnection(place.patience, self._connection_lost), place.path)
        else:
            context = ssl.create_default_context() if place.tls else None
            _, line = await loop.create_connection(
                lambda: StoreConnection(place.patience, self._connection_lost), place.host, place.port, ssl=context
            )
        try:
            for pending in [line.send(each) for each in _greeting(place)]:
                await pending.signal
                if isinstance(pending.reply, ReplyError):
                    raise pending.reply
            seconds, microseconds = map(int, cast(list[bytes], pending.reply))
            self._clock.synchronize(seconds + microseconds / 1_000_000, pending.sent, monotonic())
        except BaseException:
            line.transport.abort()
            raise
        return line

    def _mark_available(self, line: StoreConnection) -> None:
        if self._is_available is False:
            _log.warning("the limits' store at %s is back", self.settings)
        if not self._is_available:
            self._on_change(None)
        self._open_connection, self._is_available = line, True
        for settlement in tuple(self._unacknowledged):
            self._send_settlement(line, settlement)
        self._renew_leases(line, monotonic())  # what is in flight may have lost its places

    def _connection_lost(self, line: StoreConnection, reason: str) -> None:
        if line is self._open_connection:
            self._open_connection = None
            self._opened_at = monotonic()
            self._mark_unavailable(reason)

    def _mark_unavailable(self, reason: str) -> None:
        if self.settings.password:  # some servers repeat a command that they refuse
            reason = reason.replace(self.settings.password, "…")
        if self._is_available is not False or reason != self._reason:
            self._on_change(reason)
        self._reason = reason
        if self._is_available is not False:
            meanwhile = "requests of limited keys are refused" if self.settings.refuses else "each gateway counts by itself"
            _log.warning("the limits' store at %s is away (%s); meanwhile %s", self.settings, reason, meanwhile)
        self._is_available = False
        self._cached_refusals.clear()

    def _resume_waiting(self) -> None:
        """Let those go on who came before it was known whether the store is there."""
        comers, self._waiting = self._waiting, []
        for comer in comers:
            comer.set()

    def close(self) -> None:
        """Leave it."""
        if self._opening is not None:
            self._opening.cancel()
        line, self._open_connection = self._open_connection, None
        if line is not None:
            line.fail("the gateway has left it")
        self._resume_waiting()


# On the wire


def _greeting(place: LimitsStore) -> list[bytes]:
    """What is said first on a connection. The last reply is the time."""
    who = [] if place.password is None else [command("AUTH", *([place.user] if place.user else []), place.password)]
    where = [command("SELECT", place.database)] if place.database else []
    load = (command("SCRIPT", "LOAD", each) for each in (scripts.ADMIT, scripts.SETTLE, scripts.RENEW))
    return [*who, *where, *load, command("TIME")]


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


def _admission(
    identity: str, wanted: Sequence[tuple[Holder, Amounts]], reserved: str, not_after: float
) -> tuple[list[str], list[str | float]]:
    keys: list[str] = []
    arguments: list[str | float] = [identity, LEASE, not_after]
    for holder, ask in wanted:
        keys += _keys(holder)
        arguments += [getattr(holder.limits, name) or 0 for name in COUNTED_LIMITS]
        arguments += (ask.requests, ask.slots, ask.tokens, ask.cost)
    return [*keys, reserved], arguments


def _settlement(
    identity: str, wanted: Sequence[tuple[Holder, Amounts]], used: Amounts, reserved: str
) -> tuple[list[str], list[str | float]]:
    keys: list[str] = []
    arguments: list[str | float] = [identity]
    for holder, ask in wanted:
        keys += _keys(holder)
        arguments += rules.settlement_of_buckets(holder.limits, ask, used)
        arguments += rules.settlement_of_calendar(holder.limits, ask, used) if holder.limits.calendar else (0, 0, 0, 0)
    return [*keys, reserved], arguments


def _is_temporary(reply: Reply) -> bool:
    """Whether the store can write nothing at the moment, whatever it is told: it is full, or a replica, or loads its data."""
    return isinstance(reply, ReplyError) and _STATES.search(str(reply)) is not None


def _is_late(reply: Reply) -> bool:
    """Whether the script had come to be run when it was too late, by the store's clock."""
    return isinstance(reply, list) and reply[0] == _LATE


def _parse_result(wanted: Sequence[tuple[Holder, Amounts]], reply: Sequence[int], now: float) -> StoreResult:
    """The script's reply: who refuses (counted from 1, 0: nobody) and why, milliseconds to wait, its time (microseconds), millionths that
    are left of the limit, and of each holder the milliseconds until its buckets are full."""
    who, why, wait, _, left, *rest = reply
    standings = [
        (holder.limits, now + requests / 1000, now + tokens / 1000)
        for (holder, _), requests, tokens in zip(wanted, rest[::2], rest[1::2], strict=True)
    ]
    if who == _NOBODY:
        return StoreResult(None, standings)
    holder, ask = wanted[who - 1]
    reason = COUNTED_LIMITS[why - 1]
    limit, asked = getattr(holder.limits, reason), rules.amount(reason, ask)
    refused = ExceededLimit(reason, limit, None if reason == "concurrent" else wait / 1000, left / 1_000_000 if asked else 0.0, asked)
    return StoreResult((holder, refused), standings)
