"""Flow control of one connection, in both directions.

Reading pauses while a streamed body arrives faster than its server reads it. Writing pauses, from the transport's point of view, while
the client reads more slowly than responses are written.
"""

from __future__ import annotations

import asyncio

import msgspec

from upstream.http.write_batching import BatchingTransport


class FlowControl(msgspec.Struct, eq=False):
    """Whether a transport reads, and whether it accepts more bytes to write."""

    _transport: BatchingTransport
    _writable: asyncio.Future[None] | None = None
    read_paused: bool = False
    reading_held: bool = False
    """``resume_reading`` has no effect: bytes after a request wait."""
    write_paused: bool = False

    def pause_reading(self) -> None:
        """Stop reading, if that has not been done."""
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again, if reading is paused and not held."""
        if self.read_paused and not self.reading_held:
            self.read_paused = False
            self._transport.resume_reading()

    def hold_reading(self) -> None:
        """Stop reading until ``reading_held`` is reset, whatever else resumes it."""
        self.reading_held = True
        self.pause_reading()

    def pause_writing(self) -> None:
        """Note that the transport's buffer is full."""
        self.write_paused = True

    def resume_writing(self) -> None:
        """Resume waiting writers: the transport's buffer has space again, or the connection is lost."""
        self.write_paused = False
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    async def drain(self) -> None:
        """Wait until the transport's buffer has room, or the connection is lost. One coroutine waits at a time."""
        while self.write_paused:
            self._writable = asyncio.get_running_loop().create_future()
            await self._writable
