"""Redis' protocol, RESP2, without I/O: commands to bytes, bytes to replies.

Source: the specification at redis.io, "Redis serialization protocol". The rule: the parser accepts bytes in pieces of any size, and
returns each reply once, when it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias, Union

Reply: TypeAlias = Union[int, bytes, list["Reply"], "ReplyError", None]


class ReplyError(Exception):
    """An error reply. The text starts with a code such as NOSCRIPT. It is returned, not raised."""


class ProtocolError(Exception):
    """The bytes are not RESP2."""


def command(*arguments: bytes | str | float) -> bytes:
    """Write a command with its arguments."""
    return array(map(argument, arguments), len(arguments))


def array(arguments: Iterable[bytes], count: int) -> bytes:
    """Write a command from arguments that were already written."""
    return b"*%d\r\n%b" % (count, b"".join(arguments))


def argument(value: bytes | str | float) -> bytes:
    """Write one argument."""
    data = value if isinstance(value, bytes) else str(value).encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)


class Parser:
    """Parse bytes into replies."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> Iterator[Reply]:
        """Return the replies that are complete with these bytes. Raises ProtocolError."""
        self._data += data
        at = 0
        try:
            while at < len(self._data):
                reply, at = self._parse(at)
                yield reply
        except _Incomplete:
            pass
        finally:
            self._data = self._data[at:]

    def _parse(self, at: int) -> tuple[Reply, int]:
        """Return the reply at a position, and where it ends."""
        end = self._data.find(b"\r\n", at)
        if end < 0:
            raise _Incomplete
        kind, rest, after = self._data[at : at + 1], self._data[at + 1 : end], end + 2
        match kind:
            case b"+":
                return rest, after
            case b"-":
                return ReplyError(rest.decode("utf-8", "replace")), after
            case b":":
                return _number(rest), after
            case b"$":
                return self._bulk(_number(rest), after)
            case b"*":
                return self._array(_number(rest), after)
        raise ProtocolError(f"a reply that starts with {kind!r}")

    def _bulk(self, size: int, at: int) -> tuple[Reply, int]:
        if size < 0:
            return None, at
        if len(self._data) < at + size + 2:
            raise _Incomplete
        return self._data[at : at + size], at + size + 2

    def _array(self, size: int, at: int) -> tuple[Reply, int]:
        if size < 0:
            return None, at
        found: list[Reply] = []
        for _ in range(size):
            reply, at = self._parse(at)
            found.append(reply)
        return found, at


class _Incomplete(Exception):
    """More bytes are needed."""


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ProtocolError("a number was expected") from None
