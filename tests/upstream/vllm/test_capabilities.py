"""The capabilities of a server, derived from its launch arguments."""

from __future__ import annotations

import pytest

from upstream.vllm.capabilities import capabilities_of, task_of
from upstream.vllm.command_line import ArgumentValue


@pytest.mark.parametrize(
    ("args", "task"),
    [
        ({}, None),
        ({"max-model-len": 2048}, None),
        ({"runner": "generate"}, "chat"),
        ({"reasoning_parser": "qwen3"}, "chat"),
        ({"enable-auto-tool-choice": True, "tool-call-parser": "hermes"}, "chat"),
        ({"enable-auto-tool-choice": False}, None),
        ({"runner": "pooling"}, None),
        ({"runner": "pooling", "convert": "embed"}, "embedding"),
        ({"convert": "classify"}, "classify"),
        ({"convert": "none"}, None),
    ],
)
def test_what_a_server_is_for(args: dict[str, ArgumentValue], task: str | None) -> None:
    assert task_of(args) == task


@pytest.mark.parametrize(
    ("args", "capabilities"),
    [
        ({}, ("structured_outputs",)),
        ({"reasoning-parser": "qwen3"}, ("structured_outputs", "reasoning")),
        ({"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}, ("structured_outputs", "tools")),
        ({"tool-call-parser": "hermes"}, ("structured_outputs",)),
        ({"enable-auto-tool-choice": False, "tool-call-parser": "hermes"}, ("structured_outputs",)),
        ({"config": "more.yaml"}, None),
    ],
)
def test_what_a_server_can_do(args: dict[str, ArgumentValue], capabilities: tuple[str, ...] | None) -> None:
    assert capabilities_of(args) == capabilities
