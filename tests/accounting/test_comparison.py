"""The comparison detects each wrong count, and accepts what the documents allow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.accounting.comparison import COMPLETE, LOST, MISSING, REJECTED, compare, journal_age
from tests.accounting.evidence import Exchange, References, Tokens, events
from tests.accounting.workload import PlannedRequest
from tests.support.rows import each_row

TEXT = "Who are you?"
KNOWN = References(
    {(kind, TEXT): 7 for kind in ("chat", "chat, choices", "chat, logprobs", "completion", "response", "message")}, {TEXT: [2, 2, 5, 9]}
)


def planned(kind: str = "chat", *, texts: Sequence[str] = (TEXT,), **body: Any) -> PlannedRequest:
    return PlannedRequest(1, kind, texts, {"stream": True, **body})


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunk(completion: int | None, index: int = 0, tokens: int | None = None, prompt: int = 7) -> bytes:
    """An event of a choice. ``completion``: its running usage; ``tokens``: the number of its logprobs."""
    choice: dict[str, Any] = {"index": index, "delta": {}}
    if tokens is not None:
        choice["logprobs"] = {"content": [{}] * tokens}
    usage = {} if completion is None else {"usage": {"prompt_tokens": prompt, "completion_tokens": completion}}
    return event(choices=[choice], **usage)


def stream(*completions: int, hidden: bool = False) -> bytes:
    return b"".join(chunk(None if hidden else each) for each in completions)


def row(prompt: int | None, completion: int | None, end: str | None = "client", by: str | None = None, status: int = 499) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "incomplete": end,
        "estimated_by": by,
        "status": status,
        "server": "m#0",
    }


def truncated(body: bytes, server: bytes | None, **body_fields: Any) -> Exchange:
    return Exchange(planned(**body_fields), 200, body, whole=False, server_body=server)


THREE = truncated(stream(0, 2, 3, hidden=True), stream(0, 2, 3, 5, 6))
LOGPROBS = truncated(chunk(None, tokens=2) + chunk(None, tokens=1), stream(), kind="chat, logprobs", logprobs=True)
CHOICES = truncated(chunk(2, 0) + chunk(3, 2) + chunk(4, 0), None, kind="chat, choices", n=3)
PROMPTS = truncated(chunk(2, 0) + chunk(3, 3), None, kind="completion, prompts", texts=(TEXT, TEXT, TEXT), n=2)
MESSAGE = truncated(
    event(type="message_start", message={"usage": {"input_tokens": 7}}) + event(type="content_block_delta", delta={"text": "12345"}),
    None,
    kind="message",
)
RESPONSE = truncated(
    event(type="response.created", response={}) + event(type="response.output_text.delta", delta="12"),
    None,
    kind="response",
)
WHOLE = Exchange(planned(stream=False), 200, json.dumps({"usage": {"prompt_tokens": 7, "completion_tokens": 4}}).encode(), whole=True)
CANCELLED = Exchange(planned(), None, b"", whole=False)
REFUSED = Exchange(planned(), 503, b"{}", whole=True)

RIGHT = {
    "a truncated stream": (THREE, row(7, 3), "client"),
    "several choices": (CHOICES, row(7, 7), "client"),
    "several prompts": (PROMPTS, row(14, 5), "client"),
    "estimated message": (MESSAGE, row(7, 2, by="events"), "client"),
    "estimated response": (RESPONSE, row(9, 1, by="events"), "client"),
    "a complete response": (WHOLE, row(7, 4, None, status=200), COMPLETE),
    "cancelled": (CANCELLED, row(None, None), "client"),
    "rejected": (REFUSED, row(None, None, None, status=503), REJECTED),
    "lost": (THREE, row(7, 2, LOST, "journal", 200), LOST),
    "lost and unknown": (THREE, row(None, None, LOST, status=200), LOST),
    "without a row": (CANCELLED, None, MISSING),
    "settled, and not written before the kill": (replace(THREE, broken=True), row(7, 6, None, status=200), COMPLETE),
}
WRONG = {
    "one token more": (THREE, row(7, 4)),
    "one token less": (THREE, row(7, 2)),
    "no prompt": (THREE, row(0, 3)),
    "estimated without need": (THREE, row(7, 3, by="events")),
    "a wrong prompt of a message": (MESSAGE, row(8, 3, by="events")),
    "more events than tokens": (MESSAGE, row(7, 6, by="events")),
    "a cancelled request that is charged": (CANCELLED, row(7, 0)),
    "a rejected request that is charged": (REFUSED, row(7, 0, None, status=503)),
    "more than a lost stream delivered": (THREE, row(7, 4, LOST, "journal", 200)),
    "no row": (WHOLE, None),
    "other events than the server's": (replace(THREE, body=chunk(None, 1)), row(7, 0)),
    "another count than the logprobs": (replace(LOGPROBS, server_body=chunk(2) + chunk(4)), row(7, 4)),
}


@each_row("name", RIGHT)
def test_right_rows(name: str) -> None:
    exchange, found, end = RIGHT[name]
    verdict = compare(exchange, found, KNOWN)
    assert (verdict.problem, verdict.end) == ("", end)


@each_row("name", WRONG)
def test_wrong_rows(name: str) -> None:
    exchange, found = WRONG[name]
    assert compare(exchange, found, KNOWN).problem


def test_a_text_that_resembles_an_event_is_not_an_event() -> None:
    [document] = events(b'event: delta\ndata: {"delta": "data: [DONE]"}\n\ndata: [DONE]\n\ndata: {"cut')
    assert document == {"delta": "data: [DONE]"}


def test_errors_of_estimates() -> None:
    assert compare(MESSAGE, row(7, 2, by="events"), KNOWN).error == Tokens(0, -1)
    assert compare(RESPONSE, row(9, 0, by="events"), KNOWN).error == Tokens(2, -1)


def test_the_age_of_a_journal_is_the_time_since_the_first_newer_event() -> None:
    verdict = compare(replace(THREE, server_body=stream(0, 2, 3)), row(7, 2, LOST, "journal", 200), KNOWN)
    partial = [(10.0, stream(0, hidden=True)), (10.2, stream(0, 2, hidden=True)), (10.3, stream(0, 2, 3, hidden=True)), (10.5, THREE.body)]
    assert journal_age(verdict, partial, KNOWN) == pytest.approx(0.2)
    assert journal_age(replace(verdict, row=Tokens(7, 3)), partial, KNOWN) == 0.0
