"""Compare two outcomes, as JSON or as sentences. Pure.

The rule: texts come from clients and models, so control characters never reach a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import unified_diff
from typing import Any

import msgspec

from gateway.recording.outcome import Outcome, ToolCall

_CONTEXT = 1  # equal lines around a difference
_MOST_LINES = 200  # of a difference


def compared(before: Outcome, after: Outcome) -> dict[str, Any]:
    """Return two outcomes and what is the same, as JSON."""
    same = {name: getattr(before, name) == getattr(after, name) for name in ("status", "text", "tool_calls", "usage")}
    return {"recorded": msgspec.to_builtins(before), "replayed": msgspec.to_builtins(after), "same": same}


def sentences(before: Outcome, after: Outcome) -> Iterator[str]:
    """Yield lines that say what differs."""
    yield f"Recorded: {before.id}, model {printable(before.model or 'none')}. Now: {after.id}, model {printable(after.model or 'none')}."
    yield f"Status: {_both(str(before.status), str(after.status))}."
    for name, outcome in (("recorded", before), ("now", after)):
        if outcome.error is not None:
            yield f"Error ({name}): {printable(outcome.error)}"
    yield from _text(before.text, after.text)
    yield from _calls(before.tool_calls, after.tool_calls)
    yield f"Tokens: {_both(_tokens(before), _tokens(after))}."
    yield f"First byte: {_both(_seconds(before.first_byte), _seconds(after.first_byte))}."
    yield f"Duration: {_both(_seconds(before.duration), _seconds(after.duration))}."


def printable(text: str) -> str:
    """Return a text without control characters, apart from line feeds."""
    return "".join(each if each.isprintable() or each == "\n" else "�" for each in text)


def _both(before: str, after: str) -> str:
    return f"{before}, as recorded" if before == after else f"{before} recorded, {after} now"


def _text(before: str, after: str) -> Iterator[str]:
    if before == after:
        yield f"Text: the same, {len(before)} characters."
        return
    yield f"Text: it differs, {len(before)} characters recorded, {len(after)} now."
    lines = list(unified_diff(before.splitlines(), after.splitlines(), "recorded", "now", lineterm="", n=_CONTEXT))
    yield from (f"  {printable(line)}" for line in lines[:_MOST_LINES])
    if len(lines) > _MOST_LINES:
        yield f"  and {len(lines) - _MOST_LINES} more lines"


def _calls(before: tuple[ToolCall, ...], after: tuple[ToolCall, ...]) -> Iterator[str]:
    if before == after:
        yield f"Tool calls: the same, {len(before)}." if before else "Tool calls: none, as recorded."
        return
    yield f"Tool calls: they differ, {len(before)} recorded, {len(after)} now."
    for name, calls in (("-", before), ("+", after)):
        yield from (f"  {name} {printable(call.name)}({printable(call.arguments)})" for call in calls)


def _tokens(outcome: Outcome) -> str:
    usage = outcome.usage
    return "not reported" if usage is None else f"{usage.prompt} prompt and {usage.completion} completion"


def _seconds(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds:.3f} s"
