"""The template of a stream's ordinary events: their bytes around the only text in which they differ. Pure.

Nearly all events of a stream differ in one string, the generated text, and in numbers after it. An event that equals an earlier one apart
from these has the same fields. So it need not be parsed again, which takes four times as long (docs/performance.md).

The rule: a template is learned only from an event that was parsed and found ordinary, and the text is at one of ``_TEXTS``. This is an
allow-list: what a template does not describe byte by byte is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from gateway.api.routes import Dialect
from gateway.api.usage import USAGE_START

EVENT_END = b"}\n\n"
"""The end of an event as vLLM writes it, with the end of its document."""
_FRAME_END = b"\r\n"
_PROBE = "\u2020\u2020"
_ATTEMPTS = 8
"""Templates of each stream. The events of several choices, or with log probabilities, differ in more than a text."""

Path = tuple[str | int, ...]
_CHOICE: Path = ("choices", 0)
_TEXTS: Mapping[Dialect, Sequence[Path]] = {
    Dialect.CHAT: (
        (*_CHOICE, "delta", "content"),
        (*_CHOICE, "delta", "reasoning"),
        (*_CHOICE, "delta", "reasoning_content"),
        (*_CHOICE, "delta", "tool_calls", 0, "function", "arguments"),
    ),
    Dialect.COMPLETIONS: ((*_CHOICE, "text"),),
    Dialect.RESPONSES: (("delta",),),
    Dialect.MESSAGES: (("delta", "text"), ("delta", "thinking"), ("delta", "partial_json")),
    Dialect.COHERE: (),  # not streamed
    Dialect.PLAIN: ((*_CHOICE, "delta", "content"),),
}
"""Where an event has its text. The gateway acts on no text at these positions."""

TEXT = re.compile(rb'[^\x00-\x1f"\\]*(?:\\["\\/bfnrt][^\x00-\x1f"\\]*)*"')
"""The rest of a JSON string, without escaped code units."""
_NUMBER = re.compile(rb'(?<=":)(?<!index":)(?:0|[1-9][0-9]*)(?=[,}\]])')
_RECORDED_IDS = re.compile(rb'"token_ids":\[([0-9,]+)\]')
_NUMBER_PATTERN = rb"(?:0|[1-9][0-9]*)"


class EventTemplate(NamedTuple):
    """An ordinary event that is alone in its chunk."""

    start: bytes
    """The bytes before the text, from the first byte of the event."""
    end: bytes
    """The bytes after the text, from its quote to the first number."""
    numbers: re.Pattern[bytes] | None
    """Matches the bytes from the first number to the end of the chunk; None if there is no number, and ``end`` ends the chunk."""
    hidden: int
    """The bytes from the text's quote to the running usage that is left out, which is the last field; -1 if nothing is left out."""
    start_size: int
    end_size: int


class RecordedTemplate(NamedTuple):
    """An ordinary event with token IDs, which its client does not get, alone in its chunk."""

    start: bytes
    """The bytes before the text, from the first byte of the event."""
    end: bytes
    """The bytes after the text, from its quote to the first token ID."""
    rest: re.Pattern[bytes]
    """Matches the bytes from the first token ID to the end of the chunk; its group is the IDs."""
    shown: bytes
    """The bytes that the client gets instead of ``rest``."""
    usage: int
    """The bytes from the last token ID to the running usage, which is left out; -1 without one."""
    start_size: int
    end_size: int


NO_RECORDED = RecordedTemplate(b"\0", b"\0", re.compile(b"\0()"), b"", -1, 1, 1)
"""Stands for the template of a recorded stream that has none yet: no event has it."""
NO_TEMPLATE = EventTemplate(b"\0", b"\0", None, -1, 1, 1)
"""The template of a stream without one: no event has it."""


