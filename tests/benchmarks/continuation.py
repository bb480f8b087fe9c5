"""Measures what continuable streams cost, and how long a client waits after its server is lost.

``python -m tests.benchmarks.continuation`` prints the figures and writes nothing. The rules: two models have the same servers and differ in
``resume`` alone. Their streams run in pairs, the first model first in every other pair, and the CPU time is that of the gateway's only
worker. The cost of a stream is what is left without its events, from streams of two lengths.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from gateway.api.routes import Dialect
from gateway.continuation.token_record import TokenRecord
from tests.gateway.continuation.stage import CHAT, PLAIN, Json, Stage, chat, simulators, stage
from tests.support.cutting_proxy import Cut
from tests.support.process import Gateway, configuration, gateway
from tests.support.wire import request, request_once
from tests.upstream.simulator.test_process import Simulated

RECORDED, PLAINLY = "exact", "off"
"""The models: with ``resume: exact`` and with ``resume: false``."""
SHORT, LONG = 20, 220
"""Tokens of the streams."""
RATE = 40
"""Tokens of a stream in a second: each event is one read of the gateway, as with a real server."""
TOKENS = 100_000
"""Tokens of the record whose memory is measured."""
STEP = "0.010,0.0005,0.00005"
"""Seconds of the engine's step, for each sequence, and for each token of a prompt, where gaps are measured."""
PROMPT = "Tell me about the sea. " * 200


@dataclass
class Costs:
    """Seconds of CPU for the short and for the long streams of one model."""

    short: float
    long: float
    short_events: int
    long_events: int

    @property
    def event(self) -> float:
        """Microseconds of an event."""
        return (self.long - self.short) / (self.long_events - self.short_events) * 1e6

    def stream(self, count: int) -> float:
        """Microseconds of a stream without its events."""
        return self.short / count * 1e6 - self.event * self.short_events / count


@dataclass
class Gaps:
    """Milliseconds from the loss of a server to the next event, and to the first event of undisturbed streams."""

    after_loss: list[float] = field(default_factory=list)
    first_event: list[float] = field(default_factory=list)


def main() -> int:
    """Measure, print the tables and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.continuation", description=__doc__)
    parser.add_argument("--pairs", type=int, default=6, help="runs of both models")
    parser.add_argument("--streams", type=int, default=40, help="at once")
    parser.add_argument("--losses", type=int, default=50, help="streams whose server is lost")
    given = parser.parse_args()
    costs = _costs(given.pairs, given.streams)
    print("| resume | CPU for an event, µs | for a stream, µs |\n|---|--:|--:|")
    for name, runs in costs.items():
        event, stream = (
            statistics.median(values) for values in zip(*((each.event, each.stream(given.streams)) for each in runs), strict=True)
        )
        print(f"| {name} | {event:.1f} | {stream:.0f} |")
    pairs = list(zip(costs[RECORDED], costs[PLAINLY], strict=True))
    events = statistics.median(one.event / other.event for one, other in pairs)
    streams = statistics.median(one.stream(given.streams) / other.stream(given.streams) for one, other in pairs)
    print(f"| median of the pairs' ratios | {events:.2f} | {streams:.2f} |\n")
    print(f"Memory of a record: {_memory():.1f} bytes a token.\n")
    gaps = asyncio.run(_gaps(given.losses))
    print("| ms | p50 | p99 |\n|---|--:|--:|")
    for title, values in (("first event of an undisturbed stream", gaps.first_event), ("next event after a loss", gaps.after_loss)):
        print(f"| {title} | {_quantile(values, 0.5):.0f} | {_quantile(values, 0.99):.0f} |")
    return 0


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def _memory() -> float:
    """Return the bytes of a token in a record."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    record = TokenRecord(Dialect.CHAT, lambda _: True)
    for token in range(TOKENS):
        record.add([token])
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(record.ids) == TOKENS
    return (after - before) / TOKENS


# CPU


def _costs(pairs: int, streams: int) -> Mapping[str, list[Costs]]:
    costs: dict[str, list[Costs]] = {RECORDED: [], PLAINLY: []}
    with tempfile.TemporaryDirectory() as folder, _gateway(Path(folder)) as (one, servers):
        for name in costs:
            asyncio.run(_streamed(one, name, SHORT, streams))  # warm-up
        bodies = [entry["body"] or {} for server in servers for entry in server.requests() if entry["path"] == CHAT]
        assert sum(body.get("return_token_ids") is True for body in bodies) == streams, "the streams of one model are recorded"
        for number in range(pairs):
            for name in (RECORDED, PLAINLY) if number % 2 else (PLAINLY, RECORDED):
                costs[name].append(_cost(one, name, streams))
    return costs


@contextmanager
def _gateway(folder: Path) -> Iterator[tuple[Gateway, list[Simulated]]]:
    with simulators(2, "--sim-tokens-per-second", str(RATE)) as servers:
        addresses = [{"url": server.url, "model": "tiny"} for server in servers]
        models: list[Json] = [{"id": RECORDED, "servers": addresses}, {"id": PLAINLY, "servers": addresses, "resume": False}]
        with gateway(folder, configuration(*models, workers=1)) as one:
            yield one, servers


def _cost(one: Gateway, name: str, streams: int) -> Costs:
    [pid] = one.workers().values()
    worker = psutil.Process(pid)
    seconds, events = list[float](), list[int]()
    for tokens in (SHORT, LONG):
        before = sum(worker.cpu_times()[:2])
        events.append(asyncio.run(_streamed(one, name, tokens, streams)))
        seconds.append(sum(worker.cpu_times()[:2]) - before)
    return Costs(seconds[0], seconds[1], events[0], events[1])


async def _streamed(one: Gateway, name: str, tokens: int, streams: int) -> int:
    """Read so many streams at once. Returns the number of their events."""
    body = {**chat(max_tokens=tokens, min_tokens=tokens, ignore_eos=True, **PLAIN), "model": name}
    replies = await asyncio.gather(*(request_once(one.data, request(body)) for _ in range(streams)))
    assert all(reply.status == 200 and reply.body.endswith(b"data: [DONE]\n\n") for reply in replies)
    return sum(reply.body.count(b"\n\n") for reply in replies)


# Gaps


async def _gaps(losses: int) -> Gaps:
    gaps = Gaps()
    with simulators(2, "--sim-step-time", STEP) as servers:
        async with stage(servers) as one:
            for number in range(losses):
                await _measure_gap(one, number, gaps)
    return gaps


async def _measure_gap(one: Stage, number: int, gaps: Gaps) -> None:
    undisturbed = await one.send(CHAT, _unknown(f"{number} undisturbed"))
    outcome = await one.send(CHAT, _unknown(f"{number} lost"), Cut(15))
    [continuation] = outcome.record.continuations
    assert undisturbed.record.first_token is not None and continuation.gap is not None
    gaps.first_event.append(undisturbed.record.first_token * 1e3)
    gaps.after_loss.append(continuation.gap * 1e3)


def _unknown(name: str) -> Json:
    """Return a request whose prompt is in no cache."""
    return chat(f"{name} {PROMPT}", max_tokens=40, min_tokens=40, ignore_eos=True, **PLAIN)


if __name__ == "__main__":
    raise SystemExit(main())
