"""Send a copy of a request to another model, and discard the response.

A copy is sent when its request is sent, with the same body apart from the model's name. The rules: a request never waits for its copy, and
nothing about a copy reaches the client, its limits or its ledger rows. A copy never waits for capacity. Its response is read to the end,
and only its usage is kept. The client's disconnect does not end a copy; the timeouts of its model do, and the drain of the worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic, time

import msgspec
import orjson

from gateway.admission.body_memory import FREE
from gateway.api.response_fields import Observer, of_body, of_event
from gateway.api.routes import Dialect, Route
from gateway.api.strict_json import Document
from gateway.api.usage import Usage, merged
from gateway.auth.catalog import CatalogEntry, MirrorTarget
from gateway.ledger.row import MIRRORED, UsageRow
from gateway.proxy.json_body import JsonBody
from gateway.proxy.request_services import RequestServices
from gateway.proxy.response import EVENT_LIMIT, is_binary, is_stream, read_error
from gateway.proxy.upstream_request import UpstreamRequest
from gateway.telemetry.metrics import InflightGauge
from upstream.balancing.attempt import Attempt, UpstreamResponse
from upstream.balancing.policies.policy import RequestFacts
from upstream.balancing.pool import NoServerError
from upstream.balancing.server import Server
from upstream.http.errors import UpstreamError
from upstream.http.sse import EventTooLongError, Splitter, data_of, split

_log = logging.getLogger("vllm_gateway.exchange")


class MirroredRequest(UpstreamRequest, frozen=True, kw_only=True):
    """A request whose copy is started when the request is sent."""

    copy: RequestCopy

    def compose(self, server: Server, content: bytes | None = None, path: str | None = None) -> tuple[bytes, bytes]:
        """Return the headers and the body for one server, as ``UpstreamRequest`` does."""
        self.copy.start()
        return UpstreamRequest.compose(self, server, content, path)


def mirrored(
    upstream: UpstreamRequest, model: CatalogEntry, mirror: MirrorTarget, worker: RequestServices, document: Document
) -> UpstreamRequest:
    """Return the request with its copy, if the share of the mirror includes it. ``document``: the merged body."""
    request, body = upstream.request, upstream.body
    if not isinstance(body, JsonBody) or int(request.id[-8:], 16) >= mirror.below:  # clients cannot choose the ID
        return upstream
    copy = RequestCopy(
        worker=worker,
        source=model.model.id,
        mirror=mirror,
        id=f"{request.id}-mirror",
        route=request.target.route,
        body=body,
        choices=document.get("n"),
        # The prompt keeps what its own server is expected to do, and a copy uses no reserved slot.
        facts=upstream.facts._replace(prompt=None, tier=mirror.entry.pool.tiers),
    )
    return MirroredRequest(request, model, upstream.name, body, upstream.facts, upstream.tokens, upstream.plan, copy=copy)


class RequestCopy(msgspec.Struct, eq=False, kw_only=True):
    """A copy of one request. ``source`` is the ID of the request's model, ``choices`` its ``n``."""

    worker: RequestServices
    source: str
    mirror: MirrorTarget
    id: str
    route: Route
    body: JsonBody | None
    """The body of the request; None once the copy has been sent."""
    choices: object
    facts: RequestFacts
    started: float | None = None
    """Seconds since the epoch."""
    status: int | None = None
    usage: Callable[[], Usage | None] = lambda: None
    """Returns the usage of the response so far."""

    def start(self) -> None:
        """Start the copy, once."""
        if self.started is None:
            self.started = time()
            if not self.worker.mirrors.start(self.source, self.mirror.max_inflight, self._run):
                self._count("drain" if self.worker.mirrors.closed else "limit")

    def _count(self, result: str) -> None:
        self.worker.metrics.cells("mirrored_requests_total", self.source, self.mirror.entry.model.id, result)[0] += 1

    async def _run(self) -> None:
        """Send the copy, read its response, and record it."""
        worker, entry, result, since = self.worker, self.mirror.entry, "failed", monotonic()
        with (
            InflightGauge(worker.metrics.cells("mirrored_inflight_requests", self.source, entry.model.id)),
            Attempt(entry.pool, entry.model.timeouts, worker.deadlines, self.facts) as attempt,
        ):
            try:
                await asyncio.sleep(0)  # the request itself is written first
                result = await self._send(attempt)
            except NoServerError:
                result = "no_capacity"
            except UpstreamError as error:
                _log.debug("mirrored request %s: %s", self.id, error)
            except asyncio.CancelledError:
                result = "drain"
            except Exception:  # noqa: BLE001  the outer edge: a bug with a copy must not reach its request
                _log.exception("mirrored request %s failed inside the gateway", self.id)
            self._record(attempt, result, monotonic() - since)
        for failure in attempt.failures:
            worker.metrics.cells("server_failures_total", entry.model.base, failure.server, failure.reason)[0] += 1
        self._count(result)

    async def _send(self, attempt: Attempt) -> str:
        """Send the copy, and read the response to its end. Returns the result. Raises NoServerError and UpstreamError."""
        assert self.body is not None, "a copy is sent once"
        memory, holder, size = self.worker.memory, f"mirror of {self.source}", 2 * len(self.body.content)
        is_large = size > FREE
        if is_large and not memory.reserve_spare(size, holder):
            return "limit"
        try:
            response = await attempt.send(self._compose)
        finally:
            self.body = None
            if is_large:
                memory.release(size, holder)
        self.status = response.status
        if not 200 <= response.status < 300:
            await read_error(response)
            return "failed"
        feed, self.usage = (_discard, self.usage) if self.worker.ledger is None else _reader(response, self.route.dialect)
        response.stream_to(feed)
        await response.wait_complete()
        return "completed"

    def _compose(self, server: Server) -> tuple[bytes, bytes]:
        """Return the headers and the body for one server. ``UpstreamRequest.compose`` does the same for the request itself."""
        body, model = self.body, self.mirror.entry.model
        assert body is not None, "the copy has not been sent"
        name = model.served or server.spec.model
        content = body.encode(name) if body.content else orjson.dumps({**body.document, "model": name})
        headers = b"%bcontent-type: %b\r\nx-request-id: %b\r\n%bcontent-length: %d\r\n\r\n" % (
            server.request_head(body.path), body.content_type, self.id.encode(), body.headers, len(content),
        )  # fmt: skip
        return headers, content

    def _record(self, attempt: Attempt, result: str, duration: float) -> None:
        """Record what the copy has used, for the reconciliation with the server's counters. It belongs to no key and has no price."""
        ledger, started = self.worker.ledger, self.started
        if ledger is None or started is None or attempt.composed_at is None:
            return
        is_error = self.status is not None and self.status >= 300
        incomplete = None if result == "completed" or is_error else "drain" if result == "drain" else "upstream"
        row = UsageRow(
            self.id, started, self.route.endpoint, MIRRORED, None, self.mirror.entry.model.id, attempt.tried[-1].name,
            status=self.status, incomplete=incomplete, duration=duration,
        )  # fmt: skip
        if (usage := self.usage()) is not None:
            row.prompt, row.completion, row.cached, row.reasoning = usage.prompt, usage.completion, usage.cached, usage.reasoning
        ledger.record_mirrored(row, self.choices)


