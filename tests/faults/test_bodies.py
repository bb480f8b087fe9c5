"""Invalid bodies, ambiguous bodies, and forbidden fields."""

from __future__ import annotations

import asyncio
import gzip
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.api.routes import ROUTES, Body
from gateway.auth.body_policy import FORBIDDEN, MAXIMA, REFUSED, STRIPPED
from gateway.snapshot.snapshot import BodyRules
from tests.faults.conftest import FULL
from tests.faults.invariants import longest_iteration, unharmed
from tests.gateway.proxy.test_form import BOUNDARY, FILE, MODEL, form
from tests.support.examples import examples
from tests.support.running import Served, key, model
from tests.support.scripted import Conversation, Scripted, scripted
from tests.support.wire import COMPLETION, chat, client, request, request_once

DEEP = 100_000
TRIES = 20
STALL = 0.010
"""Seconds for which the body of one request may delay all other requests."""


async def _respond(talk: Conversation) -> None:
    await talk.respond(COMPLETION)


@asynccontextmanager
async def _served(*models: Any, **more: Any) -> AsyncIterator[tuple[Served, Scripted]]:
    async with scripted(_respond) as server, unharmed([make(server.port) for make in models or (model,)], **more) as served:
        yield served, server


GOOD = orjson.dumps(chat())
BODIES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "gzip, cut": (gzip.compress(GOOD)[:-9], ("content-encoding: gzip",)),
    "gzip of something else": (gzip.compress(b"x"), ("content-encoding: gzip",)),
    "a gzip bomb": (gzip.compress(bytes(50_000_000)), ("content-encoding: gzip",)),
    "brotli": (GOOD, ("content-encoding: br",)),
    "gzip, said twice": (GOOD, ("content-encoding: gzip, identity",)),
    "gzip, not said": (gzip.compress(GOOD), ()),
    "UTF-16": (GOOD.decode().encode("utf-16"), ()),
    "UTF-16 without a mark": (GOOD.decode().encode("utf-16-le"), ()),
    "UTF-32": (GOOD.decode().encode("utf-32"), ()),
    "a byte order mark": (b"\xef\xbb\xbf" + GOOD, ()),
    "Latin-1": (GOOD.replace(b"Hello", b"H\xe9llo"), ()),
    "overlong UTF-8": (GOOD.replace(b"Hello", b"\xc0\xaf"), ()),
    "a lone surrogate": (GOOD.replace(b"Hello", b"\\ud800"), ()),
    "NaN": (b'{"a": NaN, ' + GOOD[1:], ()),
    "Infinity": (b'{"a": -Infinity, ' + GOOD[1:], ()),
    "1e999": (b'{"a": 1e999, ' + GOOD[1:], ()),
    "a huge integer": (b'{"seed": ' + b"9" * 5000 + b", " + GOOD[1:], ()),
    "an integer of 65 bits": (b'{"user": %d, ' % 2**64 + GOOD[1:], ()),
    "deep lists": (b'{"a": ' + b"[" * DEEP + b"]" * DEEP + b", " + GOOD[1:], ()),
    "deep objects": (b'{"a": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b", " + GOOD[1:], ()),
    "deep and never closed": (b"[" * DEEP, ()),
    "many lists": (b'{"a": [' + b"[]," * 300_000 + b"[]], " + GOOD[1:], ()),
    "a list": (b"[" + GOOD + b"]", ()),
    "two documents": (GOOD + GOOD, ()),
    "nothing": (b"", ()),
    "comments": (b"/* x */" + GOOD, ()),
}


@pytest.mark.row(14)
async def test_invalid_json_bodies(measured: Callable[[str], None]) -> None:
    async with _served() as (served, server):
        for name, (body, extra) in BODIES.items():
            reply = await request_once(served.port, request(body, extra=extra))
            assert 400 <= reply.status < 500, name
            codes = ("invalid_json", "invalid_value", "unsupported_media_type", "invalid_request", "request_too_large")
            assert reply.error["code"] in codes, name
        assert server.requests == []
    measured(f"{len(BODIES)} kinds of bodies: 4xx, no request reached a server")


