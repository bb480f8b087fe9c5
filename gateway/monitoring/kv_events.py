"""Follow the KV cache events of the servers whose model's policy uses them, and send the workers what changes.

The rules: a worker gets every change, in order, over its link. A new worker first gets everything that is known. Changes are collected for
a few milliseconds, except when a server's blocks are forgotten: this message precedes the next one about the server's health, so a new
process of a server never gets a request for what its predecessor had cached.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gateway.config import Config
from gateway.config.values import kv_events_installed
from gateway.fleet.configured_servers import configured_servers, uses_kv_events
from gateway.fleet.observed_servers import ObservedServers, health_check_targets
from gateway.snapshot.link import BlockChanges, CachedBlocks
from gateway.telemetry.dependencies import Observation
from gateway.telemetry.metrics import Series
from upstream.vllm.health import ProbeTarget
from upstream.vllm.kv_events.blocks import Changes

if TYPE_CHECKING:
    from upstream.vllm.kv_events.subscriber import BlockFacts, FollowStatus, KvEventSubscriber

_COLLECT = 0.01  # seconds


class KvEvents:
    """The KV cache events of all servers that are followed. ``send`` passes a message to every worker."""

    def __init__(self, send: Callable[[CachedBlocks], None]) -> None:
        self._send = send
        self._pending: list[BlockChanges] = []
        self._timer: asyncio.TimerHandle | None = None
        self._models: dict[str, str] = {}
        self.subscriber: KvEventSubscriber | None = None
        """None if the packages of the extra ``kv-events`` are not installed."""

    def follow(self, config: Config, observed: ObservedServers) -> None:
        """Follow the servers of this configuration. Call it after the workers have got their snapshot, which names the servers."""
        if self.subscriber is not None:
            targets = kv_event_targets(config, observed)
            self._models = {name: model for name, (model, _) in targets.items()}
            self.subscriber.follow(target for _, target in targets.values())

    def changed(self, server: str, blocks: BlockFacts, changes: Changes) -> None:
        """Take changes of a server's blocks."""
        self._pending.append(_message(server, blocks, changes.cleared, changes.removed, changes.inserted))
        if changes.cleared:
            self._flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_COLLECT, self._flush)

    def first_messages(self) -> Iterator[CachedBlocks]:
        """Yield all known blocks, for a new worker."""
        if self.subscriber is not None:
            for server, blocks, keys in self.subscriber.known():
                yield CachedBlocks((_message(server, blocks, True, (), keys),))

    def dependencies(self) -> Iterator[Observation]:
        """Yield each server that publishes events, or whose events cannot be followed."""
        for server, status in self._statuses().items():
            if status.ranks or status.problem:
                yield Observation("kv_events", server, status.problem or None)

    def series(self) -> Iterator[tuple[Series, float]]:
        """Yield the metrics of each followed server."""
        for server, status in self._statuses().items():
            labels = (self._models[server], server)
            yield Series("kv_event_blocks", labels), status.blocks
            yield Series("kv_event_gaps_total", labels), status.gaps

    def as_json(self, server: str) -> dict[str, Any] | None:
        """Return what /status shows of a server's events; None if it publishes none. Collected changes are sent first."""
        self._flush()
        status = self._statuses().get(server)
        return None if status is None or not (status.ranks or status.problem) else asdict(status)

    def close(self) -> None:
        """Send nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def _statuses(self) -> Mapping[str, FollowStatus]:
        return {} if self.subscriber is None else self.subscriber.statuses()

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pending:
            pending, self._pending = self._pending, []
            self._send(CachedBlocks(tuple(pending)))


def kv_event_targets(config: Config, observed: ObservedServers) -> dict[str, tuple[str, ProbeTarget]]:
    """Return the model and the target of each server whose events are followed, by its name.

    They are the servers of models that use events and have more than one server to choose from.
    """
    models = {server.name: server.model.id for server in configured_servers(config) if uses_kv_events(server.model)}
    if not models:
        return {}
    counts = Counter(models.values())
    targets = health_check_targets(config, observed)
    return {each.name: (models[each.name], each) for each in targets if each.name in models and counts[models[each.name]] > 1}


@asynccontextmanager
async def kv_events(send: Callable[[CachedBlocks], None]) -> AsyncIterator[KvEvents]:
    """Follow events for the length of the block. Without the packages of the extra, none are followed."""
    events = KvEvents(send)
    if not kv_events_installed():
        yield events
        return
    from upstream.vllm.kv_events.subscriber import kv_event_subscriber  # with pyzmq, which is an optional dependency

    async with kv_event_subscriber(events.changed) as subscriber:
        events.subscriber = subscriber
        with closing(events):
            yield events


def _message(server: str, blocks: BlockFacts, cleared: bool, removed: Iterable[int], inserted: Iterable[int]) -> BlockChanges:
    return BlockChanges(server, blocks.size, blocks.complete, cleared, array("Q", removed).tobytes(), array("Q", inserted).tobytes())