# The response


class _Events:
    """Reads a stream of events. It keeps the first and the last read with a usage, and parses them at the end."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._splitter = Splitter(EVENT_LIMIT)
        self._first = self._last = b""
        self._is_too_long = False

    def feed(self, data: bytes) -> None:
        """Read the next bytes."""
        if self._is_too_long:
            return
        try:
            events = self._splitter.feed(data)
        except EventTooLongError:
            self._is_too_long = True  # a usage after it is not known
            return
        if events.find(b'"usage"') >= 0:
            self._first, self._last = self._first or events, events

    def usage(self) -> Usage | None:
        """Return the usage that was read so far. Messages have the usage of the prompt in their first event."""
        found: Usage | None = None
        for event in (*split(self._first), *split(self._last)):
            try:
                document = orjson.loads(data_of(event))
            except orjson.JSONDecodeError:
                continue
            if isinstance(document, dict):
                found = merged(found, of_event(document, self._dialect).usage)
        return found


def _reader(response: UpstreamResponse, dialect: Dialect) -> tuple[Callable[[bytes], None], Callable[[], Usage | None]]:
    """Return a function that reads the next bytes of a response, and a function that returns the usage that was read so far.

    Binary embeddings have their usage in a header (see ``response.EmbeddingsRelay``).
    """
    if is_stream(response):
        events = _Events(dialect)
        return events.feed, events.usage
    if is_binary(response):
        metadata = response.headers.get(b"metadata")
        usage = None if metadata is None else of_body(metadata, Dialect.PLAIN).usage
        return _discard, lambda: usage
    observer = Observer(dialect)
    return observer.feed, lambda: observer.fields.usage


def _discard(_: bytes) -> None:
    """Discard the next bytes of a response."""
