"""The rest of a completion continues the tokens of its prompt and of its response."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.api.routes import Dialect
from gateway.continuation.completion import DEFAULT_LIMIT, ContinuedCompletion
from gateway.continuation.events import DONE, event
from gateway.continuation.token_record import TokenRecord

HEAD = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}


def record() -> TokenRecord:
    """Return the record of a stream with a prompt of 2 tokens and a response of 3, of which the last has no text yet."""
    made = TokenRecord(Dialect.COMPLETIONS, lambda _: True)
    for text, ids, prompt in (("a", [1, 2], [8, 9]), ("", [3], None)):
        document = {**HEAD, "choices": [{"index": 0, "text": text, "token_ids": ids, "prompt_token_ids": prompt}]}
        made.take(event(document), document)
    return made


def continued(**fields: Any) -> ContinuedCompletion:
    return ContinuedCompletion(record(), {"model": "m", "prompt": "p", "stream": True, **fields}, 1 << 16)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 10}, {"max_tokens": 8}),
        ({}, {"max_tokens": DEFAULT_LIMIT - 2}),
        ({"max_tokens": 10, "min_tokens": 5}, {"max_tokens": 8, "min_tokens": 3}),
        ({"max_tokens": 10, "min_tokens": 1}, {"max_tokens": 8, "min_tokens": 0}),
    ],
)
def test_the_request_continues_the_tokens_up_to_the_last_text(fields: dict[str, int], expected: dict[str, int]) -> None:
    body = orjson.loads(continued(**fields).body("served"))
    assert body == {"model": "served", "stream": True, "prompt": [8, 9, 1, 2], **expected}


def test_the_events_are_those_of_the_lost_server() -> None:
    choice = {"index": 0, "text": "b", "token_ids": [3], "prompt_token_ids": [8, 9, 1, 2], "finish_reason": None}
    other = {"id": "cmpl-2", "object": "text_completion", "created": 2, "model": "m", "choices": [choice]}
    usage = {"prompt_tokens": 4, "total_tokens": 5, "completion_tokens": 1}
    expected = {**HEAD, "choices": [choice], "usage": {"prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3}}
    rest, wire = continued(max_tokens=10), event({**other, "usage": usage}) + DONE
    shown = b"".join(rest.feed(wire[at : at + 7]) for at in range(0, len(wire), 7))
    assert shown == event(expected) + DONE


def test_an_error_of_the_other_server_is_passed_on() -> None:
    error = event({"error": {"message": "dead", "code": 500}})
    assert continued(max_tokens=10).feed(error + b": a comment\n\n") == error + b": a comment\n\n"
