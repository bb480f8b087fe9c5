"""Parse the bytes of HTTP/1.1 connections that a client or a recording proxy has stored, also if they are truncated. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked\r\n", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Message:
    """A request or a response. ``whole``: its body is complete. ``size``: the bytes that it took on the connection."""

    first_line: bytes
    headers: Mapping[str, str]
    body: bytes
    whole: bool
    size: int

    @property
    def status(self) -> int:
        """The status of a response."""
        return int(self.first_line.split()[1])


def parse_message(data: bytes) -> Message | None:
    """Parse the first message in ``data``; None without all of its headers. A message without a length has no body."""
    head, found, rest = data.partition(b"\r\n\r\n")
    if not found:
        return None
    first_line, *lines = head.split(b"\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.decode("latin-1").partition(":") for line in lines)}
    start = len(head) + 4
    if _CHUNKED.search(head + b"\r\n"):
        body, whole, size = _dechunk(rest)
        return Message(first_line, headers, body, whole, start + size)
    length = _LENGTH.search(head + b"\r\n")
    expected = int(length[1]) if length else 0
    return Message(first_line, headers, rest[:expected], len(rest) >= expected, start + min(expected, len(rest)))


def parse_messages(data: bytes) -> Iterator[Message]:
    """Yield the messages of one direction of a connection, in order. Only the last one can be truncated."""
    while (message := parse_message(data)) is not None:
        yield message
        data = data[message.size :]


def _dechunk(data: bytes) -> tuple[bytes, bool, int]:
    """Return the body so far, whether it is complete, and the number of its bytes in ``data``."""
    pieces: list[bytes] = []
    at = 0
    while (line := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:line], 16)
        if not size:
            return b"".join(pieces), data[line + 2 : line + 4] == b"\r\n", line + 4
        pieces.append(data[line + 2 : line + 2 + size])
        at = line + 2 + size + 2
    return b"".join(pieces), False, len(data)
