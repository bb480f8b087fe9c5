"""A client that sends exactly the bytes of a test, and responses exactly as vLLM 0.32 writes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import orjson

from tests.support.running import KEY, MODEL

USAGE = b'"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":1}}'
COMPLETION = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1760000000,"model":"tiny","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"say \\"usage\\":{\\"prompt_tokens\\":99} \xe4\xbd\xa0\xf0\x9f\x8c\x8d"},"logprobs":null,'
    b'"finish_reason":"stop"}],"service_tier":null,' + USAGE + b',"prompt_logprobs":null,"kv_transfer_params":null}'
)
_CHUNK = '{"id":"chatcmpl-1","object":"chat.completion.chunk","choices":'


def event(choices: str, rest: str = "") -> bytes:
    """Return a chunk as an event."""
    return f"data: {_CHUNK}{choices}{rest}}}\n\n".encode()


def delta(text: str, finish: str = "null") -> bytes:
    """Return a chunk with one choice's delta."""
    return event(f'[{{"index":0,"delta":{text},"finish_reason":{finish}}}]')


ROLE = delta('{"role":"assistant","content":""}')
HELLO = delta('{"content":"你好 \\r\\n data: [DONE]"}')
STOP = delta('{"content":""}', '"stop"')
COUNT = event("[]", "," + USAGE.decode())
DONE = b"data: [DONE]\n\n"
EVENTS = (ROLE, HELLO, STOP, COUNT, DONE)
SHOWN = (ROLE, HELLO, STOP, DONE)
"""The events for a client that did not request usage."""
DEAD_ENGINE = b'data: {"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError","code":500}}\n\n'
"""An event of a server whose engine has died."""


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
"""The response headers of a stream."""


def chat(**fields: object) -> dict[str, object]:
    """Return the body of a chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **fields}


def request(
    body: object = None, path: str = "/v1/chat/completions", *, method: str = "POST", token: str | None = KEY, extra: tuple[str, ...] = ()
) -> bytes:
    """Return the bytes of a request. ``body`` is JSON, or bytes that are sent unchanged."""
    data = body if isinstance(body, bytes) else orjson.dumps(chat() if body is None else body)
    lines = [f"{method} {path} HTTP/1.1", "host: test", "content-type: application/json", f"content-length: {len(data)}"]
    if token is not None:
        lines.append(f"authorization: Bearer {token}")
    return "\r\n".join([*lines, *extra, "", ""]).encode() + data


@dataclass
class Reply:
    """A response as it was received."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool = True
    pieces: list[bytes] = field(default_factory=list)

    @property
    def error(self) -> dict[str, object]:
        document = orjson.loads(self.body)
        error = document["error"]
        assert isinstance(error, dict)
        return error


class Client:
    """One connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.begun = asyncio.Event()
        """Set when the first piece of a chunked body was received."""

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def request(self, data: bytes) -> Reply:
        self.send(data)
        return await self.reply()

    async def reply(self) -> Reply:
        """Read the next response. ``whole`` is False if the connection closed before the response was complete."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        if lines[0].split()[1] == "100":
            return await self.reply()
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
        reply = Reply(int(lines[0].split()[1]), headers, b"")
        try:
            if reply.status == 204:
                pass
            elif headers.get("transfer-encoding") == "chunked":
                await self._chunks(reply)
            elif "content-length" in headers:
                reply.body = await self.reader.readexactly(int(headers["content-length"]))
            else:
                reply.body = await self.reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            reply.whole = False
        return reply

    async def events(self, count: int) -> None:
        """Read until ``count`` events of a stream were received. Raises AssertionError if the connection closes before."""
        data = b""
        while data.count(b"\n\n") < count:
            piece = await self.reader.read(65536)
            assert piece, f"it ended: {data!r}"
            data += piece

    async def _chunks(self, reply: Reply) -> None:
        while size := int((await self.reader.readuntil(b"\r\n")).strip(), 16):
            piece = await self.reader.readexactly(size)
            reply.pieces.append(piece)
            self.begun.set()
            reply.body += piece
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)

    async def closed(self) -> bool:
        """Return whether the gateway has closed the connection without sending more bytes."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True

    def disconnect(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def client(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


async def request_once(port: int, data: bytes) -> Reply:
    """Send one request on a separate connection."""
    async with client(port) as one:
        return await one.request(data)
