"""A second response from the start, to the same request on another server: what the client was sent is compared, and left out. Sans-I/O.

Servers group tokens into events by chance, so an event of the second response may contain more than what was sent. It is split there.
The rest has the IDs of the first response, and continues its sequence numbers.

The rule: nothing of the second response is returned until everything that was sent has been found in it. Two checks find a difference: a
part differs from what was sent, or something new comes while a part of the same choice that was sent is still missing.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import orjson

from gateway.api.response_fields import ITEMIZED, of_event
from gateway.api.routes import Dialect
from gateway.continuation.sent_text import ALL, Entries, Ids, Json, Key, Part, SentText, Text, parts_of
from upstream.http.sse import data_of, split

HELD_LIMIT = 1024 * 1024
"""Bytes of new events of one choice that may wait until the other choices have come as far as they were sent."""


class DifferentError(Exception):
    """The second response differs from what the client was sent, or it cannot be compared."""


class _Outcome(Enum):
    SENT = auto()
    NEW = auto()
    NOTHING = auto()
    """The part is empty."""


class Regeneration:
    """The second response to one request.

    ``sent``: what the client was sent. Raises DifferentError if that is not known.
    """

    def __init__(self, sent: SentText, dialect: Dialect) -> None:
        if not sent.is_usable:
            raise DifferentError("what was sent is not known")
        self._dialect = dialect
        self._identity = dict(sent.identity)
        self._sequence = sent.sequence
        self._texts = {key: _decoded(raw) for key, raw in sent.texts.items()}
        self._position = dict.fromkeys(self._texts, 0)
        self._marks = dict(sent.marks)
        self._counts = {key: count for key, count in sent.counts.items() if count}
        self._missing: dict[int | str, set[Key]] = {}  # the parts that were sent and not found yet, by their group
        for key in (*self._texts, *self._marks, *self._counts):
            self._missing.setdefault(key[0], set()).add(key)
        self._finished = {key[0] for key in self._marks if key[1] == "finish"}
        self._ids: dict[Any, Any] = {}  # IDs of the second response, with those of the first response
        self._held: list[bytes] = []

    def feed(self, events: bytes) -> bytes:
        """Add complete events of the second response, and return what the client lacks of them. Raises DifferentError."""
        return b"".join([self._feed(event) for event in split(events)])

    def _feed(self, event: bytes) -> bytes:
        data = data_of(event)
        if not data:
            return event
        if data == b"[DONE]":
            self._check_found(ALL)
            return event
        try:
            document = orjson.loads(data)
            if _is_failure(document, self._dialect):
                return event
            rest = self._rest_of(document)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise DifferentError("an event cannot be compared") from error
        if rest:
            self._held.append(rest)
        if any(self._missing.values()):
            if sum(map(len, self._held)) > HELD_LIMIT:
                raise DifferentError("a choice is too far ahead of the others")
            return b""
        held, self._held = self._held, []
        return b"".join(held)

    def _rest_of(self, document: Json) -> bytes:
        """Return what the client lacks of an event."""
        parts = list(parts_of(document, self._dialect))
        found = {self._compare(part) for part in parts}
        group = parts[0].key[0] if parts else ALL
        if _Outcome.NEW in found:
            self._check_found(group)
            if group in self._finished:
                raise DifferentError("more than was sent")
        elif _Outcome.SENT in found or self._is_missing(group):
            return b""
        if _Outcome.SENT in found:
            _remove_empty_calls(document)
        self._rename(document)
        if "sequence_number" in document:
            document["sequence_number"] = self._sequence
            self._sequence += 1
        name = b"event: %b\n" % document["type"].encode() if self._dialect in ITEMIZED else b""
        return b"%bdata: %b\n\n" % (name, orjson.dumps(document))

    # The comparison

    def _compare(self, part: Part) -> _Outcome:
        """Find a part in what was sent, and remove that from the event. Raises DifferentError."""
        if isinstance(part, Text):
            return self._compare_text(part)
        if isinstance(part, Entries):
            return self._count(part)
        if part.key not in self._marks:
            return _Outcome.NEW
        value, ids = self._marks[part.key]
        if value != part.value:
            raise DifferentError("another structure")
        self._note_ids(part.ids, ids)
        for holder, name in part.fields:
            holder.pop(name, None)
        return self._note_found(part)

    def _compare_text(self, part: Text) -> _Outcome:
        piece = part.holder[part.name].encode()
        if not piece:
            return _Outcome.NOTHING
        sent, position = self._texts.get(part.key, b""), self._position.get(part.key, 0)
        end = min(position + len(piece), len(sent))
        size = end - position
        if sent[position:end] != piece[:size]:
            raise DifferentError("another text")
        self._position[part.key] = end
        if end == len(sent):
            self._note_found(part)
        if size < len(piece):
            part.holder[part.name] = piece[size:].decode()
            return _Outcome.NEW
        if part.name == "text":  # the text of a completion is required
            part.holder[part.name] = ""
        else:
            del part.holder[part.name]
        return _Outcome.SENT

    def _count(self, part: Entries) -> _Outcome:
        left, size = self._counts.get(part.key, 0), len(part.lists[0])
        if left:
            self._counts[part.key] = max(left - size, 0)
        if 0 < left <= size:
            self._note_found(part)
        for each in part.lists:
            del each[:left]
        if left < size:
            return _Outcome.NEW
        return _Outcome.SENT if size else _Outcome.NOTHING

    def _note_found(self, part: Part) -> _Outcome:
        self._missing.get(part.key[0], set()).discard(part.key)
        return _Outcome.SENT

    def _is_missing(self, group: int | str) -> bool:
        return any(self._missing.values()) if group == ALL else bool(self._missing.get(group))

    def _check_found(self, group: int | str) -> None:
        if self._is_missing(group):
            raise DifferentError("less than was sent")

    # The identity of the first response

    def _note_ids(self, ids: Ids, sent: Ids) -> None:
        self._ids |= {its: mine for its, mine in zip(ids, sent, strict=True) if its is not None}

    def _rename(self, document: Json) -> None:
        """Put the first response's IDs in place of those of the second."""
        response = document.get("response") or {}
        if self._dialect not in ITEMIZED:
            document |= self._identity
        elif response:
            response |= self._identity
        items = [document, document.get("item") or {}, *response.get("output", ()), *_calls_of(document)]
        for item in items:
            for name in ("id", "item_id", "call_id"):
                if item.get(name) in self._ids:
                    item[name] = self._ids[item[name]]


def _decoded(raw: bytearray) -> bytes:
    try:
        text: str = orjson.loads(b'"' + raw + b'"')
    except orjson.JSONDecodeError as error:
        raise DifferentError("what was sent is not valid") from error
    return text.encode()


def _is_failure(document: Json, dialect: Dialect) -> bool:
    """Return whether the second server reports a failure: the event says so itself, whatever was found."""
    kind = document.get("type")
    return document.get("error") is not None or kind in ("error", "response.failed") or of_event(document, dialect).stopped


def _calls_of(document: Json) -> list[Json]:
    return [call for choice in document.get("choices", ()) for call in (choice.get("delta") or {}).get("tool_calls") or ()]


def _remove_empty_calls(document: Json) -> None:
    """Remove the tool calls of which the client has all that the event has of them."""
    for choice in document.get("choices", ()):
        delta = choice.get("delta") or {}
        if "tool_calls" in delta:
            delta["tool_calls"] = [call for call in delta["tool_calls"] if any(call["function"].values())]
            if not delta["tool_calls"]:
                del delta["tool_calls"]
