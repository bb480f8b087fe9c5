"""How many tokens an answer used, read from bytes as they pass.

The rule: only a server's own count is believed; nothing is counted here. A byte search comes before any parse:
in JSON text a quote inside a string is escaped, so ``"usage":`` can only be a real member.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

USAGE = b'"usage":'
_MEMBER = re.compile(rb'"usage":\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
_CARRY = 2 * 1024  # bytes kept between two reads: more than any usage object has


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one exchange. ``cached`` is part of ``prompt``, ``reasoning`` part of ``completion``."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]  # beyond that no server has counted: sums are to stay whole numbers everywhere


class _Details(msgspec.Struct, gc=False):
    cached_tokens: _Count | None = None
    reasoning_tokens: _Count | None = None


class _Member(msgspec.Struct, gc=False):
    """A ``usage`` object in OpenAI's chat, OpenAI's responses and Anthropic's words at once."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None

    def usage(self) -> Usage | None:
        """None when it is in none of those words."""
        prompt = self._input() if self.prompt_tokens is None else self.prompt_tokens
        completion = self.output_tokens if self.completion_tokens is None else self.completion_tokens
        if prompt is None and completion is None:
            return None
        inward = self.prompt_tokens_details or self.input_tokens_details
        outward = self.completion_tokens_details or self.output_tokens_details
        cached = (inward.cached_tokens if inward is not None else None) or self.cache_read_input_tokens
        return Usage(prompt or 0, completion or 0, cached or 0, (outward.reasoning_tokens or 0) if outward is not None else 0)

    def _input(self) -> int | None:
        """Anthropic's ``input_tokens`` are without what the cache had and what it was given, and vLLM's are so too
        (``_build_anthropic_usage`` in its entrypoints/anthropic/serving.py); OpenAI's are all, and have no such members."""
        if self.input_tokens is None:
            return None
        return self.input_tokens + (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)


_decode = msgspec.json.Decoder(_Member).decode


def read(member: Mapping[str, Any]) -> Usage | None:
    """A ``usage`` object that was parsed already; None if it is none."""
    try:
        return msgspec.convert(member, _Member).usage()
    except msgspec.ValidationError:
        return None


def find(data: bytes) -> Usage | None:
    """The last ``usage`` object in a piece of JSON text or a run of events; None when there is none.

    The last, because vLLM echoes parts of a request (metadata, tool schemas) before it and nothing after it
    (vllm/entrypoints/openai/*/protocol.py, the order of the fields).
    """
    start = data.rfind(USAGE)
    while start >= 0:
        member = _member(data, start)
        if member is not None and (usage := _parsed(member)) is not None:
            return usage
        start = data.rfind(USAGE, 0, start)
    return None


def _member(data: bytes, start: int) -> bytes | None:
    """The object behind ``"usage":``, if it is whole."""
    opened = start + len(USAGE)
    closed = data.find(b"}", opened, opened + _CARRY)
    if closed > 0 and data[opened : opened + 1] == b"{" and data.find(b"{", opened + 1, closed) < 0:
        return data[opened : closed + 1]  # the ordinary one, with nothing nested in it: found without the expression below
    member = _MEMBER.match(data, start)
    return member[1] if member is not None else None


def _parsed(member: bytes) -> Usage | None:
    try:
        return _decode(member).usage()
    except msgspec.DecodeError:
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

    def feed(self, data: bytes) -> bytes:
        """Look at the next bytes, together with the end of those before; returns what was looked at."""
        text = self._carry + data if self._carry else data
        self.usage = find(text) or self.usage
        self._carry = text[-_CARRY:]
        return text
