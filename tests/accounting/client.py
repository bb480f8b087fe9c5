"""The clients of an accounting run: each sends one request, records what it receives, and may disconnect.

The rule: a client disconnects by closing its sending direction, and reads on. So it has every byte that the gateway wrote before the
gateway noticed the disconnect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from tests.accounting.http_messages import Message, parse_message
from tests.accounting.workload import PlannedRequest
from tests.support.wire import request

USER_HEADER = "X-Client"
"""The header that names the client of a request for the ledger."""
_READ = 65536
_LONGEST = 240.0  # seconds of one request
_CHUNKED_END = b"\r\n0\r\n\r\n"


@dataclass
class Received:
    """The response that a client received. ``arrivals``: for each read, its time on the monotonic clock and the bytes so far."""

    user: str
    data: bytes = b""
    disconnected: bool = False
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @cached_property
    def message(self) -> Message | None:
        """The response, if its headers were received."""
        return parse_message(self.data)

    @property
    def status(self) -> int | None:
        return None if self.message is None else self.message.status

    @property
    def body(self) -> bytes:
        return b"" if self.message is None else self.message.body

    @property
    def whole(self) -> bool:
        return self.message is not None and self.message.whole

    @property
    def broken(self) -> bool:
        """Whether the connection closed before the end of the response, although the client had not disconnected."""
        return not self.whole and not self.disconnected

    def bodies(self) -> list[tuple[float, bytes]]:
        """Return the body so far after each read."""
        messages = ((time, parse_message(self.data[:size])) for time, size in self.arrivals)
        return [(time, message.body) for time, message in messages if message is not None]


async def send_request(port: int, planned: PlannedRequest, model: str, user: str) -> Received:
    """Send a request and read its response. Raises TimeoutError for a response that never ends."""
    received = Received(user)
    with suppress(ConnectionError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request({"model": model, **planned.body}, planned.path, extra=(f"{USER_HEADER}: {user}",)))
            async with asyncio.timeout(_LONGEST):
                await _read(reader, writer, planned, received)
        finally:
            writer.transport.abort()
    return received


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, planned: PlannedRequest, received: Received) -> None:
    def disconnect() -> None:
        if not received.disconnected and not writer.transport.is_closing():
            received.disconnected = True
            writer.write_eof()

    plan, timer = planned.disconnect, None
    if plan is not None and plan.events is None:
        timer = asyncio.get_running_loop().call_later(plan.seconds, disconnect)
    try:
        await _read_until_end(reader, received, plan.events if plan is not None else None, disconnect)
    finally:
        if timer is not None:
            timer.cancel()


async def _read_until_end(reader: asyncio.StreamReader, received: Received, events: int | None, disconnect: Callable[[], None]) -> None:
    seen = 0
    while data := await reader.read(_READ):
        received.data += data
        received.arrivals.append((time.monotonic(), len(received.data)))
        seen += data.count(b"\n\n")
        if events is not None and seen >= events:
            disconnect()
        if not received.disconnected and _is_complete(received.data):
            return


def _is_complete(data: bytes) -> bool:
    """Return whether the response is complete. The headers are parsed only when that is possible."""
    if data.endswith(_CHUNKED_END):
        return True
    message = parse_message(data) if b"content-length" in data[:2048].lower() else None
    return message is not None and message.whole
