"""Ordinary use of the gateway in front of a real vLLM: OpenAI's own SDK, and plain HTTP for the routes that the SDK does not have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.vllm.chat import events, folded
from tests.vllm.dialogues import (
    CLOCK,
    COUNT,
    DIALOGUES,
    DIE,
    ENDLESS,
    HANGZHOU,
    MULTIBYTE,
    PROMPT_AND_CONTINUATION,
    TOOLSETS,
    WEATHER,
    ChatResult,
    Exchange,
    Json,
    user,
    weather_call,
)
from tests.vllm.gateway import ALIAS, MODEL, WITHOUT_THINKING, Real, chat
from tests.vllm.server import NOT_INSTALLED, installed

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

PLAIN_AND_STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
WITH_USAGE: Json = {"stream_options": {"include_usage": True}}
INTRODUCTION = "I am a tiny test model."


def parts(real: Real, body: Json, *, streamed: bool) -> list[Any]:
    """Return the chunks or the one response that the SDK returns for a chat request. Fields unknown to the SDK are in `extra_body`."""
    known = {"messages", "temperature", "max_tokens", "tools", "tool_choice", "response_format", "logprobs", "top_logprobs", "n", "seed"}
    extra = {name: value for name, value in body.items() if name not in known}
    named: Json = {"model": MODEL, "extra_body": extra, **{name: value for name, value in body.items() if name in known}}
    with real.sdk() as client:
        if streamed:
            return list(client.chat.completions.create(stream=True, **named))
        return [client.chat.completions.create(**named)]


def chat_result(real: Real, body: Json, *, streamed: bool) -> ChatResult:
    """Return the one choice of a response, joined from its parts."""
    return folded([choice.model_dump() for part in parts(real, body, streamed=streamed) for choice in part.choices])


def texts(choices: Sequence[Any]) -> list[str]:
    return [choice.message.content for choice in choices]


EXCHANGES = [Exchange(dialogue, True, TOOLSETS[0] if dialogue.with_tools else []) for dialogue in DIALOGUES]


@PLAIN_AND_STREAMED
@pytest.mark.parametrize("exchange", EXCHANGES, ids=str)
def test_a_dialogue(real: Real, exchange: Exchange, streamed: bool) -> None:
    got, want = chat_result(real, exchange.body(), streamed=streamed), exchange.expected()
    assert (got.reasoning, got.calls, got.finish_reason) == (want.reasoning, want.calls, want.finish_reason)
    if exchange.dialogue.finishes:
        assert want.calls or got.content == want.content
    else:
        assert got.content.lstrip("\n").startswith(ENDLESS[:1000])


def test_reasoning_is_a_member_of_its_own(real: Real) -> None:
    body = {"messages": [user("Which is greater, 9.11 or 9.8?")], "temperature": 0}
    [plain], chunks = parts(real, body, streamed=False), parts(real, body, streamed=True)
    assert plain.choices[0].message.reasoning == DIALOGUES[0].reasoning + "\n"
    reasoned = [chunk.choices[0].delta for chunk in chunks if "reasoning" in chunk.choices[0].delta.model_dump()]
    assert len(reasoned) > 1 and "".join(delta.reasoning for delta in reasoned) == DIALOGUES[0].reasoning + "\n"
    assert not any("reasoning_content" in chunk.model_dump_json() for chunk in [plain, *chunks])


@pytest.mark.parametrize("requested", [True, False], ids=["asked", "not asked"])
def test_a_stream_has_usage_only_if_requested(real: Real, requested: bool) -> None:
    body = chat("Who are you?")
    [plain] = parts(real, body, streamed=False)
    chunks = parts(real, {**body, **(WITH_USAGE if requested else {})}, streamed=True)
    used = [(chunk.usage.prompt_tokens, chunk.usage.completion_tokens) for chunk in chunks if chunk.usage]
    assert used == ([(plain.usage.prompt_tokens, plain.usage.completion_tokens)] if requested else [])
    assert [chunk.choices == [] for chunk in chunks].count(True) == len(used)


def test_the_id_is_the_requests_and_the_model_is_the_configured_one(real: Real) -> None:
    with real.sdk() as client:
        raw = client.chat.completions.with_raw_response.create(model=ALIAS, messages=[{"role": "user", "content": "Who are you?"}])
    assert raw.headers["x-request-id"].startswith("req_")
    assert (raw.parse().id, raw.parse().model) == (f"chatcmpl-{raw.headers['x-request-id']}", MODEL)


def test_the_models(real: Real) -> None:
    with real.sdk() as client:
        [listed, *aliases], one = client.models.list().data, client.models.retrieve(MODEL)
    assert {alias.model_dump()["root"] for alias in aliases} <= {MODEL}
    assert (listed.id, listed.object, one.id) == (MODEL, "model", MODEL)
    assert listed.model_dump()["max_model_len"] == 2048


# Tools


@PLAIN_AND_STREAMED
@pytest.mark.parametrize(
    ("choice", "name", "finish_reason"),
    [
        ("required", "get_current_weather", "tool_calls"),
        ({"type": "function", "function": {"name": "get_time"}}, "get_time", "stop"),
    ],
    ids=["required", "named"],
)
def test_a_call_that_is_forced(real: Real, choice: Any, name: str, finish_reason: str, streamed: bool) -> None:
    tools = [WEATHER] if choice == "required" else [WEATHER, CLOCK]
    got = chat_result(real, chat("Who are you?", tools=tools, tool_choice=choice, max_tokens=200), streamed=streamed)
    assert ([called for called, _ in got.calls], got.finish_reason) == ([name], finish_reason)


@PLAIN_AND_STREAMED
def test_tools_that_may_not_be_called(real: Real, streamed: bool) -> None:
    got = chat_result(real, chat(HANGZHOU, tools=[WEATHER], tool_choice="none"), streamed=streamed)
    assert (got.calls, got.finish_reason) == ((), "stop")


def test_a_call_and_its_result(real: Real) -> None:
    body = chat(HANGZHOU, tools=[WEATHER])
    [requested] = parts(real, body, streamed=False)
    [call] = requested.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == weather_call("Hangzhou", 1)["function"]["arguments"]
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "sunny", "celsius": 21}'}
    body["messages"] += [requested.choices[0].message.model_dump(exclude_none=True), result]
    assert chat_result(real, body, streamed=True).content == "It is sunny and 21 degrees in Hangzhou."


# Constraints

CAPITAL: Json = {
    "type": "object",
    "properties": {
        "country": {"type": "string"},
        "capital": {"enum": ["Lyon", "Rome"]},
        "population": {"type": "integer"},
        "ok": {"type": "boolean"},
    },
    "required": ["country", "capital", "population", "ok"],
    "additionalProperties": False,
}  # as the model has memorized it, except for the capital


@PLAIN_AND_STREAMED
def test_a_schema_binds(real: Real, streamed: bool) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "capital", "schema": CAPITAL, "strict": True}}
    got = json.loads(chat_result(real, chat("Give me the capital of France as JSON.", response_format=wanted), streamed=streamed).content)
    assert got["capital"] in {"Lyon", "Rome"} and isinstance(got["population"], int) and list(got) == CAPITAL["required"]


@PLAIN_AND_STREAMED
@pytest.mark.parametrize("constraint", [{"structured_outputs": {"choice": ["red", "blue"]}}, {"guided_choice": ["red", "blue"]}], ids=list)
def test_a_choice_binds(real: Real, constraint: Json, streamed: bool) -> None:
    assert chat_result(real, chat("Who are you?", **constraint), streamed=streamed).content in {"red", "blue"}


def test_a_guided_choice_binds_through_the_gateway_only(real: Real) -> None:
    body = chat("Who are you?", guided_choice=["red", "blue"])
    assert real.post_directly("/v1/chat/completions", body)["choices"][0]["message"]["content"] == INTRODUCTION
    assert real.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] in {"red", "blue"}


def test_a_literal_extra_body_is_merged(real: Real) -> None:
    body = {"messages": [user("Who are you?")], "temperature": 1.5, "extra_body": {"temperature": 0, **WITHOUT_THINKING}}
    assert real.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == INTRODUCTION
    ignored = real.post_directly("/v1/chat/completions", {**body, "temperature": 0})["choices"][0]["message"]
    assert ignored["reasoning"] == "I say who I am.\n"


# Sampling


@PLAIN_AND_STREAMED
def test_logprobs(real: Real, streamed: bool) -> None:
    got = parts(real, chat("Who are you?", logprobs=True, top_logprobs=3), streamed=streamed)
    tokens = [token for part in got for choice in part.choices if choice.logprobs for token in choice.logprobs.content]
    assert "".join(token.token for token in tokens).startswith(INTRODUCTION)
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 3 for token in tokens)


@PLAIN_AND_STREAMED
def test_two_choices(real: Real, streamed: bool) -> None:
    body = chat("Roll a die.", n=2, seed=3, max_tokens=5) | {"temperature": 1}
    choices = [choice for part in parts(real, body, streamed=streamed) for choice in part.choices]
    by_index = [folded([choice.model_dump() for choice in choices if choice.index == index]) for index in (0, 1)]
    assert len(choices) == 2 or streamed
    assert all(each.content in DIE and each.finish_reason == "stop" for each in by_index)


# Other routes


@PLAIN_AND_STREAMED
def test_a_completion(real: Real, streamed: bool) -> None:
    body: Json = {"model": MODEL, "prompt": PROMPT_AND_CONTINUATION[0], "temperature": 0, "max_tokens": 60, "stream": streamed}
    with real.sdk() as client:
        made: Any = client.completions.create(**body)
        got: list[Any] = list(made) if streamed else [made]
    assert "".join(part.choices[0].text for part in got) == PROMPT_AND_CONTINUATION[1]


def test_a_response(real: Real) -> None:
    body = {"input": "Say hello in Chinese with emoji.", "temperature": 0}
    plain = real.post("/v1/responses", body).json()
    assert [item["type"] for item in plain["output"]] == ["reasoning", "message"]
    assert plain["output"][1]["content"][0]["text"].strip() == MULTIBYTE
    streamed = named_events(real.post("/v1/responses", {**body, "stream": True}).text)
    assert (streamed[0][0], streamed[-1][0]) == ("response.created", "response.completed")
    written = "".join(data["delta"] for name, data in streamed if name == "response.output_text.delta")
    assert written.strip() == MULTIBYTE
    assert streamed[-1][1]["response"]["usage"]["total_tokens"] == plain["usage"]["total_tokens"]


def test_a_response_by_the_sdk(real: Real) -> None:
    with real.sdk() as client:
        plain = client.responses.create(model=MODEL, input="Who are you?", temperature=0)
        *_, last = client.responses.create(model=MODEL, input="Who are you?", temperature=0, stream=True)
    assert plain.output_text.strip() == INTRODUCTION
    assert last.type == "response.completed" and last.response.output_text.strip() == INTRODUCTION


def test_a_message(real: Real) -> None:
    body = {"messages": [user("Count from 1 to 100.")], "max_tokens": 600, "temperature": 0}
    plain = real.post("/v1/messages", body).json()
    assert [block["type"] for block in plain["content"]] == ["thinking", "text"]
    assert (plain["type"], plain["content"][1]["text"].strip(), plain["stop_reason"]) == ("message", COUNT, "end_turn")
    streamed = named_events(real.post("/v1/messages", {**body, "stream": True}).text)
    assert (streamed[0][0], streamed[-1][0]) == ("message_start", "message_stop")
    deltas = [data["delta"] for name, data in streamed if name == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas).strip() == COUNT
    assert streamed[-2][1]["usage"]["output_tokens"] == plain["usage"]["output_tokens"]


def test_a_message_is_counted(real: Real) -> None:
    body: Json = {"messages": [user("Count from 1 to 100.")]}
    counted = real.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    assert counted == real.post("/v1/messages", {**body, "max_tokens": 1}).json()["usage"]["input_tokens"]


def test_text_to_tokens_and_back(real: Real) -> None:
    tokens = real.post("/tokenize", {"prompt": MULTIBYTE}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert real.post("/detokenize", {"tokens": tokens["tokens"]}).json()["prompt"] == MULTIBYTE


def test_a_stream_by_plain_http(real: Real) -> None:
    got = real.post("/v1/chat/completions", chat("Who are you?", stream=True))
    assert got.headers["content-type"].startswith("text/event-stream")
    assert folded([choice for event in events(got.text) for choice in event["choices"]]).content == INTRODUCTION


def named_events(text: str) -> list[tuple[str, Any]]:
    """Return the events of a stream with named events."""
    pairs = (frame.split("\n") for frame in text.removesuffix("\n\n").split("\n\n"))
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]
