"""Requests whose prompts ``/tokenize`` can express, and those whose prompts it cannot."""

from __future__ import annotations

from typing import Any

import orjson

from gateway.prompts.token_plan import token_plan
from tests.support.rows import each_row

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]

PLANNED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (CHAT, {"messages": HELLO, "max_tokens": 5, "stream": True}, {"messages": HELLO}),
    (CHAT, {"messages": PARTS, "tools": TOOLS, "tool_choice": "auto"}, {"messages": PARTS, "tools": TOOLS}),
    (CHAT, {"messages": HELLO, "add_generation_prompt": False}, {"messages": HELLO, "add_generation_prompt": False}),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"a": 1}}, {"messages": HELLO, "chat_template_kwargs": {"a": 1}}),
    (
        CHAT,
        {"messages": HELLO, "reasoning_effort": "none"},
        {"messages": HELLO, "chat_template_kwargs": {"reasoning_effort": "none", "enable_thinking": False}},
    ),
    (
        CHAT,
        {"messages": HELLO, "reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "high"}},
    ),
    ("/v1/responses", {"input": "Hello"}, {"messages": HELLO, "add_special_tokens": True}),
    (COMPLETIONS, {"prompt": "Hello"}, {"prompt": "Hello"}),
    (COMPLETIONS, {"prompt": ["Hello"], "add_special_tokens": False}, {"prompt": "Hello", "add_special_tokens": False}),
]
IMAGE = {"type": "image_url", "image_url": {"url": "http://a/1"}}
UNPLANNED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {}),
    (CHAT, {"messages": "Hello"}),
    (CHAT, {"messages": ["Hello"]}),
    (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}),
    (CHAT, {"messages": HELLO, "truncate_prompt_tokens": 5}),
    (CHAT, {"messages": HELLO, "prompt_logprobs": 0}),
    (CHAT, {"messages": HELLO, "cache_salt": 1}),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": "a"}),
    (COMPLETIONS, {"prompt": []}),
    (COMPLETIONS, {"prompt": ["a", "b"]}),
    (COMPLETIONS, {"prompt": [[1], [2]]}),
    (COMPLETIONS, {"prompt": [1, -1]}),
    (COMPLETIONS, {"prompt": [1, True]}),
    (COMPLETIONS, {"prompt": [1, 2**32]}),
    (CHAT, {"messages": "Hello", "cache_salt": "a"}),
    (CHAT, {"messages": [1]}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a/1"}]}]}),
    ("/v1/messages", {"messages": HELLO}),
]


@each_row(("path", "document", "fields"), PLANNED)
def test_a_prompt_is_expressed_with_the_fields_that_matter(path: str, document: dict[str, Any], fields: dict[str, Any]) -> None:
    plan = token_plan(document, path)
    assert plan is not None and plan.token_ids is None
    assert orjson.loads(plan.body("served")) == {"model": "served", **fields}


@each_row(("path", "document"), UNPLANNED)
def test_other_prompts_are_not(path: str, document: dict[str, Any]) -> None:
    assert token_plan(document, path) is None


def test_token_ids_of_the_request_are_used_directly() -> None:
    for prompt in ([1, 2, 3], [[1, 2, 3]]):
        plan = token_plan({"prompt": prompt, "cache_salt": "tenant"}, COMPLETIONS)
        assert plan is not None and (plan.token_ids, plan.salt) == ([1, 2, 3], "tenant")
