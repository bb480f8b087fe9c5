"""Measures goodput at 1.5 times the capacity: vLLM's own queue, first come first served, beside the gateway's queue with ``slo.ttft``.

``python -m tests.benchmarks.fairness goodput`` runs it. The rules: one gateway in front of one simulator with ``SLOTS`` sequences, on which
each generator's own capacity is measured first. Both queues get the same requests at the same times. A response is good if its first token
came within ``TTFT`` of its request. A client that is refused returns after its Retry-After, as OpenAI's SDK does: at most twice, each time
as a new request. Requests that have not ended after ``SECONDS + DRAIN`` are not counted.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx2

from tests.benchmarks.process import accepts, free_ports, running
from tests.support.process import SIMULATOR, configuration, gateway
from tests.support.running import KEY

SERVED, FIFO, SLO = "sim", "fifo", "slo"
SLOTS = 8
LOAD = 1.5
"""Requests that arrive, in times of the capacity."""
TTFT = 1.0
SECONDS, DRAIN = 20.0, 2.0
"""An overload of 7 seconds is too short for agents: at first, only the first steps of each one arrive."""
STEP = "0.03,0.0001,0.00004"
_WARM_UP, _CALIBRATION = 1.0, 2.5
_RETURNS = 2
_STEPS = 4
"""Requests of an agent, each with the earlier ones in its prompt."""
COLUMNS = ("generator", "capacity/s", "requests", "FIFO: good", "good", "of first requests", "ratio", "returned", "admitted")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a client, ``after`` seconds from the start, or from the end of the client's earlier request."""

    after: float
    prompt: int = 20
    output: int = 12


Client = Sequence[PlannedRequest]
Generator = Callable[[Random, float], Iterator[Client]]
"""Yields the clients that arrive in ``SECONDS``, for a number of requests in a second."""


def _arrivals(draw: Random, rate: Callable[[float], float], most: float) -> Iterator[float]:
    """Yield the times of a Poisson process whose rate changes."""
    at = draw.expovariate(most)
    while at < SECONDS:
        if draw.random() < rate(at) / most:
            yield at
        at += draw.expovariate(most)


def _output(draw: Random) -> int:
    return draw.randint(6, 18)


def _curve(of: Callable[[float], float]) -> Generator:
    def clients(draw: Random, rate: float) -> Iterator[Client]:
        peak = max(of(each / 100 * SECONDS) for each in range(100))
        yield from ([PlannedRequest(at, output=_output(draw))] for at in _arrivals(draw, lambda at: rate * of(at), rate * peak))

    return clients


def _long_prompts(draw: Random, rate: float) -> Iterator[Client]:
    for at in _arrivals(draw, lambda _: rate, rate):
        yield [PlannedRequest(at, draw.randint(1000, 4000) if draw.random() < 0.2 else 20, _output(draw))]


def _agents(draw: Random, rate: float) -> Iterator[Client]:
    for at in _arrivals(draw, lambda _: rate / _STEPS, rate / _STEPS):
        yield [PlannedRequest(at if not step else 0.05, 100 + 200 * step, _output(draw)) for step in range(_STEPS)]


_BURST = SECONDS / 3
GENERATORS: dict[str, Generator] = {
    "steady": _curve(lambda _: 1.0),
    "bursts": _curve(lambda at: 3.5 if at % _BURST < _BURST / 4 else 1 / 6),
    "long prompts": _long_prompts,
    "agents": _agents,
    "a day's curve": _curve(lambda at: 1 - 0.8 * math.cos(2 * math.pi * at / SECONDS)),
}
"""The mean rate of each is ``LOAD`` times the capacity."""


@dataclass(slots=True)
class Result:
    """Responses in time: to first requests, and to those of clients that returned. ``admitted``: of those that ``returned``."""

    requests: int = 0
    good: int = 0
    good_later: int = 0
    returned: int = 0
    admitted: int = 0
    ended: int = 0


def rows(folder: Path, seed: int) -> Iterator[tuple[str, ...]]:
    """Run all generators, and yield the rows of the table."""
    with _servers(folder) as url:
        for name, generator in GENERATORS.items():
            capacity = asyncio.run(_capacity(url, generator, seed))
            fifo, slo = (asyncio.run(_run(url, model, generator, LOAD * capacity, seed)) for model in (FIFO, SLO))
            good = slo.good + slo.good_later
            yield (
                name,
                f"{capacity:.1f}",
                f"{fifo.requests}, {slo.requests}",
                f"{fifo.good}",
                f"{good}",
                f"{slo.good}",
                f"{good / max(fifo.good, 1):.2f}",
                f"{slo.returned}",
                f"{slo.admitted / slo.returned:.1%}" if slo.returned else "-",
            )


