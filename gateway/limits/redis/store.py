"""Count limits in a Redis or Valkey that several gateways share.

The rules: a request without a lease costs one script before it is admitted, and one afterwards that no request waits for. A refusal is
confirmed by a second attempt, unless only time can end it. No request waits for an unavailable store; reconnecting happens in the
background. Unsent settlements are replayed after reconnection.

The store is used on a connection after it has written on it (open.lua), because a replica, a full store and a user without permission
accept connections and scripts too. An open connection writes every few seconds, so that the next request does not meet the failure.

An abandoned command may still run later, or never. So an admission carries a deadline by the store's clock, after which it
reserves nothing. A settlement is sent until the store acknowledges it; sending it twice changes nothing.

Requests run without an asyncio task, so nothing here uses the current task. Replies come in the order of the commands, so
checking the age of the oldest command four times a second finds a store that does not reply.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from math import inf
from secrets import token_hex
from time import monotonic
from typing import NamedTuple

from hiredis import ReplyError

from gateway.limits import decision, windows
from gateway.limits.decision import Amounts, Holder
from gateway.limits.redis.connection import PendingCommand, Reply, ReplyLostError, StoreConnection, authentication, connect, packed_command
from gateway.limits.redis.leases import Leases, OnResult
from gateway.limits.redis.scripts import Script, load_scripts
from gateway.limits.states import StoreResult
from gateway.limits.windows import BudgetState, ExceededLimit, Window
from gateway.snapshot.snapshot import Limits, LimitsStore
from upstream.http.inline_task import Signal
from upstream.http.write_batching import WriteBatch

LEASE = 10.0
"""Seconds after which the slots of a gateway that died are free again."""
_RENEW_EVERY = LEASE / 3
_WRITE_EVERY = 5.0  # seconds after which a failure is noticed without requests
_RETRY_EVERY = 1.0  # longer than a reply may take, so earlier commands have finished
_OWED = 10_000  # settlements that are retained while the store is unavailable
_LATE, _ADMITTED = b"-1 ", b"0 "  # starts of the reply of admit.lua
_MOST_ENCODED = 10_000  # holders whose part of a command, or whose refusal, is stored: end users, sessions and subjects are many
_NO_LIMIT = 1e300  # larger than any amount, for a store whose numbers may lack infinity
_PREFIX = "vllm-gateway:"
_STATES = re.compile(  # older servers send the code after ERR; a script without permission has no code
    r"(?:^|-)(?:OOM|READONLY|MISCONF|LOADING|BUSY|MASTERDOWN|NOREPLICAS|NOAUTH|NOPERM) |The user executing the script can't "
)
_log = logging.getLogger("vllm_gateway.limits")

_Command = tuple[bytes, Callable[[], bytes]]
"""The bytes that run a script by its digest, and a function that makes the bytes with its text."""


class StoreUnavailableError(Exception):
    """The limits store cannot be reached, or its reply did not come in time."""


def seconds_ahead(estimate: float, store_time: float, sent: float, now: float) -> float:
    """Return by how many seconds the store's clock, since the epoch, is ahead of this process's monotonic clock, after one more reply.

    ``store_time`` is in the reply; ``sent`` and ``now`` are the ``monotonic`` times of its command and of the reply. The store wrote the
    reply between them. The result stays as close to the earlier estimate as this allows. So a slow reply does not worsen the estimate of
    a quick reply, and a changed clock is followed immediately.
    """
    return min(max(estimate, store_time - now), store_time - sent)


class RedisStore:
    """The limits store as one worker uses it. The first request that needs it opens the connection.

    ``worker`` is a unique name. ``settings`` may be replaced while the counts stay the same. ``on_change`` is called with the error
    when the store becomes unavailable or the reason changes, and with None when it is available again. ``write_batch`` belongs to the
    process. ``is_quiet``: another connection of the gateway logs the state of the store.
    """

    def __init__(
        self,
        settings: LimitsStore,
        worker: str,
        on_change: Callable[[str | None], None],
        write_batch: WriteBatch | None = None,
        *,
        is_quiet: bool = False,
    ) -> None:
        self._level = logging.DEBUG if is_quiet else logging.WARNING
        self.settings = settings
        self._write_batch = write_batch or WriteBatch()
        self._on_change = on_change
        self.scripts = load_scripts()
        self.since = 0.0
        """When the store began to count, by its clock, in seconds since the epoch. It is later than the counts that the store has lost."""
        self.has_just_begun = False
        """Whether no gateway has used the store before, or it was emptied."""
        self._reason: str | None = None
        self._reserved = f"{_PREFIX}reserved {worker}"
        self._by_holder: dict[str, Encoded] = {}
        self._ahead = -inf
        self._open_connection: StoreConnection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._opened_at = 0.0
        self._waiting: list[Signal] = []
        self._is_available: bool | None = None
        self._unacknowledged: dict[int, _Command] = {}
        self._settled = 0
        token = token_hex(4)
        self.leases = Leases(self.reserve_in_background, self.settle, (f"{token}-{number}" for number in count()))
        self._slot_leases: dict[str, tuple[str, ...]] = {}
        self._renewed = self._written = 0.0
        self._cached_refusals: dict[str, tuple[float, StoreResult]] = {}

    # Requests

    async def admit(self, identity: str, wanted: Sequence[tuple[Holder, Amounts]]) -> StoreResult:
        """Reserve amounts from each holder, or from none. Raises StoreUnavailableError."""
        pending = await self._run_admission(identity, wanted)
        if _is_late(pending.reply) and monotonic() - pending.sent < self.settings.timeout:
            # Its clock was changed, which this reply has shown.
            pending = await self._run_admission(identity, wanted)
        result = self._apply_reply(identity, wanted, pending.reply)
        if result.exceeded is None:
            return result
        holds_leases = self.leases.end_those_of(holder for holder, _ in wanted)  # they are settled before the second attempt
        if result.exceeded[1].reason == "requests_per_minute" and not holds_leases:
            return result
        self._cached_refusals.pop(result.exceeded[0].name, None)
        # Another gateway or worker may have sent the settlement of the client's previous request just before. The store does not read its
        # connections in the order in which bytes arrived. But it reads all of them before it reads this one again.
        pending = await self._run_admission(identity, wanted)
        again = self._apply_reply(identity, wanted, pending.reply)
        return again._replace(evicted=result.evicted + again.evicted)

    async def read(self, identity: str, holders: Sequence[Holder]) -> StoreResult:
        """Return the state of each holder: this is an admission without amounts, which is settled immediately.

        Raises StoreUnavailableError.
        """
        wanted = [(holder, Amounts()) for holder in holders]
        self.leases.end_those_of(holders)
        result = await self.admit(identity, wanted)
        self.settle(identity, wanted, Amounts())
        return result

    def reserve_in_background(self, identity: str, wanted: Sequence[tuple[Holder, Amounts]], on_result: OnResult) -> None:
        """Reserve amounts from each holder for no request in particular. Nothing is reserved while the store is unavailable."""
        if (line := self._open_connection) is None:
            on_result(None, 0.0, 0.0)
            return
        pending = line.send(*self._admission(identity, wanted))

        def apply(reply: Reply) -> None:
            if not isinstance(reply, bytes) or not reply.startswith(_ADMITTED):
                self._release(identity, wanted, reply)
                on_result(None, 0.0, 0.0)
                return
            wall = _store_time(reply)
            self._synchronize(wall, pending.sent)
            on_result(_parse_result(wanted, reply, monotonic()), pending.sent, wall)

        pending.on_reply = apply

    async def _run_admission(self, identity: str, wanted: Sequence[tuple[Holder, Amounts]]) -> PendingCommand:
        """Run admit.lua and return the command with its reply. Raises StoreUnavailableError."""
        pending = (self._open_connection or await self._connection()).send(*self._admission(identity, wanted))
        try:
            await pending.signal
        except asyncio.CancelledError:
            pending.on_reply = lambda reply: self._release(identity, wanted, reply)
            raise
        if isinstance(pending.reply, bytes):
            self._synchronize(_store_time(pending.reply), pending.sent)
        else:
            self._release(identity, wanted, pending.reply)
        return pending

    def _not_after(self) -> float:
        """Return the time, by the store's clock, until which it may run a command that is sent now."""
        return monotonic() + self.settings.timeout + self._ahead

    def _synchronize(self, store_time: float, sent: float) -> None:
        self._ahead = seconds_ahead(self._ahead, store_time, sent, monotonic())

    def cached_refusal(self, holders: Sequence[Holder], now: float) -> StoreResult | None:
        """Return a stored refusal that still holds, or None.

        Only refusals by requests per minute are stored, since that bucket refills evenly. They hold while the limits stay the same.
        """
        for holder in holders:
            until, result = self._cached_refusals.get(holder.name, (0.0, None))
            if result is not None and result.exceeded is not None and now < until:
                refusing, limit = result.exceeded
                if refusing == holder:
                    return result._replace(exceeded=(holder, limit._replace(wait=until - now)))
        return None

    def settle(self, identity: str, reserved: Sequence[tuple[Holder, Amounts]], used: Amounts, open_requests: Sequence[str] = ()) -> None:
        """Replace what was reserved by what was used. No request waits for the reply.

        ``open_requests`` are those of an ended lease: they are settled separately.
        """
        held = self._slot_leases.pop(identity, ())
        if left := tuple(key for key in held if key not in {_keys(holder)[1] for holder, _ in reserved}):
            self._slot_leases[identity] = left
        self._settled += 1
        self._unacknowledged[self._settled] = self._settlement(" ".join((identity, *open_requests)), reserved, used)
        if len(self._unacknowledged) > _OWED:
            del self._unacknowledged[next(iter(self._unacknowledged))]
        if self._open_connection is not None:
            self._send_settlement(self._open_connection, self._settled)

    # Commands

    async def run(self, script: Script, keys: Sequence[str], arguments: Sequence[str]) -> bytes:
        """Run a script, and return its reply. Raises StoreUnavailableError."""
        pending = (self._open_connection or await self._connection()).send(*_command(script, keys, arguments))
        await pending.signal
        if not isinstance(pending.reply, bytes):
            raise StoreUnavailableError
        return pending.reply

    def _admission(self, identity: str, wanted: Sequence[tuple[Holder, Amounts]]) -> _Command:
        keys: list[str] = []
        arguments = [identity, f"{LEASE} {self._not_after()!r}"]
        for holder, amounts in wanted:
            parts = self._encoded(holder)
            keys += parts.keys
            arguments += parts.limits, f"{amounts.requests} {amounts.slots} {amounts.tokens} {amounts.cost}"
        return _command(self.scripts["admit"], (*keys, self._reserved), arguments)

    def _settlement(self, identity: str, reserved: Sequence[tuple[Holder, Amounts]], used: Amounts) -> _Command:
        keys: list[str] = []
        arguments = [identity]
        for holder, amounts in reserved:
            parts = self._encoded(holder)
            keys += parts.keys
            added: list[float] = [*decision.settlement_of_buckets(holder.limits, amounts, used)]
            for window in holder.windows:
                added += windows.settlement(window, (amounts.tokens, amounts.cost), (used.tokens, used.cost))
            arguments += parts.windows, " ".join(map(repr, added))
        return _command(self.scripts["settle"], (*keys, self._reserved), arguments)

    def _encoded(self, holder: Holder) -> Encoded:
        found = self._by_holder.get(holder.name)
        if found is None or found.holder is not holder:
            if len(self._by_holder) >= _MOST_ENCODED:
                self._by_holder.clear()
            found = self._by_holder[holder.name] = encoded(holder)
        return found

    def _send_settlement(self, line: StoreConnection, settlement: int) -> None:
        """Send a settlement, which stays in the list until it is acknowledged."""
        line.send(*self._unacknowledged[settlement]).on_reply = lambda reply: self._acknowledge(settlement, reply)

    def _acknowledge(self, settlement: int, reply: Reply) -> None:
        """Forget a settlement, unless the store cannot write now: it is full, a replica, without permission, loading, or gone."""
        if not isinstance(reply, ReplyLostError) and not (isinstance(reply, ReplyError) and _STATES.search(str(reply))):
            self._unacknowledged.pop(settlement, None)

    def _apply_reply(self, identity: str, wanted: Sequence[tuple[Holder, Amounts]], reply: Reply) -> StoreResult:
        """Return the result in a reply, and remember its leases. Raises StoreUnavailableError without a reply or if it is too late."""
        if not isinstance(reply, bytes) or _is_late(reply):
            raise StoreUnavailableError
        result = _parse_result(wanted, reply, monotonic())
        if result.exceeded is None:
            leases = tuple(_keys(holder)[1] for holder, amounts in wanted if amounts.slots and holder.limits.concurrent is not None)
            if leases:
                self._slot_leases[identity] = (*self._slot_leases.get(identity, ()), *leases)
        elif result.exceeded[1].reason == "requests_per_minute":
            if len(self._cached_refusals) >= _MOST_ENCODED:
                self._cached_refusals.clear()
            self._cached_refusals[result.exceeded[0].name] = monotonic() + (result.exceeded[1].wait or 0), result
        return result

    def _release(self, identity: str, wanted: Sequence[tuple[Holder, Amounts]], reply: Reply) -> None:
        """Release a reservation that no request waits for, if it was made or may have been made."""
        if isinstance(reply, ReplyLostError) or (isinstance(reply, bytes) and reply.startswith(_ADMITTED)):
            self.settle(identity, wanted, Amounts())

    # The connection

    def tick(self) -> None:
        """Give up a store that does not reply, reconnect, and renew and end the leases. Called four times a second."""
        now = monotonic()
        self.leases.tick(now)
        if self._open_connection is not None:
            self._open_connection.check(now)
        if self._open_connection is not None and now - self._renewed > _RENEW_EVERY:
            self._renew_slots(self._open_connection, now)
        if self._open_connection is not None and now - self._written > _WRITE_EVERY:
            self._written = now
            trial = self._open_connection.send(*_trial(self.scripts))
            trial.on_reply = lambda reply: self._apply_trial(reply, trial.sent)
        if self._opening is not None and self._is_available is None and now - self._opened_at > self.settings.timeout:
            self._mark_unavailable("it does not respond")
            self._resume_waiting()
        if self._open_connection is None and self._opening is None and now - self._opened_at > _RETRY_EVERY:
            self._open()

    def _renew_slots(self, line: StoreConnection, now: float) -> None:
        self._renewed = now
        if held := [(key, identity) for identity, keys in self._slot_leases.items() for key in keys]:
            arguments = [str(LEASE), repr(self._not_after()), *(identity for _, identity in held)]
            pending = line.send(*_command(self.scripts["renew"], [key for key, _ in held], arguments))
            pending.on_reply = lambda reply: self._slots_renewed(reply, pending.sent)

    def _slots_renewed(self, store_time: Reply, sent: float) -> None:
        """Synchronize the clock. Late renewals work too, and the next renewal is in time."""
        if isinstance(store_time, int):
            self._synchronize(store_time / 1_000_000, sent)

    async def _connection(self) -> StoreConnection:
        """Return the connection; wait for the first attempt to connect. Raises StoreUnavailableError."""
        if self._opening is None and self._is_available is None:
            self._open()
        if self._opening is not None and self._is_available is None:
            signal = Signal()
            self._waiting.append(signal)
            await signal
        if self._open_connection is None:
            raise StoreUnavailableError
        return self._open_connection

    def _open(self) -> None:
        self._opened_at = monotonic()
        self._opening = asyncio.get_running_loop().create_task(self._try_to_open())

    async def _try_to_open(self) -> None:
        try:
            new = partial(StoreConnection, self.settings.timeout, self._connection_lost, self._write_batch)
            line, trial = await connect(self.settings, new, _greeting(self.settings, self.scripts))
        except (OSError, ReplyError) as error:
            self._opening = None
            self._mark_unavailable(str(error))
        else:
            self._opening = None
            self._apply_trial(trial.reply, trial.sent)
            self._written = monotonic()
            self._mark_available(line)
        self._resume_waiting()

    def _apply_trial(self, reply: Reply, sent: float) -> None:
        """Synchronize the clock, and remember since when the store counts."""
        if isinstance(reply, bytes):
            now, since = (int(each) / 1_000_000 for each in reply.split())
            self._synchronize(now, sent)
            self.since, self.has_just_begun = since, now == since

    def _mark_available(self, line: StoreConnection) -> None:
        if self._is_available is False:
            _log.log(self._level, "the limits store at %s is available again", self.settings)
        if not self._is_available:
            self._on_change(None)
        self._open_connection, self._is_available = line, True
        for settlement in tuple(self._unacknowledged):
            self._send_settlement(line, settlement)
        self._renew_slots(line, monotonic())  # leases of requests in flight may have expired

    def _connection_lost(self, line: StoreConnection, reason: str) -> None:
        if line is self._open_connection:
            self._open_connection = None
            self._opened_at = monotonic()
            self._mark_unavailable(reason)

    def _mark_unavailable(self, reason: str) -> None:
        if self.settings.password:  # some servers repeat a refused command in the error
            reason = reason.replace(self.settings.password, "…")
        if self._is_available is not False or reason != self._reason:
            self._on_change(reason)
        self._reason = reason
        if self._is_available is not False:
            meanwhile = "requests of limited keys are refused" if self.settings.refuses else "each gateway counts by itself"
            _log.log(self._level, "the limits store at %s is unavailable (%s); meanwhile %s", self.settings, reason, meanwhile)
        self._is_available = False
        self._cached_refusals.clear()
        self.leases.end_all()

    def _resume_waiting(self) -> None:
        """Resume the requests that waited for the first attempt to connect."""
        waiting, self._waiting = self._waiting, []
        for signal in waiting:
            signal.set()

    def close(self) -> None:
        """End the leases and close the connection."""
        self.leases.stop()
        if self._opening is not None:
            self._opening.cancel()
        line, self._open_connection = self._open_connection, None
        if line is not None:
            line.transport.flush()
            line.fail("the gateway closed the connection")
        self._resume_waiting()


