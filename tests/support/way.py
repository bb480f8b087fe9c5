"""A worker between fake transports: test how it processes bytes, without sockets and fast enough for property tests."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from gateway.snapshot.link import Health
from gateway.snapshot.snapshot import Key, Model, Snapshot
from gateway.telemetry.access_log import access_log
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.shared_counters import SharedCounters
from gateway.worker.worker import Worker
from tests.support.running import WatchedRequests, key, model, shared_counters
from tests.support.wire import chat, request
from upstream.balancing.pool import live_servers
from upstream.balancing.server import Condition
from upstream.http.connection import Connection

_ENDED = re.compile(rb"(?:\r\n|\n|\r){2}\Z")
"""The end of an event. After a CR, the LF may come with the next read; it belongs to no event."""


class _Socket:
    """The socket of a fake transport."""

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    getpeername = getsockname

    def fileno(self) -> int:
        return -1  # no descriptor, so nothing can be read from it

    def setsockopt(self, *_: object) -> None:
        """Ignore the option."""


class Wire(asyncio.Transport):
    """A transport that stores the written bytes, and passes bytes to its protocol. The test sets the first protocol."""

    def __init__(self, sock: socket.socket | None = None) -> None:
        super().__init__({"socket": sock or _Socket()})
        self.protocol: Any = None
        self.written: list[bytes] = []
        self._closing = False

    def write(self, data: Any) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        """Do nothing. The test still passes bytes to the protocol."""

    resume_reading = pause_reading

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def receive(self, data: bytes) -> None:
        """Pass bytes from the peer to the protocol."""
        self.protocol.data_received(data)

    def close(self) -> None:
        """Mark the transport as closed. There is no peer, so no more bytes are read."""
        self._closing = True

    abort = close

    def take(self) -> bytes:
        taken = b"".join(self.written)
        self.written.clear()
        return taken


class Way:
    """A client's connection and a server's connection with fake transports."""

    def __init__(self, worker: Worker, context: WatchedRequests, counters: SharedCounters) -> None:
        self.worker, self.context, self.write_batch, self.counters = worker, context, worker.fleet.write_batch, counters
        server = next(iter(worker.fleet))
        self.client, self.client_wire = worker.connection(), Wire()
        self.server, self.server_wire = Connection(server.spec.name, server.add_idle_connection, self.write_batch), Wire()
        self.client.connection_made(self.client_wire)
        self.server_wire.set_protocol(self.server)
        self.server.connection_made(self.server_wire)
        server.add_idle_connection(self.server)

    def streamed(self, pieces: Iterable[bytes], include_usage: bool, **fields: object) -> bytes:
        """Return the bytes that the client gets of a response that arrives in these reads. ``fields``: more fields of the request."""
        options = {"stream_options": {"include_usage": True}} if include_usage else {}
        self.client.data_received(request(chat(stream=True, **options, **fields)))
        self.write_batch.flush()
        assert self.server_wire.take()
        for piece in pieces:
            if not self.server_wire.is_closing():
                self.server_wire.receive(piece)
                self.write_batch.flush()
        return self.client_wire.take()

    def end(self) -> None:
        self.client.connection_lost(None)
        self.server.connection_lost(None)


@contextmanager
def way(client_key: Key | None = None, served: Model | None = None) -> Iterator[Way]:
    """Run a worker. Only the first server of the model is up."""
    nowhere, served = os.open(os.devnull, os.O_WRONLY), served or model(1)
    with shared_counters() as counts, live_servers() as servers, access_log(nowhere) as log:
        context = WatchedRequests(metrics=WorkerMetrics(counts), log=log, write_batch=servers.write_batch)
        worker = Worker(Snapshot(1, (client_key or key(),), (served,)), context, context.handle, fleet=servers)
        worker.apply_health(Health({served.servers[0].name: Condition.UP}, {}))
        made = Way(worker, context, counts)
        yield made
        made.end()
    os.close(nowhere)


def unchunked(response: bytes) -> bytes:
    """Return the body of a stream as the client got it. Check that it is complete and was sent in complete events."""
    headers, _, rest = response.partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200 OK\r\n") and b"transfer-encoding: chunked" in headers
    body, at = list[bytes](), 0
    while True:
        end = rest.index(b"\r\n", at)
        size = int(rest[at:end], 16)
        if not size:
            assert rest[end:] == b"\r\n\r\n", "the answer is not whole"
            return b"".join(body)
        body.append(rest[end + 2 : end + 2 + size])
        assert _ENDED.search(body[-1]) or not body[-1].strip(), f"half an event was passed on: {body[-1]!r}"
        at = end + size + 4
