"""The real vLLM counts a converted body as its engine counts the prompt of the body itself, for each form that is converted."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.api.vllm.prompt_count import exact_request, read_count, tokenize_request
from tests.vllm.dialogues import WEATHER, Json, user
from tests.vllm.gateway import MODEL, Real
from tests.vllm.server import NOT_INSTALLED, installed
from tests.vllm.test_gateway_counts import CHAT, COMPLETIONS, MESSAGES, RESPONSES

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED), pytest.mark.timeout(600)]

FUNCTION = {"type": "function", **WEATHER["function"]}
REASONING: Json = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Well."}]}
REPLY: Json = {
    "type": "message",
    "role": "assistant",
    "id": "m",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Hi."}],
}
AGAIN = user("Really? 你好 🎉")


def call(identity: str) -> Json:
    return {"type": "function_call", "call_id": identity, "name": "get_weather", "arguments": '{"city": "Paris"}'}


def result(identity: str) -> Json:
    return {"type": "function_call_output", "call_id": identity, "output": "20 C"}


def parts(role: str, *texts: str) -> Json:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text} for text in texts]}


BODIES: list[tuple[str, Json]] = [
    (RESPONSES, {"input": "Who are you?"}),
    (RESPONSES, {"input": "Who are you?", "instructions": "Be brief."}),
    (RESPONSES, {"input": [user("Hi"), {"role": "assistant", "content": "Hello."}, AGAIN]}),
    (RESPONSES, {"input": [{"role": "system", "content": "Be brief."}, AGAIN]}),
    (RESPONSES, {"input": [parts("developer", "Be brief."), parts("user", "Who", "are you?"), REPLY, AGAIN]}),
    (RESPONSES, {"input": "Weather?", "tools": [FUNCTION]}),
    (RESPONSES, {"input": "Weather?", "tools": [{**FUNCTION, "strict": True}]}),
    (RESPONSES, {"input": "Weather?", "tools": [{"parameters": {"type": "object"}, "name": "f", "type": "function"}]}),
    (RESPONSES, {"input": [user("Weather?"), call("c1"), result("c1")], "tools": [FUNCTION]}),
    (RESPONSES, {"input": [user("Weather?"), call("c1"), call("c2"), result("c1"), result("c2"), AGAIN], "tools": [FUNCTION]}),
    (RESPONSES, {"input": [user("Hi"), REASONING, REPLY, AGAIN]}),
    (RESPONSES, {"input": [user("Hi"), REASONING, REPLY, call("c1"), result("c1")], "tools": [FUNCTION]}),
    (RESPONSES, {"input": "Who are you?", "reasoning": {"effort": "none"}}),
    (RESPONSES, {"input": "Who are you?", "reasoning": {"effort": "low"}}),
    (RESPONSES, {"input": "Who are you?", "reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": True}}),
    (RESPONSES, {"input": "Who are you?", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}}),
    (CHAT, {"messages": [user("Who are you?")]}),
    (CHAT, {"messages": [user("Weather?")], "tools": [WEATHER]}),
    (CHAT, {"messages": [user("Who are you?")], "reasoning_effort": "none"}),
    (
        CHAT,
        {
            "messages": [user("Hi"), {"role": "assistant", "content": "I am"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    (COMPLETIONS, {"prompt": "Once upon a time"}),
]
LIMITS = {RESPONSES: "max_output_tokens", CHAT: "max_tokens", COMPLETIONS: "max_tokens", MESSAGES: "max_tokens"}


def prompt_of(real: Real, path: str, body: Json) -> int:
    """Return the prompt tokens that vLLM reports for a request."""
    usage: dict[str, Any] = real.post_directly(path, {**body, LIMITS[path]: 1})["usage"]
    return int(usage.get("input_tokens") or usage["prompt_tokens"])


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_a_converted_body_has_the_same_prompt(real: Real, number: int) -> None:
    path, body = BODIES[number]
    request = tokenize_request(path, body)
    assert request is not None
    counted = read_count(real.bytes_directly(request.path, {"model": MODEL, **request.body}))
    assert counted == prompt_of(real, path, body)


@pytest.mark.parametrize("more", [{}, {"system": "Be brief."}, {"thinking": {"type": "disabled"}}])
def test_messages_are_counted_as_their_prompt(real: Real, more: Json) -> None:
    body = {"messages": [user("Who are you?")], "max_tokens": 9, "stream": True, **more}
    request = exact_request(MESSAGES, body)
    assert request is not None
    counted = read_count(real.bytes_directly(request.path, {"model": MODEL, **request.body}))
    assert counted == prompt_of(real, MESSAGES, {**body, "stream": False})


def test_vllm_renders_no_prompts_unless_that_is_enabled(real: Real) -> None:
    request = exact_request(RESPONSES, {"input": "Who are you?"})
    assert request is not None
    refusal = real.post_directly(request.path, request.body)
    assert refusal["error"]["code"] == 403