# On the wire


def _greeting(settings: LimitsStore, scripts: dict[str, Script]) -> list[bytes]:
    """Return the first commands of a connection. The last one returns the time."""
    select = [packed_command("SELECT", settings.database)] if settings.database else []
    load = (packed_command("SCRIPT", "LOAD", scripts[name].text) for name in ("open", "admit", "settle", "renew"))
    return [*authentication(settings), *select, *load, _trial(scripts)[0]]


def _trial(scripts: dict[str, Script]) -> _Command:
    """Return a command that writes in the store, as the commands of requests do."""
    return _command(scripts["open"], [f"{_PREFIX}{name}" for name in ("store", "trial", "trial leases")], ())


def _command(script: Script, keys: Sequence[str], arguments: Sequence[str]) -> _Command:
    rest: tuple[str | int, ...] = len(keys), *keys, *arguments
    return packed_command("EVALSHA", script.digest, *rest), lambda: packed_command("EVAL", script.text, *rest)


class Encoded(NamedTuple):
    """The parts of commands that are the same for all requests of a holder: its two keys, its limits, its windows."""

    holder: Holder
    keys: tuple[str, str]
    limits: str
    windows: str


def encoded(holder: Holder) -> Encoded:
    """Return the parts of commands for a holder."""
    limits: list[object] = [getattr(holder.limits, name) or 0 for name in decision.RATES]
    names: list[object] = []
    for window in holder.windows:
        names += (window.name, window.slice_seconds)
        limits += (window.name, window.slice_seconds, _limit(window.tokens), _limit(window.cost))
        limits += (min(window.tokens_ahead, _NO_LIMIT), min(window.cost_ahead, _NO_LIMIT))
    return Encoded(holder, _keys(holder), " ".join(map(str, limits)), " ".join(map(str, names)))


