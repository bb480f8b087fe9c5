"""A request is retried only if no server can have run it or it may run twice, ends at its deadlines, and always releases its slot."""

from __future__ import annotations

import asyncio
import gc
import resource
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from time import monotonic

import pytest
import uvloop

from tests.support.pools import pool_of
from tests.support.ports import refusing, silent
from tests.support.running import until
from tests.support.scripted import Conversation, Scripted, scripted
from upstream.balancing.attempt import Attempt, Upload, UpstreamResponse
from upstream.balancing.cost_model import BLOCK_BYTES, Prompt
from upstream.balancing.policies.cost import Cost
from upstream.balancing.policies.policy import RequestFacts
from upstream.balancing.pool import NoServerError, Pool
from upstream.balancing.retry_budget import MINIMUM, SHARE
from upstream.balancing.server import Condition, Server, ServerSpec
from upstream.http.address import Address
from upstream.http.chunked import ChunkedDecoder
from upstream.http.connection import Connection
from upstream.http.deadlines import TICK, Deadlines, Timeouts
from upstream.http.errors import (
    Aborted,
    BadResponse,
    ConnectFailed,
    ConnectTimeout,
    Disconnected,
    FirstByteTimeout,
    IdleTimeout,
    LocalLimit,
    Moved,
    Preempted,
    StaleConnection,
    TotalTimeout,
    Unresponsive,
    UpstreamError,
)

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
FOR_EVER = 3600.0
"""Seconds between two looks of a clock that a test does not wait for: it says itself how late it is."""
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def last(attempt: Attempt) -> str | None:
    """The name of the server that was asked last."""
    return attempt.tried[-1].spec.name if attempt.tried else None


def compose(server: Server) -> tuple[bytes, bytes]:
    return b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n", b"?"


@dataclass
class Way:
    """A pool, the clock, and what was left behind."""

    servers: list[Server]
    deadlines: Deadlines
    timeouts: Timeouts

    def __post_init__(self) -> None:
        self.pool = pool_of(self.servers, "round_robin")

    def attempt(self, *, resends: bool = False) -> Attempt:
        return Attempt(self.pool, self.timeouts, self.deadlines, resends=resends)

    async def request(self, upload: Upload | None = None, *, resends: bool = False) -> tuple[bytes, Attempt]:
        with self.attempt(resends=resends) as attempt:
            response = await attempt.send(compose, upload)
            return await response.read_body(1 << 20), attempt

    def check(self) -> None:
        assert [server.in_flight for server in self.servers] == [0] * len(self.servers)
        assert len(self.deadlines) == 0


@asynccontextmanager
async def way(*ports: int, up: bool = True, tick: float = 0.02, **limits: float) -> AsyncIterator[Way]:
    condition = Condition.UP if up else Condition.DOWN
    servers = [Server(ServerSpec(f"s{n}", Address(port=port), "m", keep_idle=60.0), condition) for n, port in enumerate(ports)]
    made = Way(servers, Deadlines(), Timeouts(**limits))

    async def clock() -> None:
        while True:
            await asyncio.sleep(tick)
            made.deadlines.tick()

    ticking = asyncio.create_task(clock())
    try:
        yield made
        made.check()
    finally:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        for server in servers:
            server.retire()


async def respond(talk: Conversation) -> None:
    await talk.write(OK)


async def test_connections_are_used_again() -> None:
    async with scripted(respond) as server, way(server.port) as one:
        for _ in range(20):
            assert (await one.request())[0] == b"ok"
        assert (server.accepted, len(server.requests)) == (1, 20)


async def test_requests_at_once_have_a_connection_each_and_leave_them_for_others() -> None:
    async with scripted(respond) as server, way(server.port) as one:
        for _ in range(3):
            await asyncio.gather(*(one.request() for _ in range(5)))
        assert (server.accepted, len(server.requests)) == (5, 15)


# Trying again


def closes_idle_connections(ran: list[bytes]) -> Callable[[Conversation], Awaitable[None]]:
    """A server whose idle limit is hit as the second request of a connection arrives."""
    seen: set[int] = set()

    async def script(talk: Conversation) -> None:
        if id(talk.writer) in seen:
            talk.writer.close()
            return
        seen.add(id(talk.writer))
        ran.append(talk.request.body)
        await talk.write(OK)

    return script


async def test_a_stale_connection_is_tried_again_once_on_a_fresh_one() -> None:
    ran: list[bytes] = []
    async with scripted(closes_idle_connections(ran)) as server, way(server.port) as one:
        await asyncio.gather(one.request(), one.request())  # two are parked now, and both are stale
        body, attempt = await one.request()
        assert (body, attempt.retries, [type(error) for error in attempt.failures]) == (b"ok", 1, [StaleConnection])
        assert len(ran) == 3, "it ran once"
        assert one.servers[0].available, "a stale connection says nothing about the server"


async def test_a_stale_connection_is_tried_again_at_another_server() -> None:
    ran: list[bytes] = []
    async with scripted(closes_idle_connections(ran)) as a, scripted(respond) as b, way(a.port, b.port) as one:
        tried = [(await one.request())[1] for _ in range(4)]
        assert [(last(attempt), attempt.retries) for attempt in tried if attempt.failures] == [("s1", 1)]
        assert (len(ran), len(b.requests)) == (1, 3)


@pytest.mark.parametrize("iterations", range(5))
def test_a_connection_that_is_closed_while_it_is_opened_is_a_failure_to_connect(iterations: int) -> None:
    """A dying server resets its accepted connections, some iterations of the worker's event loop after they were established."""

    async def scenario() -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:

            async def die() -> None:
                for _ in range(iterations):
                    await asyncio.sleep(0)
                listener.close()

            async with way(listener.getsockname()[1]) as one:
                error, _ = await asyncio.gather(one.request(), die(), return_exceptions=True)
        assert isinstance(error, ConnectFailed | Disconnected), error

    uvloop.run(scenario())


async def test_a_fresh_connection_that_is_closed_is_not_tried_again() -> None:
    async def script(talk: Conversation) -> None:
        talk.writer.close()

    async with scripted(script) as server, scripted(respond) as other, way(server.port, other.port) as one:
        one.servers[1].condition = Condition.DOWN
        with one.attempt() as attempt, pytest.raises(Disconnected):
            await attempt.send(compose)
        assert (attempt.retries, len(server.requests), len(other.requests)) == (0, 1, 0)


