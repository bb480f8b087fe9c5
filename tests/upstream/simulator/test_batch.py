"""The batch of the simulator's engine: its rules, and the same over real sockets."""

from __future__ import annotations

import threading
from typing import Any

import hypothesis.strategies as some
import pytest
from hypothesis import given

from tests.upstream.simulator.test_process import running, until
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
