"""Errors inside a response, and aborted responses that look complete. Each is reported as an error and counted as a server failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any

import orjson
import pytest

from tests.faults.invariants import unharmed
from tests.support.running import Served, model, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, DONE, HELLO, ROLE, chat, request, request_once
from upstream.balancing.ejection import FIRST_PAUSE

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
CASES: dict[int, tuple[int, str, str | None]] = {
    400: (400, "invalid_request", None),
    404: (404, "model_not_found", None),
    429: (429, "rate_limit_exceeded", None),
    500: (500, "server_error", "server_error"),
    503: (503, "overloaded", "server_error"),
}
"""By the code in the event: the status and error code for the client, and the reason of the counted server failure."""
NAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def _event(code: int, message: str, path: str) -> bytes:
    error: dict[str, Any] = {"message": message, "type": "x", "param": None, "code": code}
    name = b"event: error\n" if path in NAMED[2:] else b""
    document = {"type": "error", "error": error} if path == "/v1/messages" else {"error": error}
    return name + b"data: " + orjson.dumps(document) + b"\n\n"


@pytest.mark.row(30)
async def test_an_error_as_the_first_event(measured: Callable[[str], None]) -> None:
    sent = [b""]

    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(sent[0])
        await talk.chunk(DONE)
        await talk.end_stream()

    async with scripted(script) as server, unharmed([model(server.port)]) as served:
        for path in NAMED:
            for code, (status, name, reason) in CASES.items():
                sent[0] = _event(code, "no", path)
                failures = served.value("server_failures_total", "tiny", "tiny#0", reason or "server_error")
                counted = served.value("requests_total", "tiny", path, str(status))
                reply = await request_once(served.port, request(chat(stream=True, input="x", prompt=None), path))
                assert reply.status == status and (path == "/v1/messages" or reply.error["code"] == name)
                assert served.value("requests_total", "tiny", path, str(status)) == counted + 1
                assert served.value("server_failures_total", "tiny", "tiny#0", reason or "server_error") == failures + (reason is not None)
    measured(f"{len(NAMED) * len(CASES)} cases: each with its real status; those of 500 and more count as server failures")


@pytest.mark.row(30)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_engine_is_passed_over(stream: bool) -> None:
    """Without this, its quick errors would make it the least busy server."""

    async def dead(talk: Conversation) -> None:
        if stream:
            await talk.begin_stream()
            await talk.chunk(_event(500, DEAD, "/v1/chat/completions") + DONE)
            await talk.end_stream()
        else:
            body = {"error": {"message": DEAD, "type": "InternalServerError", "param": None, "code": 500}}
            await talk.respond(orjson.dumps(body), "500 Internal Server Error")

    async def responds(talk: Conversation) -> None:
        await talk.respond(COMPLETION)

    async with scripted(dead) as a, scripted(responds) as b, unharmed([model(a.port, b.port)]) as served:
        data = request(chat(stream=stream))
        since = await _until_passed_over(served, data)
        await until(lambda: _dead(served) == 3)
        for _ in range(9):
            assert (await request_once(served.port, data)).status == 200
        assert _dead(served) == 3 or monotonic() > since + FIRST_PAUSE, "it is tried again only when its pause is over"
        await until(lambda: not _is_passed_over(served))
        before = _dead(served)
        since = await _until_passed_over(served, data)
        await until(lambda: _dead(served) == before + 1)  # one is enough now
        assert (await request_once(served.port, data)).status == 200
        assert _dead(served) == before + 1 or monotonic() > since + 2 * FIRST_PAUSE


def _is_passed_over(served: Served) -> bool:
    return served.value("server_ejected", "tiny", "tiny#0") == 1


def _dead(served: Served) -> float:
    return served.value("server_failures_total", "tiny", "tiny#0", "engine_dead")


async def _until_passed_over(served: Served, data: bytes) -> float:
    """Send requests until the first server is passed over. All are served. Return the start of the last request."""
    while not _is_passed_over(served):
        since = monotonic()
        assert (await request_once(served.port, data)).status == 200
    return since


@pytest.mark.row(30)
async def test_an_aborted_response_is_a_server_failure() -> None:
    async def aborts(talk: Conversation) -> None:
        end = b'"index":0,"finish_reason":"abort"}]}'
        if talk.request.json.get("stream"):
            await talk.begin_stream()
            for event in (ROLE, HELLO, b'data: {"choices":[{"delta":{},' + end + b"\n\n", DONE):
                await talk.chunk(event)
            await talk.end_stream()
        elif talk.request.json.get("seed"):
            await talk.trickle(b'{"choices":[{"message":{},' + end)
        else:
            await talk.respond(b'{"choices":[{"message":{},' + end)

    async with scripted(aborts) as server, unharmed([model(server.port)]) as served:
        passed_over = asyncio.create_task(until(lambda: _is_passed_over(served)))
        for fields in ({}, {"seed": 1}, {"stream": True}):
            reply = await request_once(served.port, request(chat(**fields)))
            assert (reply.status, reply.whole) == (200, True), "the bytes are the server's"
        await until(lambda: served.value("server_failures_total", "tiny", "tiny#0", "aborted") == 3)
        assert served.value("incomplete_total", "tiny", "upstream") == 3
        await passed_over
