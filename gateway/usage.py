"""How many tokens an answer used, read from bytes as they pass.

The rule: only a server's own count is believed; nothing is counted here. A byte search comes before any parse:
in JSON text a quote inside a string is escaped, so ``"usage":`` can only be a real member.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

USAGE = b'"usage":'
_MEMBER = re.compile(rb'"usage":\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
_CARRY = 2 * 1024  # bytes kept between two reads: more than any usage object has


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one exchange. ``cached`` is part of ``prompt``, ``reasoning`` part of ``completion``."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0


def read(member: Mapping[str, Any]) -> Usage | None:
    """A ``usage`` object in OpenAI's chat, OpenAI's responses or Anthropic's words; None if it is none of them."""
    prompt = _count(member, "prompt_tokens", "input_tokens")
    completion = _count(member, "completion_tokens", "output_tokens")
    if prompt is None and completion is None:
        return None
    inward = member.get("prompt_tokens_details") or member.get("input_tokens_details")
    outward = member.get("completion_tokens_details") or member.get("output_tokens_details")
    cached = (_count(inward, "cached_tokens") if inward else None) or _count(member, "cache_read_input_tokens") or 0
    return Usage(prompt or 0, completion or 0, cached, (_count(outward, "reasoning_tokens") if outward else None) or 0)


def _count(member: Mapping[str, Any], *names: str) -> int | None:
    if isinstance(member, dict):
        for name in names:
            value = member.get(name)
            if type(value) is int and value >= 0:  # JSON's true is no count
                return value
    return None


def find(data: bytes) -> Usage | None:
    """The last ``usage`` object in a piece of JSON text or a run of events; None when there is none.

    The last, because vLLM echoes parts of a request (metadata, tool schemas) before it and nothing after it
    (vllm/entrypoints/openai/*/protocol.py, the order of the fields).
    """
    start = data.rfind(USAGE)
    while start >= 0:
        member = _MEMBER.match(data, start)
        if member is not None and (usage := _parsed(member[1])) is not None:
            return usage
        start = data.rfind(USAGE, 0, start)
    return None


def _parsed(member: bytes) -> Usage | None:
    try:
        return read(orjson.loads(member))
    except orjson.JSONDecodeError:
        return None


def merged(before: Usage | None, after: Usage | None) -> Usage | None:
    """Anthropic's streams tell the prompt first and the completion last; every other count only grows."""
    if before is None or after is None:
        return after or before
    return Usage(
        max(before.prompt, after.prompt),
        max(before.completion, after.completion),
        max(before.cached, after.cached),
        max(before.reasoning, after.reasoning),
    )


class Observer:
    """Watches an answer's JSON text pass, in pieces of any size, and keeps its last usage."""

    __slots__ = ("_carry", "usage")

    def __init__(self) -> None:
        self._carry = b""
        self.usage: Usage | None = None

    def feed(self, data: bytes) -> None:
        """Look at the next bytes, together with the end of those before."""
        text = self._carry + data if self._carry else data
        self.usage = find(text) or self.usage
        self._carry = text[-_CARRY:]
