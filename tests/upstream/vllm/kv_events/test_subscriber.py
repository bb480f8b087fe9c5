"""Subscribe to engines on real sockets, while batches are lost, engines are replaced, and servers come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from tests.support.kv_engine import PlainEngine
from tests.support.kv_publisher import KvPublisher, kv_publisher
from tests.support.running import until
from tests.support.scripted import Conversation, scripted
from tests.upstream.vllm.kv_events.test_blocks import SIZE, key_of
from upstream.http.address import Address
from upstream.vllm.health import ProbeTarget
from upstream.vllm.kv_events.blocks import Changes
from upstream.vllm.kv_events.subscriber import BlockFacts, KvEventSubscriber, kv_event_subscriber


class Known:
    """The keys of each server, as the changes describe them."""

    def __init__(self) -> None:
        self.keys: dict[str, set[int]] = {}
        self.facts: set[BlockFacts] = set()

    def change(self, server: str, blocks: BlockFacts, changes: Changes, /) -> None:
        if blocks.size:
            self.facts.add(blocks)
        before = set() if changes.cleared else self.keys.get(server, set())
        self.keys[server] = (before - set(changes.removed)) | set(changes.inserted)

    def equals(self, *engines: PlainEngine) -> bool:
        return self.keys.get("server", set()) == {key_of(prefix) for engine in engines for prefix in engine.cached}


@asynccontextmanager
async def following(publisher: KvPublisher, check_interval: float = 60.0) -> AsyncIterator[tuple[KvEventSubscriber, Known]]:
    """Follow a server. Lost batches at the end are found after ``check_interval`` seconds."""
    known = Known()
    async with kv_event_subscriber(known.change, check_interval) as subscriber:
        subscriber.follow([publisher.target])
        yield subscriber, known


@pytest.fixture
def engine() -> PlainEngine:
    return PlainEngine(block_size=SIZE, capacity=10)


async def compute(publisher: KvPublisher, count: int, start: int = 0, index: int = 0) -> None:
    for number in range(start, start + count):
        await publisher.compute([number] * SIZE, index)


async def test_earlier_and_new_batches_are_applied(engine: PlainEngine, tmp_path: Path) -> None:
    async with kv_publisher(tmp_path, engine) as publisher:
        await compute(publisher, 5)
        async with following(publisher) as (subscriber, known):
            await until(lambda: known.equals(engine) and len(engine.cached) == 5)
            await compute(publisher, 12, start=5)
            await publisher.publish(engine.clear())
            await compute(publisher, 1, start=50)
            await until(lambda: known.equals(engine))
            [status] = subscriber.statuses().values()
            assert (status.ranks, status.problem, status.blocks, status.gaps) == (1, "", 1, 0)
            assert known.facts == {BlockFacts(SIZE, True)}


async def test_lost_batches_are_replayed_after_the_next_one(engine: PlainEngine, tmp_path: Path) -> None:
    async with kv_publisher(tmp_path, engine) as publisher, following(publisher) as (subscriber, known):
        await compute(publisher, 3)
        await until(lambda: known.equals(engine))
        publisher.ranks[0].lossy = True
        await compute(publisher, 12, start=3)
        publisher.ranks[0].lossy = False
        assert not known.equals(engine)
        await compute(publisher, 1, start=20)
        await until(lambda: known.equals(engine))
        assert subscriber.statuses()["server"].gaps == 1
        assert publisher.ranks[0].replayed_from[-1] == 2


async def test_lost_batches_without_a_next_one_are_found_by_a_check(engine: PlainEngine, tmp_path: Path) -> None:
    async with kv_publisher(tmp_path, engine) as publisher, following(publisher, check_interval=0.05) as (subscriber, known):
        await compute(publisher, 3)
        await until(lambda: known.equals(engine))
        publisher.ranks[0].lossy = True
        await compute(publisher, 2, start=3)
        await until(lambda: known.equals(engine))
        assert subscriber.statuses()["server"].gaps == 0


async def test_a_replaced_engine_starts_with_nothing(engine: PlainEngine, tmp_path: Path) -> None:
    async with kv_publisher(tmp_path, engine) as publisher, following(publisher) as (_, known):
        await compute(publisher, 5)
        await until(lambda: known.equals(engine))
        await publisher.stop()
        await until(lambda: known.keys["server"] == set())
        other = PlainEngine(block_size=SIZE)
        publisher.start(other)
        await compute(publisher, 7, start=100)
        await until(lambda: known.equals(other))
        assert len(other.cached) == 7


async def test_ranks_are_united(engine: PlainEngine, tmp_path: Path) -> None:
    other = PlainEngine(block_size=SIZE)
    async with kv_publisher(tmp_path, engine, other) as publisher, following(publisher) as (subscriber, known):
        await compute(publisher, 5)
        await compute(publisher, 5, start=3, index=1)
        await until(lambda: known.equals(engine, other) and len(known.keys["server"]) == 8)
        assert subscriber.statuses()["server"].ranks == 2
        await publisher.publish(engine.clear())
        await until(lambda: known.equals(other))


async def test_without_a_replay_a_gap_forgets_what_was_before(engine: PlainEngine, tmp_path: Path) -> None:
    async with kv_publisher(tmp_path, engine) as publisher:
        publisher.with_replay = False
        async with following(publisher) as (_, known):
            number = 0
            while not known.keys.get("server"):  # it knows nothing until its connection is open
                await compute(publisher, 1, start=number)
                number += 1
                await asyncio.sleep(0.01)
            publisher.ranks[0].lossy = True
            await compute(publisher, 1, start=1000)
            publisher.ranks[0].lossy = False
            await compute(publisher, 1, start=2000)
            await until(lambda: known.keys["server"] == {key_of((None, None, *[2000] * SIZE))})


async def test_a_server_that_is_no_longer_followed_is_forgotten_at_once(engine: PlainEngine, tmp_path: Path) -> None:
    async with kv_publisher(tmp_path, engine) as publisher, following(publisher) as (subscriber, known):
        await compute(publisher, 5)
        await until(lambda: known.equals(engine))
        subscriber.follow([publisher.target])
        assert known.equals(engine)
        subscriber.follow([])
        assert known.keys == {"server": set()} and subscriber.statuses() == {}
        subscriber.follow([publisher.target])
        await until(lambda: known.equals(engine) and len(known.keys["server"]) == 5)


async def test_servers_without_events_and_without_a_response_are_reported(engine: PlainEngine, tmp_path: Path) -> None:
    async with kv_publisher(tmp_path, engine) as publisher:
        publisher.body = b"{}"
        async with following(publisher) as (subscriber, _):
            await until(lambda: subscriber.statuses()["server"].ranks == 0)
            subscriber.follow([ProbeTarget("down", Address(host="127.0.0.1", port=1), None)])
            await until(lambda: subscriber.statuses()["down"].problem != "")
            assert subscriber.statuses()["down"].ranks is None


async def test_an_invalid_batch_is_reported_and_forgets_everything(engine: PlainEngine, tmp_path: Path) -> None:
    async with kv_publisher(tmp_path, engine) as publisher, following(publisher) as (subscriber, known):
        await compute(publisher, 5)
        await until(lambda: known.equals(engine))
        await publisher.publish((5, b"\xc1"))
        await until(lambda: "no batch of KV cache events" in subscriber.statuses()["server"].problem)
        assert known.keys["server"] == set()


async def test_blocks_that_were_stored_before_the_oldest_batch_are_not_known(tmp_path: Path) -> None:
    engine = PlainEngine(block_size=SIZE, retained=3)
    async with kv_publisher(tmp_path, engine) as publisher:
        await compute(publisher, 5)
        async with following(publisher) as (_, known):
            await until(lambda: len(known.keys.get("server", ())) == 3)
            assert BlockFacts(SIZE, False) in known.facts


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"<html>", "GET /kv_event_sources: "),
        (b'{"0":{"publisher":"zmq","endpoint":"inproc://kv"}}', "published on inproc://kv, which other processes cannot reach"),
        (b'{"0":{"publisher":"zmq","endpoint":"ipc:///%b"}}' % (b"x" * 200), "cannot connect to ipc:///xxx"),
    ],
)
async def test_sources_that_cannot_be_used_are_reported(engine: PlainEngine, tmp_path: Path, body: bytes, problem: str) -> None:
    async with kv_publisher(tmp_path, engine) as publisher:
        publisher.body = body
        async with following(publisher) as (subscriber, known):
            await until(lambda: problem in subscriber.statuses()["server"].problem)
            assert known.keys["server"] == set()


async def test_an_error_of_the_server_is_reported() -> None:
    async def fails(talk: Conversation) -> None:
        await talk.respond(b"{}", "500 Internal Server Error")

    async with scripted(fails) as server, kv_event_subscriber(Known().change) as subscriber:
        subscriber.follow([ProbeTarget("server", Address(port=server.port), None)])
        await until(lambda: subscriber.statuses()["server"].problem == "GET /kv_event_sources: status 500")


async def test_messages_with_other_frames_are_reported_and_forget_everything(engine: PlainEngine, tmp_path: Path) -> None:
    async with kv_publisher(tmp_path, engine) as publisher, following(publisher) as (subscriber, known):
        await compute(publisher, 5)
        await until(lambda: known.equals(engine))
        await publisher.ranks[0].events.send_multipart([b"", b"0"])
        await until(lambda: "a message with 2 frames is no batch" in subscriber.statuses()["server"].problem)
        assert known.keys["server"] == set()


async def test_a_replay_with_other_frames_is_reported(engine: PlainEngine, tmp_path: Path) -> None:
    async with kv_publisher(tmp_path, engine) as publisher:
        publisher.ranks[0].odd = (b"", b"0")
        async with following(publisher) as (subscriber, _):
            await until(lambda: "a message with 2 frames is no part of a replay" in subscriber.statuses()["server"].problem)


async def test_only_servers_with_blocks_are_listed_as_known(engine: PlainEngine, tmp_path: Path) -> None:
    async with kv_publisher(tmp_path, engine) as publisher, following(publisher) as (subscriber, known):
        other = ProbeTarget("other", Address(host="127.0.0.1", port=publisher.port), None)
        subscriber.follow([ProbeTarget("down", Address(host="127.0.0.1", port=1), None), publisher.target, other])
        assert list(subscriber.known()) == []
        await compute(publisher, 2)
        await until(lambda: len(known.keys.get("server", ())) == len(known.keys.get("other", ())) == 2)
        keys = {key_of(prefix) for prefix in engine.cached}
        assert list(subscriber.known()) == [(name, BlockFacts(SIZE, True), keys) for name in ("server", "other")]


async def test_timeouts_of_a_server_its_endpoint_and_its_replay(engine: PlainEngine, tmp_path: Path) -> None:
    """In one test, because each of them takes five seconds."""

    async def never_responds(talk: Conversation) -> None:
        await talk.closed_by_peer()

    async def is_no_endpoint(talk: Conversation) -> None:
        entry = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{closing.sockets[0].getsockname()[1]}"}
        await talk.respond(orjson.dumps({"0": entry}))

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with (
        kv_publisher(tmp_path, engine) as publisher,
        scripted(never_responds) as silent,
        scripted(is_no_endpoint) as unreachable,
        await asyncio.start_server(close, "127.0.0.1", 0) as closing,
    ):
        await compute(publisher, 5)
        publisher.ranks[0].cut_off = 1
        async with following(publisher) as (subscriber, known):
            others = [
                ProbeTarget(name, Address(port=port), None) for name, port in (("silent", silent.port), ("unreachable", unreachable.port))
            ]
            subscriber.follow([publisher.target, *others])
            await until(lambda: subscriber.statuses()["silent"].problem == "GET /kv_event_sources: no response within 5 s")
            await until(lambda: "is it reachable from here?" in subscriber.statuses()["unreachable"].problem)
            await until(lambda: publisher.ranks[0].replayed_from == [0, 4])
            assert known.equals(engine) and subscriber.statuses()["server"].problem == ""
