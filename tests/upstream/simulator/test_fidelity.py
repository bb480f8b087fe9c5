"""The simulator beside the real vLLM: the same requests to both, the answers compared key by key and frame by frame.

The text of a model and the number of frames may differ; the keys of a response, their types, and the kinds
of frames come in which order, and how a refusal is worded may not.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple

import httpx2
import psutil
import pytest

from tests.support.process import wait_for
from tests.support.shared import Shared
from tests.upstream.simulator import test_process as simulator
from tests.vllm import server as vllm
from tests.vllm.gateway import NotAchieved, attempted, held
from upstream.simulator.app import SCALE_OUT
from upstream.vllm.engine_counters import EngineCounters, parse_counters

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm.installed() is None, reason=vllm.NOT_INSTALLED),
]

Body = dict[str, Any]

FLAGS: Final = ["--max-model-len", "2048", "--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder"]

# Members that are null or not by what a model has said or remembers.
BY_MODEL: Final = frozenset({"content", "reasoning", "stop_reason"})


@pytest.fixture(scope="module", params=["@direct"])
def real(shared: Shared, request: pytest.FixtureRequest) -> vllm.Server:
    """The real server."""
    return shared.once(request.param, lambda: vllm.running("qwen3"))


@pytest.fixture(scope="module")
def clients(real: vllm.Server) -> Iterator[tuple[httpx2.Client, httpx2.Client]]:
    """The real server's and the simulator's."""
    with simulator.running(*FLAGS) as simulated, httpx2.Client(base_url=real.url, timeout=120) as client:
        yield client, simulated.client


def user(text: str) -> list[Body]:
    return [{"role": "user", "content": text}]


PLAIN: Final = {"chat_template_kwargs": {"enable_thinking": False}, "temperature": 0}
QUESTION: Final = {"model": "tiny", "messages": user("Who are you?"), "max_tokens": 300, "temperature": 0}
PLAIN_QUESTION: Final = {**QUESTION, **PLAIN}
SCHEMA: Final = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["location"],
        },
    },
}
TOOL: Final = {**QUESTION, "messages": user("What is the weather in Hangzhou?"), "tools": [WEATHER]}
FLAT: Final = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]  # the one member that is no text
MESSAGE: Final = {"model": "tiny", "messages": user("Who are you?"), "max_tokens": 300, "temperature": 0}
MESSAGE_TOOL: Final = {
    **MESSAGE,
    "messages": user("What is the weather in Hangzhou?"),
    "tools": [{"name": "get_current_weather", "input_schema": {**WEATHER["function"]["parameters"], "required": ["location", "days"]}}],  # type: ignore[index]
}
RESPONSE: Final = {"model": "tiny", "input": "Who are you?", "max_output_tokens": 300, "temperature": 0}
COMPLETION: Final = {"model": "tiny", "prompt": "Once upon a time", "temperature": 0}
UNTHINKING: Final = {"chat_template_kwargs": {"enable_thinking": False}}
PLAIN_RESPONSE: Final = {**RESPONSE, **UNTHINKING}
CONTINUED: Final = {
    "messages": [*user("Who are you?"), {"role": "assistant", "content": "I am"}],
    "continue_final_message": True,
    "add_generation_prompt": False,
}
RESPONSE_CALLED: Final = [
    {"role": "user", "content": "What is the weather in Hangzhou?"},
    {"type": "function_call", "call_id": "call_1", "name": "get_current_weather", "arguments": '{"location": "Hangzhou"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
]
MESSAGE_CALLED: Final = [
    *user("What is the weather in Hangzhou?"),
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "call_1", "name": "get_current_weather", "input": {"location": "Hangzhou", "days": 1}}],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"}]},
]
USAGE: Final = {"stream": True, "stream_options": {"include_usage": True}}
LONG: Final = 2000
"""Tokens of a response that a client disconnects from."""
RUNNING: Final = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}

BATCH: Final = "/v1/chat/completions/batch"
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"

REQUESTS: Final[dict[str, tuple[str, Body]]] = {
    "chat": (CHAT, PLAIN_QUESTION),
    "chat with reasoning": (CHAT, QUESTION),
    "chat without its reasoning": (CHAT, {**QUESTION, "include_reasoning": False}),
    "chat cut short in its reasoning": (CHAT, {**QUESTION, "max_tokens": 2}),
    "chat with effort none": (CHAT, {**QUESTION, "reasoning_effort": "none"}),
    "chat cut short": (CHAT, {**PLAIN_QUESTION, "max_completion_tokens": 3}),
    "chat, two choices": (CHAT, {**PLAIN_QUESTION, "temperature": 1, "n": 2}),
    "chat with log probabilities": (CHAT, {**PLAIN_QUESTION, "logprobs": True, "top_logprobs": 2}),
    "chat with log probabilities alone": (CHAT, {**PLAIN_QUESTION, "logprobs": True}),
    "chat with token ids": (CHAT, {**PLAIN_QUESTION, "return_token_ids": True}),
    "chat with tools": (CHAT, TOOL),
    "chat with tools, required": (CHAT, {**TOOL, **PLAIN, "tool_choice": "required"}),
    "chat with tools that may not be called": (CHAT, {**PLAIN_QUESTION, "tools": [WEATHER], "tool_choice": "none"}),
    "chat with a named tool": (CHAT, {**TOOL, **PLAIN, "tool_choice": {"type": "function", "function": {"name": "get_current_weather"}}}),
    "chat with a schema": (
        CHAT,
        {**PLAIN_QUESTION, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    ),
    "chat with a choice": (CHAT, {**PLAIN_QUESTION, "structured_outputs": {"choice": ["red", "blue"]}}),
    "chat with a regular expression": (CHAT, {**PLAIN_QUESTION, "structured_outputs": {"regex": "[ab]{3}"}}),
    "chat with unknown fields": (CHAT, {**PLAIN_QUESTION, "extra_body": {"n": 5}, "guided_json": {}, "functions": [], "store": True}),
    "chat with a priority that the policy ignores": (CHAT, {**PLAIN_QUESTION, "priority": -5}),
    "chat with an empty model": (CHAT, {**PLAIN_QUESTION, "model": ""}),
    "chat that continues a message": (CHAT, {**PLAIN_QUESTION, **CONTINUED}),
    "batch": (BATCH, {**PLAIN_QUESTION, "messages": [user("Who are you?"), user("What is the capital of France?")]}),
    "batch with reasoning": (BATCH, {**QUESTION, "messages": [user("Who are you?")]}),
    "batch with log probabilities": (BATCH, {**PLAIN_QUESTION, "messages": [user("Who are you?")], "logprobs": True, "top_logprobs": 2}),
    "completion": (COMPLETIONS, COMPLETION),
    "completion with echo": (COMPLETIONS, {**COMPLETION, "echo": True}),
    "completion with log probabilities": (COMPLETIONS, {**COMPLETION, "logprobs": 2, "max_tokens": 3}),
    "completions of two prompts": (COMPLETIONS, {**COMPLETION, "prompt": ["Once", "upon"], "max_tokens": 3}),
    "completion of token ids": (COMPLETIONS, {**COMPLETION, "prompt": [100, 101], "max_tokens": 3, "return_token_ids": True}),
    "response": (RESPONSES, {**RESPONSE, "chat_template_kwargs": {"enable_thinking": False}}),
    "response with reasoning": (RESPONSES, RESPONSE),
    "response cut short": (RESPONSES, {**RESPONSE, "max_output_tokens": 2}),
    "response with tools": (RESPONSES, {**RESPONSE, "input": "What is the weather in Hangzhou?", "tools": [FLAT]}),
    "response with effort none": (RESPONSES, {**RESPONSE, "reasoning": {"effort": "none"}}),
    "response without its reasoning": (RESPONSES, {**RESPONSE, "include_reasoning": False}),
    "response with a schema": (
        RESPONSES,
        {**PLAIN_RESPONSE, "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
    ),
    "response to the result of a tool": (RESPONSES, {**PLAIN_RESPONSE, "tools": [FLAT], "input": RESPONSE_CALLED}),
    "message": (MESSAGES, {**MESSAGE, "chat_template_kwargs": {"enable_thinking": False}}),
    "message with reasoning": (MESSAGES, MESSAGE),
    "message with a tool": (MESSAGES, MESSAGE_TOOL),
    "message with a named tool": (MESSAGES, {**MESSAGE_TOOL, **UNTHINKING, "tool_choice": {"type": "tool", "name": "get_current_weather"}}),
    "message with a tool cut short": (MESSAGES, {**MESSAGE_TOOL, **UNTHINKING, "tool_choice": {"type": "any"}, "max_tokens": 12}),
    "message to the result of a tool": (MESSAGES, {**MESSAGE_TOOL, **UNTHINKING, "messages": MESSAGE_CALLED}),
    "message without thinking": (MESSAGES, {**MESSAGE, "thinking": {"type": "disabled"}}),
    "message cut short": (MESSAGES, {**MESSAGE, "max_tokens": 2}),
    "tokens of a message": ("/v1/messages/count_tokens", {"model": "tiny", "messages": user("Who are you?")}),
    "tokens of a prompt": ("/tokenize", {"model": "tiny", "prompt": "Once upon a time"}),
    "tokens of a prompt with their texts": ("/tokenize", {"prompt": "Once upon a time", "return_token_strs": True}),
    "tokens of messages": ("/tokenize", {"messages": user("Who are you?")}),
    "text of tokens": ("/detokenize", {"tokens": [300, 301]}),
}
STREAMS: Final[dict[str, tuple[str, Body]]] = {
    name: (path, {**body, **({"stream": True} if path in (RESPONSES, MESSAGES) else USAGE)})
    for name, (path, body) in REQUESTS.items()
    if path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
} | {
    "chat without usage": (CHAT, {**PLAIN_QUESTION, "stream": True}),
    "chat with running usage": (CHAT, {**QUESTION, **RUNNING}),
    "completion without usage": (COMPLETIONS, {**COMPLETION, "stream": True}),
    "completion with running usage": (COMPLETIONS, {**COMPLETION, **RUNNING}),
    "chat that fails as a stream: too many log probabilities": (CHAT, {**PLAIN_QUESTION, **USAGE, "logprobs": True, "top_logprobs": 50}),
    "chat that fails as a stream: unknown tokens": (CHAT, {**PLAIN_QUESTION, **USAGE, "logit_bias": {"999999": 1}}),
    "completion that fails as a stream": (COMPLETIONS, {**COMPLETION, **USAGE, "logprobs": 50}),
    "message that fails as a stream": (
        MESSAGES,
        {**MESSAGE, "stream": True, "output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}},
    ),
}
REFUSALS: Final[dict[str, tuple[str, Body]]] = {
    "an unknown model": (CHAT, {**PLAIN_QUESTION, "model": "other"}),
    "an unknown model for completions": (COMPLETIONS, {**COMPLETION, "model": "other"}),
    "an unknown model for responses": (RESPONSES, {**RESPONSE, "model": "other"}),
    "an unknown model for messages": (MESSAGES, {**MESSAGE, "model": "other"}),
    "an unknown model for tokens": ("/tokenize", {"model": "other", "prompt": "a"}),
    "no messages": (CHAT, {"model": "tiny"}),
    "a prompt and no messages": (CHAT, {"model": "tiny", "prompt": "Hello"}),
    "a type that is wrong": (CHAT, {**PLAIN_QUESTION, "max_tokens": "many"}),
    "a stream that is no boolean": (CHAT, {**PLAIN_QUESTION, "stream": "perhaps"}),
    "stream options without a stream": (CHAT, {**PLAIN_QUESTION, "stream_options": {"include_usage": True}}),
    "stream options without a stream for completions": (COMPLETIONS, {**COMPLETION, "stream_options": {"include_usage": True}}),
    "too many log probabilities": (CHAT, {**PLAIN_QUESTION, "logprobs": True, "top_logprobs": 50}),
    "top_logprobs without logprobs": (CHAT, {**PLAIN_QUESTION, "top_logprobs": 2}),
    "top_logprobs that are negative": (CHAT, {**PLAIN_QUESTION, "logprobs": True, "top_logprobs": -2}),
    "top_logprobs that are text": (CHAT, {**PLAIN_QUESTION, "logprobs": True, "top_logprobs": "two"}),
    "unknown tokens in logit_bias": (CHAT, {**PLAIN_QUESTION, "logit_bias": {"999999": 1}}),
    "two choices without chance": (CHAT, {**PLAIN_QUESTION, "n": 2}),
    "no choices": (CHAT, {**PLAIN_QUESTION, "n": 0}),
    "too many choices": (CHAT, {**PLAIN_QUESTION, "temperature": 1, "n": 100_000}),
    "a temperature that is too high": (CHAT, {**PLAIN_QUESTION, "temperature": 5}),
    "a temperature below zero": (CHAT, {**PLAIN_QUESTION, "temperature": -1}),
    "a top_p of zero": (CHAT, {**PLAIN_QUESTION, "top_p": 0}),
    "a top_k below zero": (CHAT, {**PLAIN_QUESTION, "top_k": -2}),
    "a minimum of tokens above the limit": (CHAT, {**PLAIN_QUESTION, "min_tokens": 50, "max_tokens": 5}),
    "a penalty that is too high": (CHAT, {**PLAIN_QUESTION, "presence_penalty": 3}),
    "no tokens at all": (CHAT, {**PLAIN_QUESTION, "max_tokens": 0}),
    "more tokens than the context": (CHAT, {**PLAIN_QUESTION, "max_tokens": 80000}),
    "more completion tokens than the context": (CHAT, {**PLAIN_QUESTION, "max_completion_tokens": 80000}),
    "more tokens than the context for completions": (COMPLETIONS, {**COMPLETION, "max_tokens": 80000}),
    "more tokens than the context for responses": (RESPONSES, {**RESPONSE, "max_output_tokens": 80000}),
    "a prompt that is too long": (CHAT, {**PLAIN_QUESTION, "messages": user("word " * 3000)}),
    "a prompt that is too long, streamed": (CHAT, {**PLAIN_QUESTION, "stream": True, "messages": user("word " * 3000)}),
    "a prompt that is far too long": (CHAT, {**PLAIN_QUESTION, "messages": user("word " * 200_000)}),
    "a prompt that is too long for completions": (COMPLETIONS, {**COMPLETION, "prompt": "word " * 3000}),
    "a prompt that is too long for messages": (MESSAGES, {**MESSAGE, "messages": user("word " * 3000)}),
    "no tools in a list": (CHAT, {**PLAIN_QUESTION, "tools": []}),
    "a tool choice without tools": (CHAT, {**PLAIN_QUESTION, "tool_choice": "auto"}),
    "a tool choice that is none of the tools": (CHAT, {**TOOL, "tool_choice": {"type": "function", "function": {"name": "other"}}}),
    "a tool choice that is unknown": (CHAT, {**TOOL, "tool_choice": "always"}),
    "a tool choice without a function": (CHAT, {**TOOL, "tool_choice": {"type": "function"}}),
    "a tool choice without a name": (CHAT, {**TOOL, "tool_choice": {"type": "function", "function": {}}}),
    "a schema that is missing": (CHAT, {**PLAIN_QUESTION, "response_format": {"type": "json_schema"}}),
    "two constraints": (CHAT, {**PLAIN_QUESTION, "structured_outputs": {"regex": "a", "choice": ["a"]}}),
    "five stop strings": (CHAT, {**PLAIN_QUESTION, "stop": ["a", "b", "c", "d", "e"]}),
    "an empty stop string": (CHAT, {**PLAIN_QUESTION, "stop": [""]}),
    "a salt that may not be": (CHAT, {**PLAIN_QUESTION, "cache_salt": "a/b"}),
    "a salt that is no text": (CHAT, {**PLAIN_QUESTION, "cache_salt": 5}),
    "log probabilities of a prompt on a stream": (CHAT, {**PLAIN_QUESTION, "stream": True, "prompt_logprobs": 1}),
    "a continued message with a prompt for the next": (
        CHAT,
        {**PLAIN_QUESTION, "continue_final_message": True, "add_generation_prompt": True},
    ),
    "many types that are wrong": (CHAT, {**PLAIN_QUESTION, "logit_bias": {str(token): "many" for token in range(12)}}),
    "a template": (CHAT, {**PLAIN_QUESTION, "chat_template": "x"}),
    "a priority that is too large": (CHAT, {**PLAIN_QUESTION, "priority": 2**63}),
    "a priority that is no number, for responses": (RESPONSES, {**RESPONSE, "priority": "high"}),
    "an effort that is unknown": (CHAT, {**PLAIN_QUESTION, "reasoning_effort": "huge"}),
    "no prompt": (COMPLETIONS, {"model": "tiny"}),
    "no input": (RESPONSES, {"model": "tiny"}),
    "a response before it that is unknown": (RESPONSES, {**RESPONSE, "previous_response_id": "resp_0"}),
    "a response in the background": (RESPONSES, {**RESPONSE, "background": True}),
    "a response in the background that is not stored": (RESPONSES, {**RESPONSE, "background": True, "store": False}),
    "a template of a prompt": (RESPONSES, {**RESPONSE, "prompt": {"id": "pmpt_1"}}),
    "required tools without tools for responses": (RESPONSES, {**RESPONSE, "tool_choice": "required"}),
    "a named tool without tools for responses": (RESPONSES, {**RESPONSE, "tool_choice": {"type": "function", "name": "other"}}),
    "no max_tokens for messages": (MESSAGES, {"model": "tiny", "messages": user("Hello")}),
    "max_tokens below one for messages": (MESSAGES, {**MESSAGE, "max_tokens": 0}),
    "an empty model for messages": (MESSAGES, {**MESSAGE, "model": ""}),
    "a temperature that is too high for messages": (MESSAGES, {**MESSAGE, "temperature": 5}),
    "tokens that are no numbers": ("/detokenize", {"tokens": ["a"]}),
    "a batch without conversations": (BATCH, {**PLAIN_QUESTION, "messages": []}),
    "a batch with an empty conversation": (BATCH, {**PLAIN_QUESTION, "messages": [[]]}),
    "a batch that is one conversation": (BATCH, PLAIN_QUESTION),
    "a batch with two choices": (BATCH, {**PLAIN_QUESTION, "messages": [user("Hello")], "n": 2}),
    "an unknown route": ("/v1/nothing", {}),
    **{f"{path} without its flag": (path, {}) for path in SCALE_OUT},
}
RAW: Final[dict[str, tuple[bytes, str]]] = {
    "no JSON": (b'{"model": tiny}', "application/json"),
    "half of a JSON": (b'{"model": ', "application/json"),
    "a list": (b"[]", "application/json"),
    "nothing": (b"", "application/json"),
    "no UTF-8": (b'{"model": "\xff"}', "application/json"),
    "too deep": (b"[" * 100_000, "application/json"),
    "an endless number": (b'{"model": "tiny", "n": ' + b"9" * 5000 + b"}", "application/json"),
    "an infinite temperature": (json.dumps({**PLAIN_QUESTION, "temperature": math.inf}).encode(), "application/json"),
    "a form": (b"model=tiny", "application/x-www-form-urlencoded"),
    "text": (json.dumps(PLAIN_QUESTION).encode(), "text/plain"),
}
ENCODED: Final[dict[str, bytes]] = {
    "UTF-16": json.dumps(PLAIN_QUESTION).encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + json.dumps(PLAIN_QUESTION).encode(),
    "the last of two models": json.dumps(PLAIN_QUESTION).encode()[:-1] + b', "model": "other", "mod\\u0065l": "tiny"}',
    "NaN in an unknown field": json.dumps(PLAIN_QUESTION).encode()[:-1] + b', "other": NaN}',
}


def shape(value: Any, name: str = "") -> Any:
    """Keys and types; a list has the shape of all its elements; what depends on the model alone is any text."""
    if name in BY_MODEL and (value is None or isinstance(value, str)):
        return "text or null"
    if name == "top_logprobs" and isinstance(value, list) and value and "token" not in value[0]:
        return [len(tokens) for tokens in value]
    if isinstance(value, dict):
        return {key: shape(item, key) for key, item in value.items()}
    if isinstance(value, list):
        shapes = [shape(item) for item in value]
        return [element for at, element in enumerate(shapes) if element not in shapes[:at]]
    return "number" if type(value) in (int, float) else type(value).__name__


def events(text: str) -> list[tuple[str, Any]]:
    """Each event's name (none is empty) and data, JSON read."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


