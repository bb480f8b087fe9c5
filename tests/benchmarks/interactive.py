"""Measures interactive streams beside a saturating batch class, for several numbers of reserved slots, and for ``auto``.

The rules: one server whose steps are longer the more requests run together, and one gateway for each setting; each client sends its
next request after a response; times are those of the clients. The objectives of ``auto`` are relative to the times of the clients alone.
The server is a simulator, or a real vLLM for the CPU. Its model is the tests' tiny one with more and wider layers of random weights: a step
then takes much longer than the clients need for its tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx2

from gateway.auth.keys import hash_of
from tests.benchmarks.process import accepts, free_ports, running
from tests.support.process import SIMULATOR, configuration, gateway
from tests.vllm import server as vllm

MODEL = "tiny"
SLOTS = 32
CLIENTS, BATCH_CLIENTS = 4, 48
ALLOWED, OBJECTIVE = 1.15, 1.14
"""The p99 that is allowed, and the objective, both by the times of the clients alone. The objective is lower because ``auto`` probes."""
STEP = "0.05,0.001,0.00001"
"""Seconds of a step of the simulator: 54 ms with the interactive clients alone, 82 ms with all slots in use."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A server, and what is measured with it.

    ``opened``: the slots that are open to the batch, at last all ``SLOTS``: nothing is reserved. ``allowed``: the times beside the batch
    that are allowed, and ``objective``: that of ``auto``, both by the times of the clients alone. ``judged``: the quantile of the times.
    """

    run: Callable[[Path], AbstractContextManager[int]]
    opened: Sequence[int]
    allowed: float
    objective: float
    judged: float


@contextmanager
def _simulator(folder: Path) -> Iterator[int]:
    """Run a simulator. Yield its port."""
    [port] = free_ports(1)
    flags = ["--host", "127.0.0.1", "--port", str(port), "--sim-step-time", STEP]
    cores, environment = sorted(os.sched_getaffinity(0)), {"PYTHONPATH": os.getcwd()}
    with running([*SIMULATOR, MODEL, *flags], folder, cores, environment, lambda: accepts(port), 60):
        yield port


@contextmanager
def _vllm(_: Path) -> Iterator[int]:
    """Run a real vLLM. Yield its port."""
    larger = json.dumps({"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "layer_types": ["full_attention"] * 12})
    flags = {**vllm.FLAGS, "max-num-seqs": SLOTS, "load-format": "dummy", "hf-overrides": larger}
    with vllm.running("qwen3", name=MODEL, flags=flags) as server:
        yield server.port


ENGINES: Mapping[str, Engine] = {
    "interactive": Engine(_simulator, (4, 6, 8, 10, 12, 16, 24, 32), ALLOWED, OBJECTIVE, 0.99),
    # The real steps of a busy machine vary, so medians are compared. The first token waits for a step of the batch.
    "vllm": Engine(_vllm, (2, 4, 6, 8, 32), 2.2, 2.1, 0.5),
}
COLUMNS = ("slots of the batch", "first token p50, p99 ms", "by alone", "between p50, p99 ms", "by alone", "batch tokens/s", "by best")


@dataclass(slots=True)
class Times:
    """The measurements of the clients: seconds to the first token, seconds between tokens, and the tokens of the batch per second."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    batch: float = 0.0

    def by(self, alone: Times, judged: float = 0.99) -> tuple[float, float]:
        """Return a quantile of both times, divided by that of the interactive clients alone."""
        both = ((self.first, alone.first), (self.between, alone.between))
        first, between = (quantile(own, judged) / quantile(other, judged) for own, other in both)
        return first, between


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile; not a number without values."""
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))] if ordered else float("nan")


def print_interactive(name: str, folder: Path, seconds: float) -> None:
    """Run all settings with an engine and print the table. ``seconds``: of each, after a warm-up."""
    engine = ENGINES[name]
    print(f"| {' | '.join(COLUMNS)} |\n|---|{'--:|' * (len(COLUMNS) - 1)}")
    with engine.run(folder) as port:
        measured = partial(_measured, folder, port, seconds)
        runs = {"alone": measured("alone", 0, None)}
        alone = runs["alone"]
        for each in engine.opened:
            runs[str(each)] = measured(str(each), BATCH_CLIENTS, SLOTS - each)
        # The time between tokens that is measured is a mean, which the pauses of a busy machine do not change.
        objectives = {"ttft": quantile(alone.first, engine.judged), "itl": quantile(alone.between, 0.5)}
        slo = {objective: f"{engine.objective * value:.4f}s" for objective, value in objectives.items()}
        runs["auto"] = measured("auto", BATCH_CLIENTS, "auto", slo)
    for row in rows(engine, runs):
        print(f"| {' | '.join(row)} |", flush=True)


def rows(engine: Engine, runs: dict[str, Times]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table. The best is the fixed number with the most tokens of the batch that keeps both times as allowed."""
    alone = runs["alone"]
    fixed = [run for name, run in runs.items() if name not in ("alone", "auto") and max(run.by(alone, engine.judged)) <= engine.allowed]
    best = max((run.batch for run in fixed), default=float("nan"))
    for name, run in runs.items():
        first, between = run.by(alone, engine.judged)
        yield (
            name,
            f"{1000 * quantile(run.first, 0.5):.0f}, {1000 * quantile(run.first, 0.99):.0f}",
            f"{first:.2f}",
            f"{1000 * quantile(run.between, 0.5):.1f}, {1000 * quantile(run.between, 0.99):.1f}",
            f"{between:.2f}",
            f"{run.batch:.0f}",
            f"{run.batch / best:.2f}",
        )


