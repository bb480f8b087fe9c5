"""Conversations, gateways and servers in simulated time: the same for every run of the same seed.

One or more gateways send each request to a server. Each gateway has its own chooser, which sees its own requests. It can also get the
events of the servers' caches, a fixed time late, and the servers' load once a second. The rule: the world alone knows the state of the
servers. A chooser gets it only as feedback, except for the oracle.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles

from tests.benchmarks.prefix.cache import Cache
from tests.benchmarks.prefix.choosers import Chooser, MakeChooser
from tests.benchmarks.prefix.engines import Clock, Engine, EventClock, Reports, SerialEngine
from tests.benchmarks.prefix.requests import Machine, Request
from tests.benchmarks.prefix.traces import Prompt, Talk

CACHE = 262_144
"""Tokens that a server's cache holds."""
WARMING = 0.25
"""The share of requests at the start that is not counted, because the caches are empty."""
SAMPLE_INTERVAL = 1.0
"""Seconds between two reports of the servers' load."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """``hits``: the share of prompt tokens that were cached. ``skew``: the busiest server's requests in flight, over the mean of all.

    ``first``: seconds to the first token, in all but the slowest twentieth of the requests. ``in_flight``: the mean for each server.
    """

    hits: float
    skew: float
    first: float
    in_flight: float


MakeEngine = Callable[[Clock, Reports], Engine]


class Server:
    """A server as it is."""

    def __init__(self, number: int, engine: Engine) -> None:
        self.number = number
        self.cache = Cache(CACHE)
        self.engine = engine
        self.in_flight = 0
        self.busy = 0.0
        self._since = 0.0

    def change(self, now: float, by: int) -> None:
        """Count requests in flight."""
        self.busy += self.in_flight * (now - self._since)
        self.in_flight += by
        self._since = now


@dataclass(frozen=True, slots=True)
class Gateway:
    """One gateway: its own view of the servers, and its chooser."""

    machines: Sequence[Machine]
    chooser: Chooser


@dataclass(frozen=True, slots=True)
class _Placement:
    """Where a request is, and which turn of a conversation it is. ``counted``: the caches were warm when it arrived."""

    gateway: Gateway
    machine: Machine
    server: Server
    talk: Talk
    turn: int
    counted: bool


class World:
    """One run. ``event_delay``: seconds until the gateways get the events of a cache; None: they get none."""

    def __init__(self, servers: int, chooser: MakeChooser, gateways: int, event_delay: float | None, engine: MakeEngine) -> None:
        self.clock = EventClock()
        self.servers = [Server(number, engine(self.clock, self)) for number in range(servers)]
        self.gateways = [self._gateway(chooser) for _ in range(gateways)]
        self._event_delay = event_delay
        self._draw = random.Random(gateways)
        self._placed: dict[Request, _Placement] = {}
        self._warming = 0.0
        self._requests = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._waits: list[float] = []

    def _gateway(self, chooser: MakeChooser) -> Gateway:
        machines = [Machine(f"http://10.0.{server.number // 250}.{server.number % 250}:8000", server.number) for server in self.servers]
        return Gateway(machines, chooser(machines, self.servers))

    def play(self, talks: Sequence[Talk]) -> Outcome:
        """Let all conversations happen."""
        self._warming = WARMING * sum(len(talk.turns) for talk in talks)
        for talk in talks:
            self._next_turn(talk, 0, Prompt().then(*talk.system), talk.start)
        if any(gateway.chooser.samples for gateway in self.gateways):
            self.clock.call_at(SAMPLE_INTERVAL, self._sample)
        self.clock.run()
        busy = [server.busy for server in self.servers]
        mean = sum(busy) / len(busy)
        return Outcome(self._cached_tokens / self._prompt_tokens, max(busy) / mean, quantiles(self._waits, n=20)[-1], mean / self.clock.now)

    # Conversations

    def _next_turn(self, talk: Talk, number: int, prompt: Prompt, now: float) -> None:
        if number < len(talk.turns):
            turn = talk.turns[number]
            self.clock.call_at(now + turn.pause, lambda arrived: self._arrive(talk, number, prompt.then(*turn.prompt), arrived))

    def _arrive(self, talk: Talk, number: int, prompt: Prompt, now: float) -> None:
        """Choose a server for a request, and send it."""
        gateway = self.gateways[self._draw.randrange(len(self.gateways))]
        self._requests += 1
        request = Request(prompt, talk.turns[number].completion, now)
        machine = gateway.chooser.choose(request, now)
        server = self.servers[machine.number]
        self._placed[request] = _Placement(gateway, machine, server, talk, number, counted=self._requests > self._warming)
        machine.in_flight += 1
        server.change(now, 1)
        server.engine.submit(request, now)

    # Reports of the engines

    def expected_tokens(self, request: Request) -> int:
        """Return how many tokens of a prompt its server would have to compute now."""
        return request.prompt.tokens - self._placed[request].server.cache.known(request.prompt)

    def uncached_tokens(self, request: Request) -> int:
        """Look up the prompt in the cache of its server, and store it there."""
        server = self._placed[request].server
        request.cached = server.cache.known(request.prompt)
        self._admit(server, request.prompt)
        return request.prompt.tokens - request.cached

    def first_token(self, request: Request, now: float) -> None:
        """Count the request's time to its first token, and its cached tokens."""
        placement = self._placed[request]
        if placement.counted:
            self._waits.append(now - request.arrived)
            self._prompt_tokens += request.prompt.tokens
            self._cached_tokens += request.cached
        placement.gateway.chooser.first_token(request, placement.machine, now)

    def finished(self, request: Request, now: float) -> None:
        """End the request, and let its user read the response."""
        placement = self._placed.pop(request)
        placement.machine.in_flight -= 1
        placement.server.change(now, -1)
        prompt = request.prompt.then(request.completion)
        self._admit(placement.server, prompt)
        placement.gateway.chooser.finished(request, placement.machine, now)
        self._next_turn(placement.talk, placement.turn + 1, prompt, now)

    # Knowledge of the gateways

    def _admit(self, server: Server, prompt: Prompt) -> None:
        """Store a prompt in a server's cache, and send the events of the cache to the gateways."""
        evicted = server.cache.admit(prompt)
        if self._event_delay is None:
            return

        def deliver(_: float) -> None:
            for gateway in self.gateways:
                machine = gateway.machines[server.number]
                gateway.chooser.stored(machine, prompt)
                for node, blocks in evicted:
                    gateway.chooser.evicted(machine, node, blocks)

        self.clock.call_at(self.clock.now + self._event_delay, deliver)

    def _sample(self, now: float) -> None:
        """Report the load of all servers to all gateways, as their metrics would have it."""
        for server in self.servers:
            waiting, running = server.engine.load
            for gateway in self.gateways:
                gateway.chooser.sampled(gateway.machines[server.number], waiting, running, now)
        if self.clock.pending:
            self.clock.call_at(now + SAMPLE_INTERVAL, self._sample)


def play(
    talks: Sequence[Talk],
    servers: int,
    chooser: MakeChooser,
    *,
    gateways: int = 1,
    event_delay: float | None = None,
    engine: MakeEngine = SerialEngine,
) -> Outcome:
    """Let all conversations happen, each request through one of the gateways at random."""
    return World(servers, chooser, gateways, event_delay, engine).play(talks)