def kind(name: str, data: Any) -> str:
    """Return the kind of an event: its name, or the fields of a chunk."""
    if name or isinstance(data, str):
        return name or data
    if "error" in data or not data["choices"]:
        return "error" if "error" in data else "usage"
    choice = data["choices"][0]
    if choice["finish_reason"] is not None:
        return f"{choice['index']} finish {choice['finish_reason']}"
    fields = sorted(choice["delta"]) if "delta" in choice else ["text"]
    return f"{choice['index']} {' '.join(fields) or 'empty'}"


def summary(text: str) -> list[str]:
    """The kinds of a stream's events in their order, runs as one; the choices one after the other."""
    kinds = [kind(*event) for event in events(text)]
    kinds.sort(key=lambda each: each[0] if each[0].isdigit() else ("~" if each in ("usage", "[DONE]", "error") else ""))
    return [each for at, each in enumerate(kinds) if at == 0 or each != kinds[at - 1]]


def frames(text: str) -> dict[str, Any]:
    """The shapes of a stream's events by kind; how a model ends a sentence with its finish is its own."""
    found: dict[str, Any] = {}
    for name, data in events(text):
        if isinstance(data, dict) and data.get("choices") and "finish" in kind(name, data):
            data["choices"][0].pop("delta", None)
        found.setdefault(kind(name, data), shape(data))
    return found


