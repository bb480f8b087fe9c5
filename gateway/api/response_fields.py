"""The fields of a response that the gateway acts on, and where each dialect has them.

The rule: a field is read at its own path in the parsed document only. Much of a response may be the client's text, also as nested JSON
(metadata, tools, arguments of tool calls, messages), and must not be read as a field of the server.

Where vLLM 0.32 has the fields:

| dialect | usage | the engine stopped the request | the usage is final in |
|---|---|---|---|
| chat, completions | ``usage`` | ``choices[*].finish_reason`` is ``abort`` | the event whose ``choices`` is empty |
| responses | ``usage``; ``response.usage`` of the last event | the same object's ``status`` is ``cancelled`` | the last event |
| messages | ``usage``; ``message.usage`` of ``message_start``, ``usage`` of ``message_delta`` | no ``stop_reason`` | ``message_delta`` |
| cohere | ``meta.billed_units`` | not reported | not streamed |
| plain (embeddings, rerank, score, audio and others) | ``usage`` | not reported | the event whose ``choices`` is empty |

A message has a ``stop_reason`` for each other end that it can have (``_to_anthropic_stop_reason`` in vLLM). A stream of messages has null
there, after the end of its last block was sent, and is not read as stopped. Responses are ``cancelled`` for gpt-oss models only; others are
``completed`` (``responses_full_generator``). The last events of responses are
``response.completed``, ``response.incomplete`` and ``response.failed``.

In streams of responses and messages the events that open and close an item have no tokens, and are not counted as tokens
(``events_without_tokens``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import orjson
from msgspec.structs import replace

from gateway.api.json_scan import ELEMENT, Scanner, Wanted
from gateway.api.routes import Dialect
from gateway.api.usage import Usage, UsageObject, convert_usage, decode_usage
from upstream.http.sse import split

_ESCAPED = b"\\u00"  # an ASCII letter may be escaped like this, also in a key

WHOLE_SIZE = 64 * 1024
"""Bytes of a document that is parsed as a whole. A longer document is scanned while it passes."""

_LONGEST_USAGE = 64 * 1024
_LAST_OF_RESPONSES = frozenset({"response.completed", "response.incomplete", "response.failed"})

_CHOICES: Wanted = {"usage": None, "choices": {ELEMENT: {"finish_reason": None}}}
_DONE = (b"data: [DONE]",)


class _Shape(NamedTuple):
    """The fields of a dialect that are scanned for, and how its texts and events look.

    ``last_events``: how the last event of a stream starts. A stream without it is truncated. ``stopped``: the text in the body of a stopped
    engine, unless it is escaped; other bodies are parsed for their usage alone. ``parsed_size``: the bytes up to which ``of_body`` uses its
    own parser, which reads ``usage`` at the top level only. ``text_events``: the types of events with a part of a text; None for choices.
    """

    wanted: Wanted
    last_events: tuple[bytes, ...]
    stopped: bytes = b'"abort"'
    parsed_size: int = WHOLE_SIZE
    text_events: frozenset[str] | None = None


_SHAPES: Mapping[Dialect, _Shape] = {
    Dialect.CHAT: _Shape(_CHOICES, _DONE),
    Dialect.COMPLETIONS: _Shape(_CHOICES, _DONE),
    Dialect.RESPONSES: _Shape(
        {"usage": None, "status": None},
        (*(f"event: {kind}".encode() for kind in _LAST_OF_RESPONSES), b"event: error"),
        stopped=b'"cancelled"',
        text_events=frozenset({"response.output_text.delta", "response.reasoning_text.delta", "response.function_call_arguments.delta"}),
    ),
    Dialect.MESSAGES: _Shape(
        {"usage": None, "type": None, "stop_reason": None},
        (b"event: message_stop", b"event: error"),
        text_events=frozenset({"content_block_delta"}),
    ),
    Dialect.COHERE: _Shape({"meta": {"billed_units": None}}, (), parsed_size=-1),  # not streamed
    Dialect.PLAIN: _Shape({"usage": None}, _DONE),  # audio: no other route of this dialect is streamed
}

_COUNTS = (("usage",), ("meta", "billed_units"))


class Fields(msgspec.Struct, frozen=True, gc=False):
    """The fields of a response, or of one of its events.

    ``stopped``: the engine stopped the request. ``is_final``: no later event reports another usage.
    """

    usage: Usage | None = None
    stopped: bool = False
    is_final: bool = False


_NOTHING = Fields()


# Events, and bodies that have been parsed


def of_event(document: Mapping[str, Any], dialect: Dialect) -> Fields:
    """Return the fields of an event's data."""
    match dialect:
        case Dialect.RESPONSES:
            response = document.get("response")
            if document.get("type") not in _LAST_OF_RESPONSES or not isinstance(response, dict):
                return _NOTHING
            return Fields(_usage_of(response), _is_stopped(response, dialect), is_final=True)
        case Dialect.MESSAGES:
            kind, message = document.get("type"), document.get("message")
            if kind == "message_start" and isinstance(message, dict):
                return Fields(_usage_of(message))
            return Fields(_usage_of(document), is_final=True) if kind == "message_delta" else _NOTHING
    return Fields(_usage_of(document), _is_stopped(document, dialect), document.get("choices") == [])


