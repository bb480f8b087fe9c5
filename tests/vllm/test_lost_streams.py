"""Streams of two real vLLM servers, one of which is lost, are equal to undisturbed ones (see tests/gateway/continuation/stage.py)."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from gateway.api.routes import ROUTES
from tests.gateway.continuation.stage import CHAT, COMPLETIONS, MESSAGES, PLAIN, USAGE, Json, Stage, check, stage, stop_trial, trial
from tests.gateway.continuation.streams import view_of
from tests.support.cutting_proxy import Cut
from tests.support.process import Gateway, configuration, gateway, wait_for
from tests.vllm.continuation import CALLS, CHINESE, CHINESE_PROMPT, FLAGS, POINTS, PROMPT
from tests.vllm.dialogues import WEATHER, user
from tests.vllm.gateway import ATTEMPTS, HEADERS, LEDGER, held
from tests.vllm.server import NOT_INSTALLED, REPEATING, Server, installed, process_of, running
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
SPACES = " " * 40
PARTIAL: Mapping[str, str] = {
    "llama3_json": "; ".join(f'{{"name": "{NAME}",{SPACES}"parameters": {each}}}' for each in ARGUMENTS),
    "xlam": "[" + ", ".join(f'{{"name": "{NAME}", "arguments": {each}{SPACES}}}' for each in ARGUMENTS) + "]",
}
"""The same for parsers that show a part of what a group of tokens completes. They show the rest with the spaces."""


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
    **{
        f"tools, {parser}": (CHAT, repeated(f"两个城市。🤔\n</think>{text}", parser, **USAGE))
        for parser, text in {**CALLED, **PARTIAL}.items()
    },
}
NUMBERS = " ".join(map(str, range(80)))
STOPPED: Sequence[Sequence[tuple[str, Json]]] = [
    [(CHAT, repeated(f"{number} {NUMBERS}\n</think>\n\n{NUMBERS}", temperature=1)) for number in range(2)],
    [(CHAT, repeated(f"{number} {NUMBERS}\n</think>\n\n{NUMBERS}", **USAGE)) for number in range(4)],
    [(CHAT, repeated(f"{number} {NUMBERS}", **USAGE, **PLAIN)) for number in range(4)],
    [(CHAT, repeated(f"{number} {NUMBERS}\n</think>{CALLED['hermes']}", "hermes", **USAGE)) for number in range(2)],
    [(CHAT, repeated(f"{CALLED['hermes']}\n{number} {NUMBERS}", "hermes", **USAGE, **PLAIN)) for number in range(2)],
    [(COMPLETIONS, {**PROMPT, **STREAM, "prompt": f"{number}", "max_tokens": 200, "ignore_eos": True}) for number in range(4)],
    [(MESSAGES, repeated(f"{number} {NUMBERS}\n</think>\n\n{NUMBERS}")) for number in range(2)],
]
"""Twenty streams. Each server gets a half of each group. Only the streams of the first group cannot be continued."""
STAYING = len(STOPPED[0]) // 2
EVENTS = 3
"""Events of each stream before the engine is stopped."""
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


@pytest.mark.parametrize("name", [name for name in REQUESTS if name.removeprefix("tools, ") not in PARTIAL])
async def test_a_stream_that_may_be_continued_has_the_servers_bytes(servers: list[Server], name: str) -> None:
    async with stage(servers, REQUESTS, timeouts=Timeouts(idle=120)) as one:
        path, body = REQUESTS[name]
        for _ in range(ATTEMPTS):  # an engine that is ahead puts several tokens into one event, which may then have more fields
            got = (await one.send(path, body)).body
            reply = await asyncio.to_thread(httpx2.post, servers[0].url + path, json=body, timeout=120)
            both = [undivided(normalized(each)) for each in (got, reply.content)]
            if both[0] == both[1]:
                break
        assert b"token_ids" in got and both[0] == both[1]


@dataclass
class Client:
    """Reads a stream. ``body``: the bytes so far."""

    path: str
    request: Json
    identity: str = ""
    body: bytes = b""

    def read(self, url: str) -> Client:
        """Read the whole stream."""
        with httpx2.stream("POST", url + self.path, json=self.request, headers=HEADERS, timeout=LONG) as response:
            self.identity = response.headers["x-request-id"]
            for piece in response.iter_raw():
                self.body += piece
        return self

    @property
    def view(self) -> object:
        """All that the client sees, except the number of the reasoning's tokens, which may differ."""
        return view_of(re.sub(rb',"completion_tokens_details":[^}]*}', b"", self.body), ROUTES[self.path].dialect)