def worded(text: str) -> str:
    """A message with its numbers and ids left out."""
    return re.sub(r"\d+", "0", re.sub(r"[0-9a-f]{16,}", "ID", text))


def both(clients: tuple[httpx2.Client, httpx2.Client], path: str, **request: Any) -> tuple[httpx2.Response, httpx2.Response]:
    real, simulated = (client.post(path, **request) for client in clients)
    assert (simulated.status_code, simulated.headers["content-type"]) == (real.status_code, real.headers["content-type"]), simulated.text
    return real, simulated


@pytest.mark.parametrize(("path", "body"), REQUESTS.values(), ids=REQUESTS)
def test_responses_have_the_same_fields(clients: tuple[httpx2.Client, httpx2.Client], path: str, body: Body) -> None:
    real, simulated = both(clients, path, json=body)
    assert real.status_code == 200
    assert shape(simulated.json()) == shape(real.json())


@pytest.mark.parametrize(("path", "body"), STREAMS.values(), ids=STREAMS)
def test_streams_have_the_same_frames(clients: tuple[httpx2.Client, httpx2.Client], path: str, body: Body) -> None:
    for _ in range(5):  # an engine that is behind puts several tokens into one event
        real, simulated = both(clients, path, json=body)
        if summary(simulated.text) == summary(real.text) and frames(simulated.text) == frames(real.text):
            break
    assert summary(simulated.text) == summary(real.text)
    assert frames(simulated.text) == frames(real.text)


