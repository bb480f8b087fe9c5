"""The events of a continued stream, in the shape of vLLM's chats and completions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"


def event(document: Mapping[str, Any]) -> bytes:
    """Return an event with this document."""
    return b"data: " + orjson.dumps(document) + b"\n\n"


def usage_of(prompt: int, completion: int, reasoning: int | None = None) -> dict[str, Any]:
    """Return a usage object. ``reasoning``: None for a server without a reasoning parser."""
    counts = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    return counts if reasoning is None else {**counts, "completion_tokens_details": {"reasoning_tokens": reasoning}}


def closing(head: Mapping[str, Any], usage: Mapping[str, Any] | None) -> bytes:
    """Return the last events of a stream: its usage, unless it was sent, and the end."""
    return DONE if usage is None else event({**head, "choices": [], "usage": usage}) + DONE
