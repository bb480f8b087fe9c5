"""A rejection by a real vLLM reaches the client with the documented status, code and shape, and without internals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import httpx2
import openai
import pytest

from gateway.api.errors import ERRORS
from tests.vllm.dialogues import Json, user
from tests.vllm.gateway import ALIAS, MODEL, Real, chat
from tests.vllm.server import NOT_INSTALLED, installed, model_path

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TOO_LONG = "hello " * 3000  # tokens; the model has room for 2048
STRANGE: Json = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}
STATUS = {400: openai.BadRequestError, 404: openai.NotFoundError}


@dataclass(frozen=True, slots=True)
class Bad:
    """A request, and the code and param of its error. `message`: a part of its message; `seen`: whether the server got the request."""

    path: str
    body: Json
    code: str
    param: str | None = None
    message: str = ""
    seen: bool = True


IMAGE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
BAD: Mapping[str, Bad] = {
    "unknown model": Bad(CHAT, {**chat("Hi"), "model": "nobody"}, "model_not_found", "model", "`nobody`", seen=False),
    "too long": Bad(CHAT, chat(TOO_LONG), "context_length_exceeded", "messages", "2048 tokens"),
    "far too long": Bad(CHAT, chat("x" * 1_000_000), "context_length_exceeded", "messages", "characters"),
    "too long a prompt": Bad(COMPLETIONS, {"prompt": TOO_LONG}, "context_length_exceeded", "prompt", "2048 tokens"),
    "too long an input": Bad(RESPONSES, {"input": TOO_LONG}, "context_length_exceeded", "input", "2048 tokens"),
    "max_tokens": Bad(CHAT, chat("Hi", max_tokens=80000), "context_length_exceeded", "max_tokens", "max_tokens=80000"),
    "max_completion_tokens": Bad(
        CHAT, chat("Hi", max_completion_tokens=80000), "context_length_exceeded", "max_completion_tokens", "80000"
    ),
    "no tokens": Bad(CHAT, chat("Hi", max_tokens=0), "invalid_value", "max_tokens", "at least 1"),
    "top_logprobs": Bad(CHAT, chat("Hi", logprobs=True, top_logprobs=50), "invalid_value", "top_logprobs", "greater than max allowed: 20"),
    "logit_bias": Bad(CHAT, chat("Hi", logit_bias={"99999": 1}), "invalid_value", "logit_bias", "out-of-vocab"),
    "a schema": Bad(
        CHAT, chat("Hi", response_format=STRANGE), "invalid_value", "response_format.json_schema.schema", "Invalid type: strange"
    ),
    "a regex": Bad(CHAT, chat("Hi", guided_regex="((("), "invalid_value", "structured_outputs.regex", "unclosed group"),
    "greedy and several": Bad(CHAT, chat("Hi", n=2), "invalid_value", "n", "greedy"),
    "no tools": Bad(CHAT, chat("Hi", tools=[]), "invalid_value", "tools", "must not be an empty array"),
    "a tool without a function": Bad(
        CHAT, chat("Hi", tools=[{"type": "function"}]), "missing_required_parameter", "tools.0.function", "required"
    ),
    "a choice without tools": Bad(CHAT, chat("Hi", tool_choice="required"), "invalid_value", "tool_choice", "`tools` must be set"),
    "temperature's type": Bad(CHAT, chat("Hi") | {"temperature": "hot"}, "invalid_value", "temperature", "valid number"),
    "temperature's range": Bad(CHAT, chat("Hi") | {"temperature": 9}, "invalid_value", "temperature", "[0, 2]"),
    "max_tokens' type": Bad(CHAT, chat("Hi", max_tokens="many"), "invalid_value", "max_tokens", "valid integer"),
    "messages' type": Bad(CHAT, {"messages": "Hi"}, "invalid_value", "messages", "valid list"),
    "no messages": Bad(CHAT, {"messages": []}, "invalid_value", "messages", "must not be empty"),
    "a template's own error": Bad(
        CHAT, {"messages": [user("a"), {"role": "system", "content": "b"}]}, "invalid_request", None, "beginning"
    ),
    "a role": Bad(CHAT, {"messages": [{"role": "nobody", "content": "a"}]}, "invalid_value", "messages.0.role", "role"),
    "an image": Bad(
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}]},
        "invalid_value",
        "messages.0.content.0",
        "takes text only",
    ),
    "a token": Bad(COMPLETIONS, {"prompt": [99999999]}, "invalid_value", "prompt", "out of vocabulary"),
    "no prompt": Bad(COMPLETIONS, {"prompt": ""}, "invalid_value", "prompt", "non-empty"),
    "a response's input": Bad(RESPONSES, {"input": 5}, "invalid_value", "input", "valid string"),
    "an earlier response": Bad(
        RESPONSES, {"input": "Hi", "previous_response_id": "resp_0"}, "invalid_value", "previous_response_id", "not stored", seen=False
    ),
    "tokens' type": Bad("/detokenize", {"tokens": ["a"]}, "invalid_value", "tokens.0", "valid integer"),
    "a route of other models": Bad("/v1/embeddings", {"input": "Hi"}, "not_found", None, "does not serve"),
    "a root route of other models": Bad("/v1/classify", {"input": "Hi"}, "not_found", None, "does not serve"),
}
STREAMS = (CHAT, COMPLETIONS, RESPONSES)
CASES = [
    pytest.param(name, streamed, id=f"{name}, {'streamed' if streamed else 'plain'}")
    for name, bad in BAD.items()
    for streamed in (False, True)
    if not streamed or bad.path in STREAMS
]


def check_hides_internals(real: Real, message: str) -> None:
    inside = [
        str(real.folder),
        str(model_path("qwen3")),
        "models/qwen3",
        ".sock",
        f"`{ALIAS}`",
        "127.0.0.1",
        real.internal_key,
        "parameter=",
    ]
    assert message and not [text for text in inside if text in message]


@pytest.mark.parametrize(("name", "streamed"), CASES)
def test_a_refusal(real: Real, name: str, streamed: bool) -> None:
    bad = BAD[name]
    row = ERRORS[bad.code]
    got = real.post(bad.path, {**bad.body, **({"stream": True} if streamed else {})})
    assert (got.status_code, got.headers["content-type"]) == (row.status, "application/json"), got.text
    error = got.json()["error"]
    assert got.json().keys() == {"error"} and error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == (row.type, bad.param, bad.code)
    assert bad.message in error["message"]
    assert real.reached_the_server(got) == bad.seen
    check_hides_internals(real, error["message"])


@pytest.mark.parametrize(("name", "streamed"), [case for case in CASES if BAD[str(case.values[0])].path.startswith("/v1/")])
def test_a_refusal_by_the_sdk(real: Real, name: str, streamed: bool) -> None:
    bad = BAD[name]
    row = ERRORS[bad.code]
    body = {"model": MODEL, **bad.body, **({"stream": True} if streamed else {})}
    with real.sdk() as client, pytest.raises(STATUS[row.status]) as raised:
        client.post(bad.path.removeprefix("/v1"), cast_to=httpx2.Response, body=body)
    error = raised.value
    assert (error.code, error.param, error.type) == (bad.code, bad.param, row.type)
    assert error.request_id is not None and error.request_id.startswith("req_")


ANTHROPIC: Mapping[str, tuple[str, Json, int, str, str]] = {
    "unknown model": (MESSAGES, {"model": "nobody", "messages": [user("Hi")], "max_tokens": 5}, 404, "not_found_error", "`nobody`"),
    "too long": (MESSAGES, {"messages": [user(TOO_LONG)], "max_tokens": 5}, 400, "invalid_request_error", "2048 tokens"),
    "max_tokens": (MESSAGES, {"messages": [user("Hi")], "max_tokens": 80000}, 400, "invalid_request_error", "80000"),
    "no max_tokens": (MESSAGES, {"messages": [user("Hi")]}, 400, "invalid_request_error", "max_tokens"),
    "messages' type": (MESSAGES, {"messages": "Hi", "max_tokens": 5}, 400, "invalid_request_error", "valid list"),
    "what is counted": ("/v1/messages/count_tokens", {"messages": "Hi"}, 400, "invalid_request_error", "valid list"),
}


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("name", ANTHROPIC)
def test_a_refusal_in_anthropics_shape(real: Real, name: str, streamed: bool) -> None:
    path, body, status, kind, text = ANTHROPIC[name]
    got = real.post(path, {**body, "stream": streamed})
    assert (got.status_code, got.headers["content-type"]) == (status, "application/json"), got.text
    document = got.json()
    assert document.keys() == {"type", "error"} and document["error"].keys() == {"type", "message"}
    assert (document["type"], document["error"]["type"]) == ("error", kind)
    assert text in document["error"]["message"]
    check_hides_internals(real, document["error"]["message"])


def test_the_keys_of_the_gateway_are_not_the_servers(real: Real) -> None:
    internal = real.internal_key
    with (
        openai.OpenAI(base_url=f"{real.gateway.url}/v1", api_key=internal, max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as raised,
    ):
        client.models.list()
    assert raised.value.code == "invalid_api_key"
    assert internal not in raised.value.message + real.gateway.output + real.gateway.log


@pytest.mark.parametrize("path", ["/metrics", "/load", "/docs", "/openapi.json", "/invocations"])
def test_a_route_that_only_the_server_has(real: Real, path: str) -> None:
    assert real.post(path, chat("Hi")).status_code == 404
    assert not [each for each in real.folder.glob("*.in") if b"POST " + path.encode() + b" " in each.read_bytes()]
