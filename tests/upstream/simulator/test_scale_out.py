"""A chat stream of the simulator, rendered, generated and derendered, and continued at every token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.upstream.simulator.test_process import Simulated, running
from upstream.http.address import Address
from upstream.vllm.health import HealthCheck, ProbeTarget

Body = dict[str, Any]

CHAT, RENDER, DERENDER = "/v1/chat/completions", "/v1/chat/completions/render", "/v1/chat/completions/derender"
GENERATE = "/inference/v1/generate"
PARSERS = ["--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
FLAGS = ["--enable-scale-out", "--max-model-len", "4096", "--sim-tokens-per-second", "0"]
TOOL = {
    "type": "function",
    "function": {"name": "look_at_it", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}},
}
REQUESTS: dict[str, Body] = {
    "reasoning": {},
    "plain": {"chat_template_kwargs": {"enable_thinking": False}},
    "a tool": {"tools": [TOOL]},
    "required tools": {"tools": [TOOL], "tool_choice": "required", "simulate": {"tool_calls": 3}},
    "a named tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look_at_it"}}},
    "a schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": TOOL["function"]["parameters"]}}},  # type: ignore[index]
    "a choice": {"structured_outputs": {"choice": ["red", "blue"]}},
    "a seed": {"seed": 7, "temperature": 0.5},
    "a length": {"max_tokens": 20},
    "vLLM's default length": {"max_tokens": 16},
    "a minimum": {"min_tokens": 90},
    "no end": {"ignore_eos": True, "max_tokens": 60},
}


@pytest.fixture(scope="module", params=[PARSERS, []], ids=["parsers", "no parsers"])
def simulated(request: pytest.FixtureRequest) -> Iterator[Simulated]:
    with running(*FLAGS, *request.param) as one:
        yield one


def streamed(simulated: Simulated, path: str, body: Body) -> list[Body]:
    response = simulated.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    return [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]


def produced(events: list[Body]) -> list[int]:
    return [token for event in events for token in event["choices"][0].get("token_ids") or ()]


def joined(choices: list[Body]) -> Body:
    """Return a message from its chunks, without the random IDs of calls."""
    message: Body = {"content": "", "reasoning": "", "calls": {}, "finish": [each["finish_reason"] for each in choices][-1]}
    for delta in (choice["delta"] for choice in choices):
        for part in ("content", "reasoning"):
            message[part] += delta.get(part) or ""
        for call in delta.get("tool_calls") or ():
            name, arguments = message["calls"].get(call["index"], ("", ""))
            function = call["function"]
            message["calls"][call["index"]] = (name + (function.get("name") or ""), arguments + (function.get("arguments") or ""))
    return message


def derendered(simulated: Simulated, body: Body, prompt: list[int], chunks: list[Body], state: Body | None) -> list[Body]:
    """Return the choices of the chunks, with the state of each call from the one before it."""
    choices = []
    for chunk in chunks:
        sent = {"stream": True, "generate_chunk": chunk, "stream_state": state, "prompt_token_ids": prompt, "chat_request": body}
        response = simulated.post(DERENDER, sent)
        assert response.status_code == 200, response.text
        state = response.json()["stream_state"]
        choices += response.json()["chunk"]["choices"]
    return choices


@pytest.mark.parametrize("more", REQUESTS.values(), ids=REQUESTS)
def test_a_stream_is_continued_at_every_token(simulated: Simulated, more: Body) -> None:
    if "tools" in more and not simulated.chat(**more).is_success:  # it has no parser of tools
        assert simulated.chat(**more).status_code == 400
        return
    body = {"messages": [{"role": "user", "content": "Hello"}], "return_token_ids": True, **more}
    chat = streamed(simulated, CHAT, body)
    ids = produced(chat)
    rendered = simulated.post(RENDER, {**body, "stream": True}).json()
    assert rendered["token_ids"] == chat[0]["prompt_token_ids"]
    limit = rendered["sampling_params"].get("max_tokens", 16)
    for cut in range(0, len(ids), 5):
        params = {**rendered["sampling_params"], "max_tokens": limit - cut, "min_tokens": max(0, more.get("min_tokens", 0) - cut)}
        chunks = streamed(
            simulated, GENERATE, {**rendered, "token_ids": rendered["token_ids"] + ids[:cut], "sampling_params": params, "request_id": "r"}
        )
        assert produced(chunks) == ids[cut:]
        first = {"request_id": "r", "choices": [{"index": 0, "token_ids": ids[:cut]}]} if cut else {"choices": []}
        assert joined(derendered(simulated, body, rendered["token_ids"], [first, *chunks], None)) == joined(
            [event["choices"][0] for event in chat]
        )


def test_chunks_of_single_tokens_are_derendered_as_the_chat_sends_them(simulated: Simulated) -> None:
    body: Body = {"messages": [{"role": "user", "content": "Hello"}], "return_token_ids": True}
    role, *chat = (event["choices"][0] for event in streamed(simulated, CHAT, body))
    rendered = simulated.post(RENDER, body).json()
    choices = derendered(simulated, body, rendered["token_ids"], streamed(simulated, GENERATE, rendered), None)
    assert (role["delta"]["role"], choices[0]["delta"].pop("role")) == ("assistant", "assistant")
    assert [(shown(each["delta"]), each["token_ids"]) for each in choices] == [(shown(each["delta"]), each["token_ids"]) for each in chat]


def shown(delta: Body) -> Body:
    return {name: value for name, value in delta.items() if value}


def test_a_known_call_is_continued_under_its_id() -> None:
    with running(*FLAGS, *PARSERS) as simulated:
        body: Body = {"messages": [{"role": "user", "content": "Hello"}], "tools": [TOOL], "return_token_ids": True}
        chat = streamed(simulated, CHAT, body)
        ids, prompt = produced(chat), chat[0]["prompt_token_ids"]
        at = next(at for at, event in enumerate(chat[1:], 1) if "tool_calls" in event["choices"][0]["delta"])
        [call] = chat[at]["choices"][0]["delta"]["tool_calls"]
        state = {"output_token_ids": ids[:at], "output_chunk_lens": [at], "role_sent": True, "tools_streamed": True}
        chunk = {"choices": [{"index": 0, "token_ids": ids[at:], "finish_reason": "stop"}]}
        [rest] = derendered(simulated, body, prompt, [chunk], {**state, "last_tool_call_ids": [call["id"]]})
        assert [each["id"] for each in rest["delta"]["tool_calls"]] == [None]
        assert (rest["delta"]["role"], rest["finish_reason"]) == (None, "tool_calls")
        [whole] = derendered(simulated, body, prompt, [{"choices": [{"index": 0, "token_ids": ids}]}], {"last_tool_call_ids": [call["id"]]})
        assert [each["id"] for each in whole["delta"]["tool_calls"]] == [call["id"]]


def test_completions_continue_a_prompt_of_token_ids(simulated: Simulated) -> None:
    body: Body = {"prompt": "Once upon a time", "max_tokens": 40, "return_token_ids": True}
    events = streamed(simulated, "/v1/completions", body)
    prompt, ids = events[0]["choices"][0]["prompt_token_ids"], produced(events)
    for cut in range(0, len(ids), 7):
        rest = streamed(simulated, "/v1/completions", {**body, "prompt": prompt + ids[:cut], "max_tokens": 40 - cut})
        assert produced(rest) == ids[cut:]


def test_text_is_not_simulated(simulated: Simulated) -> None:
    assert simulated.post(GENERATE, {"token_ids": [300], "sampling_params": {}, "output_mode": "text"}).status_code == 501
    assert simulated.post(DERENDER, {"generate_response": {}}).status_code == 501
    tag = {"structured_outputs": {"structural_tag": "{}"}}
    assert simulated.post(GENERATE, {"token_ids": [300], "sampling_params": tag}).status_code == 501


@pytest.mark.parametrize("flags", [["--enable-scale-out"], []])
async def test_a_probe_detects_the_routes(flags: list[str]) -> None:
    with running("--sim-tokens-per-second", "0", *flags) as simulated:
        check = HealthCheck(ProbeTarget("s", Address.parse(simulated.url)), 30)
        assert await check.detect_routes() == ("chat", bool(flags))