def _measured(
    folder: Path, port: int, seconds: float, name: str, batch: int, reserved: int | str | None, slo: dict[str, str] | None = None
) -> Times:
    """Run the clients through a gateway with these reserved slots. ``auto`` has a longer warm-up, in which it finds the number."""
    (folder / name).mkdir()
    model = {"id": MODEL, "servers": [{"url": f"http://127.0.0.1:{port}"}], "max_inflight": SLOTS, "queue": {"size": 1000, "wait": "5m"}}
    config = configuration(model)
    chat: dict[str, Any] = (
        {"id": "chat", "strict": True} | ({"reserved_slots": reserved} if reserved else {}) | ({"slo": slo} if slo else {})
    )
    config["classes"] = [chat, {"id": "batch"}]
    config["keys"] = [{"id": name, "hash": hash_of(f"sk-{name}"), "class": name} for name in ("chat", "batch")]
    with gateway(folder / name, config) as one:
        return asyncio.run(_send(one.url, seconds, 30.0 if reserved == "auto" else 8.0, batch))


async def _send(url: str, seconds: float, warm_up: float, batch: int) -> Times:
    times, tokens = Times(), [0]
    since = time.monotonic() + warm_up
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=httpx2.Limits(max_connections=None)) as client:
        tasks = [asyncio.create_task(_interactive(client, times, since, Random(number))) for number in range(CLIENTS)]
        tasks += [asyncio.create_task(_batch(client, tokens, since, Random(number))) for number in range(batch)]
        done, _ = await asyncio.wait(tasks, timeout=warm_up + seconds, return_when=asyncio.FIRST_EXCEPTION)
        for each in tasks:
            each.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        for each in done:
            each.result()  # raises what the client has raised
    times.batch = tokens[0] / seconds
    return times


def _body(draw: Random, prompt: int, tokens: int) -> dict[str, Any]:
    ids = [draw.randrange(100, 600) for _ in range(prompt)]
    return {"model": MODEL, "prompt": ids, "max_tokens": tokens, "ignore_eos": True, "simulate": {"tokens": tokens}}


async def _interactive(client: httpx2.AsyncClient, times: Times, since: float, draw: Random) -> None:
    """Send short streams with short pauses, until it is cancelled. Note the times of those that begin after ``since``."""
    headers = {"authorization": "Bearer sk-chat"}
    while True:
        await asyncio.sleep(draw.uniform(0, 0.5))
        began, last = time.monotonic(), 0.0
        async with client.stream("POST", "/v1/completions", json=_body(draw, 20, 20) | {"stream": True}, headers=headers) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {") or not (choices := json.loads(line[6:])["choices"]):
                    continue
                if not choices[0]["text"] and choices[0]["finish_reason"]:
                    continue
                now = time.monotonic()
                if began >= since:
                    (times.between if last else times.first).append(now - (last or began))
                last = now


async def _batch(client: httpx2.AsyncClient, tokens: list[int], since: float, draw: Random) -> None:
    """Send one request after the other, until it is cancelled. Count the tokens of responses after ``since``."""
    while True:
        body = _body(draw, 50, max(10, min(200, round(draw.lognormvariate(0, 0.7) * 40))))
        response = await client.post("/v1/completions", json=body, headers={"authorization": "Bearer sk-batch"})
        response.raise_for_status()
        if time.monotonic() >= since:
            tokens[0] += response.json()["usage"]["completion_tokens"]
