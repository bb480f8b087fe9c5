"""Overload: capacity is used and not exceeded, excess requests are refused at once, and a greedy key delays only itself.

The figures are compared with the same load without the fault, in the same process. At full size the server takes a fixed time for each
request. At the smaller size it proceeds in rounds, which wait for events and not for time, so that a busy machine changes no figure.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic

import pytest

from gateway.snapshot.snapshot import Key, Queue
from tests.faults.conftest import FULL
from tests.faults.invariants import unharmed
from tests.support.running import Served, key, model, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, Client, chat, client, request

SLOTS = 8
SERVICE = 0.5  # seconds of each request at the server, at full size
GREEDY = 12 * SLOTS  # clients
SECONDS = 20.0  # of a load at full size
ROUNDS = 20  # of a load at the smaller size


@dataclass
class Tally:
    """Results of the clients: responses by key, the number of responses that were too late to count, and the seconds that each refusal
    took."""

    completed: Counter[str] = field(default_factory=Counter)
    late: int = 0
    refusals: list[float] = field(default_factory=list)

    @property
    def share(self) -> dict[str, float]:
        return {name: count / self.completed.total() for name, count in self.completed.items()}


class Clock:
    """A load of ``SECONDS``: each request takes ``SERVICE`` seconds at the server, and so does the pause after a refusal."""

    def __init__(self) -> None:
        self._end = monotonic() + SECONDS
        self.length = f"{SECONDS:g} s"

    @property
    def expired(self) -> bool:
        return monotonic() > self._end

    async def serve(self) -> None:
        await asyncio.sleep(SERVICE)

    async def pause(self) -> None:
        await asyncio.sleep(SERVICE)

    async def run(self, clients: int, queued: Callable[[], float]) -> None:
        """Nothing has to be done: the time passes."""


class Rounds:
    """A load of ``ROUNDS``: when every client waits, the server responds to all requests that it has, and refused clients continue.

    So a refusal that came only after another request's response would stop the load.
    """

    def __init__(self) -> None:
        self.expired = False
        self.length = f"{ROUNDS} rounds"
        self._next = asyncio.Event()
        self._waiting = 0

    async def serve(self) -> None:
        await self._round()

    async def pause(self) -> None:
        await self._round()

    async def _round(self) -> None:
        if not self.expired:
            self._waiting += 1
            await self._next.wait()

    async def run(self, clients: int, queued: Callable[[], float]) -> None:
        """Run the rounds. ``queued`` returns the number of queued requests."""
        for number in range(ROUNDS + 1):
            await until(lambda: self._waiting + queued() == clients, _ROUND_WITHIN)
            self.expired, self._waiting = number == ROUNDS, 0
            ended, self._next = self._next, asyncio.Event()
            ended.set()


_ROUND_WITHIN = 120.0
"""Seconds in which every client must wait again, on a busy machine."""
Pace = Clock if FULL else Rounds


@dataclass
class Busy:
    """A server of a fixed speed. ``most`` is the largest number of concurrent requests."""

    port: int
    pace: Clock | Rounds
    most: int = 0
    there: int = 0


@asynccontextmanager
async def busy() -> AsyncIterator[Busy]:
    async def script(talk: Conversation) -> None:
        state.there += 1
        state.most = max(state.most, state.there)
        try:
            await state.pace.serve()
        finally:
            state.there -= 1
        await talk.respond(COMPLETION)

    async with scripted(script) as server:
        state = Busy(server.port, Pace())
        yield state


async def _send_continuously(served: Served, key: str, tally: Tally, pace: Clock | Rounds) -> None:
    """Send requests until the load has expired. After a refusal pause for one service only, although its ``Retry-After`` is longer.

    Responses after the end of the load do not count.
    """
    async with client(served.port) as one:
        while not pace.expired:
            await _send(one, key, tally, pace)


async def _send(one: Client, key: str, tally: Tally, pace: Clock | Rounds) -> None:
    began = monotonic()
    reply = await one.request(request(chat(), token=f"sk-{key}"))
    if reply.status == 200:
        tally.completed[key] += not pace.expired
        tally.late += pace.expired
        return
    assert (reply.status, reply.error["code"]) == (503, "overloaded") and int(reply.headers["retry-after"]) >= 1
    tally.refusals.append(monotonic() - began)
    await pace.pause()


def start(group: asyncio.TaskGroup, served: Served, server: Busy, tally: Tally, clients: dict[str, int]) -> None:
    """Start this number of clients of each key."""
    for name, count in clients.items():
        for _ in range(count):
            group.create_task(_send_continuously(served, name, tally, server.pace))


async def run(served: Served, server: Busy, clients: int) -> None:
    """Run the load of this number of clients."""
    await server.pace.run(clients, lambda: served.total("queued_requests"))


async def load(clients: dict[str, int], keys: Sequence[Key], queue: Queue) -> tuple[Tally, Busy]:
    """Run a load with this number of clients of each key, against one server with ``SLOTS`` slots."""
    tally = Tally()
    async with busy() as server, unharmed([model(server.port, max_inflight=SLOTS, queue=queue)], keys) as served:
        async with asyncio.TaskGroup() as group:
            start(group, served, server, tally, clients)
            await run(served, server, sum(clients.values()))
        assert served.value("requests_total", "tiny", "/v1/chat/completions", "503") == len(tally.refusals)
    return tally, server


def of(*names: str) -> tuple[Key, ...]:
    return tuple(key(name, f"sk-{name}") for name in names)


def p99_ms(times: list[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    return 1000 * sorted(times)[int(0.99 * (len(times) - 1))]


def check_prompt(refusals: list[float]) -> None:
    """Check the time of refusals at full size. At the smaller size no round ends before each refusal has come."""
    assert not FULL or p99_ms(refusals) < 50, f"{p99_ms(refusals):.0f} ms"


GOODPUT = 0.9


@pytest.mark.row(26)
async def test_ten_times_the_load_leaves_the_goodput_unchanged(measured: Callable[[str], None]) -> None:
    queue = Queue(SLOTS, 60.0)
    enough, _ = await load({"a": 2 * SLOTS}, of("a"), queue)
    # Each request beyond slots and queue is retried once in the time of one response.
    many, server = await load({"a": 10 * SLOTS}, of("a"), queue)
    assert server.most == SLOTS
    assert len(many.refusals) > many.completed.total(), "it was an overload"
    goodput = many.completed.total() / enough.completed.total()
    times = (many.completed.total() + len(many.refusals)) / enough.completed.total()
    text = (
        f"{times:.0f} times what there is room for, {server.pace.length}: goodput {goodput:.0%} of capacity; never more than {SLOTS} at "
        f"the server; {len(many.refusals)} refusals, p99 {p99_ms(many.refusals):.0f} ms with clients, gateway and server in one process"
    )
    measured(text)
    assert goodput >= GOODPUT, text
    check_prompt(many.refusals)


@pytest.mark.row(26)
async def test_no_request_is_queued_beyond_max_inflight(measured: Callable[[str], None]) -> None:
    tally = Tally()
    async with (
        busy() as server,
        unharmed([model(server.port)], of("a"), max_inflight=SLOTS) as served,
        asyncio.TaskGroup() as group,
    ):
        start(group, served, server, tally, {"a": 10 * SLOTS})
        await run(served, server, 10 * SLOTS)
    assert server.most == SLOTS and tally.completed.total() and tally.refusals
    measured(f"server.max_inflight: {len(tally.refusals)} refusals before the body was read, p99 {p99_ms(tally.refusals):.0f} ms")
    check_prompt(tally.refusals)


@pytest.mark.row(27)
@pytest.mark.parametrize("size", [2 * GREEDY, 2 * SLOTS], ids=["in the queue", "beyond the queue"])
async def test_a_greedy_key_takes_nothing_from_the_others(size: int, measured: Callable[[str], None]) -> None:
    others, queue = ("a", "b", "c", "d"), Queue(size, 60.0)
    keys = of(*others, "greedy")
    fair, _ = await load(dict.fromkeys((*others, "greedy"), SLOTS // 2), keys, queue)
    unfair, server = await load(dict.fromkeys(others, SLOTS // 2) | {"greedy": GREEDY}, keys, queue)
    assert server.most == SLOTS
    lost = {name: 1 - unfair.share[name] / fair.share[name] for name in others}
    measured(
        f"one of 5 keys with {GREEDY} clients instead of {SLOTS // 2}, a queue of {size}: the others lose "
        f"{sum(lost.values()) / len(lost):.1%} of their share, at most {max(lost.values()):.1%}; the greedy key has "
        f"{unfair.share['greedy']:.1%} of the responses, and {len(unfair.refusals)} refusals"
    )
    assert max(lost.values()) <= 0.1, lost


@pytest.mark.row(27)
async def test_a_greedy_key_does_not_use_up_max_inflight(measured: Callable[[str], None]) -> None:
    others = ("a", "b", "c", "d")
    tally, refused = Tally(), Tally()
    async with (
        busy() as server,
        unharmed([model(server.port)], of(*others, "greedy"), max_inflight=10 * SLOTS) as served,
        asyncio.TaskGroup() as group,
    ):
        start(group, served, server, tally, {"greedy": 15 * SLOTS})
        await until(lambda: tally.refusals)
        start(group, served, server, refused, dict.fromkeys(others, 1))
        await run(served, server, 15 * SLOTS + len(others))
    assert server.most <= 10 * SLOTS and refused.completed.keys() == set(others)
    rejected = len(refused.refusals) / (refused.completed.total() + len(refused.refusals))
    assert rejected <= 0.1
    measured(
        f"server.max_inflight alone, filled by one key before the others: {rejected:.1%} of their requests were rejected, "
        f"{len(tally.refusals) / (tally.completed.total() + len(tally.refusals)):.0%} of its own"
    )
