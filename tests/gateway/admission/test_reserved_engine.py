"""Interactive streams beside a saturating batch class on the simulator's engine, in virtual time: what reserved slots are worth."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from random import Random

import pytest

from gateway.admission.reserved_slots import Progress, ReservedSlots
from gateway.snapshot.snapshot import AUTO, Model, QueueClass, Slo, Snapshot
from tests.benchmarks.interactive import ALLOWED, CLIENTS, OBJECTIVE, SLOTS, STEP, Times, quantile
from tests.gateway.admission.test_queue_state_machine import Metrics
from upstream.balancing.server import Condition, Server, ServerSpec
from upstream.http.address import Address
from upstream.http.deadlines import TICK
from upstream.simulator.engine.batch import Batch, BatchLimits, StepTime

SETTLED, SECONDS = 60.0, 200.0


@dataclass(eq=False)
class Request:
    tier: int
    prompt: int
    tokens: int
    since: float
    progress: Progress = field(default_factory=lambda: Progress(None, 0.0, 0))
    measured: AbstractContextManager[None] = field(default_factory=nullcontext)


class World:
    """Clients, the slots of one server, and its engine. A request of the batch always waits."""

    def __init__(self, reserved: int | str, slo: Slo, *, batch: bool) -> None:
        self._draw = Random(1)
        self._batch = batch
        spec = ServerSpec("s", Address(port=1), "m")
        self._server = Server(spec, Condition.UP)
        self._server.limit = SLOTS
        self.slots = ReservedSlots(Metrics())
        model = Model("m", (spec,), max_inflight=SLOTS, slo=slo)
        self.slots.apply_snapshot(Snapshot(1, (), (model,), classes=(QueueClass("chat", reserved_slots=reserved),)), {"s": self._server}, 0)
        self._engine = Batch[Request](StepTime(*map(float, STEP.split(","))), BatchLimits(), lambda each: each.prompt)
        self._arrivals = [self._draw.random() for _ in range(CLIENTS)]
        self._waiting: list[Request] = []
        self._active: dict[Request, None] = {}
        self.times = Times()

    def run(self, seconds: float) -> Times:
        """Return the times after the first minute."""
        now, tick_at = 0.0, 0.0
        while now < SETTLED + seconds:
            self._arrive(now)
            self._start(now)
            duration = self._engine.begin_step()
            now = min(self._arrivals) if duration is None else now + duration
            if duration is not None:
                result = self._engine.complete()
                for each in (*result.first, *(each for each in self._engine.generating if each not in result.first)):
                    self._token(each, now)
                for each in result.finished:
                    if each not in self._engine.generating and each not in result.first:
                        self._token(each, now)
                    self._finish(each, now)
            while tick_at <= now:
                self.slots.tick(tick_at)
                tick_at += TICK
        self.times.batch /= seconds
        return self.times

    def _arrive(self, now: float) -> None:
        while self._arrivals and self._arrivals[0] <= now:
            request = Request(0, 20, 20, heappop(self._arrivals))
            request.measured = self.slots.measured("m", "chat", nullcontext(), request.since, partial(getattr, request, "progress"))
            request.measured.__enter__()
            self._waiting.append(request)

    def _start(self, now: float) -> None:
        while self._waiting and not self._server.full_for(0):
            self._serve(self._waiting.pop(0))
        while self._batch and not self._server.full_for(1):
            self._serve(Request(1, 50, max(10, min(200, round(self._draw.lognormvariate(0, 0.7) * 40))), now))

    def _serve(self, request: Request) -> None:
        self._server.start_exchange(request.tier)
        self._engine.add(request, request.tokens)

    def _token(self, request: Request, now: float) -> None:
        first, last, events = request.progress
        if request.tier == 0 and request.since >= SETTLED:
            (self.times.first if first is None else self.times.between).append(now - (request.since if first is None else last))
        request.progress = Progress(now if first is None else first, now, events + 1)

    def _finish(self, request: Request, now: float) -> None:
        self._server.finish_exchange(request.tier)
        if request.tier == 0:
            request.measured.__exit__(None, None, None)
            heappush(self._arrivals, now + self._draw.uniform(0, 0.5))
        elif now >= SETTLED:
            self.times.batch += request.tokens


@pytest.fixture(scope="module")
def alone() -> Times:
    return World(1, Slo(), batch=False).run(SECONDS)


def test_the_adaptive_slots_protect_interactive_streams_and_serve_most_of_the_batch(alone: Times) -> None:
    fixed = {opened: World(SLOTS - opened, Slo(), batch=True).run(SECONDS) for opened in (5, 6, 7, 8, 9, SLOTS - 1)}
    best = max(run.batch for run in fixed.values() if max(run.by(alone)) <= ALLOWED)
    slo = Slo(OBJECTIVE * quantile(alone.first, 0.99), OBJECTIVE * quantile(alone.between, 0.99))
    run = World(AUTO, slo, batch=True).run(SECONDS)
    assert max(run.by(alone)) <= ALLOWED
    assert run.batch >= 0.9 * best
    assert max(fixed[SLOTS - 1].by(alone)) > 1.3, "one reserved slot does not suffice"
