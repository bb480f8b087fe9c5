"""Measures how many prompt tokens servers find cached while requests are queued fairly, and how fair it is, in simulated time.

``python -m tests.benchmarks.fairness locality`` prints the table. The queue, the shares, the pool and ``balance: cost`` are the gateway's
own, the servers and the traffic those of ``tests/benchmarks/prefix``. The rules: every key always has requests that wait, so its service
divided by its weight is to be equal; the same seed gives the same run.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from random import Random

import pytest

from gateway.admission import fair_queue
from gateway.admission import queue as queue_module
from gateway.admission.queue import ModelQueues, QueuedRequest
from gateway.admission.shares import QueueShares
from gateway.admission.weighted_tokens import ServiceWeights, Tokens
from gateway.api.usage import Usage
from gateway.config.models import Queue as QueueSettings
from gateway.snapshot.snapshot import Key, Model, Queue
from tests.benchmarks.prefix.costs import Blocks
from tests.benchmarks.prefix.engines import EventClock, SerialEngine
from tests.benchmarks.prefix.requests import Request
from tests.benchmarks.prefix.traces import TRACES, Prompt, Segment, Turn
from tests.benchmarks.prefix.world import Server as SimulatedServer
from tests.gateway.admission.test_queue_state_machine import Metrics
from upstream.balancing.cost_model import CostModel
from upstream.balancing.cost_model import Prompt as PromptBlocks
from upstream.balancing.policies.cost import Cost
from upstream.balancing.policies.policy import RequestFacts
from upstream.balancing.pool import NoServerError, Pool
from upstream.balancing.server import Condition, Server, ServerSpec
from upstream.http.address import Address
from upstream.http.deadlines import Deadlines
from upstream.http.inline_task import InlineTask, Signal

Talk = tuple[tuple[Segment, ...], tuple[Turn, ...]]

DEFICIT = QueueSettings().deficit
ORDERS: Mapping[str, float | None] = {
    "in the order of arrival": None,
    "most cached first": math.inf,
    "fair": 0.0,
    f"fair, `deficit: {DEFICIT:g}`": DEFICIT,
}
"""The deficit of each order of the waiting requests. In the order of arrival, all requests have one key. The most cached is first without
any other rule: all keys are candidates, and no request is deferred for too long.
"""
COLUMNS = ("traffic", "order", "cached", "Jain's index", "requests/s")
_TICK = 0.25  # seconds, as in a worker


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of traffic. The keys have the ``weights`` in rotation. Each has ``talks`` conversations at a time for its weight.

    ``by_text``: each key sends the conversations with its own system prompts; otherwise they are dealt out to the keys.
    """

    title: str
    trace: str
    keys: int
    talks: int
    slots: int
    seconds: float
    weights: Sequence[float] = (1.0,)
    servers: int = 4
    by_text: bool = False