async def test_a_request_truncated_on_a_reused_connection_is_not_sent_again() -> None:
    async def script(talk: Conversation) -> None:
        await talk.write(OK if talk.number == 1 else OK[:20])
        if talk.number > 1:
            talk.writer.close()

    async with scripted(script) as server, way(server.port) as one:
        await one.request()
        with pytest.raises(Disconnected):
            await one.request()
        assert len(server.requests) == 2


async def close_early(talk: Conversation) -> None:
    await talk.write(talk.request.body and CHUNKED)  # headers alone: vLLM sends them before its engine starts
    talk.writer.close()


async def test_a_request_whose_connection_was_lost_is_sent_to_another_server() -> None:
    async with scripted(close_early) as dies, scripted(respond) as other, way(other.port, dies.port) as one:
        body, attempt = await one.request(resends=True)
        assert (body, attempt.retries, [type(error) for error in attempt.failures]) == (b"ok", 1, [Disconnected])
        assert attempt.may_have_run
        assert (len(dies.requests), other.requests[0].body) == (1, b"?")


async def test_a_request_runs_once_unless_its_caller_lets_it_run_twice() -> None:
    async with scripted(close_early) as dies, scripted(respond) as other, way(other.port, dies.port) as one:
        with Attempt(one.pool, one.timeouts, one.deadlines) as attempt, pytest.raises(Disconnected):
            await attempt.send(compose)
        assert (len(dies.requests), len(other.requests)) == (1, 0)


async def test_a_request_that_kills_servers_reaches_two_of_them() -> None:
    async with scripted(close_early) as a, scripted(close_early) as b, scripted(close_early) as c, way(a.port, b.port, c.port) as one:
        with one.attempt(resends=True) as attempt, pytest.raises(Disconnected):
            await attempt.send(compose)
        assert (attempt.retries, len(attempt.failures)) == (1, 2)
        assert sorted(len(each.requests) for each in (a, b, c)) == [0, 1, 1]


@pytest.mark.parametrize("state", ["down", "full", "ejected"])
async def test_a_request_that_may_have_run_never_returns_to_its_server(state: str) -> None:
    async def script(talk: Conversation) -> None:
        if state == "down":
            spare.condition = Condition.DOWN
        elif state == "full":
            spare.set_limit(0)
        else:
            spare.record_failure(ConnectFailed("s0", "refused"))
        talk.writer.close()

    async with scripted(script) as dies, scripted(respond) as other, way(other.port, dies.port) as one:
        spare = one.servers[0]
        with one.attempt(resends=True) as attempt, pytest.raises(Disconnected):
            await attempt.send(compose)
        assert (attempt.retries, len(dies.requests), len(other.requests)) == (0, 1, 0)


async def test_lost_requests_are_sent_again_for_a_share_of_the_traffic() -> None:
    async with scripted(close_early) as dies, scripted(respond) as other, way(other.port, dies.port) as one:
        done = await asyncio.gather(*(one.request(resends=True) for _ in range(200)), return_exceptions=True)
        failed = [each for each in done if isinstance(each, BaseException)]
        assert {type(error) for error in failed} == {Disconnected}
        lost = 100  # half of them take their turn with the dying one, all at the same moment
        assert len(failed) + len(other.requests) == 200 and lost / 10 < len(failed) < lost - MINIMUM / 2


async def test_only_lost_connections_let_a_request_run_twice() -> None:
    async def invalid(talk: Conversation) -> None:
        await talk.write(b"SSH-2.0-nothing\r\n\r\n")

    async with scripted(respond) as other, scripted(pause) as slow, scripted(invalid) as bad:
        for server, kind in ((slow, FirstByteTimeout), (bad, BadResponse)):
            async with way(other.port, server.port, first_byte=0.1) as one:
                with one.attempt(resends=True) as attempt, pytest.raises(kind):
                    await attempt.send(compose)
                assert attempt.may_have_run
        assert not other.requests


@pytest.mark.parametrize("kind", [Moved, Unresponsive])
async def test_a_request_that_waits_for_its_first_byte_can_be_moved_once(kind: type[UpstreamError]) -> None:
    async with scripted(respond) as other, scripted(pause) as first, way(other.port, first.port) as one:
        hung = one.servers[1]
        sending = asyncio.create_task(one.request(resends=True))
        await until(lambda: hung.movable)
        [response] = hung.movable
        response.fail(kind("s1", "moved"))
        body, attempt = await sending
        assert (body, attempt.retries, hung.movable) == (b"ok", 1, set())
    async with scripted(pause) as other, way(other.port, other.port) as one:
        with one.attempt(resends=True) as attempt:
            attempt.tried.append(one.servers[1])
            sending = asyncio.create_task(one.request())
            sending_again = asyncio.create_task(attempt.send(compose))
            await until(lambda: len(other.requests) == 2 and all(server.waited_for for server in one.servers if server.in_flight))
            assert not any(server.movable for server in one.servers), "a second server, or a request that may not run twice"
            for task in (sending, sending_again):
                task.cancel()
            await asyncio.gather(sending, sending_again, return_exceptions=True)


async def test_a_request_that_can_be_moved_leaves_nothing_if_it_is_cancelled() -> None:
    async with scripted(pause) as first, way(first.port) as one:
        sending = asyncio.create_task(one.request(resends=True))
        await until(lambda: one.servers[0].movable)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        assert not one.servers[0].movable


async def test_an_uploaded_body_is_not_sent_again() -> None:
    async def upload(send: Callable[[bytes, bool], None], drained: Callable[[], Awaitable[bool]]) -> None:
        send(b"", False)

    async with scripted(close_early) as dies, scripted(respond) as other, way(other.port, dies.port) as one:
        with one.attempt(resends=True) as attempt, pytest.raises(Disconnected):
            await attempt.send(compose, upload)
        assert (len(dies.requests), len(other.requests)) == (1, 0)


