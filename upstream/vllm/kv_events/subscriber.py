"""Subscribe to the KV cache events of servers, and pass on what changes.

Owns the ZeroMQ sockets and one task for each server. The rules:

* When a connection is lost, the server's blocks are forgotten at once, and only then does anything reconnect. So the entries of an
  engine that has exited are removed long before its successor gets a request.
* The connection is open before the first replay is requested. A batch that is published in between is found by the replay, or
  when the next batch arrives. A lost last batch is found by a check every few seconds.
* Trouble with one server is its own: it is reported in its status, and tried again.

pyzmq is an optional dependency, so this module is imported only where it is installed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from upstream.backoff import Backoff
from upstream.http.errors import UpstreamError
from upstream.vllm.bounded_request import fetch_within
from upstream.vllm.health import ProbeTarget
from upstream.vllm.kv_events.blocks import Changes
from upstream.vllm.kv_events.follower import EngineFollower
from upstream.vllm.kv_events.ranks import RankUnion
from upstream.vllm.kv_events.sources import PATH, EventSource, event_sources

CHECK_INTERVAL = 5.0
"""Seconds without an event after which the last batches are compared with the engine's."""
_TIMEOUT = 5.0  # seconds for a response, a connection, or the next batch of a replay
_PAUSES = 1.0, 10.0  # seconds after the first failure, and at most
_NO_EVENTS_PAUSE = 60.0  # seconds until a server without events is asked again; it may have been restarted with them
_RESPONSE_LIMIT = 1 << 20  # bytes
_BATCH_LIMIT = 64 << 20  # bytes
_QUEUED = 100_000  # batches that may wait in a socket
_ATTEMPTS = 3  # replays in a row that may be cut off
_HEARTBEAT, _HEARTBEAT_TIMEOUT = 2000, 10_000  # milliseconds
_CONNECTED, _LOST = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED
_END = (-1).to_bytes(8, signed=True)
_log = logging.getLogger("vllm_gateway.kv_events")


class EventsLostError(Exception):
    """A server's events cannot be followed any longer. The text explains why."""


class BlockFacts(NamedTuple):
    """Facts about the blocks of a server.

    ``size``: tokens of a block; 0 if nothing is known of the server. ``complete``: every cached block is known.
    """

    size: int
    complete: bool


OnChange = Callable[[str, BlockFacts, Changes], None]
"""Takes the changes of a server's blocks, by the server's name."""
UNKNOWN = BlockFacts(0, True)
"""Nothing is known of the server: it has published no events, or they were lost."""


@dataclass(slots=True)
class FollowStatus:
    """How a server's events are followed.

    ``ranks``: engines that publish events; 0 if the server has none, None before the first response. ``problem``: why they are not followed
    now, or an empty text. ``blocks``, ``unmapped``, ``gaps``: sums over the ranks; see ``EngineBlocks`` and ``EngineFollower``.
    ``batches``: the number of the last applied batch of each rank.
    """

    ranks: int | None = None
    problem: str = ""
    blocks: int = 0
    unmapped: int = 0
    gaps: int = 0
    batches: tuple[int, ...] = ()


class KvEventSubscriber:
    """Follows the events of servers. ``on_change`` is called in this loop with each change, and must not raise."""

    def __init__(self, context: zmq.asyncio.Context, on_change: OnChange, check_interval: float = CHECK_INTERVAL) -> None:
        self._context = context
        self._on_change = on_change
        self._check_interval = check_interval
        self._followed: dict[str, _ServerEvents] = {}

    def follow(self, targets: Iterable[ProbeTarget]) -> None:
        """Follow the events of these servers, and of no others. The blocks of a server that is no longer listed are forgotten at once."""
        wanted = {target.name: target for target in targets}
        for name, server in tuple(self._followed.items()):
            if wanted.get(name) != server.target:
                self._followed.pop(name).stop()
        for name, target in wanted.items():
            if name not in self._followed:
                self._followed[name] = _ServerEvents(self._context, target, self._on_change, self._check_interval)

    def statuses(self) -> Mapping[str, FollowStatus]:
        """Return the status of each followed server by its name."""
        return {name: server.status() for name, server in self._followed.items()}

    def known(self) -> Iterator[tuple[str, BlockFacts, Iterable[int]]]:
        """Yield each server with known blocks: its name, facts about the blocks, and their keys."""
        for name, server in self._followed.items():
            if keys := server.keys():
                yield name, server.facts(), keys

    async def close(self) -> None:
        """Stop following all servers."""
        tasks = [server.task for server in self._followed.values()]
        self.follow(())
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def kv_event_subscriber(on_change: OnChange, check_interval: float = CHECK_INTERVAL) -> AsyncIterator[KvEventSubscriber]:
    """Run a subscriber for the length of the block."""
    context = zmq.asyncio.Context()
    subscriber = KvEventSubscriber(context, on_change, check_interval)
    try:
        yield subscriber
    finally:
        await subscriber.close()
        context.destroy(linger=0)


