"""The record of a stream without token IDs: what its client was sent, to compare it with a second response to the same request.

An event has parts (``parts_of``): pieces of texts, marks of the structure, and lists with an entry for each token. The record has the
joined texts, as they are written in JSON, and each mark once, so it does not depend on how the server grouped the tokens into events.

The rule: an event with a field that ``parts_of`` does not know makes the record unusable. ``Regeneration`` compares the parts of the same
function, so what is not compared is not recorded either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from gateway.api.routes import Dialect
from gateway.continuation.record_memory import RecordMemory

LONGEST = 1024 * 1024
"""Bytes of the texts of the longest record."""
_STEP = 16 * 1024
ALL = -1
"""The group of a part that comes after all choices."""

Json = dict[str, Any]
Key = tuple[int | str, ...]
"""Names a part. The first element is its group: the index of the choice, 0 in streams without choices, or ALL."""
Ids = tuple[Any, ...]
"""IDs that a server draws at random, so that those of a second response differ."""


class Text(NamedTuple):
    """A piece of a text, at a name of an object."""

    key: Key
    holder: Json
    name: str


class Mark(NamedTuple):
    """An element of the structure. ``value`` is compared. ``fields`` are removed if the client has the mark, and not the whole event."""

    key: Key
    value: Any = None
    fields: Sequence[tuple[Json, str]] = ()
    ids: Ids = ()


class Entries(NamedTuple):
    """Parallel lists with an entry for each token. Their values are not compared, but counted."""

    key: Key
    lists: Sequence[list[Any]]


Part = Text | Mark | Entries


class SentText:
    """The parts of one stream that the client was sent. ``hold`` reserves their memory (``RecordMemory``)."""

    __slots__ = ("_dialect", "_memory", "counts", "identity", "is_usable", "marks", "sequence", "texts")

    def __init__(self, dialect: Dialect, hold: Callable[[int], bool]) -> None:
        self._dialect: Dialect = dialect
        self._memory: RecordMemory = RecordMemory(hold, _STEP, LONGEST)
        self.texts: dict[Key, bytearray] = {}
        """The joined pieces of each text, as they are written in JSON."""
        self.marks: dict[Key, tuple[Any, Ids]] = {}
        """The value and the IDs of each mark."""
        self.counts: dict[Key, int] = {}
        """The number of entries for tokens."""
        self.identity: Json = {}
        """The ID, the time and the model of the response."""
        self.sequence: int = 0
        """The next sequence number."""
        self.is_usable: bool = True

    @property
    def has_begun(self) -> bool:
        """Whether an event of the stream was received."""
        return bool(self.identity or self.marks or self.texts)

    def take(self, event: bytes, document: Json) -> bytes:
        """Record an event that is sent to the client, and return it as it is."""
        if self.is_usable:
            self._note_event(document)
        return event

    def _note_event(self, document: Json) -> None:
        try:
            for part in parts_of(document, self._dialect):
                self._note(part)
            holder = document["response"] if self._dialect is Dialect.RESPONSES and not self.identity else document
            self.identity = self.identity or {name: holder[name] for name in ("id", "created", "created_at", "model") if name in holder}
            self.sequence = document.get("sequence_number", self.sequence) + 1
        except (AttributeError, LookupError, TypeError, ValueError):  # not an event of vLLM's API
            self.drop()

    def note_text(self, key: Key, raw: bytes) -> None:
        """Record an event that has a piece of this text and nothing else. ``raw``: the piece, as it is written in JSON."""
        if not self.is_usable:
            return
        self.sequence += 1
        if self._memory.take(len(raw)):
            self.texts[key].extend(raw)
        else:
            self.drop()

    def text_of(self, document: Json) -> Key | None:
        """Return the key of the text of a recorded event without other parts; None for other events. A dropped record has an empty key."""
        keys: list[Key] = []
        if not self.is_usable:
            return ()
        for part in parts_of(document, self._dialect):
            if isinstance(part, Text):
                keys += [part.key] if part.holder[part.name] else []
            elif isinstance(part, Mark) or any(part.lists):
                return None
        return keys[0] if len(keys) == 1 else None

    def drop(self) -> None:
        """Forget the texts: they cannot be compared."""
        self.is_usable = False
        self.texts, self.marks, self.counts = {}, {}, {}

    def _note(self, part: Part) -> None:
        if isinstance(part, Mark):
            self.marks[part.key] = part.value, part.ids
        elif isinstance(part, Entries):
            self.counts[part.key] = self.counts.get(part.key, 0) + len(part.lists[0])
        elif part.holder[part.name]:
            self.texts.setdefault(part.key, bytearray())
            self.note_text(part.key, orjson.dumps(part.holder[part.name])[1:-1])


def parts_of(document: Json, dialect: Dialect) -> Iterator[Part]:
    """Return the parts of an event. Raises ValueError and others if it is not an event of vLLM's API that can be compared."""
    match dialect:
        case Dialect.CHAT | Dialect.COMPLETIONS:
            choices = document["choices"]
            if choices:
                [choice] = choices
                return _parts_of_choice(choice)
            return iter([Mark((ALL, "usage"))] if document.get("usage") is not None else ())
        case Dialect.MESSAGES:
            return _parts_of_message(document)
        case Dialect.RESPONSES:
            return _parts_of_response(document)
    raise ValueError


