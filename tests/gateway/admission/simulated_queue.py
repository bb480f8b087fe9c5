"""A model with a bounded server on a clock that the test controls: clients arrive at given times, wait in its queue, and are served.

The rule: everything but the clock is the product's own. An event that is due runs at its time, so a simulated hour takes as long as its
events.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from gateway.admission import queue as queue_module
from gateway.admission.queue import ModelQueue, ModelQueues, QueuedRequest
from gateway.admission.service import Tokens
from gateway.admission.shares import QueueShares
from gateway.api.errors import Refusal
from gateway.api.usage import Usage
from gateway.snapshot.snapshot import Key, Model, Queue, QueueClass, Slo
from tests.gateway.admission.test_queue_state_machine import Metrics
from tests.support.pools import pool_of
from upstream.balancing.pool import NoServerError
from upstream.balancing.server import Condition, Server, ServerSpec
from upstream.http.address import Address
from upstream.http.deadlines import TICK, Deadlines
from upstream.http.inline_task import InlineTask, Signal


@dataclass(eq=False)
class Client:
    """A client's request. After a refusal it returns at most ``returns`` times, each time after its Retry-After and ``delay`` seconds."""

    key: Key
    output: int = 10
    size: int = 80
    ttft: float | None = None
    returns: int = 2
    delay: float = 0.01
    attempts: list[Attempt] = field(default_factory=list)

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
    ) -> None:
        self.now = 1000.0
        self.step, self.prefill = step, prefill
        patch.setattr(queue_module, "monotonic", lambda: self.now)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self.server = Server(ServerSpec("s", Address(port=1), "m"), Condition.UP, clock=lambda: self.now)
        self.server.limit = slots
        self.pool = pool_of([self.server], "least_busy")
        self.deadlines = Deadlines()
        self.metrics = Metrics()
        self.queues = ModelQueues(self.deadlines, self.metrics, lambda *_: None)
        self.queues.set_models([(Model("m", (), queue=Queue(size, 600.0), slo=slo), self.pool)], QueueShares(classes))

    @property
    def queue(self) -> ModelQueue:
        return self.queues._queues["m"]

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Do something at a time."""
        self._number += 1
        heapq.heappush(self._events, (when, self._number, act))

    def arrive(self, client: Client, after: float) -> None:
        """Let a client arrive some seconds after the start."""
        self.at(1000.0 + after, lambda: self._send(client))

    def run(self, seconds: float) -> None:
        """Run the events of the time until ``seconds`` after the start."""
        end = 1000.0 + seconds
        self.at(self.now + TICK, self._tick)
        while self._events and self._events[0][0] <= end:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = end

    def _tick(self) -> None:
        for each in tuple(self.deadlines._watched):
            if each in self.deadlines._watched:
                each.check(self.now)
        self.queue.tick(self.now)
        self.at(self.now + TICK, self._tick)

    def _send(self, client: Client) -> None:
        attempt = Attempt(self.now)
        client.attempts.append(attempt)
        InlineTask(self._serve(client, attempt)).step()

    async def _serve(self, client: Client, attempt: Attempt) -> None:
        slot = None
        try:
            while True:
                try:
                    server = self.pool.choose()
                    break
                except NoServerError:
                    request = QueuedRequest(
                        client.key, self.now, client.size, arrived=attempt.arrived, ttft=client.ttft, fingerprint=lambda: id(client)
                    )
                    with self.queues.slot("m", request) as slot:
                        await slot.wait()
            server.start_exchange()
            attempt.dispatched, attempt.first_token = self.now, self.now + self.prefill
            try:
                finished = Signal()
                self.at(self.now + self.prefill + client.output * self.step, finished.set)
                await finished
            finally:
                server.finish_exchange()
            if slot is not None:
                usage = Usage(client.size // 4, client.output)
                slot.finish(usage, Tokens(), attempt.first_token)
        except Refusal as refusal:
            attempt.reason, attempt.refused, attempt.retry_after = refusal.limit, self.now, int(refusal.headers["retry-after"])
            if len(client.attempts) <= client.returns:
                self.at(self.now + attempt.retry_after + client.delay, lambda: self._send(client))
        except asyncio.CancelledError:
            pass
