"""The usage objects, and when a stream carries them.

Owns vLLM's semantics: a usage event at the end with ``include_usage``, on every event with
``continuous_usage_stats`` or ``--enable-force-include-usage``; details only with their flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from upstream.simulator.endpoints.fields import StreamOptions
from upstream.simulator.engine.job import Transcript
from upstream.simulator.flags import Settings


@dataclass(frozen=True, slots=True)
class UsageOptions:
    """The events of a stream that have usage."""

    at_end: bool
    running: bool

    @classmethod
    def of(cls, options: StreamOptions | None, settings: Settings) -> UsageOptions:
        return cls(at_end=True, running=True) if settings.force_include_usage else cls.requested(options)

    @classmethod
    def requested(cls, options: StreamOptions | None) -> UsageOptions:
        """Return the events that the request alone decides."""
        at_end = options is not None and bool(options.include_usage)
        return cls(at_end=at_end, running=at_end and options is not None and bool(options.continuous_usage_stats))


def counts(prompt: int, completion: int) -> dict[str, Any]:
    """Return the token counts of a completion as a usage object."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def chat(transcript: Transcript, settings: Settings) -> dict[str, Any]:
    """Return the totals of a chat response, with every field."""
    details = {"cached_tokens": transcript.cached, "created_cache_tokens": 0, "multimodal_tokens": None}
    return {
        **counts(transcript.prompt_tokens, transcript.completion_tokens),
        "prompt_tokens_details": details if settings.prompt_tokens_details else None,
        "completion_tokens_details": _completion_details(transcript.reasoning_tokens, settings),
    }


def running_chat(transcript: Transcript, at: int, settings: Settings) -> dict[str, Any]:
    """Return the usage of one choice so far."""
    choice = transcript.choices[at]
    details = _completion_details(choice.reasoning_tokens, settings)
    return {**counts(transcript.prompt_tokens, len(choice.tokens)), "completion_tokens_details": details}


def completion(transcript: Transcript, settings: Settings) -> dict[str, Any]:
    """Return the totals of a completion, with every field."""
    details = {"cached_tokens": transcript.cached, "created_cache_tokens": None, "multimodal_tokens": None}
    return {
        **counts(transcript.prompt_tokens, transcript.completion_tokens),
        "prompt_tokens_details": details if settings.prompt_tokens_details else None,
        "completion_tokens_details": None,
    }


def message(transcript: Transcript, settings: Settings) -> dict[str, int]:
    """Return the totals of a message in Anthropic's format: ``input_tokens`` does not include cached tokens."""
    cached = {"cache_read_input_tokens": transcript.cached, "cache_creation_input_tokens": 0} if settings.prompt_tokens_details else {}
    read = transcript.prompt_tokens - sum(cached.values())
    return {"input_tokens": read, "output_tokens": transcript.completion_tokens, **cached}


def without_details(prompt: int, completion: int = 0) -> dict[str, Any]:
    """Return a usage without details."""
    return {**counts(prompt, completion), "prompt_tokens_details": None, "completion_tokens_details": None}


def present(value: dict[str, Any]) -> dict[str, Any]:
    """Remove null fields at any depth (pydantic's exclude_none)."""
    return {name: present(field) if isinstance(field, dict) else field for name, field in value.items() if field is not None}


def _completion_details(reasoning: int, settings: Settings) -> dict[str, int] | None:
    return {"reasoning_tokens": reasoning} if settings.reasoning_parser is not None else None
