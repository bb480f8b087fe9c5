"""Sends one request to a server, on a separate connection, and reads a bounded response.

There may be hundreds of probes a second, so this uses the HTTP client of the data path, which needs a quarter of the time of a general
client. The rule: whatever the server does, the response is bounded and the connection is closed in the end.
"""

from __future__ import annotations

import asyncio
import ssl

from upstream.http.address import Address
from upstream.http.connection import connect
from upstream.http.errors import UpstreamError
from upstream.http.response_head import Headers
from upstream.http.write_batching import WriteBatch


class _Response:
    """A response as it arrives: a ``Receiver``. The body is cut at ``limit`` bytes."""

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
        """Do nothing: the body is read to its end."""

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def on_failure(self, error: UpstreamError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def on_writable(self) -> None:
        """Do nothing: the request was sent in one piece."""


async def fetch(
    address: Address, path: str, *, api_key: str | None, timeout: float, tls: ssl.SSLContext | None, limit: int, posted: str | None = None
) -> tuple[int, bytes]:
    """Return the status and at most ``limit`` bytes of the body. ``posted``: the JSON of a POST; None for a GET.

    ``timeout``: seconds for the connection; the caller bounds the rest. Raises UpstreamError.
    """
    connection = await connect(str(address), address, timeout, tls, lambda connection: connection.close(), WriteBatch())
    try:
        response = _Response(limit)
        connection.send(_request(address, path, api_key, posted), response)
        await response.done
    finally:
        connection.close()
    return response.status, bytes(response.body)


async def fetch_within(address: Address, path: str, *, api_key: str | None, deadline: float, limit: int) -> tuple[int, bytes]:
    """Return the status and at most ``limit`` bytes of the body, within ``deadline`` seconds. Raises UpstreamError and TimeoutError."""
    tls = ssl.create_default_context() if address.tls else None
    async with asyncio.timeout(deadline):
        return await fetch(address, path, api_key=api_key, timeout=2 * deadline, tls=tls, limit=limit)


def _request(address: Address, path: str, api_key: str | None, posted: str | None) -> bytes:
    preferences = "accept: application/json\r\naccept-encoding: identity\r\nconnection: close\r\n"
    key = "" if api_key is None else f"authorization: Bearer {api_key}\r\n"
    body = "" if posted is None else f"content-type: application/json\r\ncontent-length: {len(posted)}\r\n"
    method = "GET" if posted is None else "POST"
    return f"{method} {address.prefix}{path} HTTP/1.1\r\nhost: {address.authority}\r\n{preferences}{key}{body}\r\n{posted or ''}".encode()
