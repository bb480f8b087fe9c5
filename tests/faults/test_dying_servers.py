"""Servers that are killed, frozen or unreachable."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import openai
import orjson
import pytest

from tests.faults.conftest import FULL
from tests.faults.invariants import request_ids, soon_idle, unharmed, whole
from tests.support.ports import refusing, silent
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.running import KEY, model, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, DONE, Client, Reply, chat, client, request, request_once
from tests.upstream.simulator.test_process import running
from upstream.http.deadlines import TICK, Timeouts

STREAMS = 1_000 if FULL else 150
WITHIN = 5.0 if FULL else 30.0
"""Seconds in which every stream has to finish. The smaller size shares its machine with other tests."""
TIMEOUT = 90.0
QUICK = {"tokens": 12, "tokens_per_second": 0}
SIMULATED = {"tokens": 600, "tokens_per_second": 2}


class Stream:
    """The stream of a client. ``first`` is set by its first event; ``ended`` is its end in monotonic seconds."""

    def __init__(self, port: int, **fields: object) -> None:
        self._port = port
        self._body = chat(stream=True, **fields)
        self.first = asyncio.Event()
        self.ended = 0.0

    async def run(self) -> Reply:
        async with client(self._port) as one:
            one.send(request(self._body))
            head = await one.reader.readuntil(b"\r\n\r\n")
            size = await one.reader.readuntil(b"\r\n")
            self.first.set()
            reply = await _rest(one, head, size)
            self.ended = time.monotonic()
            return reply


async def _rest(one: Client, head: bytes, size: bytes) -> Reply:
    """Read the rest of a chunked response. Its headers and its first chunk size have been read."""
    reply = Reply(int(head.split()[1]), {}, b"")
    try:
        while length := int(size, 16):
            reply.body += (await one.reader.readexactly(length + 2))[:-2]
            size = await one.reader.readuntil(b"\r\n")
        await one.reader.readexactly(2)
    except (asyncio.IncompleteReadError, ConnectionError):
        reply.whole = False
    return reply


def _valid(reply: Reply) -> bool:
    """Check for complete events, with the error event as the last one, and then [DONE]."""
    *events, error, done, rest = reply.body.split(b"\n\n")
    error_fields = orjson.loads(error.removeprefix(b"data: ")).get("error", {})
    whole = all(orjson.loads(event.removeprefix(b"data: ")) for event in events)
    return reply.whole and whole and (done, rest) == (DONE.strip(), b"") and error_fields.get("code") == "upstream_disconnected"


@pytest.mark.row(1)
async def test_kill_the_server_under_many_streams(tmp_path: Path, measured: Callable[[str], None]) -> None:
    with gateway(tmp_path, configuration(soon_idle(launched("tiny")))) as one:
        async with whole(one):
            server = one.get("/status").json()["models"][0]["servers"][0]["pid"]
            streams = [Stream(one.data, simulate=SIMULATED) for _ in range(STREAMS)]
            tasks = [asyncio.create_task(stream.run()) for stream in streams]
            begun = [asyncio.Event() for _ in range(4)]
            sdk = [asyncio.create_task(_with_the_sdk(one, each)) for each in begun]
            async with asyncio.timeout(TIMEOUT):
                await asyncio.gather(*(each.wait() for each in (*begun, *(stream.first for stream in streams))))
            await until(lambda: one.metric('vllm_gateway_inflight_requests{model="tiny"}') == STREAMS + len(sdk), TIMEOUT)
            since = time.monotonic()
            os.kill(server, signal.SIGKILL)
            async with asyncio.timeout(TIMEOUT):
                replies, errors = await asyncio.gather(*tasks), await asyncio.gather(*sdk)
            took = sorted(stream.ended - since for stream in streams)
            assert took[-1] < WITHIN
            assert all(reply.status == 200 and _valid(reply) for reply in replies)
            assert [type(error) for error in errors] == [openai.APIError] * len(sdk), "the SDK takes the end for an error"
            wait_for(lambda: one.log.count('"incomplete":"upstream"') == STREAMS + len(sdk))
            wait_for(lambda: one.metric('vllm_gateway_incomplete_total{model="tiny",reason="upstream"}') == STREAMS + len(sdk))
        assert len(request_ids(one.log)) == STREAMS + len(sdk), "one record for each"
    measured(f"{STREAMS:,} streams: the last ended {took[-1]:.2f} s after the kill (median {statistics.median(took):.2f} s), "
             f"0 hung, {STREAMS:,} valid endings, {STREAMS + len(sdk):,} of {STREAMS + len(sdk):,} records")  # fmt: skip


async def _with_the_sdk(one: Gateway, begun: asyncio.Event) -> Exception | None:
    """Return the exception that OpenAI's SDK raises at the end of a stream, or None."""
    async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT) as sdk:
        stream = await sdk.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], stream=True, extra_body={"simulate": SIMULATED}
        )
        try:
            async for _ in stream:
                begun.set()
        except Exception as error:
            return error
    return None


