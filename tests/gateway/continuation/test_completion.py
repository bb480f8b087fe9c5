"""The rest of a completion continues the tokens of its prompt and of its response."""

from __future__ import annotations

from array import array
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.routes import Dialect
from gateway.continuation.completion import DEFAULT_LIMIT, ContinuedCompletion
from gateway.continuation.events import DONE, event
from gateway.continuation.regeneration import DifferentError
from gateway.continuation.token_record import TokenRecord
from tests.support.examples import examples
from upstream.http.sse import data_of, split

HEAD = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
TEXTS = ["ab", "c", "", "ö", "de", "", "", "🌍", "f", "gh", "i", "j", "kl"]
"""The text of each token, whose ID is its number. A character of several tokens is in the last one."""


def streamed(groups: list[list[int]], held: int = 0) -> bytes:
    """Return a stream with the tokens in these groups. ``held``: the characters that are held back until the end."""
    made, sent, events = 0, "", b""
    start = groups[0][0]
    for number, ids in enumerate(groups):
        made += len(ids)
        whole = "".join(TEXTS[start : start + made])
        is_last = number == len(groups) - 1
        shown = whole if is_last else whole[: max(len(whole) - held, len(sent))]
        choice = {"index": 0, "text": shown[len(sent) :], "token_ids": ids, "finish_reason": "length" if is_last else None}
        sent = shown
        events += event({**HEAD, "id": "cmpl-2", "choices": [choice], "usage": {"prompt_tokens": 2 + start, "completion_tokens": made}})
    return events + DONE


def documents(events: bytes) -> list[dict[str, Any]]:
    return [orjson.loads(data) for data in map(data_of, split(events)) if data.startswith(b"{")]


def recorded(events: bytes, overlap: int = 0) -> TokenRecord:
    """Return the record of a stream with a prompt of 2 tokens."""
    made = TokenRecord(Dialect.COMPLETIONS, lambda _: True, overlap)
    for document in documents(events):
        document |= HEAD
        document["choices"][0]["prompt_token_ids"] = [98, 99]
        made.take(event(document), document)
    return made


def continued(groups: list[list[int]], *, sampled: bool = False, **fields: Any) -> ContinuedCompletion:
    return ContinuedCompletion(
        recorded(streamed(groups)), {"model": "m", "prompt": "p", "stream": True, **fields}, 1 << 16, sampled=sampled
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 10}, {"max_tokens": 8}),
        ({}, {"max_tokens": DEFAULT_LIMIT - 2}),
        ({"max_tokens": 10, "min_tokens": 5}, {"max_tokens": 8, "min_tokens": 3}),
        ({"max_tokens": 10, "min_tokens": 1}, {"max_tokens": 8, "min_tokens": 0}),
    ],
)
def test_the_request_continues_the_tokens_up_to_the_last_text(fields: dict[str, Any], expected: dict[str, int]) -> None:
    body = orjson.loads(continued([[0], [1], [2]], **fields).body("served"))
    assert body == {"model": "served", "stream": True, "prompt": [98, 99, 0, 1], **expected}


@pytest.mark.parametrize(("groups", "most"), [([[0, 1, 2]], 0), ([[0], [1, 2]], 1), ([[0], [1], [2, 3, 4, 5]], 2), ([[0, 1], [2, 3]], 0)])
def test_several_tokens_of_one_event_are_made_again(groups: list[list[int]], most: int) -> None:
    """The last of them may be the start of a character."""
    ids = [number for group in groups for number in group]
    rest = continued(groups, max_tokens=20)
    assert orjson.loads(rest.body("m"))["prompt"] == [98, 99, *ids[:most]]
    with pytest.raises(DifferentError):
        continued(groups, sampled=True)


_GROUPS = st.lists(st.integers(1, 3), min_size=len(TEXTS), max_size=len(TEXTS))


def grouped(sizes: list[int], start: int) -> list[list[int]]:
    """Return the tokens from ``start`` on in groups of these sizes."""
    ids, groups = [*range(start, len(TEXTS))], list[list[int]]()
    for size in sizes:
        groups += [ids[:size]] if ids else []
        ids = ids[size:]
    return groups


@settings(max_examples=examples(300), deadline=None)
@given(_GROUPS, _GROUPS, st.integers(0, len(TEXTS)), st.integers(0, 7), st.booleans())
def test_the_events_are_those_of_the_lost_server(first: list[int], second: list[int], cut: int, overlap: int, includes: bool) -> None:
    """Whatever is held back, and in whatever groups the tokens come, what is sent of both streams is the whole text and each token once."""
    held = 0 if includes else overlap
    whole = list(map(event, documents(streamed(grouped(first, 0), held))))
    cut = min(cut, len(whole) - 1)
    record = recorded(b"".join(whole[:cut]), overlap)
    if not cut:
        record.prompt, record.prompt_size, record.head = array("I", [98, 99]), 2, HEAD
    rest = ContinuedCompletion(record, {"prompt": "p", "max_tokens": 99, "include_stop_str_in_output": includes}, 1 << 16)
    start = len(orjson.loads(rest.body("m"))["prompt"]) - 2
    wire = streamed(grouped(second, start), held)
    shown = b"".join(rest.feed(wire[at : at + 7]) for at in range(0, len(wire), 7))
    parts = documents(b"".join(whole[:cut]) + shown)
    assert "".join(part["choices"][0]["text"] for part in parts) == "".join(TEXTS)
    assert [number for part in parts for number in part["choices"][0]["token_ids"]] == [*range(len(TEXTS))]
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert shown.endswith(DONE)


@pytest.mark.parametrize(
    ("text", "ids"), [("c", [1, 9]), ("c", [2]), ("c", [1]), ("", [1, 2, 3])], ids=["token", "first token", "end", "shorter text"]
)
def test_other_tokens_than_those_that_were_sent_are_refused(text: str, ids: list[int]) -> None:
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": "stop"}
    with pytest.raises(DifferentError):
        continued([[0], [1, 2]], max_tokens=20).feed(event({**HEAD, "choices": [choice]}))


def test_an_error_of_the_other_server_is_passed_on() -> None:
    error = event({"error": {"message": "dead", "code": 500}})
    assert continued([[0], [2]], max_tokens=10).feed(error + b": a comment\n\n") == error + b": a comment\n\n"
