"""Servers with a cache of blocks, and the time that their work takes: a simulation, the same for every run of the same seed.

A server computes the tokens of prompts that it does not know one prompt after the other, and answers as many at once as there are. Its
cache holds blocks, of which the least recently used go first, and of one prompt's the last first, as in vLLM.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import quantiles

from tests.benchmarks.prefix.choosers import Chooser, Machine
from tests.benchmarks.prefix.traces import BLOCK, Segment, Talk

CACHE = 262_144
"""Tokens that a server's cache holds."""
COMPUTED = 8_000.0
"""Tokens of prompts that a server computes in a second."""
TOKENS_PER_SECOND = 40.0
"""Tokens of each answer in a second."""
WARMING = 0.25
"""The share of requests at the start that is not counted, because the caches are empty."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """``hits``: the share of prompt tokens that were cached. ``skew``: the busiest server's requests in flight, over the mean of all.

    ``first``: seconds to the first token, in all but the slowest twentieth of the requests.
    """

    hits: float
    skew: float
    first: float


class Cache:
    """The blocks that one server knows, the least recently used first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity // BLOCK
        self._blocks: dict[int, None] = {}

    def admit(self, prompt: Sequence[Segment]) -> int:
        """Remember a prompt; the tokens of it that were known, from its beginning on."""
        blocks = list(_blocks(prompt))
        known = sum(1 for _ in itertools.takewhile(self._blocks.__contains__, blocks))
        for block in reversed(blocks):
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > self._capacity:
            del self._blocks[next(iter(self._blocks))]
        return known * BLOCK


def _blocks(prompt: Sequence[Segment]) -> Iterator[int]:
    """A name for each block: of all that is before it and of itself. Hashes of tuples of numbers are the same in every process."""
    name = 0
    for segment in prompt:
        for part in range(segment.tokens // BLOCK):
            name = hash((name, segment.number, part))
            yield name


class _Server:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.cache = Cache(CACHE)
        self.free_at = 0.0
        self.busy = 0.0
        self._since = 0.0

    def change(self, now: float, by: int) -> None:
        self.busy += self.machine.in_flight * (now - self._since)
        self.machine.in_flight += by
        self._since = now

    def work(self, now: float, tokens: int, response: int) -> float:
        """When the answer will be whole."""
        self.free_at = max(self.free_at, now) + tokens / COMPUTED
        return self.free_at + response / TOKENS_PER_SECOND


def play(talks: Sequence[Talk], servers: int, chooser: Callable[[Sequence[Machine]], Chooser]) -> Outcome:
    """Let all conversations happen."""
    machines = [Machine(f"http://10.0.{number // 250}.{number % 250}:8000") for number in range(servers)]
    world = {machine: _Server(machine) for machine in machines}
    choose = chooser(machines)
    warming = WARMING * sum(len(talk.turns) for talk in talks)
    requested = cached = requests = 0
    waits: list[float] = []
    order = itertools.count()
    events: list[tuple[float, int, Iterator[float]]] = []

    def talking(talk: Talk) -> Iterator[float]:
        """Yield the times of a conversation's requests."""
        nonlocal requested, cached, requests
        now, prompt = talk.start, talk.system
        for exchange in talk.turns:
            yield (now := now + exchange.pause)
            prompt += exchange.prompt
            server = world[choose(prompt)]
            known, length = server.cache.admit(prompt), sum(segment.tokens for segment in prompt)
            requests += 1
            if requests > warming:
                requested, cached = requested + length, cached + known
            server.change(now, 1)
            done = server.work(now, length - known, exchange.completion.tokens)
            if requests > warming:
                waits.append(server.free_at - now)
            yield (now := done)
            server.change(now, -1)
            prompt += (exchange.completion,)
            server.cache.admit(prompt)

    for talk in talks:
        task = talking(talk)
        heapq.heappush(events, (next(task), next(order), task))
    while events:
        _, _, task = heapq.heappop(events)
        if (when := next(task, None)) is not None:
            heapq.heappush(events, (when, next(order), task))
    busy = [server.busy for server in world.values()]
    return Outcome(cached / requested, max(busy) * servers / sum(busy), quantiles(waits, n=20)[-1])
