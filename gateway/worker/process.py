"""A worker process: the data port's connections, served by the ``Snapshot`` that control sends.

Started by control with its number and inherited descriptors: the listening socket, the socket to control, the
scoreboard, the limits' meters and, where there is a ledger, the journal. The rule: it lives as long as its socket to control. Signals that
end other programs are control's to handle: this process ignores them, and drains when it is told to.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import uvloop

from gateway.client.connection import LINGER
from gateway.ledger.journal import Journal
from gateway.ledger.recorder import Recorder
from gateway.limits.buckets import Buckets
from gateway.snapshot.link import (
    READ_AHEAD,
    ApplySnapshot,
    Drain,
    Health,
    HealthApplied,
    Link,
    Message,
    ModelRequested,
    Ping,
    SnapshotApplied,
    StopKeepAlive,
    StoreStatus,
    UnknownSigningKey,
)
from gateway.snapshot.snapshot import Snapshot
from gateway.system import logs
from gateway.system.acceptor import Acceptor, Seats
from gateway.system.file_descriptors import raise_limit
from gateway.system.listener_drain import HANDSHAKE, has_backlog
from gateway.system.logs import LogSettings
from gateway.system.malloc import keep_what_is_freed
from gateway.telemetry.access_log import AccessLog, access_log
from gateway.telemetry.metrics import FAMILIES, WorkerMetrics, observe
from gateway.telemetry.shared_counters import SharedCounters
from gateway.telemetry.tracing import Spans, spans
from gateway.worker.app import Worker
from upstream.balancing.pool import live_servers
from upstream.http.deadlines import TICK

_FIRST_REQUEST = 1.0  # seconds for the request of a client that has just connected
_BREAK_OFF = 1.0  # seconds in which what was cut at the end of a drain may say so to its clients
_TELL_EVERY = 4  # ticks
_UNSENT = 128 * 1024
"""Bytes of answers that the kernel takes for a client beyond what is on its way. More would hide from the gateway that a
client has stopped reading, and would be memory that nobody counts."""
_BACKLOG = 2048  # connections that may wait to be accepted
_NOTSENT_LOWAT = 25  # TCP_NOTSENT_LOWAT of linux/tcp.h, for which the socket module has no name
_SWITCH_INTERVAL = 0.0005
"""Seconds for which the access log's thread may hold up requests; the interpreter's own 5 ms would be seen in the 99th percentile."""


def main() -> None:
    """Run until control is gone or the drain is over."""
    arguments = _arguments()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logs.configure(LogSettings(), f"worker {arguments.number}")  # until control says how
    sys.setswitchinterval(_SWITCH_INTERVAL)
    keep_what_is_freed()
    raise_limit()
    books = Recorder(Journal(arguments.journal_fd)) if arguments.journal_fd is not None else None
    with access_log(sys.stdout.fileno()) as log, spans() as traced:
        orphaned = uvloop.run(_run(arguments, log, books, traced))
        if orphaned and books is not None:
            books.save(arguments.spool, sys.stderr)  # after the loop: while it still turned, requests may have ended


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="worker", description="A worker process; control starts it.")
    parser.add_argument("word", choices=["worker"])
    parser.add_argument("number", type=int)
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--board-fd", type=int, required=True)
    parser.add_argument("--meters-fd", type=int, required=True)
    parser.add_argument("--seats-fd", type=int, help="where several workers share the listening socket")
    parser.add_argument("--journal-fd", type=int)
    parser.add_argument("--spool", type=Path, help="where rows of the journal are saved when control has died")
    return parser.parse_args()


async def _run(arguments: argparse.Namespace, log: AccessLog, books: Recorder | None, traced: Spans) -> bool:
    """Serve; returns whether control was gone before the end."""
    asyncio.get_running_loop().set_exception_handler(logs.uncaught)
    control = socket.socket(fileno=arguments.control_fd)
    link = Link(*await asyncio.open_connection(sock=control, limit=READ_AHEAD))
    with live_servers() as servers:
        process = _Process(arguments.number, link, WorkerMetrics(SharedCounters(arguments.board_fd)))
        messages = link.messages()
        first = await anext(messages, None)
        if not isinstance(first, ApplySnapshot):
            return True
        process.speak_by(first.snapshot)
        process.worker = Worker(
            first.snapshot,
            fleet=servers,
            metrics=process.metrics,
            log=log,
            ask=process.ask,
            want=process.want,
            on_store=process.report_store,
            books=books,
            meters=Buckets.inherited(arguments.meters_fd, arguments.number),
            number=arguments.number,
            spans=traced,
        )
        process.learn(first.health)  # before the first request, or it would find no server
        seats = Seats(arguments.seats_fd, arguments.number) if arguments.seats_fd is not None else None
        await process.serve(socket.socket(fileno=arguments.listen_fd), seats, messages)
    orphaned = link.ended
    link.close()
    return orphaned


class _Process:
    """The parts of a running worker process."""

    worker: Worker

    def __init__(self, number: int, link: Link, metrics: WorkerMetrics) -> None:
        self.link = link
        self.metrics = metrics
        self._number = number
        self._acceptor: Closable | None = None

    def speak_by(self, snapshot: Snapshot) -> None:
        """Say what is to be said in the way that this snapshot wants."""
        logs.configure(snapshot.log, f"worker {self._number}")

    def learn(self, health: Health) -> None:
        """Take over what control found out, and say so."""
        self.worker.learn(health)
        self.link.send(HealthApplied(health.number))

    def ask(self, model: str, since: float | None) -> None:
        """Tell control since when a model is asked for."""
        self.link.send(ModelRequested(model, since))

    def want(self, issuer: str) -> None:
        """Tell control of a token that is signed by a key that is not known here."""
        self.link.send(UnknownSigningKey(issuer))

    def report_store(self, error: str | None) -> None:
        """Tell control that the limits' store is away, or back."""
        self.link.send(StoreStatus(error))

    async def serve(self, listener: socket.socket, seats: Seats | None, messages: AsyncIterator[Message]) -> None:
        """Serve until control is gone or has had this worker drained."""
        self._acceptor = await started(self.worker, listener, seats)
        gc.collect()
        gc.freeze()  # what start-up made lives for ever: the collector need not look at it again
        async with asyncio.TaskGroup() as group:
            ticking = group.create_task(self._tick())
            await self._listen(messages, listener)
            ticking.cancel()

    async def _listen(self, messages: AsyncIterator[Message], listener: socket.socket) -> None:
        """What control says; returns when it is gone or the drain is over."""
        self.link.send(SnapshotApplied(self.worker.snapshot.version))
        async for message in messages:
            match message:
                case ApplySnapshot(snapshot=snapshot, health=health):
                    self.speak_by(snapshot)
                    self.worker.take(snapshot)
                    self.learn(health)
                    self.link.send(SnapshotApplied(snapshot.version))
                case Health():
                    self.learn(message)
                case StopKeepAlive():
                    self.worker.leaving = True
                case Ping():
                    self.link.send(message)
                case Drain(seconds=seconds):
                    await self._drain(seconds, listener)
                    return

    async def _tick(self) -> None:
        count, lag = 0, self.metrics.cells("worker_event_loop_lag_seconds", str(self._number))
        while True:
            due = monotonic() + TICK
            await asyncio.sleep(TICK)
            observe(lag, FAMILIES["worker_event_loop_lag_seconds"].buckets, max(monotonic() - due, 0.0))
            self.worker.tick()
            if isinstance(self._acceptor, Acceptor):
                self._acceptor.publish()
            count += 1
            if count % _TELL_EVERY == 0:
                logs.tell(monotonic())

    async def _drain(self, seconds: float, listener: socket.socket) -> None:
        """Accept no new connections, let requests finish, and cut those that have not finished in time."""
        self.worker.lobby.close()
        await self._close_the_door(listener)
        connections, handlers = self.worker.connections, self.worker.handlers
        await _settled(lambda: not handlers, seconds)
        self.worker.draining = True
        for handler in tuple(handlers):
            handler.cancel()
        await _settled(lambda: not handlers, _BREAK_OFF)
        await _settled(lambda: not connections, _BREAK_OFF)

    async def _close_the_door(self, listener: socket.socket) -> None:
        """Serve one request on each connection that was accepted and has sent none yet; close the idle ones."""
        connections, is_tls = self.worker.connections, self.worker.certificate is not None
        self.worker.leaving = True
        await asyncio.sleep(HANDSHAKE)
        await _settled(lambda: not has_backlog(listener), _FIRST_REQUEST)
        if self._acceptor is not None:
            self._acceptor.close()
        # a TLS handshake is not seen here
        await _settled(lambda: not is_tls and not any(each.is_awaited for each in connections), _FIRST_REQUEST)
        for connection in tuple(connections):
            connection.shutdown()


