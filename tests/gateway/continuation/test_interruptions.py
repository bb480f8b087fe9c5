"""A stream is settled and recorded once, and nothing of it remains, whatever ends or changes while another server continues it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace

import pytest

from gateway.ledger.row import UsageRow, decode, frames
from gateway.limits.decision import DAY
from gateway.limits.windows import USED
from gateway.snapshot.snapshot import Allowance, Limits, Queue
from gateway.worker.drain import drain
from tests.gateway.continuation.stage import CHAT, COMPLETIONS, MESSAGES, PLAIN, Json, Stage, chat, completion, report, simulators, stage
from tests.support.cutting_proxy import Cut
from tests.support.running import key, until
from tests.support.wire import DONE, Client, client, request, request_once
from tests.upstream.simulator.test_process import Simulated
from upstream.balancing.server import Condition

LIMITS = Limits(tokens_per_day=1_000_000, concurrent=1)
OWNER, OTHER = key(allowances=(Allowance("key team-a", LIMITS),)), key("team-b", "sk-another-key")
LONG = chat("Count.", min_tokens=100, max_tokens=100, **PLAIN)
REQUESTS: dict[str, tuple[str, Json]] = {
    "chat": (CHAT, LONG),
    "completion": (COMPLETIONS, completion(max_tokens=100, min_tokens=100)),
    "message": (MESSAGES, {**chat(), "max_tokens": 60}),
}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Simulated]]:
    with simulators(2, "--sim-tokens-per-second", "60") as made:
        yield made


@asynccontextmanager
async def staged(servers: list[Simulated], **settings: object) -> AsyncIterator[Stage]:
    """Run a stage whose key has limits. Check at the end that none of them is held."""
    async with stage(servers, REQUESTS, [OWNER, OTHER], **settings) as one:
        yield one
        buckets = one.served.context.limiter.buckets
        await until(lambda: buckets.in_flight(buckets.holder("key team-a", LIMITS)) == 0)


async def row_of(one: Stage) -> UsageRow:
    """Return the row of the key's only request. Checks that it was settled once: the limit has the tokens of the row."""
    await until(lambda: any(record.key is not None and record.key.id == OWNER.id for record in one.served.context.records))
    [row] = [row for payload in frames(one.journal.read().data) if (row := decode(payload)).key == OWNER.id]
    buckets = one.served.context.limiter.buckets
    used = buckets.cells[buckets.holder("key team-a", LIMITS).offset + DAY + USED]
    assert used == (row.prompt or 0) + (row.completion or 0) > 0
    return row


Begin = Callable[[int], object]
PHASES: dict[str, tuple[str, Callable[[Begin], list[Cut]]]] = {
    "generate": ("chat", lambda begin: [Cut(5), Cut(0, then=begin, closes=False)]),
    "after generate": ("chat", lambda begin: [Cut(5), Cut(1, then=begin, closes=False)]),
    "completion": ("completion", lambda begin: [Cut(5), Cut(0, then=begin, closes=False)]),
    "rest of a completion": ("completion", lambda begin: [Cut(5), Cut(3, then=begin, closes=False)]),
    "message": ("message", lambda begin: [Cut(5), Cut(0, then=begin, closes=False)]),
    "rest of a message": ("message", lambda begin: [Cut(5), Cut(8, then=begin, closes=False)]),
}
"""Where a continued stream is interrupted: the request and its cuts."""


@asynccontextmanager
async def interrupted(servers: list[Simulated], phase: str) -> AsyncIterator[tuple[Stage, Client]]:
    """Let a stream reach a phase of its continuation. Yields its client, too."""
    name, cuts = PHASES[phase]
    reached = asyncio.Event()
    path, body = REQUESTS[name]
    async with staged(servers) as one, client(one.served.port) as waiting:
        one.cuts.extend(cuts(lambda _: reached.set()))
        waiting.send(request(body, path))
        await reached.wait()
        yield one, waiting


@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_disconnects_while_its_stream_is_continued(servers: list[Simulated], phase: str) -> None:
    async with interrupted(servers, phase) as (one, waiting):
        waiting.disconnect()
        row = await row_of(one)
        assert (row.status, row.incomplete) == (499, "client")