async def test_a_response_that_has_begun_is_not_requested_again() -> None:
    async def script(talk: Conversation) -> None:
        await talk.write(CHUNKED + b"1\r\no\r\n")
        talk.writer.close()

    async with scripted(script) as dies, scripted(respond) as other, way(other.port, dies.port) as one:
        with pytest.raises(Disconnected):
            await one.request(resends=True)
        assert (len(dies.requests), len(other.requests)) == (1, 0)


async def test_a_refusal_goes_to_another_server_and_is_remembered() -> None:
    with refusing() as closed:
        async with scripted(respond) as server, way(closed, server.port) as one:
            tried = [(await one.request())[1] for _ in range(6)]
            assert sum(attempt.retries for attempt in tried) == 1
            assert [type(error) for attempt in tried for error in attempt.failures] == [ConnectFailed]
            assert {last(attempt) for attempt in tried} == {"s1"}


async def test_a_refusal_with_no_other_server_is_final() -> None:
    with refusing() as closed:
        async with way(closed) as one:
            with one.attempt() as attempt, pytest.raises(ConnectFailed):
                await attempt.send(compose)
            assert (attempt.retries, last(attempt)) == (0, "s0")
        async with way(closed, closed, closed) as many:
            with many.attempt() as attempt, pytest.raises(ConnectFailed):
                await attempt.send(compose)
            assert (attempt.retries, len(attempt.failures)) == (1, 2)


async def test_refusals_are_tried_again_for_a_share_of_the_traffic() -> None:
    """Many requests reach a server that has exited, before a probe detects it: requests beyond the retry share fail immediately."""
    with refusing() as closed:
        async with scripted(respond) as server, way(closed, server.port) as one:
            done = await asyncio.gather(*(one.request() for _ in range(60)), return_exceptions=True)
            failed = [each for each in done if isinstance(each, BaseException)]
            assert {type(error) for error in failed} == {ConnectFailed}
            refused = 30  # half of them take their turn with the closed one, all at the same moment
            assert len(failed) >= refused - MINIMUM - (60 + refused) * SHARE and len(server.requests) == 60 - len(failed)
            assert (await one.request())[0] == b"ok", "it is passed over by now"


async def test_a_success_resets_the_failures() -> None:
    dies = True

    async def script(talk: Conversation) -> None:
        if dies:
            talk.writer.close()
        else:
            await talk.write(OK)

    async with scripted(script) as server, way(server.port) as one:
        (only,) = one.servers
        for _ in range(3):
            with pytest.raises(Disconnected):
                await one.request()
        assert (only.available, only.ejected_cells[0]) == (False, 1)
        dies = False
        assert (await one.request())[0] == b"ok", "the last one that is up is used all the same"
        assert (only.available, only.ejected_cells[0], only.recently_failed) == (True, 0, False)


async def test_a_server_that_keeps_failing_is_ejected_and_tried_again_later() -> None:
    async def dies(talk: Conversation) -> None:
        talk.writer.close()

    async with scripted(dies) as bad, scripted(respond) as good, way(bad.port, good.port) as one:
        first, _ = one.servers
        outcomes = await asyncio.gather(*(one.request() for _ in range(40)), return_exceptions=True)
        assert sum(isinstance(each, Disconnected) for each in outcomes) == len(bad.requests) and not first.available
        before = len(bad.requests)
        for _ in range(10):
            await one.request()
        assert len(bad.requests) == before
        await until(lambda: first.available)
        first.expire()
        later = [await timed(one) for _ in range(4)]
        assert len(bad.requests) == before + 1 and [type(each) for each in later].count(Disconnected) == 1, "one is enough now"


async def test_a_server_that_comes_up_again_has_no_failures() -> None:
    with refusing() as closed:
        async with way(closed) as one:
            (only,) = one.servers
            assert isinstance(await timed(one), ConnectFailed)
            seen = [only.available]
            for condition in (Condition.UP, Condition.DOWN, Condition.UP):
                only.condition = condition
                seen.append(only.available)
            assert seen == [False, False, False, True], "its being up is no news to one that was up"


async def test_a_lack_of_file_descriptors_is_not_a_failure_of_the_server() -> None:
    async with scripted(respond) as server, way(server.port, server.port) as one:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with one.attempt() as attempt, pytest.raises(LocalLimit):
                await attempt.send(compose)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (attempt.retries, attempt.failures) == (0, []), "another server would not have helped"
        assert all(each.available for each in one.servers)
        assert (await one.request())[0] == b"ok"


async def test_no_server() -> None:
    async with way(1, up=False) as one:
        with one.attempt() as attempt, pytest.raises(NoServerError):
            await attempt.send(compose)
        assert (last(attempt), attempt.retries, attempt.failures) == (None, 0, [])


# Deadlines: short ones, with generous bounds


async def timed(one: Way) -> BaseException | None:
    async with asyncio.timeout(10):
        try:
            await one.request()
        except Exception as error:
            return error
    return None


async def test_the_connect_deadline() -> None:
    with silent() as port:
        async with way(port, connect=0.1) as one:
            assert type(await timed(one)) is ConnectTimeout
        async with scripted(respond) as server, way(port, server.port, connect=2.0) as two:
            for _ in range(2):
                assert (await two.request())[0] == b"ok", "another server takes it"


async def pause(talk: Conversation) -> None:
    await talk.closed_by_peer()


async def test_the_first_byte_deadline() -> None:
    async with scripted(pause) as server, way(server.port, first_byte=0.1) as one:
        assert type(await timed(one)) is FirstByteTimeout
        await until(lambda: server.open == 0)


async def test_headers_alone_are_not_the_first_byte() -> None:
    async def script(talk: Conversation) -> None:
        await talk.write(CHUNKED)
        await talk.closed_by_peer()

    async with scripted(script) as server, way(server.port, first_byte=0.3, idle=0.05) as one:
        assert type(await timed(one)) is FirstByteTimeout
        await until(lambda: server.open == 0)


@pytest.mark.parametrize("sent", [CHUNKED + b"2\r\nok\r\n", OK[:-1]])
async def test_the_idle_deadline(sent: bytes) -> None:
    async def script(talk: Conversation) -> None:
        await talk.write(sent)
        await talk.closed_by_peer()

    async with scripted(script) as server, way(server.port, idle=0.1) as one:
        assert type(await timed(one)) is IdleTimeout
        await until(lambda: server.open == 0)


