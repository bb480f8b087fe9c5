"""The routes of the simulator, and the layers in front of them: first the journal, then the key check.

Owns the table of routes. Every response of a route that reads a body goes through ``_with_errors``, which renders errors.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from upstream.simulator import behavior, errors
from upstream.simulator.endpoints import (
    audio,
    chat,
    chat_batch,
    completions,
    derender,
    generate,
    messages,
    pooling,
    render,
    responses,
    tokenization,
)
from upstream.simulator.engine import metrics
from upstream.simulator.engine.engine import Engine
from upstream.simulator.engine.generation import Generation
from upstream.simulator.engine.job import ApiRequest, Job, now, random_id
from upstream.simulator.errors import ApiError
from upstream.simulator.flags import Lora, Settings
from upstream.simulator.journal import Journal, JournalEntry

VERSION = "0.32.0"
GUARDED = ("/v1", "/v2", "/inference", "/cohere")

JobReader = Callable[[ApiRequest], Job]
Reply = Callable[[ApiRequest], dict[str, Any]]
Endpoint = Callable[[Request], Awaitable[Response]]

GENERATING: dict[str, JobReader] = {
    "/v1/chat/completions": chat.job,
    "/v1/chat/completions/batch": chat_batch.job,
    "/v1/completions": completions.job,
    "/v1/responses": responses.job,
    "/v1/messages": messages.job,
    "/v1/embeddings": pooling.embeddings,
    "/v2/embed": pooling.cohere_embeddings,
    "/pooling": pooling.pooling,
    "/classify": pooling.classify,
    "/score": pooling.score,
    "/v1/score": pooling.score,
    "/rerank": pooling.rerank,
    "/v1/rerank": pooling.rerank,
    "/v2/rerank": pooling.rerank,
}
AT_ONCE: dict[str, Reply] = {
    "/v1/messages/count_tokens": messages.count,
    "/tokenize": tokenization.tokenize,
    "/detokenize": tokenization.detokenize,
}
SCALE_OUT = (
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/chat/completions/derender",
    "/v1/completions/derender",
    "/inference/v1/generate",
    "/inference/v1/abort_requests",
)
"""Routes that vLLM forbids without ``--enable-scale-out``. Three of them are simulated."""
SCALE_OUT_GENERATING: dict[str, JobReader] = {"/inference/v1/generate": generate.job}
SCALE_OUT_AT_ONCE: dict[str, Reply] = {
    "/v1/chat/completions/render": render.chat_request,
    "/v1/chat/completions/derender": derender.chat_chunk,
}
AUDIO: dict[str, audio.Task] = {"/v1/audio/transcriptions": "transcribe", "/v1/audio/translations": "translate"}

_UNCOUNTED = frozenset({"/metrics", "/health", "/load", "/ping", "/version"})
"""Paths that vLLM's API server does not count (entrypoints/serve/instrumentator/metrics.py)."""


class Fast(JSONResponse):
    """JSON as vLLM writes it: compact, UTF-8."""

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


