"""Measures how fair the gateway's queue is: the service of each flow of requests beside the others, and what fairness costs.

``python -m tests.benchmarks.fairness [SCENARIO …]`` prints one table and writes nothing. ``queue`` is the scenario of the queue alone, and
``interactive`` and ``vllm`` (interactive.py), ``goodput`` (goodput.py) and ``locality`` (locality.py) run if they are named. The rules: one
gateway in front of one simulator with four slots; each client sends its next request after a response; everything is read from the ledger.
In each scenario the same clients send with one key, too, so that requests are served in the order of arrival.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx2

from gateway.admission.fair_queue import FairQueue, Share
from gateway.auth.keys import hash_of
from tests.benchmarks import goodput, locality
from tests.benchmarks.interactive import ENGINES, print_interactive
from tests.benchmarks.locality import DEFICIT
from tests.benchmarks.process import accepts, free_ports, running
from tests.support.process import SIMULATOR, configuration, gateway, wait_for

MODEL = "sim"
SLOTS = 4
LONGEST = 1024
"""The ``max_tokens`` of each request: the gateway does not know how long a response will be."""
STEP = "0.001,0.00005,0.000005"
"""Seconds of a step of the simulator: some 3,000 tokens a second."""
FIFO = "fifo"
COLUMNS = (
    "scenario", "flow", "requests", "service/s", "by weight", "wait p50, p99 ms", "FIFO: by weight", "FIFO: wait", "tokens/s, FIFO",
)  # fmt: skip
ITEMS, FLOWS, OPERATIONS = 10_000, 1_000, 20_000

Length = Callable[[Random], int]


def constant(length: int) -> Length:
    """Return a length that is always the same."""
    return lambda _: length


def lognormal(median: float, sigma: float) -> Length:
    """Return a length from a log-normal distribution, at most ``LONGEST``."""
    return lambda draw: max(1, min(LONGEST, round(draw.lognormvariate(0, sigma) * median)))


_SHORT = constant(20)


@dataclass(frozen=True, slots=True)
class Flow:
    """Clients whose service is counted together. ``weight``: its fair share, which its settings must mean.

    ``key`` has the settings of each of its keys, ``team`` those of its team, if it has one. With ``pulse``, a client sends only at
    multiples of so many seconds. A client disconnects after the part ``read`` of a response.
    """

    name: str
    prompt: Length = _SHORT
    completion: Length = _SHORT
    clients: int = 12
    keys: int = 1
    weight: float = 1.0
    key: Mapping[str, Any] = field(default_factory=dict)
    team: Mapping[str, Any] | None = None
    pulse: float | None = None
    read: float = 1.0


SCENARIOS: Mapping[str, tuple[Flow, ...]] = {
    "lengths": (Flow("long", completion=constant(400)), Flow("short")),
    "teams": (Flow("1 key", team={}), Flow("50 keys", team={}, keys=50, clients=50)),
    "team weights": (Flow("weight 1", team={}), Flow("weight 3", team={"weight": 3}, weight=3, clients=24)),
    "weights": (Flow("usual"), Flow("priority -2", weight=4, key={"priority": -2}, clients=24)),
    "lognormal": (Flow("varying", completion=lognormal(50, 1)), Flow("constant")),
    "prompts": (Flow("long prompts", prompt=constant(1600)), Flow("long responses", completion=constant(400))),
    "pulses": (Flow("steady", clients=SLOTS), Flow("pulses", clients=2 * SLOTS, pulse=0.1)),
    "disconnects": (Flow("staying", completion=constant(100)), Flow("leaving", completion=constant(100), read=0.9)),
}
"""In ``pulses``, the queue can be empty between two pulses."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line. The weights are those of prompt and completion tokens."""

    seconds: float
    seed: int
    prompt_weight: float
    completion_weight: float


@dataclass(frozen=True, slots=True)
class Service:
    """The service of a flow: finished requests, weighted tokens, completion tokens, and the seconds of each request in the queue."""

    requests: int
    weighted: float
    completion: int
    waits: Sequence[float]

    def wait(self, share: float) -> str:
        """Return a quantile of the waits, in milliseconds."""
        return f"{1000 * self.waits[int(share * (len(self.waits) - 1))]:.0f}" if self.waits else "-"


