"""Streams of lost servers end as if nothing had happened (see ``stage``)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import orjson
import pytest

from gateway.snapshot.snapshot import Resume
from tests.gateway.continuation.restart import REPLICAS, rolling_restart
from tests.gateway.continuation.stage import (
    CHAT,
    COMPLETIONS,
    MANY_BYTES,
    PLAIN,
    REQUESTS,
    RUNNING_USAGE,
    chat,
    check,
    completion,
    report,
    sampled_trials,
    simulators,
    stage,
    stop_trial,
    trial,
)
from tests.support.cutting_proxy import Cut, cutting_proxy
from tests.support.running import model, serving, until
from tests.support.wire import request, request_once
from tests.upstream.simulator.test_process import Simulated
from upstream.balancing.server import Condition
from upstream.http.deadlines import Timeouts
from upstream.http.sse import data_of, split

TRIALS = 6
"""Disturbed streams of each request."""
MIXED = ("reasoning, usage", "tools", "a long response", "completion, usage", "message", "stop")


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Simulated]]:
    with simulators(3) as made:
        yield made


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_stream_that_is_cut_once_or_twice_is_equal(servers: list[Simulated], name: str) -> None:
    dice = random.Random(name)
    async with stage(servers) as one:
        for _ in range(TRIALS):
            await trial(one, name, dice)


async def test_streams_with_multi_byte_text_and_several_calls_are_equal() -> None:
    with simulators(3, *MANY_BYTES) as servers:
        async with stage(servers) as one:
            for name in REQUESTS:
                dice = random.Random(name)
                for _ in range(TRIALS // 2):
                    await trial(one, name, dice)


@pytest.mark.parametrize("flags", [(), MANY_BYTES], ids=["", "multi-byte text"])
async def test_completions_that_end_at_a_stop_string_are_equal(flags: tuple[str, ...]) -> None:
    dice = random.Random(str(flags))
    with simulators(3, *flags) as servers:
        async with stage(servers) as one:
            for number in range(TRIALS * 3):
                await stop_trial(one, completion(prompt=f"Part {number % 4}", max_tokens=80, **RUNNING_USAGE), dice)


@pytest.mark.parametrize("extra", [0, 20])
async def test_a_stream_without_an_event_is_requested_again(servers: list[Simulated], extra: int) -> None:
    async with stage(servers) as one:
        for name in ("reasoning", "completion", "message", "response"):
            outcome = await one.run(name, Cut(0, extra))
            check(outcome, await one.expected(name))
            assert (outcome.record.retries, outcome.record.continuations) == (1, ())


async def test_a_second_server_that_is_lost_after_its_last_event_has_completed_the_stream(servers: list[Simulated]) -> None:
    async with stage(servers) as one:
        for name in ("completion", "completion, usage"):
            undisturbed = await one.expected(name)
            for left in range(3):
                outcome = await one.run(name, Cut(5), Cut(len(undisturbed.events) - 5 - left))
                check(outcome, undisturbed)


async def test_a_client_that_requests_the_usage_of_each_event_gets_it_to_the_end(servers: list[Simulated]) -> None:
    """Nothing else counts the tokens of the request: there is neither a ledger nor a limit."""
    body = chat(**PLAIN, stream_options={"include_usage": True, "continuous_usage_stats": True})
    cuts = deque[Cut | None]()
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(cutting_proxy(each.port, cuts)) for each in servers[:2]]
        served = await stack.enter_async_context(serving([model(*(proxy.port for proxy in proxies))]))
        report(served, Condition.UP, Condition.UP)
        cuts.append(Cut(6))
        reply = await request_once(served.port, request(body, CHAT))
        assert [each.outcome for record in served.context.records for each in record.continuations] == ["continued"]
    documents = [orjson.loads(data) for event in split(reply.body) if (data := data_of(event)).startswith(b"{")]
    assert len(documents) >= 8 and all(document["usage"] for document in documents)


async def test_a_slow_client_gets_no_more_of_a_continued_chat_than_it_reads() -> None:
    with simulators(2, "--sim-tokens-per-second", "40") as servers:
        async with stage(servers) as one:
            undisturbed = await one.expected("a long response")
            running = asyncio.create_task(one.run("a long response", Cut(5)))
            movable = [server.movable for server in one.served.worker.fleet]
            await until(lambda: any(movable))
            first = set().union(*movable)
            await until(lambda: any(responses - first for responses in movable))
            [connection] = one.served.connections
            connection.pause_writing()
            await until(lambda: connection.flow._writable is not None)
            assert connection.current is not None
            sent = connection.current.bytes_out
            await asyncio.sleep(0.3)
            assert connection.current.bytes_out == sent
            connection.resume_writing()
            check(await running, undisturbed)


async def test_a_large_chat_is_regenerated(servers: list[Simulated]) -> None:
    """Its document would be parsed and written as a whole for each call of ``derender``."""
    async with stage(servers) as one:
        body = chat("Hello", metadata={"note": "x" * (1 << 20)}, **PLAIN)
        undisturbed = await one.send(CHAT, body)
        outcome = await one.send(CHAT, body, Cut(5))
        check(outcome, undisturbed)
        assert [each.path for each in outcome.record.continuations] == ["regeneration"]


@pytest.mark.parametrize("name", ["reasoning", "completion", "message"])
async def test_a_server_that_fails_before_it_responds_does_not_get_the_stream_again(servers: list[Simulated], name: str) -> None:
    """The policy prefers the servers in the same order each time."""
    async with stage(servers, balance="prefix") as one:
        for _ in range(TRIALS):
            outcome = await one.run(name, Cut(3), Cut(0, 20))
            check(outcome, await one.expected(name))
            lost = [each.server for each in outcome.record.continuations]
            assert len({*lost, outcome.record.server}) == 3, (lost, outcome.record.server)


async def test_a_server_that_fails_to_render_does_not_get_the_stream_again() -> None:
    with simulators(3) as servers:
        async with stage(servers) as one:
            undisturbed = await one.expected("reasoning")

            def kill_the_next(lost: int) -> None:
                next(server for server in servers if server.port != lost).process.kill()

            outcome = await one.run("reasoning", Cut(5, then=kill_the_next))
            check(outcome, undisturbed)
            assert [each.outcome for each in outcome.record.continuations] == ["failed", "continued"]


async def test_a_third_loss_ends_the_stream_with_an_error(servers: list[Simulated]) -> None:
    async with stage(servers) as one:
        cuts = [Cut(3), Cut(3), Cut(3)]
        for path, body in (REQUESTS["a long response"], REQUESTS["message"]):
            outcome = await one.send(path, body, *cuts)
            assert (outcome.status, outcome.record.incomplete, outcome.record.code) == (200, "upstream", "upstream_disconnected")
            assert outcome.body.count(b"upstream_disconnected" if path == CHAT else b"event: error") == 1
            assert len(outcome.record.continuations) == 2


async def test_without_another_server_the_stream_ends_as_before(servers: list[Simulated]) -> None:
    async with stage(servers[:1]) as one:
        outcome = await one.run("reasoning", Cut(3))
        assert (outcome.record.code, outcome.body.count(b"data: [DONE]")) == ("upstream_disconnected", 1)


async def test_a_stream_continues_only_on_a_server_that_reports_the_same_model(servers: list[Simulated]) -> None:
    ports, up = [server.port for server in servers], [Condition.UP] * 3
    different = ["a", "b", "c"]
    async with stage(servers) as one:

        def lose(port: int) -> None:
            report(one.served, *(Condition.DOWN if each == port else Condition.UP for each in ports), loaded=different)

        for name in ("reasoning", "completion", "message"):
            report(one.served, *up, loaded=different)
            outcome = await one.run(name, Cut(3, then=lose))
            assert [each.outcome for each in outcome.record.continuations] == ["failed"]
            assert (outcome.record.code, outcome.record.incomplete) == ("upstream_disconnected", "upstream")
            report(one.served, *up, loaded=["a"] * 3)
            check(await one.run(name, Cut(3)), await one.expected(name))


@pytest.mark.parametrize("resume", [Resume.OFF, Resume.EXACT])
async def test_a_sampled_stream_ends_as_before(servers: list[Simulated], resume: Resume) -> None:
    async with stage(servers, resume=resume) as one:
        body = chat() if resume is Resume.OFF else {**chat(), "temperature": 1}
        outcome = await one.send(CHAT, body, Cut(3))
        assert (outcome.record.code, outcome.record.continuations) == ("upstream_disconnected", ())


async def test_a_stream_of_a_silent_server_is_equal(servers: list[Simulated]) -> None:
    async with stage(servers, timeouts=Timeouts(idle=2.0)) as one:
        for name in ("tools", "completion"):
            undisturbed = await one.expected(name)
            outcome = await one.run(name, Cut(5, closes=False))
            check(outcome, undisturbed)
            assert outcome.record.continuations[0].cause == "idle_timeout"


async def test_the_total_timeout_bounds_a_stream_with_its_continuations() -> None:
    with simulators(2, "--sim-tokens-per-second", "30") as servers:
        async with stage(servers, timeouts=Timeouts(total=2.0)) as one:
            endless = chat("Count.", min_tokens=2000, max_tokens=2000, **PLAIN)
            alone = await one.send(CHAT, endless)
            assert (alone.record.code, alone.record.continuations) == ("upstream_timeout", ())
            outcome = await one.send(CHAT, endless, Cut(5))
            assert (outcome.record.code, len(outcome.record.continuations)) == ("upstream_disconnected", 1)
            assert "total_timeout" in {reason for _, _, reason in outcome.record.failures}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_of_a_server_that_gets_a_signal_are_equal(number: int) -> None:
    """One of two servers is killed or stopped in the middle of many streams. The other one gets all of them."""
    with simulators(2, "--sim-tokens-per-second", "60") as servers:
        processes = {server.port: server.process.pid for server in servers}
        hit: list[int] = []

        def strike(port: int) -> None:
            hit.append(processes[port])
            os.kill(processes[port], number)

        async with stage(servers, timeouts=Timeouts(idle=8.0)) as one:
            for name in MIXED:
                await one.expected(name)
            one.cuts.append(Cut(8, then=strike, closes=number == signal.SIGKILL))
            names = MIXED * 2
            try:
                outcomes = await asyncio.gather(*(one.run(name) for name in names))
            finally:
                if number == signal.SIGSTOP:
                    os.kill(hit[0], signal.SIGCONT)
            for name, outcome in zip(names, outcomes, strict=True):
                check(outcome, await one.expected(name))
            assert sum(bool(outcome.record.continuations) for outcome in outcomes) > 1


async def test_streams_of_a_drained_server_are_equal() -> None:
    with simulators(2, "--sim-tokens-per-second", "40") as servers:
        async with stage(servers, move_after=0.0) as one:
            names = ("a long response", "completion", "message")
            for name in names:
                await one.expected(name)
            running = [asyncio.create_task(one.run(name)) for name in names * 2]
            await until(lambda: sum(len(server.movable) for server in one.served.worker.fleet) == len(running))
            report(one.served, Condition.OUT_OF_ROTATION, Condition.UP)
            outcomes = await asyncio.gather(*running)
            for name, outcome in zip(names * 2, outcomes, strict=True):
                check(outcome, await one.expected(name))
            assert {each.cause for outcome in outcomes for each in outcome.record.continuations} == {"moved"}
            assert not any(outcome.record.failures for outcome in outcomes)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_no_token_of_a_sampled_stream_is_lost_or_repeated(servers: list[Simulated], path: str) -> None:
    """The simulator draws the tokens from the request alone, so that the rest of an undisturbed stream is known."""
    async with stage(servers, resume=Resume.SAMPLED) as one:
        await sampled_trials(one, path, 8)


async def test_a_rolling_restart_under_many_streams_is_noticed_by_no_client(tmp_path: Path) -> None:
    """A full-size run is ``python -m tests.gateway.continuation restart 300``."""
    figures = await rolling_restart(tmp_path, 30, tokens=240, speed=4)
    assert (figures.cut, figures.different, len(figures.restarts)) == (0, 0, REPLICAS), figures
    assert {outcome for outcome, _ in figures.moves} == {"continued"} and not figures.unexplained, figures
