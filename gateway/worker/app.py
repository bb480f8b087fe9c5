"""A worker, composed: the routes, and what a request needs on its way, put together in one place.

``Worker`` can be made from a fixed ``Snapshot`` with no control process. The rule: it holds one snapshot at a time
and swaps to the next by assignment; live servers, tickets and counts stay.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway import __version__
from gateway.admission.body_memory import FREE, BodyMemory
from gateway.admission.inflight import ConcurrencyLimit, worker_share
from gateway.admission.inflight_slot import InflightCounts
from gateway.admission.queue import ModelQueues, ReportDemand, report_nothing
from gateway.api.errors import Refusal, internal_error, render, unknown_model
from gateway.api.unserved import shown as shown_text
from gateway.api.unserved import unserved
from gateway.auth.catalog import Catalog, CatalogEntry
from gateway.auth.keyring import Keyring
from gateway.client.addresses import ConnectionCounts, Proxies, shown_address
from gateway.client.connection import ClientConnection
from gateway.client.cors import Cors
from gateway.client.eviction import Unauthenticated
from gateway.client.http_parser import FORWARDED
from gateway.client.request import ClientRequest, request_ids
from gateway.ledger.recorder import Recorder
from gateway.limits import Limiter
from gateway.limits.buckets import Buckets
from gateway.proxy.exchange import authenticate, exchange
from gateway.snapshot.link import Health
from gateway.snapshot.snapshot import Key, Snapshot
from gateway.system.steps import Steps
from gateway.system.tls import Certificate
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.body_shape import ShapeSample
from gateway.telemetry.metrics import OTHER, WorkerMetrics
from gateway.telemetry.request_record import RequestRecord
from gateway.telemetry.tracing import Sampler, Spans
from gateway.worker import api_reference
from gateway.worker.model_list import Reported, card, cards, page
from upstream.balancing.pool import LiveServers
from upstream.http.deadlines import Deadlines
from upstream.http.inline_task import InlineTask

if TYPE_CHECKING:
    from gateway.auth.jwt import TokenVerifier

_HEALTH, _MODELS, _VERSION = "/health", "/v1/models", "/version"
_SWEEP_EVERY = 4  # ticks
_log = logging.getLogger("vllm_gateway.worker")


class Worker:
    """What serves requests by one ``Snapshot``: the story's ``Gate``, the connections' ``Door``, the other routes' ASGI application.

    ``number`` is the worker's among all of them.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        fleet: LiveServers,
        metrics: WorkerMetrics,
        log: AccessLog,
        ask: ReportDemand = report_nothing,
        want: Callable[[str], None] | None = None,
        on_store: Callable[[str | None], None] | None = None,
        books: Recorder | None = None,
        meters: Buckets | None = None,
        number: int = 0,
        spans: Spans | None = None,
    ) -> None:
        self.number = number
        self.fleet = fleet
        self.write_batch = fleet.write_batch
        self.books = books
        self.sampler: Sampler | None = None
        self._spans = spans or Spans()
        self._want = want
        self._tokens: TokenVerifier | None = None
        self.metrics = metrics
        self.admission = InflightCounts()
        self.limits = Limiter(metrics, meters or Buckets.private(), on_store or _told_nobody)
        self.deadlines = Deadlines()
        self.lobby = ModelQueues(self.deadlines, metrics.queued, ask)
        self.leaving = False
        self.draining = False
        self.connections: set[ClientConnection] = set()
        self.handlers: set[InlineTask | asyncio.Task[None]] = set()
        self.memory = BodyMemory(snapshot.clients.body_memory)
        self.steps = Steps()
        self.addresses = ConnectionCounts()
        self.unauthenticated = Unauthenticated()
        self.certificate = Certificate(snapshot.tls) if snapshot.tls else None
        self._ticks = 0
        self.request_ids = request_ids()
        self._log = log
        self._max_model_len: dict[str, int] = {}
        self._tasks: dict[str, str] = {}
        self._manual = api_reference.Manual()
        self.other_routes = self.application()
        self.catalog = Catalog((), {})
        self.take(snapshot)
        self._tell_time()

    def take(self, snapshot: Snapshot) -> None:
        """Serve by this snapshot from now on; what is under way keeps the one it began with."""
        servers = self.fleet.reconcile(spec for model in snapshot.bases for spec in model.servers)
        self.metrics.create_series(snapshot)
        for model in snapshot.bases:
            for index, spec in enumerate(model.servers):
                servers[spec.name].publish_in_flight(self.metrics.cells("server_inflight", model.id, spec.name))
                servers[spec.name].limit = self._part(model.max_inflight, index, snapshot.workers)
                servers[spec.name].ejected_cells = self.metrics.cells("server_ejected", model.id, spec.name)
        self.snapshot = snapshot
        self.house = (
            None if snapshot.max_inflight is None else ConcurrencyLimit(worker_share(snapshot.max_inflight, self.number, snapshot.workers))
        )
        self.keyring = Keyring(snapshot.keys, self._tokens_of(snapshot))
        self.cors = Cors(snapshot.cors_origins)
        self.catalog.retire()
        self.catalog = Catalog(snapshot.models, servers, snapshot.default_model)
        self.targets = self.catalog.targets
        self.clients = snapshot.clients
        self.proxies = Proxies(snapshot.clients.trusted_proxies)
        self.memory.limit = snapshot.clients.body_memory
        self.body_limit = snapshot.body_limit
        self.body_allowance = min(snapshot.body_limit, FREE)
        if self.books is not None:
            self.books.apply_snapshot(snapshot)
        self.limits.apply_snapshot(snapshot)
        self.lobby.set_models((entry.model, entry.pool) for entry in self.catalog.entries if entry.model.parent is None)
        self.sample = ShapeSample(snapshot.log_sample) if snapshot.log_sample else None
        self.sampler = None
        if snapshot.tracing is not None:
            self.sampler, self._spans.endpoint = Sampler(snapshot.tracing), snapshot.tracing.endpoint
            self._spans.scheme = "http" if self.certificate is None else "https"

    def _tokens_of(self, snapshot: Snapshot) -> TokenVerifier | None:
        """What knows tokens by this snapshot; None where none are taken."""
        if not snapshot.issuers:
            self._tokens = None
            return None
        from gateway.auth.jwt import TokenVerifier  # with PyJWT, which is an extra

        self._tokens = self._tokens or TokenVerifier(self._want or _told_nobody)
        self._tokens.apply_snapshot(snapshot)
        return self._tokens

    def _part(self, whole: int | None, index: int, workers: int) -> float:
        """What this worker may have in flight on a model's server; what cannot be divided is another worker's with each server."""
        return math.inf if whole is None else worker_share(whole, self.number + index, workers)

    def learn(self, health: Health) -> None:
        """Take over what control found out about servers."""
        for name, condition in health.conditions.items():
            self.fleet.set_condition(name, condition)
        self._max_model_len, self._tasks = dict(health.max_model_len), dict(health.tasks)
        self.lobby.set_expected(health.expected)

    def tick(self) -> None:
        """What is done a few times a second for all requests together."""
        self._tell_time()
        self.deadlines.tick()
        self.unauthenticated.relieve()
        self.lobby.tick()
        self.limits.tick()
        self._log.flush()
        self.metrics.count_dropped_lines(self._log.newly_dropped())
        self._spans.flush()
        self._ticks += 1
        if self._ticks % _SWEEP_EVERY == 0:
            self._sweep()

    def _sweep(self) -> None:
        """What is done about once a second for all connections, the servers' and the clients'."""
        self.fleet.expire()
        now = time.monotonic()
        for connection in tuple(self.connections):
            connection.check(now)
        if self.certificate is not None and self.snapshot.tls is not None:
            self.certificate.reload(self.snapshot.tls)

    def _tell_time(self) -> None:
        self.date_line = f"date: {formatdate(usegmt=True)}\r\n".encode()

    def settled(self, record: RequestRecord) -> None:
        """Count and log a finished request, and keep its row where there is a ledger."""
        self.metrics.record_request(record)
        self._log.add(record)
        if self.books is not None:
            self.books.record_request(record)
        if record.trace is not None and record.trace.sampled:
            self._spans.add(record)

    # The data port

    def connection(self) -> ClientConnection:
        """Return the protocol of a connection that has been accepted on the data port."""
        return ClientConnection(self)

    def cors_lines(self, origin: bytes) -> bytes:
        """The headers for a page of an origin, as lines."""
        headers = self.cors.headers(origin.decode("latin-1"))
        return b"".join(b"%b: %b\r\n" % (name.encode(), value.encode("latin-1")) for name, value in headers.items())

    def unknown(self, call: ClientRequest) -> Refusal | None:
        """Why a request that waits for its turn would be refused for its key now; None when it would not."""
        try:
            authenticate(call, self.keyring)
        except Refusal as refusal:
            return refusal
        return None

    def serve(self, call: ClientRequest) -> Coroutine[Any, Any, None]:
        """The story of a request of the data port."""
        return exchange(call, self)

    # Every route that is not inference

    def application(self) -> Callable[[Scope, Receive, Send], Any]:
        """The ASGI application behind the edge: health, model lists, and an error for everything else."""
        routes = [
            Route(_HEALTH, self._health, methods=["GET"]),
            Route("/{path:path}", self._other, methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"]),
        ]
        handlers: dict[Any, Any] = {Refusal: _refused, HTTPException: _http_error, Exception: _internal_error}
        return _Accounted(Starlette(routes=routes, exception_handlers=handlers), self)

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _other(self, request: Request) -> Response:
        """The model lists, of the gateway and of instance URLs, the version, the API reference; everything else is an error."""
        path = _raw_path(request)
        root, mark, rest = path.partition(_MODELS)
        mounted = self.catalog.mounted(root + _MODELS, _MODELS) if root else None
        lists = mark and (not root or mounted is not None) and (not rest or rest.startswith("/"))
        if lists:
            request.state.endpoint = _MODELS
        if (preflight := self._preflight(request)) is not None:
            return preflight
        if lists:
            _only(request, "GET")
            return self._models(request, mounted, rest[1:])
        if path.encode() in self.targets:
            _only(request, "POST")
        page = path.removesuffix("/")
        if page in (_HEALTH, _VERSION):
            request.state.endpoint = page
            _only(request, "GET")
            return await self._health(request) if page == _HEALTH else self._version(request)
        if self.snapshot.docs and path in api_reference.PATHS:
            _only(request, "GET")
            return await self._manual.page(path)
        raise unserved(request.method, path)

    def _version(self, request: Request) -> Response:
        """The gateway's own version, in the shape of vLLM's. It needs a key: a version tells which faults a program has."""
        self._key(request)
        return JSONResponse({"version": __version__})

    def _preflight(self, request: Request) -> Response | None:
        """The answer to a browser that asks whether a page may send its request; it carries no key."""
        asked = request.headers
        if request.method != "OPTIONS" or "access-control-request-method" not in asked:
            return None
        headers = self.cors.preflight(asked.get("origin"), asked.get("access-control-request-headers"))
        return None if headers is None else Response(status_code=204, headers=headers)

    def _models(self, request: Request, mounted: CatalogEntry | None, name: str) -> Response:
        key = self._key(request)
        if not name:
            visible = [(entry.model, self._reported(entry)) for entry in self.catalog.visible(key, mounted)]
            return JSONResponse(page(cards(visible), request.query_params))
        entry = next((entry for entry in self.catalog.visible(key, mounted) if name in (entry.model.id, *entry.model.aliases)), None)
        if entry is None:
            raise unknown_model(name)
        return JSONResponse(card(entry.model, self._reported(entry)))

    def _reported(self, entry: CatalogEntry) -> Reported:
        return Reported(self._max_model_len.get(entry.model.id), self._tasks.get(entry.model.id))

    def _key(self, request: Request) -> Key:
        headers = dict(request.scope["headers"])
        key = self.keyring.authenticate(
            headers.get(b"authorization"), headers.get(b"x-api-key"), headers
        )  # Anthropic's clients list models too
        request.state.key = key
        return key


def _told_nobody(_: str | None) -> None:
    """There is no control process to report to."""


class _Accounted:
    """Gives every answer its request id, its line in the log and its count."""

    def __init__(self, application: Starlette, worker: Worker) -> None:
        self._application = application
        self._worker = worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = next((value for name, value in scope["headers"] if name == b"origin"), None)
        cors = self._worker.cors.headers(None if origin is None else origin.decode("latin-1"))
        identity, began, sent = next(self._worker.request_ids), time.perf_counter(), {"status": 500, "bytes": 0}
        scope["state"]["request_id"] = identity

        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                sent["status"] = message["status"]
                known = {name for name, _ in message["headers"]}
                added = [(name.encode(), value.encode("latin-1")) for name, value in cors.items() if name.encode() not in known]
                message["headers"] = [*message["headers"], *added, (b"x-request-id", identity.encode())]
            sent["bytes"] += len(message.get("body", b""))
            await send(message)

        try:
            await self._application(scope, receive, stamped)
        finally:  # Starlette passes an error on when it has been answered
            self._worker.settled(_record(scope, identity, time.perf_counter() - began, sent, self._worker.proxies))


def _record(scope: Scope, identity: str, duration: float, sent: dict[str, int], proxies: Proxies) -> RequestRecord:
    state, path = scope["state"], scope["path"]
    key: Key | None = state.get("key")
    endpoint = state.get("endpoint") or (path if path == _HEALTH else OTHER)
    unknown = endpoint == OTHER  # no label says what was requested, so the line in the log does
    return RequestRecord(
        id=identity, started=time.time() - duration, endpoint=endpoint, status=sent["status"], code=state.get("code"),
        key=key, model=None, server=None, stream=False, request_bytes=0, answer_bytes=sent["bytes"], usage=None,
        incomplete=None, retries=0, duration=duration, overhead=duration, queued=0.0, first_byte=None, first_token=None, gaps=None,
        user=None, failures=(), detail=None, client=_client(scope, proxies),
        method=shown_text(scope["method"]) if unknown else None,
        path=shown_text(scope["raw_path"].decode("latin-1")) if unknown else None,
    )  # fmt: skip


def _client(scope: Scope, proxies: Proxies) -> str | None:
    if scope["client"] is None:
        return None
    address = shown_address(scope["client"][0])
    forwarded = b",".join(value for name, value in scope["headers"] if name == FORWARDED)
    return proxies.client(address, forwarded) if proxies.trusts(address) else address


def _raw_path(request: Request) -> str:
    """The path as it was sent, with percent-encoding undone only behind the list of models (an ID has slashes)."""
    raw = request.scope["raw_path"].decode("latin-1")
    return str(request.scope["path"]) if _MODELS + "/" in raw else str(raw)


def _only(request: Request, method: str) -> None:
    if request.method != method:
        raise Refusal("method_not_allowed", f"This route takes {method} only.", headers={"allow": method})


# They are coroutines because Starlette gives a plain function a thread, for each error.


async def _refused(request: Request, refusal: Refusal) -> Response:
    return _told(request, refusal)


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Starlette's own: 405 for a method that no route has, 404 for a path that its router cannot read."""
    if error.status_code == 405:
        return _told(request, Refusal("method_not_allowed", f"The method {shown_text(request.method)} is not allowed here."))
    return _told(request, unserved(request.method, _raw_path(request)))


async def _internal_error(request: Request, error: Exception) -> Response:
    identity = request.state.request_id
    _log.error("request %s failed inside the gateway", identity, exc_info=error, extra={"request_id": identity})
    return _told(request, internal_error())


def _told(request: Request, refusal: Refusal) -> Response:
    request.state.code = refusal.code
    anthropic = request.scope["path"].endswith(("/v1/messages", "/v1/messages/count_tokens"))  # request.url is made of the Host header
    body = render(refusal, anthropic=anthropic)
    return Response(body, refusal.spec.status, refusal.headers, media_type="application/json")
