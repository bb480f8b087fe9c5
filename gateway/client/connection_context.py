"""The objects that the client connections of a worker share, and a connection as its requests use it.

The rule: this module imports neither ``connection`` nor a request, so the modules of the package import each other in one direction:
``connection``, then the requests, then this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from email.utils import formatdate
from typing import Any, Protocol

from gateway.admission.body_memory import BodyMemory
from gateway.api.errors import Refusal
from gateway.client.active_snapshot import ActiveSnapshot
from gateway.client.addresses import ConnectionCounts
from gateway.client.eviction import Unauthenticated
from gateway.client.flow_control import FlowControl
from gateway.system.steps import Steps
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.request_ids import request_ids
from upstream.http.inline_task import InlineTask
from upstream.http.write_batching import BatchingTransport, WriteBatch

Message = MutableMapping[str, Any]
Application = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class ResponseTransport(Protocol):
    """The writing end of a connection, as responses use it."""

    def write(self, data: Any) -> None:
        """Send bytes."""

    def write_at_once(self, data: bytes) -> None:
        """Send bytes before those of other connections."""

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Send several pieces of bytes."""


class ResponseConnection(Protocol):
    """The part of a client connection that a request uses after its body."""

    @property
    def worker(self) -> ConnectionContext:
        """The objects that the connections of the worker share."""

    @property
    def transport(self) -> ResponseTransport:
        """The writing end."""

    @property
    def flow(self) -> FlowControl:
        """Whether the client reads as fast as the gateway writes."""

    @property
    def address(self) -> str:
        """The address of the peer."""

    @property
    def proxied(self) -> bool:
        """Whether the peer is a trusted proxy."""

    def client_of(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the address of the client that sent a request, as far as it is known."""

    def response_finished(self, *, keep_alive: bool, body_complete: bool) -> None:
        """Serve the next request, or close: the current request's response has been written."""

    def cut(self) -> None:
        """Close immediately, in the middle of a response."""


class Connection(Protocol):
    """A client connection as its requests and the worker use it."""

    worker: ConnectionContext
    transport: BatchingTransport
    flow: FlowControl
    deferred: Callable[[], None] | None
    scheme: str
    client: tuple[str, int] | None
    address: str
    proxied: bool

    @property
    def server(self) -> tuple[str, int | None] | None:
        """The IP address and port of this end, or the path of a Unix socket and None."""

    @property
    def is_awaited(self) -> bool:
        """Whether a first request, or the rest of a request line and headers, may still arrive."""

    def client_of(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the address of the client that sent a request, as far as it is known."""

    def check(self, now: float) -> None:
        """Close the connection if the client has kept it waiting for too long."""

    def response_finished(self, *, keep_alive: bool, body_complete: bool) -> None:
        """Serve the next request, or close: the current request's response has been written."""

    def write_refusal(self, refusal: Refusal, *, with_body: bool = True) -> None:
        """Write the response to what is not an inference request."""

    def shutdown(self) -> None:
        """Close the connection when the current request has been answered."""

    def close(self) -> None:
        """Close the connection after all written bytes have been sent."""

    def linger(self) -> None:
        """Read and discard the rest of a body after the response for a while, then close."""

    def cut(self) -> None:
        """Close immediately, in the middle of a response."""


class ConnectionContext:
    """The objects that the connections of a worker share. All of it but ``active`` lives as long as the worker."""

    active: ActiveSnapshot
    """The current snapshot. ``Worker`` assigns it."""
    other_routes: Application
    """Serves the requests that are not inference. ``Worker`` assigns it."""

    def __init__(self, metrics: WorkerMetrics, write_batch: WriteBatch, memory: BodyMemory, steps: Steps) -> None:
        self.metrics = metrics
        self.write_batch = write_batch
        self.memory = memory
        self.steps = steps
        self.connections: set[Connection] = set()
        self.connection_closed: Callable[[], None] = lambda: None
        """Called after each connection, if workers share a listening socket: they count their connections with it."""
        self.handlers: set[InlineTask | asyncio.Task[None]] = set()
        """The running handlers of requests."""
        self.keep_alive = True
        """False when the worker is about to drain: each response is then the last response on its connection."""
        self.addresses = ConnectionCounts()
        self.unauthenticated = Unauthenticated()
        self.request_ids = request_ids()
        self.date_line = b""
        """The Date header of this second."""
        self.update_date()

    def update_date(self) -> None:
        """Set the Date header to the current time."""
        self.date_line = f"date: {formatdate(usegmt=True)}\r\n".encode()
