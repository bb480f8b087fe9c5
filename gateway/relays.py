"""The worker processes, as control keeps them: started, told, watched, replaced.

The rules: a worker's number, listening socket, scoreboard, meters, seat and journal outlive its process, so its successor takes over its
counts; what every worker must know is sent to a new one first; a worker that dies is replaced at once, and one that
dies young again and again, or cannot be started, is replaced more slowly; one that hangs is killed, so that it is replaced too.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from gateway.acceptor import Seats
from gateway.limits.meters import Meters
from gateway.link import (
    AHEAD,
    Asked,
    Configure,
    Drain,
    Health,
    Learned,
    Leave,
    Link,
    LinkBrokenError,
    Message,
    Ping,
    StoreState,
    Taken,
    Unknown,
)
from gateway.scoreboard import Board
from gateway.state import Snapshot

if TYPE_CHECKING:
    from gateway.ledger.writer import Ledger

_EXIT_GRACE = 5.0  # seconds that a drained worker may take to exit
_SHORT_LIFE = 5.0  # a worker that dies younger than this is replaced after a pause
_PAUSE, _LONGEST_PAUSE = 1.0, 8.0  # seconds: doubled each time
LOOK = 5.0
"""Seconds between two looks at whether workers answer."""
_PATIENCE = 6  # looks without an answer, after which a worker hangs: half a minute, and no matter what the clock does
_PATIENCE_AT_BIRTH = 12  # the same for one that does not serve yet: on a slow machine a start takes its time
_TAKEN = 5.0  # seconds in which every worker should have taken a word
_WITHOUT = 60.0  # seconds without any worker, after which none will come up by itself
_log = logging.getLogger("vllm_gateway.control")


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as /status shows it.

    ``version`` is the version of the snapshot that it serves by. ``restarts`` counts unexpected exits. ``unanswered`` counts
    consecutive health checks without a reply.
    """

    number: int
    pid: int | None
    up: bool
    version: int
    restarts: int
    unanswered: int