@pytest.mark.row(14)
async def test_no_body_delays_the_others(measured: Callable[[str], None]) -> None:
    """The shortest of several tries counts, since a busy machine can only make them longer."""
    async with _served() as (served, _):
        least = dict.fromkeys(BODIES, 1.0)
        for name, (body, extra) in BODIES.items():
            for _ in range(TRIES):
                least[name] = min(least[name], await _stall(served, request(body, extra=extra)))
                if least[name] < STALL:
                    break
        assert {name: stall for name, stall in least.items() if stall > STALL} == {}
    measured(f"longest delay {max(least.values()) * 1000:.1f} ms ({max(least, key=lambda name: least[name])})")


async def _stall(served: Served, data: bytes) -> float:
    stop = asyncio.Event()
    watch = asyncio.create_task(longest_iteration(stop))
    await request_once(served.port, data)
    stop.set()
    return await watch


# The authorized request is the dispatched request

_NAMES = st.sampled_from(
    ["tiny", "secret", "TINY", "tiny ", "tiny\u200b", "tіny", "ｔiny", "small", "hush", "tiny\x00", "secret/../tiny", ""]
)
_VALUES = _NAMES | st.sampled_from([None, 5, ["tiny"], {"a": 1}, True])
_FIELD = st.tuples(st.sampled_from([b'"model"', b'"\\u006dodel"', b'"mod\\u0065l"', b'"Model"', b'"model "']), _VALUES)
_BODY = st.builds(
    lambda fields, extra: (fields, extra),
    st.lists(_FIELD, max_size=4),
    st.none() | st.dictionaries(st.just("model"), _VALUES, max_size=1),
)


def _written(fields: list[tuple[bytes, Any]], extra: Any) -> bytes:
    parts = [name + b":" + orjson.dumps(value) for name, value in fields]
    if extra is not None:
        parts.insert(len(parts) // 2, b'"extra_body":' + orjson.dumps(extra))
    return b"{" + b",".join([*parts, b'"messages":[]']) + b"}"


@pytest.mark.row(15)
async def test_the_authorized_request_is_the_dispatched_one(measured: Callable[[str], None]) -> None:
    """One server serves both models under different names. The name in a request shows the model that the gateway chose."""
    made = (
        lambda port: model(port, identity="tiny", served="inner-tiny", aliases=("small",)),
        lambda port: model(port, identity="secret", served="inner-secret", aliases=("hush",)),
    )
    tried = 0
    async with _served(*made, keys=[key(models=("tiny",))]) as (served, server), client(served.port) as one:
        loop = asyncio.get_running_loop()

        async def check(body: bytes, query: str) -> None:
            before = len(server.requests)
            reply = await one.request(request(body, f"/v1/chat/completions{query}"))
            arrived = server.requests[before:]
            assert (reply.status == 200) == bool(arrived)
            for each in arrived:
                assert each.json["model"] == "inner-tiny" and each.body.count(b'"model":') == 1
                assert each.head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
            last = [orjson.loads(body).get("model"), (orjson.loads(body).get("extra_body") or {}).get("model")]
            if arrived:
                assert (last[1] if "model" in (orjson.loads(body).get("extra_body") or {}) else last[0]) in ("tiny", "small", "", None)

        cases: list[tuple[bytes, str]] = []

        @settings(
            deadline=None,
            max_examples=2000 if FULL else examples(200),
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=True,
        )
        @given(_BODY, st.sampled_from(["", "?model=secret", "?model=tiny", "?model=tiny&model=secret", "?", "?%6dodel=secret"]))
        def gather(body: tuple[list[tuple[bytes, Any]], Any], query: str) -> None:
            cases.append((_written(*body), query))

        await loop.run_in_executor(None, gather)
        for body, query in cases:
            await check(body, query)
        tried = len(cases)
    measured(f"{tried} bodies: dispatched = authorized in each")


# Forbidden fields

_POSITIONS: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "top-level": lambda name, value: {name: value},
    "in extra_body": lambda name, value: {"extra_body": {name: value}},
    "in both": lambda name, value: {name: value, "extra_body": {name: value}},
    "over a harmless one": lambda name, value: {name: None, "extra_body": {name: value}},
    "nested": lambda name, value: {"chat_template_kwargs": {name: value}},
    "nested in extra_body": lambda name, value: {"extra_body": {"chat_template_kwargs": {name: value}}},
    "an extra_body inside an extra_body": lambda name, value: {"extra_body": {"extra_body": {name: value}}},
}
_CANARY = "canary-5f1c"


