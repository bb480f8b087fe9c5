"""Streams of two real vLLM servers, one of which is lost, are equal to undisturbed ones (see tests/gateway/continuation/stage.py)."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import httpx2
import pytest

from tests.gateway.continuation.stage import CHAT, COMPLETIONS, USAGE, Json, check, cut_in, stage, stop_trial
from tests.support.cutting_proxy import Cut
from tests.vllm.continuation import CALLS, CHINESE, CHINESE_PROMPT, FLAGS, POINTS, PROMPT
from tests.vllm.server import NOT_INSTALLED, Server, installed, running
from tests.vllm.test_stream_bytes import normalized, undivided
from upstream.http.deadlines import Timeouts

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

STREAM: Json = {"model": "tiny", "stream": True, **USAGE}
REQUESTS: tuple[tuple[str, Json], ...] = (
    (CHAT, {**POINTS, **STREAM}),
    (CHAT, {**CALLS, **STREAM}),
    (CHAT, {**CHINESE, **STREAM}),
    (CHAT, {**POINTS, **STREAM, "stop": ["bullet"]}),
    (COMPLETIONS, {**PROMPT, **STREAM}),
)
CUTS, STOPS = 3, 8


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running("qwen3", flags=FLAGS["qwen3"])) for _ in range(2)]


async def test_streams_of_real_servers_are_equal(servers: list[Server]) -> None:
    dice = random.Random(1)
    async with stage(servers, timeouts=Timeouts(idle=120)) as one:
        undisturbed = [await one.send(path, body) for path, body in REQUESTS]
        for (path, body), whole in zip(REQUESTS, undisturbed, strict=True):
            for _ in range(CUTS):
                cut = cut_in(dice, len(whole.events) - 1)
                check(await one.send(path, body, cut), whole, cut, reasoning=False)
        for prompt in (PROMPT["prompt"], CHINESE_PROMPT):
            for _ in range(STOPS):
                await stop_trial(one, {**PROMPT, **STREAM, "prompt": prompt, "max_tokens": 100}, dice)
        killed = {server.port: server.pid for server in servers}
        path, body = REQUESTS[1]
        cut = Cut(len(undisturbed[1].events) // 2, then=lambda port: os.killpg(killed.pop(port), signal.SIGKILL))
        check(await one.send(path, body, cut), undisturbed[1], cut, reasoning=False)
        assert len(killed) == 1


async def test_a_stream_that_may_be_continued_has_the_servers_bytes(servers: list[Server]) -> None:
    async with stage(servers, timeouts=Timeouts(idle=120)) as one:
        for path, body in REQUESTS:
            got = (await one.send(path, body)).body
            reply = await asyncio.to_thread(httpx2.post, servers[0].url + path, json=body, timeout=120)
            assert b"token_ids" in got and undivided(normalized(got)) == undivided(normalized(reply.content))
