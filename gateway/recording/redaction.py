"""Replace values of JSON documents before a record is stored. Pure.

An entry without a dot is the name of a field at any depth. An entry with dots is a path from the top of a document, in which ``*`` is any
item or field. A field is replaced with all that it contains. The rule: what cannot be parsed is never stored unredacted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from upstream.http.sse import data_of

MARK = "[redacted]"
"""The text that replaces a value."""

_ANY = "*"
_EXTRA = "extra_body"  # its fields are merged into the body, so the same paths lead into it
_MOST_TEXTS = 1000  # removed texts that are searched for in other texts; with more, all other texts are replaced
_EVENT_NAME = re.compile(rb"^event: ?([a-z_.]{1,64})$", re.MULTILINE)
_DONE = b"[DONE]"

Path = tuple[str, ...]


class NotParsedError(Exception):
    """A body is not JSON, so it cannot be redacted."""


@dataclass(slots=True)
class Removed:
    """The texts and numbers that were removed from a request, with the names of fields inside of removed values."""

    texts: set[str] = field(default_factory=set)
    numbers: set[float] = field(default_factory=set)

    def add(self, value: Any) -> None:
        """Add all scalars of a removed value."""
        for scalar in _scalars(value):
            if isinstance(scalar, str):
                if scalar.strip():
                    self.texts.add(scalar)
            elif isinstance(scalar, int | float) and not isinstance(scalar, bool):
                self.numbers.add(scalar)

    def occurs_in(self, scalar: Any) -> bool:
        """Return whether a text contains a removed text, or a number is a removed number."""
        if isinstance(scalar, str):
            return len(self.texts) > _MOST_TEXTS or any(text in scalar for text in self.texts)
        return isinstance(scalar, int | float) and not isinstance(scalar, bool) and scalar in self.numbers


class Redactor:
    """Redacts documents by the configured entries."""

    def __init__(self, entries: Iterable[str]) -> None:
        paths = [tuple(entry.split(".")) for entry in entries]
        self._names = frozenset(path[0] for path in paths if len(path) == 1)
        self._paths = tuple(path for path in paths if len(path) > 1)

    def __bool__(self) -> bool:
        return bool(self._names or self._paths)

    def redact(self, document: Any, removed: Removed | None = None) -> Any:
        """Replace the values of the configured fields, in place, and return the document. ``removed`` collects them."""
        left: list[tuple[Any, Sequence[Path]]] = [(document, self._paths)]
        while left:  # no recursion: a server's document may be nested deeply
            container, paths = left.pop()
            for name, value in _items(container):
                below = [path[1:] for path in paths if path[0] in (_ANY, str(name))]
                if (isinstance(container, dict) and name in self._names) or () in below:
                    if removed is not None:
                        removed.add(value)
                    container[name] = MARK
                elif isinstance(value, dict | list):
                    left.append((value, [*below, *self._paths] if name == _EXTRA else below))
        return document

    def request(self, body: bytes) -> tuple[bytes, Removed]:
        """Return a request's body without the configured fields, and what was removed. Raises NotParsedError."""
        removed = Removed()
        return _written(self.redact(_parsed(body), removed)), removed

    def sent(self, body: bytes, received: bytes, removed: Removed) -> bytes:
        """Return the body that a server got, redacted. Raises NotParsedError.

        The gateway may have moved a value to a field with another name. So a field that is not in the request as received must not contain
        anything that was removed from it.
        """
        sent, document = _parsed(body), _parsed(received)
        document |= document.get(_EXTRA) or {}
        changed = [name for name, value in sent.items() if name not in document or document[name] != value]
        self.redact(sent)
        for name in changed:
            sent[name] = scrubbed(sent[name], removed)
        return _written(sent)

    def response(self, body: bytes, status: int, removed: Removed) -> bytes:
        """Return a JSON response without the configured fields. Raises NotParsedError.

        Messages of errors may quote the request, so no text of an error contains anything that was removed from it.
        """
        document = self.redact(_parsed(body))
        return _written(scrubbed(document, removed) if status >= 400 else document)

    def event(self, event: bytes, removed: Removed) -> bytes:
        """Return an event of a stream without the configured fields, and without its comments. Raises NotParsedError."""
        if not (data := data_of(event)):
            return b""
        name = _EVENT_NAME.search(event)
        if data != _DONE:
            document = self.redact(_parsed(data))
            data = _written(scrubbed(document, removed) if "error" in document else document)
        return b"%bdata: %b\n\n" % (b"" if name is None else b"event: %b\n" % name[1], data)


def scrubbed(value: Any, removed: Removed) -> Any:
    """Return a value in which ``MARK`` replaces removed numbers, and texts that contain a removed text. The value may be modified."""
    if not isinstance(value, dict | list):
        return MARK if removed.occurs_in(value) else value
    left = [value]
    while left:
        container = left.pop()
        for name, item in _items(container):
            if isinstance(container, dict) and removed.occurs_in(name):
                del container[name]
                container[MARK] = MARK
            elif isinstance(item, dict | list):
                left.append(item)
            elif removed.occurs_in(item):
                container[name] = MARK
    return value


def _items(container: Any) -> list[tuple[Any, Any]]:
    """Return the fields of an object by name, or the items of a list by index. The container may be changed meanwhile."""
    if isinstance(container, dict):
        return list(container.items())
    return list(enumerate(container)) if isinstance(container, list) else []


def _scalars(value: Any) -> Iterator[Any]:
    """Yield each text, number and constant of a value, and the names of fields."""
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, dict):
            yield from found
            left += found.values()
        elif isinstance(found, list):
            left += found
        else:
            yield found


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise NotParsedError from error
    if not isinstance(document, dict):
        raise NotParsedError
    return document


def _written(document: Any) -> bytes:
    try:
        return orjson.dumps(document)
    except TypeError as error:  # it is nested too deeply
        raise NotParsedError from error
