"""The table of errors, its headers, and the shapes in which a client gets them."""

from __future__ import annotations

import orjson
import pytest

from gateway.api.errors import ERRORS, Refusal, anthropic_error, duration, from_failure, openai_error, render_event
from tests.support.rows import each_row
from upstream.http import errors as upstream

FAILURES = {
    upstream.ConnectFailed: "upstream_unreachable",
    upstream.ConnectTimeout: "upstream_unreachable",
    upstream.StaleConnection: "upstream_disconnected",
    upstream.Disconnected: "upstream_disconnected",
    upstream.BadResponse: "upstream_disconnected",
    upstream.FirstByteTimeout: "upstream_timeout",
    upstream.IdleTimeout: "upstream_timeout",
    upstream.TotalTimeout: "upstream_timeout",
    upstream.UpstreamError: "upstream_disconnected",
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_is_reported_without_its_details(kind: type[upstream.UpstreamError]) -> None:
    refusal = from_failure(kind("s#0", "10.0.0.5:8000 refused"))
    assert refusal.code == FAILURES[kind]
    assert refusal.spec.status == (504 if "timeout" in refusal.code else 502)
    assert "10.0.0.5" not in refusal.message and "s#0" not in refusal.message


@each_row("code", ERRORS)
def test_the_shapes(code: str) -> None:
    refusal = Refusal(code, "Words.", param="p")
    assert openai_error(refusal) == {"error": {"message": "Words.", "type": ERRORS[code].type, "param": "p", "code": code}}
    error = anthropic_error(refusal)
    assert error["type"] == "error" and set(error["error"]) == {"type", "message"}
    assert "retry-after" in refusal.headers or ERRORS[code].status != 503
    assert refusal.headers.get("www-authenticate") == ("Bearer" if ERRORS[code].status == 401 else None)


RETRIED = {"request_timeout", "rate_limit_exceeded"}


@each_row("code", ERRORS)
def test_a_client_is_advised_against_a_retry_that_cannot_help(code: str) -> None:
    headers, status = Refusal(code, "Words.").headers, ERRORS[code].status
    assert headers.get("x-should-retry") == ("false" if status < 500 and code not in RETRIED else None)
    assert "retry-after" not in headers or status in (429, 503)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "1 second"),
        (1, "1 second"),
        (59, "59 seconds"),
        (61, "1 minute 1 second"),
        (120, "2 minutes"),
        (3601, "1 hour 1 minute"),
        (31284, "8 hours 42 minutes"),
        (86400, "1 day"),
        (90000, "1 day 1 hour"),
    ],
)
def test_a_duration(seconds: int, text: str) -> None:
    assert duration(seconds) == text


def test_the_last_event() -> None:
    refusal = Refusal("upstream_disconnected", "Broken.\n\ndata: no")
    chat = render_event(refusal, dialect="chat").split(b"\n\n")
    assert orjson.loads(chat[0].removeprefix(b"data: ")) == openai_error(refusal)
    assert chat[1:] == [b"data: [DONE]", b""]
    for dialect in ("messages", "responses"):
        name, data, *rest = render_event(refusal, dialect=dialect).split(b"\n")
        assert name == b"event: error" and rest == [b"", b""]
        document = orjson.loads(data.removeprefix(b"data: "))
        assert document["type"] == "error" and (document if dialect == "responses" else document["error"])["message"] == refusal.message
