"""The running usage of a stream: the counts that a server reports with each event, from which a truncated stream is charged.

A server that got ``stream_options.continuous_usage_stats`` adds a ``usage`` object to each event of /v1/chat/completions and
/v1/completions. In vLLM 0.32 it has the tokens of the event's own choice so far, and the tokens of that choice's prompt. So the last event
of each choice that was sent to the client has the exact count of the received tokens, whatever an event contains.

The rules: if the client did not request these counts, it gets the bytes that the server would have sent without them. An event is
counted in the same call that sends it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gateway.api.json_scan import Scanner
from gateway.api.usage import USAGE_START, Usage, convert_usage, decode_usage_tail, usage_tail

_ORDINARY = re.compile(
    rb',"usage":\{"prompt_tokens":\d+,"total_tokens":\d+,"completion_tokens":\d+(?:,"\w+":(?:null|\{"\w+":\d+\}))*\}(?=\}\n\n\Z)'
)
"""The usage of an ordinary event: the last field of the document, whatever strings are before it, since a string has no bare quote."""
_BEFORE = re.compile(rb'(,?)[ \t]*"[^"]*"[ \t]*:[ \t]*\Z')
_AFTER = re.compile(rb"[ \t]*(,?)")


class RunningUsage:
    """The counts of one stream so far.

    ``choices``: the number of choices for each of ``prompts``. ``hidden``: the gateway requested the counts, not the client.
    """

    __slots__ = ("_choices", "_latest", "_prompts", "hidden", "tail", "uncovered")

    def __init__(self, choices: int, prompts: int, *, hidden: bool) -> None:
        self._choices = choices
        self._prompts = prompts
        self.hidden = hidden
        self._latest: dict[int, Usage] = {}  # by the index of the choice
        self.uncovered = False
        """An event of a choice had no counts, so ``usage`` does not cover all events."""
        self.tail = b""
        """The bytes after USAGE_START in the last chunk of the fast path."""

    @property
    def is_simple(self) -> bool:
        """Whether the last event has all counts, and only the gateway wants them."""
        return self.hidden and self._choices == self._prompts == 1 and not self.uncovered and 0 in self._latest

    @property
    def usage(self) -> Usage | None:
        """The tokens of all events with counts; None without such an event. A prompt counts once, for any number of choices."""
        if self.tail:
            latest = decode_usage_tail(self.tail)
            if latest is not None:
                self._latest[0] = latest
            self.tail = b""
        if not self._latest:
            return None
        prompts = {index // self._choices if self._prompts > 1 else 0: each.prompt for index, each in self._latest.items()}
        usages = self._latest.values()
        return Usage(sum(prompts.values()), sum(each.completion for each in usages), 0, sum(each.reasoning for each in usages))

    def latest_tail(self) -> bytes:
        """Return the tokens of all events so far as a usage tail; empty if they are not known."""
        if self.tail:
            return self.tail
        usage = None if self.uncovered else self.usage
        return b"" if usage is None else usage_tail(usage)

    def read(self, event: bytes, document: Mapping[str, Any]) -> bytes:
        """Read the counts of an event that is about to be sent. Returns the bytes for the client."""
        choices = document.get("choices")
        if not isinstance(choices, list) or not choices:
            return event  # the final usage, or no event of a choice
        found = document.get("usage")
        usage = convert_usage(found) if isinstance(found, dict) else None
        index = choices[0].get("index") if len(choices) == 1 and isinstance(choices[0], dict) else None
        if usage is None or not isinstance(index, int):
            self.uncovered = True
        else:
            self._latest[index] = usage
            self.tail = b""  # of an earlier event
        if not self.hidden or found is None:
            return event
        span = _usage_span(event)
        return event if span is None else event[: span[0]] + event[span[1] :]


_WANTED: Mapping[str, None] = {"usage": None}


def _usage_span(event: bytes) -> tuple[int, int] | None:
    """Return where the usage field of an event's document starts and ends, with one comma; None if it is not in one line of data."""
    ordinary = _ORDINARY.search(event, max(event.rfind(USAGE_START), 0))
    if ordinary is not None:
        return ordinary.span()
    opening = event.find(b"{")
    if opening < 0 or event.count(b"data:", 0, opening) != 1:
        return None
    spans = Scanner(_WANTED).feed(event[opening:])
    if len(spans) != 1 or not spans[0].is_last:
        return None
    start, end = opening + spans[0].start, opening + spans[0].end
    before = _BEFORE.search(event, max(start - 64, 0), start)
    if before is None:
        return None
    if before[1]:
        return before.start(), end
    after = _AFTER.match(event, end)
    return before.start(), end if after is None else after.end()
