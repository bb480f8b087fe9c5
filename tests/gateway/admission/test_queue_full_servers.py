"""Requests that find all servers full: how many go on, in which order, what the rest is told, and what stays behind of each."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.inflight import ConcurrencyLimit, worker_share
from gateway.admission.queue import DispatchRate
from gateway.api.errors import Refusal
from gateway.snapshot.link import Health
from gateway.snapshot.snapshot import Model, Queue
from tests.faults.invariants import unharmed
from tests.support.controlled import controlled
from tests.support.ports import silent
from tests.support.process import launched
from tests.support.running import Served, key, model, until
from tests.support.scripted import Conversation, Scripted, scripted
from tests.support.wire import COMPLETION, DONE, HELLO, ROLE, STOP, ask, chat, client, request
from upstream.balancing.server import Condition
from upstream.http.deadlines import Timeouts

QUEUE = Queue(size=8, wait=60.0)
COMMENT = b": keep-alive\n\n"
KEYS = tuple(key(name, f"sk-{name}", weight=weight) for name, weight in (("a", 1.0), ("b", 1.0), ("c", 4.0)))


@dataclass
class Held:
    """A server that answers when it is told to."""

    server: Scripted
    under_way: list[asyncio.Event] = field(default_factory=list)
    most: int = 0

    @property
    def seeds(self) -> list[object]:
        return [each.json["seed"] for each in self.server.requests]

    async def let_go(self, count: int = 1) -> None:
        """Answer so many more, the oldest first, each when it is there."""
        for _ in range(count):
            await until(lambda: self.under_way)
            self.under_way.pop(0).set()

    async def reaches(self, count: int) -> None:
        """Wait until so many requests have come in all."""
        await until(lambda: len(self.server.requests) == count)


@asynccontextmanager
async def held() -> AsyncIterator[Held]:
    there: list[int] = [0]

    async def script(talk: Conversation) -> None:
        there[0] += 1
        state.most = max(state.most, there[0])
        try:
            event = asyncio.Event()
            state.under_way.append(event)
            gone = asyncio.create_task(talk.closed_by_peer())
            let = asyncio.create_task(event.wait())
            await asyncio.wait((gone, let), return_when=asyncio.FIRST_COMPLETED)
            for task in (gone, let):
                task.cancel()
            await asyncio.gather(gone, let, return_exceptions=True)
            if not event.is_set():
                state.under_way.remove(event)
        finally:
            there[0] -= 1
        await _answer(talk)

    async with scripted(script) as server:
        state = Held(server)
        yield state


async def _answer(talk: Conversation) -> None:
    if talk.request.json.get("stream"):
        await talk.begin_stream()
        await talk.chunk(ROLE + HELLO + STOP + DONE)
        await talk.end_stream()
    else:
        await talk.respond(COMPLETION)


def bounded(*ports: int, most: int = 1, **more: Any) -> Model:
    return model(*ports, **{"queue": QUEUE, "max_inflight": most, **more})


def queued(served: Served, name: str = "tiny") -> float:
    return served.value("queued_requests", name)


def asking(who: str, seed: int, **fields: Any) -> bytes:
    return request(chat(seed=seed, **fields), token=f"sk-{who}")


async def come(served: Served, who: str, first: int = 0, **fields: Any) -> list[asyncio.Task[int]]:
    """A request for each letter, of the key of that name, one after the other; the tasks give the statuses."""
    tasks = []
    for seed, letter in enumerate(who, first):
        before = served.context.started
        tasks.append(asyncio.create_task(_status(served, asking(letter, seed, **fields))))
        await until(lambda before=before: served.context.started == before + 1)
        await asyncio.sleep(0)
    return tasks


async def _status(served: Served, data: bytes) -> int:
    return (await ask(served.port, data)).status


async def test_a_server_has_no_more_than_it_may_and_the_rest_goes_on_one_by_one() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port, most=2)], KEYS) as served:
        tasks = await come(served, "aaaaaa")
        await slow.reaches(2)
        await until(lambda: queued(served) == 4)
        assert served.value("server_inflight", "tiny", "tiny#0") == 2 and served.value("inflight_requests", "tiny") == 6
        await slow.let_go()
        await slow.reaches(3)
        assert queued(served) == 3 and served.asked == []
        for count in (4, 5, 6, 6, 6):
            await slow.let_go()
            await slow.reaches(count)
        assert await asyncio.gather(*tasks) == [200] * 6
        assert {0, 1} == set(slow.seeds[:2]) and slow.seeds[2:] == [2, 3, 4, 5] and slow.most == 2
        assert slow.server.accepted == 2, "who goes on takes the connection that has become free"
        waited = [record.queued > 0 for record in served.context.records]
        assert waited == [False, False, True, True, True, True]
        assert all(record.overhead <= record.duration - record.queued for record in served.context.records)


async def test_keys_take_turns_by_their_weights() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port)], KEYS) as served:
        tasks = await come(served, "aaaaabb")
        tasks += await come(served, "c", 7)
        await until(lambda: queued(served) == 7)
        await slow.let_go(8)
        assert await asyncio.gather(*tasks) == [200] * 8
        order = ["aaaaabbc"[int(str(seed))] for seed in slow.seeds]
        assert sorted(order[1:4]) == ["a", "b", "c"] and order[6:] == ["a", "a"]


async def test_two_servers_fill_up_evenly_and_lend_each_other_nothing() -> None:
    async with held() as one, held() as other, unharmed([bounded(one.server.port, other.server.port, most=2)], KEYS) as served:
        tasks = await come(served, "aaaaaa")
        await one.reaches(2)
        await other.reaches(2)
        assert queued(served) == 2
        await one.let_go()
        await one.reaches(3)
        assert len(other.server.requests) == 2 and queued(served) == 1
        await other.let_go()
        await other.reaches(3)
        for each in (other, one, one, other):
            await each.let_go()
        assert await asyncio.gather(*tasks) == [200] * 6
        assert one.most == other.most == 2


async def test_adapters_share_the_servers_of_their_base_and_its_room() -> None:
    async with held() as slow:
        base = bounded(slow.server.port)
        adapter = replace(base, id="lora", parent="tiny", served="lora")
        async with unharmed([base, adapter], KEYS) as served:
            tasks = await come(served, "a")
            tasks += await come(served, "b", 1, model="lora")
            await until(lambda: queued(served) == 1)
            assert len(slow.server.requests) == 1
            await slow.let_go(2)
            assert await asyncio.gather(*tasks) == [200, 200]
            assert [each.json["model"] for each in slow.server.requests] == ["tiny", "lora"]


async def test_beyond_the_queue_is_told_when_to_come_back() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port, queue=Queue(2, 60.0))], KEYS) as served:
        tasks = await come(served, "aaa")
        await until(lambda: queued(served) == 2)
        reply = await ask(served.port, asking("a", 3))
        assert (reply.status, reply.error["code"]) == (503, "overloaded")
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        await slow.let_go(3)
        assert await asyncio.gather(*tasks) == [200] * 3
        assert served.value("requests_total", "tiny", "/v1/chat/completions", "503") == 1


async def test_a_key_that_fills_the_queue_makes_place_for_the_others() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port, queue=Queue(3, 60.0))], KEYS) as served:
        tasks = await come(served, "aaaa")
        await until(lambda: queued(served) == 3)
        tasks += await come(served, "b", 4)
        assert await tasks[3] == 503, "its latest"
        assert queued(served) == 3
        assert (await ask(served.port, asking("b", 9))).status == 503, "each has its share"
        await slow.let_go(4)
        assert [await task for task in tasks] == [200, 200, 200, 503, 200]
        assert slow.seeds == [0, 1, 4, 2] or slow.seeds == [0, 4, 1, 2]


async def test_who_has_waited_long_enough_is_told_when_to_come_back() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port, queue=Queue(2, 0.3))], KEYS) as served:
        tasks = await come(served, "a")
        await slow.reaches(1)
        reply = await ask(served.port, asking("b", 1))
        assert (reply.status, reply.error["code"]) == (503, "overloaded") and int(reply.headers["retry-after"]) >= 1
        await settled_but(served, 1)
        assert served.context.records[-1].queued >= 0.3
        await slow.let_go()
        assert await tasks[0] == 200


async def settled_but(served: Served, left: int) -> None:
    await until(lambda: served.context.started - len(served.context.records) == left)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_place_or_its_slot_at_once(stream: bool) -> None:
    async with held() as slow, unharmed([bounded(slow.server.port)], KEYS) as served:
        async with client(served.port) as first, client(served.port) as second, client(served.port) as third:
            for number, one in enumerate((first, second, third)):
                one.send(asking("a", number, stream=stream))
                await until(lambda number=number: served.total("inflight_requests") == number + 1)
            second.leave()
            await until(lambda: queued(served) == 1)
            first.leave()
            await slow.reaches(2)
            assert queued(served) == 0
            await until(lambda: len(slow.under_way) == 1)
            await slow.let_go()
            assert (await third.reply()).status == 200
        assert slow.seeds == [0, 2] and slow.most == 1


async def test_comments_while_a_stream_waits_for_its_turn() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port, keepalive=0.1)], KEYS) as served:
        tasks = await come(served, "a")
        async with client(served.port) as one:
            one.send(asking("b", 1, stream=True))
            await one.reader.readuntil(b"text/event-stream")
            await one.reader.readuntil(COMMENT)
            assert queued(served) == 1
            await slow.let_go(2)
            rest = await one.reader.readuntil(b"0\r\n\r\n")
            assert b"".join((ROLE, HELLO, STOP, DONE)) in rest
        assert await tasks[0] == 200


async def test_who_had_a_turn_to_no_avail_waits_before_those_who_came_later() -> None:
    async with held() as slow:
        with silent() as nobody:
            servers = (slow.server.port, nobody)
            async with unharmed([bounded(*servers, timeouts=Timeouts(connect=0.5))], KEYS) as served:
                served.worker.apply_health(Health({"tiny#1": Condition.DOWN}, {}))
                tasks = await come(served, "aaa")
                await until(lambda: queued(served) == 2)
                served.worker.apply_health(Health({"tiny#1": Condition.UP}, {}))
                assert queued(served) == 1, "the first of them is sent to where nobody accepts it"
                await until(lambda: queued(served) == 2)
                served.worker.apply_health(Health({"tiny#1": Condition.DOWN}, {}))
                await slow.let_go(3)
                assert await asyncio.gather(*tasks) == [200] * 3
                assert slow.seeds == [0, 1, 2]


async def test_a_reload_may_change_the_bound_at_any_time_and_cuts_nobody() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port, most=3)], KEYS) as served:
        tasks = await come(served, "aaabbb")
        await slow.reaches(3)
        await until(lambda: queued(served) == 3)
        _reload(served, max_inflight=1)
        assert served.total("server_inflight") == 3
        await slow.let_go(2)
        await until(lambda: served.total("server_inflight") == 1)
        assert len(slow.server.requests) == 3 and queued(served) == 3
        _reload(served, max_inflight=2)
        await slow.reaches(4)
        assert queued(served) == 2
        _reload(served, max_inflight=None)
        await slow.reaches(6)
        assert queued(served) == 0
        await slow.let_go(4)
        assert await asyncio.gather(*tasks) == [200] * 6


def _reload(served: Served, **more: Any) -> None:
    snapshot = served.worker.snapshot
    served.worker.apply_snapshot(replace(snapshot, version=snapshot.version + 1, models=(replace(snapshot.models[0], **more),)))


async def test_servers_that_go_while_others_wait() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port)], KEYS) as served:
        tasks = await come(served, "aa")
        await until(lambda: queued(served) == 1)
        served.worker.apply_health(Health({"tiny#0": Condition.DOWN}, {}))
        assert await tasks[1] == 503 and served.context.records[-1].code == "no_healthy_server"
        await slow.let_go()
        assert await tasks[0] == 200


async def test_while_the_gateway_stops_those_who_wait_for_a_turn_may_have_it() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port)], KEYS) as served:
        tasks = await come(served, "aa")
        await until(lambda: queued(served) == 1)
        served.context.queues.close()
        await slow.let_go(2)
        assert await asyncio.gather(*tasks) == [200, 200]


# All requests together


async def test_more_than_the_gateway_takes_are_refused_before_their_body() -> None:
    async with held() as slow, unharmed([model(slow.server.port)], KEYS, max_inflight=2) as served:
        tasks = await come(served, "ab")
        await slow.reaches(2)
        head, _, _ = asking("c", 2).partition(b"\r\n\r\n")
        reply = await ask(served.port, head + b"\r\n\r\n")
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "overloaded", "1")
        reply = await ask(served.port, request(token="sk-nobody"))
        assert reply.status == 401, "a stranger learns nothing"
        await slow.let_go()
        await settled_but(served, 1)
        tasks += await come(served, "c", 3)
        await slow.let_go(2)
        assert await asyncio.gather(*tasks) == [200] * 3


class Guests:
    """Keys and what each has under way in a house."""

    def __init__(self, most: int) -> None:
        self.house = ConcurrencyLimit(most)
        self.under_way: Counter[str] = Counter()

    def come(self, who: str, now: float) -> bool:
        try:
            self.house.admit(self.under_way.total() + 1, self.under_way[who], now)
        except Refusal:
            return False
        self.under_way[who] += 1
        return True


def test_one_key_may_have_the_whole_house_until_another_one_comes() -> None:
    guests = Guests(100)
    assert sum(guests.come("greedy", 0.0) for _ in range(500)) == 100
    assert not guests.come("small", 1.0)
    for _ in range(20):  # one of its requests ends, and it asks again
        guests.under_way["greedy"] -= 1
        assert not guests.come("greedy", 2.0)
    assert guests.come("greedy", 2.0) is False and guests.under_way["greedy"] == 80
    assert all(guests.come("small", 3.0) for _ in range(10))
    guests.under_way["small"] = 0
    assert sum(guests.come("greedy", 62.0) for _ in range(50)) == 0, "the other's last request is not a minute ago"
    assert sum(guests.come("greedy", 64.0) for _ in range(50)) == 20


STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["comes", "comes", "ends"]), st.floats(0, 30)), max_size=200)


@settings(deadline=None)
@given(most=st.integers(1, 20), steps=STEPS)
def test_a_house_is_never_over_full_and_who_has_nothing_gets_what_is_free(most: int, steps: list[tuple[str, str, float]]) -> None:
    guests, now = Guests(most), 0.0
    for who, step, pause in steps:
        now += pause
        free = most - guests.under_way.total()
        if step == "comes":
            had = guests.under_way[who]
            came = guests.come(who, now)
            assert came is False if not free else (came or had > 0)
        elif guests.under_way[who]:
            guests.under_way[who] -= 1
        assert guests.under_way.total() <= most


# The workers' parts


@pytest.mark.parametrize(("whole", "workers"), [(1, 1), (7, 1), (7, 2), (8, 3), (256, 5), (3, 3)])
def test_the_parts_are_the_whole_on_every_server(whole: int, workers: int) -> None:
    for index in range(4):
        parts = [worker_share(whole, number + index, workers) for number in range(workers)]
        assert sum(parts) == whole and max(parts) - min(parts) <= 1 and min(parts) >= 1
    if workers > 1 and whole % workers:
        assert len({worker_share(whole, index, workers) for index in range(workers)}) == 2, "another worker's with each server"


def test_no_worker_is_left_with_nothing_when_there_are_more_than_the_file_says() -> None:
    assert [worker_share(2, number, 4) for number in range(4)] == [1, 1, 1, 1]


def test_a_pace_is_the_mean_of_the_latest_turns_and_no_better_than_the_present_one() -> None:
    pace = DispatchRate()
    pace.start(100.0)
    for turn in range(1, 41):
        pace.record_dispatch(100.0 + 0.5 * turn)
    assert pace.seconds_for(10, 120.0) == 5
    assert pace.seconds_for(10, 124.0) == 40
    assert pace.seconds_for(1, 120.0) == 1


async def test_several_workers_together_keep_a_servers_bound(tmp_path: Path) -> None:
    bounded = launched("m", **{"sim-tokens": 4, "sim-tokens-per-second": 40}) | {"max_inflight": 3}
    async with controlled(tmp_path, bounded, workers=2) as gateway:
        tasks = await gateway.streams("m", seconds=5.0)
        tasks += [asyncio.create_task(gateway.ask("m", stream=True)) for _ in range(24)]
        most = gateway.in_flight("m")
        while not all(task.done() for task in tasks):
            most = max(most, gateway.in_flight("m"))
            await asyncio.sleep(0.005)
        assert {(await task).status_code for task in tasks} == {200} and 1 <= most <= 3
        assert gateway.status("m")["max_inflight"] == 3 and gateway.status("m")["queued"] == 0
