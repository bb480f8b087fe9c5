"""The number of tokens that a response used, read from a ``usage`` object in the shape of any of the APIs.

The rule: only the server's own count is used; the gateway counts no tokens. ``response_fields`` knows where the object is in a response.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one request. ``cached`` is part of ``prompt``, ``reasoning`` part of ``completion``."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]  # a larger count is an error; sums must stay exact as floats


class _Details(msgspec.Struct, gc=False):
    cached_tokens: _Count | None = None
    reasoning_tokens: _Count | None = None


class UsageObject(msgspec.Struct, gc=False):
    """A ``usage`` object, with the field names of OpenAI's chat, OpenAI's responses, Anthropic's and Cohere's APIs together."""

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
        """Return the usage; None if the object has no count."""
        prompt = self._input() if self.prompt_tokens is None else self.prompt_tokens
        completion = self.output_tokens if self.completion_tokens is None else self.completion_tokens
        if prompt is None and completion is None:
            return None
        inward = self.prompt_tokens_details or self.input_tokens_details
        outward = self.completion_tokens_details or self.output_tokens_details
        cached = (inward.cached_tokens if inward is not None else None) or self.cache_read_input_tokens
        return Usage(prompt or 0, completion or 0, cached or 0, (outward.reasoning_tokens or 0) if outward is not None else 0)

    def _input(self) -> int | None:
        """Return the tokens of the prompt, with those that some APIs report separately.

        Anthropic's ``input_tokens`` exclude tokens read from and written to the cache, and so do vLLM's (``_build_anthropic_usage`` in its
        entrypoints/anthropic/serving.py). OpenAI's include them, and have no such fields. Cohere's ``input_tokens`` exclude
        ``image_tokens`` (``_build_cohere_response_from_ctx`` in pooling/embed/serving.py).
        """
        if self.input_tokens is None:
            return None
        cached = (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        return self.input_tokens + cached + (self.image_tokens or 0)


_decode = msgspec.json.Decoder(UsageObject | None).decode


def convert_usage(value: Mapping[str, Any]) -> Usage | None:
    """Return the usage in an object that has been parsed; None if it has no valid count."""
    try:
        return msgspec.convert(value, UsageObject).usage()
    except msgspec.ValidationError:
        return None


def decode_usage(text: bytes) -> Usage | None:
    """Return the usage in an object's JSON text; None if it has no valid count."""
    try:
        found = _decode(text)
    except msgspec.DecodeError:
        return None
    return None if found is None else found.usage()


USAGE_START = b',"usage":{"prompt_tokens":'
"""How vLLM starts the running usage of an event. The bytes after it, up to the end of the event, are a *usage tail*."""


def usage_tail(usage: Usage) -> bytes:
    """Write a usage as a usage tail."""
    text = f'{usage.prompt},"completion_tokens":{usage.completion},"prompt_tokens_details":{{"cached_tokens":{usage.cached}}}'
    return f'{text},"completion_tokens_details":{{"reasoning_tokens":{usage.reasoning}}}}}'.encode()


def decode_usage_tail(tail: bytes) -> Usage | None:
    """Return the usage in a usage tail; None if it has no valid count."""
    end = tail.find(b"}\n\n")  # of the event; a tail that the gateway wrote has none
    return decode_usage(b'{"prompt_tokens":' + (tail if end < 0 else tail[:end]))


def merged(before: Usage | None, after: Usage | None) -> Usage | None:
    """Merge two usages of one stream. Anthropic's API reports the prompt first and the completion last; other counts only grow."""
    if before is None or after is None:
        return after or before
    return Usage(
        max(before.prompt, after.prompt),
        max(before.completion, after.completion),
        max(before.cached, after.cached),
        max(before.reasoning, after.reasoning),
    )
