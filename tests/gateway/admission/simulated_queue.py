"""A model with a bounded server on a clock that the test controls: clients arrive at given times, wait in its queue, and are served.

Several workers may share the server, each with its own queue.

The rule: everything but the clock is the product's own. An event that is due runs at its time, so a simulated hour takes as long as its
events.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.admission import queue as queue_module
from gateway.admission.inflight import worker_share
from gateway.admission.queue import ModelQueue, ModelQueues, QueuedRequest
from gateway.admission.shares import QueueShares
from gateway.admission.weighted_tokens import Tokens
from gateway.api.errors import Refusal
from gateway.api.usage import Usage
from gateway.snapshot.snapshot import Key, Model, Queue, QueueClass, Slo
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.shared_counters import SharedCounters
from tests.gateway.admission.test_queue_state_machine import Metrics
from tests.support.pools import pool_of
from upstream.balancing.pool import NoServerError
from upstream.balancing.server import Condition, ServerSpec
from upstream.balancing.shared_limit import Peer, SharedLimit, SharedServer
from upstream.http.address import Address
from upstream.http.deadlines import TICK, Deadlines
from upstream.http.inline_task import InlineTask, Signal


@dataclass(eq=False)
class Client:
    """A client's request. After a refusal it returns at most ``returns`` times, each time after its Retry-After and ``delay`` seconds.

    ``body``: the fingerprint of its request, by default its own. ``ended`` is called after its response.
    """

    key: Key
    output: int = 10
    size: int = 80
    ttft: float | None = None
    returns: int = 2
    delay: float = 0.01
    body: int | None = None
    attempts: list[Attempt] = field(default_factory=list)
    ended: Callable[[Client], None] = lambda _: None

    def fingerprint(self) -> int:
        return id(self) if self.body is None else self.body

    @property
    def served(self) -> bool:
        return bool(self.attempts) and self.attempts[-1].dispatched is not None


@dataclass(eq=False)
class Attempt:
    """When a request arrived, was dispatched, and got its first token; or the reason and the Retry-After of its refusal."""

    arrived: float
    dispatched: float | None = None
    first_token: float | None = None
    reason: str | None = None
    refused: float | None = None
    retry_after: int | None = None


class Clock:
    """The time, and what happens later."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Do something at a time."""
        self._number += 1
        heapq.heappush(self._events, (when, self._number, act))

    def run(self, end: float, until: Callable[[], bool] = lambda: False) -> None:
        """Run the events until a time, or until a condition holds."""
        while self._events and self._events[0][0] <= end and not until():
            self.now, _, act = heapq.heappop(self._events)
            act()


