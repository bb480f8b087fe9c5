"""The same conversations through a running gateway to running simulators, each of which counts its cache's hits as vLLM does.

``python -m tests.benchmarks.prefix.live`` prints a table. The rule: every balance gets new simulators, whose caches are empty.
"""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from tests.benchmarks.prefix.traces import TRACES, Talk, Trace, document
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
    """The counters of one simulator."""

    queries: float
    hits: float
    requests: float


def main() -> None:
    """Print a table: hit rate, and the requests of the server that got most over the mean, for each balance."""
    trace = TRACES["chat"]
    print(f"| `balance` | {' | '.join(f'{servers} servers' for servers in SERVERS)} |\n|---|{'---|' * len(SERVERS)}")
    for balance in ("round_robin", "least_busy", "prefix"):
        print(f"| `{balance}` | {' | '.join(_measured(balance, trace, servers) for servers in SERVERS)} |", flush=True)


def _measured(balance: str, trace: Trace, servers: int) -> str:
    """One cell. Raises RuntimeError when a request was not answered."""
    talks = trace.of(SEED, servers, REQUESTS * servers)
    with ExitStack() as stack:
        urls = [stack.enter_context(_simulator()) for _ in range(servers)]
        if failed := asyncio.run(_all_of(talks, stack.enter_context(_gateway(balance, urls)), AT_ONCE * servers)):
            raise RuntimeError(f"{failed} requests were not answered")
        seen = [_seen(url) for url in urls]
    requests = [each.requests for each in seen]
    rate = sum(each.hits for each in seen) / sum(each.queries for each in seen)
    return f"{rate:.0%}, {max(requests) * servers / sum(requests):.2f}"


async def _all_of(talks: Sequence[Talk], proxy: str, at_once: int) -> int:
    """Have every conversation, so many at once; how many requests were not answered."""
    semaphore = asyncio.Semaphore(at_once)
    limits = httpx2.Limits(max_connections=at_once)
    async with httpx2.AsyncClient(base_url=proxy, headers={"authorization": f"Bearer {KEY}"}, limits=limits, timeout=60) as client:

        async def one(talk: Talk) -> int:
            async with semaphore:
                return await _talked(client, talk)

        return sum(await asyncio.gather(*map(one, talks)))


async def _talked(client: httpx2.AsyncClient, talk: Talk) -> int:
    messages: list[Any] = list(document(talk.system)["messages"])
    failed = 0
    for exchange in talk.turns:
        messages += document(exchange.prompt)["messages"]
        response = await client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
        failed += response.status_code != 200
        messages += document((exchange.completion,))["messages"]
        await asyncio.sleep(random.uniform(0, 0.1))
    return failed


def _seen(url: str) -> Seen:
    lines = httpx2.get(f"{url}/metrics", timeout=10).text.splitlines()

    def total(name: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}_total{{"))

    return Seen(total("prefix_cache_queries"), total("prefix_cache_hits"), total("request_success"))


@contextmanager
def _simulator() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    arguments = [*SIMULATOR, MODEL, "--max-model-len", "200000", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: _responds(f"{url}/health"), 60)
        yield url
    finally:
        process.kill()
        process.wait()


@contextmanager
def _gateway(balance: str, urls: Sequence[str]) -> Iterator[str]:
    model = {"id": MODEL, "balance": balance, "servers": [{"url": url} for url in urls]}
    with tempfile.TemporaryDirectory() as folder, gateway(Path(folder), configuration(model)) as one:
        yield one.url


def _responds(url: str) -> bool:
    try:
        return httpx2.get(url, timeout=2).status_code == 200
    except httpx2.HTTPError:
        return False


if __name__ == "__main__":
    main()
