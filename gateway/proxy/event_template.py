"""The template of a stream's ordinary events: the bytes before and after the only string in which they differ. Pure.

Nearly all events of a stream differ in one string, the generated text. An event that starts and ends like an earlier one, with a text
without quotes between them, has the same fields. So it need not be searched for the marks of important fields, which takes four times as
long (docs/performance.md). The rule: a template is made only from two events that have no mark, and only if parsing it shows that the text
between its parts is a value, not a name.
"""

from __future__ import annotations

from typing import Any

import orjson

_NO_TEMPLATE = (b"\0", b"\0", 1, 1)  # no event has it
_PROBE = "\u2020\u2020"
_ATTEMPTS = 4
"""Attempts for each stream. Events with logprobs or numbers differ in more than one place, and have no template."""


class TemplateLearner:
    """Makes the template of one stream from its events.

    ``closing``: bytes that complete the JSON of an event without its end. ``frame_end``: bytes after each event.
    """

    __slots__ = ("_closing", "_frame_end", "_last", "attempts", "template")

    def __init__(self, closing: bytes = b"", frame_end: bytes = b"") -> None:
        self._closing, self._frame_end = closing, frame_end
        self._last = b""
        self.attempts = _ATTEMPTS
        """Attempts that are left. Without any, ``learn`` need not be called."""
        self.template = _NO_TEMPLATE
        """The bytes before and after the text, and their numbers."""

    def learn(self, event: bytes) -> bool:
        """Set ``template`` if this ordinary event shows it. Returns True, so that a condition can contain the call."""
        if (found := self.compare(event)) is not None:
            start, end = found[0], found[1] + self._frame_end
            self.template = start, end, len(start), len(end)
        return True

    def compare(self, event: bytes) -> tuple[bytes, bytes] | None:
        """Compare an ordinary event with the one before. Returns the template, or None."""
        last, self._last = self._last, event
        if not last or last == event:
            return None
        self.attempts -= 1
        shorter = min(len(last), len(event))
        same = next((at for at in range(shorter) if last[at] != event[at]), shorter)
        start = event.rfind(b'"', 0, same) + 1
        same = next((at for at in range(shorter - start) if last[-1 - at] != event[-1 - at]), shorter - start)
        end = event.find(b'"', len(event) - same)
        if start == 0 or end < start or event.find(b'"', start) != end or event[end + 1 : end + 2] not in (b",", b"}", b"]"):
            return None
        before, after = event[:start], event[end:]
        if event[start:end].find(b"\n") >= 0 or not self._is_value(before, after):
            return None
        self._last = b""  # it is probably the last time
        return before, after

    def _is_value(self, before: bytes, after: bytes) -> bool:
        """Return whether a text between these bytes is the value of a field."""
        try:
            document = orjson.loads(before[before.find(b"{") :] + _PROBE.encode() + after + self._closing)
        except orjson.JSONDecodeError:
            return False
        return _has_value(document)


def _has_value(node: Any) -> bool:
    """Return whether the probe is a value in a document."""
    if isinstance(node, dict | list):
        return any(_has_value(value) for value in (node.values() if isinstance(node, dict) else node))
    return bool(node == _PROBE)
