"""A question to a server beside the traffic: one GET on a connection of its own.

For probes, of which there may be hundreds a second: it stands on the same client as the data path, which takes a quarter of
what a general one does. The rule: whatever the server does, the answer is bounded and the connection is gone in the end.
"""

from __future__ import annotations

import asyncio
import ssl

from upstream.http.address import Address
from upstream.http.connection import Headers, connect
from upstream.http.errors import UpstreamError
from upstream.http.write_batching import WriteBatch


class _Response:
    """The answer as it comes: a ``Receiver``. A body is cut at ``limit`` bytes."""

    wants_read_events = False

    def __init__(self, limit: int) -> None:
        self.status = 0
        self.body = bytearray()
        self._limit = limit
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_headers(self, status: int, _: Headers) -> None:
        self.status = status

    def on_body(self, data: bytes) -> None:
        self.body += data[: self._limit - len(self.body)]
        if len(self.body) == self._limit:
            self.on_end()

    def on_read(self) -> None:
        """The body is read to its end."""

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def on_failure(self, error: UpstreamError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def on_writable(self) -> None:
        """The question was sent as a whole."""


async def get(
    address: Address, path: str, *, api_key: str | None, timeout: float, tls: ssl.SSLContext | None, limit: int
) -> tuple[int, bytes]:
    """Status and body of a GET; at most ``limit`` bytes of the body. ``timeout``: seconds for the connection; the caller bounds the rest.

    Raises UpstreamError.
    """
    connection = await connect(str(address), address, timeout, tls, lambda connection: connection.close(), WriteBatch())
    try:
        inquiry = _Response(limit)
        connection.send(_request(address, path, api_key), inquiry)
        await inquiry.done
    finally:
        connection.close()
    return inquiry.status, bytes(inquiry.body)


def _request(address: Address, path: str, api_key: str | None) -> bytes:
    lines = [
        f"GET {address.prefix}{path} HTTP/1.1",
        f"host: {address.authority}",
        "accept: application/json",
        "accept-encoding: identity",
        "connection: close",
    ]
    if api_key is not None:
        lines.append(f"authorization: Bearer {api_key}")
    return "\r\n".join([*lines, "", ""]).encode()
