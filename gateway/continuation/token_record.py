"""The record of a stream: the token IDs of the response that its client was sent.

The gateway requests ``return_token_ids`` of vLLM, and removes the IDs from what the client gets. In place of IDs, vLLM writes null to a
client that does not request them. While a parser buffers the markup of a call, vLLM sends events with IDs and an empty ``delta``, which
it would not send otherwise; they are left out (``chat_completion_stream_generator`` in vLLM's openai/chat_completion/serving.py).

A completion is continued from a token after which its text is complete, so that the text after that token is made again. Only an event of
one token shows that: the last token of several may be the start of a character. With stop strings, vLLM holds back text, and another server
would miss a stop string that began before its first token. So it starts early enough that such a stop string has been looked for.

The rule: the record has the tokens of every event that was sent, and no others except those without a text. A record that is too long, or
that lacks the tokens of an event, is dropped, and its stream cannot be continued.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from gateway.api.json_scan import ELEMENT, Scanner
from gateway.api.routes import Dialect
from gateway.continuation.record_memory import RecordMemory

LONGEST = 128 * 1024
"""Tokens of the longest record."""
BYTES_PER_TOKEN = 6
"""Bytes of a token in a record: its ID, and the number of tokens in its event."""
_STEP = 4096 * BYTES_PER_TOKEN
_MOST_OF_EVENT = 0xFFFF
_PROMPT = "prompt_token_ids"
_IDS = "token_ids"
_SPANS: Mapping[str, Any] = {_PROMPT: None, "choices": {ELEMENT: {_IDS: None, _PROMPT: None}}}
_NULL = b"null"


class TokenRecord:
    """The tokens of one stream with one choice.

    ``hold`` reserves their memory (``RecordMemory``). ``overlap``: the characters of the longest stop string of a completion, without its
    last one.
    """

    __slots__ = (
        "_dialect",
        "_memory",
        "_points",
        "_position",
        "_sent",
        "call_ids",
        "counts_reasoning",
        "finish",
        "head",
        "ids",
        "is_usable",
        "lengths",
        "overlap",
        "prompt",
        "prompt_size",
        "shown",
        "tools_sent",
        "usage_sent",
    )

    def __init__(self, dialect: Dialect, hold: Callable[[int], bool], overlap: int = 0) -> None:
        self._dialect: Dialect = dialect
        self._memory: RecordMemory = RecordMemory(hold, _STEP, LONGEST * BYTES_PER_TOKEN)
        self._points: deque[tuple[int, int]] = deque()  # tokens after which a completion may be continued later, with the characters sent
        self._sent: int = 0  # characters, without those of events that need no count
        self._position: int = 0  # of them, up to the tokens of ``shown``
        self.overlap: int = overlap
        self.ids: array[int] = array("I")
        """The tokens of the response so far."""
        self.lengths: array[int] = array("H")
        """The number of tokens of each event."""
        self.shown: int = 0
        """The tokens after which a completion can be continued."""
        self.prompt: array[int] = array("I")
        """The tokens of the prompt of a completion. ``render`` gives those of a chat."""
        self.prompt_size: int = 0
        self.head: Mapping[str, Any] = {}
        """The first fields of each event: the ID, the time and the model of the response."""
        self.counts_reasoning: bool = False
        """Whether the server counts the tokens of the reasoning: it has a parser for it."""
        self.tools_sent: bool = False
        self.call_ids: list[str] = []
        self.finish: str | None = None
        """The finish reason, once it was received."""
        self.usage_sent: bool = False
        """Whether the final usage was received."""
        self.is_usable: bool = True

    @property
    def has_begun(self) -> bool:
        """Whether an event of the stream was received."""
        return bool(self.head)

    def add(self, ids: list[int]) -> None:
        """Add the tokens of one event."""
        if len(ids) > _MOST_OF_EVENT or not self._memory.take(len(ids) * BYTES_PER_TOKEN):
            self.drop()
            return
        before = len(self.ids)
        try:
            self.ids.extend(ids)
        except OverflowError:
            self._add_wide(before, ids)
        if ids:
            self.lengths.append(len(ids))

    def _add_wide(self, before: int, ids: list[int]) -> None:
        """Add tokens above 32 bits, which no vocabulary of a real model has."""
        try:
            self.ids = array("q", [*self.ids[:before], *ids])
        except OverflowError:
            self.drop()

    @property
    def surplus(self) -> int:
        """The characters that were sent after the text of the event with the last token of ``shown``."""
        return self._sent - self._position

    def add_shown(self, ids: bytes, text: bytes) -> None:
        """Add the tokens of an event with a text, as both are written in it."""
        self.add_hidden(ids)
        is_alone = ids.find(b",") < 0
        if is_alone and not self.overlap:
            self.shown, self._position = len(self.ids), self._sent
        elif self._dialect is Dialect.COMPLETIONS:
            try:
                self._note_text(orjson.loads(b'"%b"' % text), is_alone=is_alone)
            except orjson.JSONDecodeError:  # not UTF-8
                self.drop()

    def _note_text(self, text: str, *, is_alone: bool) -> None:
        """Note the text of an event. ``is_alone``: the event has one token."""
        self._sent += len(text)
        if is_alone:
            self._points.append((len(self.ids), self._sent))
        while self._points and self._points[0][1] + self.overlap <= self._sent:
            self.shown, self._position = self._points.popleft()

    def add_hidden(self, ids: bytes) -> None:
        """Add the tokens of an event with an empty text, as they are written in it."""
        if self.is_usable:
            self.add([int(ids)] if ids.find(b",") < 0 else [int(each) for each in ids.split(b",")])

    def drop(self) -> None:
        """Forget the tokens: the stream cannot be continued."""
        self.is_usable = False
        self.ids, self.lengths, self.prompt = array("I"), array("H"), array("I")

    def keep_shown(self) -> None:
        """Forget the tokens after those of ``shown``, which are made again."""
        while len(self.ids) > self.shown:
            del self.ids[max(len(self.ids) - self.lengths.pop(), self.shown) :]

    def take(self, event: bytes, document: dict[str, Any]) -> bytes:
        """Record an event, and return it without its IDs: empty if vLLM would not have sent it. ``document`` loses them, too."""
        choices = document.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            self.usage_sent = self.usage_sent or (choices == [] and isinstance(document.get("usage"), dict))
            if choices != []:
                self.drop()
            return _without_ids(event) or event
        choice, usage = choices[0], document.get("usage")
        if isinstance(usage, dict) and usage.get("completion_tokens_details") is not None:
            self.counts_reasoning = True
        if not self.head:
            self.head = {name: document[name] for name in ("id", "object", "created", "model") if name in document}
        self._take_prompt(document.get(_PROMPT) or choice.get(_PROMPT))
        if not self._knows_tokens(choice):
            self.drop()
        found = choice.get(_IDS)
        ids = [each for each in found if isinstance(each, int)] if isinstance(found, list) else []
        if self.is_usable:
            self.add(ids)
        self._note(choice, is_alone=len(ids) == 1)
        shown = _without_ids(event)
        for owner, name in ((document, _PROMPT), (choice, _PROMPT), (choice, _IDS)):
            if name in owner:
                owner[name] = None
        if self._dialect is Dialect.CHAT and ids and choice.get("delta") == {} and choice.get("finish_reason") is None:
            return b""
        return b"data: " + orjson.dumps(document) + b"\n\n" if shown is None else shown

    def _knows_tokens(self, choice: Mapping[str, Any]) -> bool:
        """Return whether an event has the tokens of its text, and the tokens of a completion's prompt are known."""
        ids, delta = choice.get(_IDS), choice.get("delta")
        if isinstance(ids, list) and ids:
            return all(type(each) is int for each in ids) and (self.prompt_size > 0 or self._dialect is Dialect.CHAT)
        texts = delta if isinstance(delta, dict) else {"text": choice.get("text")}
        return choice.get("finish_reason") is not None or not any(text for name, text in texts.items() if name != "role")

    def _take_prompt(self, prompt: object) -> None:
        if not isinstance(prompt, list) or self.prompt_size:
            return
        self.prompt_size = len(prompt)
        if self._dialect is not Dialect.COMPLETIONS:
            return
        if self._memory.take(len(prompt) * BYTES_PER_TOKEN):
            self.prompt = _array(prompt)
        else:
            self.drop()

    def _note(self, choice: Mapping[str, Any], *, is_alone: bool) -> None:
        finish, delta, text = choice.get("finish_reason"), choice.get("delta"), choice.get("text")
        self.finish = finish if isinstance(finish, str) else self.finish
        if isinstance(text, str) and text:
            self._note_text(text, is_alone=is_alone)
        calls = delta.get("tool_calls") if isinstance(delta, dict) else None
        if isinstance(calls, list):
            self.tools_sent = self.tools_sent or bool(calls)
            self.call_ids += [call["id"] for call in calls if isinstance(call, dict) and isinstance(call.get("id"), str)]


def _array(ids: list[int]) -> array[int]:
    try:
        return array("I", ids)
    except OverflowError:
        return array("q", ids)


def _without_ids(event: bytes) -> bytes | None:
    """Return an event with null instead of its token IDs; None if its data is not one line, as vLLM writes it."""
    opening = event.find(b"{")
    if event[:opening].rstrip(b" \t") != b"data:" or event.find(b"\r") >= 0 or event.find(b"\n") < len(event) - 2:
        return None
    parts, last = [], 0
    for _, start, end, _ in Scanner(_SPANS).feed(event[opening:]):
        parts += [event[last : opening + start], _NULL]
        last = opening + end
    return b"".join((*parts, event[last:]))