async def test_bytes_extend_the_idle_timeout() -> None:
    more = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.write(CHUNKED + b"1\r\nx\r\n")
        await more.wait()
        await talk.chunk(b"y")
        await talk.closed_by_peer()

    async with scripted(script) as server, way(server.port, tick=FOR_EVER, idle=100) as one:
        with one.attempt() as attempt:
            response = await attempt.send(compose)
            first, came = response.last_byte_at, list[bytes]()
            response.stream_to(came.append)
            await asyncio.sleep(0.05)
            more.set()
            await until(lambda: b"".join(came) == b"xy")
            assert response.last_byte_at > first + 0.02
            response.check(first + 100.01)
            assert response.error is None
            response.check(response.last_byte_at + 100.01)
            with pytest.raises(IdleTimeout):
                await response.wait_complete()


async def drips(talk: Conversation) -> None:
    await talk.write(CHUNKED)
    for _ in range(1000):
        await talk.chunk(b"x")
        await asyncio.sleep(0.01)
    await talk.end_stream()


async def test_bytes_do_not_extend_the_total_timeout() -> None:
    async with scripted(drips) as server, way(server.port, total=0.2) as one:
        assert type(await timed(one)) is TotalTimeout
        await until(lambda: server.open == 0)


async def test_a_pause_does_not_count_as_silence() -> None:
    async def script(talk: Conversation) -> None:
        await talk.write(CHUNKED + b"2\r\nok\r\n")
        await talk.closed_by_peer()

    async with scripted(script) as server, way(server.port, tick=FOR_EVER, idle=100) as one:
        with one.attempt() as attempt:
            response = await attempt.send(compose)
            response.stream_to(lambda _: None)
            response.pause()
            response.check(response.last_byte_at + 1000)
            assert response.error is None
            response.resume()
            response.check(response.last_byte_at + 99)
            assert response.error is None, "the time begins anew"
            response.check(response.last_byte_at + 101)
            with pytest.raises(IdleTimeout):
                await response.wait_complete()


# Answers


async def test_the_end_of_the_with_block_closes_an_incomplete_response() -> None:
    async def script(talk: Conversation) -> None:
        await talk.write(CHUNKED + b"2\r\nok\r\n")
        await talk.closed_by_peer()

    async with scripted(script) as server, way(server.port) as one:
        for error in (None, ValueError):
            try:
                with one.attempt() as attempt:
                    await attempt.send(compose)
                    assert one.servers[0].in_flight == 1
                    if error:
                        raise error
            except ValueError:
                pass
            await until(lambda: server.open == 0)


async def test_a_cancelled_attempt_releases_everything() -> None:
    async with scripted(pause) as server, way(server.port) as one:
        tasks = [asyncio.create_task(one.request()) for _ in range(20)]
        for number, task in enumerate(tasks):
            if number % 4 == 0:
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        one.check()
        await until(lambda: server.open == 0)


@pytest.mark.parametrize("iterations", range(6))
async def test_a_connection_that_opens_while_its_request_is_cancelled_is_closed(iterations: int) -> None:
    async with scripted(pause) as server, way(server.port) as one:
        task = asyncio.create_task(one.request())
        while not server.accepted:  # noqa: ASYNC110  # its iterations are counted from here
            await asyncio.sleep(0)
        for _ in range(iterations):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: server.open == 0)


async def test_an_error_in_composing_releases_everything() -> None:
    def fails(_: Server) -> tuple[bytes, bytes]:
        raise ZeroDivisionError

    async with scripted(respond) as server, way(server.port) as one:
        with one.attempt() as attempt, pytest.raises(ZeroDivisionError):
            await attempt.send(fails)
        one.check()
        await until(lambda: server.open == 0)


async def test_read_body_returns_the_first_bytes() -> None:
    async def script(talk: Conversation) -> None:
        await talk.respond(b"0123456789" * 100_000)

    async with scripted(script) as server, way(server.port) as one:
        with one.attempt() as attempt:
            response = await attempt.send(compose)
            assert await response.read_body(15) == b"012345678901234"
        assert server.accepted == 1


async def test_read_body_returns_the_first_bytes_of_a_response_that_has_arrived() -> None:
    async with scripted(respond) as server, way(server.port) as one:
        for _ in range(2):
            with one.attempt() as attempt:
                response = await attempt.send(compose)
                await until(lambda response=response: response.complete)
                assert await response.read_body(1) == b"o"
        assert server.accepted == 1, "its connection was not closed"


class Flood:
    """A server that sends as much as it can; ``sent`` is what it got rid of."""

    def __init__(self) -> None:
        self.sent = 0

    async def __call__(self, talk: Conversation) -> None:
        talk.writer.transport.set_write_buffer_limits(0)
        await talk.write(CHUNKED)
        while True:
            await talk.chunk(b"x" * 65536)
            self.sent += 65536


async def blocked(flood: Flood) -> int:
    """Return the number of bytes sent when the server is blocked."""
    before = -1
    async with asyncio.timeout(30):
        while flood.sent != before:
            before = flood.sent
            await asyncio.sleep(0.2)
    return before


async def test_a_response_that_is_not_read_pauses_its_server() -> None:
    flood = Flood()
    async with scripted(flood) as server, way(server.port) as one:
        with one.attempt() as attempt:
            response = await attempt.send(compose)
            assert await blocked(flood) < 32 << 20, "what the sockets hold, and a little"
            assert sum(map(len, response.pending)) < 2 << 20
            taken = 0

            def take(data: bytes) -> None:
                nonlocal taken
                taken += len(data)

            response.stream_to(take)
            await until(lambda: taken > 64 << 20)
            response.pause()
            held = await blocked(flood) - taken
            assert held < 32 << 20


async def test_a_complete_response_does_not_touch_its_connection() -> None:
    """Its client may be slow for long after: what it says then must not meet the next request on the connection."""
    flood = Flood()

    async def script(talk: Conversation) -> None:
        await (respond(talk) if talk.number < 3 else flood(talk))

    async with scripted(script) as server, way(server.port) as one:
        with one.attempt() as first:
            response = await first.send(compose)
            response.stream_to(lambda _: response.pause())
            await response.wait_complete()
            response.pause()
            async with asyncio.timeout(5):
                assert (await one.request())[0] == b"ok"
            with one.attempt() as second:
                streaming = await second.send(compose)
                streaming.stream_to(lambda _: streaming.pause())
                response.resume()
                assert await blocked(flood) < 32 << 20
        assert server.accepted == 1


