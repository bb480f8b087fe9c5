"""Read the text, tool calls and tokens of a response, from JSON or from events, of any route. Pure.

The rule: a field with an unexpected type counts as absent, because a server wrote the response, and a record may have been redacted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import orjson

from gateway.api.response_fields import of_document, of_event
from gateway.api.routes import ROUTES, Dialect
from gateway.api.usage import Usage, merged
from upstream.http.sse import data_of, split


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool. ``arguments`` is JSON as the model wrote it."""

    name: str
    arguments: str


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of one request. Times are in seconds from its start."""

    id: str
    model: str | None
    status: int
    error: str | None
    """The message of the error, if the response is one."""
    text: str
    tool_calls: tuple[ToolCall, ...]
    usage: Usage | None
    first_byte: float | None
    duration: float


class Content(msgspec.Struct):
    """The content of a response under construction."""

    dialect: Dialect
    texts: dict[int, str] = msgspec.field(default_factory=dict)
    """The text of each choice or block."""
    calls: dict[tuple[int, int], list[str]] = msgspec.field(default_factory=dict)
    """Name and arguments of each tool call, by its choice and its number in it."""
    usage: Usage | None = None
    error: str | None = None

    @property
    def text(self) -> str:
        """The texts, each from a new line."""
        return "\n".join(text for _, text in sorted(self.texts.items()) if text)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls in order."""
        return tuple(ToolCall(*call) for _, call in sorted(self.calls.items()))

    def add_document(self, document: Mapping[str, Any]) -> None:
        """Add a whole JSON response."""
        self.error = _error(document)
        self.usage = of_document(document, self.dialect).usage
        for number, choice in enumerate(_objects(document.get("choices"))):
            self._add_text(number, choice.get("text"))
            self._add_message(number, choice.get("message"))
        for number, block in enumerate(_objects(document.get("content"))):
            self._add_text(number, block.get("text"))
            if block.get("type") == "tool_use":
                self._add_call(number, 0, block.get("name"), _json(block.get("input")))
        self._add_items(document.get("output"))

    def add_event(self, data: bytes) -> None:
        """Add an event of a stream."""
        document = _document(data)
        self.error = self.error or _error(document)
        if (found := of_event(document, self.dialect).usage) is not None:
            self.usage = merged(self.usage, found)
        for choice in _objects(document.get("choices")):
            number = choice.get("index")
            if isinstance(number, int):
                self._add_text(number, choice.get("text"))
                self._add_message(number, choice.get("delta"))
        kind = document.get("type")
        if self.dialect is Dialect.RESPONSES and kind in ("response.completed", "response.incomplete"):
            response = document.get("response")
            self._add_items(response.get("output") if isinstance(response, dict) else None)
        elif self.dialect is Dialect.MESSAGES and isinstance(number := document.get("index"), int):
            self._add_block(number, kind, document)

    def _add_block(self, number: int, kind: object, document: Mapping[str, Any]) -> None:
        """Add an event of a stream of messages."""
        block, delta = document.get("content_block"), document.get("delta")
        if kind == "content_block_start" and isinstance(block, dict) and block.get("type") == "tool_use":
            self._add_call(number, 0, block.get("name"), None)
        elif kind == "content_block_delta" and isinstance(delta, dict):
            self._add_text(number, delta.get("text"))
            if "partial_json" in delta:
                self._add_call(number, 0, None, delta["partial_json"])

    def _add_message(self, number: int, message: object) -> None:
        if not isinstance(message, dict):
            return
        self._add_text(number, message.get("content"))
        for position, call in enumerate(_objects(message.get("tool_calls"))):
            function, index = call.get("function"), call.get("index", position)
            if isinstance(function, dict) and isinstance(index, int):
                self._add_call(number, index, function.get("name"), function.get("arguments"))

    def _add_items(self, output: object) -> None:
        for number, item in enumerate(_objects(output)):
            for part in _objects(item.get("content")):
                self._add_text(number, part.get("text"))
            if item.get("type") == "function_call":
                self._add_call(number, 0, item.get("name"), item.get("arguments"))

    def _add_text(self, number: int, text: object) -> None:
        if isinstance(text, str):
            self.texts[number] = self.texts.get(number, "") + text

    def _add_call(self, number: int, position: int, name: object, arguments: object) -> None:
        call = self.calls.setdefault((number, position), ["", ""])
        call[0] += name if isinstance(name, str) else ""
        call[1] += arguments if isinstance(arguments, str) else ""


def content_of(path: str, body: bytes, *, is_stream: bool) -> Content:
    """Return the content of a response of the route with this path."""
    content = Content(ROUTES[path].dialect if path in ROUTES else Dialect.PLAIN)
    if is_stream:
        for event in split(body):
            content.add_event(data_of(event))
    else:
        content.add_document(_document(body))
    return content


def _objects(value: object) -> Iterator[dict[str, Any]]:
    items: Iterable[object] = value if isinstance(value, list) else ()
    return (item for item in items if isinstance(item, dict))


def _document(data: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def _json(value: object) -> str | None:
    return None if value is None else orjson.dumps(value).decode()


def _error(document: Mapping[str, Any]) -> str | None:
    if (error := document.get("error")) is None:
        return None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else "an error without a message"