@pytest.mark.row(16)
async def test_no_forbidden_field_reaches_a_server(measured: Callable[[str], None]) -> None:
    tried = 0
    async with _served() as (served, server), client(served.port) as one:
        for route in [route for route in ROUTES.values() if route.body is Body.JSON]:
            for position, put in _POSITIONS.items():
                for name in sorted(FORBIDDEN):
                    before = len(server.requests)
                    text: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "input": "x", "max_tokens": 1}
                    reply = await one.request(request(text | put(name, {"x": _CANARY}), route.path))
                    assert reply.status in (200, 400), (route.path, position, name)
                    for each in server.requests[before:]:
                        assert _CANARY.encode() not in each.body + each.head, (route.path, position, name)
                        assert name not in each.json and name not in each.json.get("chat_template_kwargs", {})  # type: ignore[operator]
                    error = orjson.loads(reply.body) if reply.status == 400 else None
                    if error is not None and not route.anthropic:
                        assert str(error["error"]["param"]).removeprefix("chat_template_kwargs.") == name
                    assert (reply.status == 400) == (("nested" in position) or (name in REFUSED and "inside" not in position)), (
                        position,
                        name,
                    )
                    tried += 1
    measured(f"{tried} requests with one of {len(STRIPPED)} stripped and {len(REFUSED)} refused fields: absent upstream or 400")


@pytest.mark.row(16)
async def test_numbers_above_the_maximum_are_refused_at_every_position() -> None:
    async with _served() as (served, server), client(served.port) as one:
        for name, most in MAXIMA.items():
            for put in ("top-level", "in extra_body", "over a harmless one"):
                reply = await one.request(request(chat(**_POSITIONS[put](name, most + 1))))
                assert (reply.status, reply.error["param"]) == (400, name)
        assert server.requests == []


# Forms are refused rather than stripped

_SPELLED: dict[str, str] = {
    "quoted": '; name="{name}"',
    "unquoted": "; name={name}",
    "a file": '; name="{name}"; filename="a"',
    "in capitals": '; NAME="{name}"',
}
"""The spellings of the name of a part."""
_FORMS = [route.path for route in ROUTES.values() if route.body is Body.FORM]
_ORDERS: dict[str, Callable[[bytes], tuple[bytes, ...]]] = {
    "before the model": lambda named: (named, MODEL, FILE),
    "behind the model": lambda named: (MODEL, named, FILE),
    "at the end": lambda named: (MODEL, FILE, named),
    "twice": lambda named: (named, MODEL, FILE, named),
}
_CUTS = (0, 11)
"""Chunk sizes of the form in bytes; 0: sent with a content length."""


@pytest.mark.row(16)
async def test_no_forbidden_field_of_a_form_reaches_a_server(measured: Callable[[str], None]) -> None:
    """A server may have received the start of a refused form, but never the complete form."""
    tried = 0
    async with _served() as (served, server):
        for path, order, name in itertools.product(_FORMS, _ORDERS, sorted(FORBIDDEN)):
            for spelling, cut in itertools.product(_SPELLED, _CUTS):
                named = _spelled(_SPELLED[spelling].format(name=name))
                reply = await request_once(served.port, form(*_ORDERS[order](named), path=path, chunks=cut))
                assert (reply.status, reply.error["param"]) == (400, name), (path, order, name, spelling, cut)
                tried += 1
        assert server.requests == []
        for path, cut in itertools.product(_FORMS, _CUTS):
            reply = await request_once(served.port, form(MODEL, _spelled('; name="prompt"'), FILE, path=path, chunks=cut))
            assert reply.status == 200, "a field that anybody may send"
        assert len(server.requests) == len(_FORMS) * len(_CUTS)
    measured(
        f"{tried} forms with one of these fields, at {len(_ORDERS)} positions, written in {len(_SPELLED)} ways: "
        "400, no complete form upstream"
    )


def _spelled(parameters: str) -> bytes:
    return b"--%b\r\nContent-Disposition: form-data%b\r\n\r\n%b\r\n" % (BOUNDARY.encode(), parameters.encode(), _CANARY.encode())


# URLs that a server would fetch