def test_streams_of_a_stopped_engine_continue_elsewhere_and_not_twice(servers: list[Server], tmp_path: Path) -> None:
    """Its API server still responds to health checks. The engine works again while its streams are continued."""
    model = {"id": "tiny", "servers": [{"url": each.url} for each in servers], "balance": "round_robin", "timeouts": {"idle": "5m"}}
    engine, url = process_of(psutil.Process(servers[0].pid), "EngineCore"), servers[0].url
    config = configuration(model, workers=1) | {"ledger": LEDGER}
    with gateway(tmp_path, config) as one, ThreadPoolExecutor(sum(map(len, STOPPED))) as threads:

        def statuses() -> dict[str, Any]:
            return {each["name"]: each for each in one.get("/status").json()["models"][0]["servers"]}

        wait_for(lambda: all(each["scale_out"] for each in statuses().values()), LONG)
        undisturbed = [*threads.map(lambda each: Client(*each).read(one.url), chain(*STOPPED))]
        clients: list[Client] = []
        with held(engine) as work_until:
            reading: list[Future[Client]] = []
            for group in STOPPED:
                clients.extend(Client(*each) for each in group)
                reading.extend(threads.submit(each.read, one.url) for each in clients[-len(group) :])
                wait_for(lambda: statuses()[url]["in_flight"] == len(clients) // 2, LONG)
            work_until(lambda: all(each.body.count(b"\n\n") >= EVENTS for each in clients))
            closed, finished = counted(url, "http_requests_total", CHAT, MESSAGES), counted(url, "vllm:request_success_total", "stop")
            chats = sum(each.path != COMPLETIONS for each in clients) // 2
            wait_for(lambda: counted(url, "http_requests_total", CHAT, MESSAGES) == closed + chats - STAYING, LONG)
            wait_for(lambda: statuses()[url]["in_flight"] == STAYING, LONG)
        assert [each.result().view for each in reading] == [each.view for each in undisturbed]
        wait_for(lambda: statuses()[url]["condition"] == "up" and not counted(url, "vllm:num_requests_running"), LONG)
        assert counted(url, "vllm:request_success_total", "stop") == finished + STAYING, "vLLM has aborted the others"
        stored = rows(one, 2 * len(clients))
    assert [stored[each.identity] for each in clients] == [stored[each.identity] for each in undisturbed]
    logged = {each["request_id"]: each.get("continuations", []) for each in map(json.loads, one.log.splitlines())}
    continued = [(each.path, continuation) for each in clients for continuation in logged[each.identity]]
    assert len(continued) == len(clients) // 2 - STAYING
    for path, each in continued:
        assert (each["server"], each["cause"], each["outcome"]) == (url, "unresponsive", "continued")
        assert each["path"] == ("regeneration" if path == MESSAGES else "token_ids")


def counted(url: str, name: str, *labels: str) -> float:
    """Return one of vLLM's own counts. ``labels``: only the samples with one of these values of a label."""
    samples = (line.rsplit(" ", 1) for line in httpx2.get(f"{url}/metrics").text.splitlines() if line.startswith(name + "{"))
    return sum(float(value) for sample, value in samples if not labels or any(f'="{each}"' in sample for each in labels))


def rows(one: Gateway, count: int) -> dict[str, tuple[object, ...]]:
    """Return the status and the tokens of all requests by their ID, once the ledger has so many rows of the key."""
    query = "SELECT request_id, status, incomplete, prompt_tokens, completion_tokens FROM gateway_usage WHERE key = 'team-a'"

    def found() -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(one.folder / "usage.db")) as connection:
            return connection.execute(query).fetchall()

    wait_for(lambda: len(found()) >= count, LONG)
    return {identity: tuple(values) for identity, *values in found()}


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
