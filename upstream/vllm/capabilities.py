"""The task and the capabilities of a server, by its launch arguments or its routes. Pure.

The rule: only certain results are reported. The result is None if the arguments leave the decision to vLLM, which reads the model's files,
or if they name a file with more arguments.
"""

from __future__ import annotations

from collections.abc import Mapping

from upstream.vllm.command_line import ArgumentValue, flag_of

TASK_ROUTES: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/audio/transcriptions": "transcription",
    "/v1/embeddings": "embedding",
    "/v1/rerank": "rerank",
    "/classify": "classify",
}
"""POST routes that vLLM registers for one task only (launchers/api_server/routers.py), and the task. The first route that a server has
decides: embedding models also have the reranking route, and chat models may transcribe."""

SCALE_OUT_ROUTE = "/v1/chat/completions/derender"
"""A route of ``--enable-scale-out`` (scale_out/factories.py in vLLM 0.32). It rejects an empty object, without the engine."""

_GENERATIVE_FLAGS = frozenset({"reasoning-parser", "tool-call-parser", "enable-auto-tool-choice"})
_CONVERTED = {"embed": "embedding", "classify": "classify"}


def task_of(args: Mapping[str, ArgumentValue]) -> str | None:
    """Return ``chat``, ``embedding`` or ``classify``; None if the model's files decide."""
    given = _given(args)
    if (converted := _CONVERTED.get(str(given.get("convert")))) is not None:
        return converted
    return "chat" if given.get("runner") == "generate" or not _GENERATIVE_FLAGS.isdisjoint(given) else None


def capabilities_of(args: Mapping[str, ArgumentValue]) -> tuple[str, ...] | None:
    """Return which of ``tools``, ``reasoning`` and ``structured_outputs`` a server that generates text has."""
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
    """Return the arguments by flag, without the disabled ones."""
    return {flag_of(key): value for key, value in args.items() if value is not False}