@contextmanager
def _servers(folder: Path) -> Iterator[str]:
    """Run a simulator, and a gateway with a model for each queue in front of it. Yield the URL of the gateway."""
    [port] = free_ports(1)
    flags = ["--host", "127.0.0.1", "--port", str(port), "--sim-step-time", STEP, "--max-num-seqs", str(SLOTS)]
    cores = sorted(os.sched_getaffinity(0))
    with running([*SIMULATOR, SERVED, *flags], folder, cores, {"PYTHONPATH": os.getcwd()}, lambda: accepts(port), 60):
        server = {"servers": [{"url": f"http://127.0.0.1:{port}", "model": SERVED}]}
        slo = {"max_inflight": SLOTS, "slo": {"ttft": f"{TTFT:g}s"}, "queue": {"size": 1000, "wait": "5m"}}
        with gateway(folder, configuration({"id": FIFO, **server}, {"id": SLO, **server, **slo})) as one:
            yield one.url


async def _capacity(url: str, generator: Generator, seed: int) -> float:
    """Return the requests per second of clients that send one after the other, a few more than there are slots."""
    calls = itertools.cycle(call for client in generator(Random(seed), 50.0) for call in client)
    result, start = Result(), time.monotonic() + _WARM_UP

    async def send(client: httpx2.AsyncClient, draw: Random) -> None:
        while True:
            call = next(calls)
            await _one(client, _body(FIFO, call, draw), result)
            result.ended += time.monotonic() > start

    async with httpx2.AsyncClient(base_url=url, timeout=60, limits=httpx2.Limits(max_connections=None)) as client:
        await _for(_WARM_UP + _CALIBRATION, [send(client, Random(f"{seed} {number}")) for number in range(SLOTS + 2)])
    return result.ended / _CALIBRATION


async def _run(url: str, model: str, generator: Generator, rate: float, seed: int) -> Result:
    result, start = Result(), time.monotonic()

    async def play(client: httpx2.AsyncClient, calls: Client, draw: Random) -> None:
        await asyncio.sleep(start + calls[0].after - time.monotonic())
        for number, call in enumerate(calls):
            if number:
                await asyncio.sleep(call.after)
            if not await _with_returns(client, model, call, draw, result):
                return

    async with httpx2.AsyncClient(base_url=url, timeout=60, limits=httpx2.Limits(max_connections=None)) as client:
        clients = enumerate(generator(Random(seed), rate))
        await _for(SECONDS + DRAIN, [play(client, calls, Random(f"{seed} {number}")) for number, calls in clients])
    return result


async def _for(seconds: float, clients: Sequence[object]) -> None:
    """Run clients for some seconds. Raises what a client has raised."""
    tasks = [asyncio.ensure_future(each) for each in clients]  # type: ignore[call-overload]
    done, pending = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for each in pending:
        each.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for each in done:
        each.result()


async def _with_returns(client: httpx2.AsyncClient, model: str, call: PlannedRequest, draw: Random, result: Result) -> bool:
    """Send a request, again after each refusal. Return whether there was a response."""
    result.requests += 1
    body = _body(model, call, draw)
    for attempt in range(_RETURNS + 1):
        found = await _one(client, body, result, first=not attempt)
        if found is None:
            return True
        await asyncio.sleep(found)
    return False


def _body(model: str, call: PlannedRequest, draw: Random) -> dict[str, Any]:
    prompt = [draw.randrange(1000, 100_000) for _ in range(call.prompt)]
    return {"model": model, "prompt": prompt, "max_tokens": 256, "stream": True, "simulate": {"tokens": call.output}}


async def _one(client: httpx2.AsyncClient, body: dict[str, Any], result: Result, *, first: bool = True) -> int | None:
    """Send a request once and read the stream. Return the Retry-After of a refusal."""
    sent, seen = time.monotonic(), False
    async with client.stream("POST", "/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"}) as response:
        result.returned += not first
        if response.status_code == 503:
            return int(response.headers["retry-after"])
        response.raise_for_status()
        result.admitted += not first
        async for line in response.aiter_lines():
            if not seen and line.startswith("data: {"):
                seen = True
                in_time = time.monotonic() - sent <= TTFT
                if first:
                    result.good += in_time
                else:
                    result.good_later += in_time
    return None
