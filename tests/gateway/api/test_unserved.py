"""A path that is not served: the error names it, says why or how to cure it, and the log has it."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.routes import REFUSED, ROUTES
from gateway.api.unserved import LONGEST, OTHER_APIS, shown, unserved
from gateway.telemetry.access_log import line
from tests.support.rows import each_row
from tests.support.running import KEY, model, serving, until
from tests.support.wire import request, request_once

WRONG_BASE_URLS = {
    "/v1/v1/chat/completions": "Remove one /v1 from the base URL: the route is /v1/chat/completions.",
    "/v1/v1/models": "Remove one /v1 from the base URL: the route is /v1/models.",
    "/i-7f3a/3900/v1/v1/responses": "Remove one /v1 from the base URL: the route is /v1/responses.",
    "/chat/completions": "Add /v1 to the base URL: the route is /v1/chat/completions.",
    "/models": "Add /v1 to the base URL: the route is /v1/models.",
    "/messages": "Add /v1 to the base URL: the route is /v1/messages.",
    "/v1/messages/v1/messages": "Remove /v1/messages from the base URL: the route is /v1/messages.",
    "/openai/v1/chat/completions": "Remove /openai from the base URL: the route is /v1/chat/completions.",
    "/api/v1/embeddings": "Remove /api from the base URL: the route is /v1/embeddings.",
    "/api/chat/completions": "The base URL must end in /v1: the route is /v1/chat/completions.",
    "/v1/chat/completions/chat/completions": "The base URL must end in /v1: the route is /v1/chat/completions.",
    "//v1/chat/completions": "Remove the slash at the end of the base URL: the route is /v1/chat/completions.",
    "/v1/tokenize": "Remove /v1 from the base URL: the route is /tokenize.",
    "/openai/deployments/gpt-4o/images": OTHER_APIS["/openai/deployments"],
    "/api/chat": OTHER_APIS["/api/chat"],
    "/v1/files/file-1/content": OTHER_APIS["/v1/files"],
    "/v1/audio/speech": OTHER_APIS["/v1/audio/speech"],
}


@each_row("path", WRONG_BASE_URLS)
def test_a_mistake_in_the_base_url_is_named(path: str) -> None:
    refusal = unserved("POST", path)
    assert refusal.code == "not_found"
    assert refusal.message == f"There is no route POST {path}. {WRONG_BASE_URLS[path]}"


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/completion", "/v1/chat", "/favicon.ico", "*", "/v1/filesystem", "/dash/metrics"])
def test_a_path_without_a_known_cure_is_only_named(path: str) -> None:
    assert unserved("GET", path).message == f"There is no route GET {path}."


@each_row("path", REFUSED)
def test_a_refused_route_of_vllm_says_why(path: str) -> None:
    method, reason = REFUSED[path]
    message = f"The route {method} {path} of vLLM is not served by this gateway: {reason}."
    requested = path.replace("{response_id}", "resp_1").replace("{adapter_name}", "one")
    assert unserved(method, requested).message == unserved(method, requested + "/").message == message
    if path.startswith("/v1/"):
        assert unserved(method, "/i-7f3a/3900" + requested).message == message


def test_no_route_is_served_and_refused() -> None:
    assert not REFUSED.keys() & ROUTES.keys()


@given(st.text(st.characters(max_codepoint=255)))
def test_what_is_quoted_is_bounded_and_visible(text: str) -> None:
    quoted = shown(text)
    assert len(quoted) <= LONGEST
    assert quoted.isascii() and (quoted.isprintable() and " " not in quoted)
    assert len(unserved(text, "/" + text).message) < 3 * LONGEST


PATHS = {
    "/v1/v1/chat/completions?api_key=secret": "/v1/v1/chat/completions",
    "/%0d%0a%C3": "/%0d%0a%C3",
    "/a/" + "x" * 5000: "/a/...",
    "/" + "x/" * 5000: "/" + "x/" * 98 + "...",
    f"/{KEY}/v1": "/.../v1",
}


@pytest.mark.parametrize("path", PATHS)
async def test_the_log_has_the_path_and_no_label_has(path: str) -> None:
    async with serving([model(1)]) as served:
        reply = await request_once(served.port, request(path=path))
        assert (reply.status, reply.error["code"]) == (404, "not_found")
        assert f"POST {PATHS[path]}" in str(reply.error["message"])
        await until(lambda: served.total("requests_total") == 1)
        assert served.value("requests_total", "other", "other", "404") == 1
        written = orjson.loads(line(served.context.records[0]))
        assert (written["endpoint"], written["method"], written["path"]) == ("other", "POST", PATHS[path])
        assert b"secret" not in line(served.context.records[0])


async def test_a_served_route_has_no_path_in_the_log() -> None:
    async with serving([model(1)]) as served:
        await request_once(served.port, request(token=None))
        await request_once(served.port, request(b"", "/health", method="GET"))
        await until(lambda: len(served.context.records) == 2)
        assert all("path" not in orjson.loads(line(record)) for record in served.context.records)


async def test_the_words_do_not_depend_on_the_configuration() -> None:
    """A client without a key cannot find out which instance URLs there are."""
    async with serving([model(1, mounts=("/i-1/1",))]) as served:
        for path in ("/v1/realtime", "/chat/completions", "/v1/v1/models", "/else"):
            here, there = [await request_once(served.port, request(path=mount + path, token=None)) for mount in ("/i-1/1", "/i-2/1")]
            assert here.body.replace(b"/i-1/1", b"") == there.body.replace(b"/i-2/1", b"")


async def test_a_websocket_is_refused_by_its_route() -> None:
    upgrade = ("connection: Upgrade", "upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==")
    async with serving([model(1)]) as served:
        reply = await request_once(served.port, request(b"", "/v1/realtime?model=tiny", method="GET", extra=upgrade))
        assert (reply.status, reply.error["code"]) == (404, "not_found")
        assert "WebSockets are not served" in str(reply.error["message"])
