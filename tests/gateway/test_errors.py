"""Every error of a server, in the contract's words, and nothing of the inside."""

from __future__ import annotations

import time
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import (
    ROWS,
    Refusal,
    anthropic_error,
    from_event,
    from_failure,
    from_server,
    openai_error,
    render,
    render_event,
)
from upstream import errors as upstream


def own(message: str, kind: str = "BadRequestError", param: str | None = None, code: int = 400) -> dict[str, object]:
    """vLLM's own shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


OVERFLOW = (
    "This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049 input tokens, which exceeds "
    "this limit even without any output tokens. Please reduce the length of the input prompt."
)
CHARACTERS = OVERFLOW.replace("at least 2049 input tokens", "1000058 characters")
TOO_MANY = "max_tokens=80000 cannot be greater than max_model_len=2048. Please request fewer output tokens."
LOGPROBS = "Requested sample logprobs of 50, which is greater than max allowed: 20"

FINDINGS = (
    "2 validation errors:\n  {'type': 'list_type', 'loc': ('body', 'messages'), 'msg': 'Input should be a valid list', 'input': 'secret'}\n"
    "  {'type': 'x', 'loc': ('body', 'stop'), 'msg': \"Value error, it's too long\", 'input': ['secret'], 'ctx': {'error': 'secret'}}"
)

# (status, what vLLM 0.32 said) -> (code, param, message or None for words of ours)
TABLE: dict[str, tuple[int, Any, str, str | None, str]] = {
    "bad JSON": (400, own("1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.18'}", "Bad Request", "body.18"),
        "invalid_request", None, ""),
    "a missing field": (400, own("1 validation error:\n  {'type': 'missing'}", "Bad Request", "body.messages"),
        "invalid_value", "messages", ""),
    "what was sent is not said again": (400, own(FINDINGS, "Bad Request", "body.messages"),
        "invalid_value", "messages", "Input should be a valid list; Value error, it's too long"),
    "the whole body": (400, own("Field required", "Bad Request", "body"), "invalid_value", "body", "Field required"),
    "a field": (400, own("max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", param="max_tokens"),
                "invalid_value", "max_tokens", "max_tokens must be at least 1, got 0."),
    "a value with brackets": (400, own("out-of-vocab token ids. (parameter=logit_bias, value=[99999])", param="logit_bias"),
                              "invalid_value", "logit_bias", "out-of-vocab token ids."),
    "no field": (400, own("Unexpected message role."), "invalid_request", None, "Unexpected message role."),
    "a template": (400, own("Cannot apply chat template to an empty conversation."), "invalid_request", None, ""),
    "overflow": (400, own(f"{OVERFLOW} (parameter=input_tokens, value=2049)", param="input_tokens"),
        "context_length_exceeded", "messages", OVERFLOW),
    "overflow in characters": (400, own(f"{CHARACTERS} (parameter=input_text, value=1)", param="input_text"),
                               "context_length_exceeded", "messages", CHARACTERS),
    "max_tokens": (400, own(f"{TOO_MANY} (parameter=max_tokens, value=80000)", param="max_tokens"),
        "context_length_exceeded", "max_tokens", TOO_MANY),
    "logprobs": (400, own(f"{LOGPROBS} (parameter=logprobs, value=50)", param="logprobs"), "invalid_value", "logprobs", LOGPROBS),
    "an unknown model": (404, own("The model `nope` does not exist. Valid aliases: secret.", "NotFoundError", "model", 404),
        "model_not_found", "model", ""),
    "an engine that died": (500, own("EngineCore encountered an issue.", "InternalServerError", None, 500), "server_error", None,
                            "The model's server failed."),
    "overload": (503, own("Too many queued requests", "Service Unavailable", None, 503),
        "overloaded", None, "The model's server is overloaded."),
    "our key": (401, {"error": "Unauthorized"}, "server_error", None, "The model's server refused the gateway."),
    "forbidden": (403, {"detail": "no"}, "server_error", None, "The model's server refused the gateway."),
    "FastAPI": (400, {"detail": "There was an error parsing the body"}, "invalid_request", None, "There was an error parsing the body"),
    "FastAPI's list": (422, {"detail": [{"loc": ["body"], "msg": "x"}]}, "invalid_request", None, "The request is not valid."),
    "Anthropic's": (400, {"type": "error", "error": {"type": "BadRequestError",
                                                     "message": f"{TOO_MANY} (parameter=max_completion_tokens, value=8)"}},
                    "context_length_exceeded", None, TOO_MANY),
    "too large": (413, {"detail": "Payload too large"}, "request_too_large", None, "Payload too large"),
    "media type": (415, {}, "unsupported_media_type", None, "The content type is not supported."),
    "a redirect": (307, {}, "server_error", None, "The model's server failed."),
    "an odd status": (999, {}, "server_error", None, "The model's server failed."),
    "an array": (400, [1], "invalid_request", None, "The request is not valid."),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name: str) -> None:
    status, body, code, param, message = TABLE[name]
    refusal = from_server(status, orjson.dumps(body), "nope", "messages")
    assert (refusal.code, refusal.param) == (code, param)
    assert refusal.message and (not message or refusal.message == message)
    assert "secret" not in refusal.message and "(parameter=" not in refusal.message
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and error.get("code") == status:
        assert openai_error(from_event(error, "nope", "messages")) == openai_error(refusal), "the same in a stream"


@pytest.mark.parametrize("body", [b"", b"<html>", b"\xff", b'{"error":{"message":5,"type":[],"param":{}}}', b'{"error":null}', b"[" * 5000])
def test_a_body_that_says_nothing(body: bytes) -> None:
    assert from_server(400, body, "m", "prompt").message == "The request is not valid."


INSIDE = st.sampled_from(
    ["10.0.0.5:8000", "192.168.1.17", "http://vllm-0.internal:8000/v1", "https://x/y", "unix:/run/vllm.sock", "/opt/vllm/engine.py",
     "/home/vllm/.cache/huggingface/hub/m", "tcp://127.0.0.1:5557", "ipc:///tmp/a-b-c"]
)  # fmt: skip


@settings(deadline=None)
@given(st.text(max_size=30), INSIDE, st.text(max_size=30), st.integers(400, 499), st.none() | st.text(max_size=20))
def test_nothing_of_the_inside_is_told(before: str, inside: str, after: str, status: int, param: str | None) -> None:
    refusal = from_server(status, orjson.dumps(own(f"{before} {inside} {after}", param=param)), "m", "prompt")
    assert inside not in refusal.message
    assert not any(
        part in refusal.message for part in ("10.0.0.5", "192.168.1.17", "vllm-0", "/run/", "/opt/", ".cache", "127.0.0.1", "ipc:")
    )


@settings(deadline=None)
@given(st.integers(100, 999), st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["error", "detail", "message", "type", "param", "code"]), inner)))  # fmt: skip
def test_no_answer_is_too_strange(status: int, document: object) -> None:
    refusal = from_server(status, orjson.dumps(document), "m", "prompt")
    assert refusal.code in ROWS and 400 <= refusal.row.status <= 599 and refusal.message
    assert set(orjson.loads(render(refusal))["error"]) == {"message", "type", "param", "code"}
    if isinstance(document, dict):
        assert from_event(document, "m", "prompt").code in ROWS


@pytest.mark.parametrize(
    "unit", ["'msg': 'x", " ", "(parameter=a, value=", ")", "/", "/a", "a/", "\n", "1.", "max_model_len", "(parameter="]
)
def test_a_long_message_takes_time_in_proportion(unit: str) -> None:
    def seconds(length: int) -> float:
        text = ("1 validation error:" if "msg" in unit else "x") + unit * (length // len(unit))
        bodies = [orjson.dumps(own(text + end, param="p")) for end in ("", "x", ")", " )x")]

        def once() -> float:
            since = time.thread_time()
            for body in bodies:
                from_server(400, body, "m", "prompt")
            return time.thread_time() - since

        return min(once() for _ in range(3))  # what else is done in this thread, as by the collector of garbage, is not done each time

    seconds(100)
    assert seconds(60_000) < 60 * max(seconds(6_000), 0.001)


def test_a_message_is_bounded() -> None:
    assert len(from_server(400, orjson.dumps(own("x" * 60_000)), "m", "prompt").message) <= 2000
    assert len(from_server(404, b"{}", "m" * 60_000, "prompt").message) <= 300


FAILURES = {
    upstream.ConnectFailed: "upstream_unreachable",
    upstream.ConnectTimeout: "upstream_unreachable",
    upstream.StaleConnection: "upstream_disconnected",
    upstream.Disconnected: "upstream_disconnected",
    upstream.BadAnswer: "upstream_disconnected",
    upstream.FirstByteTimeout: "upstream_timeout",
    upstream.IdleTimeout: "upstream_timeout",
    upstream.TotalTimeout: "upstream_timeout",
    upstream.UpstreamError: "upstream_disconnected",
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_is_told_without_its_details(kind: type[upstream.UpstreamError]) -> None:
    refusal = from_failure(kind("s#0", "10.0.0.5:8000 refused"))
    assert refusal.code == FAILURES[kind]
    assert refusal.row.status == (504 if "timeout" in refusal.code else 502)
    assert "10.0.0.5" not in refusal.message and "s#0" not in refusal.message


@pytest.mark.parametrize("code", ROWS)
def test_the_shapes(code: str) -> None:
    refusal = Refusal(code, "Words.", param="p")
    assert openai_error(refusal) == {"error": {"message": "Words.", "type": ROWS[code].type, "param": "p", "code": code}}
    told = anthropic_error(refusal)
    assert told["type"] == "error" and set(told["error"]) == {"type", "message"}
    assert "retry-after" in refusal.headers or ROWS[code].status != 503
    assert refusal.headers.get("www-authenticate") == ("Bearer" if ROWS[code].status == 401 else None)


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
