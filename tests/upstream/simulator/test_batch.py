"""The batch of the simulator's engine: its rules, and the same over real sockets."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import hypothesis.strategies as some
import pytest
from hypothesis import given

from tests.upstream.simulator.test_process import WITHIN, running, until
from upstream.simulator import flags
from upstream.simulator.engine.batch import Batch, BatchLimits, StepTime

TIME = StepTime(base=1.0, per_sequence=0.01, per_prefill_token=0.001)


def batch_of(prompts: dict[str, int], limits: BatchLimits) -> Batch[str]:
    return Batch(TIME, limits, prompts.__getitem__)


def test_a_prompt_and_its_tokens_take_steps() -> None:
    batch = batch_of({"a": 100}, BatchLimits())
    batch.add("a", 3)
    assert (batch.waiting, batch.running) == (1, 0)
    assert batch.begin_step() == pytest.approx(1.0 + 0.01 + 0.1)
    assert (batch.waiting, batch.running) == (0, 1)
    assert batch.complete().first == ("a",)
    assert batch.begin_step() == pytest.approx(1.01)
    assert batch.equal_steps == 2
    assert batch.complete().finished == ()
    assert batch.begin_step() == pytest.approx(1.01)
    assert batch.complete().finished == ("a",)
    assert batch.begin_step() is None


def test_a_long_prompt_is_computed_in_chunks_beside_the_running_requests() -> None:
    batch = batch_of({"a": 1, "b": 25, "c": 3}, BatchLimits(tokens=10))
    batch.add("a", 100)
    batch.begin_step()
    batch.complete()
    batch.add("b", 1)
    batch.add("c", 1)
    times, firsts = [], []
    for _ in range(4):
        times.append(batch.begin_step())
        firsts.append(batch.complete().first)
    assert firsts == [(), (), ("b",), ("c",)]
    assert times == [pytest.approx(1.0 + 0.01 * sequences + 0.001 * tokens) for sequences, tokens in ((2, 9), (2, 9), (3, 9), (2, 1))]


def test_no_more_requests_run_than_allowed() -> None:
    batch = batch_of(dict.fromkeys("abc", 1), BatchLimits(sequences=2))
    for name in "abc":
        batch.add(name, 2)
    batch.begin_step()
    assert (batch.waiting, batch.running) == (1, 2)
    batch.complete()
    batch.remove("a")
    batch.begin_step()
    assert batch.complete().first == ("c",)


@given(some.lists(some.integers(-2, 2), min_size=1, max_size=12), some.sets(some.integers(0, 11)))
def test_waiting_requests_start_by_priority_and_arrival(priorities: list[int], removed: set[int]) -> None:
    batch = Batch[int](TIME, BatchLimits(sequences=1), lambda _: 1)
    batch.add(-1, 3)
    batch.begin_step()
    for number, priority in enumerate(priorities):
        batch.add(number, 1, priority)
    for number in removed:
        batch.remove(number)
    started: list[int] = []
    while batch.running or batch.waiting:
        started += batch.complete().first
        batch.begin_step()
    left = [number for number in range(len(priorities)) if number not in removed]
    assert started == [-1, *sorted(left, key=lambda number: (priorities[number], number))]


def test_a_request_of_one_token_is_finished_with_its_first() -> None:
    batch = batch_of({"a": 0}, BatchLimits())
    batch.add("a", 0)
    batch.begin_step()
    result = batch.complete()
    assert result.first == result.finished == ("a",)


@given(
    some.lists(some.tuples(some.integers(0, 40), some.integers(0, 9), some.integers(0, 12)), min_size=1, max_size=12),
    some.integers(3, 16),
    some.integers(1, 5),
    some.booleans(),
)
def test_every_request_gets_its_tokens_and_equal_steps_are_equal(
    rows: list[tuple[int, int, int]], budget: int, sequences: int, together: bool
) -> None:
    """Requests (prompt, tokens, step of arrival) are complete, whether equal steps are played one by one or together."""
    batch = Batch[int](TIME, BatchLimits(max(budget, sequences + 1), sequences), lambda number: rows[number][0])
    arrivals = sorted(range(len(rows)), key=lambda number: rows[number][2])
    tokens: dict[int, int] = dict.fromkeys(range(len(rows)), 0)
    finished: list[int] = []
    step = 0
    while arrivals or len(finished) < len(rows):
        while arrivals and (rows[arrivals[0]][2] <= step or not (batch.waiting or batch.running)):
            number = arrivals.pop(0)
            batch.add(number, rows[number][1])
        assert batch.begin_step() is not None
        assert batch.running <= sequences
        until_arrival = max(rows[arrivals[0]][2] - step, 1) if arrivals else len(rows) * 100
        steps = min(batch.equal_steps, until_arrival) if together else 1
        for number in batch.generating:
            tokens[number] += steps
        result = batch.complete(steps)
        step += steps
        for number in result.first:
            tokens[number] += 1
        finished += result.finished
    assert sorted(finished) == list(range(len(rows)))
    assert tokens == {number: max(row[1], 1) for number, row in enumerate(rows)}


def test_requests_wait_for_the_batch_and_the_metrics_show_them() -> None:
    body: dict[str, Any] = {"max_tokens": 6000, "ignore_eos": True, "simulate": {"tokens": 6000}}
    with running("--sim-step-time", "0.01,0,0", "--max-num-seqs", "2", "--block-size", "32") as one:
        threads = [threading.Thread(target=lambda: one.client.post("/v1/chat/completions", json={**body, **HELLO})) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: (one.metric("vllm:num_requests_running"), one.metric("vllm:num_requests_waiting")) == (2, 1))
        assert one.metric("vllm:kv_cache_usage_perc") > 0
        assert one.metric("vllm:cache_config_info", block_size="32", num_gpu_blocks="65536") == 1
        one.process.terminate()  # ends the requests with "abort"
        for thread in threads:
            thread.join()


CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
QUEUED = ((CHAT, 0), (CHAT, 7), (MESSAGES, -3), (CHAT, -3), (MESSAGES, 7), (CHAT, 2**40), (MESSAGES, 0))
"""Paths and priorities of requests. For messages, the priority is a header."""
LONG = 1800
"""Tokens of a request that outlasts the others."""


async def order_of(url: str, slots: int, headers: Mapping[str, str] | None = None) -> list[int]:
    """Fill the slots of an engine with long requests, queue ``QUEUED``, and free a slot. Return the order in which they finish."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=WITHIN, limits=limits) as client:

        async def request(path: str, tokens: int, priority: int = 0) -> None:
            body = {**HELLO, "model": "tiny", "max_tokens": tokens, "ignore_eos": True, "priority": priority}
            body["simulate"] = {"tokens": tokens}
            more = {"x-vllm-priority": str(priority)} if path == MESSAGES else {}
            (await client.post(path, json=body, headers=more)).raise_for_status()

        async def until_shown(running: int, waiting: int) -> None:
            shown: Sequence[str] = ()
            async with asyncio.timeout(WITHIN):
                while [float(each) for each in shown] != [running, waiting]:
                    text = (await client.get("/metrics")).text
                    shown = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", text, re.MULTILINE)

        long = [asyncio.create_task(request(CHAT, LONG)) for _ in range(slots)]
        finished: list[int] = []
        queued = []
        try:
            await until_shown(slots, 0)
            for number, (path, priority) in enumerate(QUEUED):
                queued.append(asyncio.create_task(request(path, 20, priority)))
                queued[-1].add_done_callback(lambda _, number=number: finished.append(number))  # type: ignore[misc]
                await until_shown(slots, number + 1)
            long.pop().cancel()
            await asyncio.gather(*queued)
            assert not any(task.done() for task in long)
        finally:
            for task in (*long, *queued):
                task.cancel()
        return finished


