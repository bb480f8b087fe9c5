"""The changes of servers' caches as the workers get them."""

from __future__ import annotations

from array import array
from pathlib import Path

from gateway.config import load
from gateway.fleet.observed_servers import ObservedServers
from gateway.monitoring.kv_events import KvEvents, kv_events
from gateway.snapshot.link import BlockChanges, CachedBlocks
from tests.support.kv_engine import PlainEngine
from tests.support.kv_publisher import kv_publisher
from tests.support.process import configuration, write
from tests.support.running import until
from tests.upstream.vllm.kv_events.test_blocks import SIZE, key_of
from upstream.vllm.kv_events.blocks import Changes
from upstream.vllm.kv_events.subscriber import UNKNOWN, BlockFacts

KNOWN = BlockFacts(16, True)


def keys(*values: int) -> bytes:
    return array("Q", values).tobytes()


class Worker:
    """The knowledge of a worker after its messages: keys by server."""

    def __init__(self) -> None:
        self.messages: list[CachedBlocks] = []
        self.known: dict[str, set[int]] = {}
        self.block_sizes: dict[str, int] = {}

    def receive(self, message: CachedBlocks) -> None:
        self.messages.append(message)
        for each in message.changes:
            known = set() if each.cleared else self.known.get(each.server, set())
            self.known[each.server] = (known - set(array("Q", each.removed))) | set(array("Q", each.inserted))
            self.block_sizes[each.server] = each.block_size


async def test_changes_are_collected_until_a_server_is_cleared() -> None:
    worker = Worker()
    events = KvEvents(worker.receive)
    events.changed("a", KNOWN, Changes(inserted=(1, 2**64 - 1)))
    events.changed("b", KNOWN, Changes(removed=(3,)))
    assert worker.messages == []
    events.changed("a", UNKNOWN, Changes(cleared=True))
    assert worker.messages == [
        CachedBlocks(
            (
                BlockChanges("a", 16, True, False, b"", keys(1, 2**64 - 1)),
                BlockChanges("b", 16, True, False, keys(3), b""),
                BlockChanges("a", 0, True, True, b"", b""),
            )
        )
    ]
    events.changed("a", KNOWN, Changes(inserted=(7,)))
    await until(lambda: worker.known["a"] == {7})
    events.close()


async def test_a_new_worker_gets_all_that_is_known(tmp_path: Path) -> None:
    engine, worker, successor = PlainEngine(block_size=SIZE), Worker(), Worker()
    async with kv_publisher(tmp_path, engine) as publisher, kv_events(worker.receive) as events:
        assert events.subscriber is not None
        events.subscriber.follow([publisher.target])
        for number in range(5):
            await publisher.compute([number] * SIZE)
        await until(lambda: worker.known.get("server") == {key_of(prefix) for prefix in engine.cached})
        for message in events.first_messages():
            successor.receive(message)
        assert successor.known == worker.known and successor.block_sizes == {"server": SIZE}
        assert [(each.name, each.subject, each.error) for each in events.dependencies()] == [("kv_events", "server", None)]
    assert worker.known == {"server": set()}


async def test_nothing_is_sent_after_the_end() -> None:
    closed, open_one = Worker(), Worker()
    events, others = KvEvents(closed.receive), KvEvents(open_one.receive)
    events.changed("a", KNOWN, Changes(inserted=(1,)))
    events.close()
    others.changed("a", KNOWN, Changes(inserted=(1,)))  # is due later
    await until(lambda: open_one.messages)
    assert closed.messages == []


async def test_without_the_packages_no_server_is_followed(tmp_path: Path) -> None:
    models = {"id": "m", "balance": "cost", "servers": [{"url": "http://127.0.0.1:1"}, {"url": "http://127.0.0.1:2"}]}
    write(tmp_path / "gateway.yaml", configuration(models))
    events = KvEvents(Worker().receive)
    events.follow(load(tmp_path / "gateway.yaml"), ObservedServers({}, {}, {}))
    assert [*events.first_messages(), *events.dependencies(), *events.series()] == []
    assert events.as_json("m#0") is None


async def test_a_server_without_events_is_no_dependency(tmp_path: Path) -> None:
    async with kv_publisher(tmp_path) as publisher, kv_events(Worker().receive) as events:
        assert events.subscriber is not None
        events.subscriber.follow([publisher.target])
        await until(lambda: publisher.requests)
        assert list(events.dependencies()) == []
