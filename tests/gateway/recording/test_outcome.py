"""The content of a response is the same from JSON and from events, in each dialect, and anything that a server may send is read."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.routes import ROUTES
from gateway.recording.outcome import ToolCall, content_of
from tests.support.wire import COMPLETION, EVENTS

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CALL = ToolCall("find", '{"q":1}')
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["choices", "message", "delta", "content", "text", "tool_calls", "function", "name", "arguments", "index", "usage", "error", "type",
         "output", "response", "content_block", "prompt_tokens", "completion_tokens"]), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


def events(*documents: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + orjson.dumps(document) + b"\n\n" for document in documents) + b"data: [DONE]\n\n"


def test_a_chat() -> None:
    whole = content_of(CHAT, COMPLETION, is_stream=False)
    assert whole.text.startswith("say ")
    assert whole.usage is not None
    assert (whole.usage.prompt, whole.usage.completion, whole.error) == (3, 2, None)
    stream = content_of(CHAT, b"".join(EVENTS), is_stream=True)
    assert stream.text.startswith("你好")
    assert stream.usage == whole.usage


def test_tool_calls_of_a_chat() -> None:
    call = {"function": {"name": "find", "arguments": '{"q":1}'}}
    whole = orjson.dumps({"choices": [{"message": {"content": None, "tool_calls": [call, call]}}]})
    parts = [("find", ""), (None, '{"q"'), (None, ":1}")]
    deltas = [{"index": n, "function": {"name": name, "arguments": text}} for n in (0, 1) for name, text in parts]
    streamed = events(*({"choices": [{"index": 0, "delta": {"tool_calls": [delta]}}]} for delta in deltas))
    assert content_of(CHAT, whole, is_stream=False).tool_calls == (CALL, CALL)
    assert content_of(CHAT, streamed, is_stream=True).tool_calls == (CALL, CALL)


def test_messages() -> None:
    blocks = [{"type": "text", "text": "One day"}, {"type": "tool_use", "name": "find", "input": {"q": 1}}]
    whole = content_of(MESSAGES, orjson.dumps({"content": blocks, "usage": {"input_tokens": 3, "output_tokens": 2}}), is_stream=False)
    streamed = events(
        {"type": "message_start", "message": {"usage": {"input_tokens": 3, "output_tokens": 0}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "One"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": " day"}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "name": "find", "input": {}}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"q":1}'}},
        {"type": "message_delta", "usage": {"output_tokens": 2}},
    )
    stream = content_of(MESSAGES, streamed, is_stream=True)
    for content in (whole, stream):
        assert (content.text, content.tool_calls) == ("One day", (CALL,))
        assert content.usage is not None
        assert (content.usage.prompt, content.usage.completion) == (3, 2)


def test_responses() -> None:
    response = {
        "output": [
            {"type": "message", "content": [{"type": "output_text", "text": "Hello"}]},
            {"type": "function_call", "name": "find", "arguments": '{"q":1}'},
        ],
        "usage": {"input_tokens": 3, "output_tokens": 2},
    }
    delta = {"type": "response.output_text.delta", "delta": "Hello"}
    whole = content_of(RESPONSES, orjson.dumps(response), is_stream=False)
    stream = content_of(RESPONSES, events(delta, {"type": "response.completed", "response": response}), is_stream=True)
    assert (whole.text, whole.tool_calls, whole.usage) == (stream.text, stream.tool_calls, stream.usage) == ("Hello", (CALL,), whole.usage)
    assert whole.usage is not None


@pytest.mark.parametrize("error", [{"message": "no"}, "no"])
def test_an_error(error: object) -> None:
    assert content_of(CHAT, orjson.dumps({"error": error}), is_stream=False).error == "no"
    assert content_of(CHAT, events({"error": error}), is_stream=True).error == "no"


@given(st.sampled_from(sorted(ROUTES)), st.lists(JSON, max_size=4))
def test_any_json_is_read(path: str, documents: list[Any]) -> None:
    streamed = b"".join(b"data: " + orjson.dumps(document) + b"\n\n" for document in documents)
    content_of(path, streamed, is_stream=True)
    for document in documents:
        content = content_of(path, orjson.dumps(document), is_stream=False)
        assert isinstance(content.text, str)
        assert all(isinstance(call, ToolCall) for call in content.tool_calls)


@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_are_read(body: bytes, is_stream: bool) -> None:
    assert content_of(CHAT, body, is_stream=is_stream).tool_calls == ()
