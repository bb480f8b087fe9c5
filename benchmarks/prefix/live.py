"""The same conversations through running proxies to running simulators, each of which counts its cache's hits as vLLM does.

``python -m benchmarks.prefix.live [VLLM_ROUTER]``: the second is the ``vllm-router`` command of the package of that name, where it is
installed. The rule: every proxy gets new simulators, whose caches are empty.
"""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.prefix.traces import TRACES, Talk, Trace, document
from tests.support.process import SIMULATOR, configuration, gateway, wait_for
from tests.support.running import KEY

MODEL = "sim"
SEED = 7
SERVERS = (2, 8)
REQUESTS = 150
"""For each server."""
AT_ONCE = 8
"""Conversations under way, for each server."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one simulator has counted."""

    queries: float
    hits: float
    requests: float


def main() -> None:
    """Print a table: hit rate, and the requests of the server that got most over the mean, for each way to choose."""
    router = sys.argv[1] if len(sys.argv) > 1 else None
    ways: dict[str, Callable[[Sequence[str]], AbstractContextManager[str]]] = {
        f"gateway, `{balance}`": partial(_gateway, balance) for balance in ("round_robin", "least_busy", "prefix")
    }
    if router is not None:
        ways |= {f"vllm-router, `{policy}`": partial(_router, router, policy) for policy in ("round_robin", "cache_aware")}
    trace = TRACES["chat"]
    print(f"| {trace.title.lower()}, by | {' | '.join(f'{servers} servers' for servers in SERVERS)} |\n|---|{'---|' * len(SERVERS)}")
    for title, way in ways.items():
        print(f"| {title} | {' | '.join(_measured(way, trace, servers) for servers in SERVERS)} |", flush=True)


def _measured(way: Callable[[Sequence[str]], AbstractContextManager[str]], trace: Trace, servers: int) -> str:
    talks = trace.of(SEED, servers, REQUESTS * servers)
    with ExitStack() as stack:
        urls = [stack.enter_context(_simulator()) for _ in range(servers)]
        proxy = stack.enter_context(way(urls))
        failed = asyncio.run(_all_of(talks, proxy, AT_ONCE * servers))
        seen = [_seen(url) for url in urls]
    requests = [each.requests for each in seen]
    rate = sum(each.hits for each in seen) / sum(each.queries for each in seen)
    return f"{rate:.0%}, {max(requests) * servers / sum(requests):.2f}" + (f" ({failed} failed)" if failed else "")


async def _all_of(talks: Sequence[Talk], proxy: str, at_once: int) -> int:
    """Have every conversation, so many at once; how many requests were not answered."""
    gate = asyncio.Semaphore(at_once)
    limits = httpx2.Limits(max_connections=at_once)
    async with httpx2.AsyncClient(base_url=proxy, headers={"authorization": f"Bearer {KEY}"}, limits=limits, timeout=60) as client:

        async def one(talk: Talk) -> int:
            async with gate:
                return await _talked(client, talk)

        return sum(await asyncio.gather(*map(one, talks)))


async def _talked(client: httpx2.AsyncClient, talk: Talk) -> int:
    messages: list[Any] = list(document(talk.system)["messages"])
    failed = 0
    for turn in talk.turns:
        messages += document(turn.asked)["messages"]
        answer = await client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
        failed += answer.status_code != 200
        messages += document((turn.answer,))["messages"]
        await asyncio.sleep(random.uniform(0, 0.1))
    return failed


def _seen(url: str) -> Seen:
    lines = httpx2.get(f"{url}/metrics", timeout=10).text.splitlines()

    def total(name: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}_total{{"))

    return Seen(total("prefix_cache_queries"), total("prefix_cache_hits"), total("request_success"))


@contextmanager
def _simulator() -> Iterator[str]:
    with _running([*SIMULATOR, MODEL, "--max-model-len", "200000", "--port", "{port}"], "/health") as url:
        yield url


@contextmanager
def _gateway(balance: str, urls: Sequence[str]) -> Iterator[str]:
    model = {"id": MODEL, "balance": balance, "servers": [{"url": url} for url in urls]}
    with tempfile.TemporaryDirectory() as folder, gateway(Path(folder), configuration(model)) as one:
        yield one.url


@contextmanager
def _router(program: str, policy: str, urls: Sequence[str]) -> Iterator[str]:
    words = ["--host", "127.0.0.1", "--port", "{port}", "--prometheus-port", str(_free_port()), "--worker-urls", *urls, "--policy", policy]
    with _running([program, *words], "/health") as url:
        yield url


@contextmanager
def _running(command: Sequence[str], path: str) -> Iterator[str]:
    port = _free_port()
    words = [word.format(port=port) for word in command]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: _answers(url + path), 60)
        yield url
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx2.get(url, timeout=2).status_code == 200
    except httpx2.HTTPError:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


if __name__ == "__main__":
    main()