class _WorkerSlot:
    """One worker: its place, and the process that fills it at the moment."""

    def __init__(
        self,
        number: int,
        listener: socket.socket,
        board: Board,
        meters: Meters,
        seats: Seats | None,
        on_word: Callable[[], None],
        on_unknown: Callable[[str], None],
        ledger: Ledger | None,
    ) -> None:
        self.number = number
        self.board = board
        self._meters = meters
        self._seats = seats
        self._ledger = ledger
        self._listener = listener
        self._on_word = on_word
        self._on_unknown = on_unknown
        self._link: Link | None = None
        self._process: asyncio.subprocess.Process | None = None
        self.version = 0
        self.learned = 0
        self.asked: dict[str, float] = {}
        self.store: StoreState | None = None
        self.restarts = 0
        self._unanswered = 0
        self._ending: Drain | None = None  # the word by which it ends, once that was said

    @property
    def status(self) -> WorkerStatus:
        pid = self._process.pid if self._process is not None and self._process.returncode is None else None
        return WorkerStatus(self.number, pid, self._link is not None and self.version > 0, self.version, self.restarts, self._unanswered)

    def holds(self, number: int) -> bool:
        """Whether nothing is done here by an older ``Health`` than this."""
        return self._link is None or self.learned >= number

    def send(self, message: Message) -> None:
        if self._link is not None:
            self._link.send(message)

    def look(self) -> None:
        """Ask a worker whether it is there, from its birth on; one that has not answered for too long is killed, and so replaced."""
        process = self._process
        if process is None or process.returncode is not None or self._link is None or self._ending:
            return
        if self._unanswered >= (_PATIENCE if self.status.up else _PATIENCE_AT_BIRTH):
            _log.error("worker %d does not answer any more and is killed", self.number)
            process.kill()
            return
        self._unanswered += 1
        self.send(Ping())

    def drain(self, seconds: float) -> None:
        """Have the process drain and exit, and put no other in its place."""
        self._ending = Drain(seconds)
        self.send(self._ending)

    async def live(self, greeting: Callable[[], Sequence[Message]]) -> None:
        """Keep a process in this place until it is drained, or this is cancelled."""
        pause = 0.0
        while not self._ending:
            born = time.monotonic()
            await self._tried(greeting)
            if not self._ending:
                pause = pause_after(time.monotonic() - born, pause)
                await asyncio.sleep(pause)

    async def _tried(self, greeting: Callable[[], Sequence[Message]]) -> None:
        try:
            await self._one_life(greeting)
        except (OSError, RuntimeError) as error:  # no descriptor, no process, or (threading's RuntimeError) no thread to be had
            _log.error("worker %d cannot be started; it is tried again: %s", self.number, error)
            return
        if not self._ending:
            self.restarts += 1
            _log.error("worker %d ended unexpectedly; starting it again", self.number)

    async def _one_life(self, greeting: Callable[[], Sequence[Message]]) -> None:
        async with self._running() as link:
            self._link = link
            try:
                for message in greeting():
                    link.send(message)
                if self._ending is not None:  # said while the process was being started
                    link.send(self._ending)
                await self._listen(link)
            except LinkBrokenError as error:
                _log.error("worker %d: %s", self.number, error)
            finally:
                self._link, self.version, self.learned, self.asked, self._unanswered = None, 0, 0, {}, 0
                self.store = None
                self._on_word()

    async def _listen(self, link: Link) -> None:
        async for message in link.messages():
            match message:
                case Ping():
                    self._unanswered = 0
                    continue
                case Taken(version=version):
                    self.version = version
                case Learned(number=number):
                    self.learned = number
                case Asked(model=model, since=since) if since is not None:
                    self.asked[model] = since
                case Asked(model=model):
                    self.asked.pop(model, None)
                case Unknown(issuer=issuer):
                    self._on_unknown(issuer)
                case StoreState():
                    self.store = message
                    continue
            self._on_word()

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[Link]:
        """A process and the link to it. In the end it is gone: by itself when its link closes, by SIGKILL otherwise."""
        ours, theirs = socket.socketpair()
        fds = {
            "--listen-fd": self._listener.fileno(),
            "--control-fd": theirs.fileno(),
            "--board-fd": self.board.fd,
            "--meters-fd": self._meters.fd,
        }
        if self._seats is not None:
            fds["--seats-fd"] = self._seats.fd
        words = ["--spool", str(self._ledger.folder)] if self._ledger is not None else []
        if self._ledger is not None:
            fds["--journal-fd"] = self._ledger.journals[self.number].fd
        words += [word for flag, fd in fds.items() for word in (flag, str(fd))]
        with theirs:
            link = Link(*await asyncio.open_connection(sock=ours, limit=AHEAD))
            try:
                process = self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-m", "gateway.relay_process", "worker", str(self.number), *words,
                    stdin=asyncio.subprocess.DEVNULL, pass_fds=tuple(fds.values()),
                )  # fmt: skip
            except BaseException:
                link.close()
                raise
        try:  # from the process's start to here nothing waits: who is cancelled leaves no process behind
            yield link
        finally:
            link.close()
            await _gone(process)
            if self._seats is not None:
                self._seats.vacate(self.number)
            if self._ledger is not None:
                self._ledger.worker_gone(self.number)