class SimulatedQueue:
    """A queue in front of a server that runs ``slots`` requests. A token takes ``step`` seconds, and the first one ``prefill``."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        slots: int,
        slo: Slo,
        *,
        classes: Sequence[QueueClass] = (),
        size: int = 1000,
        step: float = 0.05,
        prefill: float = 0.02,
        clock: Clock | None = None,
        metrics: WorkerMetrics | None = None,
        shared: SharedLimit | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self.step, self.prefill = step, prefill
        patch.setattr(queue_module, "monotonic", lambda: self.now)
        self.metrics = metrics or Metrics()
        self.server = SharedServer(ServerSpec("s", Address(port=1), "m"), Condition.UP, clock=lambda: self.now)
        self.server.publish_in_flight(self.metrics.cells("server_inflight", "m", "s"))
        self.server.shared = shared or SharedLimit(slots, 0, [slots], [0.0], nullcontext(), tuple, lambda _: None)
        self.server.limit = slots
        self.pool = pool_of([self.server], "least_busy")
        self.deadlines = Deadlines()
        self.queues = ModelQueues(self.deadlines, self.metrics, lambda *_: None)
        self.queues.set_models([(Model("m", (), queue=Queue(size, 600.0), slo=slo), self.pool)], QueueShares(classes))

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def queue(self) -> ModelQueue:
        return self.queues._queues["m"]

    def arrive(self, client: Client, after: float) -> None:
        """Let a client arrive some seconds after the start."""
        self.clock.at(1000.0 + after, lambda: self.send(client))

    def run(self, seconds: float) -> None:
        """Run the events of the time until ``seconds`` after the start."""
        self.clock.at(self.now + TICK, self.tick)
        self.clock.run(1000.0 + seconds)
        self.clock.now = 1000.0 + seconds

    def use_free_slots(self) -> None:
        """Use the slots that other workers have freed."""
        self.server.update_rankings()
        self.queue.dispatch()

    def tick(self) -> None:
        for each in tuple(self.deadlines._watched):
            if each in self.deadlines._watched:
                each.check(self.now)
        self.queue.tick(self.now)
        self.clock.at(self.now + TICK, self.tick)

    def send(self, client: Client) -> None:
        attempt = Attempt(self.now)
        client.attempts.append(attempt)
        InlineTask(self._serve(client, attempt)).step()

    async def _serve(self, client: Client, attempt: Attempt) -> None:
        slot = None
        try:
            while True:
                try:
                    server = self.pool.choose()
                    if not server.take_slot():
                        raise NoServerError(full=True)
                    break
                except NoServerError:
                    if slot is not None:
                        slot.finish()
                    request = QueuedRequest(
                        client.key, self.now, client.size, arrived=attempt.arrived, ttft=client.ttft, fingerprint=client.fingerprint
                    )
                    with self.queues.slot("m", request) as slot:
                        await slot.wait()
            server.start_exchange()
            attempt.dispatched, attempt.first_token = self.now, self.now + self.prefill
            try:
                finished = Signal()
                self.clock.at(self.now + self.prefill + client.output * self.step, finished.set)
                await finished
            finally:
                server.finish_exchange()
            usage = Usage(client.size // 4, client.output)
            for kind, count in (("prompt", usage.prompt), ("completion", usage.completion), ("cached", 0)):
                self.metrics.cells("tokens_total", client.key.id, "m", kind)[0] += count
            if slot is not None:
                slot.finish(usage, Tokens(), attempt.first_token)
            client.ended(client)
        except Refusal as refusal:
            attempt.reason, attempt.refused, attempt.retry_after = refusal.limit, self.now, int(refusal.headers["retry-after"])
            if len(client.attempts) <= client.returns:
                self.clock.at(self.now + attempt.retry_after + client.delay, lambda: self.send(client))
        except asyncio.CancelledError:
            pass


@contextmanager
def simulated_workers(patch: pytest.MonkeyPatch, count: int, slots: int, slo: Slo, **more: Any) -> Iterator[list[SimulatedQueue]]:
    """Yield the queues of workers that share their counters and the slots of a server. They tick one after the other.

    At the end, all requests are served.
    """
    clock = Clock()
    parts = [worker_share(slots, number, count) for number in range(count)]
    with ExitStack() as stack:
        boards = [stack.enter_context(closing(SharedCounters.create("worker", 1 << 20))) for _ in range(count)]
        workers = list[SimulatedQueue]()

        def worker(number: int) -> SimulatedQueue:
            others = [other for other in range(count) if other != number]
            metrics = WorkerMetrics(boards[number], [boards[other] for other in others])

            def peers() -> list[Peer]:
                used, queued = metrics.peer_cells("server_inflight", "m", "s"), metrics.peer_cells("queued_requests", "m")
                found = zip(others, used, queued, strict=True)
                return [Peer(other, cells, waiting) for other, cells, waiting in found if cells is not None and waiting is not None]

            def wake(other: int) -> None:
                clock.at(clock.now, workers[other].use_free_slots)

            shared = SharedLimit(slots, number, parts, metrics.cells("queued_requests", "m"), nullcontext(), peers, wake)
            return SimulatedQueue(patch, slots, slo, clock=clock, metrics=metrics, shared=shared, **more)

        for number in range(count):
            workers.append(worker(number))
            clock.at(clock.now + TICK * (number + 1) / count, workers[number].tick)
        yield workers
        clock.run(math.inf, lambda: not any(len(each.queue._waiting) or each.server.in_flight for each in workers))