# Uploads


def upload_of(pieces: int, meanwhile: Callable[[], None] = lambda: None) -> Upload:
    async def upload(send: Callable[[bytes, bool], None], drained: Callable[[], Awaitable[bool]]) -> None:
        for _ in range(pieces):
            send(b"x" * 65536, True)
            if not await drained():
                return
            await asyncio.sleep(0)
            meanwhile()
        send(b"", False)

    return upload


def compose_upload(pieces: int) -> Callable[[Server], tuple[bytes, bytes]]:
    return lambda _: (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (pieces * 65536 + 1), b"?")


async def test_an_upload_reaches_the_server() -> None:
    async with scripted(respond) as server, way(server.port) as one:
        with one.attempt() as attempt:
            response = await attempt.send(compose_upload(50), upload_of(50))
            assert await response.read_body(10) == b"ok"
        assert server.requests[0].body == b"?" + b"x" * 65536 * 50
        assert len(one.servers[0]._idle) == 1


async def test_an_upload_waits_for_a_server_that_does_not_read() -> None:
    sent = 0

    async def upload(send: Callable[[bytes, bool], None], drained: Callable[[], Awaitable[bool]]) -> None:
        nonlocal sent
        while await drained():
            send(b"x" * 65536, True)
            sent += 65536

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await release.wait()
        writer.transport.abort()

    release = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, way(server.sockets[0].getsockname()[1], first_byte=0.4) as one:
        with one.attempt() as attempt:
            async with asyncio.timeout(10):
                with pytest.raises(FirstByteTimeout):
                    await attempt.send(compose_upload(1 << 20), upload)
        assert 0 < sent < 32 << 20
        release.set()


async def test_a_slow_client_is_not_its_servers_fault() -> None:
    async with scripted(respond) as server, way(server.port, tick=FOR_EVER, first_byte=100) as one:

        def later() -> None:
            for each in tuple(one.deadlines._watched):
                each.check(monotonic() + 200)

        with one.attempt() as attempt:
            response = await attempt.send(compose_upload(3), upload_of(3, later))
            assert await response.read_body(10) == b"ok"


async def test_a_response_before_the_end_of_the_upload_ends_it() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, way(server.sockets[0].getsockname()[1]) as one:
        with one.attempt() as attempt:
            async with asyncio.timeout(10):
                response: UpstreamResponse = await attempt.send(compose_upload(1 << 20), upload_of(1 << 20))
            assert (response.status, await response.read_body(10)) == (413, b"no")
        assert len(one.servers[0]._idle) == 0, "half a request is still on it"


async def test_a_server_that_exits_during_an_upload_ends_it() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, scripted(respond) as other, way(server.sockets[0].getsockname()[1], other.port) as one:
        one.servers[1].record_failure(ConnectFailed("s1", "refused"))
        with one.attempt() as attempt:
            async with asyncio.timeout(10):
                with pytest.raises(Disconnected):
                    await attempt.send(compose_upload(1 << 20), upload_of(1 << 20))
        assert other.requests == []


# The bytes of a response, and its deadlines, at times that the test chooses


class Stepwise:
    """A server that sends the headers of a stream, then one chunk for each text that the test adds. An empty text ends the stream."""

    def __init__(self, kind: bytes = b"text/event-stream") -> None:
        self._headers = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % kind
        self.texts: asyncio.Queue[bytes] = asyncio.Queue()

    async def __call__(self, talk: Conversation) -> None:
        await talk.write(self._headers)
        sending, gone = asyncio.create_task(self._send(talk)), asyncio.create_task(talk.closed_by_peer())
        await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        for task in (sending, gone):
            task.cancel()
        await asyncio.gather(sending, gone, return_exceptions=True)
        if sending.cancelled():
            talk.writer.close()
        else:
            await talk.end_stream()

    async def _send(self, talk: Conversation) -> None:
        while text := await self.texts.get():
            await talk.chunk(text)


def composer(size: int) -> Callable[[Server], tuple[bytes, bytes]]:
    return lambda _: (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size, b"?" * size)


@asynccontextmanager
async def waiting(one: Way, size: int = 1) -> AsyncIterator[tuple[Attempt, UpstreamResponse, asyncio.Task[UpstreamResponse]]]:
    """Send a request, and yield its response when the server has sent the headers and no body."""
    with one.attempt() as attempt:
        sending = asyncio.create_task(attempt.send(composer(size)))
        await until(lambda: any(watched.status for watched in one.deadlines._watched if isinstance(watched, UpstreamResponse)))
        (response,) = one.deadlines._watched
        assert isinstance(response, UpstreamResponse)
        try:
            yield attempt, response, sending
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


@asynccontextmanager
async def begun(first: bytes) -> AsyncIterator[tuple[Scripted, Stepwise, UpstreamResponse]]:
    """Yield a server, its script, and a response whose first chunk was sent."""
    script = Stepwise()
    script.texts.put_nowait(first)
    async with scripted(script) as server, way(server.port) as one:
        with one.attempt() as attempt:
            yield server, script, await attempt.send(compose)


async def test_the_bytes_that_servers_wait_for_are_reported() -> None:
    script = Stepwise()
    async with scripted(script) as server, way(server.port, tick=FOR_EVER) as one:
        (only,) = one.servers
        assert only.take_progress() is None
        async with waiting(one, 8192) as (_, response, sending):
            response.check(monotonic())
            progress = only.take_progress()
            assert progress is not None and progress.last_byte_at == 0.0 and progress.prefill > 1
            assert only.take_progress() is None, "nothing was checked since"
            for _ in range(2):
                response.check(monotonic())
            twice = only.take_progress()
            assert twice is not None and twice.prefill == 2 * progress.prefill, "the bytes of each check are added"
            script.texts.put_nowait(b"data: a\n\n")
            await sending
            response.check(monotonic())
            then = only.take_progress()
            assert then is not None and (then.last_byte_at, then.prefill) == (response.last_byte_at, 0.0)


