"""A model server that repeats the secret of each request: ``python -m tests.proxies.origin FILE``.

It prints its two ports, and appends a line ``REQUEST-ID SECRET`` to FILE for each request. On the second port it obeys the field
``user`` of a body, which names a row of ``MISBEHAVIOR``. It exits when its standard input closes.

The rule: a response contains no secret but that of its request, except in bytes that a client must never receive. These have ``STRAY``.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import TextIO, cast

import uvloop

from tests.proxies.secrets import first

STRAY = b"secret-none-0000000000000000"
"""Is in bytes that follow the end of a response."""
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
_ID = re.compile(rb"\r\nx-request-id: ([^\r]+)", re.IGNORECASE)
_USER = re.compile(rb'"user":"([^"]+)"')
_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
_SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def completion(secret: bytes) -> bytes:
    """Return the body of a chat completion."""
    return (
        b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant",'
        b'"content":"%b"},"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}' % secret
    )


def whole(secret: bytes) -> bytes:
    """Return a valid response."""
    body = completion(secret)
    return _JSON + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def _event(choices: bytes, rest: bytes = b"") -> bytes:
    data = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":%b%b}\n\n' % (choices, rest)
    return b"%x\r\n%b\r\n" % (len(data), data)


def stream(secret: bytes) -> bytes:
    """Return a valid event stream."""
    delta = b'[{"index":0,"delta":{"content":"%b"},"finish_reason":%b}]'
    usage = b',"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}'
    events = _event(delta % (secret, b"null")) + _event(delta % (secret, b'"stop"')) + _event(b"[]", usage)
    return _SSE + events + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def _misbehavior(secret: bytes) -> dict[str, tuple[bytes, bool]]:
    """Return all faulty responses to a request: the bytes, and whether the connection then stays open."""
    body, good, other = completion(secret), whole(secret), whole(STRAY)
    size = len(body)
    return {
        "too short": (_JSON + b"content-length: %d\r\n\r\n%b" % (size + 10, body), False),
        "too long": (_JSON + b"content-length: %d\r\n\r\n%b%b" % (size, body, STRAY * 3), True),
        "two responses": (good + other, True),
        "a third of a response behind it": (good + other[: len(other) // 3], True),
        "103 with a length": (b"HTTP/1.1 103 Early Hints\r\ncontent-length: %d\r\n\r\n%b%b" % (len(other), good, other), True),
        "103 and a response": (b"HTTP/1.1 103 Early Hints\r\n\r\n" + good, True),
        "101": (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n" + other, True),
        "204 with a body": (b"HTTP/1.1 204 No Content\r\n\r\n" + other, True),
        "304 with a body": (b"HTTP/1.1 304 Not Modified\r\ncontent-length: %d\r\n\r\n%b" % (size, other), True),
        "a length and chunks": (_JSON + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + other, True),
        "two lengths": (_JSON + b"content-length: 2\r\ncontent-length: %d\r\n\r\n%b%b" % (size, body, other), True),
        "endless headers": (b"HTTP/1.1 200 OK\r\n" + b"x-a: b\r\n" * 40_000, True),
        "chunks behind the end": (stream(secret) + b"5\r\nhello\r\n0\r\n\r\n" + other, True),
        "trailers": (stream(secret)[:-2] + b"x-a: " + STRAY + b"\r\n\r\n", True),
        "cut in the body": (good[:-40], False),
        "cut in the stream": (stream(secret)[:-60], False),
        "until the end": (_JSON + b"\r\n" + body, False),
        "HTTP/1.0": (good.replace(b"HTTP/1.1", b"HTTP/1.0"), True),
        "bare LF": (good.replace(b"\r\n", b"\n"), True),
    }


MISBEHAVIOR = tuple(_misbehavior(b""))


class _Connection(asyncio.Protocol):
    """One connection of the gateway."""

    transport: asyncio.Transport

    def __init__(self, record: TextIO, *, misbehaves: bool) -> None:
        self._record = record
        self._misbehaves = misbehaves
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class does not derive from it

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._buffer, 0, end + 2)
            size = end + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < size:
                return
            headers, body, self._buffer = self._buffer[:end], self._buffer[end + 4 : size], self._buffer[size:]
            self._respond(headers, body)

    def _respond(self, headers: bytes, body: bytes) -> None:
        if not headers.startswith(b"POST "):
            models = b'{"object":"list","data":[{"id":"m","object":"model"},{"id":"faulty","object":"model"}]}'
            self.transport.write(_JSON + b"content-length: %d\r\n\r\n%b" % (len(models), models))
            return
        identity, secret = _ID.search(headers), first(body) or b""
        self._record.write(f"{identity[1].decode() if identity else '-'} {secret.decode() or '-'}\n")
        user = _USER.search(body) if self._misbehaves else None
        if user is None:
            self.transport.write(stream(secret) if b'"stream":true' in body else whole(secret))
            return
        response, open_after = _misbehavior(secret)[user[1].decode()]
        self.transport.write(response)
        if not open_after:
            self.transport.close()


async def _serve(record: TextIO) -> None:
    loop = asyncio.get_running_loop()
    for misbehaves in (False, True):
        server = await loop.create_server(partial(_Connection, record, misbehaves=misbehaves), "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


@contextmanager
def origin(record: Path) -> Iterator[tuple[int, int]]:
    """Run the server in a separate process. Yield its ports; the record is complete when the block has ended."""
    command = [sys.executable, "-m", "tests.proxies.origin", str(record)]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield int(process.stdout.readline()), int(process.stdout.readline())
        finally:
            process.stdin.close()
            try:
                process.wait(30)
            finally:
                process.kill()  # without effect on a process that has exited


if __name__ == "__main__":
    with open(sys.argv[1], "w") as opened:
        uvloop.run(_serve(opened))