@pytest.mark.parametrize(("path", "body"), REFUSALS.values(), ids=REFUSALS)
def test_refusals_are_worded_the_same(clients: tuple[httpx2.Client, httpx2.Client], path: str, body: Body) -> None:
    real, simulated = both(clients, path, json=body)
    assert real.status_code >= 400
    assert worded(simulated.text) == worded(real.text)


@pytest.mark.parametrize(("content", "media_type"), RAW.values(), ids=RAW)
def test_bodies_that_cannot_be_read_are_refused_the_same(
    clients: tuple[httpx2.Client, httpx2.Client], content: bytes, media_type: str
) -> None:
    real, simulated = both(clients, CHAT, content=content, headers={"content-type": media_type})
    assert simulated.json() == real.json()


@pytest.mark.parametrize("content", ENCODED.values(), ids=ENCODED)
def test_odd_bodies_are_read_the_same(clients: tuple[httpx2.Client, httpx2.Client], content: bytes) -> None:
    real, simulated = both(clients, CHAT, content=content, headers={"content-type": "application/json"})
    assert real.status_code == 200
    assert shape(simulated.json()) == shape(real.json())


@pytest.mark.parametrize(
    "path", ["/health", "/ping", "/version", "/load", "/v1/models", "/v1/responses/resp_0", "/nothing", "/v1/chat/completions"]
)
def test_what_is_read_is_the_same(clients: tuple[httpx2.Client, httpx2.Client], path: str) -> None:
    real, simulated = (client.get(path) for client in clients)
    assert simulated.status_code == real.status_code
    assert simulated.headers.get("content-type") == real.headers.get("content-type")
    assert simulated.headers.get("allow") == real.headers.get("allow")
    assert not real.content or shape(simulated.json()) == shape(real.json())


