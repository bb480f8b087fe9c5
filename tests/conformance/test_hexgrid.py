"""The API with bearer keys, on Llama and on Qwen: authorization, model names, and the effect of each parameter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from gateway.auth import keys
from tests.conformance.examples import (
    ALIASES,
    CHAT,
    DEPLOYED,
    KEY,
    LLAMA,
    NOT_THINKING,
    OTHER_LLAMAS,
    QWEN,
    THINKING,
    Json,
    user,
    weather,
)
from tests.conformance.shapes import LOGPROBS, lacks, stream_lacks
from tests.conformance.stage import Stage, on, simulated
from tests.support.process import Gateway, configuration, gateway
from tests.vllm.chat import folded, send_chat
from tests.vllm.dialogues import CALLED, DIE, HANGZHOU, RESULT, SUNNY, TOOLSETS, WEATHER, ChatResult, on_the_wire

PLAIN_AND_STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
EVERYWHERE = on("simulator", "qwen")
INTRODUCTION: Json = {"messages": [user("Who are you?")], "temperature": 0, **NOT_THINKING}
WEATHER_REQUEST: Json = {"messages": [user(HANGZHOU)], "tools": [WEATHER], "temperature": 0, "max_tokens": 300, **NOT_THINKING}


def completion(stage: Stage, body: Json, *, streamed: bool) -> ChatResult:
    """Return the one choice of a response, joined if it was streamed."""
    with stage.client() as client:
        return send_chat(client, {"model": stage.model, **body}, streamed=streamed)


# Keys and names


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that requires a key."""
    principals = [
        {"id": "all", "hash": keys.hash_of(KEY)},
        {"id": "llama", "hash": keys.hash_of("llama-only"), "models": ["meta-llama/*"]},
        {"id": "old", "hash": keys.hash_of("expired"), "expires": "2020-01-01"},
    ]
    config = {**configuration(simulated(LLAMA, "llama"), simulated(QWEN, "qwen3")), "keys": principals}
    with gateway(tmp_path_factory.mktemp("keyed"), config) as one:
        yield one


