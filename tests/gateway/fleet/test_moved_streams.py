"""Streams that outlast their server's drain are continued on others, with real processes: none is cut, and no drain waits for them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.controlled import Controlled, controlled
from tests.support.process import launched
from tests.support.running import until
from tests.upstream.simulator.test_process import Simulated, running

A = "sim/a"
LONG = 180.0  # seconds that a busy machine may take


def flags(tokens: int, speed: int) -> dict[str, Any]:
    """Return the flags of a server whose responses have so many tokens, and so many in a second."""
    return {"sim-tokens": tokens, "sim-tokens-per-second": speed, "max-model-len": 4096}


def replicated(count: int, tokens: int, **settings: Any) -> dict[str, Any]:
    model = launched(A, **flags(tokens, 10))
    model["launch"]["replicas"] = count
    return {**model, "move_after": "200ms", **settings}


@contextmanager
def simulated(tokens: int, *speeds: int) -> Iterator[list[Simulated]]:
    """Run a simulator for each of the speeds."""
    with ExitStack() as stack:
        arguments = [[f"--{name}={value}" for name, value in flags(tokens, speed).items()] for speed in speeds]
        yield [stack.enter_context(running("--enable-scale-out", "--served-model-name", A, *each)) for each in arguments]


def external(servers: Sequence[Simulated]) -> dict[str, Any]:
    return {"id": A, "servers": [{"url": each.url} for each in servers], "balance": "round_robin", "move_after": "200ms"}


def question(number: int) -> dict[str, Any]:
    return {"stream": True, "temperature": 0, "messages": [{"role": "user", "content": f"Question {number}"}]}


async def streams(one: Controlled, count: int) -> list[asyncio.Task[httpx2.Response]]:
    """Start streams that can be continued, and wait until all of them are in flight."""
    await until(lambda: all(probe.scale_out for probe in one.control.observer.observe().probes.values()))
    await one.wait_for_workers()
    tasks = [asyncio.create_task(one.request(A, **question(number))) for number in range(count)]
    await until(lambda: one.in_flight(A) == count, LONG)
    return tasks


def text_of(reply: httpx2.Response) -> str:
    """Return the text of a complete stream."""
    assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n") and '"error"' not in reply.text, reply.text[-500:]
    chunks = [json.loads(event.removeprefix("data: ")) for event in reply.text.split("\n\n")[:-2]]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def undisturbed(tokens: int, count: int) -> list[str]:
    """Return the texts of the same streams from one server."""
    with simulated(tokens, 0) as [server]:
        return [text_of(server.post("/v1/chat/completions", {"model": A, **question(number)})) for number in range(count)]


def in_flight(one: Controlled, server: Simulated) -> int:
    """Return the requests in flight on a server."""
    return next(int(each["in_flight"]) for each in one.status(A)["servers"] if each["name"] == server.url)


def continued(one: Controlled, cause: str) -> int:
    """Return how many streams were continued for a cause. None may have failed."""
    found = {series.labels[2:]: value[0] for series, value in one.report.series().items() if series.family == "continuations_total"}
    assert {outcome for _, outcome in found} <= {"continued"} and one.value("incomplete_total", A, "upstream") == 0
    return int(found.get((cause, "continued"), 0))


async def test_a_rolling_restart_does_not_wait_for_long_streams_and_cuts_none(tmp_path: Path) -> None:
    async with controlled(tmp_path, replicated(3, 300), drain="10m") as one:
        tasks = await streams(one, 9)
        await one.operations.restart(A)
        await until(lambda: one.launches(A) == 6 and one.state(A) == "ready", LONG)
        replies = await asyncio.gather(*tasks)
        assert [text_of(reply) for reply in replies] == undisturbed(300, 9)
        assert continued(one, "moved") >= 3, "those of the first server at least"
        assert one.status(A)["continuations"] == {"continued": continued(one, "moved")}


async def test_replicas_that_the_configuration_loses_give_their_streams_away(tmp_path: Path) -> None:
    async with controlled(tmp_path, replicated(2, 200), drain="10m") as one:
        tasks = await streams(one, 4)
        assert not (await one.reload(replicated(1, 200), drain="10m")).problems
        replies = await asyncio.gather(*tasks)
        assert [text_of(reply) for reply in replies] == undisturbed(200, 4)
        assert continued(one, "moved") >= 1


async def test_a_server_out_of_rotation_gives_its_streams_away_and_a_request_without_a_plan_may_finish(tmp_path: Path) -> None:
    with simulated(200, 10, 10) as servers:
        async with controlled(tmp_path, external(servers)) as one:
            tasks = await streams(one, 4)
            other = [asyncio.create_task(one.request(A, **{**question(n), "temperature": 1})) for n in range(2)]
            await until(lambda: one.in_flight(A) == 6, LONG)
            await one.operations.cordon(servers[0].url)
            replies = await asyncio.gather(*tasks)
            assert [text_of(reply) for reply in replies] == undisturbed(200, 4)
            assert continued(one, "moved") >= 1
            assert all(map(text_of, await asyncio.gather(*other)))


async def test_the_streams_of_a_hung_engine_continue_elsewhere_and_not_twice(tmp_path: Path) -> None:
    with simulated(200, 10, 10) as servers:
        async with controlled(tmp_path, external(servers)) as one:
            tasks = await streams(one, 20)
            on_stopped = in_flight(one, servers[0])
            os.kill(servers[0].process.pid, signal.SIGSTOP)
            try:
                await until(lambda: in_flight(one, servers[0]) == 0, LONG)
            finally:
                os.kill(servers[0].process.pid, signal.SIGCONT)  # it sends what it had computed, while the streams continue elsewhere
            replies = await asyncio.gather(*tasks)
            assert [text_of(reply) for reply in replies] == undisturbed(200, 20)
            sent_again = one.value("retries_total", A)  # they had no event yet
            assert continued(one, "unresponsive") + sent_again == on_stopped > 0


@pytest.mark.parametrize("resume", ["exact", False])
async def test_the_routes_for_token_ids_are_open_to_the_gateway_alone(tmp_path: Path, resume: str | bool) -> None:
    async with controlled(tmp_path, replicated(2, 4, resume=resume)) as one:
        await until(lambda: all(probe.task for probe in one.control.observer.observe().probes.values()))
        assert {probe.scale_out for probe in one.control.observer.observe().probes.values()} == {bool(resume)}
        for path in ("/v1/chat/completions/render", "/v1/chat/completions/derender", "/inference/v1/generate"):
            assert (await one.client.post(path, json={})).status_code == 404
