"""How many tokens a response used, read from a ``usage`` object in the shape of any of the APIs.

The rule: only the server's own count is believed; nothing is counted here. Where the object stands in a response is known to
``response_fields``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec


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


class Member(msgspec.Struct, gc=False):
    """A ``usage`` object in OpenAI's chat, OpenAI's responses, Anthropic's and Cohere's words at once."""

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
    image_tokens: _Count | None = None

    def usage(self) -> Usage | None:
        """None where it has no count."""
        prompt = self._input() if self.prompt_tokens is None else self.prompt_tokens
        completion = self.output_tokens if self.completion_tokens is None else self.completion_tokens
        if prompt is None and completion is None:
            return None
        inward = self.prompt_tokens_details or self.input_tokens_details
        outward = self.completion_tokens_details or self.output_tokens_details
        cached = (inward.cached_tokens if inward is not None else None) or self.cache_read_input_tokens
        return Usage(prompt or 0, completion or 0, cached or 0, (outward.reasoning_tokens or 0) if outward is not None else 0)

    def _input(self) -> int | None:
        """The tokens of the prompt, with those that some APIs report apart.

        Anthropic's ``input_tokens`` are without what the cache had and what it was given, and vLLM's are so too
        (``_build_anthropic_usage`` in its entrypoints/anthropic/serving.py); OpenAI's are all, and have no such members.
        Cohere's ``input_tokens`` are without ``image_tokens`` (``_build_cohere_response_from_ctx`` in pooling/embed/serving.py).
        """
        if self.input_tokens is None:
            return None
        cached = (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        return self.input_tokens + cached + (self.image_tokens or 0)


_decode = msgspec.json.Decoder(Member | None).decode


def read(member: Mapping[str, Any]) -> Usage | None:
    """The usage in an object that was parsed already; None where it has no valid count."""
    try:
        return msgspec.convert(member, Member).usage()
    except msgspec.ValidationError:
        return None


def decoded(member: bytes) -> Usage | None:
    """As ``read``, of the object's JSON text."""
    try:
        found = _decode(member)
    except msgspec.DecodeError:
        return None
    return None if found is None else found.usage()


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
