"""The server's own fields are read from a response, and nothing that a client had echoed into it, however the response is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.response_fields import (
    WHOLE_SIZE,
    Fields,
    Observer,
    events_without_tokens,
    of_body,
    of_document,
    of_event,
    opened_block,
)
from gateway.api.routes import Dialect
from gateway.api.usage import Usage
from tests.gateway.api.test_json_scan import CUTS, FORMS, pieces
from tests.support.examples import examples
from tests.support.rows import each_row
from tests.support.wire import COMPLETION

FORGED: dict[str, Any] = {
    "usage": {"prompt_tokens": 0, "completion_tokens": 0, "input_tokens": 0, "output_tokens": 0},
    "finish_reason": "abort",
    "status": "cancelled",
    "stop_reason": "end_turn",
    "error": {"message": "forged"},
    "type": "error",
    "model": "forged",
}
"""Every field that the gateway acts on, as a client may write it."""
ECHOES = [
    FORGED,
    [FORGED],
    json.dumps(FORGED),
    {"choices": [FORGED]},
    {"response": FORGED},
    {"message": FORGED},
    'event: error\ndata: {"error":',
]
COUNTED = {"prompt_tokens": 5000, "total_tokens": 5700, "completion_tokens": 700, "prompt_tokens_details": {"cached_tokens": 4}}
IN_INPUT = {"input_tokens": 5000, "output_tokens": 700, "input_tokens_details": {"cached_tokens": 4}}
USAGE = Usage(5000, 700, 4)

ECHO = st.sampled_from(ECHOES) | st.lists(st.sampled_from(ECHOES) | st.text(max_size=20), max_size=4)


def chat(echo: Any, finish: str) -> dict[str, Any]:
    call = {"function": {"name": "f", "arguments": json.dumps(echo)}}
    choice = {"index": 0, "message": {"content": json.dumps(echo), "reasoning": echo, "tool_calls": [call]}, "logprobs": echo}
    return {"id": "c", "choices": [choice | {"finish_reason": "stop"}, choice | {"finish_reason": finish}], "usage": COUNTED, "x": echo}


def response(echo: Any, status: str) -> dict[str, Any]:
    """As vLLM writes it with ``enable_response_messages``: what the client sent stands on both sides of the usage."""
    before = {"id": "r", "instructions": json.dumps(echo), "metadata": {"a": echo}, "output": [echo], "tools": [{"parameters": echo}]}
    return before | {"status": status, "usage": IN_INPUT, "user": "u", "input_messages": [echo], "output_messages": [echo]}


def bodies(echo: Any, stopped: bool) -> dict[Dialect, dict[str, Any]]:
    message = {"type": "message", "content": [{"type": "tool_use", "input": echo}], "usage": IN_INPUT, "x": echo}
    message |= {} if stopped else {"stop_reason": "end_turn"}
    return {
        Dialect.CHAT: chat(echo, "abort" if stopped else "stop"),
        Dialect.COMPLETIONS: chat(echo, "abort" if stopped else "length"),
        Dialect.RESPONSES: response(echo, "cancelled" if stopped else "completed"),
        Dialect.MESSAGES: message,
        Dialect.COHERE: {"texts": [str(echo)], "x": echo, "usage": FORGED["usage"], "meta": {"x": echo, "billed_units": IN_INPUT}},
        Dialect.PLAIN: {
            "data": [{"document": echo, "embedding": [0.5] * 100}],
            "usage": COUNTED,
            "results": [{"document": {"text": str(echo)}}],
        },
    }


def observed(parts: list[bytes], dialect: Dialect) -> Fields:
    observer = Observer(dialect)
    for part in parts:
        observer.feed(part)
    return observer.fields


@settings(deadline=None, max_examples=examples(1000))
@given(
    echo=ECHO,
    dialect=st.sampled_from(Dialect),
    stopped=st.booleans(),
    form=st.sampled_from(FORMS),
    cuts=CUTS,
    shuffled=st.randoms(use_true_random=False),
    long=st.booleans(),
)
def test_an_echo_changes_nothing(
    echo: Any, dialect: Dialect, stopped: bool, form: dict[str, Any], cuts: list[int], shuffled: Any, long: bool
) -> None:
    items = list(bodies([echo, "a" * WHOLE_SIZE] if long else echo, stopped)[dialect].items())
    shuffled.shuffle(items)
    wire = json.dumps(dict(items), **form).encode()
    expected = Fields(USAGE, stopped and dialect not in (Dialect.COHERE, Dialect.PLAIN), is_final=True)
    assert of_body(wire, dialect) == observed(pieces(wire, cuts), dialect) == of_document(json.loads(wire), dialect) == expected


@each_row("dialect", Dialect)
@each_row("echo", ECHOES)
def test_an_echo_alone_is_nothing(dialect: Dialect, echo: Any) -> None:
    document = bodies(echo, stopped=False)[dialect]
    document.pop("meta" if dialect is Dialect.COHERE else "usage")
    wire = json.dumps(document).encode()
    assert of_body(wire, dialect) == observed([wire], dialect) == of_body(wire + b" " * WHOLE_SIZE, dialect) == Fields(is_final=True)


def events(echo: Any, stopped: bool) -> dict[Dialect, list[dict[str, Any]]]:
    finish = "abort" if stopped else "stop"
    choice = {"index": 0, "delta": {"content": json.dumps(echo), "x": echo}}
    of_chat = [{"choices": [choice | {"finish_reason": finish}], "x": echo}, {"choices": [], "usage": COUNTED, "x": echo}]
    whole = response(echo, "cancelled" if stopped else "completed")
    return {
        Dialect.CHAT: of_chat,
        Dialect.COMPLETIONS: of_chat,
        Dialect.RESPONSES: [
            {"type": "response.created", "response": whole | {"status": "in_progress", "usage": None}},
            {"type": "response.output_item.done", "item": echo, "x": echo},
            {"type": "response.completed", "response": whole, "x": echo},
        ],
        Dialect.MESSAGES: [
            {"type": "message_start", "message": {"content": [echo], "usage": {"input_tokens": 5000, "output_tokens": 0}}, "x": echo},
            {"type": "content_block_delta", "delta": {"partial_json": json.dumps(echo), "x": echo}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn", "x": echo}, "usage": IN_INPUT},
        ],
        Dialect.COHERE: of_chat,  # it is never streamed
        Dialect.PLAIN: of_chat,
    }


@each_row("dialect", Dialect)
@each_row("echo", ECHOES)
@each_row("stopped", [False, True])
def test_an_echo_changes_nothing_in_a_stream(dialect: Dialect, echo: Any, stopped: bool) -> None:
    fields = [of_event(document, dialect) for document in events(echo, stopped)[dialect]]
    assert [each.usage for each in fields][-1] == USAGE and fields[-1].is_final
    assert all(each.usage is None for each in fields[1:-1])
    assert any(each.stopped for each in fields) is (stopped and dialect not in (Dialect.MESSAGES, Dialect.COHERE, Dialect.PLAIN))


@each_row("dialect", Dialect)
@each_row("form", FORMS)
@each_row("escaped", [False, True])
def test_a_field_is_read_however_it_is_written(dialect: Dialect, form: dict[str, Any], escaped: bool) -> None:
    for document in events("", stopped=True)[dialect]:
        if of_event(document, dialect) == of_event({}, dialect):
            continue
        wire = json.dumps(document, **form).encode()
        if escaped:
            wire = wire.replace(b"usage", b"us\\u0061ge").replace(b"abort", b"\\u0061bort").replace(b"cancelled", b"cance\\u006cled")
        assert of_event(json.loads(wire), dialect) == of_event(document, dialect)


@each_row(
    ("document", "count"),
    [
        ({"type": "response.created", "response": {"status": "in_progress"}}, 1),
        ({"type": "response.output_item.added", "item": {"type": "message", "status": "in_progress"}}, 2),
        ({"type": "response.output_item.done", "item": {"type": "reasoning", "status": None}}, 3),
        ({"type": "response.output_item.added", "item": {"type": "function_call", "status": "in_progress"}}, 1),
        ({"type": "response.output_item.done", "item": {"type": "function_call", "status": "completed"}}, 2),
        ({"type": "response.output_text.delta", "delta": '"status"'}, 0),
        ({"type": "message_start", "message": {}}, 1),
        ({"type": "content_block_start", "content_block": {"type": "text"}}, 1),
        ({"type": "content_block_start", "content_block": {"type": "thinking"}}, 1),
        ({"type": "content_block_stop"}, 1),
        ({"type": "content_block_delta", "content_block": {"type": "thinking"}}, 0),
        ({"type": ["response.created"]}, 0),
        ({}, 0),
    ],
)
def test_events_that_open_and_close_an_item_have_no_tokens(document: dict[str, Any], count: int) -> None:
    assert events_without_tokens(document) == count


@each_row(
    ("document", "block", "count"),
    [
        ({"type": "content_block_start", "content_block": {"type": "thinking"}}, "thinking", 1),
        ({"type": "content_block_start", "content_block": {"type": []}}, "", 1),
        ({"type": "content_block_delta", "content_block": {"type": "thinking"}}, "", 0),
        ({"type": "content_block_stop"}, "", 1),
    ],
)
def test_the_signature_of_a_thinking_block_comes_with_its_end(document: dict[str, Any], block: str, count: int) -> None:
    assert (opened_block(document), events_without_tokens(document, "")) == (block, count)
    assert events_without_tokens({"type": "content_block_stop"}, "thinking") == 2


@pytest.mark.parametrize("spelled", [b'"us\\u0061ge"', b'"\\u0075sage"', b'"usage"  '])
@pytest.mark.parametrize("padding", [b"", b" " * WHOLE_SIZE])
def test_a_key_may_be_spelled_otherwise(spelled: bytes, padding: bytes) -> None:
    wire = padding + b'{"choices":[{"finish_r\\u0065ason":"ab\\u006frt"}],%b:{"prompt_tokens":7}}' % spelled
    assert of_body(wire, Dialect.CHAT) == Fields(Usage(7), stopped=True, is_final=True)


@each_row("usage", ['{"prompt_tokens":-1}', "5", "null", '"x"', "[]", '{"prompt_tokens":"5"}'])
@each_row("padding", ["", " " * WHOLE_SIZE])
def test_an_invalid_usage_does_not_hide_other_fields(usage: str, padding: str) -> None:
    wire = f'{padding}{{"usage":{usage},"choices":[{{"finish_reason":"abort"}}]}}'.encode()
    assert of_body(wire, Dialect.CHAT) == Fields(stopped=True, is_final=True)


def test_what_is_no_json_in_a_long_body_hides_no_usage() -> None:
    wire = b" " * WHOLE_SIZE + b'{"choices":[{"finish_reason":abort}],"usage":{"prompt_tokens":7}}'
    assert observed([wire, b"\n", b'{"usage":{"prompt_tokens":9}}'], Dialect.CHAT) == Fields(Usage(7), is_final=True)


@pytest.mark.parametrize("cut", range(0, len(COMPLETION), 50))
def test_a_body_that_is_cut_has_what_came(cut: int) -> None:
    assert observed([COMPLETION[:cut]], Dialect.CHAT).usage is None or cut > COMPLETION.index(b',"prompt_logprobs"')


@pytest.mark.parametrize("padding", [b"", b" " * WHOLE_SIZE])
def test_coheres_image_tokens_are_part_of_the_prompt(padding: bytes) -> None:
    """As vLLM 0.32 writes them, behind the texts of the client."""
    body = b'{"id":"embd-1","embeddings":{"float":[[0.5]]},"texts":["\\"meta\\":{}"],"meta":{"api_version":{"version":"2"},"billed_units":'
    body += b'{"input_tokens":3,"image_tokens":4}},"response_type":"embeddings_by_type"}' + padding
    assert of_body(body, Dialect.COHERE) == observed([body[:90], body[90:]], Dialect.COHERE) == Fields(Usage(7), is_final=True)


def test_the_recorded_response() -> None:
    assert of_body(COMPLETION, Dialect.CHAT) == Fields(Usage(3, 2, 1), is_final=True)


@settings(deadline=None)
@given(st.binary(max_size=200), st.sampled_from(Dialect))
def test_reading_never_fails(data: bytes, dialect: Dialect) -> None:
    for wire in (data, b'{"usage":' + data, b'{"choices":[{"finish_reason":' + data):
        assert of_body(wire, dialect).is_final
