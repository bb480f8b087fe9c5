"""Find the primary of a Redis with replicas: ask one Sentinel.

The rule: the reply is a candidate, because a Sentinel notices a failover late. Only a write shows that it is the primary.
"""

from __future__ import annotations

import asyncio
import ssl

from hiredis import HiredisError, Reader, ReplyError

from gateway.limits.redis.commands import authentication, packed_command
from gateway.snapshot.snapshot import LimitsStore

_BYTES = 4096  # of a read; the replies are short
_INCOMPLETE = object()


async def primary_address(settings: LimitsStore, sentinel: tuple[str, int], context: ssl.SSLContext | None) -> tuple[str, int]:
    """Return the host and port of the primary. Raises OSError and ReplyError."""
    # A Sentinel with a password usually has that of the store. One without a password replies with an error to AUTH, and serves.
    commands = [*authentication(settings), packed_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", settings.primary or "")]
    stream, writer = await asyncio.open_connection(*sentinel, ssl=context)
    try:
        writer.write(b"".join(commands))
        *_, reply = await _replies(stream, len(commands))
    finally:
        writer.transport.abort()
    match reply:
        case ReplyError():
            raise reply
        case [bytes(host), bytes(port)] if port.isdigit():
            return host.decode(), int(port)
    raise ConnectionError(f"the Sentinel knows no primary {settings.primary}")


async def _replies(stream: asyncio.StreamReader, count: int) -> list[object]:
    """Read replies. Raises OSError."""
    reader, found = Reader(notEnoughData=_INCOMPLETE), list[object]()
    try:
        while len(found) < count:
            if (reply := reader.gets()) is not _INCOMPLETE:
                found.append(reply)
            elif data := await stream.read(_BYTES):
                reader.feed(data)
            else:
                raise ConnectionError("the Sentinel closed the connection")
    except HiredisError as error:
        raise ConnectionError(f"the Sentinel sent an invalid reply: {error}") from None
    return found