CASES: Mapping[str, Case] = {
    "agents": Case("Agents, 16 keys of weights 1 and 2", "agents", 16, 8, 8, 400.0, (1.0, 2.0)),
    "b2b": Case("B2B, 75 customers with a key each", "b2b-2", 75, 4, 32, 400.0, by_text=True),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """``cached``: the share of prompt tokens. ``jain``: Jain's index of the keys' service by weight. ``rate``: requests in a second."""

    cached: float
    jain: float
    rate: float


@dataclass(slots=True, eq=False)
class _InFlight:
    server: SimulatedServer
    finished: Signal = field(default_factory=Signal)


class FairWorld:
    """One run of a case in one order."""

    def __init__(self, patch: pytest.MonkeyPatch, case: Case, deficit: float | None, seed: int, blocks: Blocks) -> None:
        self.clock = EventClock()
        self._case, self._blocks = case, blocks
        patch.setattr(queue_module, "monotonic", lambda: self.clock.now)
        if deficit == math.inf:
            patch.setattr(queue_module, "DEFERRAL", math.inf)
            patch.setattr(fair_queue, "CANDIDATES", case.keys)
        names = [f"s{number}" for number in range(case.servers)]
        self._engines = {name: SimulatedServer(number, SerialEngine(self.clock, self)) for number, name in enumerate(names)}
        servers = [Server(ServerSpec(name, Address(port=1), "m"), Condition.UP, clock=lambda: self.clock.now) for name in names]
        for server in servers:
            server.limit = case.slots
        self._pool = Pool(servers, Cost(servers, model=CostModel(clock=lambda: self.clock.now)))
        self._metrics = Metrics()
        self._queues = ModelQueues(Deadlines(), self._metrics, lambda *_: None)
        model = Model("m", (), queue=Queue(10_000, 30.0, deficit=deficit or 0.0))
        self._queues.set_models([(model, self._pool)], QueueShares())
        self._one_key = Key("all") if deficit is None else None
        self._keys = [Key(f"k{number}", weight=case.weights[number % len(case.weights)]) for number in range(case.keys)]
        self._made = TRACES[case.trace].talks(Random(seed), case.servers)
        self._ready: defaultdict[int, deque[Talk]] = defaultdict(deque)
        self._texts: dict[int, int] = {}
        self._in_flight: dict[Request, _InFlight] = {}
        self._service = [0.0] * case.keys
        """Of each key."""
        self._prompt = self._cached = self._requests = 0

    def play(self) -> Outcome:
        """Run the time of the case. The first quarter is not counted, because the caches are empty."""
        for number, key in enumerate(self._keys):
            for _ in range(round(self._case.talks * key.weight)):
                InlineTask(self._talk(number)).step()
        self._tick(0.0)
        while self.clock.now < self._case.seconds:
            self.clock.step()
        by_weight = [service / key.weight for key, service in zip(self._keys, self._service, strict=True)]
        jain = sum(by_weight) ** 2 / len(by_weight) / sum(each * each for each in by_weight)
        return Outcome(self._cached / self._prompt, jain, self._requests / self._case.seconds / 0.75)

    def _tick(self, now: float) -> None:
        self._queues.tick()
        self.clock.call_at(now + _TICK, self._tick)

    def _next_talk(self, number: int) -> Talk:
        """Return the next conversation of a key."""
        while not (ready := self._ready[number]):
            talk = next(self._made)
            text = talk[0][0].number
            owner = self._texts.setdefault(text, len(self._texts) % self._case.keys) if self._case.by_text else number
            self._ready[owner].append(talk)
        return ready.popleft()

    async def _talk(self, number: int) -> None:
        """Have one conversation after the other."""
        while True:
            system, exchanges = self._next_talk(number)
            prompt = Prompt().then(*system)
            for message, completion, pause in map(attrgetter("prompt", "completion", "pause"), exchanges):
                if pause:
                    await self._pause(pause)
                prompt = prompt.then(*message)
                await self._serve(number, Request(prompt, completion, self.clock.now))
                prompt = prompt.then(completion)

    async def _pause(self, seconds: float) -> None:
        paused = Signal()
        self.clock.call_at(self.clock.now + seconds, lambda _: paused.set())
        await paused

    async def _serve(self, number: int, request: Request) -> None:
        """Queue a request, send it to a server, and count it."""
        cut, slot, key = self._blocks.of(request.prompt), None, self._one_key or self._keys[number]
        blocks = PromptBlocks(cut.keys, cut.size, stream=True)
        while True:
            try:
                server = self._pool.choose((), RequestFacts(prompt=blocks))
                break
            except NoServerError:
                with self._queues.slot("m", QueuedRequest(key, self.clock.now, cut.size, prompt=blocks)) as slot:
                    await slot.wait()
        in_flight = self._in_flight[request] = _InFlight(self._engines[server.name])
        server.start_exchange()
        in_flight.server.engine.submit(request, self.clock.now)
        await in_flight.finished
        in_flight.server.cache.admit(request.prompt.then(request.completion))
        server.finish_exchange()
        assert blocks.placement is not None
        blocks.placement.finished(request.prompt.tokens, request.cached, request.completion.tokens)
        usage = Usage(request.prompt.tokens, request.completion.tokens, request.cached)
        for kind, tokens in (("prompt", usage.prompt), ("cached", usage.cached), ("completion", usage.completion)):
            self._metrics.cells("tokens_total", key.id, "m", kind)[0] += tokens
        if slot is not None:
            slot.finish(usage)
        if self.clock.now > self._case.seconds / 4:
            self._service[number] += ServiceWeights().service(Tokens.of(usage))
            self._prompt += request.prompt.tokens
            self._cached += request.cached
            self._requests += 1

    # Reports of the engines

    def expected_tokens(self, request: Request) -> int:
        """Return how many tokens of a prompt its server would have to compute now."""
        return request.prompt.tokens - self._in_flight[request].server.cache.known(request.prompt)

    def uncached_tokens(self, request: Request) -> int:
        """Look up the prompt in the cache of its server, and store it there."""
        cache = self._in_flight[request].server.cache
        request.cached = cache.known(request.prompt)
        cache.admit(request.prompt)
        return request.prompt.tokens - request.cached

    def first_token(self, request: Request, now: float) -> None:
        """Do nothing: the times are not measured."""

    def finished(self, request: Request, now: float) -> None:
        """End a request."""
        self._in_flight.pop(request).finished.set()


def outcome(case: Case, deficit: float | None, seed: int, blocks: Blocks | None = None) -> Outcome:
    """Run a case in the order of a deficit."""
    with pytest.MonkeyPatch.context() as patch:
        return FairWorld(patch, case, deficit, seed, blocks or Blocks()).play()


def rows(seed: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table."""
    for case in CASES.values():
        blocks = Blocks()
        for number, (order, deficit) in enumerate(ORDERS.items()):
            got = outcome(case, deficit, seed, blocks)
            yield case.title if not number else "", order, f"{got.cached:.1%}", f"{got.jain:.3f}", f"{got.rate:.2f}"
