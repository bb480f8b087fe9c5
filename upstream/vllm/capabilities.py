"""What a server is for and can do, read from its launch arguments or from the routes that it has. Pure.

The rule: only what these decide is reported. Where the arguments leave it to vLLM, which looks at the model's files, or name a file with
more arguments, it is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from upstream.vllm.command_line import ArgumentValue, flag_of

TASK_ROUTES: Mapping[str, str] = MappingProxyType(
    {
        "/v1/chat/completions": "chat",
        "/v1/audio/transcriptions": "transcription",
        "/v1/embeddings": "embedding",
        "/v1/rerank": "rerank",
        "/classify": "classify",
    }
)
"""Routes of POST that vLLM registers for a task alone (launchers/api_server/routers.py), and the task. The first one that a server has
decides: embedding models have that of reranking too, and chat models may transcribe."""

_PARSERS = ("reasoning-parser", "tool-call-parser")
_OF_GENERATING = frozenset({*_PARSERS, "enable-auto-tool-choice"})
_CONVERTED = {"embed": "embedding", "classify": "classify"}


def task_of(args: Mapping[str, ArgumentValue]) -> str | None:
    """``chat``, ``embedding`` or ``classify``; None where the model's files decide."""
    given = _given(args)
    converted = _CONVERTED.get(str(given.get("convert")))
    if converted is not None:
        return converted
    if given.get("runner") == "generate" or not _OF_GENERATING.isdisjoint(given):
        return "chat"
    return None


def capabilities_of(args: Mapping[str, ArgumentValue]) -> tuple[str, ...] | None:
    """Of a server that generates text: ``tools``, ``reasoning`` and ``structured_outputs``, as far as it has them."""
    given = _given(args)
    if "config" in given:
        return None
    found = ["structured_outputs"]
    if given.get("enable-auto-tool-choice") and given.get("tool-call-parser"):
        found.append("tools")
    if given.get("reasoning-parser"):
        found.append("reasoning")
    return tuple(found)


def _given(args: Mapping[str, ArgumentValue]) -> dict[str, ArgumentValue]:
    """By flag, without those that are turned off."""
    return {flag_of(key): value for key, value in args.items() if value is not False}
