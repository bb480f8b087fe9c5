"""Compares `max_inflight: auto` with the best fixed value of a sweep: throughput, and goodput above the capacity.

``python -m tests.benchmarks.concurrency`` prints one table and writes nothing. The rules: a gateway in front of a simulator, whose flags it
does not know; every value gets the same requests for the same time; nothing is counted in the warm-up, in which the automatic limit is
found. Throughput is of clients that send a request after each response. Goodput counts the requests whose first token came within the
objective, of those that are sent at 1.5 times the capacity of the simulator. Both are measured at the same time, on separate gateways.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx2

from gateway.system.tasks import cancel
from tests.benchmarks.process import accepts, free_ports, running
from tests.support.process import SIMULATOR, configuration, gateway
from tests.support.running import KEY
from upstream.simulator.engine.batch import StepTime

MODEL = "sim"
SEQUENCES = 24
"""Requests that the engine runs at once."""
STEP = StepTime(0.08, 0.001, 0.00002)
FIXED = (12, 24, 28, 32, 64)
AUTO = "auto"
TTFT = 1.5
"""The objective for the first token, in seconds."""
CLIENTS = 100
OUTPUT = (10, 30)
"""Tokens of a response, at least and at most."""
RATE = 1.5 * SEQUENCES / STEP.seconds(SEQUENCES, 0) / (sum(OUTPUT) / 2)
"""Requests per second: 1.5 times the capacity."""
QUEUE = 6
"""Requests that wait in the gateway while they are sent at a rate: half a second at full throughput."""


@dataclass(slots=True)
class Counted:
    """The responses of a run: their tokens, and the requests whose first token was in time. ``limit``: that of the server at the end."""

    tokens: int = 0
    in_time: int = 0
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, in seconds."""

    seconds: float
    warm_up: float


def main() -> int:
    """Run the sweep and print the table. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.concurrency", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--warm-up", type=float, default=6.0, help="before each run; the automatic limit gets five times as much")
    parser.add_argument("--fixed", type=int, nargs="+", default=FIXED, help="the values of the sweep")
    given = parser.parse_args()
    options = Options(given.seconds, given.warm_up)
    values = [*given.fixed, AUTO]
    with tempfile.TemporaryDirectory() as folder:
        runs = [_both(Path(folder), value, options) for value in values]
    print("| max_inflight | tokens/s | of the best fixed | in time/s | of the best fixed | limits at the end |\n|---|--:|--:|--:|--:|---|")
    tokens, in_time = (max(getattr(run[at], name) for run in runs[:-1]) or 1 for at, name in enumerate(("tokens", "in_time")))
    for value, (closed, opened) in zip(values, runs, strict=True):
        throughput, goodput = closed.tokens / options.seconds, opened.in_time / options.seconds
        ratios = closed.tokens / tokens, opened.in_time / in_time
        cells = value, f"{throughput:.0f}", f"{ratios[0]:.3f}", f"{goodput:.1f}", f"{ratios[1]:.3f}", f"{closed.limit}, {opened.limit}"
        print(f"| {' | '.join(map(str, cells))} |")
    return 0


def _both(folder: Path, value: int | str, options: Options) -> list[Counted]:
    """Return the counts of clients that wait for responses, and of requests that are sent at a rate, with this value."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda rate: _measured(folder / f"{value}-{rate:.0f}", value, options, rate), (0.0, RATE)))


@contextmanager
def _engine(folder: Path) -> Iterator[str]:
    """Run a simulator. Yield its URL."""
    [port] = free_ports(1)
    step = f"{STEP.base},{STEP.per_sequence},{STEP.per_prefill_token}"
    flags = ["--host", "127.0.0.1", "--port", str(port), "--sim-step-time", step, "--max-num-seqs", str(SEQUENCES)]
    cores = sorted(os.sched_getaffinity(0))
    with running([*SIMULATOR, MODEL, *flags], folder, cores, {"PYTHONPATH": os.getcwd()}, lambda: accepts(port), 60):
        yield f"http://127.0.0.1:{port}"


def _measured(folder: Path, value: int | str, options: Options, rate: float) -> Counted:
    """Return what a gateway with this value served after the warm-up. ``rate``: requests per second; 0: of clients that wait."""
    folder.mkdir()
    queue = {"size": QUEUE if rate else CLIENTS, "wait": "1m"}
    warm_up = options.warm_up * (5 if value == AUTO else 1)
    with _engine(folder) as engine:
        model: dict[str, Any] = {"id": MODEL, "servers": [{"url": engine}], "max_inflight": value, "queue": queue}
        if rate:
            model["slo"] = {"ttft": f"{TTFT:g}s"}
        with gateway(folder, configuration(model)) as one:
            counted = asyncio.run(_send(one.url, warm_up, options.seconds, rate))
            counted.limit = round(one.metric(f'vllm_gateway_server_max_inflight{{model="{MODEL}",server="{engine}"}}'))
    return counted


async def _send(url: str, warm_up: float, seconds: float, rate: float) -> Counted:
    """Send requests at a rate, or from clients that wait for each response, and count those of the seconds after the warm-up."""
    begin = time.monotonic() + warm_up
    window = begin, begin + seconds
    counted, draw = Counted(), Random(1)
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx2.AsyncClient(base_url=url, timeout=120, headers=headers, limits=httpx2.Limits(max_connections=None)) as client:
        tasks = [asyncio.create_task(_client(client, counted, draw, window)) for _ in range(0 if rate else CLIENTS)]
        while rate and time.monotonic() < window[1]:
            tasks.append(asyncio.create_task(_request(client, counted, draw, window)))
            await asyncio.sleep(draw.expovariate(rate))
        await asyncio.sleep(window[1] - time.monotonic())
        for task in tasks:
            if task.done():
                task.result()  # raises what the client has raised
        await cancel(*tasks)
    return counted


async def _client(client: httpx2.AsyncClient, counted: Counted, draw: Random, window: tuple[float, float]) -> None:
    while True:
        await _request(client, counted, draw, window)


async def _request(client: httpx2.AsyncClient, counted: Counted, draw: Random, window: tuple[float, float]) -> None:
    """Send a request, and count its tokens that arrive in the window. A rejected request counts for nothing."""
    sent, tokens = time.monotonic(), draw.randint(*OUTPUT)
    body = {"model": MODEL, "prompt": "hello", "stream": True, "max_tokens": tokens, "simulate": {"tokens": tokens}}
    is_first = True
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if response.status_code == 200 and line.startswith("data: {"):
                now = time.monotonic()
                in_window = window[0] <= now < window[1]
                counted.tokens += in_window
                counted.in_time += in_window and is_first and now - sent <= TTFT
                is_first = False


if __name__ == "__main__":
    print(f"load of the machine at the start: {os.getloadavg()[0]:.1f}")
    sys.exit(main())
