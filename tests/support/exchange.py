"""One worker between two stand-ins for transports, driven step by step: to count what an exchange costs, and to train the compiled core.

The exchange is fixed: authentication over 1,000 keys, ``extra_body``, usage, metrics and the access log are on.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from gateway.client.connection import ClientConnection
from gateway.ledger.journal import Journal
from gateway.ledger.recorder import Recorder
from gateway.proxy.exchange import handle_request
from gateway.proxy.request_services import RequestServices
from gateway.recording.recorder import BodyRecorder
from gateway.snapshot.link import Health, StoredKeys
from gateway.snapshot.snapshot import Allowance, Key, Limits, Model, Recording, SessionRules, Snapshot
from gateway.telemetry.access_log import access_log
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.shared_counters import SharedCounters
from gateway.worker.worker import Worker
from tests.support.way import Wire
from tests.support.wire import COMPLETION, chat, request
from upstream.balancing.pool import live_servers
from upstream.balancing.server import Condition, ServerSpec
from upstream.http.address import Address
from upstream.http.connection import Connection
from upstream.http.write_batching import WriteBatch

KEYS = 1000

REQUEST, OTHER_REQUEST = (request(chat(extra_body={"top_k": 5}), token=token) for token in ("key-7", "key-34"))
STREAM = request(chat(stream=True), token="key-7")
RESPONSE = b"HTTP/1.1 200 OK\r\ndate: x\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(COMPLETION),
    COMPLETION,
)
EVENT = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]'
USAGE = b',"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3,"completion_tokens_details":null}'


def _framed(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


def _chunk(text: bytes, usage: bytes = b"") -> bytes:
    """Return a chunk with one event. ``usage``: the running usage that a ledger or a limit on tokens needs."""
    return _framed(EVENT % text + usage + b"}\n\n")


TEXTS = (b"a", b" the")
"""The texts of the events in turn: tokens differ."""
CHUNKS = [_chunk(text) for text in TEXTS]
COUNTED_CHUNKS = [_chunk(text, USAGE) for text in TEXTS]
STREAM_END = b"".join(
    (
        _framed((EVENT % b"").replace(b"null", b'"stop"') + b"}\n\n"),
        _framed(b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[]' + USAGE + b"}\n\n"),
        _framed(b"data: [DONE]\n\n"),
        b"0\r\n\r\n",
    )
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class ManualWriteBatch(WriteBatch):
    """The write batch of a busy event loop. The test flushes each batch, because the loop's own work is shared by all of its writes."""

    __slots__ = ()

    def schedule_flush(self) -> None:
        """Schedule nothing."""


class Exchange(NamedTuple):
    """A client connection, and an idle connection to the only server."""

    client: ClientConnection
    client_wire: Wire
    server: Connection
    server_wire: Wire
    worker: Worker
    context: RequestServices
    write_batch: WriteBatch

    def serve(self, sent: bytes = REQUEST) -> None:
        self.client.data_received(sent)
        self.write_batch.flush()
        assert self.server_wire.take().endswith(b"}")
        self.server_wire.receive(RESPONSE)
        self.write_batch.flush()
        assert self.client_wire.take().endswith(COMPLETION)

    def stream(self, chunks: Sequence[bytes] = CHUNKS) -> None:
        self.client.data_received(STREAM)
        self.server_wire.receive(STREAM_HEAD)
        for chunk in chunks:
            self.server_wire.receive(chunk)
            self.write_batch.flush()
        assert self.client_wire.take().endswith(b"".join(CHUNKS))

    def finish_stream(self) -> None:
        self.server_wire.receive(STREAM_END)
        self.write_batch.flush()
        assert self.client_wire.take().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")

    def limit(self, limits: Limits) -> None:
        """Give all keys these limits."""
        before = self.worker.snapshot
        keys = tuple(replace(key, allowances=(Allowance(f"key {key.id}", limits),)) for key in before.keys)
        self.worker.apply_snapshot(replace(before, keys=keys))
        self.worker.apply_health(Health({"tiny#0": Condition.UP}, {}, {}))

    def record_bodies(self, rules: Recording) -> None:
        """Record requests with their bodies."""
        self.context.recorder = BodyRecorder(lambda _: None, deletes=False)
        self.worker.apply_snapshot(replace(self.worker.snapshot, recording=rules))
        self.worker.apply_health(Health({"tiny#0": Condition.UP}, {}, {}))

    def stop_recording(self) -> None:
        """End the thread that stores records, if there is one."""
        if self.context.recorder is not None:
            self.context.recorder.close()

    def identify(self, *, in_store: bool) -> None:
        """Configure identity: a store and the sessions of people, of which some are revoked. ``in_store``: the keys are in the store.

        Otherwise the store has as many other keys. Admin tokens and the audit log are in control only.
        """
        before = self.worker.snapshot
        rules = SessionRules(b"k" * 32, True, 28_800.0, 86_400.0, ("", "https://login.example.com"))
        others = tuple(Key(f"stored-{n}", (hashlib.sha256(b"stored-%d" % n).digest(),)) for n in range(KEYS))
        self.worker.apply_snapshot(replace(before, keys=() if in_store else before.keys, has_store=True, sessions=rules))
        self.worker.apply_stored_keys(StoredKeys(before.keys if in_store else others, is_reset=True))
        self.worker.app.page_requests.revoke(tuple(f"session-{n}" for n in range(KEYS)))
        self.worker.apply_health(Health({"tiny#0": Condition.UP}, {}, {}))

    def serve_another(self, requests: Iterator[bytes]) -> None:
        """Serve the next request. The iterator yields requests whose keys differ."""
        self.serve(next(requests))

    def record(self, journal: Journal) -> None:
        """Keep a ledger."""
        self.context.ledger = Recorder(journal)
        self.context.ledger.apply_snapshot(self.worker.snapshot)

    def receive(self, chunks: Iterator[tuple[bytes, bytes]]) -> None:
        """Receive the next chunk of the server. The iterator yields this chunk, and the chunk that the client gets."""
        chunk, sent = next(chunks)
        self.server_wire.receive(chunk)
        self.write_batch.flush()
        assert self.client_wire.take() == sent


@asynccontextmanager
async def exchange() -> AsyncIterator[Exchange]:
    spec = ServerSpec("tiny#0", Address(port=1), "tiny", keep_idle=1e9)
    keys = tuple(Key(f"team-{n}", (hashlib.sha256(b"key-%d" % n).digest(),)) for n in range(KEYS))
    counters, nowhere = SharedCounters.create("cost", 1 << 20), os.open(os.devnull, os.O_WRONLY)
    batch = ManualWriteBatch(math.inf)
    batch.batching = True
    with live_servers(batch) as servers, access_log(nowhere) as log:
        context = RequestServices(metrics=WorkerMetrics(counters), log=log, write_batch=batch)
        worker = Worker(Snapshot(1, keys, (Model("tiny", (spec,)),)), context, partial(handle_request, worker=context), fleet=servers)
        worker.apply_health(Health({spec.name: Condition.UP}, {}, {}))
        client = worker.connection()
        (server,) = servers
        connection = Connection(spec.name, server.add_idle_connection, servers.write_batch)
        made = Exchange(client, Wire(), connection, Wire(), worker, context, batch)
        client.connection_made(made.client_wire)
        made.server_wire.set_protocol(connection)
        connection.connection_made(made.server_wire)
        server.add_idle_connection(connection)
        yield made
        client.connection_lost(None)
        connection.connection_lost(None)
    os.close(nowhere)
    counters.close()
