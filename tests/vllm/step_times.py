"""Measure how long the steps of the real vLLM take, and fit the simulator's model of a step to them.

    .venv/bin/python -m tests.vllm.step_times

It prints the numbers for ``--sim-step-time``, and two errors: of the fit, and of a random load that is played with the fitted model. All
times are the engine's own: the sums of vLLM's histograms. It takes about five minutes on two idle cores.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression, mean
from typing import NamedTuple

import httpx2

from tests.benchmarks.prefix.engines import BatchedEngine, EventClock
from tests.benchmarks.prefix.requests import Request
from tests.benchmarks.prefix.traces import Prompt, Segment
from tests.vllm.server import Flag, running
from upstream.simulator.engine.batch import StepTime

FLAGS: dict[str, Flag] = {"max-model-len": 4096, "block-size": 32, "max-num-seqs": 256}
SEQUENCES = (1, 2, 4, 8, 16, 32)
PROMPTS = (32, 64, 128, 256, 512, 1024, 1536, 2000)
REPETITIONS = 10
DECODED = 100
LOAD = 200
"""Requests of the random load."""
RATE = 4.0
"""Requests of the random load in a second."""


class Timing(NamedTuple):
    """Seconds in the engine, as sums: before the first token, and after it."""

    first: float
    rest: float
    requests: float


@dataclass(frozen=True, slots=True)
class Row:
    """One measured step: its requests, the tokens of prompts in it, and its seconds."""

    sequences: int
    prefill_tokens: int
    seconds: float


def fitted(rows: Sequence[Row]) -> StepTime:
    """Fit the base and the requests to steps without prompts, then the tokens of prompts to the relative errors of the other steps."""
    plain = [row for row in rows if not row.prefill_tokens]
    line = linear_regression([row.sequences for row in plain], [row.seconds for row in plain])
    prompts = [row for row in rows if row.prefill_tokens]
    shares = [row.prefill_tokens / row.seconds for row in prompts]
    rest = [1 - (line.intercept + line.slope * row.sequences) / row.seconds for row in prompts]
    return StepTime(line.intercept, line.slope, linear_regression(shares, rest, proportional=True).slope)


def fastest(rows: Sequence[Row]) -> Row:
    """Return the repetition that other processes disturbed least."""
    return min(rows, key=lambda row: row.seconds)


def mean_error(step_time: StepTime, rows: Sequence[Row]) -> float:
    """Return the mean of the relative errors."""
    return mean(abs(step_time.seconds(row.sequences, row.prefill_tokens) / row.seconds - 1) for row in rows)


class Engine:
    """A running vLLM, and its own times."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client
        self._draw = random.Random(7)

    async def complete(self, prompt: int, tokens: int) -> None:
        """Send a prompt of random tokens, and generate exactly so many."""
        ids = [self._draw.randrange(20, 600) for _ in range(prompt)]
        body = {"model": "tiny", "prompt": ids, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        (await self._client.post("/v1/completions", json=body)).raise_for_status()

    async def timing(self) -> Timing:
        """Return the engine's sums."""
        text = (await self._client.get("/metrics")).text

        def total(name: str) -> float:
            return sum(float(value) for value in re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", text, re.MULTILINE))

        waited, prefilled = total("request_queue_time_seconds_sum"), total("request_prefill_time_seconds_sum")
        return Timing(waited + prefilled, total("request_decode_time_seconds_sum"), total("request_decode_time_seconds_count"))

    async def grown(self, before: Timing, requests: int) -> Timing:
        """Return the growth of the sums, once vLLM has counted so many requests."""
        while True:
            after = await self.timing()
            if after.requests >= before.requests + requests:
                return Timing(*(new - old for new, old in zip(after, before, strict=True)))
            await asyncio.sleep(0.05)

    async def decode_row(self, sequences: int) -> Row:
        """Measure steps without prompts: the requests are admitted together."""
        before = await self.timing()
        await asyncio.gather(*(self.complete(8, DECODED) for _ in range(sequences)))
        return Row(sequences, 0, (await self.grown(before, sequences)).rest / sequences / (DECODED - 1))

    async def prefill_row(self, prompt: int) -> Row:
        """Measure a step with one prompt alone."""
        before = await self.timing()
        await self.complete(prompt, 1)
        return Row(1, prompt, (await self.grown(before, 1)).first)

    async def load(self, requests: Sequence[tuple[float, int, int]]) -> Timing:
        """Send requests at their times, and return the mean times of a request."""

        async def one(when: float, prompt: int, tokens: int) -> None:
            await asyncio.sleep(when)
            await self.complete(prompt, tokens)

        before = await self.timing()
        await asyncio.gather(*(one(*request) for request in requests))
        grown = await self.grown(before, len(requests))
        return Timing(grown.first / len(requests), grown.rest / len(requests), len(requests))


class Played:
    """The same load in simulated time."""

    def __init__(self, step_time: StepTime) -> None:
        self._clock = EventClock()
        self._engine = BatchedEngine(self._clock, self, step_time)
        self._first: dict[Request, float] = {}
        self._sums = [0.0, 0.0]

    def load(self, requests: Sequence[tuple[float, int, int]]) -> Timing:
        """Return the mean times of a request."""
        for when, prompt, tokens in requests:
            request = Request(Prompt().then(Segment(0, "user", prompt)), Segment(1, "assistant", tokens), when)
            self._clock.call_at(when, lambda now, request=request: self._engine.submit(request, now))  # type: ignore[misc]
        self._clock.run()
        return Timing(self._sums[0] / len(requests), self._sums[1] / len(requests), len(requests))

    def expected_tokens(self, request: Request) -> int:
        """Return the whole prompt."""
        return self.uncached_tokens(request)

    def uncached_tokens(self, request: Request) -> int:
        """Return the whole prompt: no prompt is sent twice."""
        return request.prompt.tokens

    def first_token(self, request: Request, now: float) -> None:
        """Count the time to the first token."""
        self._first[request] = now
        self._sums[0] += now - request.arrived

    def finished(self, request: Request, now: float) -> None:
        """Count the time of the other tokens."""
        self._sums[1] += now - self._first[request]


def random_load() -> list[tuple[float, int, int]]:
    """Return requests as (seconds, prompt tokens, generated tokens)."""
    draw = random.Random(11)
    when = 0.0
    return [(when := when + draw.expovariate(RATE), round(32 * 2 ** draw.uniform(0, 6)), draw.randint(10, 150)) for _ in range(LOAD)]


async def measure(url: str) -> None:
    """Print the rows, the fit and its errors."""
    limits = httpx2.Limits(max_connections=LOAD)
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        engine = Engine(client)
        await engine.decode_row(4)  # the first requests are slow
        rows = [fastest([await engine.decode_row(sequences) for _ in range(REPETITIONS)]) for sequences in SEQUENCES]
        rows += [fastest([await engine.prefill_row(prompt) for _ in range(REPETITIONS)]) for prompt in PROMPTS]
        step_time = fitted(rows)
        for row in rows:
            seconds = step_time.seconds(row.sequences, row.prefill_tokens)
            step = f"{row.sequences:3} requests, {row.prefill_tokens:4} prompt tokens"
            print(f"{step}: {row.seconds * 1000:6.2f} ms, fitted {seconds * 1000:6.2f} ms")
        print(f"--sim-step-time {step_time.base:.6f},{step_time.per_sequence:.6f},{step_time.per_prefill_token:.8f}")
        print(f"mean error of a step: {mean_error(step_time, rows):.1%}")
        requests = random_load()
        real, played = await engine.load(requests), Played(step_time).load(requests)
        print(f"random load, mean seconds to the first token and after it: real {real.first:.3f}, {real.rest:.3f}; "
              f"played {played.first:.3f}, {played.rest:.3f}")  # fmt: skip


def main() -> None:
    """Measure the tiny model."""
    with running("qwen3", flags=FLAGS) as server:
        asyncio.run(measure(server.url))


if __name__ == "__main__":
    main()