DEATHS = {
    "at once": b"",
    "in its head": b"HTTP/1.1 200 OK\r\ncontent-ty",
    "behind its head": b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
    "in its first event": b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n10\r\ndata: {",
}


@pytest.mark.row(3)
async def test_death_before_the_first_event(measured: Callable[[str], None]) -> None:
    sent, reset = [b""], [False]

    async def dies(talk: Conversation) -> None:
        await talk.write(sent[0])
        await asyncio.sleep(0.01)
        if reset[0]:
            talk.writer.transport.abort()
        else:
            talk.writer.close()

    async def responds(talk: Conversation) -> None:
        await talk.respond(COMPLETION)

    cases = [(wire, stream, end) for wire in DEATHS.values() for stream in (False, True) for end in (False, True)]
    async with scripted(dies) as server, scripted(responds) as other:
        for wire, stream, end in cases:
            sent[0], reset[0] = wire, end
            async with unharmed([model(server.port)]) as served:
                reply = await request_once(served.port, request(chat(stream=stream)))
                assert (reply.status, reply.error["code"]) == (502, "upstream_disconnected")
        with refusing() as port:
            async with unharmed([model(port, other.port, balance="round_robin")]) as served:
                since = time.monotonic()
                assert [(await request_once(served.port, request())).status for _ in range(6)] == [200] * 6
                assert served.value("retries_total", "tiny") <= 2 + time.monotonic() - since, "it is tried again after a second, at most"
        assert len(server.requests) == len(cases), "without another server, none is sent again"
    measured(f"{len(cases)} crashes: 502 each, never a 200, no retry; a refused connection: another server, 200")


@pytest.mark.row(4)
async def test_a_frozen_server(measured: Callable[[str], None]) -> None:
    idle = 6.0
    with running("--sim-tokens-per-second", "20", "--served-model-name", "tiny") as server:
        wanted = server.chat(seed=7, simulate=QUICK).json()["choices"]
        async with unharmed([model(server.port, timeouts=Timeouts(idle=idle, first_byte=idle))]) as served:
            stream = Stream(served.port, simulate=SIMULATED)
            task = asyncio.create_task(stream.run())
            await asyncio.wait_for(stream.first.wait(), TIMEOUT)
            os.kill(server.process.pid, signal.SIGSTOP)
            try:
                since = time.monotonic()
                waiting = asyncio.create_task(request_once(served.port, request(chat(seed=1))))
                reply = await asyncio.wait_for(task, TIMEOUT)
                took = stream.ended - since
                late = await asyncio.wait_for(waiting, TIMEOUT)
            finally:
                os.kill(server.process.pid, signal.SIGCONT)
            assert b'"code":"upstream_timeout"' in reply.body and reply.body.endswith(DONE) and reply.whole
            assert (late.status, late.error["code"]) == (504, "upstream_timeout")
            assert idle - 1 - TICK <= took < TIMEOUT / 2, "the last event may have come a little before the freeze"
            for _ in range(20):
                after = await request_once(served.port, request(chat(seed=7, simulate=QUICK)))
                assert after.status == 200 and orjson.loads(after.body)["choices"] == wanted, "somebody else's bytes"
            assert served.value("server_failures_total", "tiny", "tiny#0", "idle_timeout") == 1
    measured(f"idle timeout of {idle:g} s: reported after {took:.2f} s; 20 requests after the thaw: each got its own response")


@pytest.mark.row(5)
async def test_no_server_reachable(measured: Callable[[str], None]) -> None:
    async def responds(talk: Conversation) -> None:
        await talk.respond(COMPLETION)

    async def timed(*ports: int) -> tuple[int, float]:
        async with unharmed([model(*ports, balance="round_robin")]) as served:
            since = time.monotonic()
            reply = await asyncio.wait_for(request_once(served.port, request()), TIMEOUT)
            took = time.monotonic() - since
            assert reply.status == 200 or reply.error["code"] == "upstream_unreachable"
            return reply.status, took

    with refusing() as refused, silent() as full:
        async with scripted(responds) as server:
            # Round robin starts with the second server
            cases = {"refused": (refused,), "refused, another": (server.port, refused),
                     "full": (full,), "full, another": (server.port, full)}  # fmt: skip
            seen = {name: await timed(*ports) for name, ports in cases.items()}
            assert len(server.requests) == 2
    assert {name: status for name, (status, _) in seen.items()} == {
        "refused": 502,
        "refused, another": 200,
        "full": 502,
        "full, another": 200,
    }
    bar = 2.1 + TICK if FULL else TIMEOUT / 2
    assert all(took < bar for _, took in seen.values())
    measured("; ".join(f"{name}: {status} after {took:.2f} s" for name, (status, took) in seen.items()))