@pytest.mark.parametrize("phase", ["render", "derender"])
async def test_a_client_disconnects_while_a_server_makes_nothing_of_its_token_ids(phase: str) -> None:
    with simulators(2, "--sim-tokens-per-second", "60") as servers:
        stopped: list[int] = []

        def stop(port: int, *, is_hit: bool) -> None:
            [server] = [server for server in servers if (server.port == port) is is_hit]
            os.kill(server.process.pid, signal.SIGSTOP)
            stopped.append(server.process.pid)

        cuts = {
            "render": [Cut(5, then=lambda port: stop(port, is_hit=False))],
            "derender": [Cut(5), Cut(2, then=lambda port: stop(port, is_hit=True), closes=False)],
        }
        async with staged(servers) as one:
            one.cuts.extend(cuts[phase])
            try:
                async with client(one.served.port) as sender:
                    sender.send(request(LONG))
                    await until(lambda: stopped)
                    await asyncio.sleep(0.1)  # the gateway may or may not wait for the route already
                row = await row_of(one)
                assert (row.status, row.incomplete) == (499, "client")
            finally:
                for pid in stopped:
                    os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def queued(one: Stage) -> AsyncIterator[tuple[Client, Client]]:
    """Let a stream wait for the only server that is left, which the stream of another key keeps busy. Yields both clients."""
    async with client(one.served.port) as busy, client(one.served.port) as waiting:
        one.cuts.append(Cut(3, closes=False))
        busy.send(request(LONG, token="sk-another-key"))
        await busy.events(3)
        taken = [server.in_flight > 0 for server in one.served.worker.fleet]
        one.cuts.append(Cut(5, then=lambda _: report(one.served, *(Condition.UP if each else Condition.DOWN for each in taken))))
        waiting.send(request(LONG))
        await until(lambda: one.served.total("queued_requests") == 1)
        yield busy, waiting


async def test_a_client_disconnects_while_its_stream_is_queued_again(servers: list[Simulated]) -> None:
    async with staged(servers, max_inflight=1, queue=Queue(4, 60.0)) as one, queued(one) as (_, waiting):
        waiting.disconnect()
        row = await row_of(one)
        assert (row.status, row.incomplete, one.served.total("queued_requests")) == (499, "client", 0)


async def test_a_stream_that_is_queued_again_is_continued(servers: list[Simulated]) -> None:
    async with staged(servers, max_inflight=1, queue=Queue(4, 60.0)) as one:
        async with queued(one) as (busy, waiting):
            busy.disconnect()
            reply = await waiting.reply()
        row = await row_of(one)
        assert (reply.whole, reply.body[-14:], row.status, row.completion) == (True, DONE, 200, 100)


async def test_a_stream_is_continued_for_a_key_that_a_reload_revokes_meanwhile(servers: list[Simulated]) -> None:
    async with staged(servers, max_inflight=1, queue=Queue(4, 60.0)) as one:
        async with queued(one) as (busy, waiting):
            snapshot = one.served.worker.snapshot
            one.served.worker.apply_snapshot(replace(snapshot, version=2, keys=(replace(OWNER, revoked=True), OTHER)))
            assert (await request_once(one.served.port, request(LONG))).status == 401
            busy.disconnect()
            reply = await waiting.reply()
        row = await row_of(one)
        assert (reply.whole, reply.body[-14:], row.status, row.completion) == (True, DONE, 200, 100)


async def drained(one: Stage, seconds: float) -> None:
    """Stop the worker as after SIGTERM."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        await drain(one.served.worker, None, listener, seconds)


async def test_a_stream_is_continued_by_a_gateway_that_stops(servers: list[Simulated]) -> None:
    """It is lost before and while the gateway drains."""
    async with staged(servers, max_inflight=1, queue=Queue(4, 60.0)) as one:
        async with queued(one) as (busy, waiting):
            stopping = asyncio.create_task(drained(one, 60.0))
            await until(lambda: not one.served.worker.connections.keep_alive)
            busy.disconnect()
            reply = await waiting.reply()
            await stopping
        row = await row_of(one)
        assert (reply.whole, reply.body[-14:], row.status, row.completion) == (True, DONE, 200, 100)


@pytest.mark.parametrize("phase", PHASES)
async def test_a_continued_stream_that_outlasts_the_drain_gets_an_error(servers: list[Simulated], phase: str) -> None:
    async with interrupted(servers, phase) as (one, waiting):
        reply = asyncio.create_task(waiting.reply())
        await drained(one, 0.0)
        is_message = REQUESTS[PHASES[phase][0]][0] == MESSAGES
        assert (await reply).body.count(b"event: error" if is_message else b'"draining"') == 1
        row = await row_of(one)
        assert (row.status, row.incomplete) == (200, "drain")


async def test_a_queued_continuation_that_outlasts_the_drain_gets_an_error(servers: list[Simulated]) -> None:
    async with staged(servers, max_inflight=1, queue=Queue(4, 60.0)) as one:
        async with queued(one) as (_, waiting):
            reply = asyncio.create_task(waiting.reply())
            await drained(one, 0.0)
            assert (await reply).body.count(b'"draining"') == 1
        row = await row_of(one)
        assert (row.status, row.incomplete) == (200, "drain")