def main() -> int:
    """Run the scenarios and print the table. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.fairness", description=__doc__)
    others = [*ENGINES, "goodput", "locality"]
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, "queue", *others, []], help="default: all but the last four")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each of the two runs of a scenario")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompt-weight", type=float, default=1.0, help="of a prompt token that was not cached")
    parser.add_argument("--completion-weight", type=float, default=4.0, help="of a completion token")
    given = parser.parse_args()
    names = given.scenarios or [*SCENARIOS, "queue"]
    options = Options(given.seconds, given.seed, given.prompt_weight, given.completion_weight)
    with tempfile.TemporaryDirectory() as folder:
        if own := [name for name in names if name in SCENARIOS]:
            _print_scenarios(own, Path(folder), options)
        for name in (each for each in names if each in ENGINES):
            (Path(folder) / name).mkdir()
            print_interactive(name, Path(folder) / name, options.seconds)
    if "queue" in names:
        without, with_deficit = (f"{queue_cost(ITEMS, FLOWS, deficit) * 1e6:.1f} µs" for deficit in (0.0, DEFICIT))
        print(f"queue: {without} for each request, with a deficit {with_deficit}, with {ITEMS:,} items in {FLOWS:,} flows")
    if "locality" in names:
        _print_header(locality.COLUMNS, 2)
        for row in locality.rows(options.seed):
            print(f"| {' | '.join(row)} |", flush=True)
    if "goodput" in names:
        with tempfile.TemporaryDirectory() as folder:
            _print_header(goodput.COLUMNS, 1)
            for row in goodput.rows(Path(folder), options.seed):
                print(f"| {' | '.join(row)} |", flush=True)
    return 0


def _print_header(columns: Sequence[str], texts: int) -> None:
    print(f"| {' | '.join(columns)} |\n|{'---|' * texts}{'--:|' * (len(columns) - texts)}")


def _print_scenarios(names: Sequence[str], folder: Path, options: Options) -> None:
    _print_header(COLUMNS, 2)
    with _servers(folder, names) as url:
        for name in names:
            for row in _rows(name, url, folder / "usage.db", options):
                print(f"| {' | '.join(row)} |", flush=True)


def _rows(name: str, url: str, ledger: Path, options: Options) -> Iterator[tuple[str, ...]]:
    """Run a scenario with the keys of its flows and with one key, and yield the rows of the table."""
    flows = SCENARIOS[name]
    fair, fifo = (_run(name, url, ledger, options, fifo=each) for each in (False, True))
    rates = " ".join(f"{sum(each.completion for each in run) / options.seconds:,.0f}" for run in (fair, fifo))
    for number, (flow, got, unfair) in enumerate(zip(flows, fair, fifo, strict=True)):
        yield (
            name if not number else "",
            flow.name,
            str(got.requests),
            f"{got.weighted / options.seconds:,.0f}",
            f"{_relative(flows, fair, number):.2f}",
            f"{got.wait(0.5)}, {got.wait(0.99)}",
            f"{_relative(flows, fifo, number):.2f}",
            f"{unfair.wait(0.5)}, {unfair.wait(0.99)}",
            rates if not number else "",
        )


def _relative(flows: Sequence[Flow], run: Sequence[Service], number: int) -> float:
    """Return the service of a flow by its weight, in times of that of the last flow: 1 is fair."""
    last = run[-1].weighted / flows[-1].weight
    return run[number].weighted / flows[number].weight / last if last else float("nan")


# The servers


@contextmanager
def _servers(folder: Path, names: Sequence[str]) -> Iterator[str]:
    """Run a simulator, and a gateway that has the keys of all scenarios. Yield the URL of the gateway."""
    [port] = free_ports(1)
    flags = ["--host", "127.0.0.1", "--port", str(port), "--sim-step-time", STEP, "--enable-prompt-tokens-details"]
    cores = sorted(os.sched_getaffinity(0))
    with running([*SIMULATOR, MODEL, *flags], folder, cores, {"PYTHONPATH": os.getcwd()}, lambda: accepts(port), 60):
        model = {"id": MODEL, "servers": [{"url": f"http://127.0.0.1:{port}"}], "max_inflight": SLOTS}
        config = configuration(model | {"queue": {"size": 1000, "wait": "5m"}})
        config |= {"ledger": {"url": f"sqlite:///{folder}/usage.db", "user": True}, "keys": [_key(FIFO)], "teams": []}
        for name, flow in ((each, flow) for each in names for flow in SCENARIOS[each]):
            shared = dict(flow.key) if flow.team is None else {**flow.key, "team": _team(name, flow)}
            config["keys"] += [_key(_key_id(name, flow, number)) | shared for number in range(flow.keys)]
            config["teams"] += [] if flow.team is None else [{"id": _team(name, flow), **flow.team}]
        (folder / "gateway").mkdir()
        with gateway(folder / "gateway", config) as one:
            yield one.url


def _team(scenario: str, flow: Flow) -> str:
    return f"{scenario} {flow.name}".replace(" ", "-")


def _key_id(scenario: str, flow: Flow, number: int) -> str:
    return f"{_team(scenario, flow)}-{number}"


def _key(identity: str) -> dict[str, Any]:
    return {"id": identity, "hash": hash_of(f"sk-{identity}")}


# The clients


def _run(name: str, url: str, ledger: Path, options: Options, *, fifo: bool) -> list[Service]:
    """Run the clients of a scenario for the seconds, and return the service of each flow."""
    users = [f"{_team(name, flow)}{'-of-one-key' if fifo else ''}" for flow in SCENARIOS[name]]
    until, responses = asyncio.run(_send(name, url, options, users, fifo=fifo))
    wait_for(lambda: len(_ledger(ledger, users)) >= responses, 60)
    rows = [row for row in _ledger(ledger, users) if row[1] <= until]
    return [_service([row for row in rows if row[0] == user], options) for user in users]


async def _send(name: str, url: str, options: Options, users: Sequence[str], *, fifo: bool) -> tuple[float, int]:
    """Run the clients. Return the time at which they ended, and the number of their responses."""
    responses = itertools.count()

    def key(flow: Flow, number: int) -> str:
        return FIFO if fifo else _key_id(name, flow, number % flow.keys)

    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=httpx2.Limits(max_connections=None)) as client:
        clients = [
            asyncio.create_task(_client(client, flow, key(flow, number), user, responses, Random(f"{options.seed} {user} {number}")))
            for flow, user in zip(SCENARIOS[name], users, strict=True)
            for number in range(flow.clients)
        ]
        done, _ = await asyncio.wait(clients, timeout=options.seconds, return_when=asyncio.FIRST_EXCEPTION)
        until = time.time()
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        for each in done:
            each.result()  # raises what the client has raised
    return until, next(responses)


async def _client(client: httpx2.AsyncClient, flow: Flow, key: str, user: str, responses: Iterator[int], draw: Random) -> None:
    """Send one request after the other, until it is cancelled."""
    headers = {"authorization": f"Bearer sk-{key}"}
    while True:
        if flow.pulse is not None:
            await asyncio.sleep(flow.pulse - time.monotonic() % flow.pulse)
        prompt = [draw.randrange(1000, 100_000) for _ in range(flow.prompt(draw))]
        tokens = flow.completion(draw)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": LONGEST, "user": user, "simulate": {"tokens": tokens}}
        if flow.read == 1:
            (await client.post("/v1/completions", json=body, headers=headers)).raise_for_status()
        else:
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=headers) as response:
                response.raise_for_status()
                await _read(response, round(flow.read * tokens))
        next(responses)


async def _read(response: httpx2.Response, tokens: int) -> None:
    events = 0
    async for line in response.aiter_lines():
        events += line.startswith("data: {")
        if events >= tokens:
            return


# The ledger

_ROWS = """SELECT end_user, (julianday(time) - 2440587.5) * 86400 + total_ms / 1000,
prompt_tokens, cached_tokens, completion_tokens, queued_ms
FROM gateway_usage WHERE end_user IN ({})"""


def _ledger(file: Path, users: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the requests of these end users: end user, the time at which it ended, its tokens, and its milliseconds in the queue."""
    with closing(sqlite3.connect(file)) as database, suppress(sqlite3.OperationalError):  # it may be locked
        return database.execute(_ROWS.format(",".join("?" * len(users))), users).fetchall()
    return []


