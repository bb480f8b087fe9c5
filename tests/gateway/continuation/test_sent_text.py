"""The record of a stream is the same by whole events and by the texts of the fast path, and small."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from gateway.api.routes import Dialect
from gateway.continuation.sent_text import LONGEST, SentText
from tests.gateway.continuation.streams import Event, Server, Token
from upstream.http.sse import data_of, split


def noted(events: Sequence[Event], dialect: Dialect, dice: random.Random) -> SentText:
    """Record a stream. Some events with only a text are recorded as the fast path records them."""
    record = SentText(dialect, lambda _: True)
    for data in (data_of(event) for one in events for event in split(one.data)):
        if not data.startswith(b"{"):
            continue
        document = orjson.loads(data)
        key = record.text_of(document)
        if key in record.texts and dice.random() < 0.7:
            record.note_text(key, raw_text(document, dialect))
        else:
            record.take(b"", document)
    assert record.is_usable
    return record


def raw_text(document: Any, dialect: Dialect) -> bytes:
    """Return the only text of an event as it is written in JSON."""
    if dialect is Dialect.RESPONSES:
        return orjson.dumps(document["delta"])[1:-1]
    holder = document["delta"] if dialect is Dialect.MESSAGES else document["choices"][0]
    holder = holder.get("delta", holder)
    if "tool_calls" in holder:
        holder = holder["tool_calls"][0]["function"]
    [text] = [value for name, value in holder.items() if name in ("content", "reasoning", "text", "arguments", "thinking", "partial_json")]
    return orjson.dumps(text)[1:-1]


def test_a_token_takes_at_most_eight_bytes() -> None:
    count = 2000
    pieces = ("the", " answer", ",", " is", "\n", ' "quoted"', " and", " so", ".", " it")
    tokens = [Token("content", pieces[at % len(pieces)]) for at in range(count)]
    record = noted(Server("A", [tokens], Dialect.CHAT).events(random.Random(1)), Dialect.CHAT, random.Random(1))
    parts = (record.texts, record.marks, record.counts, *record.texts.values())
    assert sum(map(sys.getsizeof, parts)) <= 8 * count


def test_a_record_without_memory_is_dropped() -> None:
    held: list[int] = []

    def hold(size: int) -> bool:
        held.append(size)
        return size < 100_000

    record = SentText(Dialect.COMPLETIONS, hold)
    document = {"id": "1", "choices": [{"index": 0, "text": "x" * 1000, "finish_reason": None}]}
    record.take(b"", document)
    while record.is_usable:
        record.note_text((0, "text"), b"x" * 1000)
    record.note_text((0, "text"), b"x")
    record.take(b"", document)
    assert held == sorted(held)
    assert held[-2] < 100_000 <= held[-1] <= LONGEST
    assert not record.texts


def test_a_long_record_is_dropped() -> None:
    record = SentText(Dialect.COMPLETIONS, lambda _: True)
    record.take(b"", {"id": "1", "choices": [{"index": 0, "text": "x" * (LONGEST + 1), "finish_reason": None}]})
    assert not record.is_usable


@pytest.mark.parametrize(
    ("dialect", "document"),
    [
        (Dialect.CHAT, {"choices": [{"index": 0, "delta": {"refusal": "no"}, "finish_reason": None}]}),
        (Dialect.CHAT, {"choices": [{"index": 0, "delta": {"tool_calls": [{}]}, "finish_reason": None}]}),
        (Dialect.CHAT, {"data": 1}),
        (Dialect.COMPLETIONS, {"choices": [{"index": 0, "text": "a", "prompt_logprobs": [1]}]}),
        (Dialect.MESSAGES, {"type": "content_block_delta", "index": 0, "delta": {"type": "citations_delta"}}),
        (Dialect.MESSAGES, {"type": "new"}),
        (Dialect.RESPONSES, {"type": "response.mcp_call.completed"}),
        (Dialect.PLAIN, {"choices": [{"index": 0, "delta": {"content": "a"}}]}),
    ],
)
def test_an_unknown_event_makes_the_record_unusable(dialect: Dialect, document: Any) -> None:
    record = SentText(dialect, lambda _: True)
    record.take(b"", document)
    assert not record.is_usable


@pytest.mark.parametrize(
    ("choice", "key"),
    [
        ({"delta": {"content": "a"}}, (0, "content")),
        ({"delta": {"content": "a", "reasoning": None}, "logprobs": None}, (0, "content")),
        ({"delta": {"content": ""}}, None),
        ({"delta": {"content": "a", "reasoning": "b"}}, None),
        ({"delta": {"content": "a", "role": "assistant"}}, None),
        ({"delta": {"content": "a"}, "finish_reason": "stop"}, None),
        ({"delta": {"content": "a"}, "logprobs": {"content": [{}]}}, None),
        ({"delta": {"tool_calls": [{"index": 3, "function": {"arguments": "{"}}]}}, (0, "arguments", 3)),
        ({"delta": {"tool_calls": [{"index": 3, "function": {"name": "f", "arguments": "{"}}]}}, None),
    ],
)
def test_only_an_event_with_one_text_and_nothing_else_may_take_the_fast_path(choice: Any, key: Any) -> None:
    assert SentText(Dialect.CHAT, lambda _: True).text_of({"choices": [{"index": 0, **choice}]}) == key