@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/json"])
async def test_the_speed_of_the_prefill_is_learned_once_from_each_stream(kind: bytes) -> None:
    script = Stepwise(kind)
    size = 1 << 20

    async def predicted() -> float:
        async with waiting(one, size) as (_, response, _):
            response.check(monotonic())
            progress = only.take_progress()
            assert progress is not None
            return progress.prefill

    async with scripted(script) as server, way(server.port, tick=FOR_EVER) as one:
        (only,) = one.servers
        before = await predicted()
        script.texts = asyncio.Queue()
        async with waiting(one, size) as (_, response, sending):
            script.texts.put_nowait(b"data: a\n\n")
            await sending
            for _ in range(3):
                response.check(monotonic())
            seconds = max(response.last_byte_at - response.sent_at, TICK)
        script.texts = asyncio.Queue()
        speed = size / before
        learned = speed + 0.2 * (max(size / seconds, 500.0) - speed) if kind.startswith(b"text") else speed
        assert await predicted() == pytest.approx(size / learned)


async def test_a_response_that_its_client_does_not_read_counts_as_progress() -> None:
    script = Stepwise()
    script.texts.put_nowait(b"data: a\n\n")
    async with scripted(script) as server, way(server.port, tick=FOR_EVER) as one:
        with one.attempt() as attempt:
            response = await attempt.send(compose)
            response.pause()
            response.check(response.last_byte_at + 50)
            assert one.servers[0].last_byte_at == response.last_byte_at + 50


async def test_an_upload_counts_as_progress() -> None:
    async with scripted(respond) as server, way(server.port, tick=FOR_EVER) as one:
        later = monotonic() + 50

        def check() -> None:
            for each in tuple(one.deadlines._watched):
                each.check(later)

        with one.attempt() as attempt:
            response = await attempt.send(compose_upload(1), upload_of(1, check))
            assert await response.read_body(10) == b"ok"
        assert one.servers[0].last_byte_at == later


def _has_failed(response: UpstreamResponse) -> bool:
    """A function, because a type checker assumes that an attribute that was None stays None."""
    return response.error is not None


async def test_a_response_before_its_deadlines_is_left_alone() -> None:
    script = Stepwise()
    async with (
        scripted(script) as server,
        way(server.port, tick=FOR_EVER, first_byte=100, idle=100, total=1000) as one,
        waiting(one) as (_, response, sending),
    ):
        response.check(response.sent_at + 99)
        assert not _has_failed(response)
        script.texts.put_nowait(b"x")
        await sending
        response.check(response.last_byte_at + 99)
        assert not _has_failed(response)
        response.check(response.sent_at + 1001)
        assert type(response.error) is TotalTimeout
        response.check(response.sent_at + 5000)
        with pytest.raises(TotalTimeout):
            await response.wait_complete()
        await until(lambda: server.open == 0)


async def test_a_complete_response_has_no_deadline() -> None:
    async with scripted(respond) as server, way(server.port, tick=FOR_EVER) as one:
        with one.attempt() as attempt:
            response = await attempt.send(compose)
            await response.wait_complete()
            response.check(response.sent_at + 1e6)
            assert response.error is None
        assert one.servers[0].take_progress() is None


async def test_the_deadlines_of_a_response_begin_after_its_upload() -> None:
    arrived = asyncio.Event()
    sent_at = list[float]()

    async def script(talk: Conversation) -> None:
        arrived.set()
        await talk.closed_by_peer()

    async def upload(send: Callable[[bytes, bool], None], drained: Callable[[], Awaitable[bool]]) -> None:
        (response,) = one.deadlines._watched
        assert isinstance(response, UpstreamResponse)
        await asyncio.sleep(0.01)
        before = monotonic()
        send(b"x" * 65536, False)
        sent_at.extend((before, response.sent_at))
        assert await drained()
        await asyncio.sleep(0.01)
        sent_at.append(monotonic())

    async with scripted(script) as server, way(server.port, tick=FOR_EVER, first_byte=100) as one:
        with one.attempt() as attempt:
            sending = asyncio.create_task(attempt.send(compose_upload(1), upload))
            await arrived.wait()
            await until(lambda: len(sent_at) == 3)
            (response,) = one.deadlines._watched
            assert isinstance(response, UpstreamResponse)
            before, sent, ended = sent_at
            assert before <= sent, "each piece extends the total timeout"
            await until(lambda: response.sent_at >= ended)
            response.check(response.sent_at + 101)
            with pytest.raises(FirstByteTimeout):
                await sending


async def test_read_body_returns_what_has_arrived_at_its_timeout() -> None:
    script = Stepwise()
    script.texts.put_nowait(b"abc")
    async with scripted(script) as server, way(server.port, tick=FOR_EVER) as one:
        with one.attempt() as attempt:
            response = await attempt.send(compose)
            reading = asyncio.create_task(response.read_body(100, timeout=50))
            await asyncio.sleep(0)
            response.check(monotonic() + 49)
            assert not response.complete
            response.check(monotonic() + 51)
            assert await reading == b"abc"
            await until(lambda: server.open == 0)


async def test_read_body_ends_with_the_byte_that_fills_it() -> None:
    async with begun(b"0123456789") as (server, script, response):
        reading = asyncio.create_task(response.read_body(15))
        await asyncio.sleep(0)
        script.texts.put_nowait(b"01234")
        async with asyncio.timeout(10):
            assert await reading == b"012345678901234"
        await until(lambda: server.open == 0)
    async with begun(b"0123456789") as (_, script, response):
        reading = asyncio.create_task(response.read_body(15))
        await asyncio.sleep(0)
        script.texts.put_nowait(b"0123456789")
        async with asyncio.timeout(10):
            assert await reading == b"012345678901234"


async def test_the_bytes_of_one_read_are_one_piece() -> None:
    async with begun(b"a") as (_, _, response):
        assert (response.wants_read_events, response.pending) == (False, [b"a"])
        taken = list[bytes]()
        response.stream_to(taken.append)
        assert response.wants_read_events
        for pieces in ((b"b", b"c", b"d"), (b"e",), (b"f", b"g")):
            for piece in pieces:
                response.on_body(piece)
            response.on_read()
        response.on_read()
        assert taken == [b"a", b"bcd", b"e", b"fg"]