def is_ordinary(document: Mapping[str, Any], dialect: Dialect) -> bool:
    """Return whether an event has a part of a text and nothing else that the gateway acts on, aside from running usage."""
    if (kinds := _SHAPES[dialect].text_events) is not None:
        return document.get("type") in kinds and not {"error", "usage", "message", "response"} & document.keys()
    choices = document.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or "error" in document or "type" in document:
        return False
    return isinstance(choices[0], dict) and choices[0].get("finish_reason") is None and not choices[0].get("index")


def ends_choice(document: Mapping[str, Any]) -> bool:
    """Return whether an event is the last one of its choice."""
    choices = document.get("choices")
    return isinstance(choices, list) and any(isinstance(each, dict) and each.get("finish_reason") is not None for each in choices)


_WITHOUT_TOKENS: Mapping[str, int] = {
    "response.created": 1,
    "response.in_progress": 1,
    "response.output_item.added": 1,
    "response.output_item.done": 2,
    "message_start": 1,
    "content_block_start": 1,
    "content_block_stop": 1,
    "ping": 1,
}
_WITH_PARTS = frozenset({"message", "reasoning"})  # items of responses whose text is in a part, which has its own events


def events_without_tokens(document: Mapping[str, Any], block: str = "") -> int:
    """Return how many events without tokens an event of responses or messages stands for: itself, and those that vLLM sends with it.

    ``block`` is the type of the last block that was opened. vLLM sends these together: an item with the part that it opens, the
    end of a text with the ends of its part and its item, and the signature of a thinking block with its end.
    """
    kind, item = document.get("type"), document.get("item")
    if not isinstance(kind, str):
        return 0
    has_more = (isinstance(item, dict) and item.get("type") in _WITH_PARTS) or (block == "thinking" and kind == "content_block_stop")
    return _WITHOUT_TOKENS.get(kind, 0) + (has_more and kind in _WITHOUT_TOKENS)


def opened_block(document: Mapping[str, Any]) -> str:
    """Return the type of the block that an event of messages opens; empty for other events."""
    block = document.get("content_block")
    kind = block.get("type") if isinstance(block, dict) and document.get("type") == "content_block_start" else None
    return kind if isinstance(kind, str) else ""


ITEMIZED = frozenset({Dialect.RESPONSES, Dialect.MESSAGES})
"""The dialects whose streams have events without tokens between the others."""
EVENTS_BEFORE_TOKENS: Mapping[Dialect, int] = dict.fromkeys(Dialect, 0) | {Dialect.CHAT: 1}
"""The events at the start of a stream that have no tokens and no mark: the role, in vLLM's chat."""


def ends_stream(events: bytes, rest: bytes, dialect: Dialect) -> bool:
    """Return whether a stream's last read, or the incomplete event after it, has the stream's last event.

    The blank line after that event may be missing, the LF of its last CRLF may come late, and more blank lines may follow.
    """
    last, rest = _SHAPES[dialect].last_events, rest.strip()
    if rest:
        return rest in last
    if not any(events.find(start) >= 0 for start in last):  # most reads, which need not be split
        return False
    return any(event.lstrip(b"\r\n").startswith(last) for event in split(events.rstrip(b"\r\n"))[-1:])


def of_document(document: Mapping[str, Any], dialect: Dialect) -> Fields:
    """Return the fields of a whole response."""
    if dialect is Dialect.COHERE:
        meta = document.get("meta")
        return Fields(_usage_of(meta, "billed_units") if isinstance(meta, dict) else None, is_final=True)
    return Fields(_usage_of(document), _is_stopped(document, dialect), is_final=True)