class _ServerEvents:
    """The events of one server, over all of its ranks."""

    def __init__(self, context: zmq.asyncio.Context, target: ProbeTarget, on_change: OnChange, check_interval: float) -> None:
        self._context = context
        self.target = target
        self._on_change = on_change
        self._check_interval = check_interval
        self._ranks: int | None = None
        self._problem = ""
        self._followers: list[EngineFollower] = []
        self._gaps = 0  # of earlier connections
        self._union = RankUnion(0)
        self.task = asyncio.create_task(self._run(), name=f"KV events of {target.name}")

    def status(self) -> FollowStatus:
        followers = self._followers
        return FollowStatus(
            self._ranks,
            self._problem,
            sum(len(each.blocks) for each in followers),
            sum(each.blocks.unmapped for each in followers),
            self._gaps + sum(each.gaps for each in followers),
            tuple(each.last_number for each in followers),
        )

    def keys(self) -> set[int]:
        """Return the keys of the blocks that at least one rank has."""
        return {key for each in self._followers for key in each.blocks.keys}

    def facts(self) -> BlockFacts:
        """Return what applies to all blocks of the server."""
        size = next((size for each in self._followers if (size := each.blocks.block_size)), 0)
        return BlockFacts(size, all(each.is_complete for each in self._followers))

    def stop(self) -> None:
        """Forget all blocks, and report no more changes."""
        self._forget()
        self._on_change = lambda *_: None
        self.task.cancel()

    async def _run(self) -> None:
        """Follow the events until cancelled."""
        backoff = Backoff(*_PAUSES)
        while True:
            self._problem = ""
            try:
                sources = await self._read_sources()
                self._ranks = len(sources)
                if not sources:
                    await asyncio.sleep(_NO_EVENTS_PAUSE)
                    continue
                backoff.reset()
                await self._follow(sources)
            except EventsLostError as error:
                self._report(str(error))
            except Exception as error:  # noqa: BLE001  the outer edge: a fault with one server's events must not end the others
                _log.exception("the KV events of %s", self.target.name)
                self._report(repr(error))
            finally:
                self._forget()
            await asyncio.sleep(backoff.next_pause())

    def _report(self, problem: str) -> None:
        self._problem = problem
        _log.info("the KV events of %s: %s", self.target.name, problem)

    async def _read_sources(self) -> tuple[EventSource, ...]:
        """Return the sockets of each rank. Raises EventsLostError."""
        target = self.target
        try:
            status, body = await fetch_within(target.address, PATH, api_key=target.api_key, deadline=_TIMEOUT, limit=_RESPONSE_LIMIT)
            if status == 404:
                return ()  # a vLLM without this route
            if status != 200:
                raise EventsLostError(f"GET {PATH}: status {status}")
            return event_sources(body, target.address)
        except TimeoutError:
            raise EventsLostError(f"GET {PATH}: no response within {_TIMEOUT:g} s") from None
        except (UpstreamError, ValueError) as error:
            raise EventsLostError(str(error)) from error

    async def _follow(self, sources: tuple[EventSource, ...]) -> None:
        """Follow all ranks until a rank is lost. Raises EventsLostError."""
        self._union = RankUnion(len(sources))
        self._followers = [EngineFollower(can_replay=source.replay_endpoint is not None) for source in sources]
        try:
            async with asyncio.TaskGroup() as group:
                for index, source in enumerate(sources):
                    group.create_task(self._follow_rank(index, source))
        except ExceptionGroup as group:
            raise _first(group) from None

    async def _follow_rank(self, index: int, source: EventSource) -> None:
        follower, needed = self._followers[index], asyncio.Event()

        def apply(found: Iterable[Changes]) -> None:
            for changes in found:
                self._change(self._union.merge(index, changes))
            if follower.replay_from is not None:
                needed.set()

        connected = asyncio.Event()
        with _events_socket(self._context, source) as (events, monitor):
            async with asyncio.TaskGroup() as group:
                group.create_task(_watch(monitor, connected, source))
                await _wait_connected(connected, source)
                apply(follower.restart())
                group.create_task(_receive(events, follower, apply))
                if source.replay_endpoint is not None:
                    group.create_task(self._replay(source.replay_endpoint, follower, needed, apply))

    async def _replay(
        self, endpoint: str, follower: EngineFollower, needed: asyncio.Event, apply: Callable[[Iterable[Changes]], None]
    ) -> None:
        """Request the replays that the follower needs, and a check of the last batch when nothing happens."""
        cut_off = 0
        while True:
            with _socket(self._context, zmq.DEALER) as dealer:
                _connect(dealer, endpoint)
                try:
                    while True:
                        await self._wait_needed(follower, needed)
                        await _replay_once(dealer, follower, apply)
                        cut_off = 0
                except TimeoutError:
                    cut_off += 1
                    if cut_off >= _ATTEMPTS:
                        raise EventsLostError(f"no replay from {endpoint}") from None
                    follower.request_replay()  # the rest

    async def _wait_needed(self, follower: EngineFollower, needed: asyncio.Event) -> None:
        while follower.replay_from is None:
            needed.clear()
            try:
                async with asyncio.timeout(self._check_interval):
                    await needed.wait()
            except TimeoutError:
                follower.check()

    def _change(self, changes: Changes) -> None:
        if any(changes):
            self._on_change(self.target.name, self.facts(), changes)

    def _forget(self) -> None:
        self._gaps += sum(each.gaps for each in self._followers)
        self._followers = []
        self._on_change(self.target.name, UNKNOWN, Changes(cleared=True))


