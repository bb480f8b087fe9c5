"""The slots that later classes may use: how they follow the times of a class, and what that means for requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from itertools import count
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.reserved_slots import AdaptiveSlots, ClassSlots, MeasuredStream, Progress, ReservedSlots
from gateway.snapshot.snapshot import AUTO, Model, QueueClass, Slo, Snapshot
from tests.faults.invariants import unharmed
from tests.gateway.admission.test_queue_full_servers import bounded, held, queued, request_from, send_requests
from tests.gateway.admission.test_queue_state_machine import Metrics
from tests.support.pools import pool_of
from tests.support.running import Served, key, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import DONE, HELLO, ROLE, STOP, chat, request, request_once
from upstream.balancing.policies.policy import RequestFacts
from upstream.balancing.server import Condition, Server, ServerSpec
from upstream.http.address import Address

CHAT = QueueClass("chat", reserved_slots=1)
KEYS = (key("a", "sk-a", queue_class="chat"), key("b", "sk-b", queue_class="batch"))


# The decision


def course(slots: AdaptiveSlots, best: int, seconds: int, *, times: int = 10, first: int = 0) -> Iterator[int]:
    """Yield the open slots of each second, while later classes use all of them, and the objectives are met up to ``best``."""
    for now in range(first, first + seconds):
        slots.note(times, times if slots.open > best else 0)
        slots.decide(float(now), 1.0)
        yield slots.open


@settings(deadline=None)
@given(most=st.integers(1, 300), share=st.floats(0.01, 1.0), better=st.floats(0.01, 1.0))
def test_the_slots_follow_the_largest_number_that_meets_the_objectives(most: int, share: float, better: float) -> None:
    slots, now = AdaptiveSlots(most), 0
    for best in (max(int(share * most), 1), max(int(better * most), 1)):
        list(course(slots, best, 1000, first=now))
        opened = list(course(slots, best, 1000, first=now + 1000))
        now += 2000
        assert sum(opened) / len(opened) >= 0.9 * best
        assert sum(each > best for each in opened) <= 0.02 * len(opened)
        assert min(opened) >= 1 and max(opened) <= most


@pytest.mark.parametrize(("most", "expected"), [(1, 1), (2, 1), (3, 1), (4, 2), (9, 4)])
def test_half_of_the_slots_are_open_at_first_and_always_one(most: int, expected: int) -> None:
    assert AdaptiveSlots(most).open == expected


def test_a_miss_takes_a_quarter_and_later_probes_are_rare() -> None:
    slots = AdaptiveSlots(31)
    assert slots.open == 15
    opened = list(course(slots, 10, 60))
    assert opened[:6] == [11, 8, 9, 10, 10, 10]
    assert opened.count(11) == 3, "one more is tried after 15 seconds, and after a miss, 30"
    assert slots.open == 10


@pytest.mark.parametrize(
    ("best", "pauses"),
    [(31, [15.0, 7.5, 4.0, 2.0, 1.0, 1.0, 1.0]), (14, [15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0])],
    ids=["met", "missed"],
)
def test_probes_are_more_frequent_once_they_meet_the_objectives_and_rarer_once_they_miss(best: int, pauses: list[float]) -> None:
    slots, steps = AdaptiveSlots(31), count()

    def seconds_to(most: int, opened: int) -> float:
        """Decide twice a second, while the objectives are met up to ``most``. Return the seconds until so many slots are open."""
        for since, step in enumerate(steps):
            slots.note(10, 10 if slots.open > most else 0)
            slots.decide(step / 2, 1.0)
            if slots.open == opened:
                return since / 2 + 0.5
        raise AssertionError

    assert [seconds_to(14, opened) for opened in (11, 14)] == [0.5, 1.5]
    found = list[float]()
    for _ in pauses:
        found.append(seconds_to(best, slots.open + 1))
        if best == 14:
            assert seconds_to(best, 14) == 0.5, "one less"
    assert found == pauses


def test_while_the_class_is_idle_the_slots_rise_to_what_it_has_missed() -> None:
    slots = AdaptiveSlots(31)
    for now in range(60):
        slots.decide(float(now), 1.0)
    assert slots.open == 31, "no objective was missed yet"
    slots.note(10, 10)
    slots.decide(60.0, 1.0)
    assert slots.open == 23
    for now in range(61, 1000):
        slots.decide(float(now), 0.0)
    assert slots.open == 28


def test_a_decrease_takes_effect_before_the_next() -> None:
    slots = AdaptiveSlots(31)
    slots.note(10, 10)
    slots.decide(0.0, 1.0)
    for now in range(1, 9):
        slots.note(10, 10)
        slots.decide(float(now), 1.01)
        assert slots.open == 11
    slots.note(10, 10)
    slots.decide(9.0, 1.0)
    assert slots.open == 8


def test_times_say_nothing_about_slots_that_later_classes_do_not_use() -> None:
    slots = AdaptiveSlots(31)
    for now in range(60):
        slots.note(10, 0)
        slots.decide(float(now), 0.9)
    assert slots.open == 15
    slots.note(10, 10)
    slots.decide(60.0, 0.0)
    assert slots.open == 15, "no later class had a part in it"


@pytest.mark.parametrize(("times", "missed", "expected"), [(1, 1, 15), (20, 1, 16), (100, 5, 16), (100, 6, 11), (3, 2, 11)])
def test_a_single_miss_decides_nothing(times: int, missed: int, expected: int) -> None:
    slots = AdaptiveSlots(31)
    slots.note(times, missed)
    slots.decide(0.0, 1.0)
    assert slots.open == expected


def test_a_higher_limit_lets_more_slots_open() -> None:
    slots = AdaptiveSlots(8)
    slots.bound(16)
    for now in range(20):
        slots.decide(float(now), 0.0)
    assert slots.open == 16
    slots.bound(4)
    assert slots.open == 4


def test_misses_while_more_slots_are_used_than_are_open_decide_nothing() -> None:
    slots = AdaptiveSlots(31)
    slots.note(20, 20)
    slots.decide(0.0, 1.5)
    assert slots.open == 15
    slots.decide(1.0, 0.0)
    assert slots.open == 16
    slots.note(20, 20)
    slots.decide(2.0, 1.0)
    assert slots.open == 12, "a miss after an increase that was no probe"


# The measurement


def test_the_ratio_to_the_objective_is_a_moving_mean() -> None:
    ratio, progress = memoryview(bytearray(8)).cast("d"), [Progress(1.0, 1.0, 1)]
    slots = ClassSlots(8, QueueClass("chat", reserved_slots=AUTO), Slo(itl=0.5), memoryview(bytearray(8)).cast("d"), {"itl": ratio})
    stream = MeasuredStream(0.0, lambda: progress[-1])
    for last, expected in ((1.0, 0.0), (1.25, 0.5), (2.25, 0.8 * 0.5 + 0.2 * 2.0)):
        progress.append(Progress(1.0, last, len(progress)))
        slots.measure(stream, last)
        assert ratio[0] == pytest.approx(expected)


@asynccontextmanager
async def measured(slo: Slo) -> AsyncIterator[tuple[MeasuredStream, list[Progress]]]:
    progress = [Progress(None, 0.0, 0)]
    slots = ReservedSlots(Metrics())
    model = Model("m", (ServerSpec("s", Address(port=1), "m"),), max_inflight=8, slo=slo)
    snapshot = Snapshot(1, (), (model,), classes=(QueueClass("chat", reserved_slots=AUTO),))
    server = Server(model.servers[0])
    server.limit = 8
    slots.apply_snapshot(snapshot, {"s": server}, 0)
    with slots.measured("m", "chat", nullcontext(), 100.0, lambda: progress[-1]):
        [stream] = slots._models["m"].classes["chat"].streams
        yield stream, progress
    assert not slots._models["m"].classes["chat"].streams


async def test_each_time_of_a_stream_is_measured_once() -> None:
    slo = Slo(ttft=2.0, itl=0.05)
    async with measured(slo) as (stream, progress):
        assert list(stream.times(slo, 101.0)) == []
        progress.append(Progress(101.5, 101.5, 1))
        assert list(stream.times(slo, 101.6)) == [("ttft", 1.5)]
        assert list(stream.times(slo, 101.8)) == []
        progress.append(Progress(101.5, 101.75, 6))
        assert list(stream.times(slo, 101.8)) == [("itl", 0.25 / 5)]
        progress.append(Progress(101.5, 102.75, 7))
        assert list(stream.times(slo, 103.0)) == [("itl", 1.0)]
        assert list(stream.times(slo, 104.0)) == []


async def test_a_request_that_waits_too_long_for_its_first_token_counts_at_once() -> None:
    slo = Slo(ttft=2.0)
    async with measured(slo) as (stream, progress):
        assert list(stream.times(slo, 102.5)) == [("ttft", 2.5)]
        progress.append(Progress(103.0, 103.0, 1))
        assert list(stream.times(slo, 104.0)) == []


# Servers and workers


def servers(count: int, limit: int) -> list[Server]:
    made = [Server(ServerSpec(f"s{number}", Address(port=1), "m"), Condition.UP) for number in range(count)]
    for server in made:
        server.limit = limit
    return made


@given(limit=st.integers(2, 64), workers=st.integers(1, 8), share=st.floats(0, 1))
def test_the_parts_of_the_workers_add_up(limit: int, workers: int, share: float) -> None:
    reserved = max(int(share * (limit - workers)), 1)
    if limit - reserved < workers:
        return
    opened = 0
    for number in range(workers):
        [server] = servers(1, limit)
        slots = ReservedSlots(Metrics())
        model = Model("m", (server.spec,), max_inflight=limit)
        classes = (QueueClass("chat", reserved_slots=reserved),)
        slots.apply_snapshot(Snapshot(1, (), (model,), workers=workers, classes=classes), {server.name: server}, number)
        assert 1 <= server.open_to(0) <= server.limit
        opened += int(server.open_to(0))
    assert opened == limit - reserved


@pytest.mark.parametrize(("reserved", "expected"), [(4, [60, 6, 1, 28]), (AUTO, [31, 9, 1, 1])])
def test_the_slots_follow_a_limit_that_changes(reserved: int | Literal["auto"], expected: list[int]) -> None:
    [server], metrics = servers(1, 64), Metrics()
    slots = ReservedSlots(metrics)
    model = Model("m", (server.spec,), max_inflight=64, has_auto_max_inflight=True, slo=Slo(ttft=1.0))
    slots.apply_snapshot(Snapshot(1, (), (model,), classes=(QueueClass("chat", reserved_slots=reserved),)), {server.name: server}, 0)
    opened = []
    for limit in (64, 10, 2, 32):
        server.set_limit(limit)
        slots.apply()
        opened.append(server.open_to(0))
        assert metrics.cells("open_slots", "m", "chat", "0")[0] == opened[-1]
    assert opened == expected


@pytest.mark.parametrize("reserved", [4, AUTO])
def test_a_class_that_is_removed_shows_no_slots_and_frees_them(reserved: int | Literal["auto"]) -> None:
    [server], metrics = servers(1, 64), Metrics()
    slots = ReservedSlots(metrics)
    model = Model("m", (server.spec,), max_inflight=64, slo=Slo(ttft=1.0))
    before = Snapshot(1, (), (model,), classes=(QueueClass("chat", reserved_slots=reserved),))
    slots.apply_snapshot(before, {server.name: server}, 0)
    shown = [metrics.cells("open_slots", "m", "chat", "0")]
    if reserved == AUTO:
        shown.append(metrics.cells("objective_ratio", "m", "chat", "ttft", "0"))
        shown[-1][0] = 0.5
    assert all(each[0] for each in shown) and server.reserved
    slots.apply_snapshot(replace(before, version=2, classes=()), {server.name: server}, 0)
    assert not any(each[0] for each in shown) and not server.reserved


def test_each_worker_is_guaranteed_a_part_of_the_open_slots_only() -> None:
    class Shared(Server):
        parts: Sequence[int] = ()

        def guarantee(self, parts: Sequence[int]) -> None:
            self.parts = parts

    model = Model("m", (ServerSpec("s", Address(port=1), "m"),), max_inflight=33)
    server = Shared(model.servers[0])
    server.limit = 33
    snapshot = Snapshot(1, (), (model,), workers=2, classes=(QueueClass("chat", reserved_slots=4),))
    ReservedSlots(Metrics()).apply_snapshot(snapshot, {"s": server}, 0)
    assert list(server.parts) == [15, 14]


def test_a_worker_opens_at_most_one_step_more_than_the_least_of_the_others() -> None:
    [server] = servers(1, 33)
    peers = memoryview(bytearray(8)).cast("d")

    class WithPeer(Metrics):
        has_peers = True

        def peer_cells(self, *name: str) -> list[memoryview[float]]:
            return [peers] if name == ("open_slots", "m", "chat", "1") else []

    slots = ReservedSlots(WithPeer())
    model = Model("m", (server.spec,), max_inflight=33, slo=Slo(ttft=1.0))
    snapshot = Snapshot(1, (), (model,), workers=2, classes=(QueueClass("chat", reserved_slots=AUTO),))
    slots.apply_snapshot(snapshot, {server.name: server}, 0)
    opened = slots._models["m"].classes["chat"]
    assert opened.open == 16
    slots.tick(1.0)
    assert opened.open == 18, "the other worker has decided nothing yet"
    peers[0] = 5
    for now in range(2, 6):
        slots.tick(float(now))
    assert (opened.open, server.open_to(0)) == (6, 3)
    peers[0] = 1
    slots.tick(10.0)
    assert opened.open == 2
    slots.apply_snapshot(snapshot, {server.name: server}, 0)
    assert slots._models["m"].classes["chat"].open == 2, "a reload keeps what was measured"


def test_a_request_of_a_later_class_never_gets_the_last_slots() -> None:
    each = servers(2, 3)
    each[0].reserve((2,))
    each[1].reserve((1,))
    pool, later = pool_of(each, "least_busy"), RequestFacts(tier=1)
    assert pool.tiers == 1
    while pool.has_capacity(1):
        pool.choose(request=later).start_exchange(1)
    assert [server.in_flight for server in each] == [1, 2]
    assert pool.open_tier() == 0
    while pool.has_capacity():
        pool.choose().start_exchange()
    assert [server.in_flight for server in each] == [3, 3] and pool.open_tier() == -1


# Requests


async def test_later_classes_leave_a_slot_whether_they_wait_or_not() -> None:
    classes = (CHAT, QueueClass("batch"))
    async with held() as slow, unharmed([bounded(slow.server.port, most=3)], KEYS, classes=classes) as served:
        tasks = await send_requests(served, "bbbb")
        await slow.reaches(2)
        await until(lambda: queued(served) == 2)
        assert served.value("open_slots", "tiny", "chat", "0") == 2
        lowered = request(chat(seed=9), token="sk-a", extra=("x-vllm-gateway-class: batch",))
        tasks.append(asyncio.create_task(_status(served, lowered)))
        await until(lambda: queued(served) == 3)
        tasks += await send_requests(served, "a", 4)
        await slow.reaches(3)
        assert slow.seeds == [0, 1, 4], "the slot that is left"
        tasks += await send_requests(served, "a", 5)
        await until(lambda: queued(served) == 4)
        await slow.let_go(1)  # a slot of the batch: the classes share the queue, and both may use it
        await slow.reaches(4)
        for number in range(5, 8):
            await slow.let_go()
            await slow.reaches(number)
        await slow.let_go(3)
        assert await asyncio.gather(*tasks) == [200] * 7
        assert slow.most == 3


async def _status(served: Served, data: bytes) -> int:
    return (await request_once(served.port, data)).status


async def test_the_open_slots_follow_the_times_of_streams() -> None:
    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(ROLE)
        for _ in range(200):
            await talk.chunk(HELLO)
            await asyncio.sleep(0.02)
        await talk.chunk(STOP + DONE)
        await talk.end_stream()

    chat_class = QueueClass("chat", reserved_slots=AUTO, slo=Slo(itl=0.001))
    async with (
        scripted(script) as server,
        unharmed([bounded(server.port, most=9)], KEYS, classes=(chat_class, QueueClass("batch"))) as served,
    ):
        assert served.value("open_slots", "tiny", "chat", "0") == 4
        clients = [asyncio.create_task(_status(served, request_from(name, 0, stream=True))) for name in "abb"]
        await until(lambda: served.value("objective_ratio", "tiny", "chat", "itl", "0") > 1)
        await until(lambda: served.value("open_slots", "tiny", "chat", "0") == 1)
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