def _keys(holder: Holder) -> tuple[str, str]:
    """Return the keys of a holder's counts and of its leases; for a session, the key of its owner's sessions instead of the leases."""
    if holder.windows and holder.windows[0].name == "session":
        return f"{_PREFIX}{holder.name}", f"{_PREFIX}{holder.name.rpartition(' ')[0]}s"
    return f"{_PREFIX}{holder.name}", f"{_PREFIX}{holder.name} leases"


def _limit(limit: float) -> float:
    return 0 if limit == inf else limit


def _is_late(reply: Reply) -> bool:
    """Check whether the script ran after the deadline of the request."""
    return isinstance(reply, bytes) and reply.startswith(_LATE)


def _store_time(reply: bytes) -> float:
    """Return the time, in seconds since the epoch, at which the script ran."""
    return int(reply.split(b" ", 4)[3]) / 1_000_000


def parse_usage(holder: Holder, numbers: Iterator[int]) -> Iterator[tuple[Window, int, int, float]]:
    """Yield each window of a holder with its tokens, its cost, and the seconds until nothing of it is used."""
    for window in holder.windows:
        yield window, next(numbers), next(numbers), next(numbers) / 1000


def _parse_result(wanted: Sequence[tuple[Holder, Amounts]], reply: bytes, now: float) -> StoreResult:
    """Parse the reply of admit.lua.

    It contains the number of the holder that refuses and of its limit, milliseconds to wait, the time, what is left, the sessions that
    were forgotten, and for each holder the milliseconds until each bucket is full, and the tokens, the cost and the milliseconds of each
    window.
    """
    refusing, limit_number, wait, _, left, evicted, *rest = reply.split()
    numbers, number = map(int, rest), int(refusing)
    full_times: list[tuple[Limits, float, float]] = []
    budgets: list[tuple[Holder, BudgetState]] = []
    for holder, _ in wanted:
        full_times.append((holder.limits, now + next(numbers) / 1000, now + next(numbers) / 1000))
        for window, tokens, cost, reset in parse_usage(holder, numbers):
            budgets += ((holder, state) for state in windows.states_of(window, tokens, cost, reset))
    exceeded = None
    if number:
        refused = wanted[number - 1]
        exceeded = refused[0], _exceeded(*refused, int(limit_number), int(wait) / 1000, float(left))
    return StoreResult(exceeded, full_times, budgets, int(evicted))


def _exceeded(holder: Holder, amounts: Amounts, number: int, wait: float, left: float) -> ExceededLimit:
    """Return the limit with a number of admit.lua."""
    if number <= len(decision.RATES):
        return decision.exceeded_rate(holder, amounts, decision.RATES[number - 1], wait, left)
    index, is_cost = divmod(number - len(decision.RATES) - 1, 2)
    return windows.exceeded_budget(holder.windows[index], bool(is_cost), wait, left, amounts.cost if is_cost else amounts.tokens)