def test_the_id_is_the_request_id(clients: tuple[httpx2.Client, httpx2.Client]) -> None:
    real, simulated = both(clients, CHAT, json=PLAIN_QUESTION, headers={"x-request-id": "mine"})
    assert simulated.json()["id"] == real.json()["id"] == "chatcmpl-mine"


def test_ids_have_the_same_form(clients: tuple[httpx2.Client, httpx2.Client]) -> None:
    for path, body in ((CHAT, PLAIN_QUESTION), (COMPLETIONS, COMPLETION), (RESPONSES, RESPONSE), (MESSAGES, MESSAGE)):
        ids = [re.sub("[0-9a-f]", "0", response.json()["id"]) for response in both(clients, path, json=body)]
        assert ids[0] == ids[1]


def test_metrics_have_the_same_names_types_and_labels(clients: tuple[httpx2.Client, httpx2.Client]) -> None:
    real, simulated = (client.get("/metrics") for client in clients)
    assert simulated.headers["content-type"] == real.headers["content-type"]
    theirs = _series(real.text)
    for name, labels in _series(simulated.text).items():
        assert theirs.get(name) == labels, name


def test_counters_count_the_same(clients: tuple[httpx2.Client, httpx2.Client]) -> None:
    """A prompt is counted for each of its choices, and a finished request is in the totals and in the histograms."""
    body = {**PLAIN_QUESTION, "temperature": 1, "n": 3, "max_tokens": 5}
    for client in clients:
        before = _counters(client)
        usage = client.post(CHAT, json=body).json()["usage"]
        prompt, completion = 3 * usage["prompt_tokens"], usage["completion_tokens"]
        _until_counted(client, before, Growth(prompt, completion, prompt, completion, 1))


