"""Every refusal has a row in the table of errors and the documented shape, and reaches no server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import orjson
import pytest

from gateway.api.errors import ERRORS
from gateway.api.routes import ROUTES
from tests.support.running import KEY, Served, key, model, serving, until
from tests.support.scripted import Conversation, Scripted, scripted
from tests.support.wire import COMPLETION, Reply, chat, client, request, request_once

EXPIRED = "sk-an-expired-key"
NARROW = "sk-a-narrow-key"


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Served, Scripted]]:
    async def script(talk: Conversation) -> None:
        await talk.respond(COMPLETION)

    keys = [key(), key("old", EXPIRED, expires=time.time() - 1), key("narrow", NARROW, models=("tiny",))]
    async with scripted(script) as server:
        models = [model(server.port, mounts=("/i-7f3a/3900",)), model(server.port, identity="secret", aliases=("hush",))]
        async with serving(models, keys, body_limit=100_000) as served:
            yield served, server


def deep(levels: int) -> bytes:
    return b'{"model":"tiny","messages":' + b"[" * levels + b"]" * levels + b"}"


CASES: dict[str, tuple[bytes, int, str, str | None]] = {
    "no key": (request(token=None), 401, "missing_api_key", None),
    "an empty bearer": (request(token=""), 401, "missing_api_key", None),
    "another scheme": (request(token=None, extra=("authorization: Basic abc",)), 401, "invalid_api_key", None),
    "a malformed key": (request(token="sk-\u00e9".encode().decode("latin-1")), 401, "invalid_api_key", None),
    "a long key": (request(token="k" * 600), 401, "invalid_api_key", None),
    "an unknown key": (request(token="sk-unknown"), 401, "invalid_api_key", None),
    "an injection": (request(token="' OR 1=1 --"), 401, "invalid_api_key", None),
    "an expired key": (request(token=EXPIRED), 401, "expired_api_key", None),
    "x-api-key where it is none": (request(token=None, extra=(f"x-api-key: {KEY}",)), 401, "invalid_api_key", None),
    "an unknown model": (request(chat(model="gpt-4")), 404, "model_not_found", "model"),
    "a model out of scope": (request(chat(model="secret"), token=NARROW), 404, "model_not_found", "model"),
    "its alias": (request(chat(model="hush"), token=NARROW), 404, "model_not_found", "model"),
    "extra_body out of scope": (request(chat(extra_body={"model": "secret"}), token=NARROW), 404, "model_not_found", "model"),
    "?model= decides nothing": (
        request(chat(model="secret"), "/v1/chat/completions?model=tiny", token=NARROW), 404, "model_not_found", "model"),
    "a duplicate model": (request(b'{"model":"tiny","\\u006dodel":"secret"}', token=NARROW), 404, "model_not_found", "model"),
    "no JSON": (request(b"hello"), 400, "invalid_json", None),
    "an empty body": (request(b""), 400, "invalid_json", None),
    "UTF-16": (request('{"model":"tiny"}'.encode("utf-16")), 400, "invalid_json", None),
    "a BOM": (request(b"\xef\xbb\xbf" + orjson.dumps(chat())), 400, "invalid_json", None),
    "NaN": (request(b'{"model":"tiny","temperature":NaN}'), 400, "invalid_json", None),
    "an infinite number": (request(b'{"model":"tiny","temperature":1e999}'), 400, "invalid_json", None),
    "a lone surrogate": (request(b'{"model":"tiny","user":"\\ud800"}'), 400, "invalid_json", None),
    "not an object": (request(b"[1]"), 400, "invalid_json", None),
    "65 levels": (request(deep(65)), 400, "invalid_json", None),
    "40,000 levels": (request(deep(40_000)), 400, "invalid_json", None),
    "no model": (request({"messages": []}), 400, "missing_required_parameter", "model"),
    "a model that is no text": (request(chat(model=5)), 400, "invalid_value", "model"),
    "an empty model": (request(chat(model="")), 400, "missing_required_parameter", "model"),
    "extra_body is no object": (request(chat(extra_body=[1])), 400, "invalid_value", "extra_body"),
    "stream is no boolean": (request(chat(stream="perhaps")), 400, "invalid_value", "stream"),
    "stream_options is no object": (request(chat(stream=True, stream_options=1)), 400, "invalid_value", "stream_options"),
    "include_usage is no boolean": (
        request(chat(stream=True, stream_options={"include_usage": 2})), 400, "invalid_value", "stream_options.include_usage"),
    "chat_template": (request(chat(chat_template="{{x}}")), 400, "invalid_value", "chat_template"),
    "chat_template in extra_body": (request(chat(extra_body={"chat_template": "x"})), 400, "invalid_value", "chat_template"),
    "chat_template nested": (
        request(chat(chat_template_kwargs={"chat_template": "x"})), 400, "invalid_value", "chat_template_kwargs.chat_template"),
    "both messages and prompt": (request(chat(prompt="x")), 400, "invalid_value", "prompt"),
    "neither messages nor prompt": (request({"model": "tiny"}), 400, "missing_required_parameter", "messages"),
    "functions beside tools": (request(chat(functions=[], tools=[])), 400, "invalid_value", "functions"),
    "kv_transfer_params": (request(chat(kv_transfer_params={"prompt_token_ids": [1]})), 400, "invalid_value", "kv_transfer_params"),
    "ec_transfer_params": (request(chat(ec_transfer_params={"a": 1})), 400, "invalid_value", "ec_transfer_params"),
    "vllm_xargs in extra_body": (request(chat(extra_body={"vllm_xargs": {"a": 1}})), 400, "invalid_value", "vllm_xargs"),
    "a former response": (
        request({"model": "tiny", "input": "x", "previous_response_id": "resp_1"}, "/v1/responses"),
        400, "invalid_value", "previous_response_id"),
    "two guided constraints": (request(chat(guided_regex="a", guided_choice=["a"])), 400, "invalid_value", "guided_choice"),
    "another media type": (request(extra=()).replace(b"application/json", b"text/plain"), 415, "unsupported_media_type", None),
    "an unknown encoding": (request(extra=("content-encoding: br",)), 415, "unsupported_media_type", None),
    "no gzip data": (request(extra=("content-encoding: gzip",)), 400, "invalid_request", None),
    "a body over the limit": (request(b"x" * 100_001), 413, "request_too_large", None),
    "a route outside the table": (request(path="/v1/load_lora_adapter"), 404, "not_found", None),
    "the root": (request(path="/", method="GET"), 404, "not_found", None),
    "vLLM's metrics": (request(path="/metrics", method="GET"), 404, "not_found", None),
    "a path with dots": (request(path="/v1/../v1/chat/completions"), 404, "not_found", None),
    "an encoded path": (request(path="/v1/chat%2Fcompletions"), 404, "not_found", None),
    "an encoded letter": (request(path="/v1/ch%61t/completions"), 404, "not_found", None),
    "a doubled slash": (request(path="//v1/chat/completions"), 404, "not_found", None),
    "two slashes at the end": (request(path="/v1/chat/completions//"), 404, "not_found", None),
    "a wrong method and a slash": (request(path="/v1/chat/completions/", method="GET"), 405, "method_not_allowed", None),
    "an unknown instance": (request(path="/i-0000/3900/v1/chat/completions"), 404, "not_found", None),
    "another model at an instance": (request(chat(model="secret"), "/i-7f3a/3900/v1/chat/completions"), 404, "model_not_found", "model"),
    "a wrong method": (request(method="GET"), 405, "method_not_allowed", None),
    "a wrong method on the list": (request(path="/v1/models"), 405, "method_not_allowed", None),
    "a wrong method on health": (request(path="/health"), 405, "method_not_allowed", None),
}  # fmt: skip


def check(reply: Reply, status: int, code: str, param: str | None) -> None:
    assert (reply.status, reply.error["code"], reply.error["param"]) == (status, code, param), reply.body
    assert set(reply.error) == {"message", "type", "param", "code"} and reply.error["message"]
    assert reply.error["type"] == ERRORS[code].type
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"].startswith("req_")
    assert reply.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


@pytest.mark.parametrize("name", CASES)
async def test_the_table(pair: tuple[Served, Scripted], name: str) -> None:
    served, server = pair
    data, status, code, param = CASES[name]
    check(await request_once(served.port, data), status, code, param)
    assert server.requests == []
    assert served.in_flight == 0


@pytest.mark.parametrize("path", [*ROUTES, "/i-7f3a/3900/v1/chat/completions"])
@pytest.mark.parametrize(("token", "code"), [(None, "missing_api_key"), ("sk-unknown", "invalid_api_key"), (EXPIRED, "expired_api_key")])
async def test_no_route_without_a_key(pair: tuple[Served, Scripted], path: str, token: str | None, code: str) -> None:
    served, server = pair
    reply = await request_once(served.port, request(path=path, token=token))
    assert reply.status == 401
    if "/messages" in path:
        assert orjson.loads(reply.body)["error"]["type"] == "authentication_error"
        assert orjson.loads(reply.body)["type"] == "error"
    else:
        check(reply, 401, code, None)
    assert server.requests == []


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/i-7f3a/3900/v1/models"])
async def test_no_list_without_a_key(pair: tuple[Served, Scripted], path: str) -> None:
    served, _ = pair
    check(await request_once(served.port, request(b"", path, method="GET", token=None)), 401, "missing_api_key", None)
    assert served.value("auth_failures_total", "missing") == 1


async def test_the_lists_show_what_the_key_may_use(pair: tuple[Served, Scripted]) -> None:
    served, _ = pair

    async def ids(path: str, token: str) -> list[str]:
        reply = await request_once(served.port, request(b"", path, method="GET", token=token))
        return [each["id"] for each in orjson.loads(reply.body)["data"]]

    assert await ids("/v1/models", KEY) == ["tiny", "secret", "hush"]
    assert await ids("/v1/models", NARROW) == ["tiny"]
    assert await ids("/i-7f3a/3900/v1/models", KEY) == ["tiny"]
    await until(lambda: served.total("requests_total") == 3)
    assert served.value("requests_total", "other", "/v1/models", "200") == 3  # on each of its paths
    hidden = await request_once(served.port, request(b"", "/v1/models/secret", method="GET", token=NARROW))
    unknown = await request_once(served.port, request(b"", "/v1/models/gpt-4", method="GET", token=NARROW))
    check(hidden, 404, "model_not_found", "model")
    assert hidden.body.replace(b"secret", b"gpt-4") == unknown.body
    by_alias = await request_once(served.port, request(b"", "/v1/models/hush", method="GET"))
    by_name = await request_once(served.port, request(b"", "/v1/models/secret", method="GET"))
    assert by_alias.body == by_name.body and orjson.loads(by_name.body)["aliases"] == ["hush"]


async def test_forbidden_fields_do_not_reach_the_server(pair: tuple[Served, Scripted]) -> None:
    served, server = pair
    fields = dict.fromkeys(("priority", "request_id", "session_id", "cache_salt"), 1)
    assert (await request_once(served.port, request(chat(**fields)))).status == 200
    assert (await request_once(served.port, request(chat(extra_body=fields)))).status == 200
    assert [sorted(seen.json) for seen in server.requests] == [["messages", "model"]] * 2


async def test_a_body_that_claims_too_much_is_refused_before_it_is_sent(pair: tuple[Served, Scripted]) -> None:
    served, server = pair
    async with client(served.port) as one:
        one.send(request(b"")[:-4].replace(b"content-length: 0", b"content-length: 99999999") + b"\r\nexpect: 100-continue\r\n\r\n")
        reply = await one.reply()
        check(reply, 413, "request_too_large", None)
        assert reply.headers["connection"] == "close"
    assert server.requests == []


@pytest.mark.parametrize(
    ("data", "status"),
    [
        pytest.param(b"GARBAGE\r\n\r\n", 400, id="garbage"),
        pytest.param(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", 400, id="CL and TE"
        ),
        pytest.param(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", 400, id="two CL"),
        pytest.param(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: xchunked\r\n\r\n", 400, id="xchunked"),
        pytest.param(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n b: c\r\n\r\n", 400, id="obs-fold"),
        pytest.param(b"POST / HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 70_000, 431, id="an endless header"),
        pytest.param(b"POST / HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 1000 + b"\r\n", 431, id="a thousand headers"),
        pytest.param(request(extra=("authorization: Bearer other",)), 400, id="two keys"),
    ],
)
async def test_bytes_that_are_no_request(pair: tuple[Served, Scripted], data: bytes, status: int) -> None:
    served, server = pair
    async with client(served.port) as one:
        one.send(data)
        reply = await one.reply()
        assert reply.status == status, reply.body
        assert reply.headers["connection"] == "close"
        assert reply.error["code"] == {400: "invalid_request", 431: "headers_too_large"}[status]
    assert server.requests == []


async def test_a_bad_chunk_in_a_body_is_refused(pair: tuple[Served, Scripted]) -> None:
    served, server = pair
    async with client(served.port) as one:
        head = request(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
        one.send(head + b"5\r\nhello\r\nzz\r\n")
        assert (await one.reply()).status == 400
        assert await one.closed()
    assert server.requests == []


async def test_an_anonymous_key_serves_clients_without_a_key() -> None:
    async def script(talk: Conversation) -> None:
        await talk.respond(COMPLETION)

    async with scripted(script) as server:
        models = [model(server.port), model(server.port, identity="secret")]
        keys = [key(), key("nobody", "unused", anonymous=True, models=("tiny",)), key("old", EXPIRED, expires=1.0)]
        async with serving(models, keys) as served:
            for token, status in ((None, 200), ("not-needed", 200), ("dummy", 200), ("sk-wrong", 401), (EXPIRED, 401), (KEY, 200)):
                assert (await request_once(served.port, request(token=token))).status == status, token
            assert (await request_once(served.port, request(chat(model="secret"), token=None))).status == 404
            assert served.value("tokens_total", "nobody", "tiny", "prompt") == 9


async def test_anthropics_clients_show_their_key_and_read_the_request_id_in_their_own_way(pair: tuple[Served, Scripted]) -> None:
    served, _ = pair
    own = (f"x-api-key: {KEY}",)
    listed = await request_once(served.port, request(b"", "/v1/models", method="GET", token=None, extra=own))
    assert [each["id"] for each in orjson.loads(listed.body)["data"]] == ["tiny", "secret", "hush"]
    response = await request_once(served.port, request(chat(max_tokens=5), "/v1/messages", token=None, extra=own))
    assert response.status == 200 and response.headers["request-id"] == response.headers["x-request-id"]
    refused = await request_once(served.port, request(chat(model="gpt-4"), "/v1/messages", token=None, extra=own))
    assert refused.headers["request-id"] == refused.headers["x-request-id"]
    assert orjson.loads(refused.body)["error"]["type"] == "not_found_error"