async def _settled(done: Callable[[], bool], seconds: float) -> None:
    """Wait until something is done, or for so long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not done():  # noqa: ASYNC110  nothing reports the end of a connection or a request
                await asyncio.sleep(0.02)


class Closable(Protocol):
    """Something that accepts connections until it is closed."""

    def close(self) -> None:
        """Accept no more."""


async def started(worker: Worker, listener: socket.socket, seats: Seats | None = None) -> Closable:
    """Accept the data port's connections from now on. ``seats``: if several workers share the listener."""
    listener.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT)  # accepted connections inherit it
    loop = asyncio.get_running_loop()
    if seats is None:
        return await loop.create_server(worker.connection, sock=listener, backlog=_BACKLOG, **_tls(worker))
    begin = functools.partial(loop.connect_accepted_socket, worker.connection, **_tls(worker))
    return Acceptor(listener, begin, seats, lambda: len(worker.connections))


def _tls(worker: Worker) -> dict[str, Any]:
    """What the loop is told where the data port speaks TLS. A handshake is a part of the head; it is not seen by the connection."""
    if worker.certificate is None:
        return {}
    return {
        "ssl": worker.certificate.context,
        "ssl_handshake_timeout": worker.clients.headers_timeout,
        "ssl_shutdown_timeout": LINGER,
    }


if __name__ == "__main__":
    main()
