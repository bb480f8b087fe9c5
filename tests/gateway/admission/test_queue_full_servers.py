"""Requests that find all servers at capacity: how many continue, in which order, and which error the others get."""

from __future__ import annotations

import asyncio
import math
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
from gateway.snapshot.snapshot import Model, Queue, QueueClass
from tests.faults.invariants import unharmed
from tests.support.controlled import controlled
from tests.support.ports import silent
from tests.support.running import Served, key, model, until
from tests.support.scripted import Conversation, Scripted, scripted
from tests.support.wire import COMPLETION, DONE, HELLO, ROLE, STOP, chat, client, request, request_once
from upstream.balancing.server import Condition
from upstream.http.deadlines import Timeouts

QUEUE = Queue(size=8, wait=60.0)
COMMENT = b": keep-alive\n\n"
KEYS = tuple(key(name, f"sk-{name}", weight=weight) for name, weight in (("a", 1.0), ("b", 1.0), ("c", 4.0)))


@dataclass
class Held:
    """A server that holds each response until the test releases it."""

    server: Scripted
    under_way: list[asyncio.Event] = field(default_factory=list)
    most: int = 0

    @property
    def seeds(self) -> list[object]:
        return [each.json["seed"] for each in self.server.requests]

    async def let_go(self, count: int = 1) -> None:
        """Release this many responses, the oldest first. Wait for each request to arrive."""
        for _ in range(count):
            await until(lambda: self.under_way)
            self.under_way.pop(0).set()

    async def reaches(self, count: int) -> None:
        """Wait until the server has received this many requests in total."""
        await until(lambda: len(self.server.requests) == count)


@asynccontextmanager
async def held() -> AsyncIterator[Held]:
    in_progress: list[int] = [0]

    async def script(talk: Conversation) -> None:
        in_progress[0] += 1
        state.most = max(state.most, in_progress[0])
        try:
            event = asyncio.Event()
            state.under_way.append(event)
            disconnected = asyncio.create_task(talk.closed_by_peer())
            released = asyncio.create_task(event.wait())
            await asyncio.wait((disconnected, released), return_when=asyncio.FIRST_COMPLETED)
            for task in (disconnected, released):
                task.cancel()
            await asyncio.gather(disconnected, released, return_exceptions=True)
            if not event.is_set():
                state.under_way.remove(event)
        finally:
            in_progress[0] -= 1
        await _respond(talk)

    async with scripted(script) as server:
        state = Held(server)
        yield state


async def _respond(talk: Conversation) -> None:
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


def request_from(key_id: str, seed: int, **fields: Any) -> bytes:
    return request(chat(seed=seed, **fields), token=f"sk-{key_id}")


async def send_requests(served: Served, key_id: str, first: int = 0, **fields: Any) -> list[asyncio.Task[int]]:
    """Send one request for each letter, with the key of that name. Each task returns a response status."""
    tasks = []
    for seed, letter in enumerate(key_id, first):
        tasks.append(await _started(served, request_from(letter, seed, **fields)))
        await asyncio.sleep(0)
    return tasks


async def _started(served: Served, data: bytes) -> asyncio.Task[int]:
    """Send a request, and wait until the gateway has started it."""
    before = served.context.started
    task = asyncio.create_task(_status(served, data))
    await until(lambda: served.context.started == before + 1)
    return task


async def _status(served: Served, data: bytes) -> int:
    return (await request_once(served.port, data)).status


