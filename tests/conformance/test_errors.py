"""Every invalid request, with the status, type, code and field of its error, and no internals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.conformance.examples import CHAT, LLAMA, NOT_THINKING, Json, user, weather
from tests.conformance.shapes import lacks
from tests.conformance.stage import Stage, on, shows_internals
from tests.vllm.chat import events

EVERYWHERE = on("simulator", "qwen")
BODY: Json = {"messages": [user("Who are you?")], "max_tokens": 20, "temperature": 0, **NOT_THINKING}
LONG = "word " * 4000
_BAD_SCHEMA: Json = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
_BAD_TOOL: Json = {"type": "function", "function": {"name": "f", "parameters": "none"}}


@dataclass(frozen=True, slots=True)
class Wrong:
    """A rejected request. ``message``: a text that the error message must contain."""

    name: str
    fields: Json
    code: str = "invalid_value"
    param: str | None = None
    message: str = ""
    status: int = 400
    type: str = "invalid_request_error"
    path: str = CHAT
    without: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return self.name

    @property
    def body(self) -> Json:
        return {name: value for name, value in {**BODY, **self.fields}.items() if name not in self.without}


TABLE = [
    Wrong("temperature above 2", {"temperature": 3}, param="temperature", message="temperature"),
    Wrong("temperature is a word", {"temperature": "hot"}, param="temperature"),
    Wrong("top_p above 1", {"top_p": 1.5}, param="top_p", message="top_p"),
    Wrong("no tokens at all", {"max_tokens": 0}, param="max_tokens", message="max_tokens"),
    Wrong("too many stops", {"stop": list("abcde")}, param="stop"),
    Wrong("n is none", {"n": 0}, param="n", message="n must be"),
    Wrong("several greedy answers", {"n": 2}, param="n", message="greedy"),
    Wrong("messages is a word", {"messages": "Hi"}, param="messages"),
    Wrong("no messages", {}, code="missing_required_parameter", param="messages", without=("messages",)),
    Wrong("stream is a word", {"stream": "often"}, param="stream"),
    Wrong("stream_options without a stream", {"stream_options": {"include_usage": True}}, param="stream_options"),
    Wrong("top_logprobs alone", {"top_logprobs": 2}, param="top_logprobs"),
    Wrong("no tools", {"tools": []}, param="tools"),
    Wrong("tool_choice without tools", {"tool_choice": "auto"}, param="tool_choice"),
    Wrong(
        "an unknown tool is named",
        {"tools": weather({}), "tool_choice": {"type": "function", "function": {"name": "f"}}},
        param="tool_choice",
    ),
    Wrong("a tool with bad parameters", {"tools": [_BAD_TOOL]}, param="tools.0.function.parameters"),
    Wrong("two constraints", {"structured_outputs": {"regex": "a", "choice": ["a"]}}, param="structured_outputs", message="one"),
    Wrong("a chat template", {"chat_template": "{{ 1 }}"}, param="chat_template"),
    Wrong("extra_body is a word", {"extra_body": "top_k"}, param="extra_body"),
    Wrong("an unknown model", {"model": "no-such-model"}, "model_not_found", "model", "no-such-model", status=404),
    Wrong("a prompt that is too long", {"messages": [user(LONG)]}, "context_length_exceeded", "messages", "2048"),
    Wrong("more tokens than the context has", {"max_tokens": 80000}, "context_length_exceeded", "max_tokens", "2048"),
    Wrong(
        "a long prompt for completions",
        {"prompt": LONG},
        "context_length_exceeded",
        "prompt",
        "2048",
        path="/v1/completions",
        without=("messages",),
    ),
]
# vLLM finds these when its stream has begun, with status 200 and an error as the first event.
LATE = [
    Wrong("logprobs above the limit", {"logprobs": True, "top_logprobs": 50}, param="top_logprobs", message="50"),
    Wrong("a schema that is none", {"response_format": _BAD_SCHEMA}, param="response_format.json_schema.schema"),
    Wrong("a bad regex", {"structured_outputs": {"regex": "("}}, param="structured_outputs.regex"),
    Wrong("a bias for no token", {"logit_bias": {"999999": 1}}, param="logit_bias"),
]


@EVERYWHERE
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("wrong", [*TABLE, *LATE], ids=str)
def test_an_error(stage: Stage, wrong: Wrong, streamed: bool) -> None:
    stream = {"stream": True} if streamed and "stream" not in wrong.fields and "stream_options" not in wrong.fields else {}
    response = stage.post({**wrong.body, **stream}, wrong.path)
    assert response.status_code == wrong.status and response.headers["content-type"] == "application/json", response.text
    error = response.json()["error"]
    assert lacks(error, {"message": str, "type": str, "code": str}) == [] and set(error) == {"message", "type", "code", "param"}
    assert (error["type"], error["code"], error["param"]) == (wrong.type, wrong.code, wrong.param)
    assert error["message"] and wrong.message in error["message"]
    assert not shows_internals(response.text) and LLAMA not in response.text
    assert response.headers["x-request-id"].startswith("req_")


@EVERYWHERE
@pytest.mark.parametrize("wrong", LATE, ids=str)
def test_vllm_itself_says_200_to_a_late_error(stage: Stage, wrong: Wrong) -> None:
    with stage.directly() as vllm:
        response = vllm.post(CHAT, json={**wrong.body, "model": stage.model, "stream": True})
    assert response.status_code == 200 and "error" in events(response.text)[0]


@EVERYWHERE
@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_json"),
        (b"[1]", "application/json", 400, "invalid_json"),
        (b'{"a": NaN}', "application/json", 400, "invalid_json"),
        ('{"a": "é"}'.encode("utf-16"), "application/json", 400, "invalid_json"),
        (b"{}", "text/plain", 415, "unsupported_media_type"),
        (b"{}", "application/json", 400, "missing_required_parameter"),
        (b'{"model": 7}', "application/json", 400, "invalid_value"),
    ],
)
def test_a_malformed_body(stage: Stage, content: bytes, kind: str, status: int, code: str) -> None:
    with stage.client() as client:
        response = client.post(CHAT, content=content, headers={"content-type": kind})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


@on("simulator", "llama")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize"])
def test_an_unknown_model_names_no_other_one(stage: Stage, path: str) -> None:
    response = stage.post({"model": "no-such-model", "messages": [user("x")], "prompt": "x", "input": "x"}, path)
    assert response.status_code == 404 and "meta-llama" not in response.text and "Qwen" not in response.text


@on("simulator", "qwen")
@pytest.mark.parametrize("path", ["/metrics", "/v1/load_lora_adapter", "/invocations", "/docs", "/v1/nothing", "/v1/chat/completions//"])
def test_other_routes_are_not_there(stage: Stage, path: str) -> None:
    response: Any = stage.post(BODY, path)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