@contextmanager
def _events_socket(context: zmq.asyncio.Context, source: EventSource) -> Iterator[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]]:
    """Open the socket for new batches, and the socket that reports its connection."""
    with _socket(context, zmq.SUB) as events:
        monitor = events.get_monitor_socket(_CONNECTED | _LOST)
        try:
            events.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT)
            events.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT)
            events.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
            _connect(events, source.endpoint)
            yield events, monitor
        finally:
            events.disable_monitor()
            monitor.close(linger=0)


def _socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    """Return a socket for a ``with`` statement."""
    socket = context.socket(kind)
    for option, value in ((zmq.IPV6, 1), (zmq.RCVHWM, _QUEUED), (zmq.MAXMSGSIZE, _BATCH_LIMIT), (zmq.LINGER, 0)):
        socket.setsockopt(option, value)
    return socket


def _connect(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise EventsLostError(f"cannot connect to {endpoint}: {error}") from None


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error of a group, in the form that is reported."""
    error = group.exceptions[0]
    if isinstance(error, ExceptionGroup):
        return _first(error)
    return EventsLostError(str(error)) if isinstance(error, ValueError) else error


async def _wait_connected(connected: asyncio.Event, source: EventSource) -> None:
    try:
        async with asyncio.timeout(_TIMEOUT):
            await connected.wait()
    except TimeoutError:
        why = "is it reachable from here? An endpoint without `*` makes the engine connect"
        raise EventsLostError(f"no connection to {source.endpoint}: {why}") from None


async def _watch(monitor: zmq.asyncio.Socket, connected: asyncio.Event, source: EventSource) -> None:
    """Report the connection, and its end by EventsLostError."""
    while True:
        if parse_monitor_message(await monitor.recv_multipart())["event"] == _CONNECTED:
            connected.set()
        elif connected.is_set():
            raise EventsLostError(f"the connection to {source.endpoint} was lost")


async def _receive(events: zmq.asyncio.Socket, follower: EngineFollower, apply: Callable[[Iterable[Changes]], None]) -> None:
    """Pass on new batches. Raises ValueError for an invalid one."""
    while True:
        match await events.recv_multipart():
            case [_, number, payload]:
                apply(follower.add(int.from_bytes(number), payload))
            case frames:
                raise ValueError(f"a message with {len(frames)} frames is no batch of KV cache events")
        await asyncio.sleep(0)  # a burst must not block the loop


async def _replay_once(dealer: zmq.asyncio.Socket, follower: EngineFollower, apply: Callable[[Iterable[Changes]], None]) -> None:
    """Request one replay, and pass on its batches. Raises TimeoutError if it is cut off, and ValueError for an invalid batch."""
    start = follower.replay_from
    assert start is not None
    await dealer.send_multipart([b"", start.to_bytes(8)])
    while True:
        async with asyncio.timeout(_TIMEOUT):
            frames = await dealer.recv_multipart()
        match frames:
            case [_, _, number, _] if number == _END:
                apply(follower.end_replay())
                return
            case [_, _, number, payload]:
                apply(follower.add_replayed(int.from_bytes(number), payload))
            case _:
                raise ValueError(f"a message with {len(frames)} frames is no part of a replay")
        await asyncio.sleep(0)
