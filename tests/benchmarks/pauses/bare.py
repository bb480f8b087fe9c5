"""The proxy that pauses are compared with: `python -m tests.benchmarks.pauses.bare FILE`, one protocol for clients and one for servers.

It does what each request needs and no more: HTTP with httptools, the hash of the key, the body parsed and merged with orjson, the
usage of the response. There are no deadlines, limits, metrics, retries and logs.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from pathlib import Path
from typing import cast

import httptools
import msgspec
import orjson

from tests.benchmarks.pauses import probe

_REFUSED = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n"
_BROKEN = b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n"
_USAGE = b'"usage":{'
_END_OF_EVENT = b"\n\n"


class Settings(msgspec.Struct, frozen=True):
    """The configuration: SHA-256 hashes of keys in hex, and the port of each model's server."""

    port: int
    keys: frozenset[str]
    models: dict[str, int]


class Proxy:
    """The open connections to servers, and the count of tokens."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tokens = 0
        self._idle: dict[int, list[Server]] = {port: [] for port in settings.models.values()}

    def is_idle(self, server: Server) -> None:
        """Take back a connection."""
        self._idle[server.port].append(server)

    def take_idle(self, port: int) -> Server | None:
        """Return an open connection that no request uses; None without one."""
        idle = self._idle[port]
        return idle.pop() if idle and not idle[-1].transport.is_closing() else None


class Server(asyncio.Protocol):
    """A connection to a server. It passes one response at a time on to `client`."""

    transport: asyncio.Transport

    def __init__(self, proxy: Proxy, port: int) -> None:
        self.port = port
        self._proxy = proxy
        self._client: Client | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._begin()

    def _begin(self) -> None:
        self._chunked = False
        self._out: list[bytes] = []
        self._body: list[bytes] = []

    def send(self, client: Client, request: bytes) -> None:
        self._client = client
        self.transport.write(request)

    def abort(self) -> None:
        """Close the connection: the client does not wait any more."""
        self._client = None
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class does not derive from it

    def connection_lost(self, _: Exception | None) -> None:
        if self._client is not None:
            self._client.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        if self._out and self._client is not None:
            self._client.transport.write(b"".join(self._out))
            self._out.clear()

    # llhttp's callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self._chunked = self._chunked or (name.lower() == b"transfer-encoding" and value == b"chunked")
        self._out.append(b"%b: %b\r\n" % (name, value))

    def on_headers_complete(self) -> None:
        self._out.insert(0, b"HTTP/1.1 %d \r\n" % self._parser.get_status_code())
        self._out.append(b"\r\n")

    def on_body(self, body: bytes) -> None:
        if not self._chunked:
            self._out.append(body)
            self._body.append(body)
        else:
            self._out.append(b"%x\r\n%b\r\n" % (len(body), body))
            if _USAGE in body and body.endswith(_END_OF_EVENT):
                self._proxy.tokens += _tokens(body.removeprefix(b"data: "))

    def on_message_complete(self) -> None:
        if self._chunked:
            self._out.append(b"0\r\n\r\n")
        else:
            self._proxy.tokens += _tokens(b"".join(self._body))
        client, self._client = self._client, None
        if client is not None:
            client.transport.write(b"".join(self._out))
            client.finish()
        self._begin()
        self._proxy.is_idle(self)


def _tokens(body: bytes) -> int:
    """Return the tokens of a response or an event, 0 if it reports none."""
    return int((orjson.loads(body).get("usage") or {}).get("total_tokens", 0))


class Client(asyncio.Protocol):
    """A client's connection. Requests of one connection come one after the other."""

    transport: asyncio.Transport

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._parser = httptools.HttpRequestParser(self)
        self._server: Server | None = None
        self._opening: asyncio.Task[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self._path = b""
        self._key = b""
        self._body: list[bytes] = []

    def finish(self) -> None:
        """The response is complete."""
        self._server = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class does not derive from it

    def connection_lost(self, _: Exception | None) -> None:
        if self._opening is not None:
            self._opening.cancel()
        if self._server is not None:
            self._server.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.close()

    # llhttp's callbacks

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"authorization":
            self._key = value.removeprefix(b"Bearer ")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        settings = self._proxy.settings
        if hashlib.sha256(self._key).hexdigest() not in settings.keys:
            self.transport.write(_REFUSED)
            self._begin()
            return
        merged = orjson.loads(b"".join(self._body))
        merged |= merged.pop("extra_body", {})
        if merged.get("stream"):
            merged["stream_options"] = {"include_usage": True}
        port, body = settings.models[merged["model"]], orjson.dumps(merged)
        headers = b"POST %b HTTP/1.1\r\nhost: server\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        request = headers % (self._path, len(body)) + body
        self._begin()
        if (server := self._proxy.take_idle(port)) is not None:
            self._send(server, request)
        else:
            self._opening = asyncio.get_running_loop().create_task(self._open_and_send(port, request))

    async def _open_and_send(self, port: int, request: bytes) -> None:
        try:
            _, server = await asyncio.get_running_loop().create_connection(lambda: Server(self._proxy, port), "127.0.0.1", port)
        except OSError:
            self.transport.write(_BROKEN)
        else:
            self._send(server, request)
        self._opening = None

    def _send(self, server: Server, request: bytes) -> None:
        self._server = server
        server.send(self, request)


async def serve(settings: Settings) -> None:
    """Serve until the process is ended."""
    proxy = Proxy(settings)
    server = await asyncio.get_running_loop().create_server(lambda: Client(proxy), "127.0.0.1", settings.port, backlog=8192)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    probe.run(serve(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Settings)))
