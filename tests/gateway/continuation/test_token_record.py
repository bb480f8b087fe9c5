"""The record of a stream has the tokens of the events that were sent, and the client gets none of their IDs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.routes import Dialect
from gateway.continuation.token_record import LONGEST, TokenRecord
from tests.support.examples import examples
from upstream.http.sse import data_of

HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def unlimited(_: int) -> bool:
    return True


def event(document: object) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


def chunk(delta: dict[str, Any], ids: list[int] | None, finish: str | None = None, **more: object) -> dict[str, Any]:
    return {**HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "token_ids": ids}], **more}


def recorded(documents: list[dict[str, Any]], dialect: Dialect = Dialect.CHAT, hold: Callable[[int], bool] = unlimited) -> TokenRecord:
    record = TokenRecord(dialect, hold)
    for document in documents:
        record.take(event(document), document)
    return record


_TEXTS = st.text(max_size=20)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(_TEXTS, st.lists(st.integers(0, 2**32), min_size=1, max_size=4)), max_size=20))
def test_an_event_equals_that_of_a_server_without_token_ids(parts: list[tuple[str, list[int]]]) -> None:
    record = TokenRecord(Dialect.CHAT, unlimited)
    for text, ids in parts:
        document = chunk({"content": text, "note": '"token_ids":[1]'}, ids, usage={"prompt_tokens": 3})
        plain = chunk({"content": text, "note": '"token_ids":[1]'}, None, usage={"prompt_tokens": 3})
        assert record.take(event(document), document) == event(plain)
        assert document == plain
    assert list(record.ids) == [number for _, ids in parts for number in ids]
    assert list(record.lengths) == [len(ids) for _, ids in parts]


def test_an_event_that_exists_only_for_its_token_ids_is_left_out() -> None:
    record = TokenRecord(Dialect.CHAT, unlimited)
    for document, shown in ((chunk({}, [7]), False), (chunk({}, None), True), (chunk({}, [8], "stop"), True)):
        assert bool(record.take(event(document), document)) is shown
    assert list(record.ids) == [7, 8], "its tokens are part of the response"
    assert record.finish == "stop"


def test_an_event_of_several_lines_is_written_again_without_its_ids() -> None:
    document = chunk({"content": "a"}, [1])
    lines = orjson.dumps(document, option=orjson.OPT_INDENT_2).replace(b"\n", b"\ndata: ")
    assert TokenRecord(Dialect.CHAT, unlimited).take(b"data: " + lines + b"\n\n", document) == event(chunk({"content": "a"}, None))


def test_the_record_has_what_a_continuation_must_repeat() -> None:
    role = {**HEAD, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2, 3]}
    call = {"tool_calls": [{"index": 0, "id": "call-1", "function": {"name": "f"}}]}
    record = recorded([role, chunk(call, [5]), chunk({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}, [6, 7])])
    assert (record.head, record.prompt_size, list(record.prompt)) == (HEAD, 3, [])
    assert (record.tools_sent, record.call_ids, record.has_begun, record.finish) == (True, ["call-1"], True, None)
    final = {**HEAD, "choices": [], "usage": {"prompt_tokens": 3}}
    assert record.take(event(final), final) == event(final)
    assert record.usage_sent


Texts = list[tuple[str, list[int]]]


def completed(texts: Texts, overlap: int = 0) -> TokenRecord:
    """Return the record of a completion with events of these texts and tokens."""
    record = TokenRecord(Dialect.COMPLETIONS, unlimited, overlap)
    for text, ids in texts:
        document = {**HEAD, "choices": [{"index": 0, "text": text, "token_ids": ids, "prompt_token_ids": [9, 9]}]}
        record.take(event(document), document)
    return record


def test_a_completion_continues_after_the_last_event_of_one_token_with_a_text() -> None:
    record = completed([("a", [1]), ("b", [2]), ("cd", [3, 4]), ("", [5])])
    assert (list(record.prompt), record.shown, record.surplus) == ([9, 9], 2, 2)
    record.keep_shown()
    assert (list(record.ids), list(record.lengths)) == ([1, 2], [1, 1])


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.text("aé🌍\n", max_size=3), st.integers(1, 3)), max_size=30), st.integers(0, 6))
def test_a_completion_continues_where_no_stop_string_can_begin_before(parts: list[tuple[str, int]], overlap: int) -> None:
    texts = [(text, [*range(count)]) for text, count in parts]
    record, chunks = completed(texts, overlap), completed([], overlap)
    for text, ids in texts:  # as the fast path records them
        written = ",".join(map(str, ids)).encode()
        if text:
            chunks.add_shown(written, orjson.dumps(text)[1:-1])
        else:
            chunks.add_hidden(written)
    positions = [(sum(count for _, count in parts[: at + 1]), sum(len(text) for text, _ in parts[at + 1 :])) for at in range(len(parts))]
    points = [end for end, (text, count) in zip(positions, parts, strict=True) if text and count == 1 and end[1] >= overlap]
    expected = points[-1] if points else (0, sum(len(text) for text, _ in parts))
    assert (record.shown, record.surplus) == (chunks.shown, chunks.surplus) == expected


def test_a_text_that_is_not_valid_ends_the_record() -> None:
    record = completed([("a", [1])], overlap=3)
    record.add_shown(b"2", b"\xff")
    assert not record.is_usable


@pytest.mark.parametrize("ids", [[2**32], [1, 2**50], [2**63 - 1]])
def test_large_token_ids_are_recorded(ids: list[int]) -> None:
    record = recorded([chunk({"content": "a"}, [1]), chunk({"content": "b"}, ids), chunk({"content": "c"}, [2])])
    assert list(record.ids) == [1, *ids, 2]


def test_the_bytes_around_the_ids_stay_as_the_server_wrote_them() -> None:
    document = chunk({"content": "a"}, [1])
    written = b"data: " + json.dumps(document).encode() + b"\n\n"
    assert TokenRecord(Dialect.CHAT, unlimited).take(written, document) == written.replace(b"[1]", b"null")


def test_the_largest_event_is_recorded() -> None:
    assert len(recorded([chunk({"content": "a"}, [1] * 0xFFFF)]).ids) == 0xFFFF


@pytest.mark.parametrize("ids", [[2**63], [1] * (0xFFFF + 1)])
def test_what_is_no_vocabulary_ends_the_record(ids: list[int]) -> None:
    record = recorded([chunk({"content": "a"}, [1]), chunk({"content": "b"}, ids), chunk({"content": "c"}, [2])])
    assert not record.is_usable
    assert not record.ids


def test_without_memory_the_record_ends_and_the_stream_continues() -> None:
    record = TokenRecord(Dialect.CHAT, lambda _: False)
    document = chunk({"content": "a"}, [1])
    assert record.take(event(document), document) == event(chunk({"content": "a"}, None))
    assert not record.is_usable
    record.add_shown(b"1,2", b"a")
    assert not record.ids


def test_a_record_has_a_greatest_length() -> None:
    record = TokenRecord(Dialect.CHAT, unlimited)
    for _ in range(LONGEST // 1024):
        record.add([1] * 1024)
    assert record.is_usable
    record.add([1])
    assert not record.is_usable


@pytest.mark.parametrize(("tokens", "is_recorded"), [(LONGEST - 1, True), (LONGEST, False)])
def test_the_prompt_of_a_completion_is_part_of_the_record(tokens: int, is_recorded: bool) -> None:
    choice = {"index": 0, "text": "a", "token_ids": [1], "prompt_token_ids": [2] * tokens}
    record = recorded([{**HEAD, "choices": [choice]}], Dialect.COMPLETIONS)
    assert (record.is_usable, record.prompt_size) == (is_recorded, tokens)


TEXT = {"index": 0, "text": "b", "finish_reason": None}


@pytest.mark.parametrize(
    "document",
    [
        {"choices": [TEXT]},
        {"choices": [{**TEXT, "token_ids": None}]},
        {"choices": [{**TEXT, "token_ids": [2, 3.0]}]},
        {"choices": [{**TEXT, "token_ids": [2, True]}]},
        {"choices": [{**TEXT, "token_ids": [2]}, {**TEXT, "token_ids": [3], "index": 1}]},
        {},
        {"token_ids": [2]},
    ],
)
def test_an_event_whose_tokens_are_not_known_ends_the_record(document: dict[str, Any]) -> None:
    first = {**HEAD, "choices": [{**TEXT, "token_ids": [1], "prompt_token_ids": [9]}]}
    record = recorded([first], Dialect.COMPLETIONS)
    assert record.is_usable
    record.take(event(document), document)
    assert not record.is_usable


def test_a_completion_without_the_tokens_of_its_prompt_ends_the_record() -> None:
    assert not recorded([{**HEAD, "choices": [{**TEXT, "token_ids": [1]}]}], Dialect.COMPLETIONS).is_usable


@pytest.mark.parametrize(
    "data",
    [
        b'data:  {"choices":[{"index":0,"text":"b","token_ids":[77]}]}\n\n',
        b'data:{"choices" : [ {"index":0,"token\\u005fids" : [ 77 ],"prompt_token_ids":[77]} ]}\n\n',
        b'data: {"choices":[{"index":0,"text":"b","token_ids":\rdata: [77]}]}\r\r',
        b'data: {"choices":[{"index":0,"text":"b","token_ids":[77],"token_ids":[77]}]}\r\n\r\n',
        b'data: {"choices":[{"token_ids":[77]},{"token_ids":[77]}]}\n\n',
        b'data: {"choices":[{"index":0,"text":"\\ud83d","token_ids":[77]}]}\n\n',
        b'data: {"choices":[{"index":0,"text":"b","token_ids":[77]}],"x":NaN}\n\n',
    ],
)
def test_no_way_to_write_an_event_shows_its_ids(data: bytes) -> None:
    try:
        document = orjson.loads(data_of(data))
    except orjson.JSONDecodeError:
        document = {}
    assert b"77" not in TokenRecord(Dialect.COMPLETIONS, unlimited).take(data, document)
