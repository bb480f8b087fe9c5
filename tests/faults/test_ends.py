"""The gateway is stopped or killed. Streams that finish within the drain time are complete; all others get an error event. No process
is orphaned.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.faults.conftest import FULL
from tests.faults.invariants import ended, request_ids, soon_idle, whole
from tests.support.ports import reserved
from tests.support.process import Gateway, alive, configuration, gateway, launched, wait_for
from tests.support.running import until
from tests.support.scripted import Conversation, Scripted, scripted
from tests.support.wire import DONE, EVENTS, Reply, client, request, request_once

STREAMS = 500 if FULL else 40
RATE = 5.0 if FULL else 20.0
"""Tokens per second of a stream. One simulator can sustain this rate for all streams."""
BACK = 2.0 if FULL else 120.0
"""Seconds in which a killed process has to be replaced. The smaller size shares its machine with other tests."""
HELLO = [{"role": "user", "content": "Hello"}]


def stream(seconds: float) -> bytes:
    """Return a request for a stream that takes ``seconds``."""
    simulate = {"tokens": round(seconds * RATE), "tokens_per_second": RATE}
    return request({"model": "sim/one", "messages": HELLO, "stream": True, "simulate": simulate})


@asynccontextmanager
async def started(one: Gateway, count: int, seconds: float) -> AsyncIterator[list[asyncio.Task[Reply]]]:
    """Open ``count`` streams and wait until each has started."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client(one.data)) for _ in range(count)]
        streams = [asyncio.create_task(each.request(stream(seconds))) for each in clients]
        async with asyncio.timeout(60.0):
            await asyncio.gather(*(each.begun.wait() for each in clients))
        yield streams


def complete(reply: Reply) -> bool:
    """Whether a stream is complete and without an error."""
    return reply.status == 200 and reply.whole and reply.body.endswith(DONE) and b'"error"' not in reply.body


def truncated_by_drain(reply: Reply) -> bool:
    """Whether a stream was truncated by the drain and ends with a complete error event."""
    last = b'"code":"draining"' in reply.body and reply.body.endswith(b"}\n\n" + DONE)
    return reply.status == 200 and reply.whole and last


@pytest.mark.row(23)
async def test_streams_within_the_drain_time_are_complete(tmp_path: Path, measured: Callable[[str], None]) -> None:
    config = configuration(launched(), workers=2, drain="2m")
    with gateway(tmp_path, config) as one, ended(one):
        async with started(one, STREAMS, 4.0) as streams:
            one.process.send_signal(signal.SIGTERM)
            replies = await asyncio.gather(*streams)
        assert await asyncio.to_thread(one.process.wait, 60) == 0
    assert sum(map(complete, replies)) == STREAMS == len(request_ids(one.log))
    measured(f"SIGTERM under {STREAMS} streams that finish within the drain time: 0 truncated")


@pytest.mark.row(23)
async def test_streams_beyond_the_drain_time_get_an_error_event(tmp_path: Path, measured: Callable[[str], None]) -> None:
    with gateway(tmp_path, configuration(launched(), workers=2, drain="500ms")) as one, ended(one):
        async with started(one, STREAMS, 120.0) as streams:
            one.process.send_signal(signal.SIGTERM)
            replies = await asyncio.gather(*streams)
        assert await asyncio.to_thread(one.process.wait, 60) == 0
    assert [reply for reply in replies if not truncated_by_drain(reply)] == []
    assert len(request_ids(one.log)) == STREAMS
    measured(f"SIGTERM under {STREAMS} streams beyond the drain time: each ends with the error event")


@pytest.mark.row(23)
async def test_requests_are_served_during_linger_although_readyz_fails(tmp_path: Path, measured: Callable[[str], None]) -> None:
    with gateway(tmp_path, configuration(launched(), linger="8s", drain="30s")) as one, ended(one):
        one.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        await asyncio.to_thread(wait_for, lambda: one.get("/readyz").status_code == 503)
        served = 0
        while time.monotonic() - began < 1.5:
            async with client(one.data) as persistent:
                for data in (request(path="/v1/models", method="GET"), request({"model": "sim/one", "messages": HELLO})):
                    reply = await request_once(one.data, data)
                    assert (reply.status, reply.headers["connection"]) == (200, "close")
                reply = await persistent.request(data)
                assert (reply.status, reply.headers["connection"]) == (200, "close")
                assert await persistent.closed(), "so that whoever keeps connections turns away in time"
                served += 3
        assert await asyncio.to_thread(one.process.wait, 60) == 0
    assert time.monotonic() - began >= 8.0 and len(request_ids(one.log)) == served
    measured(f"/readyz fails at once; {served} of {served} requests are served during linger, each as the last of its connection")


@pytest.mark.row(23)
@pytest.mark.parametrize("workers", [1, 2])
async def test_every_accepted_connection_is_served(tmp_path: Path, workers: int, measured: Callable[[str], None]) -> None:
    """A load balancer retries a request if the port is closed, but not if the connection was accepted and then reset."""
    data, seen, stopped = request({"model": "sim/one", "messages": HELLO}), Counter[str](), asyncio.Event()

    async def keep_sending(port: int) -> None:
        while not stopped.is_set():
            seen[await outcome(port, data)] += 1

    config = configuration(launched("sim/one", **{"sim-tokens-per-second": 0}), workers=workers, drain="1m")
    with gateway(tmp_path, config) as one, ended(one):
        async with asyncio.TaskGroup() as group:
            for _ in range(30):
                group.create_task(keep_sending(one.data))
            await until(lambda: seen["200"] > 100, 60.0)
            one.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(one.process.wait, 60) == 0
            stopped.set()
    assert seen.keys() <= {"200", "refused"}, seen
    assert len(request_ids(one.log)) == seen["200"]
    measured(f"SIGTERM while clients connect all the time, {workers} workers: each of {seen['200']} accepted connections was served")


