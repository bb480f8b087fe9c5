"""The routes of the data port that are not inference: health, model lists, the version and the API reference, as an ASGI application.

The rule: every request ends in ``WorkerApp.__call__``, which gives the response its request ID and records the request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway import __version__
from gateway.api.errors import Refusal, internal_error, render, unknown_model
from gateway.api.unserved import shown as shown_text
from gateway.api.unserved import unserved
from gateway.auth.catalog import CatalogEntry
from gateway.client.addresses import shown_address
from gateway.client.http.head import FORWARDED
from gateway.proxy.request_services import RequestServices
from gateway.self_service import paths as self_service
from gateway.sign_in.paths import SESSION, endpoint_of
from gateway.snapshot.link import Health
from gateway.snapshot.snapshot import Key, SessionRules
from gateway.telemetry.metrics import OTHER
from gateway.telemetry.request_record import RequestRecord, explained
from gateway.worker.model_list import card, cards, page
from gateway.worker.page_requests import PageRequests
from gateway.worker.query_requests import UsageRequests

_HEALTH, _MODELS, _VERSION, _USAGE, _LIMITS = "/health", "/v1/models", "/version", "/v1/usage", "/v1/limits"
_REFERENCE = frozenset({"/docs", "/openapi.json"})
_NOT_STORED = {"cache-control": "no-store"}
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"]
_log = logging.getLogger("vllm_gateway.worker")


class WorkerApp:
    """The ASGI application of one worker. A path that it does not serve gets an error."""

    def __init__(self, worker: RequestServices, request_ids: Iterator[str]) -> None:
        self._worker = worker
        self._request_ids = request_ids
        self.health = Health({}, {})
        """Control's last report about servers and models. ``Worker`` assigns it."""
        self.usage_requests = UsageRequests(worker.send)
        self.page_requests = PageRequests(worker.send)
        self._pages: Mapping[str, Callable[[Request], Awaitable[Response]]] = {
            _HEALTH: self._health,
            _VERSION: self._version,
            _USAGE: self._usage,
            _LIMITS: self._limits,
        }
        self._application = Starlette(
            routes=[Route(_HEALTH, self._health, methods=["GET"]), Route("/{path:path}", self._dispatch, methods=_METHODS)],
            exception_handlers={Refusal: _on_refusal, HTTPException: _on_http_error, Exception: _on_exception},  # type: ignore[dict-item]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = next((value for name, value in scope["headers"] if name == b"origin"), None)
        cors = self._worker.active.cors.headers(None if origin is None else origin.decode("latin-1"))
        identity, started, sent = next(self._request_ids), time.perf_counter(), {"status": 500, "bytes": 0}
        scope["state"]["request_id"] = identity

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                sent["status"] = message["status"]
                known = {name for name, _ in message["headers"]}
                added = [(name.encode(), value.encode("latin-1")) for name, value in cors.items() if name.encode() not in known]
                message["headers"] = [*message["headers"], *added, (b"x-request-id", identity.encode())]
            sent["bytes"] += len(message.get("body", b""))
            await send(message)

        try:
            await self._application(scope, receive, send_with_id)
        finally:  # Starlette raises an error again after it has sent a response
            self._record(scope, identity, time.perf_counter() - started, sent)

    def _record(self, scope: Scope, identity: str, duration: float, sent: dict[str, int]) -> None:
        state, path = scope["state"], scope["path"]
        endpoint = state.get("endpoint") or (path if path == _HEALTH else OTHER)
        unknown = endpoint == OTHER  # no label shows what was requested, so the access log does
        refusal = state.get("refusal")
        param, unknown_model = (None, None) if refusal is None else explained(refusal)
        record = RequestRecord(
            id=identity,
            started=time.time() - duration,
            client=self._client(scope),
            endpoint=endpoint,
            method=shown_text(scope["method"]) if unknown else None,
            path=shown_text(scope["raw_path"].decode("latin-1")) if unknown else None,
            status=sent["status"],
            code=state.get("code"),
            key=state.get("key"),
            response_bytes=sent["bytes"],
            duration=duration,
            overhead=duration,
            param=param,
            unknown_model=unknown_model,
        )
        self._worker.record_request(record)

    def _client(self, scope: Scope) -> str | None:
        """Return the address of the client, as far as it is known."""
        if scope["client"] is None:
            return None
        proxies, address = self._worker.active.proxies, shown_address(scope["client"][0])
        forwarded = b",".join(value for name, value in scope["headers"] if name == FORWARDED)
        return proxies.client(address, forwarded) if proxies.trusts(address) else address

    # The routes

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _dispatch(self, request: Request) -> Response:
        """Serve the model lists, of the gateway and of instance URLs, the version and the API reference. Raises Refusal for other paths."""
        active, path = self._worker.active, _raw_path(request)
        rules = active.snapshot.sessions
        if rules is not None and (response := await self._of_person(request, path, rules)) is not None:
            return response
        root, mark, rest = path.partition(_MODELS)
        mounted = active.catalog.mounted(root + _MODELS, _MODELS) if root else None
        lists = mark and (not root or mounted is not None) and (not rest or rest.startswith("/"))
        if lists:
            request.state.endpoint = _MODELS
        if (preflight := self._preflight(request)) is not None:
            return preflight
        if lists:
            _require_method(request, "GET")
            return self._models(request, mounted, rest[1:])
        if path.encode() in active.catalog.targets:
            _require_method(request, "POST")
        page = path.removesuffix("/")
        if page in self._pages:
            request.state.endpoint = page
            _require_method(request, "GET")
            return await self._pages[page](request)
        if active.snapshot.portal and (shown := self._portal_page(request, page)) is not None:
            return shown
        if active.snapshot.docs and path in _REFERENCE:
            _require_method(request, "GET")
            return (await run_in_threadpool(lambda: self._reference))[path]
        raise unserved(request.method, path)

    async def _of_person(self, request: Request, path: str, rules: SessionRules) -> Response | None:
        """Respond for sign-in and self-service; None for other paths. Raises Refusal."""
        endpoint, own = endpoint_of(path), self_service.endpoint_of(path)
        if endpoint is None and own is None:
            return None
        request.state.endpoint = endpoint or own
        if endpoint == SESSION:
            _require_method(request, "GET")
            return self._session(request, rules)
        if own in self_service.FOR_KEYS and ("authorization" in request.headers or "x-api-key" in request.headers):
            _require_method(request, "GET")
            return await self._pages[own.replace(self_service.PREFIX, "/v1")](request)
        return await self.page_requests.respond(request, self._client(request.scope))

    def _session(self, request: Request, rules: SessionRules) -> Response:
        """Return the person of the session. Raises Refusal."""
        sessions, now = self.page_requests.sessions(rules), time.time()
        if (session := sessions.read(request.scope["headers"], now)) is None:
            raise Refusal("missing_api_key", "No person is signed in. Sign in at /sign-in.")
        return JSONResponse(session.document(), headers=_NOT_STORED | sessions.renewal(session, now))

    @cached_property
    def _reference(self) -> dict[str, Response]:
        """The API reference by path. The first request for it builds it, so a worker without such a request neither loads nor holds it."""
        from gateway.api import reference

        document = reference.document()
        return {"/openapi.json": JSONResponse(document), "/docs": reference.page(document)}

    def _portal_page(self, request: Request, path: str) -> Response | None:
        """Return a page of the portal, or the redirect of a browser to it from ``/``. None for another path. Raises Refusal."""
        from gateway.portal import pages as portal  # loaded by the first request, so that a worker without one does not hold it

        if path not in portal.PAGES:
            is_browser = not path and request.method == "GET" and "text/html" in request.headers.get("accept", "")
            return RedirectResponse(portal.START, 303, _NOT_STORED) if is_browser else None
        request.state.endpoint = path
        _require_method(request, "GET")
        return portal.page(path, signs_in=self._worker.active.snapshot.sessions is not None)

    async def _usage(self, request: Request) -> Response:
        """Return the key's own usage, from the ledger. Raises Refusal."""
        key = self._authenticate(request)
        if self._worker.ledger is None:
            raise Refusal("not_found", "The usage of keys is not recorded here: no ledger is configured.")
        return Response(await self.usage_requests.report(key, request.query_params), media_type="application/json", headers=_NOT_STORED)

    async def _limits(self, request: Request) -> Response:
        """Return the state of the limits that the key is subject to. Raises Refusal."""
        key = self._authenticate(request)
        headers, user = dict(request.scope["headers"]), request.query_params.get("user")
        states = await self._worker.limiter.states(key, request.state.request_id, headers, user)
        body = msgspec.json.encode({"key": key.id, "team": key.team, "limits": [each.document() for each in states]})
        return Response(body, media_type="application/json", headers=_NOT_STORED)

    async def _version(self, request: Request) -> Response:
        """Return the gateway's own version, in the shape of vLLM's response.

        A key is required, because a version tells which vulnerabilities a program has.
        """
        self._authenticate(request)
        return JSONResponse({"version": __version__})

    def _preflight(self, request: Request) -> Response | None:
        """Return the response to a CORS preflight, which has no key; None for another request."""
        headers = request.headers
        if request.method != "OPTIONS" or "access-control-request-method" not in headers:
            return None
        allowed = self._worker.active.cors.preflight(headers.get("origin"), headers.get("access-control-request-headers"))
        return None if allowed is None else Response(status_code=204, headers=allowed)

    def _models(self, request: Request, mounted: CatalogEntry | None, name: str) -> Response:
        visible = self._worker.active.catalog.visible(self._authenticate(request), mounted)
        if not name:
            return JSONResponse(page(cards((entry.model for entry in visible), self.health), request.query_params))
        entry = next((entry for entry in visible if name in (entry.model.id, *entry.model.aliases)), None)
        if entry is None:
            raise unknown_model(name)
        return JSONResponse(card(entry.model, self.health))

    def _authenticate(self, request: Request) -> Key:
        """Return the key of a request, also from ``x-api-key``: Anthropic's clients list models too. Raises Refusal."""
        headers = dict(request.scope["headers"])
        key = self._worker.active.keyring.authenticate(headers.get(b"authorization"), headers.get(b"x-api-key"), headers)
        request.state.key = key
        return key


def _raw_path(request: Request) -> str:
    """Return the path as it was sent.

    Percent-encoding is decoded only after the path of the list of models, since an ID may contain slashes.
    """
    raw = request.scope["raw_path"].decode("latin-1")
    return str(request.scope["path"]) if _MODELS + "/" in raw else str(raw)


def _require_method(request: Request, method: str) -> None:
    if request.method != method:
        raise Refusal("method_not_allowed", f"This route takes {method} only.", headers={"allow": method})


# Errors. These are coroutines because Starlette runs a plain function in a thread.


async def _on_refusal(request: Request, refusal: Refusal) -> Response:
    request.state.code, request.state.refusal = refusal.code, refusal
    path = request.scope["path"]  # request.url is built from the Host header
    body = render(refusal, anthropic=path.endswith(("/v1/messages", "/v1/messages/count_tokens")))
    return Response(body, refusal.spec.status, refusal.headers, media_type="application/json")


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    """Translate Starlette's own errors: 405 for a method that no route has, 404 for a path that its router cannot read."""
    if error.status_code == 405:
        return await _on_refusal(request, Refusal("method_not_allowed", f"The method {shown_text(request.method)} is not allowed here."))
    return await _on_refusal(request, unserved(request.method, _raw_path(request)))


async def _on_exception(request: Request, error: Exception) -> Response:
    identity = request.state.request_id
    _log.error("request %s failed inside the gateway", identity, exc_info=error, extra={"request_id": identity})
    return await _on_refusal(request, internal_error())
