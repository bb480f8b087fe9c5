"""Streams of two real vLLM servers, one of which is lost, are equal to undisturbed ones (see tests/gateway/continuation/stage.py)."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx2
import pytest

from tests.gateway.continuation.stage import CHAT, COMPLETIONS, USAGE, Json, Stage, check, stage, stop_trial, trial
from tests.support.cutting_proxy import Cut
from tests.vllm.continuation import CALLS, CHINESE, CHINESE_PROMPT, FLAGS, POINTS, PROMPT
from tests.vllm.dialogues import WEATHER, user
from tests.vllm.server import NOT_INSTALLED, REPEATING, Server, installed, running
from tests.vllm.test_stream_bytes import normalized, undivided
from upstream.http.deadlines import Timeouts

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

NAME, CITIES = "get_current_weather", ("Hangzhou 杭州🌤", "Paris")
ARGUMENTS = [json.dumps({"location": city, "days": 2}, ensure_ascii=False) for city in CITIES]
CALLED: Mapping[str, str] = {
    "hermes": "\n\n" + "\n".join(f'<tool_call>\n{{"name": "{NAME}", "arguments": {each}}}\n</tool_call>' for each in ARGUMENTS),
    "granite4": "\n\n" + "".join(f'<tool_call>{{"name": "{NAME}", "arguments": {each}}}</tool_call>' for each in ARGUMENTS),
    "pythonic": "[" + ", ".join(f'{NAME}(location="{city}", days=2)' for city in CITIES) + "]",
}
"""Two calls in the syntax of each parser. These parsers make the same of them, however vLLM groups the tokens."""


def repeated(text: str, parser: str | None = None, **more: object) -> Json:
    """Return a request whose response is this text (repeating.py). ``parser``: that of its calls."""
    tool = {**WEATHER, "function": {**WEATHER["function"], "description": parser}}
    tools = {} if parser is None else {"tools": [tool]}
    return {"model": "tiny", "messages": [user(f"Repeat:\n{text}")], "temperature": 0, "max_tokens": 900, "stream": True, **tools, **more}


STREAM: Json = {"model": "tiny", "stream": True, **USAGE}
REQUESTS: Mapping[str, tuple[str, Json]] = {
    "reasoning": (CHAT, {**POINTS, **STREAM}),
    "tools, qwen3_coder": (CHAT, {**CALLS, **STREAM}),
    "multi-byte text": (CHAT, {**CHINESE, **STREAM}),
    "stop": (CHAT, {**POINTS, **STREAM, "stop": ["bullet"]}),
    "completion": (COMPLETIONS, {**PROMPT, **STREAM}),
    **{f"tools, {parser}": (CHAT, repeated(f"两个城市。🤔\n</think>{text}", parser, **USAGE)) for parser, text in CALLED.items()},
}
CUTS, STOPS = 3, 8
LONG = 180.0  # seconds that a busy machine may take


@contextmanager
def two_servers() -> Iterator[list[Server]]:
    """Run two equal servers."""
    flags = {**FLAGS["qwen3"], **REPEATING}
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        yield [*threads.map(lambda _: stack.enter_context(running("qwen3", flags=flags)), range(2))]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    with two_servers() as made:
        yield made


def thrice(servers: Sequence[Server]) -> list[Server]:
    """Return the servers as three, so that a stream can be lost twice."""
    return [*servers, servers[0]]


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_stream_of_real_servers_is_equal(servers: list[Server], name: str) -> None:
    dice = random.Random(name)
    async with stage(thrice(servers), REQUESTS, timeouts=Timeouts(idle=120)) as one:
        outcomes = [await trial(one, name, dice, reasoning=False) for _ in range(CUTS)]
        path = "regeneration" if name == "stop" else "token_ids"
        assert {each.path for outcome in outcomes for each in outcome.record.continuations} <= {path}


@pytest.mark.parametrize("prompt", [PROMPT["prompt"], CHINESE_PROMPT])
async def test_a_completion_of_real_servers_with_stop_strings_is_equal(servers: list[Server], prompt: str) -> None:
    dice = random.Random(prompt)
    async with stage(thrice(servers), REQUESTS, timeouts=Timeouts(idle=120)) as one:
        for _ in range(STOPS):
            await stop_trial(one, {**PROMPT, **STREAM, "prompt": prompt, "max_tokens": 100}, dice)


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_stream_that_may_be_continued_has_the_servers_bytes(servers: list[Server], name: str) -> None:
    async with stage(servers, REQUESTS, timeouts=Timeouts(idle=120)) as one:
        path, body = REQUESTS[name]
        got = (await one.send(path, body)).body
        reply = await asyncio.to_thread(httpx2.post, servers[0].url + path, json=body, timeout=120)
        assert b"token_ids" in got and undivided(normalized(got)) == undivided(normalized(reply.content))


async def test_streams_of_a_killed_server_are_equal(servers: list[Server]) -> None:
    """The last test: it leaves one server."""
    async with stage(servers, REQUESTS, timeouts=Timeouts(idle=120)) as one:
        await killed(one, servers, [*REQUESTS] * 2)


async def killed(one: Stage, servers: Sequence[Server], names: Sequence[str]) -> int:
    """Kill a server in the middle of these streams, and check that they are equal. Returns how many were continued."""
    groups = {server.port: server.pid for server in servers}
    undisturbed = {name: await one.expected(name) for name in names}
    one.cuts.append(Cut(8, then=lambda port: os.killpg(groups.pop(port), signal.SIGKILL)))
    outcomes = await asyncio.gather(*(one.run(name) for name in names))
    assert len(groups) == 1
    for name, outcome in zip(names, outcomes, strict=True):
        check(outcome, undisturbed[name], reasoning=False)
    return sum(bool(outcome.record.continuations) for outcome in outcomes)