@pytest.mark.parametrize(
    ("authorization", "model", "status", "code"),
    [
        (f"Bearer {KEY}", QWEN, 200, None),
        (f"bearer {KEY}", QWEN, 200, None),
        (None, QWEN, 401, "missing_api_key"),
        ("Bearer not-needed", QWEN, 401, "invalid_api_key"),
        ("Bearer sk-wrong", QWEN, 401, "invalid_api_key"),
        ("Bearer expired", QWEN, 401, "expired_api_key"),
        (f"Basic {KEY}", QWEN, 401, "invalid_api_key"),
        ("Bearer llama-only", LLAMA, 200, None),
        ("Bearer llama-only", QWEN, 404, "model_not_found"),
    ],
)
def test_bearer_keys(keyed: Gateway, authorization: str | None, model: str, status: int, code: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    response = httpx2.post(keyed.url + CHAT, json={**INTRODUCTION, "model": model}, headers=headers, timeout=60)
    assert (response.status_code, response.json().get("error", {}).get("code")) == (status, code)
    assert status != 401 or response.headers["www-authenticate"] == "Bearer"


@on("simulator", "llama")
@pytest.mark.parametrize("name", [LLAMA, *OTHER_LLAMAS, DEPLOYED])
def test_exact_ids_and_aliases(stage: Stage, name: str) -> None:
    response = stage.post({**INTRODUCTION, "model": name})
    assert (response.status_code, response.json()["model"]) == (200, LLAMA)


@on("simulator", "llama")
def test_models_are_listed_by_their_exact_ids(stage: Stage) -> None:
    with stage.client() as client:
        listed = client.get("/v1/models").json()
        assert client.get(f"/v1/models/{LLAMA}").json()["id"] == client.get(f"/v1/models/{DEPLOYED}").json()["id"] == LLAMA
    shown = {each["id"]: each for each in listed["data"] if "root" not in each}
    assert lacks(listed, {"object": "list", "data": [{"id": str, "object": "model", "created": int, "owned_by": str}]}) == []
    assert shown[LLAMA]["aliases"] == ALIASES and set(shown) == ({LLAMA} if stage.real else {LLAMA, QWEN})


# Parameters

PARAMETERS: Json = {
    "temperature": 0.3,
    "top_p": 0.85,
    "top_k": 20,
    "min_p": 0.05,
    "n": 2,
    "max_tokens": 24,
    "max_completion_tokens": 23,
    "min_tokens": 2,
    "stop": ["\n\n\n"],
    "stream": True,
    "presence_penalty": 0.2,
    "frequency_penalty": -0.3,
    "repetition_penalty": 1.05,
    "logprobs": True,
    "logit_bias": {"5": 1.5},
    "seed": 1234,
    "response_format": {"type": "text"},
    "tools": weather({}),
    "user": "user-1",
    "metadata": {"ticket": "7"},
    "ignore_eos": False,
    "chat_template_kwargs": {"enable_thinking": False},
    "include_reasoning": False,
    "structured_outputs": {"choice": ["yes", "no"]},
}
WITH_OTHERS: Json = {
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "tool_choice": {"tools": weather({}), "tool_choice": "required"},
    "parallel_tool_calls": {"tools": weather({}), "parallel_tool_calls": False},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
}


@on("simulator")
@pytest.mark.parametrize("nested", [False, True], ids=["top level", "extra_body"])
@pytest.mark.parametrize("name", [*PARAMETERS, *WITH_OTHERS])
def test_a_parameter_arrives(stage: Stage, name: str, nested: bool) -> None:
    fields = WITH_OTHERS.get(name) or {name: PARAMETERS[name]}
    response = stage.post({"messages": [user("Hello")], **({"extra_body": fields} if nested else fields)})
    assert response.status_code == 200, response.text
    arrived = stage.arrived(response)["body"]
    assert {each: arrived.get(each) for each in fields} == fields
    assert "extra_body" not in arrived


@on("simulator")
def test_extra_body_is_set_on_the_body_and_wins(stage: Stage) -> None:
    response = stage.post({"model": "no-such-model", "messages": [user("Hello")], "top_k": 1, "extra_body": {"top_k": 50, "model": QWEN}})
    assert {name: stage.arrived(response)["body"][name] for name in ("top_k", "model")} == {"top_k": 50, "model": QWEN}


@EVERYWHERE
def test_extra_body_has_an_effect(stage: Stage) -> None:
    response = stage.post({**INTRODUCTION, "extra_body": {"max_tokens": 2}}).json()
    assert (response["usage"]["completion_tokens"], response["choices"][0]["finish_reason"]) == (2, "length")


@EVERYWHERE
@pytest.mark.parametrize(
    "unknown",
    [
        {"no_such_field": {"deep": [1]}},
        {"metadata": {"ticket": "7"}, "user": "user-1"},
        {"store": True, "service_tier": "auto", "modalities": ["text"], "prediction": None, "verbosity": "low"},
        {"audio": {"voice": "alloy", "format": "wav"}, "web_search_options": {}, "safety_identifier": "x", "prompt_cache_key": "k"},
    ],
    ids=lambda unknown: next(iter(unknown)),
)
def test_what_is_unknown_does_nothing(stage: Stage, unknown: Json) -> None:
    assert stage.content({**INTRODUCTION, **unknown}) == stage.content(INTRODUCTION)


@EVERYWHERE
@pytest.mark.parametrize(
    ("setting", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
        ({"tools": []}, "tools"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_setting_of_an_output_that_was_not_requested_is_a_400(stage: Stage, setting: Json, param: str) -> None:
    response = stage.post({**INTRODUCTION, **setting})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@EVERYWHERE
def test_max_completion_tokens_beats_max_tokens(stage: Stage) -> None:
    response = stage.post({**INTRODUCTION, "max_completion_tokens": 3, "max_tokens": 9}).json()
    assert (response["usage"]["completion_tokens"], response["choices"][0]["finish_reason"]) == (3, "length")


@EVERYWHERE
def test_min_tokens_keeps_it_going(stage: Stage) -> None:
    response = stage.post({**INTRODUCTION, "min_tokens": 40, "max_tokens": 60}).json()
    assert response["usage"]["completion_tokens"] >= 40


@EVERYWHERE
def test_stop_ends_it_before_the_words(stage: Stage) -> None:
    whole = stage.content(INTRODUCTION)
    text = whole.split()[3]
    response = stage.post({**INTRODUCTION, "stop": [text, "never said"]}).json()["choices"][0]
    assert (response["message"]["content"], response["finish_reason"]) == (whole[: whole.index(text)], "stop")


@EVERYWHERE
@PLAIN_AND_STREAMED
def test_logprobs(stage: Stage, streamed: bool) -> None:
    body = {**INTRODUCTION, "logprobs": True, "top_logprobs": 2}
    parts = stage.chunks(body) if streamed else [stage.post(body).json()]
    found = [choice["logprobs"] for part in parts for choice in part["choices"] if choice.get("logprobs")]
    assert found and [problem for each in found for problem in lacks(each, LOGPROBS)] == []
    assert all(len(token["top_logprobs"]) == 2 for each in found for token in each["content"])


@EVERYWHERE
@PLAIN_AND_STREAMED
def test_n_choices(stage: Stage, streamed: bool) -> None:
    body = {"messages": [user("Roll a die.")], "n": 3, "temperature": 1, "seed": 5, **NOT_THINKING}
    parts = stage.chunks(body) if streamed else [stage.post(body).json()]
    choices = [choice for part in parts for choice in part["choices"]]
    responses = [folded([choice for choice in choices if choice["index"] == index]) for index in (0, 1, 2)]
    assert all(each.content and each.finish_reason == "stop" for each in responses)
    assert not stage.real or all(each.content in DIE for each in responses)


@EVERYWHERE
def test_a_seed_repeats(stage: Stage) -> None:
    body = {"messages": [user("Roll a die.")], "temperature": 1, "max_tokens": 5, **NOT_THINKING}
    throws, again = ([stage.content({**body, "seed": seed}) for seed in range(12)] for _ in range(2))
    assert throws == again and len(set(throws)) > 1


@on("qwen")
def test_logit_bias_has_an_effect(stage: Stage) -> None:
    token = stage.post({"prompt": "I"}, "/tokenize").json()["tokens"][-1]
    assert stage.content(INTRODUCTION).startswith("I")
    assert not (stage.content({**INTRODUCTION, "logit_bias": {str(token): -100}}) or "").startswith("I")


# Messages


@EVERYWHERE
@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_by_system_and_developer_are_the_same(stage: Stage, role: str) -> None:
    messages = [{"role": role, "content": "You are a pirate."}, user("Who are you?")]
    response = stage.post({**INTRODUCTION, "messages": messages})
    if stage.real:
        assert response.json()["choices"][0]["message"]["content"] == "Arr, I be a tiny pirate model!"
    else:
        assert stage.arrived(response)["body"]["messages"] == [{**messages[0], "role": "system"}, messages[1]]


@EVERYWHERE
def test_content_is_a_string_or_parts(stage: Stage) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Who are you?"}]}]
    assert stage.content({**INTRODUCTION, "messages": parts}) == stage.content(INTRODUCTION)


@EVERYWHERE
def test_a_message_may_have_a_name(stage: Stage) -> None:
    assert stage.content({**INTRODUCTION, "messages": [{**user("Who are you?"), "name": "ada"}]})


# Tools


@EVERYWHERE
@PLAIN_AND_STREAMED
@pytest.mark.parametrize(
    ("choice", "finish"),
    [
        ({}, "tool_calls"),
        ({"tool_choice": "auto"}, "tool_calls"),
        ({"tool_choice": "required"}, "tool_calls"),
        ({"tool_choice": {"type": "function", "function": {"name": "get_current_weather"}}}, "stop"),  # vLLM's word for a named one
        ({"tool_choice": "none"}, "stop"),
    ],
    ids=["default", "auto", "required", "named", "none"],
)
def test_tool_choice(stage: Stage, choice: Json, finish: str, streamed: bool) -> None:
    response = completion(stage, {**WEATHER_REQUEST, **choice}, streamed=streamed)
    assert response.finish_reason == finish
    assert [name for name, _ in response.calls] == ([] if choice.get("tool_choice") == "none" else ["get_current_weather"])
    assert all(isinstance(arguments["location"], str) for _, arguments in response.calls)


@EVERYWHERE
@PLAIN_AND_STREAMED
def test_a_tools_result_gets_a_response(stage: Stage, streamed: bool) -> None:
    messages = on_the_wire([user(HANGZHOU), CALLED, RESULT])
    response = completion(stage, {**WEATHER_REQUEST, "messages": messages}, streamed=streamed)
    assert (response.calls, response.finish_reason) == ((), "stop")
    assert response.content == SUNNY if stage.real else response.content


@EVERYWHERE
@PLAIN_AND_STREAMED
@pytest.mark.parametrize("parallel", [True, False])
def test_parallel_tool_calls(stage: Stage, parallel: bool, streamed: bool) -> None:
    body: Json = {**WEATHER_REQUEST, "messages": [user("Compare the weather in Hangzhou and Paris.")], "tools": TOOLSETS[0]}
    two = {} if stage.real else {"simulate": {"tool_calls": 2}}
    response = completion(stage, {**body, **two, "parallel_tool_calls": parallel}, streamed=streamed)
    assert (len(response.calls), response.finish_reason) == (2 if parallel else 1, "tool_calls")


# The old words for tools

FUNCTIONS: Json = {"functions": [WEATHER["function"]]}


def functions(stage: Stage, body: Json, *, streamed: bool) -> tuple[Json, str]:
    """The call in the old shape, folded together, and the finish reason."""
    parts = stage.chunks(body) if streamed else [stage.post(body).json()]
    choices = [choice for part in parts for choice in part["choices"]]
    holders = [choice["delta"] if streamed else choice["message"] for choice in choices]
    assert not any(holder.get("tool_calls") for holder in holders)
    pieces = [holder["function_call"] for holder in holders if holder.get("function_call")]
    whole = {field: "".join(piece.get(field) or "" for piece in pieces) for field in ("name", "arguments")}
    [finish] = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return whole, finish


@EVERYWHERE
@PLAIN_AND_STREAMED
@pytest.mark.parametrize(
    ("choice", "calls", "finish"),
    [
        ({}, True, "function_call"),
        ({"function_call": "auto"}, True, "function_call"),
        ({"function_call": {"name": "get_current_weather"}}, True, "stop"),  # as with a named tool
        ({"function_call": "none"}, False, "stop"),
    ],
    ids=["default", "auto", "named", "none"],
)
def test_functions(stage: Stage, choice: Json, calls: bool, finish: str, streamed: bool) -> None:
    body = {name: value for name, value in WEATHER_REQUEST.items() if name != "tools"}
    call, finished = functions(stage, {**body, **FUNCTIONS, **choice}, streamed=streamed)
    assert finished == finish
    if calls:
        assert call["name"] == "get_current_weather" and isinstance(json.loads(call["arguments"])["location"], str)
    else:
        assert call == {"name": "", "arguments": ""}


@on("simulator")
def test_functions_arrive_as_tools(stage: Stage) -> None:
    messages = [
        user("Weather?"),
        {"role": "assistant", "content": None, "function_call": {"name": "get_current_weather", "arguments": "{}"}},
        {"role": "function", "name": "get_current_weather", "content": "sunny"},
    ]
    response = stage.post({"messages": messages, **FUNCTIONS, "function_call": "auto"})
    arrived = stage.arrived(response)["body"]
    assert (arrived["tools"], arrived["tool_choice"]) == ([WEATHER], "auto")
    assert not {"functions", "function_call"} & arrived.keys()
    assert [message["role"] for message in arrived["messages"]] == ["user", "assistant", "tool"]
    assert arrived["messages"][2]["tool_call_id"] == arrived["messages"][1]["tool_calls"][0]["id"]


# Formats


@EVERYWHERE
@pytest.mark.parametrize(
    ("wanted", "shape"),
    [
        ({"type": "json_object"}, dict),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": WEATHER["function"]["parameters"]}}, {"location": str}),
        ({"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"enum": ["red"]}}}, "red"),
    ],
    ids=["json_object", "json_schema", "strict"],
)
def test_response_format(stage: Stage, wanted: Json, shape: Any) -> None:
    body = {"messages": [user("Give me the capital of France as JSON.")], "temperature": 0, "max_tokens": 300, **NOT_THINKING}
    assert lacks(json.loads(stage.content({**body, "response_format": wanted})), shape) == []


STRUCTURAL: Json = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<color>", "content": {"type": "regex", "pattern": "red|blue"}, "end": "</color>"},
}


@EVERYWHERE
def test_response_format_structural_tag(stage: Stage) -> None:
    response = stage.post({**INTRODUCTION, "max_tokens": 60, "response_format": STRUCTURAL})
    assert response.status_code == 200, response.text
    if stage.real:
        assert response.json()["choices"][0]["message"]["content"] in ("<color>red</color>", "<color>blue</color>")
    else:
        assert stage.arrived(response)["body"]["response_format"] == STRUCTURAL


# Thinking


@EVERYWHERE
@PLAIN_AND_STREAMED
@pytest.mark.parametrize(("kwargs", "thinks"), [(THINKING, True), (NOT_THINKING, False), ({}, True)], ids=["on", "off", "default"])
def test_thinking(stage: Stage, kwargs: Json, thinks: bool, streamed: bool) -> None:
    body = {"messages": [user("Which is greater, 9.11 or 9.8?")], "temperature": 0, "max_tokens": 200, **kwargs}
    response = completion(stage, body, streamed=streamed)
    assert (bool(response.reasoning), bool(response.content), response.finish_reason) == (thinks, True, "stop")
    if stage.real:
        assert response.content.strip() == ("9.8 is greater than 9.11." if thinks else "9.8 is greater.")


@on("simulator", "llama")
def test_llama_does_not_think(stage: Stage) -> None:
    message = stage.post({**INTRODUCTION, "model": LLAMA}).json()["choices"][0]["message"]
    assert message["content"] and not message.get("reasoning")


# Streams


@EVERYWHERE
@pytest.mark.parametrize("requested", [{}, {"include_usage": False}, {"include_usage": True}], ids=["nothing said", "not asked", "asked"])
def test_include_usage(stage: Stage, requested: Json) -> None:
    chunks = stage.chunks({**INTRODUCTION, **({"stream_options": requested} if requested else {})})
    assert stream_lacks(chunks, usage=requested.get("include_usage", False)) == []
    if chunks[-1]["choices"] == []:
        counts = [
            usage["prompt_tokens"] + usage["completion_tokens"] for usage in (chunks[-1]["usage"], stage.post(INTRODUCTION).json()["usage"])
        ]
        assert counts[0] == counts[1]