_INTERNAL_URL = "http://169.254.169.254/latest"
_SHAPES: dict[str, Callable[[str], dict[str, Any]]] = {
    "image_url": lambda url: {"type": "image_url", "image_url": {"url": url}},
    "image_url, a text": lambda url: {"type": "image_url", "image_url": url},
    "image_url, no type": lambda url: {"image_url": {"url": url}},
    "image_url, another type": lambda url: {"type": "text", "text": "x", "image_url": {"url": url}},
    "video_url": lambda url: {"type": "video_url", "video_url": {"url": url}},
    "video_url, a text": lambda url: {"type": "video_url", "video_url": url},
    "audio_url": lambda url: {"type": "audio_url", "audio_url": {"url": url}},
    "audio_url, a text": lambda url: {"type": "audio_url", "audio_url": url},
    "input_audio": lambda url: {"type": "input_audio", "input_audio": {"url": url}},
    "input_video": lambda url: {"type": "input_video", "input_video": {"url": url}},
    "Anthropic's image": lambda url: {"type": "image", "source": {"type": "url", "url": url}},
    "Anthropic's document": lambda url: {"type": "document", "source": {"type": "url", "url": url}},
    "Responses' image": lambda url: {"type": "input_image", "image_url": url, "detail": "auto"},
    "Responses' file": lambda url: {"type": "input_file", "file_url": url},
    "Responses' screenshot": lambda url: {"type": "computer_screenshot", "image_url": url},
}
"""Message parts that contain a URL."""
_POSITIONS_OF_PARTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "a message": lambda part: {"messages": [_message(part)]},
    "a later message": lambda part: {"messages": [{"role": "user", "content": "x"}] * 40 + [_message(part)]},
    "in extra_body": lambda part: {"messages": [], "extra_body": {"messages": [_message(part)]}},
    "a tool's message": lambda part: {"messages": [{"role": "tool", "tool_call_id": "1", "content": [part]}]},
    "Anthropic's tool result": lambda part: {
        "messages": [_message({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}, part]})]
    },
    "Responses' tool result": lambda part: {"input": [{"type": "function_call_output", "call_id": "1", "output": [part]}]},
    "Responses' computer": lambda part: {"input": [{"type": "computer_call_output", "call_id": "1", "output": part}]},
    "Responses' message": lambda part: {"input": [{"type": "message", **_message(part)}]},
    "an item itself": lambda part: {"input": [part]},
    "a batch": lambda part: {"input": [[_message(part)]]},
    "a query": lambda part: {"query": {"content": [part]}, "documents": ["x"]},
    "a document": lambda part: {"query": "x", "documents": [{"content": [part]}]},
    "a text to compare": lambda part: {"text_1": [part], "text_2": "x"},
    "a system prompt": lambda part: {"system": [part], "messages": []},
}


def _message(part: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "x"}, part]}


def _with_urls(url: str) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yield route, position, shape and body: every shape at every position, and each of both on every route."""
    paths = [route.path for route in ROUTES.values() if route.body is Body.JSON]
    first = "/v1/chat/completions", "a message", "image_url"
    for path, position, shape in itertools.product(paths, _POSITIONS_OF_PARTS, _SHAPES):
        if first[0] == path or first[1] == position or first[2] == shape:
            yield (
                path,
                position,
                shape,
                {"model": "tiny", "messages": [], "input": "x", **_POSITIONS_OF_PARTS[position](_SHAPES[shape](url))},
            )


@pytest.mark.row(16)
async def test_no_internal_url_reaches_a_server(measured: Callable[[str], None]) -> None:
    tried = 0
    async with _served() as (served, server), client(served.port) as one:
        for path, position, shape, body in _with_urls(_INTERNAL_URL):
            reply = await one.request(request(body, path))
            assert reply.status == 400 and b"The URL in '" in reply.body, (path, position, shape)
            tried += 1
        assert server.requests == []
    measured(
        f"{tried} requests with an internal URL, in {len(_SHAPES)} forms at {len(_POSITIONS_OF_PARTS)} positions: "
        "400, no request reached a server"
    )


@pytest.mark.row(16)
async def test_the_url_is_the_reason_for_the_refusal() -> None:
    """The same requests are accepted if the host is in ``media_hosts``."""
    allowing = BodyRules(media_hosts=("169.254.169.254",))
    async with _served(lambda port: model(port, body=allowing)) as (served, _), client(served.port) as one:
        for path, position, shape, body in _with_urls(_INTERNAL_URL):
            assert (await one.request(request(body, path))).status == 200, (path, position, shape)
