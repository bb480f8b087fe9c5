"""Cut many random streams, some of them twice, and compare each with its undisturbed stream.

``python -m tests.gateway.continuation [COUNT [REAL]]`` prints the number of equal streams, each difference, and the gaps. Sampled streams
follow.
``REAL``: so many streams of two real vLLM servers, one of which is killed in the middle of the last ones.
``python -m tests.gateway.continuation restart [COUNT]`` prints what a rolling restart under so many streams takes.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Sequence

from gateway.snapshot.snapshot import Resume
from tests.gateway.continuation.restart import measure
from tests.gateway.continuation.stage import (
    CHAT,
    COMPLETIONS,
    MANY_BYTES,
    Stage,
    completion,
    sampled_trials,
    simulators,
    stage,
    stop_trial,
    trial,
)
from tests.vllm import test_lost_streams as real
from upstream.http.deadlines import Timeouts

COUNT, SAMPLED, KILLED, STREAMS = 1000, 300, 20, 300
STOPPED = 0.3
"""The part of the simulators' streams that end at a random stop string."""


class Comparison:
    """The results so far."""

    def __init__(self, count: int) -> None:
        self._dice = random.Random(count)
        self.results = Counter[str]()
        self.gaps: dict[str, list[float]] = {}
        self.count = self.different = 0

    async def add(self, one: Stage, count: int, *, stopped: float = 0.0, reasoning: bool = True) -> None:
        """Cut so many streams. ``stopped``: the part of them that end at a random stop string."""
        for _ in range(count):
            name = self._dice.choice([*one.requests])
            self.count += 1
            try:
                if self._dice.random() < stopped:
                    outcome = await stop_trial(one, completion(prompt=name, max_tokens=80), self._dice)
                else:
                    outcome = await trial(one, name, self._dice, reasoning=reasoning)
                for each in outcome.record.continuations:
                    self.results[f"{each.path} {each.outcome}"] += 1
                    if each.gap is not None:
                        self.gaps.setdefault(each.path, []).append(1e3 * each.gap)
            except AssertionError as error:
                self.different += 1
                print(f"{name}: {error}", flush=True)

    def show(self, streams: str) -> None:
        """Print the figures."""
        print(f"{self.count - self.different} of {self.count} {streams} are equal; continuations: {dict(self.results)}")
        for path, unsorted in self.gaps.items():
            gaps = sorted(unsorted)
            print(f"gap of {path}: p50 {gaps[len(gaps) // 2]:.0f} ms, p99 {gaps[len(gaps) * 99 // 100]:.0f} ms", flush=True)


async def compare(count: int) -> int:
    """Compare so many streams of simulators. Returns the number of those that differ."""
    compared = Comparison(count)
    for flags in ((), MANY_BYTES):
        with simulators(3, *flags) as servers:
            async with stage(servers) as one:
                await compared.add(one, count // 2, stopped=STOPPED)
    with simulators(2) as servers:
        async with stage(servers, resume=Resume.SAMPLED) as one:
            for path in (CHAT, COMPLETIONS):
                await sampled_trials(one, path, SAMPLED // 2)
    print(f"{SAMPLED} sampled streams: no token was lost or repeated")
    compared.show("streams")
    return compared.different


async def compare_real(count: int) -> int:
    """Compare so many streams of real servers. Returns the number of those that differ."""
    compared = Comparison(count)
    with real.two_servers() as servers:
        async with stage(real.thrice(servers), real.REQUESTS, timeouts=Timeouts(idle=120)) as one:
            await compared.add(one, count - KILLED, reasoning=False)
            names = ([*real.REQUESTS] * KILLED)[:KILLED]
            continued = await real.killed(one, servers, names)
    compared.show("streams of real servers")
    print(f"{KILLED} streams while a server was killed are equal; {continued} of them were continued")
    return compared.different


async def compare_all(count: int, real_count: int = 0) -> int:
    """Compare streams of simulators and of real servers. Returns the number of those that differ."""
    return await compare(count) + (await compare_real(real_count) if real_count else 0)


def main(arguments: Sequence[str]) -> int:
    """Return 1 if a client noticed anything."""
    numbers = [int(each) for each in arguments if each.isdigit()]
    if arguments[:1] == ["restart"]:
        return asyncio.run(measure(*(numbers or [STREAMS]))) > 0
    return asyncio.run(compare_all(*(numbers or [COUNT]))) > 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