@pytest.mark.parametrize("fails", [True, False])
async def test_the_last_bytes_reach_the_reader_before_the_end(fails: bool) -> None:
    async with begun(b"a") as (_, _, response):
        taken = list[bytes]()
        response.stream_to(taken.append)
        response.on_body(b"b")
        if fails:
            response.on_failure(Disconnected("s0", "closed"))
        else:
            response.on_end()
        assert taken == [b"a", b"b"]
        last = response.last_byte_at
        assert last > 0


async def test_an_error_that_the_reader_finds_in_the_last_bytes_is_raised() -> None:
    async with begun(b"a") as (_, _, response):
        response.stream_to(lambda data: response.fail(BadResponse("s0", "no event")) if data == b"b" else None)
        response.on_body(b"b")
        response.on_end()
        with pytest.raises(BadResponse):
            await response.wait_complete()


async def test_a_body_without_bytes_has_a_time() -> None:
    async def script(talk: Conversation) -> None:
        await talk.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    async with scripted(script) as server, way(server.port) as one:
        before = monotonic()
        with one.attempt() as attempt:
            response = await attempt.send(compose)
            assert response.complete and response.last_byte_at >= before


async def test_the_end_of_a_body_is_not_its_last_byte() -> None:
    async with begun(b"a") as (_, script, response):
        last = response.last_byte_at
        await asyncio.sleep(0.01)
        script.texts.put_nowait(b"")
        await response.wait_complete()
        assert response.last_byte_at == last


@pytest.mark.parametrize(
    ("line", "expected"), [(b"", b"application/json"), (b"content-type: text/plain\r\n", b"text/plain")], ids=["without", "with"]
)
async def test_the_content_type_of_a_response(line: bytes, expected: bytes) -> None:
    async def script(talk: Conversation) -> None:
        await talk.write(b"HTTP/1.1 200 OK\r\n%bcontent-length: 2\r\n\r\nok" % line)

    async with scripted(script) as server, way(server.port) as one:
        with one.attempt() as attempt:
            assert (await attempt.send(compose)).content_type == expected


async def test_only_a_pause_is_resumed() -> None:
    async with begun(b"a") as (_, _, response):
        last = response.last_byte_at
        await asyncio.sleep(0.01)
        response.stream_to(lambda _: None)
        assert response.last_byte_at == last, "it was not paused"
        response.pause()
        response.resume()
        assert response.last_byte_at >= last + 0.01 and not response.paused


async def test_a_response_that_fails_closes_its_connection_at_once() -> None:
    async with begun(b"a") as (server, _, response):
        response.fail(Disconnected("s0", "an event is too long"))
        with pytest.raises(Disconnected, match="too long"):
            await response.wait_complete()
        await until(lambda: server.open == 0)


async def test_a_stream_limits_how_far_its_server_is_ahead() -> None:
    async with begun(b"a") as (_, script, response):
        wide = receive_buffer(response)
        response.keep_close()
        assert receive_buffer(response) < wide
        script.texts.put_nowait(b"")
        await response.wait_complete()
    async with scripted(respond) as server, way(server.port) as one:
        with one.attempt() as attempt:
            response = await attempt.send(compose)
            await response.wait_complete()
            wide = receive_buffer(response)
            response.keep_close()
            assert receive_buffer(response) == wide, "its connection may carry another response"


def receive_buffer(response: UpstreamResponse) -> int:
    transport = response._connection._transport
    assert transport is not None
    size = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    assert isinstance(size, int)
    return size


async def test_reads_are_diverted_while_a_body_in_chunks_arrives() -> None:
    read = list[bytes]()

    def make_reader(connection: Connection, chunks: ChunkedDecoder) -> Callable[[bytes], None]:
        def reader(data: bytes) -> None:
            read.append(data)
            connection.data_received(data)

        return reader

    script = Stepwise()
    script.texts.put_nowait(b"a")
    async with scripted(script) as server, way(server.port) as one:
        with one.attempt() as attempt:
            response = await attempt.send(compose)
            response.divert(make_reader)
            script.texts.put_nowait(b"b")
            await until(lambda: bool(read))
            script.texts.put_nowait(b"")
            await response.wait_complete()
            assert b"".join(response.pending) == b"ab" and b"".join(read).startswith(b"1\r\nb\r\n")
        script.texts.put_nowait(b"c")
        with one.attempt() as attempt:
            response = await attempt.send(compose)
            response.fail(Disconnected("s0", "closed"))
            response.divert(make_reader)
        assert not response._connection._diverted
        script.texts = asyncio.Queue()
        script.texts.put_nowait(b"d")
        script.texts.put_nowait(b"")
        with one.attempt() as attempt:
            response = await attempt.send(compose)
            await response.wait_complete()
            response.divert(make_reader)
            assert not response._connection._diverted, "its connection may carry another response"
    async with scripted(pauses_inside) as server, way(server.port) as one:
        with one.attempt() as attempt:
            response = await attempt.send(compose)
            response.divert(make_reader)
            assert not response._connection._diverted, "its length is known"


async def pauses_inside(talk: Conversation) -> None:
    await talk.write(OK[:-1])
    await talk.closed_by_peer()


async def test_a_response_is_freed_with_its_reader() -> None:
    """Without the garbage collector: each request would leave work for it."""

    class Reader:
        def __init__(self, response: UpstreamResponse) -> None:
            self.response = response

        def __call__(self, data: bytes) -> None: ...

    async with scripted(respond) as server, way(server.port) as one:
        gc.disable()
        try:
            with one.attempt() as attempt:
                response = await attempt.send(compose)
                reader = Reader(response)
                response.stream_to(reader)
                await response.wait_complete()
            freed = weakref.ref(reader)
            del reader, response, attempt
            assert freed() is None
        finally:
            gc.enable()


# Recorded by an attempt


async def test_a_large_body_reaches_the_server() -> None:
    async with scripted(respond) as server, way(server.port) as one:
        for size in (100, 16 * 1024, 300_000):
            with one.attempt() as attempt:
                response = await attempt.send(composer(size))
                assert (await response.read_body(10), response.size) == (b"ok", size)
        assert [len(each.body) for each in server.requests] == [100, 16 * 1024, 300_000]
        assert server.accepted == 1


