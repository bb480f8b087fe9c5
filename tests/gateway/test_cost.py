"""What a request and a chunk cost, counted and not timed: every call of a function, and every step of the interpreter.

A fixed exchange runs between two stand-ins for transports, with authentication over many keys, ``extra_body``, usage, metrics
and the access log on. The counts are the same on every machine, so the bounds are a tenth above what was counted when they
were set. Whoever makes the path longer sees it here; whoever makes it shorter lowers them.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import pytest

from gateway.access_log import AccessLog, access_log
from gateway.app import Worker
from gateway.edge import ClientConnection
from gateway.ledger.books import Books
from gateway.ledger.journal import Journal
from gateway.link import Health
from gateway.metrics import WorkerMetrics
from gateway.scoreboard import Board
from gateway.state import Allowance, Key, Limits, Model, Snapshot
from tests.support.way import Wire
from tests.support.wire import COMPLETION, chat, request
from upstream.address import Address
from upstream.connection import Connection
from upstream.outlet import Turn
from upstream.pool import fleet
from upstream.server import Condition, ServerSpec

KEYS = 1000
TIMES = 20
WARM_UP = 100

REQUEST = request(chat(extra_body={"top_k": 5}), token="key-7")
STREAM = request(chat(stream=True), token="key-7")
ANSWER = b"HTTP/1.1 200 OK\r\ndate: x\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(COMPLETION),
    COMPLETION,
)
EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Count(NamedTuple):
    """Per exchange: calls of Python functions, of C functions, and steps of the interpreter."""

    python: float
    c: float
    steps: float


BOUNDS = {
    "request": Count(144, 112, 3900),
    "request with a ledger": Count(154, 131, 4300),
    "request of a limited key": Count(183, 136, 5300),
    "chunk": Count(7.8, 14.4, 274),
}
"""Set with CPython 3.11, of whose steps the third number is."""


class Still(Turn):
    """The turns of a busy loop, which end when the test says so: the loop's part in one is shared by all that it has to send."""

    __slots__ = ()

    def begin(self) -> None:
        """Nothing is asked of the loop."""


class Path(NamedTuple):
    """The way of a request: a client's connection, and a kept one to the only server."""

    client: ClientConnection
    client_wire: Wire
    server: Connection
    server_wire: Wire
    log: AccessLog
    worker: Worker

    def ask(self) -> None:
        self.client.data_received(REQUEST)
        self.worker.turn.end()
        assert self.server_wire.take().endswith(b"}")
        self.server.data_received(ANSWER)
        self.worker.turn.end()
        assert self.client_wire.take().endswith(COMPLETION)

    def stream(self) -> None:
        self.client.data_received(STREAM)
        self.server.data_received(STREAM_HEAD)
        for _ in range(2):
            self.server.data_received(CHUNK)
            self.worker.turn.end()
        assert self.client_wire.take().endswith(2 * CHUNK)

    def limit(self, limits: Limits) -> None:
        """Give all keys these limits."""
        before = self.worker.snapshot
        keys = tuple(replace(key, allowances=(Allowance(f"key {key.id}", limits),)) for key in before.keys)
        self.worker.take(replace(before, keys=keys))
        self.worker.learn(Health({"tiny#0": Condition.UP}, {}, {}))

    def chunk(self) -> None:
        self.server.data_received(CHUNK)
        self.worker.turn.end()
        assert self.client_wire.take() == CHUNK


@pytest.fixture
async def path() -> AsyncIterator[Path]:
    spec = ServerSpec("tiny#0", Address(port=1), "tiny", keep_idle=1e9)
    keys = tuple(Key(f"team-{n}", (hashlib.sha256(b"key-%d" % n).digest(),)) for n in range(KEYS))
    board, nowhere = Board.create("cost", 1 << 20), os.open(os.devnull, os.O_WRONLY)
    turn = Still(math.inf)
    turn.gathers = True
    with fleet(turn) as servers, access_log(nowhere) as log:
        worker = Worker(Snapshot(1, keys, (Model("tiny", (spec,)),)), fleet=servers, metrics=WorkerMetrics(board), log=log)
        worker.learn(Health({spec.name: Condition.UP}, {}, {}))
        uvicorn = worker.server()
        uvicorn.config.load()
        client = worker.protocol()(uvicorn.config, uvicorn.server_state, {})
        (server,) = servers
        connection = Connection(spec.name, server.park, servers.turn)
        made = Path(client, Wire(), connection, Wire(), log, worker)
        client.connection_made(made.client_wire)
        connection.connection_made(made.server_wire)
        server.park(connection)
        yield made
        client.connection_lost(None)
        connection.connection_lost(None)
    os.close(nowhere)
    board.close()


@pytest.fixture
def books() -> Iterator[Books]:
    with closing(Journal.create("cost")) as journal:
        yield Books(journal)


@contextmanager
def _watching(install: Callable[[Any], None], watch: Callable[..., Any]) -> Iterator[None]:
    """Watched by this, and by whoever watched before afterwards."""
    before = sys.getprofile() if install is sys.setprofile else sys.gettrace()
    install(watch)
    try:
        yield
    finally:
        install(before)


def counted(work: Callable[[], None]) -> Count:
    """What one turn of ``work`` takes, on average over TIMES."""
    for _ in range(WARM_UP):
        work()
    calls = {"call": 0, "c_call": 0}

    def on_call(_: FrameType, event: str, __: object) -> None:
        if event in calls:
            calls[event] += 1

    with _watching(sys.setprofile, on_call):
        for _ in range(TIMES):
            work()
    steps = 0

    def on_step(frame: FrameType, event: str, _: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return on_step

    with _watching(sys.settrace, on_step):
        for _ in range(TIMES):
            work()
    return Count(calls["call"] / TIMES, calls["c_call"] / TIMES, steps / TIMES)


@pytest.mark.parametrize("what", BOUNDS)
async def test_the_path_is_no_longer_than_it_was(path: Path, books: Books, what: str) -> None:
    if what == "chunk":
        path.stream()
    if what == "request with a ledger":
        path.worker.books = books
        books.take(path.worker.snapshot)
    if what == "request of a limited key":
        path.limit(Limits(requests_per_minute=6000, tokens_per_minute=10**6, concurrent=100))
    count = counted(path.chunk if what == "chunk" else path.ask)
    bound = BOUNDS[what]
    compared = Count._fields if sys.version_info[:2] == (3, 11) else Count._fields[:2]
    longer = {name: (getattr(count, name), getattr(bound, name)) for name in compared if getattr(count, name) > getattr(bound, name)}
    assert not longer, f"{what}: counted, and the bound: {longer}"
