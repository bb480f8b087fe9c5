"""A substitute for a Kubernetes API server with EndpointSlices: lists, long watches, and every failure that a test needs.

It uses TLS with a self-signed certificate. Like the real server it stores its history, so that a client can resume a watch from any
version that is still stored.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.certificates import certificate
from tests.support.scripted import Request, read_request
from upstream.discovery.kubernetes import Cluster

Document = dict[str, Any]


def endpoint(address: str, *, ready: bool | None = True, terminating: bool | None = None, pod: str | None = None) -> Document:
    """Return an entry of an EndpointSlice."""
    conditions = {"ready": ready, "serving": ready, "terminating": terminating}
    entry: Document = {"addresses": [address], "conditions": {name: value for name, value in conditions.items() if value is not None}}
    return entry | ({"targetRef": {"kind": "Pod", "uid": pod}} if pod else {})


def slice_of(name: str, endpoints: Iterable[Document], *ports: tuple[str, int], family: str = "IPv4", service: str = "vllm") -> Document:
    """Return an EndpointSlice. ``ports``: names and numbers."""
    return {
        "metadata": {"name": name, "namespace": "models", "labels": {"kubernetes.io/service-name": service}},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [{"name": named, "port": number, "protocol": "TCP"} for named, number in ports],
    }


@dataclass
class ApiRequest:
    """A received request."""

    path: str
    query: dict[str, str]
    token: str | None

    @property
    def watch(self) -> bool:
        return "watch" in self.query


@dataclass
class Api:
    """The server's state and the received requests. ``refuse`` returns the status and message of an error response, or None;
    ``error_body``: the body of an error response, if it is not a ``Status``; ``watch_seconds``: the server ends a watch after this time;
    ``piece``: the size of each write in bytes."""

    cluster: Cluster
    folder: Path
    slices: dict[str, Document] = field(default_factory=dict)
    requests: list[ApiRequest] = field(default_factory=list)
    refuse: Callable[[ApiRequest], tuple[int, str] | None] = lambda _: None
    error_body: bytes | None = None
    watch_seconds: float | None = None
    piece: int = 1 << 20
    version: int = 1000
    forgotten: int = 0
    """Older versions are no longer stored."""
    _history: list[tuple[int, Document]] = field(default_factory=list)
    _watchers: set[asyncio.StreamWriter] = field(default_factory=set)
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def watching(self) -> int:
        return len(self._watchers)

    @property
    def lists(self) -> int:
        return sum(not each.watch for each in self.requests)

    async def put(self, *slices: Document) -> None:
        """Create or change slices."""
        for each in slices:
            name = each["metadata"]["name"]
            await self._happen("MODIFIED" if name in self.slices else "ADDED", each)
            self.slices[name] = self._stamped(each)

    async def remove(self, name: str) -> None:
        await self._happen("DELETED", self.slices.pop(name))

    async def bookmark(self) -> None:
        """Send a bookmark to every watch: the resource version has advanced without a change of these slices."""
        await self._happen("BOOKMARK", {"kind": "EndpointSlice", "metadata": {}})

    async def say(self, document: Document) -> None:
        """Send every watch an event that is not a change."""
        await self.write(json.dumps(document).encode() + b"\n")

    async def write(self, data: bytes) -> None:
        """Send every watch these bytes."""
        for writer in tuple(self._watchers):
            await _chunk(writer, data, self.piece)

    async def forget(self) -> None:
        """Delete the history. A client that resumes with an old version must list again."""
        self.version += 1000
        self.forgotten = self.version
        self._history.clear()

    def cut(self) -> None:
        """Abort the connection of every watch."""
        for writer in self._watchers:
            writer.transport.abort()

    async def _happen(self, kind: str, thing: Document) -> None:
        self.version += 1
        async with self._news:
            self._history.append((self.version, {"type": kind, "object": self._stamped(thing)}))
            self._news.notify_all()

    def _stamped(self, thing: Document) -> Document:
        return thing | {"metadata": thing["metadata"] | {"resourceVersion": str(self.version)}}

    async def serve(self, request: Request, writer: asyncio.StreamWriter) -> None:
        parts = urlsplit(request.head.split(b" ")[1].decode())
        bearer = (request.header("authorization") or "").removeprefix("Bearer ")
        received = ApiRequest(parts.path, {name: values[0] for name, values in parse_qs(parts.query).items()}, bearer or None)
        self.requests.append(received)
        if refused := self.refuse(received):
            status, message = refused
            body = json.dumps({"kind": "Status", "code": status, "message": message}).encode()
            await _respond(writer, body if self.error_body is None else self.error_body, f"{status} No")
        elif received.watch:
            await self._watch(received, writer)
        else:
            metadata = {"resourceVersion": str(self.version)}
            listed = json.dumps({"metadata": metadata, "items": list(self._fitting(received))}).encode()
            await _respond(writer, listed, "200 OK", self.piece)

    def _fitting(self, request: ApiRequest) -> Iterable[Document]:
        name, _, value = request.query["labelSelector"].partition("=")
        namespace = request.path.split("/")[-2]
        return (
            each
            for each in self.slices.values()
            if each["metadata"]["labels"].get(name) == value and each["metadata"]["namespace"] == namespace
        )

    async def _watch(self, request: ApiRequest, writer: asyncio.StreamWriter) -> None:
        at = int(request.query["resourceVersion"])
        if at < self.forgotten:
            await _respond(writer, b'{"kind":"Status","code":410,"message":"too old resource version"}', "410 Gone")
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        self._watchers.add(writer)
        try:
            async with asyncio.timeout(self.watch_seconds):
                await self._follow(at, writer)
        except TimeoutError:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        finally:
            self._watchers.discard(writer)

    async def _follow(self, at: int, writer: asyncio.StreamWriter) -> None:
        while True:
            for version, event in await self._since(at):
                await _chunk(writer, json.dumps(event).encode() + b"\n", self.piece)
                at = version

    async def _since(self, version: int) -> list[tuple[int, Document]]:
        """Return the events after a version; wait until there is one."""
        async with self._news:
            await self._news.wait_for(lambda: any(each > version for each, _ in self._history))
            return [each for each in self._history if each[0] > version]


async def _chunk(writer: asyncio.StreamWriter, data: bytes, piece: int) -> None:
    for start in range(0, len(data), piece):
        part = data[start : start + piece]
        writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        await writer.drain()


async def _respond(writer: asyncio.StreamWriter, body: bytes, status: str, piece: int = 1 << 20) -> None:
    writer.write(b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n" % status.encode())
    await _chunk(writer, body, piece)
    writer.write(b"0\r\n\r\n")
    await writer.drain()


@asynccontextmanager
async def kubernetes_api(folder: Path) -> AsyncIterator[Api]:
    """Run the server, and write the service-account files of a pod in the namespace ``models`` to ``folder``."""
    cert, key = certificate(folder)
    (folder / "ca.crt").write_bytes(cert.read_bytes())
    (folder / "namespace").write_text("models")
    (folder / "token").write_text("a-token")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    tasks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while not writer.is_closing():
                await api.serve(await read_request(reader), writer)
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.transport.abort()

    server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=context)
    api = Api(Cluster("localhost", str(server.sockets[0].getsockname()[1]), folder), folder)
    try:
        yield api
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
