"""Overload: capacity is used and not exceeded, excess requests are refused at once, and a greedy key delays only itself.

The figures are compared with the same load without the fault, in the same process, so that a busy machine slows both.
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
SERVICE = 0.5 if FULL else 0.4  # seconds of each request at the server
GREEDY = 12 * SLOTS  # clients
SECONDS = 20.0 if FULL else 4.0


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


@dataclass
class Busy:
    """A server of a fixed speed. ``most`` is the largest number of concurrent requests."""

    port: int
    most: int = 0
    there: int = 0


@asynccontextmanager
async def busy() -> AsyncIterator[Busy]:
    async def script(talk: Conversation) -> None:
        state.there += 1
        state.most = max(state.most, state.there)
        try:
            await asyncio.sleep(SERVICE)
        finally:
            state.there -= 1
        await talk.respond(COMPLETION)

    async with scripted(script) as server:
        state = Busy(server.port)
        yield state


async def _send_continuously(served: Served, key: str, tally: Tally, end: float, pause: float) -> None:
    """Send requests until ``end``. After a refusal pause for ``pause`` only, although its ``Retry-After`` is a second or more.

    Responses after ``end`` do not count.
    """
    async with client(served.port) as one:
        while monotonic() < end:
            await _send(one, key, tally, end, pause)


async def _send(one: Client, key: str, tally: Tally, end: float, pause: float) -> None:
    began = monotonic()
    reply = await one.request(request(chat(), token=f"sk-{key}"))
    if reply.status == 200:
        in_time = monotonic() <= end
        tally.completed[key] += in_time
        tally.late += not in_time
        return
    assert (reply.status, reply.error["code"]) == (503, "overloaded") and int(reply.headers["retry-after"]) >= 1
    tally.refusals.append(monotonic() - began)
    await asyncio.sleep(pause)


async def load(clients: dict[str, int], keys: Sequence[Key], queue: Queue, pause: float = 0.0) -> tuple[Tally, Busy]:
    """Run this number of clients of each key for ``SECONDS``, against one server with ``SLOTS`` slots."""
    tally = Tally()
    async with busy() as server, unharmed([model(server.port, max_inflight=SLOTS, queue=queue)], keys) as served:
        end = monotonic() + SECONDS
        await asyncio.gather(
            *(_send_continuously(served, name, tally, end, pause) for name, count in clients.items() for _ in range(count))
        )
        assert served.value("requests_total", "tiny", "/v1/chat/completions", "503") == len(tally.refusals)
    return tally, server


def of(*names: str) -> tuple[Key, ...]:
    return tuple(key(name, f"sk-{name}") for name in names)


def p99_ms(times: list[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    return 1000 * sorted(times)[int(0.99 * (len(times) - 1))]


def check_prompt(refusals: list[float]) -> None:
    """Check the time of refusals. The smaller size shares its machine with other tests."""
    assert p99_ms(refusals) < (50 if FULL else 5_000), f"{p99_ms(refusals):.0f} ms"


TRIES = 1 if FULL else 4
"""Number of tries, of which the best counts. Other tests on the machine can only make a try worse."""
GOODPUT = 0.9 if FULL else 0.75


@pytest.mark.row(26)
async def test_ten_times_the_load_leaves_the_goodput_unchanged(measured: Callable[[str], None]) -> None:
    for _ in range(TRIES):
        goodput, refusals, text = await _under_overload()
        if goodput >= GOODPUT:
            break
    measured(text)
    assert goodput >= GOODPUT, text
    check_prompt(refusals)


async def _under_overload() -> tuple[float, list[float], str]:
    """Return the goodput relative to a load without overload, the seconds of each refusal, and the figures as text."""
    queue = Queue(SLOTS, 60.0)
    enough, _ = await load({"a": 2 * SLOTS}, of("a"), queue)
    # Each request beyond slots and queue is retried ten times in the time of one response.
    many, server = await load({"a": 10 * SLOTS}, of("a"), queue, pause=SERVICE)
    assert server.most == SLOTS
    assert len(many.refusals) > many.completed.total(), "it was an overload"
    goodput = many.completed.total() / enough.completed.total()
    times = (many.completed.total() + len(many.refusals)) / enough.completed.total()
    return (
        goodput,
        many.refusals,
        (
            f"{times:.0f} times what there is room for, {SECONDS:g} s: goodput {goodput:.0%} of capacity; never more than {SLOTS} at "
            f"the server; {len(many.refusals)} refusals, p99 {p99_ms(many.refusals):.0f} ms with clients, gateway and server in one process"
        ),
    )


@pytest.mark.row(26)
async def test_no_request_is_queued_beyond_max_inflight(measured: Callable[[str], None]) -> None:
    tally = Tally()
    async with busy() as server, unharmed([model(server.port)], of("a"), max_inflight=SLOTS) as served:
        end = monotonic() + SECONDS / 2
        await asyncio.gather(*(_send_continuously(served, "a", tally, end, SERVICE) for _ in range(10 * SLOTS)))
    assert server.most == SLOTS and tally.completed.total() + tally.late and tally.refusals
    measured(f"server.max_inflight: {len(tally.refusals)} refusals before the body was read, p99 {p99_ms(tally.refusals):.0f} ms")
    check_prompt(tally.refusals)


@pytest.mark.row(27)
@pytest.mark.parametrize("size", [2 * GREEDY, 2 * SLOTS], ids=["in the queue", "beyond the queue"])
async def test_a_greedy_key_takes_nothing_from_the_others(size: int, measured: Callable[[str], None]) -> None:
    others, queue = ("a", "b", "c", "d"), Queue(size, 60.0)
    keys = of(*others, "greedy")
    fair, _ = await load(dict.fromkeys((*others, "greedy"), SLOTS // 2), keys, queue)
    unfair, server = await load(dict.fromkeys(others, SLOTS // 2) | {"greedy": GREEDY}, keys, queue, pause=SERVICE)
    assert server.most == SLOTS
    lost = {name: 1 - unfair.share[name] / fair.share[name] for name in others}
    measured(
        f"one of 5 keys with {GREEDY} clients instead of {SLOTS // 2}, a queue of {size}: the others lose "
        f"{sum(lost.values()) / len(lost):.1%} of their share, at most {max(lost.values()):.1%}; the greedy key has "
        f"{unfair.share['greedy']:.1%} of the responses, and {len(unfair.refusals)} refusals"
    )
    assert max(lost.values()) <= 0.1 if FULL else sum(lost.values()) / len(lost) <= 0.2, lost


@pytest.mark.row(27)
async def test_a_greedy_key_does_not_use_up_max_inflight(measured: Callable[[str], None]) -> None:
    others = ("a", "b", "c", "d")
    tally, refused = Tally(), Tally()
    async with busy() as server, unharmed([model(server.port)], of(*others, "greedy"), max_inflight=10 * SLOTS) as served:
        end = monotonic() + SECONDS
        greedy = [asyncio.create_task(_send_continuously(served, "greedy", tally, end, SERVICE)) for _ in range(15 * SLOTS)]
        await until(lambda: tally.refusals)
        await asyncio.gather(*greedy, *(_send_continuously(served, name, refused, end, SERVICE) for name in others))
    assert server.most <= 10 * SLOTS and refused.completed.keys() == set(others)
    rejected = len(refused.refusals) / (refused.completed.total() + len(refused.refusals))
    assert rejected <= (0.1 if FULL else 0.5)
    measured(
        f"server.max_inflight alone, filled by one key before the others: {rejected:.1%} of their requests were rejected, "
        f"{len(tally.refusals) / (tally.completed.total() + len(tally.refusals)):.0%} of its own"
    )