BY_PRIORITY = sorted(range(len(QUEUED)), key=lambda number: QUEUED[number][1])


@pytest.mark.parametrize(
    ("flags", "expected"), [(["--scheduling-policy", "priority"], BY_PRIORITY), ([], list(range(len(QUEUED))))], ids=["priority", "fcfs"]
)
def test_the_policy_orders_the_queue(flags: list[str], expected: list[int]) -> None:
    with running("--sim-step-time", "0.004,0,0", "--max-num-seqs", "2", *flags) as one:
        assert asyncio.run(order_of(one.url, 2)) == expected


def test_an_unknown_policy_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        flags.parse(["tiny", "--scheduling-policy", "lifo"], {})
    assert "argument --scheduling-policy: invalid choice: 'lifo'" in capsys.readouterr().err


def test_a_request_that_hangs_keeps_its_place_in_the_batch() -> None:
    with running("--sim-step-time", "0.001,0,0", "--max-num-seqs", "1") as one:
        body = {**HELLO, "stream": True, "max_tokens": 9, "simulate": {"tokens": 9, "hang_after": 3}}
        with one.client.stream("POST", CHAT, json=body) as response, ThreadPoolExecutor(1) as pool:
            lines = response.iter_lines()
            assert next(lines)
            other = pool.submit(one.chat, max_tokens=9)
            until(lambda: (one.metric("vllm:num_requests_running"), one.metric("vllm:num_requests_waiting")) == (1, 1))
            response.close()
            assert other.result().status_code == 200


HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


def test_the_batch_responds_like_the_plain_engine() -> None:
    """The bytes of a response do not depend on the speed."""
    details = "--enable-prompt-tokens-details"
    with running(details, "--sim-tokens-per-second", "0") as plain, running(details, "--sim-step-time", "0.001,0,0") as batched:
        long = [{"role": "user", "content": "word " * 100}]
        for _ in range(2):
            bodies = [one.chat(messages=long, max_tokens=20).json() for one in (plain, batched)]
            for body in bodies:
                del body["id"], body["created"]
            assert bodies[0] == bodies[1]
        assert bodies[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
        assert batched.metric("vllm:prefix_cache_hits_total") == plain.metric("vllm:prefix_cache_hits_total")
        assert batched.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("given", ["1,2", "a,b,c", "1,2,-3", "1,2,inf"])
def test_wrong_step_times_are_rejected(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        flags.parse(["tiny", "--sim-step-time", given], {})
    assert "--sim-step-time: expected three numbers of seconds" in capsys.readouterr().err
