"""A worker process: serves the data port's connections by the snapshot that control sends.

Control starts it with its number and inherited descriptors: the listening socket, the socket to control, the shared counters, the limits'
buckets, the placement log and, if there is a ledger, the journal. The rule: it runs until its socket to control closes. It ignores the
signals that usually end a program, because control handles them, and drains when control sends ``Drain``.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import closing, nullcontext
from pathlib import Path
from time import monotonic
from typing import Any

import uvloop

from gateway.auth.stored_keys import StoredKeyring
from gateway.client.connection import LINGER
from gateway.ledger.journal import Journal
from gateway.ledger.recorder import Recorder
from gateway.limits.shared_counts import Buckets
from gateway.proxy.exchange import handle_request
from gateway.proxy.request_services import RequestServices
from gateway.recording.recorder import BodyRecorder
from gateway.snapshot import link
from gateway.system import garbage_collector, logs
from gateway.system.acceptor import Acceptor, Seats
from gateway.system.file_descriptors import raise_limit
from gateway.system.garbage_collector import FullCollections, collector_paused
from gateway.system.logs import LogSettings
from gateway.system.malloc import keep_what_is_freed
from gateway.telemetry.access_log import AccessLog, access_log
from gateway.telemetry.metrics import FAMILIES, WorkerMetrics, observe
from gateway.telemetry.shared_counters import SharedCounters
from gateway.telemetry.tracing import Spans
from gateway.worker.drain import AnyAcceptor, drain
from gateway.worker.peer_placements import PeerPlacements
from gateway.worker.slot_signals import SharedSlots, SlotSignals
from gateway.worker.worker import Worker
from upstream.balancing.placement_log import PlacementLog
from upstream.balancing.pool import live_servers
from upstream.balancing.server import Server
from upstream.balancing.shared_limit import SharedServer
from upstream.http.deadlines import TICK

_EVERY_SECOND = 4  # ticks
_LAG_SAMPLES = 5  # of the event loop's lag, for each tick
_UNSENT = 128 * 1024
"""Bytes of responses that the kernel buffers for a client and has not sent. More would hide that a client has stopped reading, and would
be memory that is not counted."""
_BACKLOG = 2048  # connections that may wait to be accepted
_NOTSENT_LOWAT = 25  # TCP_NOTSENT_LOWAT of linux/tcp.h, for which the socket module has no name
_SWITCH_INTERVAL = 0.0005
"""Seconds for which the access log's thread may delay requests. The interpreter's default of 5 ms shows in the 99th percentile."""


def main() -> None:
    """Run until control has exited or the drain has finished."""
    arguments = _arguments()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logs.configure(LogSettings(), f"worker {arguments.number}")  # until the first snapshot
    sys.setswitchinterval(_SWITCH_INTERVAL)
    keep_what_is_freed()
    raise_limit()
    recorder = Recorder(Journal(arguments.journal_fd)) if arguments.journal_fd is not None else None
    with access_log(sys.stdout.fileno()) as log, closing(Spans()) as traced:
        orphaned = uvloop.run(_run(arguments, log, recorder, traced))
        if orphaned and recorder is not None:
            recorder.save(arguments.spool, sys.stderr)  # after the loop, in which requests may still have finished


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="worker", description="A worker process; control starts it.")
    parser.add_argument("word", choices=["worker"])
    parser.add_argument("number", type=int)
    for name in ("listen", "control", "counters", "buckets", "placements"):
        parser.add_argument(f"--{name}-fd", type=int, required=True)
    parser.add_argument("--peer-counters-fd", type=int, action="append", default=[], help="the counters of another worker, to read")
    parser.add_argument("--seats-fd", type=int, help="where several workers share the listening socket")
    parser.add_argument("--slots-fd", type=int, help="the locks of the slots that several workers share")
    parser.add_argument("--signal-fd", type=int, action="append", default=[], help="the signals to a worker, in the order of the workers")
    parser.add_argument("--journal-fd", type=int)
    parser.add_argument("--spool", type=Path, help="where rows of the journal are saved when control has died")
    return parser.parse_args()


async def _run(arguments: argparse.Namespace, log: AccessLog, recorder: Recorder | None, traced: Spans) -> bool:
    """Serve. Returns whether control exited first."""
    asyncio.get_running_loop().set_exception_handler(logs.uncaught)
    to_control = link.Link(*await asyncio.open_connection(sock=socket.socket(fileno=arguments.control_fd), limit=link.READ_AHEAD))
    signals = SlotSignals(arguments.slots_fd, arguments.signal_fd) if arguments.signal_fd else None
    with live_servers(create=Server if signals is None else SharedServer) as servers:
        messages = to_control.messages()
        stored_keys = StoredKeyring()
        first = await anext(messages, None)
        with collector_paused():  # the keys stay in memory
            while isinstance(first, link.StoredKeys):  # before the first connection, which may have one of these keys
                stored_keys.apply(first)
                first = await anext(messages, None)
        if not isinstance(first, link.ApplySnapshot):
            return True
        logs.configure(first.snapshot.log, f"worker {arguments.number}")
        metrics = WorkerMetrics(SharedCounters(arguments.counters_fd), map(SharedCounters, arguments.peer_counters_fd))
        bodies = BodyRecorder(metrics.count_record, deletes=arguments.number == 0)
        if recorder is not None:
            recorder.rejections.report = to_control.send
        requests = RequestServices(
            metrics=metrics,
            log=log,
            write_batch=servers.write_batch,
            ledger=recorder,
            buckets=Buckets.inherited(arguments.buckets_fd, arguments.number),
            spans=traced,
            recorder=bodies,
            send=to_control.send,
        )
        worker = Worker(
            first.snapshot,
            requests,
            functools.partial(handle_request, worker=requests),
            fleet=servers,
            number=arguments.number,
            peers=PeerPlacements(PlacementLog(arguments.placements_fd, arguments.number)),
            stored_keys=stored_keys,
            slots=None if signals is None else SharedSlots(signals, metrics, arguments.number),
        )
        process = WorkerProcess(worker, to_control)
        process.apply_health(first.health)  # before the first request, which would find no server
        seats = Seats(arguments.seats_fd, arguments.number) if arguments.seats_fd is not None else None
        with closing(bodies), nullcontext() if signals is None else signals.listening(arguments.number, worker.use_free_slots):
            await process.serve(socket.socket(fileno=arguments.listen_fd), seats, messages)
    orphaned = to_control.ended
    to_control.close()
    return orphaned


class WorkerProcess:
    """A running worker process: handles control's messages and the clock."""

    def __init__(self, worker: Worker, to_control: link.Link) -> None:
        self.worker = worker
        self._to_control = to_control

    def apply_health(self, health: link.Health) -> None:
        """Apply a health report, and acknowledge it."""
        self.worker.apply_health(health)
        self._to_control.send(link.HealthApplied(health.number))

    async def serve(self, listener: socket.socket, seats: Seats | None, messages: AsyncIterator[link.Message]) -> None:
        """Serve until control has exited, or has had this worker drained."""
        acceptor = await start_accepting(self.worker, listener, seats)
        collections = garbage_collector.take_over()
        async with asyncio.TaskGroup() as group:
            ticking = group.create_task(self._tick(collections))
            await self._handle_messages(messages, acceptor, listener)
            ticking.cancel()

    async def _handle_messages(self, messages: AsyncIterator[link.Message], acceptor: AnyAcceptor, listener: socket.socket) -> None:
        """Handle control's messages. Returns when control has exited or the drain has finished."""
        self._to_control.send(link.SnapshotApplied(self.worker.snapshot.version))
        async for message in messages:
            match message:
                case link.ApplySnapshot(snapshot=snapshot, health=health):
                    logs.configure(snapshot.log, f"worker {self.worker.number}")
                    self.worker.apply_snapshot(snapshot)
                    self.apply_health(health)
                    self._to_control.send(link.SnapshotApplied(snapshot.version))
                case link.Health():
                    self.apply_health(message)
                case link.StoredKeys():
                    self.worker.apply_stored_keys(message)
                case link.CachedBlocks():
                    self.worker.apply_cached_blocks(message)
                case link.StopKeepAlive():
                    self.worker.connections.keep_alive = False
                case link.Ping():
                    self._to_control.send(message)
                case link.UsageReported():
                    self.worker.app.usage_requests.reply(message)
                case link.PageResponded():
                    self.worker.app.page_requests.reply(message)
                case link.RevokedSessions(ids=ids):
                    self.worker.app.page_requests.revoke(ids)
                case link.Drain(seconds=seconds):
                    await drain(self.worker, acceptor, listener, seconds)
                    return

    async def _tick(self, collections: FullCollections) -> None:
        lag = self.worker.requests.metrics.cells("worker_event_loop_lag_seconds", str(self.worker.number))
        count, buckets = 0, FAMILIES["worker_event_loop_lag_seconds"].buckets
        while True:
            for _ in range(_LAG_SAMPLES):
                due = monotonic() + TICK / _LAG_SAMPLES
                await asyncio.sleep(TICK / _LAG_SAMPLES)
                observe(lag, buckets, max(monotonic() - due, 0.0))
            self.worker.tick()
            count += 1
            if count % _EVERY_SECOND == 0:
                logs.report_suppressed(monotonic())
                if self.worker.progress:
                    self._to_control.send(link.ServerProgress(self.worker.progress))
                collections.tick(idle=not self.worker.connections.handlers)


async def start_accepting(worker: Worker, listener: socket.socket, seats: Seats | None = None) -> AnyAcceptor:
    """Accept the data port's connections from now on. ``seats``: if several workers share the listener."""
    listener.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT)  # accepted connections inherit it
    loop = asyncio.get_running_loop()
    if seats is None:
        return await loop.create_server(worker.connection, sock=listener, backlog=_BACKLOG, **_tls(worker))
    acceptor = Acceptor(listener, functools.partial(loop.connect_accepted_socket, worker.connection, **_tls(worker)), seats)
    worker.connections.connection_closed = acceptor.connection_closed
    return acceptor


def _tls(worker: Worker) -> dict[str, Any]:
    """Return the event loop's arguments for TLS on the data port. The handshake counts towards the timeout of the headers."""
    if worker.certificate is None:
        return {}
    return {
        "ssl": worker.certificate.context,
        "ssl_handshake_timeout": worker.snapshot.clients.headers_timeout,
        "ssl_shutdown_timeout": LINGER,
    }


if __name__ == "__main__":
    main()
