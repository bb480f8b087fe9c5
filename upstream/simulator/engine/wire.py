"""The bytes of a response: cut, chunked and truncated as the behavior specifies.

Owns what is sent. The rule: after a cut no more bytes are sent, and the connection is closed without the end of the body, as if the process
had died.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn

from starlette.types import Scope, Send

from upstream.simulator.behavior import Behavior
from upstream.simulator.journal import JournalEntry


class Cut(Exception):
    """The connection is closed on purpose, and the response ends here."""


class Wire:
    """The bytes of one response to one client."""

    def __init__(self, scope: Scope, send: Send, behavior: Behavior, entry: JournalEntry) -> None:
        self._transport: asyncio.Transport = scope["state"]["transport"]
        self._send = send
        self._behavior = behavior
        self._entry = entry
        self._held = b""

    async def head(self, status: int, content_type: str, length: int | None = None) -> None:
        """Send the status and the headers; without a length the body is chunked. Raises Cut."""
        if self._behavior.cut_before_headers:
            self.break_off()
        headers = [(b"content-type", content_type.encode())]
        if length is not None:
            headers.insert(0, (b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        if self._behavior.cut_after == 0 or self._behavior.cut_bytes == 0:
            await self._body(b"")
            self.break_off()

    async def event(self, event: bytes) -> None:
        """Send one event (or a whole body). Raises Cut."""
        limit = self._behavior.cut_bytes
        sent = self._entry.bytes_sent + len(self._held)
        if limit is not None and sent + len(event) >= limit:
            await self._out(event[: limit - sent], flush=True)
            self.break_off()
        self._entry.events_sent += 1
        last = self._behavior.cut_after is not None and self._entry.events_sent >= self._behavior.cut_after
        await self._out(event, flush=last)
        if last:
            self.break_off()

    async def end(self) -> None:
        """Send the end of the body."""
        await self._out(b"", flush=True)
        await self._body(b"", more=False)

    async def _out(self, data: bytes, *, flush: bool) -> None:
        """Send immediately, or in pieces of ``chunk_bytes`` regardless of event boundaries; an incomplete piece waits."""
        size = self._behavior.chunk_bytes
        if not size:
            await self._body(data)
            return
        self._held += data
        while len(self._held) >= size or (flush and self._held):
            piece, self._held = self._held[:size], self._held[size:]
            await self._body(piece)
            await asyncio.sleep(0)

    async def _body(self, data: bytes, *, more: bool = True) -> None:
        if data or not more:
            self._entry.bytes_sent += len(data)
            await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def break_off(self) -> NoReturn:
        """Close the connection before the end of the body. Written bytes are still sent. Raises Cut."""
        self._transport.close()
        raise Cut
