"""Browsers: pages of the origins in the configuration may read answers, others may not."""

from __future__ import annotations

from collections.abc import AsyncIterator

import orjson
import pytest

from gateway.api.settlement import BYTES_PER_TOKEN
from gateway.limits.estimate import DEFAULT_COMPLETION
from gateway.snapshot.snapshot import Allowance, Limits
from tests.support.ports import refusing
from tests.support.running import Served, key, model, serving
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, chat, request, request_once

PAGE = "https://app.example.com"


async def respond(talk: Conversation) -> None:
    await talk.respond(COMPLETION)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with scripted(respond) as server, serving([model(server.port)], cors_origins=(PAGE,)) as one:
        yield one


def preflight(origin: str, path: str = "/v1/chat/completions") -> bytes:
    wants = ("access-control-request-method: POST", "access-control-request-headers: authorization,content-type,x-stainless-lang")
    return request(b"", path, method="OPTIONS", token=None, extra=(f"origin: {origin}", *wants))


async def test_a_preflight_of_a_known_page_needs_no_key(served: Served) -> None:
    reply = await request_once(served.port, preflight(PAGE))
    assert reply.status == 204
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-lang"
    assert "access-control-allow-credentials" not in reply.headers


async def test_a_preflight_that_names_no_headers_is_allowed_none(served: Served) -> None:
    extra = (f"origin: {PAGE}", "access-control-request-method: POST")
    reply = await request_once(served.port, request(b"", method="OPTIONS", token=None, extra=extra))
    assert (reply.status, reply.headers["access-control-allow-origin"]) == (204, PAGE)
    assert "access-control-allow-headers" not in reply.headers


async def test_responses_and_errors_have_the_header(served: Served) -> None:
    for data in (
        request(extra=(f"origin: {PAGE}",)),
        request(token=None, extra=(f"origin: {PAGE}",)),
        request(b"", "/v1/models", method="GET", extra=(f"origin: {PAGE}",)),
    ):
        reply = await request_once(served.port, data)
        assert (reply.headers["access-control-allow-origin"], reply.headers["vary"]) == (PAGE, "Origin")
        assert reply.headers["access-control-expose-headers"] == "*"


async def test_a_response_that_could_be_cached_varies_by_the_origin(served: Served) -> None:
    reply = await request_once(served.port, request(b"", "/v1/models", method="GET"))
    assert reply.headers["vary"] == "Origin" and "access-control-allow-origin" not in reply.headers


async def test_a_page_may_read_all_response_headers() -> None:
    """Its limits, the fallback model, and whether to retry, which OpenAI's SDK reads in browsers, too."""
    reserved = len(orjson.dumps(chat())) // BYTES_PER_TOKEN + DEFAULT_COMPLETION
    limits = Limits(requests_per_minute=600, tokens_per_minute=100_000, tokens_per_day=reserved)
    keys = [key(allowances=(Allowance("key team-a", limits),))]
    message = request(chat(), "/v1/messages", extra=(f"origin: {PAGE}",))
    async with scripted(respond) as server:
        with refusing() as port:
            models = [model(port, fallbacks=("other",)), model(server.port, identity="other")]
            async with serving(models, keys, cors_origins=(PAGE,)) as one:
                replies = [await request_once(one.port, message) for _ in range(2)]
    assert [reply.status for reply in replies] == [200, 429]
    expected = {name for reply in replies for name in reply.headers if name.startswith("x-") or name in ("request-id", "retry-after")}
    assert {
        *("x-vllm-gateway-fallback", "x-should-retry", "retry-after", "request-id"),
        *("x-ratelimit-remaining-tokens", "x-ratelimit-remaining-tokens-day"),
    } <= expected
    for reply in replies:
        assert reply.headers["access-control-expose-headers"] == "*", "which names all headers, since credentials are never allowed"


async def test_another_page_gets_nothing(served: Served) -> None:
    assert (await request_once(served.port, preflight("https://evil.example"))).status == 405
    reply = await request_once(served.port, request(extra=("origin: https://evil.example",)))
    assert "access-control-allow-origin" not in reply.headers


async def test_it_is_off_by_default() -> None:
    async with scripted(respond) as server, serving([model(server.port)]) as one:
        assert (await request_once(one.port, preflight(PAGE))).status == 405
        assert not any(
            name.startswith("access-control") for name in (await request_once(one.port, request(extra=(f"origin: {PAGE}",)))).headers
        )


async def test_a_star_allows_every_page() -> None:
    async with scripted(respond) as server, serving([model(server.port)], cors_origins=("*",)) as one:
        assert (await request_once(one.port, request(extra=("origin: null",)))).headers["access-control-allow-origin"] == "*"
