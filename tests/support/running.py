"""Run a worker with a fixed snapshot on an ephemeral port, in the test's own event loop."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from gateway.client.connection import ClientConnection
from gateway.client.request import ClientRequest
from gateway.ledger.recorder import Recorder
from gateway.proxy.exchange import handle_request
from gateway.proxy.request_services import RequestServices
from gateway.recording.recorder import BodyRecorder
from gateway.snapshot.link import Health, Message, ModelRequested
from gateway.snapshot.snapshot import Key, Model, Snapshot
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.metrics import WorkerMetrics, sum_series
from gateway.telemetry.request_record import RequestRecord
from gateway.telemetry.shared_counters import SharedCounters
from gateway.telemetry.tracing import Spans
from gateway.worker.process import start_accepting
from gateway.worker.worker import Worker
from upstream.balancing.pool import live_servers
from upstream.balancing.server import Condition, ServerSpec
from upstream.http.address import Address
from upstream.http.deadlines import TICK

_POLL_INTERVAL = 0.01  # seconds
KEY = "sk-a-test-key"
MODEL = "tiny"


def key(identity: str = "team-a", token: str = KEY, **more: Any) -> Key:
    """Return a key of the configuration."""
    return Key(identity, digests=(hashlib.sha256(token.encode()).digest(),), **more)


def model(*ports: int, identity: str = MODEL, served: str | None = None, **more: Any) -> Model:
    """Return a model whose servers listen on these loopback ports."""
    specs = tuple(ServerSpec(f"{identity}#{n}", Address(port=port), served or identity) for n, port in enumerate(ports))
    return Model(identity, specs, **more)


class WatchedRequests(RequestServices):
    """The services of a worker. They count the requests that were started, and store the record of each finished request."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.started = 0
        self.records: list[RequestRecord] = []

    def handle(self, request: ClientRequest) -> Coroutine[Any, Any, None]:
        self.started += 1
        return handle_request(request, self)

    def record_request(self, record: RequestRecord) -> None:
        self.records.append(record)
        super().record_request(record)


@dataclass
class Served:
    """A worker under test and its recorded data."""

    worker: Worker
    context: WatchedRequests
    port: int
    counters: SharedCounters
    log: AccessLog
    demand: list[tuple[str, float | None]] = field(default_factory=list)
    """Reports to control about models with queued requests: the model, and since when, or None."""

    @property
    def connections(self) -> set[ClientConnection]:
        """The open connections of clients."""
        return {each for each in self.worker.connections.connections if isinstance(each, ClientConnection)}

    @property
    def inline_tasks(self) -> set[Any]:
        """The running handlers of requests."""
        return self.worker.connections.handlers

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def value(self, family: str, *labels: str) -> float:
        """Return the sum of the first cells of a family's series whose labels start with ``labels``."""
        found = sum_series([self.counters]).items()
        return sum(values[0] for series, values in found if series.family == family and series.labels[: len(labels)] == labels)

    def total(self, family: str) -> float:
        """Return the sum of a family's first cells."""
        return sum(values[0] for series, values in sum_series([self.counters]).items() if series.family == family)

    @property
    def in_flight(self) -> float:
        """The sum of everything that counts as in flight."""
        requests = self.context.inflight.in_flight + self.total("inflight_requests") + self.total("server_inflight")
        return requests + len(self.context.deadlines)


@contextmanager
def shared_counters() -> Iterator[SharedCounters]:
    made = SharedCounters.create("test", 1 << 20)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def _nowhere() -> Iterator[int]:
    fd = os.open(os.devnull, os.O_WRONLY)
    try:
        yield fd
    finally:
        os.close(fd)


@asynccontextmanager
async def serving(
    models: Sequence[Model], keys: Sequence[Key] = (), *, up: bool = True, ledger: Recorder | None = None, **settings: Any
) -> AsyncIterator[Served]:
    """Serve a fixed snapshot. ``up``: treat every server as healthy without a probe."""
    with shared_counters() as counts, live_servers() as servers, _nowhere() as nowhere, closing(Spans()) as traced:
        log = AccessLog(nowhere)
        received: list[tuple[str, float | None]] = []
        metrics = WorkerMetrics(counts)
        recorder = BodyRecorder(metrics.count_record, deletes=True)

        def send(message: Message) -> None:
            if isinstance(message, ModelRequested):
                received.append((message.model, message.since))

        context = WatchedRequests(
            metrics=metrics,
            log=log,
            write_batch=servers.write_batch,
            send=send,
            ledger=ledger,
            spans=traced,
            recorder=recorder,
        )
        worker = Worker(Snapshot(1, tuple(keys or [key()]), tuple(models), **settings), context, context.handle, fleet=servers)
        if up:
            worker.apply_health(Health({spec.name: Condition.UP for each in models for spec in each.servers}, {}))
        listener = socket.create_server(("127.0.0.1", 0))
        port, acceptor = listener.getsockname()[1], await start_accepting(worker, listener)
        ticking = asyncio.create_task(_ticking(worker))
        try:
            yield Served(worker, context, port, counts, log, received)
        finally:
            acceptor.close()
            for connection in tuple(worker.connections.connections):
                connection.transport.abort()
            await asyncio.sleep(0)  # the connections end, and cancel their handlers
            for handler in tuple(worker.connections.handlers):
                handler.cancel()  # it is counting a prompt
            ticking.cancel()
            context.mirrors.close()
            context.limiter.close()
            recorder.close()
            tasks = [each for each in worker.connections.handlers if isinstance(each, asyncio.Task)]
            await asyncio.gather(ticking, *tasks, return_exceptions=True)


async def _ticking(worker: Worker) -> None:
    while True:
        await asyncio.sleep(TICK)
        worker.tick()


async def until(condition: Any, seconds: float = 30.0) -> None:
    """Wait for a condition. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # anything may be waited for
            await asyncio.sleep(0.002)


async def soon(condition: Any, seconds: float) -> None:
    """Wait for a condition that only this event loop can fulfill, for ``seconds`` in which the loop runs. Raises TimeoutError.

    Time in which the machine suspends the process counts as one poll.
    """
    for _ in range(round(seconds / _POLL_INTERVAL)):
        if condition():
            return
        await asyncio.sleep(_POLL_INTERVAL)
    raise TimeoutError