def _service(rows: Sequence[tuple[Any, ...]], options: Options) -> Service:
    prompt, cached, completion = (sum(row[at] or 0 for row in rows) for at in (2, 3, 4))
    weighted = options.prompt_weight * (prompt - cached) + options.completion_weight * completion
    return Service(len(rows), weighted, completion, sorted((row[5] or 0) / 1000 for row in rows))


# The queue alone


def queue_cost(items: int, flows: int, deficit: float = 0.0) -> float:
    """Return the seconds that a request spends in the queue's own code, while so many others wait in so many keys of 100 teams.

    It is put into the queue, dispatched, charged, and settled. With a deficit, any of the candidates is dispatched.
    """
    queue = FairQueue[int]()
    for number in range(items):
        _put(queue, number, number % flows)
    draw = Random(1)
    added = [(number, draw.randrange(flows), draw.random() * 100) for number in range(items, items + OPERATIONS)]
    began = time.perf_counter()
    for number, flow, service in added:
        _put(queue, number, flow)
        preferred = draw.choice(queue.candidates(deficit)) if deficit else None
        _, leaf = queue.pop(0.0, preferred=preferred)
        queue.charge(leaf, service, 0.0)
        queue.settle(leaf, service, 50.0, 0.0)
    return (time.perf_counter() - began) / OPERATIONS


def _put(queue: FairQueue[int], item: int, flow: int) -> None:
    queue.put(item, queue.leaf((Share(f"team-{flow % 100}", 1.0), Share(f"key-{flow}", 1.0))), float(item), 0.0)


if __name__ == "__main__":
    print(f"load of the machine at the start: {os.getloadavg()[0]:.1f}")
    sys.exit(main())