# Chat and completions

_CHOICE = {"index", "delta", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids"}
_DELTA = {"role", "reasoning", "reasoning_content", "content", "tool_calls"}
_CALL, _FUNCTION = {"index", "id", "type", "function"}, {"name", "arguments"}
_TEXTS = ("reasoning", "reasoning_content", "content", "text")


def _parts_of_choice(choice: Json) -> Iterator[Part]:
    _check_names(choice, _CHOICE)
    index, delta = int(choice["index"]), choice.get("delta")
    holder = choice if delta is None else delta
    if delta is not None:
        _check_names(delta, _DELTA)
        if delta.get("role") is not None:
            yield Mark((index, "role"), delta["role"], [(delta, "role")])
    yield from (Text((index, name), holder, name) for name in _TEXTS if holder.get(name) is not None)
    for call in holder.get("tool_calls") or ():
        yield from _parts_of_call(index, call)
    logprobs = choice.get("logprobs")
    if logprobs is not None:
        lists = [each for each in logprobs.values() if each]
        if len({len(each) for each in lists}) > 1:
            raise ValueError("the lists of logprobs are not parallel")
        yield Entries((index, "logprobs"), lists or [[]])
    if choice.get("token_ids") is not None:
        yield Entries((index, "token_ids"), [choice["token_ids"]])
    if choice.get("prompt_token_ids") is not None:
        yield Mark((index, "prompt_token_ids"), None, [(choice, "prompt_token_ids")])
    if choice.get("finish_reason") is not None:
        yield Mark((index, "finish"), (choice["finish_reason"], choice.get("stop_reason")))


def _parts_of_call(index: int, call: Json) -> Iterator[Part]:
    function, number = call["function"], int(call["index"])
    _check_names(call, _CALL)
    _check_names(function, _FUNCTION)
    if function.get("name") is not None:
        yield Mark((index, "call", number), function["name"], [(call, "id"), (call, "type"), (function, "name")], (call.get("id"),))
    if function.get("arguments") is not None:
        yield Text((index, "arguments", number), function, "arguments")


# Messages

_DELTAS: Mapping[str, str] = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def _parts_of_message(document: Json) -> Iterator[Part]:
    kind, index = document["type"], document.get("index", 0)
    match kind:
        case "content_block_start":
            block = document["content_block"]
            yield Mark((0, kind, index), _without_ids(block), (), (block.get("id"),))
        case "content_block_delta" if document["delta"]["type"] == "signature_delta":
            yield Mark((0, "signature", index))  # a random number in vLLM
        case "content_block_delta":
            delta = document["delta"]
            yield Text((0, kind, index, delta["type"]), delta, _DELTAS[delta["type"]])
        case "message_delta":
            yield Mark((0, kind), document["delta"])
        case "message_start" | "content_block_stop" | "message_stop":
            yield Mark((0, kind, index))
        case "ping":
            pass
        case _:
            raise ValueError(kind)


# Responses

_PIECES = {f"response.{name}.delta" for name in ("output_text", "reasoning_text", "function_call_arguments", "custom_tool_call_input")}
_MARKS = {
    *(f"{name.removesuffix('.delta')}.done" for name in _PIECES),
    *(f"response.{name}" for name in ("created", "in_progress", "content_part.done", "output_item.done", "completed", "incomplete")),
}


def _parts_of_response(document: Json) -> Iterator[Part]:
    kind = document["type"]
    key = (0, kind, document.get("output_index", 0), document.get("content_index", 0))
    if kind in _PIECES:
        yield Text(key, document, "delta")
        if document.get("logprobs"):
            yield Entries((*key, "logprobs"), [document["logprobs"]])
    elif kind == "response.output_item.added":
        item = document["item"]
        yield Mark(key, _without_ids(item), (), (item["id"], item.get("call_id")))
    elif kind == "response.content_part.added":
        yield Mark(key, document["part"])
    elif kind in _MARKS:
        yield Mark(key)
    else:
        raise ValueError(kind)


def _without_ids(item: Json) -> Json:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def _check_names(holder: Json, known: set[str]) -> None:
    if any(value is not None for name, value in holder.items() if name not in known):
        raise ValueError("a field that is not compared")