def _usage_of(document: Mapping[str, Any], name: str = "usage") -> Usage | None:
    usage = document.get(name)
    return convert_usage(usage) if isinstance(usage, dict) else None


def _is_stopped(document: Mapping[str, Any], dialect: Dialect) -> bool:
    if dialect is Dialect.RESPONSES:
        return document.get("status") == "cancelled"
    if dialect is Dialect.MESSAGES:
        return _is_aborted_message(document.get("type"), document.get("stop_reason"))
    choices = document.get("choices")
    if dialect not in (Dialect.CHAT, Dialect.COMPLETIONS) or not isinstance(choices, list):
        return False
    return any(isinstance(choice, dict) and choice.get("finish_reason") == "abort" for choice in choices)


# Bodies in bytes


def _is_aborted_message(kind: object, stop_reason: object) -> bool:
    return kind == "message" and not isinstance(stop_reason, str)


class _UsageBody(msgspec.Struct, gc=False):
    usage: UsageObject | None = None


class _MessageBody(_UsageBody, gc=False):
    type: Any = None
    stop_reason: Any = None


_decode_body = msgspec.json.Decoder(_UsageBody).decode
_decode_message = msgspec.json.Decoder(_MessageBody).decode


def of_body(body: bytes, dialect: Dialect) -> Fields:
    """Return the fields of a whole JSON response; no fields if it is not an object."""
    shape = _SHAPES[dialect]
    if len(body) > shape.parsed_size:
        return _scanned(body, dialect)
    try:
        if dialect is Dialect.MESSAGES:
            message = _decode_message(body)
            stopped = _is_aborted_message(message.type, message.stop_reason)
            return Fields(None if message.usage is None else message.usage.usage(), stopped, True)
        found = _decode_body(body).usage
    except msgspec.ValidationError:  # its usage is not valid, or it is not an object
        found = None
    except msgspec.DecodeError:
        return _scanned(body, dialect)
    may_be_stopped = body.find(shape.stopped) >= 0 or body.find(_ESCAPED) >= 0
    return Fields(None if found is None else found.usage(), may_be_stopped and _scanned(body, dialect).stopped, True)


def _scanned(body: bytes, dialect: Dialect) -> Fields:
    observed = _Scanned(dialect)
    observed.feed(body)
    return observed.fields


class _Scanned:
    """Reads the fields of a JSON response that is too long to be stored."""

    __slots__ = ("_dialect", "_message", "_scanner", "_value", "fields")

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._scanner = Scanner(_SHAPES[dialect].wanted)
        self._value = b""
        self._message: dict[str, object] = {}
        self.fields = Fields(is_final=True)

    def feed(self, data: bytes) -> None:
        if self._scanner.finished:
            return
        for path, start, end, is_last in self._scanner.feed(data):
            self._value += data[start : min(end, start + _LONGEST_USAGE)]
            if is_last:
                self._note(path, self._value)
            if is_last or len(self._value) > _LONGEST_USAGE:
                self._value = b""
        self._note_end()

    def _note_end(self) -> None:
        if self._message and self._scanner.finished:
            self.fields = replace(self.fields, stopped=_is_stopped(self._message, self._dialect))

    def _note(self, path: tuple[str, ...], value: bytes) -> None:
        if path in _COUNTS:
            self.fields = replace(self.fields, usage=decode_usage(value))
        elif self._dialect is Dialect.MESSAGES:
            self._message[path[0]] = _text(value)
        elif _text(value) == ("cancelled" if self._dialect is Dialect.RESPONSES else "abort"):
            self.fields = replace(self.fields, stopped=True)


def _text(value: bytes) -> object:
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return None


class Observer:
    """Reads the fields of a JSON response while it passes, in pieces of any size."""

    __slots__ = ("_dialect", "_scanned", "_size", "_stored")

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._stored: list[bytes] = []
        self._size = 0
        self._scanned: _Scanned | None = None

    def feed(self, data: bytes) -> None:
        """Read the next bytes."""
        if self._scanned is not None:
            self._scanned.feed(data)
            return
        self._stored.append(data)
        self._size += len(data)
        if self._size > WHOLE_SIZE:
            self._scanned = _Scanned(self._dialect)
            self._scanned.feed(b"".join(self._stored))
            self._stored.clear()

    @property
    def fields(self) -> Fields:
        """The fields that have been read so far."""
        return of_body(b"".join(self._stored), self._dialect) if self._scanned is None else self._scanned.fields