def test_an_aborted_request_is_in_the_totals_alone(real: vllm.Server, clients: tuple[httpx2.Client, httpx2.Client]) -> None:
    for client, engine in zip(clients, (vllm.process_of(psutil.Process(real.pid), "Worker"), None), strict=True):
        attempted(partial(_check_abort, client, engine))


def _check_abort(client: httpx2.Client, engine: psutil.Process | None, _: int) -> None:
    """Disconnect from a response, and compare the counters. ``engine``: the process to hold, or it may finish before the disconnect.

    Raises:
        NotAchieved: the engine had generated all tokens before the client disconnected.
    """
    before = _settled_counters(client)

    def is_counted() -> bool:
        return _counters(client).responses == (before.responses or 0) + 1

    if engine is None:
        usage = _first_usage(client)
    else:
        with held(engine) as work_until, ThreadPoolExecutor(1) as pool:
            first = pool.submit(_first_usage, client)
            work_until(first.done)
            usage = first.result()
            wait_for(is_counted)
    wait_for(lambda: _counters(client).unfinished == 0 and is_counted())
    after = _settled_counters(client)
    if engine is not None and after.completion - before.completion >= LONG:
        raise NotAchieved
    assert after.prompt - before.prompt == usage["prompt_tokens"]
    assert after.completion - before.completion >= usage["completion_tokens"]
    assert (after.finished_prompt, after.finished_completion) == (before.finished_prompt, before.finished_completion)


