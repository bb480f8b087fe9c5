"""How the stream of a request would be continued on another server. Pure.

The rule: these tables follow docs/continuation.md, which is made by a test from real runs. A field that is not in them was not proved, so
such a request is not continued by its token IDs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from gateway.api.routes import Dialect
from gateway.snapshot.snapshot import Resume


class Path(StrEnum):
    """How a stream is continued."""

    TOKEN_IDS = "token_ids"  # noqa: S105  not a password
    """The other server continues the token IDs of the prompt and of the response so far."""
    REGENERATION = "regeneration"
    """The other server makes the whole response again. The part that was sent is compared and left out."""


class Plan(msgspec.Struct, frozen=True):
    """How a stream would be continued.

    ``sampled``: the rest is valid, but an undisturbed response would have another one. ``overlap``: the characters of the longest stop
    string of a completion, without its last one.
    """

    path: Path
    sampled: bool = False
    overlap: int = 0


_Accepts = Callable[[Any], bool]
_LONGEST_STOP = 1000
"""Characters of a stop string. Each token whose text may be the start of one takes memory."""


def _any(_: object) -> bool:
    return True


def _is_none(value: object) -> bool:
    return value is None


def _is_zero(value: object) -> bool:
    return value is None or value == 0


def _is_false(value: object) -> bool:
    return value is None or value is False


def _is_one(value: object) -> bool:
    return value is None or value == 1


def _is_bool(value: object) -> bool:
    return value is None or isinstance(value, bool)


def _has_stops(value: object) -> bool:
    """Return whether these are stop strings that are not too long."""
    return all(isinstance(stop, str) and 0 < len(stop) <= _LONGEST_STOP for stop in _list_of(value))


def _list_of(value: object) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _has_text_only(messages: object) -> bool:
    """Return whether all messages are text."""
    return isinstance(messages, list) and all(isinstance(each, dict) and _is_text(each.get("content")) for each in messages)


def _is_text(content: object) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)


_SHARED: Mapping[str, _Accepts] = {
    **dict.fromkeys(("model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens"), _any),
    **dict.fromkeys(("logit_bias", "repetition_penalty", "ignore_eos", "stop_token_ids", "user", "priority", "cache_salt"), _any),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs"), _is_zero),
    **dict.fromkeys(("echo", "use_beam_search", "return_token_ids", "return_tokens_as_token_ids"), _is_false),
    **dict.fromkeys(("suffix", "prompt_logprobs", "structured_outputs", "request_id"), _is_none),
    "n": _is_one,
    "best_of": _is_one,
    "response_format": lambda value: value is None or value == {"type": "text"},
}
_ALLOWED: Mapping[Dialect, Mapping[str, _Accepts]] = {
    Dialect.CHAT: {
        **_SHARED,
        **dict.fromkeys(("max_completion_tokens", "tools", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort"), _any),
        **dict.fromkeys(("thinking_token_budget", "metadata"), _any),
        "messages": _has_text_only,
        "stop": lambda value: value is None or value == [],
        "tool_choice": lambda value: value in (None, "auto", "none"),
        "include_reasoning": lambda value: value is None or value is True,
        "logprobs": _is_false,
    },
    Dialect.COMPLETIONS: {
        **_SHARED,
        "prompt": lambda value: isinstance(value, str) or (isinstance(value, list) and bool(value) and isinstance(value[0], int)),
        "logprobs": _is_none,
        "stop": _has_stops,
        "include_stop_str_in_output": _is_bool,
    },
}
"""The fields of a request that is continued by its token IDs, and which values they may have."""
_REGENERATED = frozenset({Dialect.CHAT, Dialect.COMPLETIONS, Dialect.MESSAGES, Dialect.RESPONSES})


def runs_tools(document: Mapping[str, Any]) -> bool:
    """Return whether the server itself may call tools for a request to ``/v1/responses``, such as those of an MCP server.

    The tools may have effects elsewhere, so the request must not run twice. The client calls functions itself.
    """
    tools = document.get("tools") or ()
    return not isinstance(tools, list | tuple) or not all(isinstance(each, dict) and each.get("type") == "function" for each in tools)


def plan_of(document: Mapping[str, Any], dialect: Dialect, resume: Resume, scale_out: Callable[[], bool]) -> Plan | None:
    """Return how the stream of a request would be continued; None if it would end.

    ``document`` is the request as its server gets it. ``scale_out`` returns whether all servers have the routes for token IDs of a chat.
    """
    if resume is Resume.OFF or dialect not in _REGENERATED or (dialect is Dialect.RESPONSES and runs_tools(document)):
        return None
    is_greedy = document.get("temperature") == 0
    is_drawn = resume is Resume.SAMPLED and document.get("seed") is None
    allowed = _ALLOWED.get(dialect) if is_greedy or is_drawn else None
    if allowed is not None and (dialect is Dialect.COMPLETIONS or scale_out()) and _accepts(allowed, document):
        overlap = max(map(len, _list_of(document.get("stop"))), default=1) - 1
        if is_greedy or not overlap:  # another draw has other text in place of the text that was held back
            return Plan(Path.TOKEN_IDS, not is_greedy, overlap)
    if is_greedy or document.get("seed") is not None:
        return Plan(Path.REGENERATION)
    return None


def _accepts(allowed: Mapping[str, _Accepts], document: Mapping[str, Any]) -> bool:
    return all(name == "seed" or (name in allowed and allowed[name](value)) for name, value in document.items())