async def _gone(process: asyncio.subprocess.Process) -> None:
    """Wait for a process's end; it is killed when it takes too long, or when nobody waits any longer."""
    try:
        async with asyncio.timeout(_EXIT_GRACE):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class WorkerSupervisor:
    """All workers. ``on_word`` is called when one has said something, or is gone, ``on_unknown`` with the issuer of a token that one
    has no key for."""

    def __init__(
        self, listener: socket.socket, count: int, on_word: Callable[[], None], on_unknown: Callable[[str], None], ledger: Ledger | None
    ) -> None:
        self._meters = Meters.create("meters", count)
        self._seats = Seats.create(count) if count > 1 else None
        self._workers = tuple(
            _WorkerSlot(number, listener, Board.create(f"worker-{number}"), self._meters, self._seats, on_word, on_unknown, ledger)
            for number in range(count)
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._snapshot: Snapshot | None = None
        self._health = Health({}, {})
        self._leaving = False
        self._seen = time.monotonic()

    @property
    def boards(self) -> tuple[Board, ...]:
        """The scoreboards; they stay the same for the whole life of control."""
        return tuple(worker.board for worker in self._workers)

    @property
    def statuses(self) -> tuple[WorkerStatus, ...]:
        return tuple(worker.status for worker in self._workers)

    def configure(self, snapshot: Snapshot, health: Health) -> int:
        """Have every worker serve by this version, with what is known of its servers; the first one starts them.

        Returns the number of that word, as ``tell`` does.
        """
        self._snapshot = snapshot
        self._send(health, lambda numbered: Configure(snapshot, numbered))
        if not self._tasks:
            self._tasks = [asyncio.create_task(worker.live(self._greeting)) for worker in self._workers]
        return self._health.number

    def tell(self, health: Health) -> int:
        """Tell every worker what is known of the servers, under the number that is returned."""
        self._send(health, lambda numbered: numbered)
        return self._health.number

    def _send(self, health: Health, message: Callable[[Health], Message]) -> None:
        self._health = msgspec.structs.replace(health, number=self._health.number + 1)
        for worker in self._workers:
            worker.send(message(self._health))

    def look(self, now: float) -> None:
        """See whether workers answer, every ``LOOK`` seconds; ``now`` is the monotonic clock's."""
        if any(status.up for status in self.statuses):
            self._seen = now
        for worker in self._workers:
            worker.look()

    def broken(self, now: float) -> str | None:
        """Why no worker will come up again by itself; None while that may be."""
        if any(task.done() for task in self._tasks):
            return "a worker is not looked after any more"
        return "no worker comes up" if now - self._seen > _WITHOUT else None

    def hold(self, number: int) -> bool:
        """Whether no worker does anything by an older word than the one told under this number."""
        return all(worker.holds(number) for worker in self._workers)

    async def taken(self, number: int, within: float = _TAKEN) -> None:
        """Wait until they hold this word, or for so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while not self.hold(number):  # noqa: ASYNC110  # what is waited for is in other processes
                    await asyncio.sleep(0.005)

    def asked_since(self, model: str) -> float | None:
        """Since when requests wait for a model, in seconds of the monotonic clock; None: none does."""
        return min((worker.asked[model] for worker in self._workers if model in worker.asked), default=None)

    def store(self) -> StoreState | None:
        """How the limits' store is: away if it is away for any worker. None: no worker has reported it, or it is not used any more."""
        if self._snapshot is None or not self._snapshot.uses_store:
            return None
        known = [worker.store for worker in self._workers if worker.store is not None]
        return next((state for state in known if state.error is not None), known[0] if known else None)

    def _greeting(self) -> Sequence[Message]:
        assert self._snapshot is not None
        word = Configure(self._snapshot, self._health)
        return (word, Leave()) if self._leaving else (word,)

    def leave(self) -> None:
        """Have clients told to come again on other connections."""
        self._leaving = True
        for worker in self._workers:
            worker.send(Leave())

    async def drain(self, seconds: float) -> None:
        """Let what is in flight finish within ``seconds`` and the workers exit."""
        for worker in self._workers:
            worker.drain(seconds)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds + _EXIT_GRACE)

    async def close(self) -> None:
        """End every worker, drained or not."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._workers:
            worker.board.close()
        self._meters.close()
        if self._seats is not None:
            self._seats.close()


def pause_after(lived: float, before: float) -> float:
    """Seconds until a worker that lived so long is replaced; ``before``: the pause before it."""
    return 0.0 if lived >= _SHORT_LIFE else min(max(2 * before, _PAUSE), _LONGEST_PAUSE)


@asynccontextmanager
async def running_workers(
    listener: socket.socket, count: int, on_word: Callable[[], None], on_unknown: Callable[[str], None], ledger: Ledger | None = None
) -> AsyncIterator[WorkerSupervisor]:
    """The workers, all of which are gone when the block ends. ``ledger`` has a journal for each."""
    kept = WorkerSupervisor(listener, count, on_word, on_unknown, ledger)
    try:
        yield kept
    finally:
        await kept.close()