def _first_usage(client: httpx2.Client) -> dict[str, int]:
    """Start a long response, disconnect after its first running usage, and return that usage."""
    body = {**QUESTION, **RUNNING, "ignore_eos": True, "max_tokens": LONG, "simulate": {"tokens": LONG, "tokens_per_second": 50}}
    with client.stream("POST", CHAT, json=body) as response:
        line = next(line for line in response.iter_lines() if '"completion_tokens"' in line)
    usage: dict[str, int] = json.loads(line.removeprefix("data: "))["usage"]
    return usage


def _counters(client: httpx2.Client) -> EngineCounters:
    found = parse_counters(client.get("/metrics").content)
    assert found is not None and found.started > 0
    return found


_EQUAL_READINGS = 20


def _settled_counters(client: httpx2.Client) -> EngineCounters:
    """Return the counters when they have stayed equal for some readings: vLLM counts a moment after its response."""
    last, equal = _counters(client), 0

    def settled() -> bool:
        nonlocal last, equal
        found = _counters(client)
        last, equal = found, equal + 1 if found == last else 0
        return equal >= _EQUAL_READINGS

    wait_for(settled, 60)
    return last


class Growth(NamedTuple):
    """The growth of a server's counters."""

    prompt: int
    completion: int
    finished_prompt: int
    finished_completion: int
    responses: int


def _until_counted(client: httpx2.Client, before: EngineCounters, expected: Growth) -> None:
    """Wait until the counters have grown as expected; vLLM counts a moment after its response."""

    def grown() -> Growth:
        after = _counters(client)
        return Growth(*(getattr(after, name) - getattr(before, name) for name in Growth._fields))

    wait_for(lambda: grown() == expected, why=lambda: f"{grown()}, not {expected}")


def _series(text: str) -> dict[str, Any]:
    """Return the type and the names of the labels of vLLM's series, and of those of its API server that the gateway reads."""
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    found: dict[str, Any] = {}
    for name, labels in re.findall(r"^(vllm:\w+|http_requests_total|process_start_time_seconds)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        family = name if name in types else re.sub(r"_(bucket|count|sum|created)$", "", name)
        found[name] = (types.get(family), sorted(re.findall(r"(\w+)=", labels)))
    return found
