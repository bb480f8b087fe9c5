"""A server that publishes the KV cache events of plain engines on real sockets, as vLLM does, and loses them when a test wants it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import zmq
import zmq.asyncio

from tests.support.kv_engine import PlainEngine
from tests.support.scripted import Conversation, scripted
from upstream.http.address import Address
from upstream.vllm.health import ProbeTarget

_END = (-1).to_bytes(8, signed=True)


@dataclass
class _Rank:
    """The sockets of one engine.

    ``lossy``: the next batches are not published, only retained. ``cut_off``: how many of the next replays have no end. ``odd``: the
    frames of each replay, if they are not those of vLLM.
    """

    engine: PlainEngine
    events: zmq.asyncio.Socket
    replays: zmq.asyncio.Socket
    endpoint: str
    replay_endpoint: str
    lossy: bool = False
    cut_off: int = 0
    odd: tuple[bytes, ...] = ()
    replayed_from: list[int] = field(default_factory=list)

    async def serve_replays(self) -> None:
        while True:
            identity, _, start = await self.replays.recv_multipart()
            self.replayed_from.append(int.from_bytes(start))
            for number, payload in tuple(self.engine.retained):
                if number >= int.from_bytes(start):
                    await self.replays.send_multipart([identity, b"", b"", number.to_bytes(8), payload])
            if self.odd:
                await self.replays.send_multipart([identity, *self.odd])
            elif self.cut_off:
                self.cut_off -= 1
            else:
                await self.replays.send_multipart([identity, b"", b"", _END, b""])


@dataclass
class KvPublisher:
    """A running server. ``body``: its response to /kv_event_sources, if it is not that of vLLM. ``requests``: how many it got."""

    port: int
    folder: Path
    with_replay: bool = True
    body: bytes | None = None
    requests: int = 0
    ranks: list[_Rank] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _context: zmq.asyncio.Context = field(default_factory=zmq.asyncio.Context)

    @property
    def target(self) -> ProbeTarget:
        return ProbeTarget("server", Address(host="127.0.0.1", port=self.port), None)

    def start(self, *engines: PlainEngine) -> None:
        """Bind the sockets of new engines, at the same endpoints as those of earlier ones."""
        for index, engine in enumerate(engines):
            suffix = f"_dp{index}" if index else ""
            endpoints = [f"ipc://{self.folder}/inproc-{name}{suffix}" for name in ("kv", "replay")]
            events, replays = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
            events.bind(endpoints[0])
            replays.bind(endpoints[1])
            rank = _Rank(engine, events, replays, endpoints[0], endpoints[1])
            self.ranks.append(rank)
            self._tasks.append(asyncio.create_task(rank.serve_replays()))

    async def stop(self) -> None:
        """Close all sockets, as an engine that exits does."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for rank in self.ranks:
            rank.events.close(linger=0)
            rank.replays.close(linger=0)
        self.ranks.clear()
        self._tasks.clear()

    async def publish(self, batch: tuple[int, bytes] | None, index: int = 0) -> None:
        """Publish a batch of an engine, unless its rank is ``lossy``."""
        rank = self.ranks[index]
        if batch is not None and not rank.lossy:
            await rank.events.send_multipart([b"", batch[0].to_bytes(8), batch[1]])

    async def compute(self, tokens: Sequence[int], index: int = 0) -> None:
        """Let an engine compute a prompt, and publish its batch."""
        await self.publish(self.ranks[index].engine.compute(tokens)[1], index)

    async def respond(self, conversation: Conversation) -> None:
        self.requests += 1
        sources = {
            str(index): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": rank.endpoint,
                "replay_endpoint": rank.replay_endpoint if self.with_replay else None,
                "topic": "",
            }
            for index, rank in enumerate(self.ranks)
        }
        await conversation.respond(orjson.dumps(sources) if self.body is None else self.body)

    async def close(self) -> None:
        await self.stop()
        self._context.destroy(linger=0)


@asynccontextmanager
async def kv_publisher(folder: Path, *engines: PlainEngine) -> AsyncIterator[KvPublisher]:
    """Run a server with these engines, one for each rank. Its sockets are in ``folder``."""
    found: list[KvPublisher] = []
    async with scripted(lambda conversation: found[0].respond(conversation)) as server:
        found.append(KvPublisher(server.port, folder))
        try:
            found[0].start(*engines)
            yield found[0]
        finally:
            await found[0].close()
