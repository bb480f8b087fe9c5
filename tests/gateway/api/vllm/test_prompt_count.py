"""The requests that count a prompt: what is converted, what is not, and what their responses say."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.api.vllm.prompt_count import exact_request, read_count, tokenize_request
from tests.support.rows import each_row

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HELLO = {"role": "user", "content": "Hello"}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
CALLED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def text(*parts: str, kind: str = "input_text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": part} for part in parts]


@each_row(
    ("given", "messages"),
    [
        ({"input": "Hello"}, [HELLO]),
        ({"input": "Hello", "instructions": "Be brief."}, [{"role": "system", "content": "Be brief."}, HELLO]),
        ({"input": [{"role": "user", "content": "Hello"}]}, [HELLO]),
        (
            {"input": [{"type": "message", "role": "developer", "content": text("a", "b")}]},
            [{"role": "developer", "content": text("a", "b", kind="text")}],
        ),
        (
            {"input": [HELLO, {"role": "assistant", "content": text("Hi", kind="output_text")}, HELLO]},
            [HELLO, {"role": "assistant", "content": "Hi"}, HELLO],
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "content": text("hm")}, {"role": "assistant", "content": "Hi"}, CALL]},
            [{"role": "assistant", "reasoning": "hm", "content": "Hi", "tool_calls": [CALLED]}],
        ),
        (
            {"input": [CALL, CALL, {"type": "function_call_output", "call_id": "c1", "output": "20 C"}]},
            [{"role": "assistant", "tool_calls": [CALLED, CALLED]}, {"role": "tool", "content": "20 C", "tool_call_id": "c1"}],
        ),
        (
            {"input": [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]},
            [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        ),
    ],
)
def test_responses_are_converted_to_the_messages_of_vllm(given: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    request = tokenize_request(RESPONSES, given)
    assert request is not None and request.path == "/tokenize"
    assert request.body == {"messages": messages, "add_special_tokens": True}


def test_the_template_gets_the_tools_and_the_reasoning_effort() -> None:
    given = {"input": "Hello", "tools": [{"type": "function", **FUNCTION}], "reasoning": {"effort": "low"}}
    request = tokenize_request(RESPONSES, given)
    assert request is not None and request.body["tools"] == [{"type": "function", "function": FUNCTION}]
    assert request.body["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "low"}
    own = {"input": "Hello", "reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": True, "a": 1}}
    request = tokenize_request(RESPONSES, own)
    assert request is not None
    assert request.body["chat_template_kwargs"] == {"enable_thinking": True, "a": 1, "reasoning_effort": "none"}


@each_row(
    ("path", "given"),
    [
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}),
        (RESPONSES, {"input": [{"role": "assistant", "content": text("a", "b", kind="output_text")}]}),
        (RESPONSES, {"input": [{"role": "assistant", "content": "a", "status": "incomplete"}]}),
        (RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": "x"}]}),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": text("hm")}]}),
        (RESPONSES, {"input": [{**CALL, "namespace": "n"}]}),
        (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "c1", "output": text("20 C")}]}),
        (RESPONSES, {"input": [{"type": "custom_tool_call", "call_id": "c1", "name": "f", "input": "x"}]}),
        (RESPONSES, {"input": [{"type": "message"}]}),
        (RESPONSES, {"input": ["Hello"]}),
        (RESPONSES, {"input": []}),
        (RESPONSES, {"input": None}),
        (RESPONSES, {}),
        (RESPONSES, {"input": "Hello", "truncation": "auto"}),
        (RESPONSES, {"input": "Hello", "tools": [{"type": "mcp"}]}),
        (RESPONSES, {"input": "Hello", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "none"}),
        (RESPONSES, {"input": "Hello", "previous_input_messages": []}),
        (CHAT, {"messages": [HELLO], "documents": []}),
        (CHAT, {"messages": [HELLO], "truncate_prompt_tokens": 5}),
        (CHAT, {"messages": [HELLO], "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "none"}),
        (COMPLETIONS, {"prompt": ["Hello", "Bye"]}),
        (COMPLETIONS, {"prompt": "Hello", "suffix": "Bye"}),
        (COMPLETIONS, {}),
        (MESSAGES, {"messages": [HELLO]}),
        ("/v1/embeddings", {"input": "Hello"}),
    ],
)
def test_a_body_whose_prompt_is_not_certain_is_not_converted(path: str, given: dict[str, Any]) -> None:
    assert tokenize_request(path, given) is None


@each_row(
    ("path", "given", "body"),
    [
        (CHAT, {"messages": [HELLO], "stream": True, "n": 2, "temperature": 0}, {"messages": [HELLO]}),
        (
            CHAT,
            {"messages": [HELLO], "add_generation_prompt": False, "tools": [1], "reasoning_effort": "high", "user": "u"},
            {
                "messages": [HELLO],
                "tools": [1],
                "add_generation_prompt": False,
                "chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "high"},
            },
        ),
        (COMPLETIONS, {"prompt": "Hello", "max_tokens": 5, "add_special_tokens": False}, {"prompt": "Hello", "add_special_tokens": False}),
    ],
)
def test_chat_and_completions_keep_the_fields_of_their_prompt(path: str, given: dict[str, Any], body: dict[str, Any]) -> None:
    request = tokenize_request(path, given)
    assert request is not None and request.body == body


def test_the_exact_request_repeats_the_body() -> None:
    request = exact_request(RESPONSES, {"input": "Hello", "stream": True, "tools": [{"type": "mcp"}]})
    assert request is not None and request.path == "/v1/responses/render"
    assert request.body["tools"] == [{"type": "mcp"}] and request.body["stream"] is False and request.body["mm_payload"] == "none"
    request = exact_request(MESSAGES, {"messages": [HELLO], "max_tokens": 5, "stream": True, "system": "s"})
    assert request is not None and (request.path, request.body) == ("/v1/messages/count_tokens", {"messages": [HELLO], "system": "s"})
    assert exact_request("/v1/embeddings", {"input": "Hello"}) is None


@pytest.mark.parametrize(
    ("response", "count"),
    [
        ({"count": 12, "max_model_len": 2048, "tokens": [1] * 12, "token_strs": None}, 12),
        ({"input_tokens": 7, "context_management": {"original_input_tokens": 7}}, 7),
        ({"request_id": "r", "token_ids": [5, 6, 7], "features": None}, 3),
        ([{"token_ids": [5, 6, 7]}, {"token_ids": [1]}], 4),
        ([{"token_ids": [5, 6, 7]}, {}], None),
        ([], None),
        ({"error": {"message": "m", "code": 403}}, None),
        ({"count": "12"}, None),
        ({"count": 0}, None),
        ("12", None),
    ],
)
def test_the_count_of_a_response(response: Any, count: int | None) -> None:
    assert read_count(orjson.dumps(response)) == count


def test_a_response_that_is_no_json_has_no_count() -> None:
    assert read_count(b"<html>") is read_count(b"") is read_count(b'{"count": 12') is None