async def outcome(port: int, data: bytes) -> str:
    """Send a request on a new connection and classify its outcome."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        await asyncio.sleep(0.02)
        return "refused"
    try:
        writer.write(data)
        return (await reader.read(12)).removeprefix(b"HTTP/1.1 ").decode()
    except ConnectionError:
        return "cut"
    finally:
        writer.transport.abort()


@pytest.mark.row(23)
async def test_a_silent_connection_does_not_delay_the_stop(tmp_path: Path, measured: Callable[[str], None]) -> None:
    with gateway(tmp_path, configuration(launched(), drain="2m")) as one, ended(one):
        async with client(one.data) as silent, client(one.data) as slow:
            slow.send(request()[:20])
            one.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(one.process.wait, 60) == 0
            assert await silent.closed() and await slow.closed()
    measured("SIGTERM with a connected, silent client: the worker waits for one second")


def ports_of_clients(worker: int, port: int) -> set[int]:
    """Return the client ports of a worker's connections to the data port."""
    return {
        each.raddr.port
        for each in psutil.Process(worker).net_connections(kind="tcp")
        if each.status == "ESTABLISHED" and each.laddr.port == port
    }


@asynccontextmanager
async def open_streams() -> AsyncIterator[tuple[Scripted, asyncio.Event]]:
    """Run a server whose streams start, and finish when the event is set."""
    finish = asyncio.Event()

    async def script(talk: Conversation) -> None:
        if talk.request.head.startswith(b"GET"):  # a probe
            await talk.respond(b'{"object":"list","data":[]}')
            return
        await talk.begin_stream()
        await talk.chunk(EVENTS[0])
        await finish.wait()
        await talk.chunk(b"".join(EVENTS[1:]))
        await talk.end_stream()

    async with scripted(script) as server:
        yield server, finish


@pytest.mark.row(24)
async def test_streams_of_other_workers_continue_when_one_is_killed(tmp_path: Path, measured: Callable[[str], None]) -> None:
    async with open_streams() as (server, finish):
        streaming = {"id": "sim/one", "servers": [{"url": f"http://127.0.0.1:{server.port}"}]}
        config = configuration(streaming, soon_idle(launched("sim/two")), workers=2)
        with gateway(tmp_path, config, ready=False) as one:
            await asyncio.to_thread(wait_for, lambda: one.get("/readyz").status_code == 200, BACK)
            others, restarted = await _streams_survive(one, server, finish)
    measured(f"a worker killed: all {others} streams of the other worker are complete; the next worker is up after {restarted:.2f} s")
    assert restarted < BACK


async def _streams_survive(one: Gateway, server: Scripted, finish: asyncio.Event) -> tuple[int, float]:
    """Kill a worker while both have streams.

    Returns the number of the other worker's streams, and the seconds until the next worker is up.
    """
    async with whole(one):  # requests in flight of the killed worker are recorded only in the ledger
        before, launched_ones = one.workers(), {each.pid for each in one.named("upstream.simulator")}
        async with AsyncExitStack() as stack:
            clients, replies = [], {}
            while min(len(ports_of_clients(before[number], one.data)) for number in (0, 1)) < 4:  # the kernel chooses which accepts
                each = await stack.enter_async_context(client(one.data))
                clients.append(each)
                replies[each.writer.get_extra_info("sockname")[1]] = asyncio.create_task(each.request(stream(0)))
                await asyncio.sleep(0)
            await until(lambda: all(each.begun.is_set() for each in clients), BACK)
            others = ports_of_clients(before[1], one.data)
            assert others | ports_of_clients(before[0], one.data) == replies.keys()
            began = time.monotonic()
            os.kill(before[0], signal.SIGKILL)
            await asyncio.to_thread(wait_for, lambda: one.workers().get(0) not in (None, before[0]), BACK)
            await asyncio.to_thread(wait_for, lambda: one.get("/status").json()["workers"][0]["up"], BACK)
            restarted = time.monotonic() - began
            finish.set()
            await asyncio.wait(replies.values())
        assert all(complete(replies[port].result()) for port in others)
        cut = [reply for port, reply in replies.items() if port not in others]
        assert not any(reply.exception() is None and reply.result().whole for reply in cut)
        assert {each.pid for each in one.named("upstream.simulator")} == launched_ones
        assert one.workers()[1] == before[1]
        server.hang_up()  # so that the worker holds no idle connection
    return len(others), restarted


@pytest.mark.row(24)
async def test_a_killed_gateway_leaves_no_process_and_restarts_soon(tmp_path: Path, measured: Callable[[str], None]) -> None:
    with reserved() as port, gateway(tmp_path, configuration(launched(), workers=2, port=port)) as one, ended(one):
        async with started(one, 10, 60.0) as streams:
            tree = one.tree()
            os.kill(one.process.pid, signal.SIGKILL)
            began = time.monotonic()
            await asyncio.to_thread(one.process.wait, 30)
            await until(lambda: not alive(tree), 60.0)
            gone = time.monotonic() - began
            replies = await asyncio.gather(*streams, return_exceptions=True)
            assert not any(isinstance(reply, Reply) and reply.whole for reply in replies), "none looks whole that is not"
        began = time.monotonic()
        with gateway(tmp_path, None, runtime=one.runtime, ready=False) as again:
            await asyncio.to_thread(wait_for, lambda: serves(again), BACK)
            served = time.monotonic() - began
    measured(f"the gateway killed: no process left after {gone:.2f} s; started again, it serves after {served:.2f} s")
    assert served < BACK


def serves(one: Gateway) -> bool:
    try:
        return one.request().status_code == 200
    except httpx2.HTTPError:
        return False