async def test_a_server_stays_within_its_limit_and_the_rest_continue_one_by_one() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port, most=2)], KEYS) as served:
        tasks = await send_requests(served, "aaaaaa")
        await slow.reaches(2)
        await until(lambda: queued(served) == 4)
        assert served.value("server_inflight", "tiny", "tiny#0") == 2 and served.value("inflight_requests", "tiny") == 6
        await slow.let_go()
        await slow.reaches(3)
        assert queued(served) == 3 and served.demand == []
        for count in (4, 5, 6, 6, 6):
            await slow.let_go()
            await slow.reaches(count)
        assert await asyncio.gather(*tasks) == [200] * 6
        assert {0, 1} == set(slow.seeds[:2]) and slow.seeds[2:] == [2, 3, 4, 5] and slow.most == 2
        assert slow.server.accepted == 2, "who goes on takes the connection that has become free"
        waited = [record.queued > 0 for record in served.context.records]
        assert waited == [False, False, True, True, True, True]
        assert all(record.overhead <= record.duration - record.queued for record in served.context.records)


async def test_keys_are_served_in_proportion_to_their_weights() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port)], KEYS) as served:
        tasks = await send_requests(served, "aaaaabb")
        tasks += await send_requests(served, "c", 7)
        await until(lambda: queued(served) == 7)
        await slow.let_go(8)
        assert await asyncio.gather(*tasks) == [200] * 8
        order = ["aaaaabbc"[int(str(seed))] for seed in slow.seeds]
        assert sorted(order[1:4]) == ["a", "b", "c"] and order[6:] == ["a", "a"]


async def test_two_servers_fill_up_evenly_and_share_no_slots() -> None:
    async with held() as one, held() as other, unharmed([bounded(one.server.port, other.server.port, most=2)], KEYS) as served:
        tasks = await send_requests(served, "aaaaaa")
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


async def test_adapters_share_the_servers_and_the_queue_of_their_base() -> None:
    async with held() as slow:
        base = bounded(slow.server.port)
        adapter = replace(base, id="lora", parent="tiny", served="lora")
        async with unharmed([base, adapter], KEYS) as served:
            tasks = await send_requests(served, "a")
            tasks += await send_requests(served, "b", 1, model="lora")
            await until(lambda: queued(served) == 1)
            assert len(slow.server.requests) == 1
            await slow.let_go(2)
            assert await asyncio.gather(*tasks) == [200, 200]
            assert [each.json["model"] for each in slow.server.requests] == ["tiny", "lora"]


async def test_a_request_beyond_the_queue_gets_retry_after() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port, queue=Queue(2, 60.0))], KEYS) as served:
        tasks = await send_requests(served, "aaa")
        await until(lambda: queued(served) == 2)
        reply = await request_once(served.port, request_from("a", 3))
        assert (reply.status, reply.error["code"]) == (503, "overloaded")
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        await slow.let_go(3)
        assert await asyncio.gather(*tasks) == [200] * 3
        assert served.value("requests_total", "tiny", "/v1/chat/completions", "503") == 1


async def test_a_key_that_fills_the_queue_gives_slots_to_others() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port, queue=Queue(3, 60.0))], KEYS) as served:
        tasks = await send_requests(served, "aaaa")
        await until(lambda: queued(served) == 3)
        tasks += await send_requests(served, "b", 4)
        assert await tasks[3] == 503, "its latest"
        assert queued(served) == 3
        assert (await request_once(served.port, request_from("b", 9))).status == 503, "each has its share"
        await slow.let_go(4)
        assert [await task for task in tasks] == [200, 200, 200, 503, 200]
        assert slow.seeds == [0, 1, 4, 2] or slow.seeds == [0, 4, 1, 2]


async def test_a_queue_timeout_is_reported_with_retry_after() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port, queue=Queue(2, 0.3))], KEYS) as served:
        tasks = await send_requests(served, "a")
        await slow.reaches(1)
        reply = await request_once(served.port, request_from("b", 1))
        assert (reply.status, reply.error["code"]) == (503, "overloaded") and int(reply.headers["retry-after"]) >= 1
        await all_settled_except(served, 1)
        assert served.context.records[-1].queued >= 0.3
        await slow.let_go()
        assert await tasks[0] == 200


async def all_settled_except(served: Served, left: int) -> None:
    await until(lambda: served.context.started - len(served.context.records) == left)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnected_client_frees_its_queue_or_server_slot_at_once(stream: bool) -> None:
    async with held() as slow, unharmed([bounded(slow.server.port)], KEYS) as served:
        async with client(served.port) as first, client(served.port) as second, client(served.port) as third:
            for number, one in enumerate((first, second, third)):
                one.send(request_from("a", number, stream=stream))
                await until(lambda number=number: served.total("inflight_requests") == number + 1)
            second.disconnect()
            await until(lambda: queued(served) == 1)
            first.disconnect()
            await slow.reaches(2)
            assert queued(served) == 0
            await until(lambda: len(slow.under_way) == 1)
            await slow.let_go()
            assert (await third.reply()).status == 200
        assert slow.seeds == [0, 2] and slow.most == 1


async def test_comments_are_sent_while_a_stream_is_queued() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port, keepalive=0.1)], KEYS) as served:
        tasks = await send_requests(served, "a")
        async with client(served.port) as one:
            one.send(request_from("b", 1, stream=True))
            await one.reader.readuntil(b"text/event-stream")
            await one.reader.readuntil(COMMENT)
            assert queued(served) == 1
            await slow.let_go(2)
            rest = await one.reader.readuntil(b"0\r\n\r\n")
            assert b"".join((ROLE, HELLO, STOP, DONE)) in rest
        assert await tasks[0] == 200


async def test_a_requeued_request_waits_before_those_that_arrived_later() -> None:
    async with held() as slow:
        with silent() as unreachable:
            servers = (slow.server.port, unreachable)
            async with unharmed([bounded(*servers, timeouts=Timeouts(connect=0.5))], KEYS) as served:
                served.worker.apply_health(Health({"tiny#1": Condition.DOWN}, {}))
                tasks = await send_requests(served, "aaa")
                await until(lambda: queued(served) == 2)
                served.worker.apply_health(Health({"tiny#1": Condition.UP}, {}))
                assert queued(served) == 1, "the first of them is sent to where nobody accepts it"
                await until(lambda: queued(served) == 2)
                served.worker.apply_health(Health({"tiny#1": Condition.DOWN}, {}))
                await slow.let_go(3)
                assert await asyncio.gather(*tasks) == [200] * 3
                assert slow.seeds == [0, 1, 2]


async def test_a_reload_may_change_the_limit_at_any_time_and_aborts_no_request() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port, most=3)], KEYS) as served:
        tasks = await send_requests(served, "aaabbb")
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


async def test_a_limit_that_control_finds_may_change_at_any_time_and_aborts_no_request() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port, most=3, has_auto_max_inflight=True)], KEYS) as served:

        def set_limit(limit: int) -> None:
            served.worker.apply_health(Health({"tiny#0": Condition.UP}, {}, max_inflight={"tiny#0": limit, "removed#0": 9}))

        tasks = await send_requests(served, "aaabbb")
        await slow.reaches(3)
        set_limit(1)
        _reload(served)
        assert served.total("server_inflight") == 3 and queued(served) == 3
        await slow.let_go(2)
        await until(lambda: served.total("server_inflight") == 1)
        assert len(slow.server.requests) == 3
        set_limit(2)
        await slow.reaches(4)
        assert queued(served) == 2
        set_limit(8)
        await slow.reaches(6)
        assert queued(served) == 0
        await slow.let_go(4)
        assert await asyncio.gather(*tasks) == [200] * 6


def _reload(served: Served, **more: Any) -> None:
    snapshot = served.worker.snapshot
    served.worker.apply_snapshot(replace(snapshot, version=snapshot.version + 1, models=(replace(snapshot.models[0], **more),)))


async def test_queued_requests_fail_when_the_last_server_goes_down() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port)], KEYS) as served:
        tasks = await send_requests(served, "aa")
        await until(lambda: queued(served) == 1)
        served.worker.apply_health(Health({"tiny#0": Condition.DOWN}, {}))
        assert await tasks[1] == 503 and served.context.records[-1].code == "no_healthy_server"
        await slow.let_go()
        assert await tasks[0] == 200


async def test_requests_queued_for_a_full_server_are_served_while_draining() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port)], KEYS) as served:
        tasks = await send_requests(served, "aa")
        await until(lambda: queued(served) == 1)
        served.context.queues.close()
        await slow.let_go(2)
        assert await asyncio.gather(*tasks) == [200, 200]


# All requests together


async def test_requests_beyond_the_gateway_limit_are_refused_before_their_body() -> None:
    async with held() as slow, unharmed([model(slow.server.port)], KEYS, max_inflight=2) as served:
        tasks = await send_requests(served, "ab")
        await slow.reaches(2)
        head, _, _ = request_from("c", 2).partition(b"\r\n\r\n")
        reply = await request_once(served.port, head + b"\r\n\r\n")
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "overloaded", "1")
        reply = await request_once(served.port, request(token="sk-nobody"))
        assert reply.status == 401, "a stranger learns nothing"
        await slow.let_go()
        await all_settled_except(served, 1)
        tasks += await send_requests(served, "c", 3)
        await slow.let_go(2)
        assert await asyncio.gather(*tasks) == [200] * 3


class InFlightRequests:
    """The in-flight requests of each key under one concurrency limit."""

    def __init__(self, most: int) -> None:
        self.limit = ConcurrencyLimit(most)
        self.under_way: Counter[str] = Counter()

    def come(self, key_id: str, now: float) -> bool:
        try:
            self.limit.admit(self.under_way.total() + 1, self.under_way[key_id], now)
        except Refusal:
            return False
        self.under_way[key_id] += 1
        return True


def test_one_key_may_use_the_whole_limit_until_another_key_arrives() -> None:
    requests = InFlightRequests(100)
    assert sum(requests.come("greedy", 0.0) for _ in range(500)) == 100
    assert not requests.come("small", 1.0)
    for _ in range(20):  # one of its requests finishes, and it sends another
        requests.under_way["greedy"] -= 1
        assert not requests.come("greedy", 2.0)
    assert requests.come("greedy", 2.0) is False and requests.under_way["greedy"] == 80
    assert all(requests.come("small", 3.0) for _ in range(10))
    requests.under_way["small"] = 0
    assert sum(requests.come("greedy", 62.0) for _ in range(50)) == 0, "the other's last request is not a minute ago"
    assert sum(requests.come("greedy", 64.0) for _ in range(50)) == 20


STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["comes", "comes", "ends"]), st.floats(0, 30)), max_size=200)


@settings(deadline=None)
@given(most=st.integers(1, 20), steps=STEPS)
def test_the_limit_is_never_exceeded_and_an_idle_key_gets_free_capacity(most: int, steps: list[tuple[str, str, float]]) -> None:
    requests, now = InFlightRequests(most), 0.0
    for key_id, step, pause in steps:
        now += pause
        free = most - requests.under_way.total()
        if step == "comes":
            before = requests.under_way[key_id]
            admitted = requests.come(key_id, now)
            assert admitted is False if not free else (admitted or before > 0)
        elif requests.under_way[key_id]:
            requests.under_way[key_id] -= 1
        assert requests.under_way.total() <= most


# The workers' parts


@pytest.mark.parametrize(("whole", "workers"), [(1, 1), (7, 1), (7, 2), (8, 3), (256, 5), (3, 3)])
def test_the_shares_of_the_workers_add_up_on_every_server(whole: int, workers: int) -> None:
    for index in range(4):
        parts = [worker_share(whole, number + index, workers) for number in range(workers)]
        assert sum(parts) == whole and max(parts) - min(parts) <= 1 and min(parts) >= 1
    if workers > 1 and whole % workers:
        assert len({worker_share(whole, index, workers) for index in range(workers)}) == 2, "another worker's with each server"


