"""The worker processes as control runs them: started, sent snapshots and health, monitored and replaced.

The rules: a worker's number, listening socket, counters, buckets, seat and journal outlive its process, so its successor continues its
counts. A new process first gets the snapshot and the health of the servers. A worker that exits is replaced immediately. If a worker exits
repeatedly soon after its start, or cannot be started, it is replaced after a growing pause. A worker that hangs is killed and replaced.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from gateway.limits.limiter import shown_budgets
from gateway.limits.shared_counts import Buckets
from gateway.limits.user_table import users_held
from gateway.limits.windows import BudgetState
from gateway.snapshot import link
from gateway.snapshot.snapshot import Allowance, Snapshot
from gateway.system.acceptor import Seats
from gateway.system.tasks import cancel, wait_at_most, wait_until
from gateway.telemetry.metrics import reset_gauges
from gateway.telemetry.shared_counters import SharedCounters
from gateway.worker.slot_signals import SlotSignals
from upstream.backoff import Backoff
from upstream.balancing.placement_log import PlacementLog
from upstream.balancing.server import Progress

if TYPE_CHECKING:
    from gateway.ledger.writer import Ledger

CHECK_INTERVAL = 5.0
"""Seconds between two liveness checks of the workers."""
_MAX_UNANSWERED = 6  # checks in a row without a reply, after which a worker hangs: half a minute, whatever the clock does
_MAX_UNANSWERED_AT_START = 12  # the same for a worker that does not serve yet: a start on a slow machine takes time
_EXIT_GRACE = 5.0  # seconds that a drained worker may take to exit
_SHORT_LIFE = 5.0  # seconds: a worker that exits earlier is replaced after a pause
PAUSES = 1.0, 8.0  # seconds, at first and at most
_PROGRESS_AGE = 3.0  # seconds after which a worker's report of progress is out of date
_APPLY_TIMEOUT = 5.0  # seconds in which every worker should have applied a message
_MAX_WITHOUT_WORKERS = 60.0  # seconds without a running worker, after which none is expected to start
_CHANGES = link.SnapshotApplied | link.HealthApplied | link.ModelRequested | link.UnknownSigningKey  # messages that control acts on
_log = logging.getLogger("vllm_gateway.control")


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as /status shows it.

    ``version`` is the version of the snapshot that it uses. ``restarts`` counts unexpected exits. ``unanswered`` counts
    consecutive liveness checks without a reply. ``since`` is when its process was started, in seconds since the epoch. ``connections`` are
    those of clients, None for a single worker, which does not publish them.
    """

    number: int
    pid: int | None
    up: bool
    version: int
    restarts: int
    unanswered: int
    since: float | None = None
    connections: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerEvents:
    """The callbacks of the supervisor.

    ``changed`` is called after a message of ``_CHANGES`` from a worker, and after its exit. ``unknown_signing_key`` is called with the
    issuer of a token whose signing key a worker does not have. ``usage_requested`` is called with a key's request for its usage, and a
    function that sends the reply; ``page_requested`` likewise with a request for a page that control serves. ``requests_rejected`` is
    called with requests that had no valid key, if there is a ledger.
    """

    changed: Callable[[], None]
    unknown_signing_key: Callable[[str], None]
    usage_requested: Callable[[link.UsageRequested, Callable[[link.UsageReported], None]], None] = lambda _, __: None
    page_requested: Callable[[link.PageRequested, Callable[[link.PageResponded], None]], None] = lambda _, __: None
    requests_rejected: Callable[[link.RejectedRequests], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class _Inherited:
    """Resources that every worker process inherits. ``seats`` and ``slots`` are None for a single worker, ``ledger`` without one."""

    listener: socket.socket
    buckets: Buckets
    placements: PlacementLog
    seats: Seats | None
    ledger: Ledger | None
    slots: SlotSignals | None
    counters: tuple[SharedCounters, ...]
    """The counters of each worker. A worker writes its own, and reads the use of keys in the others."""


class _WorkerSlot:
    """One worker: its number and counters, and its current process."""

    def __init__(self, number: int, inherited: _Inherited, events: WorkerEvents) -> None:
        self.number = number
        self.counters = inherited.counters[number]
        self._inherited = inherited
        self._events = events
        # State of the current process
        self._to_worker: link.Link | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._since: float | None = None
        self._unanswered = 0
        self._version = 0
        self._health_number = 0
        self.requested: dict[str, float | None] = {}
        self.choices: dict[str, link.ChoiceExplained] = {}
        self.store: link.StoreStatus | None = None
        self.progress: tuple[float, link.ServerProgress] | None = None
        """The last message about the progress of servers, and when it arrived."""
        # State across all processes of this worker
        self._restarts = 0
        self._drain: link.Drain | None = None  # set once the worker must exit without a replacement

    @property
    def status(self) -> WorkerStatus:
        pid = self._process.pid if self._process is not None and self._process.returncode is None else None
        up = self._to_worker is not None and self._version > 0
        seats = self._inherited.seats
        connections = None if seats is None else seats.count(self.number)
        return WorkerStatus(self.number, pid, up, self._version, self._restarts, self._unanswered, self._since, connections)

    def has_applied(self, number: int) -> bool:
        """Return whether the worker has applied this ``Health`` message or a later one. A new process applies it at its start."""
        return self._to_worker is None or self._health_number >= number

    def send(self, message: link.Message) -> None:
        if self._to_worker is not None:
            self._to_worker.send(message)

    def check(self) -> None:
        """Send a liveness check, and kill a process that has not replied to too many checks."""
        process = self._process
        if process is None or process.returncode is not None or self._to_worker is None or self._drain:
            return
        if self._unanswered >= (_MAX_UNANSWERED if self.status.up else _MAX_UNANSWERED_AT_START):
            _log.error("worker %d does not respond and is killed", self.number)
            process.kill()
            return
        self._unanswered += 1
        self.send(link.Ping())

    def drain(self, seconds: float) -> None:
        """Let the process finish its requests and exit, without a successor."""
        self._drain = link.Drain(seconds)
        self.send(self._drain)

    async def run(self, first_messages: Callable[[], Iterable[link.Message]]) -> None:
        """Keep a process running until it is drained, or until cancelled."""
        backoff = Backoff(*PAUSES, spread=0.0)
        while not self._drain:
            started, self._since = time.monotonic(), time.time()
            try:
                await self._run_process(first_messages)
            except (OSError, RuntimeError) as error:  # no file descriptor, no process, or no thread (RuntimeError of threading)
                _log.error("worker %d cannot be started and will be retried: %s", self.number, error)
            else:
                if not self._drain:
                    self._restarts += 1
                    _log.error("worker %d exited unexpectedly and is restarted", self.number)
            if not self._drain:
                await asyncio.sleep(pause_after(time.monotonic() - started, backoff))

    async def _run_process(self, first_messages: Callable[[], Iterable[link.Message]]) -> None:
        """Run one process to its end. Raises OSError or RuntimeError if it cannot be started."""
        async with self._started() as to_worker:
            self._to_worker = to_worker
            try:
                for message in first_messages():
                    to_worker.send(message)
                if self._drain is not None:  # requested while the process was being started
                    to_worker.send(self._drain)
                await self._receive(to_worker)
            except link.LinkBrokenError as error:
                _log.error("worker %d: %s", self.number, error)
            finally:
                self._to_worker, self._version, self._health_number, self._unanswered = None, 0, 0, 0
                self.requested, self.store = {}, None
                self._events.changed()

    async def _receive(self, to_worker: link.Link) -> None:
        async for message in to_worker.messages():
            match message:
                case link.Ping():
                    self._unanswered = 0
                case link.SnapshotApplied(version=version):
                    self._version = version
                case link.HealthApplied(number=number):
                    self._health_number = number
                case link.ModelRequested(model=model, since=since):
                    self.requested[model] = since
                case link.UnknownSigningKey(issuer=issuer):
                    self._events.unknown_signing_key(issuer)
                case link.StoreStatus():
                    self.store = message
                case link.ServerProgress():
                    self.progress = time.monotonic(), message
                case link.ChoiceExplained(model=model):
                    self.choices[model] = message
                case link.UsageRequested():
                    self._events.usage_requested(message, to_worker.send)
                case link.PageRequested():
                    self._events.page_requested(message, to_worker.send)
                case link.RejectedRequests():
                    self._events.requests_rejected(message)
            if isinstance(message, _CHANGES):
                self._events.changed()

    @asynccontextmanager
    async def _started(self) -> AsyncIterator[link.Link]:
        """Start a process and open the link to it. On exit the process has ended: by itself when its link closes, otherwise by SIGKILL."""
        ours, theirs = socket.socketpair()
        inherited, ledger = self._inherited, self._inherited.ledger
        descriptors = [("--control-fd", theirs.fileno()), *self._descriptors()]
        arguments = [argument for option, fd in descriptors for argument in (option, str(fd))]
        if ledger is not None:
            arguments += ["--spool", str(ledger.folder)]
        with theirs:
            to_worker = link.Link(*await asyncio.open_connection(sock=ours, limit=link.READ_AHEAD))
            try:
                process = self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-m", "gateway.worker.process", "worker", str(self.number), *arguments,
                    stdin=asyncio.subprocess.DEVNULL, pass_fds=[fd for _, fd in descriptors],
                )  # fmt: skip
            except BaseException:
                to_worker.close()
                raise
        try:  # nothing is awaited between the process's start and this line, so a cancellation leaves no process behind
            yield to_worker
        finally:
            to_worker.close()
            await _ended(process)
            if inherited.seats is not None:
                inherited.seats.vacate(self.number)
            if inherited.slots is not None:
                reset_gauges(self.counters)  # the slots of its requests are free
                inherited.slots.wake_all()
            if ledger is not None:
                ledger.worker_gone(self.number)

    def _descriptors(self) -> Iterator[tuple[str, int]]:
        """Yield the inherited file descriptors, each with its option of the worker."""
        inherited = self._inherited
        yield "--listen-fd", inherited.listener.fileno()
        yield "--counters-fd", self.counters.fd
        yield from (("--peer-counters-fd", each.fd) for each in inherited.counters if each is not self.counters)
        yield "--buckets-fd", inherited.buckets.fd
        yield "--placements-fd", inherited.placements.fd
        if inherited.seats is not None:
            yield "--seats-fd", inherited.seats.fd
        if inherited.slots is not None:
            yield "--slots-fd", inherited.slots.locks
            yield from (("--signal-fd", fd) for fd in inherited.slots.signals)
        if inherited.ledger is not None:
            yield "--journal-fd", inherited.ledger.journals[self.number].fd


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Wait for a process to exit. It is killed after a timeout, and when the wait is cancelled."""
    try:
        await wait_at_most(_EXIT_GRACE, process.wait())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class WorkerSupervisor:
    """All workers of a gateway. Each worker has a separate slot, in which its process is kept running.

    ``buckets`` are the counts of limits, which all workers share. ``placements`` is the log of placements, in which control's section is
    the last one. ``snapshot`` is the last snapshot that was sent; None before the first. ``ledger`` has a journal for each worker.
    """

    def __init__(self, listener: socket.socket, count: int, events: WorkerEvents, ledger: Ledger | None = None) -> None:
        self.buckets = Buckets.create("buckets", count)
        self.placements = PlacementLog.create(count + 1, count)
        self._seats = Seats.create(count) if count > 1 else None
        self.boards = tuple(SharedCounters.create(f"worker-{number}") for number in range(count))
        """The workers' shared counters."""
        self._signals = SlotSignals.create(count) if count > 1 else None
        inherited = _Inherited(listener, self.buckets, self.placements, self._seats, ledger, self._signals, self.boards)
        self._slots = tuple(_WorkerSlot(number, inherited, events) for number in range(count))
        self._preparation: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.snapshot: Snapshot | None = None
        self._health = link.Health({}, {})
        self._is_keep_alive_stopped = False
        self._last_up = time.monotonic()
        self.before_start: Callable[[Snapshot], Awaitable[None]] = _nothing
        """Awaited with the first snapshot before the first processes start."""
        self.stored_keys: Callable[[], Iterable[link.StoredKeys]] = tuple
        """Returns the store's keys, which a new process gets before the snapshot."""
        self.more_first_messages: Callable[[], Iterable[link.Message]] = tuple
        """Returns what a new process gets after the snapshot."""

    @property
    def statuses(self) -> tuple[WorkerStatus, ...]:
        return tuple(slot.status for slot in self._slots)

    def apply_snapshot(self, snapshot: Snapshot, health: link.Health) -> int:
        """Send a snapshot, with the health of its servers, to every worker. The first call starts the processes.

        Returns the number of the health message, as ``apply_health`` does.
        """
        self.snapshot = snapshot
        self._number(health)
        self.send(link.ApplySnapshot(snapshot, self._health))
        if not self._tasks:
            self._preparation = preparation = asyncio.ensure_future(self.before_start(snapshot))
            self._tasks = [asyncio.create_task(self._run(slot, preparation)) for slot in self._slots]
        return self._health.number

    async def _run(self, slot: _WorkerSlot, preparation: asyncio.Future[None]) -> None:
        await asyncio.shield(preparation)
        await slot.run(self._first_messages)

    def apply_health(self, health: link.Health) -> int:
        """Send the health of servers to every worker. Returns the number under which ``have_applied`` knows the message."""
        self._number(health)
        self.send(self._health)
        return self._health.number

    def _number(self, health: link.Health) -> None:
        self._health = msgspec.structs.replace(health, number=self._health.number + 1)

    def _first_messages(self) -> Iterable[link.Message]:
        assert self.snapshot is not None
        return (
            *self.stored_keys(),
            link.ApplySnapshot(self.snapshot, self._health),
            *self.more_first_messages(),
            *((link.StopKeepAlive(),) if self._is_keep_alive_stopped else ()),
        )

    def send(self, message: link.Message) -> None:
        """Send a message to every worker."""
        for slot in self._slots:
            slot.send(message)

    def have_applied(self, number: int) -> bool:
        """Return whether every worker has applied the health message with this number, or a later one."""
        return all(slot.has_applied(number) for slot in self._slots)

    async def wait_applied(self, number: int, within: float = _APPLY_TIMEOUT) -> None:
        """Wait until every worker has applied the health message with this number, for ``within`` seconds at most."""
        await wait_at_most(within, wait_until(lambda: self.have_applied(number), 0.005))

    def requested_since(self, model: str) -> float | None:
        """Return the time since which requests wait for a model, in seconds of the monotonic clock, or None if no request waits."""
        return min((since for slot in self._slots if (since := slot.requested.get(model)) is not None), default=None)

    def server_progress(self) -> dict[str, Progress]:
        """Return the progress of the servers whose responses are awaited, over all workers that reported it recently."""
        since, merged = time.monotonic() - _PROGRESS_AGE, dict[str, Progress]()
        recent = (slot.progress[1] for slot in self._slots if slot.progress is not None and slot.progress[0] > since)
        for name, one in (each for message in recent for each in message.servers.items()):
            before = merged.get(name, Progress(0.0, 0.0))
            merged[name] = Progress(max(before.last_byte_at, one.last_byte_at), before.prefill + one.prefill)
        return merged

    def last_choice(self, model: str) -> link.ChoiceExplained | None:
        """Return the last explained choice of a server for a model; None without one."""
        return max([slot.choices[model] for slot in self._slots if model in slot.choices], key=lambda choice: choice.time, default=None)

    def budgets(self, stored: Iterable[Allowance] = ()) -> Iterator[tuple[str, BudgetState]]:
        """Yield each budget of the configured keys and teams, and of the stored ones, with the name of its holder."""
        configured = () if self.snapshot is None else (each for key in self.snapshot.keys for each in key.allowances)
        return shown_budgets(self.buckets, (*configured, *stored))

    def users_held(self) -> Mapping[str, int]:
        """Return how many end users have their own counts, by the key or team that limits them."""
        allowances = () if self.snapshot is None else (each for key in self.snapshot.keys for each in key.allowances)
        return users_held(self.buckets, {each.holder for each in allowances if each.users is not None})

    def store_status(self) -> link.StoreStatus | None:
        """Return the status of the limits store: unreachable if any worker cannot reach it. None: it is not used, or not reported yet."""
        if self.snapshot is None or not self.snapshot.uses_store:
            return None
        known = [slot.store for slot in self._slots if slot.store is not None]
        return next((status for status in known if status.error is not None), known[0] if known else None)

    async def watch(self) -> None:
        """Check the workers every ``CHECK_INTERVAL`` seconds, until cancelled."""
        while True:
            self.check(time.monotonic())
            await asyncio.sleep(CHECK_INTERVAL)

    def check(self, now: float) -> None:
        """Check whether the workers respond. ``now`` is the time of the monotonic clock."""
        if any(status.up for status in self.statuses):
            self._last_up = now
        for slot in self._slots:
            slot.check()

    def failure(self, now: float) -> str | None:
        """Explain why no worker will start again without help. None: the supervisor is working."""
        if any(task.done() for task in self._tasks):
            return "the supervision of a worker has ended"
        return "no worker starts" if now - self._last_up > _MAX_WITHOUT_WORKERS else None

    def stop_keep_alive(self) -> None:
        """Let clients reconnect elsewhere: each connection closes after its response."""
        self._is_keep_alive_stopped = True
        self.send(link.StopKeepAlive())

    async def drain(self, seconds: float) -> None:
        """Let open requests finish within ``seconds``, and the workers exit."""
        for slot in self._slots:
            slot.drain(seconds)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds + _EXIT_GRACE)

    async def aclose(self) -> None:
        """End every worker, drained or not, and release the shared memory."""
        await cancel(*self._tasks, *([] if self._preparation is None else [self._preparation]))
        for slot in self._slots:
            slot.counters.close()
        self.buckets.close()
        self.placements.close()
        if self._seats is not None:
            self._seats.close()
        if self._signals is not None:
            self._signals.close()


async def _nothing(_: Snapshot) -> None:
    """Do nothing: nothing is awaited before the workers start."""


def pause_after(lifetime: float, backoff: Backoff) -> float:
    """Return the seconds before a worker that ran for ``lifetime`` seconds is replaced. ``backoff``: for those that exit early."""
    if lifetime < _SHORT_LIFE:
        return backoff.next_pause()
    backoff.reset()
    return 0.0
