"""Requests of a class that preempts: whose slot they get, and that the request that had it is served later as if nothing had happened."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.api.routes import ROUTES
from gateway.auth.keys import hash_of
from gateway.snapshot.snapshot import Queue, QueueClass, Slo
from tests.faults.invariants import unharmed
from tests.gateway.admission.test_queue_full_servers import (
    CLASSES,
    OF_CLASSES,
    QUEUE,
    Held,
    bounded,
    held,
    queued,
    request_from,
    send_requests,
)
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.running import Served, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import DONE, HELLO, ROLE, STOP, client, request
from upstream.balancing.attempt import MAX_PREEMPTIONS

PREEMPTING = (replace(CLASSES[0], preempts=True), *CLASSES[1:])
"""The class of key ``a``, and then the one of key ``b``."""
NEVER_AGES = (PREEMPTING[0], QueueClass("batch"))


def preemptions(served: Served) -> float:
    return served.value("queue_preemptions_total", "tiny", "batch")


async def finish(slow: Held, served: Served, *seeds: int) -> None:
    """Release the requests in this order: each is alone at the server."""
    for seed in seeds:
        await until(lambda: len(slow.under_way) == 1)
        assert slow.seeds[-1] == seed
        await slow.let_go()
    await until(lambda: not served.total("inflight_requests"))


@pytest.mark.parametrize("stream", [False, True])
async def test_an_urgent_request_gets_the_slot_at_once_and_the_other_is_served_later(stream: bool) -> None:
    async with held() as slow, unharmed([bounded(slow.server.port)], OF_CLASSES, classes=NEVER_AGES) as served:
        tasks = await send_requests(served, "b", stream=stream)
        await slow.reaches(1)
        tasks += await send_requests(served, "a", 1)
        await slow.reaches(2)
        assert queued(served) == 1 and served.value("server_inflight") == 1
        await finish(slow, served, 1, 0)
        assert [await task for task in tasks] == [200, 200]
        assert slow.seeds == [0, 1, 0] and slow.most == 1 and preemptions(served) == 1
        records = {record.key.id: record for record in served.context.records if record.key is not None}
        assert len(served.context.records) == 2
        assert (records["b"].queue_reason, records["a"].queue_reason) == ("preempted", "full")
        assert (records["b"].retries, records["b"].failures, records["b"].server) == (0, (), "tiny#0")
        assert records["b"].overhead <= records["b"].duration - records["b"].queued
        assert not served.total("upstream_failures_total")


@pytest.mark.parametrize(
    "classes",
    [CLASSES, (QueueClass("batch", preempts=True), QueueClass("chat", strict=True))],
    ids=["without the setting", "of an earlier class"],
)
async def test_a_request_is_not_preempted(classes: Sequence[QueueClass]) -> None:
    async with held() as slow, unharmed([bounded(slow.server.port)], OF_CLASSES, classes=classes) as served:
        tasks = await send_requests(served, "ba")
        await until(lambda: queued(served) == 1)
        await finish(slow, served, 0, 1)
        assert [await task for task in tasks] == [200, 200] and slow.seeds == [0, 1] and not preemptions(served)


async def test_a_request_of_the_same_class_is_not_preempted() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port)], OF_CLASSES, classes=NEVER_AGES) as served:
        tasks = await send_requests(served, "aa")
        await until(lambda: queued(served) == 1)
        await finish(slow, served, 0, 1)
        assert [await task for task in tasks] == [200, 200] and slow.seeds == [0, 1]


async def test_the_latest_request_is_preempted_and_the_work_on_the_others_is_not_lost() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port, most=3)], OF_CLASSES, classes=NEVER_AGES) as served:
        tasks = await send_requests(served, "bbb")
        await slow.reaches(3)
        tasks += await send_requests(served, "a", 3)
        await slow.reaches(4)
        tasks += await send_requests(served, "a", 4)
        await slow.reaches(5)
        assert len(slow.under_way) == 3 and preemptions(served) == 2
        for count in (6, 7, 7, 7, 7):
            await slow.let_go()
            await slow.reaches(count)
        assert [await task for task in tasks] == [200] * 5
        assert sorted(map(str, slow.seeds[5:])) == ["1", "2"] and slow.most == 3


async def test_a_stream_that_has_begun_is_not_preempted() -> None:
    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(ROLE + HELLO)
        if talk.request.json["seed"] == 0:
            await until(lambda: queued(served) == 1)
        await talk.chunk(STOP + DONE)
        await talk.end_stream()

    async with scripted(script) as server, unharmed([bounded(server.port)], OF_CLASSES, classes=NEVER_AGES) as served:
        async with client(served.port) as batch:
            batch.send(request_from("b", 0, stream=True))
            await batch.reader.readuntil(b"\r\n\r\n")
            tasks = await send_requests(served, "a", 1, stream=True)
            assert await tasks[0] == 200
        assert [each.json["seed"] for each in server.requests] == [0, 1] and not preemptions(served)


async def test_a_request_is_preempted_a_bounded_number_of_times() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port)], OF_CLASSES, classes=NEVER_AGES) as served:
        tasks = await send_requests(served, "b")
        await slow.reaches(1)
        for number in range(MAX_PREEMPTIONS):
            tasks += await send_requests(served, "a", 1 + number)
            await slow.reaches(2 * number + 2)
            await until(lambda: len(slow.under_way) == 1)
            await slow.let_go()
            await slow.reaches(2 * number + 3)
        tasks += await send_requests(served, "a", 9)
        await until(lambda: queued(served) == 1)
        await finish(slow, served, 0, 9)
        assert [await task for task in tasks] == [200] * len(tasks)
        assert preemptions(served) == MAX_PREEMPTIONS and slow.seeds[-2:] == [0, 9]


async def test_a_class_that_has_aged_is_not_preempted() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port)], OF_CLASSES, classes=PREEMPTING) as served:
        tasks = await send_requests(served, "b")
        await slow.reaches(1)
        tasks += await send_requests(served, "b", 1)
        queue = served.worker.requests.queues._queues["tiny"]
        await until(lambda: bool(queue._aged))
        tasks += await send_requests(served, "a", 2)
        await until(lambda: queued(served) == 2)
        assert slow.seeds == [0]
        for count in (2, 3, 3):
            await slow.let_go()
            await slow.reaches(count)
        assert [await task for task in tasks] == [200] * 3 and not preemptions(served)


@pytest.mark.parametrize("more", [{"queue": Queue(4, 0.5)}, {"slo": Slo(ttft=0.2), "queue": QUEUE}], ids=["queue.wait", "deadline"])
async def test_a_preempted_request_is_not_refused_for_the_time_that_it_has_run(more: dict[str, Any]) -> None:
    classes = (replace(NEVER_AGES[0], slo=Slo(ttft=60.0)), NEVER_AGES[1])
    async with held() as slow, unharmed([bounded(slow.server.port, **more)], OF_CLASSES, classes=classes) as served:
        tasks = await send_requests(served, "b")
        await slow.reaches(1)
        started = time.monotonic()
        await until(lambda: time.monotonic() > started + 0.6)
        tasks += await send_requests(served, "a", 1)
        await slow.reaches(2)
        await finish(slow, served, 1, 0)
        assert [await task for task in tasks] == [200, 200]


async def test_its_prompt_is_charged_and_its_charge_is_settled_once() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port)], OF_CLASSES, classes=NEVER_AGES) as served:
        tasks = await send_requests(served, "b")
        await slow.reaches(1)
        tasks += await send_requests(served, "a", 1)
        await slow.reaches(2)
        queue = served.worker.requests.queues._queues["tiny"]
        [of_batch] = [each for each in queue._keys.values() if each.owner == "b"]
        assert of_batch.metrics.service[0] > 0 and of_batch.flow.in_flight == 0
        charged = of_batch.metrics.service[0]
        await finish(slow, served, 1, 0)
        assert [await task for task in tasks] == [200, 200]
        assert of_batch.metrics.service[0] > charged and of_batch.metrics.in_flight[0] == pytest.approx(0.0)
        assert of_batch.flow.in_flight == 0 and not queue._dispatched and not queue.running


async def test_a_preempted_client_that_disconnects_leaves_the_queue() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port)], OF_CLASSES, classes=NEVER_AGES) as served:
        async with client(served.port) as batch:
            batch.send(request_from("b", 0))
            await slow.reaches(1)
            tasks = await send_requests(served, "a", 1)
            await until(lambda: queued(served) == 1)
            batch.disconnect()
            await until(lambda: queued(served) == 0)
        await slow.let_go()
        assert await tasks[0] == 200 and slow.seeds == [0, 1]


def test_requests_with_side_effects_or_without_their_body_are_never_preempted() -> None:
    once = {path for path, route in ROUTES.items() if not route.repeatable}
    assert once == {
        "/v1/responses", "/v1/audio/transcriptions", "/v1/audio/translations", "/tokenize", "/detokenize", "/v1/messages/count_tokens",
    }  # fmt: skip


async def test_a_response_that_may_call_tools_is_not_preempted() -> None:
    async with held() as slow, unharmed([bounded(slow.server.port)], OF_CLASSES, classes=NEVER_AGES) as served:
        async with client(served.port) as batch:
            batch.send(request({"model": "tiny", "input": "hello", "seed": 0}, "/v1/responses", token="sk-b"))
            await slow.reaches(1)
            tasks = await send_requests(served, "a", 1)
            await until(lambda: queued(served) == 1)
            await slow.let_go()
            assert (await batch.reply()).status == 200
            await slow.reaches(2)
            await slow.let_go()
        assert await tasks[0] == 200 and not preemptions(served)


# With the simulator


def test_a_batch_request_is_complete_recorded_once_and_limited_once(tmp_path: Path) -> None:
    limited = launched("sim/one", **{"sim-tokens-per-second": "10"}) | {"max_inflight": 1}
    classes = [{"id": "chat", "strict": True, "preempts": True}, {"id": "batch"}]
    keys = [_key("interactive", "chat"), _key("nightly", "batch") | {"limits": {"concurrent": 2, "tokens_per_day": 100_000}}]
    config = configuration(limited, workers=1)
    config |= {"ledger": "sqlite:///usage.db", "classes": classes, "keys": [*config["keys"], *keys]}
    with gateway(tmp_path, config) as one, ThreadPoolExecutor(1) as batch:
        alone = _send(one, "nightly", 12)
        running = batch.submit(_send, one, "nightly", 80)
        wait_for(lambda: one.metric('vllm_gateway_server_inflight{model="sim/one",server="sim/one#0"}') == 1)
        assert _send(one, "interactive", 2).status_code == 200
        assert not running.done()
        response = running.result()
        rows = wait_for(lambda: found if len(found := _rows(tmp_path / "usage.db")) == 3 else None)
        line = wait_for(lambda: next((each for each in map(json.loads, one.log.splitlines()) if "preempted" in each.values()), None))
        assert one.metric('vllm_gateway_queue_preemptions_total{class="batch",model="sim/one"}') == 1
    assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 80
    assert len(response.json()["choices"][0]["message"]["content"]) > len(alone.json()["choices"][0]["message"]["content"])
    assert [tokens for key, tokens in rows if key == "nightly"] == [12, 80] and line["key"] == "nightly" and "retries" not in line
    used = 100_000 - int(response.headers["x-ratelimit-remaining-tokens-day"])
    assert used == sum(each.json()["usage"]["total_tokens"] for each in (alone, response)), "each is settled once"


def _key(name: str, of_class: str) -> dict[str, Any]:
    return {"id": name, "hash": hash_of(f"sk-{name}"), "class": of_class}


def _send(one: Gateway, key: str, tokens: int) -> httpx2.Response:
    body = {"model": "sim/one", "messages": [{"role": "user", "content": "hello"}], "simulate": {"tokens": tokens}}
    return httpx2.post(f"{one.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer sk-{key}"}, timeout=60)


def _rows(file: Path) -> list[tuple[str, int]]:
    with closing(sqlite3.connect(file)) as database:
        return database.execute("SELECT key, completion_tokens FROM gateway_usage ORDER BY time").fetchall()