class Simulator:
    """The ASGI application: one server's routes, engine and journal."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engine = Engine(settings)
        self.journal = Journal()
        self._healthy_at = time.monotonic() + settings.start.healthy_after
        self._created = now()
        self._routes = Starlette(routes=list(self._table()), exception_handlers={HTTPException: _detail})

    def _table(self) -> list[Route]:
        own = [
            Route("/sim/requests", self._requests, methods=["GET", "DELETE"]),
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/version", self._version),
            Route("/load", self._load),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/responses/{response_id}", self._no_response),
            Route("/v1/responses/{response_id}/cancel", self._no_response, methods=["POST"]),
        ]
        sleeping = [
            Route("/sleep", self._sleep, methods=["POST"]),
            Route("/wake_up", self._wake, methods=["POST"]),
            Route("/is_sleeping", self._is_sleeping),
            Route("/collective_rpc", self._rpc, methods=["POST"]),
        ]
        scale_out = self.settings.scale_out
        jobs = {**GENERATING, **(SCALE_OUT_GENERATING if scale_out else {})}
        replies = {**AT_ONCE, **(SCALE_OUT_AT_ONCE if scale_out else {})}
        generating = [Route(path, partial(self._generate, read), methods=["POST"]) for path, read in jobs.items()]
        at_once = [Route(path, partial(self._reply, reply), methods=["POST"]) for path, reply in replies.items()]
        forbidden = [] if scale_out else [Route(path, self._forbidden, methods=["POST"]) for path in SCALE_OUT]
        audio_routes = [Route(path, partial(self._hear, task), methods=["POST"]) for path, task in AUDIO.items()]
        return [*own, *(sleeping if self.settings.sleeps else []), *generating, *at_once, *forbidden, *audio_routes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        entry = JournalEntry(scope["method"], scope["path"], scope["query_string"].decode("latin-1"), scope["headers"])
        if not entry.path.startswith("/sim/"):
            self.journal.open(entry)
        scope["state"]["entry"] = entry
        try:
            await self._recorded(entry, scope, receive, send)
        finally:
            if entry.path not in _UNCOUNTED and not entry.path.startswith("/sim/"):
                self.engine.metrics.responses[entry.path, entry.method, f"{str(entry.status or 500)[0]}xx"] += 1

    async def _recorded(self, entry: JournalEntry, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body into the entry, pass it on to the application, and record the status of the response."""
        body, whole = await _read(receive)
        entry.body = body
        if not whole:
            entry.end("disconnected")
            return
        app: ASGIApp = self._routes if self._admits(scope) else Fast({"error": "Unauthorized"}, 401)
        await app(scope, _replayed(body, receive), self._noting(entry, scope, send))
        entry.end("refused" if (entry.status or 200) >= 400 else "finished")

    def _admits(self, scope: Scope) -> bool:
        """Check the bearer token as vLLM does, on some paths only (serve/middleware/authenticate.py)."""
        if not self.settings.api_keys or not scope["path"].startswith(GUARDED):
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"").decode("latin-1")
        scheme, _, token = given.partition(" ")
        return scheme.lower() == "bearer" and any(secrets.compare_digest(token.encode(), key.encode()) for key in self.settings.api_keys)

    def _noting(self, entry: JournalEntry, scope: Scope, send: Send) -> Send:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), random_id().encode())
        extra = [(b"x-request-id", given)] if self.settings.request_id_headers else []

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        return noting

    async def _generate(self, read: JobReader, request: Request) -> Any:
        return await self._with_errors(lambda: self._job(read, request))

    async def _job(self, read: JobReader, request: Request) -> Any:
        call = self._call(request, _parsed(request))
        refused = call.behavior.status
        if refused is not None:
            raise errors.status(refused)
        return Generation(self.engine, read(call), request.state.entry)

    async def _hear(self, task: audio.Task, request: Request) -> Any:
        return await self._with_errors(lambda: self._transcribe(task, request))

    async def _transcribe(self, task: audio.Task, request: Request) -> Any:
        async with request.form() as form:
            recording = await audio.Recording.of(form)
            call = self._call(request, {name: value for name, value in form.items() if isinstance(value, str)})
        return Generation(self.engine, audio.job(call, recording, task), request.state.entry)

    async def _reply(self, reply: Reply, request: Request) -> Any:
        async def respond() -> Response:
            return Fast(reply(self._call(request, _parsed(request))))

        return await self._with_errors(respond)

    async def _with_errors(self, respond: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await respond()
        except ApiError as refusal:
            return Fast(refusal.body(), refusal.status)
        except Unparsable:
            return Fast({"detail": "There was an error parsing the body"}, 400)

    def _call(self, request: Request, body: dict[str, Any]) -> ApiRequest:
        return ApiRequest(self.settings, body, request.headers, self._behavior(body.get("simulate")))

    def _behavior(self, given: Any) -> behavior.Behavior:
        if isinstance(given, str):  # a form's field
            given = orjson.loads(given)
        try:
            return behavior.for_request(self.settings.behavior, given)
        except ValidationError as error:
            raise errors.malformed(error.errors(include_url=False), ("body", "simulate")) from error

    async def _requests(self, request: Request) -> Response:
        if request.method == "DELETE":
            self.journal.clear()
            return Response(status_code=204)
        return Fast(self.journal.shown())

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200 if self._well() else 503)

    def _well(self) -> bool:
        sick = self.settings.start.sick_while
        return time.monotonic() >= self._healthy_at and not (sick and os.path.exists(sick))

    async def _version(self, _: Request) -> Response:
        return Fast({"version": VERSION})

    async def _load(self, _: Request) -> Response:
        return Fast({"server_load": 0})

    async def _metrics(self, _: Request) -> Response:
        text = self.engine.metrics.text(self.settings.served[0], self.engine.state())
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE})

    async def _models(self, _: Request) -> Response:
        cards = [self._card(name, self.settings.model, None, self.settings.max_model_len) for name in self.settings.served]
        cards += [self._card(lora.name, lora.path, self._base(lora), None) for lora in self.settings.loras]
        return Fast({"object": "list", "data": cards})

    def _base(self, lora: Lora) -> str:
        return lora.base if lora.base in self.settings.served else self.settings.served[0]

    def _card(self, name: str, root: str, parent: str | None, length: int | None) -> dict[str, Any]:
        permission = {
            "id": f"modelperm-{random_id()}",
            "object": "model_permission",
            "created": now(),
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {"id": name, "object": "model", "created": now(), "owned_by": "vllm", "root": root, "parent": parent}
        return {**card, "max_model_len": length, "permission": [permission]}

    async def _no_response(self, request: Request) -> Response:
        refusal = responses.not_found(request.path_params["response_id"])
        return Fast(refusal.body(), refusal.status)

    async def _forbidden(self, _: Request) -> Response:
        refusal = errors.scale_out_disabled()
        return Fast(refusal.body(), refusal.status)

    async def _sleep(self, request: Request) -> Response:
        self.engine.awake.clear()
        return Fast({"status": "sleeping", "level": int(request.query_params.get("level", 1))})

    async def _wake(self, request: Request) -> Response:
        self.engine.awake.set()
        return Fast({"status": "awake", "tags": request.query_params.getlist("tags") or None})

    async def _rpc(self, _: Request) -> Response:
        return Fast({"results": [None]})

    async def _is_sleeping(self, _: Request) -> Response:
        return Fast({"is_sleeping": not self.engine.awake.is_set()})


class Unparsable(Exception):
    """A body that vLLM's framework cannot parse: it is not text, is nested too deeply, or contains an infinite number."""


def _parsed(request: Request) -> dict[str, Any]:
    """Return the body as an object, by FastAPI's rules and in its order. Raises ApiError and Unparsable."""
    media_type = request.headers.get("content-type", "").lower().split(";", maxsplit=1)[0]
    if media_type != "application/json":
        raise errors.wrong_content_type()
    body: bytes = request.state.entry.body
    if not body:
        raise errors.malformed([{"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}])
    parsed = _loaded(body)
    if not isinstance(parsed, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise errors.malformed([{"type": "model_attributes_type", "loc": ("body",), "msg": message, "input": parsed}])
    return parsed


def _loaded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise errors.bad_json(error) from error
    except (ValueError, RecursionError) as error:
        raise Unparsable from error


async def _detail(_: Request, error: Exception) -> Response:
    """Respond to unknown routes and methods with FastAPI's texts."""
    assert isinstance(error, HTTPException)
    return Fast({"detail": error.detail}, error.status_code, error.headers)


async def _read(receive: Receive) -> tuple[bytes, bool]:
    """Return the body, and whether it is complete."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b"".join(parts), False
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts), True


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that starts with the body that was read before."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed
