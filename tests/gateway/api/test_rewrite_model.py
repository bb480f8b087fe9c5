"""The model's name in an answer, and not a byte beside it."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.rewrite_model import ModelRenamer, renamed
from tests.support.rows import each_row
from tests.support.running import model, serving
from tests.support.scripted import Conversation, scripted
from tests.support.wire import chat, request, request_once

HERE = b"HERE"
CASES = [
    b'{"id":"x","object":"o","created":5,"model":"HERE","a":{"model":"deep"}}',
    b'data: {"id":"x","model":"HERE","choices":[]}\n\n',
    b'{"s":"\\"model\\":\\"x\\"","model" : "HERE"}',
    b'event: e\ndata: {"response":{"metadata":{"model":"no"},"model":"HERE"},"type":"x"}\n\n',
    b'{"type":"message_start","message":{"content":[{"model":"no"}],"model":"HERE"}}',
    b'{"choices":[{"message":{"model":"no"}}],"model":"HERE"}',
    b'{"a":"model","b":"model"}',
    b'{"model":null,"x":["model","x"]}',
    b'[{"model":"x"}]',
    b'no JSON "model": at all',
    b"",
]
"""Documents in which HERE marks the position of the model name."""
OLD = b'o\\"l\\\\d\\\\'
"""A name with a quote and backslashes."""


@each_row("document", CASES)
@each_row("old", [b"old", OLD])
def test_the_documents_own_name_alone(document: bytes, old: bytes) -> None:
    assert renamed(document.replace(HERE, old), "NEW") == document.replace(HERE, b"NEW")


@each_row("document", CASES)
def test_however_it_is_cut(document: bytes) -> None:
    before = document.replace(HERE, OLD)
    for first in range(len(before) + 1):
        for second in (first, (first + len(before)) // 2):
            renamer = ModelRenamer("NEW")
            assert b"".join(map(renamer.feed, (before[:first], before[first:second], before[second:]))) == document.replace(HERE, b"NEW")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5) | st.sampled_from(["model", '"model":"', "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["model", "a", "message", "\\", '"']), inner, max_size=4),
    max_leaves=20,
)


@given(
    rest=st.dictionaries(st.sampled_from(["a", "b", "choices", '"model"', "\\"]), JSON, max_size=4),
    at=st.integers(0, 4),
    cut=st.integers(0, 200),
)
def test_any_document(rest: dict[str, Any], at: int, cut: int) -> None:
    items = list(rest.items())
    before, after = dict(items[:at]), dict(items[at:])
    wire, wanted = (orjson.dumps({**before, "model": name, **after}) for name in ("old", "a \u00fc\"'\\ name"))
    renamer = ModelRenamer("a \u00fc\"'\\ name")
    assert renamer.feed(wire[:cut]) + renamer.feed(wire[cut:]) == wanted == renamed(wire, "a \u00fc\"'\\ name")


TEXT = b'{"id":"c","object":"text_completion","created":1,"model":"inside","choices":[{"index":0,"text":"a","finish_reason":"stop"}]}'
BODY = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"inside","choices":[{"message":{"content":"\\"model\\":\\"inside\\""}}],'
    b'"usage":{"prompt_tokens":3,"total_tokens":5}}'
)
_HEAD = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"inside","choices":['
CHUNK = _HEAD + b'{"index":0,"delta":{"content":"model"},"finish_reason":null}]}\n\n'
COUNT = _HEAD + b'],"usage":{"prompt_tokens":3,"total_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n"


def outside(data: bytes) -> bytes:
    return data.replace(b'"model":"inside"', b'"model":"tiny"')


async def responses(talk: Conversation) -> None:
    assert talk.request.json["model"] == "inside"
    if talk.request.json.get("stream"):
        await talk.begin_stream()
        for event in (CHUNK, CHUNK + CHUNK, COUNT, DONE):
            await talk.chunk(event)
        await talk.end_stream()
    elif talk.request.json.get("seed"):
        await talk.trickle(BODY)
    else:
        await talk.respond(BODY)


async def test_responses_have_the_model_id_and_no_other_change() -> None:
    async with scripted(responses) as server, serving([model(server.port, served="inside", rewrite=True)]) as served:
        whole = await request_once(served.port, request())
        assert (whole.status, whole.body) == (200, outside(BODY))
        pieces = await request_once(served.port, request(chat(seed=1)))
        assert (pieces.status, pieces.body, pieces.whole) == (200, outside(BODY), True)
        stream = await request_once(served.port, request(chat(stream=True)))
        assert stream.body == outside(CHUNK * 3) + DONE
        assert served.value("tokens_total", "team-a", "tiny", "prompt") == 9


async def test_a_translated_response_has_the_model_id_too() -> None:
    async def script(talk: Conversation) -> None:
        if talk.request.json.get("stream"):
            await talk.begin_stream()
            await talk.chunk(b"data: " + TEXT + b"\n\n" + DONE)
            await talk.end_stream()
        else:
            await talk.respond(TEXT)

    async with scripted(script) as server, serving([model(server.port, served="inside", rewrite=True)]) as served:
        for stream in (False, True):
            reply = await request_once(served.port, request({"model": "tiny", "prompt": "a", "stream": stream}))
            assert reply.status == 200 and b'"model":"tiny"' in reply.body and b"inside" not in reply.body


async def test_without_the_setting_nothing_is_touched() -> None:
    async with scripted(responses) as server, serving([model(server.port, served="inside")]) as served:
        assert (await request_once(served.port, request())).body == BODY
        assert (await request_once(served.port, request(chat(stream=True)))).body == CHUNK * 3 + DONE


@pytest.mark.parametrize("pieces", [False, True])
async def test_a_text_is_no_document(pieces: bool) -> None:
    """A transcribed text that looks like JSON."""
    text = b'"model": "inside", and {"model":"inside"} again'

    async def script(talk: Conversation) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n\r\n" % len(text)
        await talk.write(head + text[:15] if pieces else head + text)
        if pieces:
            await asyncio.sleep(0.01)
            await talk.write(text[15:])

    async with scripted(script) as server, serving([model(server.port, served="inside", rewrite=True)]) as served:
        reply = await request_once(served.port, request())
        assert (reply.status, reply.body, reply.headers["content-length"]) == (200, text, str(len(text)))
