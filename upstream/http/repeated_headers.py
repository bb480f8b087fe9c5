"""Remembered headers: the last headers of a client or server, for messages that repeat their bytes. Pure.

In this module, *headers* include the request line or the status line before them. Most clients and servers send the same ones with each
message, apart from the length of the body. The rule: all bytes are compared except for the digits of one ``Content-Length``, so the
parser's result for them is known. It depends on these bytes alone, not on reads or on other messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

_MAX_SIZE = 4096  # bytes of headers that are remembered
_MAX_DIGITS = 15  # of their Content-Length
_LENGTH = b"\r\ncontent-length:"

Head = TypeVar("Head")


class RepeatedHeaders(Generic[Head]):
    """Parses the headers of one client or server.

    ``parse`` is pure and raises an error for invalid bytes. ``with_length`` returns its result for other digits of the Content-Length.
    """

    __slots__ = ("_after", "_before", "_digits", "_head", "_learns_next", "_parse", "_start", "_tail", "_with_length")

    def __init__(self, parse: Callable[[bytes], Head], with_length: Callable[[Head, bytes], Head]) -> None:
        self._parse = parse
        self._with_length = with_length
        self._head: Head | None = None
        self._before = self._digits = self._after = b""
        """The remembered bytes before, in and after the digits of the length. Without a length there are no digits."""
        self._start = self._tail = 0  # the sizes of the first and of the last of them
        self._learns_next = True
        """The next headers that are not the remembered ones are remembered."""

    def parse(self, data: bytes) -> Head:
        """Return the parsed headers in these bytes, which end with their first empty line. Raises what the parser raises."""
        head, start, tail = self._head, self._start, self._tail
        if head is not None and data[:start] == self._before and data[-tail:] == self._after:
            digits = data[start:-tail]
            if digits == self._digits:
                return head
            if self._digits and digits.isdigit() and len(digits) <= _MAX_DIGITS:
                return self._with_length(head, digits)
        head = self._parse(data)
        if self._learns_next:  # not those of each request that comes through a proxy with several clients
            self._remember(head, data)
        self._learns_next = not self._learns_next
        return head

    def _remember(self, head: Head, data: bytes) -> None:
        """Remember parsed headers, if their bytes around the digits of the length are certain. Each line is one header."""
        self._head = None
        if len(data) > _MAX_SIZE:
            return
        lower = data.lower()
        name, end, digits = lower.find(_LENGTH), len(data) - 1, b""
        if lower.find(_LENGTH, name + 1) > name >= 0:
            return
        if name >= 0:
            end = data.find(b"\r\n", name + len(_LENGTH))
            digits = data[name + len(_LENGTH) : end].lstrip(b" \t")
            if not digits.isdigit():
                return  # white space after the digits
        self._before, self._digits, self._after = data[: end - len(digits)], digits, data[end:]
        self._start, self._tail = len(self._before), len(self._after)
        self._head = head