@pytest.mark.parametrize("reported", [True, False])
async def test_a_failure_that_a_complete_response_reports_counts(reported: bool) -> None:
    async with scripted(respond) as server, way(server.port) as one:
        fault = Aborted("s0", "its engine stopped the request")
        with one.attempt() as attempt:
            response = await attempt.send(compose)
            await response.wait_complete()
            response.fault = fault if reported else None
        assert attempt.failures == ([fault] if reported else [])
        assert one.servers[0].recently_failed is reported


async def test_a_failure_that_the_reader_finds_counts() -> None:
    async with scripted(respond) as server, way(server.port) as one:
        (only,) = one.servers
        found = BadResponse("s0", "this is no JSON")
        for error in (ValueError("a defect"), found):
            attempt = one.attempt()

            async def read(attempt: Attempt = attempt, error: Exception = error) -> None:
                with attempt:
                    await (await attempt.send(compose)).wait_complete()
                    raise error

            with pytest.raises(type(error)):
                await read()
            assert attempt.failures == ([found] if error is found else [])
            assert only.recently_failed is (error is found)


async def test_a_response_whose_client_disconnects_is_not_a_success() -> None:
    script = Stepwise()
    script.texts.put_nowait(b"a")
    async with scripted(script) as server, way(server.port) as one:
        (only,) = one.servers
        only.record_failure(Disconnected("s0", "closed"))
        with one.attempt() as attempt:
            await attempt.send(compose)
        assert only.recently_failed
        script.texts = asyncio.Queue()
        script.texts.put_nowait(b"a")
        script.texts.put_nowait(b"")
        with one.attempt() as attempt:
            await (await attempt.send(compose)).wait_complete()
        assert not only.recently_failed


async def test_a_queued_request_uses_the_pool_of_a_reload() -> None:
    async with scripted(respond) as old, scripted(respond) as new, way(old.port) as one, way(new.port) as other:
        with one.attempt() as attempt:
            attempt.use_pool(other.pool)
            await (await attempt.send(compose)).wait_complete()
        assert (len(old.requests), len(new.requests)) == (0, 1)


async def test_a_request_is_composed_at_its_first_attempt() -> None:
    ran: list[bytes] = []
    async with scripted(closes_idle_connections(ran)) as server, way(server.port) as one:
        await one.request()
        before = monotonic()
        with one.attempt() as attempt:
            composed_before = attempt.composed_at
            response = await attempt.send(compose)
            assert composed_before is None and attempt.retries == 1 and attempt.composed_at is not None
            assert before <= attempt.composed_at < response.sent_at


async def test_the_policy_learns_when_the_response_begins() -> None:
    script = Stepwise()
    async with scripted(script) as a, scripted(script) as b, way(a.port, b.port) as two:
        policy: Cost[Server] = Cost(two.servers)
        pool, prompt = Pool(two.servers, policy), Prompt([1, 2, 3], 3 * BLOCK_BYTES, stream=True)
        with Attempt(pool, two.timeouts, two.deadlines, RequestFacts(prompt=prompt)) as attempt:
            sending = asyncio.create_task(attempt.send(compose))
            await until(lambda: len(two.deadlines) == 1)
            assert sum(each.waiting for each in policy.model.servers.values()) > 0
            script.texts.put_nowait(b"a")
            await sending
            assert sum(each.waiting for each in policy.model.servers.values()) == 0


async def test_a_response_is_read_in_pieces_to_its_end() -> None:
    async with begun(b"a") as (_, script, response):
        response.on_body(b"b")
        response.pause()
        assert await response.read_some() == b"ab"
        assert not response.paused
        reading = asyncio.create_task(response.read_some())
        script.texts.put_nowait(b"c")
        assert await reading == b"c"
        with response.movable():
            assert response._server.movable == {response}
        assert not response._server.movable
        script.texts.put_nowait(b"")
        assert await response.read_some() == b""


async def test_an_attempt_avoids_the_servers_of_the_attempt_before() -> None:
    async with scripted(respond) as server, way(server.port, server.port) as one:
        with Attempt(one.pool, one.timeouts, one.deadlines, RequestFacts(affinity_key=1)) as lost:
            await (await lost.send(compose)).wait_complete()
        await one.request()  # the next server by the policy is the lost one
        with one.attempt() as attempt:
            attempt.replace(lost)
            await (await attempt.send(compose)).wait_complete()
        assert last(attempt) != last(lost)
        assert attempt.failures is lost.failures and (attempt.composed_at, attempt.facts) == (lost.composed_at, lost.facts)


@pytest.mark.parametrize(("has_prompt", "is_placed"), [(False, False), (True, False), (True, True)])
async def test_a_preempted_request_is_sent_again_as_if_it_had_not_been_sent(has_prompt: bool, is_placed: bool) -> None:
    script = Stepwise()
    async with scripted(script) as server, way(server.port) as one:
        policy: Cost[Server] = Cost(one.servers)
        pool = Pool(one.servers, policy) if is_placed else one.pool
        facts = RequestFacts(prompt=Prompt([1, 2, 3], 3 * BLOCK_BYTES, stream=True) if has_prompt else None)
        with Attempt(pool, one.timeouts, one.deadlines, facts, resends=True) as attempt:
            for number in range(2):
                assert attempt.preemptible_for(0) is False and attempt.sent_at == 0.0
                sending = asyncio.create_task(attempt.send(compose))
                await until(lambda: attempt.preemptible_for(0))
                assert attempt.sent_at > 0.0
                attempt.preempt()
                with pytest.raises(Preempted):
                    await sending
                assert attempt.preemptions == number + 1 and not attempt.tried and not attempt.failures
                assert sum(each.waiting for each in policy.model.servers.values()) == 0
                one.check()
            sending = asyncio.create_task(attempt.send(compose))
            await until(lambda: one.servers[0].movable)
            assert attempt.preemptible_for(0) is False, "it was preempted twice"
            script.texts.put_nowait(b"a")
            await sending
            assert not one.servers[0].movable


async def test_a_request_whose_response_has_begun_is_not_preempted() -> None:
    async with scripted(respond) as server, way(server.port) as one:
        with one.attempt() as attempt:
            await attempt.send(compose)
            assert not attempt.preemptible_for(0)