def test_each_worker_gets_a_share_even_if_workers_outnumber_the_limit() -> None:
    assert [worker_share(2, number, 4) for number in range(4)] == [1, 1, 1, 1]


def test_the_rate_averages_recent_dispatches_and_slows_while_none_occur() -> None:
    rate = DispatchRate()
    rate.start(100.0)
    for number in range(1, 41):
        rate.record_dispatch(100.0 + 0.5 * number)
    assert rate.seconds_for(10, 120.0) == 5
    assert rate.seconds_for(10, 124.0) == 40
    assert rate.seconds_for(1, 120.0) == 1


async def test_several_workers_together_stay_within_a_servers_limit(tmp_path: Path) -> None:
    at_once = most = 0

    async def respond(talk: Conversation) -> None:
        nonlocal at_once, most
        if talk.request.head.startswith(b"POST"):
            at_once += 1
            most = max(most, at_once)
            await until(lambda: most >= 3)
            await asyncio.sleep(0.02)
            at_once -= 1  # before the gateway has the response, and may send another request
        await talk.respond(COMPLETION)

    async with scripted(respond) as server:
        limited = {"id": "m", "servers": [{"url": f"http://127.0.0.1:{server.port}"}], "max_inflight": 3}
        async with controlled(tmp_path, limited, workers=2) as gateway:
            responses = await asyncio.gather(*(gateway.request("m") for _ in range(60)))
            assert {each.status_code for each in responses} == {200} and most == 3
            assert gateway.status("m")["max_inflight"] == 3 and gateway.status("m")["queued"] == 0


CLASSES = (QueueClass("chat", strict=True), QueueClass("batch", aging=0.3))
OF_CLASSES = (key("a", "sk-a", queue_class="chat"), key("b", "sk-b", queue_class="batch"))


async def _order(served: Served, slow: Held, count: int) -> list[object]:
    """Release all requests one by one. Return the seeds in the order in which the server got them."""
    for number in range(1, count + 1):
        await slow.reaches(number)
        await slow.let_go()
    return slow.seeds


async def test_a_strict_class_is_served_first_unless_its_client_lowers_it() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port)], OF_CLASSES, classes=CLASSES) as served:
        tasks = await send_requests(served, "bbba")
        lowered = request(chat(seed=4), token="sk-a", extra=("x-vllm-gateway-class: batch",))
        raised = request(chat(seed=5), token="sk-b", extra=("x-vllm-gateway-class: chat",))
        tasks += [await _started(served, data) for data in (lowered, raised)]
        await until(lambda: queued(served) == 5)
        order = await _order(served, slow, 6)
        assert await asyncio.gather(*tasks) == [200] * 6
        assert order[:2] == [0, 3], "the strict class comes first"
        assert order.index(5) > order.index(2), "a client cannot raise its class"
        assert {record.queue_reason for record in served.context.records} == {None, "full"}


async def test_a_class_whose_request_has_waited_too_long_competes_with_the_strict_one() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port)], OF_CLASSES, classes=CLASSES) as served:
        tasks = await send_requests(served, "abaaa")
        await until(lambda: queued(served) == 4)
        await asyncio.sleep(0.8)  # the class is aged by the worker's next tick
        order = await _order(served, slow, 5)
        assert await asyncio.gather(*tasks) == [200] * 5
        assert order.index(1) in (1, 2), "it is not the last one"


async def test_an_output_has_at_most_the_tokens_that_its_request_allows() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port)], KEYS) as served:
        tasks = await send_requests(served, "a")
        tasks += await send_requests(served, "a", 1, max_tokens=7, n=2)
        tasks += await send_requests(served, "b", 2)
        queue = served.worker.requests.queues._queues["tiny"]
        await until(lambda: queued(served) == 2)
        assert {slot.request.key.id: slot.request.most for slot in queue._waiting} == {"a": 14, "b": math.inf}
        await _order(served, slow, 3)
        assert await asyncio.gather(*tasks) == [200] * 3