class TemplateLearner:
    """Makes the templates of one stream from its ordinary events."""

    __slots__ = ("_attempts", "_texts", "recorded", "template", "text")

    def __init__(self, dialect: Dialect) -> None:
        self._texts = _TEXTS[dialect]
        self._attempts = _ATTEMPTS
        self.template = NO_TEMPLATE
        """The template of the last ordinary event that had one."""
        self.text: Path = ()
        """The name of the text of ``template`` in a record of texts, if there is one."""
        self.recorded = NO_RECORDED
        """The template of the last ordinary event with token IDs."""

    def forget(self) -> None:
        """Forget the template: the next event must be parsed."""
        self.template, self.recorded = NO_TEMPLATE, NO_RECORDED

    def learn(self, event: bytes, document: Mapping[str, Any], shown: bytes, name: Path = ()) -> None:
        """Make the template of an ordinary event. ``shown``: what the client gets of it, without its running usage.

        ``name``: of its text, in a record of texts.
        """
        if (text := self._text_of(document)) is not None and (template := _template(event, document, *text, shown)) is not None:
            self.template, self.text = template, name

    def learn_recorded(self, event: bytes, document: Mapping[str, Any], shown: bytes) -> None:
        """Make the template of an ordinary event with token IDs. ``shown``: what the client gets of it; ``document``: without IDs."""
        if (text := self._text_of(document)) is not None and (found := _recorded(event, document, *text, shown)) is not None:
            self.recorded = found
            self.template = EventTemplate(found.start, found.end, found.rest, -1, found.start_size, found.end_size)

    def _text_of(self, document: Mapping[str, Any]) -> tuple[Path, str] | None:
        """Return the path and the text of a document; None without one, or after the last attempt."""
        for path in self._texts if self._attempts else ():
            text = _value_at(document, path)
            if isinstance(text, str) and text:
                self._attempts -= 1
                return path, text
        return None


def _recorded(event: bytes, document: Mapping[str, Any], path: Path, text: str, shown: bytes) -> RecordedTemplate | None:
    """Return the template of an event with token IDs and this text; None if it is not written as vLLM writes it."""
    if (around := _around(event, text)) is None or (found := _RECORDED_IDS.search(around[1])) is None:
        return None
    start, end = around
    before, behind = end[: found.start(1)], end[found.end(1) :]
    # With null in place of the IDs, the event must be the document, and the text alone at its path.
    if not _is_at(start, before[:-1] + b"null" + behind[1:], document, path, text):
        return None
    usage = behind.find(USAGE_START)
    unchanged = behind if usage < 0 else behind[:usage] + EVENT_END
    rest = b"null" + unchanged[1:]
    if shown != event[: len(event) - len(end) + len(before) - 1] + rest:
        return None
    numbers = behind if usage < 0 else behind[usage:]
    literal = b"" if usage < 0 else behind[:usage]
    pattern = re.escape(literal) + _NUMBER_PATTERN.join(map(re.escape, _NUMBER.split(numbers + _FRAME_END)))
    return RecordedTemplate(start, before, re.compile(rb"([0-9]+(?:,[0-9]+)*)" + pattern), rest, usage, len(start), len(before))


def _template(event: bytes, document: Mapping[str, Any], path: Path, text: str, shown: bytes) -> EventTemplate | None:
    """Return the template of an event with this text; None if it is not written as vLLM writes it."""
    if (around := _around(event, text)) is None or not _is_at(*around, document, path, text):
        return None
    start, end = around
    quote, hidden = len(event) - len(end), -1
    if shown != event:  # without its running usage, which must be the last field
        hidden = len(shown) - len(EVENT_END) - quote
        if hidden < 0 or shown != event[: quote + hidden] + EVENT_END or not end.startswith(USAGE_START, hidden):
            return None
    literal, *others = _NUMBER.split(end + _FRAME_END)
    if not others:
        return EventTemplate(start, literal, None, hidden, len(start), len(literal))
    if hidden > len(literal):
        return None
    numbers = re.compile(_NUMBER_PATTERN.join((b"", *map(re.escape, others))))
    return EventTemplate(start, literal, numbers, hidden, len(start), len(literal))


def _around(event: bytes, text: str) -> tuple[bytes, bytes] | None:
    """Return the bytes of an event before a text, and those from its quote; None if it is not written as vLLM writes it."""
    written = orjson.dumps(text)
    at = event.find(written) + 1
    quote = at + len(written) - 2  # the one after the text
    if at == 0 or TEXT.fullmatch(written, 1) is None or not event.endswith(EVENT_END, quote):
        return None
    return event[:at], event[quote:]


def _is_at(before: bytes, after: bytes, document: Mapping[str, Any], path: Path, text: str) -> bool:
    """Return whether a text between these bytes of an event is the value at the path, and nothing else."""
    data = before + _PROBE.encode() + after
    try:
        found = orjson.loads(data[data.find(b"{") :])
    except orjson.JSONDecodeError:
        return False
    if _value_at(found, path) != _PROBE:
        return False
    _value_at(found, path[:-1])[path[-1]] = text
    return {**found, "usage": None} == {**document, "usage": None}  # its bytes are compared


def _value_at(node: Any, path: Path) -> Any:
    """Return the value at a path; None without one. A path's index 0 stands for the only element of a list."""
    for name in path:
        if isinstance(name, str):
            node = node.get(name) if isinstance(node, dict) else None
        else:
            node = node[name] if isinstance(node, list) and len(node) == 1 else None
    return node
