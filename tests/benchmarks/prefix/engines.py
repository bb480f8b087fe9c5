"""How long the work of a simulated server takes: two models of an engine.

``SerialEngine`` computes one prompt after the other, at a fixed speed, and generates at a fixed speed however many requests there are.
``BatchedEngine`` computes in steps, like vLLM: prompts and generated tokens share a step, and a larger step takes longer.

The rule: an engine has no clock. It asks ``Clock`` to call it back, and reports the first and the last token of each request.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Protocol

from tests.benchmarks.prefix.requests import Request
from upstream.simulator.engine.batch import Batch, BatchLimits, StepTime

PREFILL_SPEED = 8_000.0
"""Tokens of prompts that a server computes in a second."""
DECODE_SPEED = 40.0
"""Tokens of each response in a second."""
STEP_TIME = StepTime(base=0.022, per_sequence=0.0001, per_prefill_token=1 / PREFILL_SPEED)
"""About the same speeds: 40 tokens a second with 30 requests at once."""
LIMITS = BatchLimits()

Callback = Callable[[float], None]


class Clock(Protocol):
    """The time of a simulation, in seconds."""

    def call_at(self, when: float, callback: Callback) -> None:
        """Call ``callback`` with the time ``when``."""


class EventClock:
    """The events of a simulation in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callback]] = []

    def call_at(self, when: float, callback: Callback) -> None:
        """Call ``callback`` with the time ``when``. Calls for the same time are made in the order of their requests."""
        heapq.heappush(self._events, (when, next(self._order), callback))

    @property
    def pending(self) -> bool:
        """Whether anything else will happen."""
        return bool(self._events)

    def run(self) -> None:
        """Let everything happen."""
        while self._events:
            self.step()

    def step(self) -> None:
        """Let the next event happen."""
        self.now, _, callback = heapq.heappop(self._events)
        callback(self.now)


class Reports(Protocol):
    """The receiver of an engine's reports about its requests."""

    def expected_tokens(self, request: Request) -> int:
        """Return how many tokens of a prompt would have to be computed now."""

    def uncached_tokens(self, request: Request) -> int:
        """The work on a prompt begins: return how many of its tokens must be computed."""

    def first_token(self, request: Request, now: float) -> None:
        """A request has its first token."""

    def finished(self, request: Request, now: float) -> None:
        """A request has its last token."""


class Engine(Protocol):
    """The engine of one server."""

    def submit(self, request: Request, now: float) -> None:
        """Queue a request."""

    def backlog(self, now: float) -> float:
        """Return the seconds until the prompts of all requests so far are computed."""

    @property
    def load(self) -> tuple[int, int]:
        """The waiting and the running requests, as vLLM's metrics have them."""


class SerialEngine:
    """Computes one prompt after the other."""

    def __init__(self, clock: Clock, reports: Reports) -> None:
        self._clock = clock
        self._reports = reports
        self._free_at = 0.0
        self._prompts = 0
        self._generating = 0

    def submit(self, request: Request, now: float) -> None:
        """Queue a request."""
        self._free_at = max(self._free_at, now) + self._reports.uncached_tokens(request) / PREFILL_SPEED
        self._prompts += 1
        self._clock.call_at(self._free_at, lambda when: self._first_token(request, when))
        self._clock.call_at(self._free_at + request.completion.tokens / DECODE_SPEED, lambda when: self._finished(request, when))

    def _first_token(self, request: Request, now: float) -> None:
        self._prompts -= 1
        self._generating += 1
        self._reports.first_token(request, now)

    def _finished(self, request: Request, now: float) -> None:
        self._generating -= 1
        self._reports.finished(request, now)

    def backlog(self, now: float) -> float:
        """Return the seconds until the prompts of all requests so far are computed."""
        return max(self._free_at - now, 0.0)

    @property
    def load(self) -> tuple[int, int]:
        """The waiting and the running requests: the prompt that is computed runs."""
        waiting = max(self._prompts - 1, 0)
        return waiting, self._prompts - waiting + self._generating


class BatchedEngine:
    """Computes in steps, like vLLM. Equal steps are played at once, and cut when a request arrives."""

    def __init__(self, clock: Clock, reports: Reports, step_time: StepTime = STEP_TIME) -> None:
        self._clock = clock
        self._reports = reports
        self._step_time = step_time
        self._uncached: dict[Request, int] = {}  # of the requests without a first token
        self._batch: Batch[Request] = Batch(step_time, LIMITS, self._begin_prompt)
        self._began = 0.0
        self._seconds: float | None = None
        self._steps = 0
        self._run = 0

    def _begin_prompt(self, request: Request) -> int:
        tokens = self._uncached[request] = self._reports.uncached_tokens(request)
        return tokens

    def submit(self, request: Request, now: float) -> None:
        """Queue a request."""
        self._uncached[request] = self._reports.expected_tokens(request)
        self._batch.add(request, request.completion.tokens)
        if self._seconds is None:
            self._begin(now)
            return
        steps = int((now - self._began) / self._seconds) + 1
        if steps < self._steps:
            self._schedule(steps)

    def _begin(self, now: float) -> None:
        self._seconds = self._batch.begin_step()
        if self._seconds is not None:
            self._began = now
            self._schedule(self._batch.equal_steps)

    def _schedule(self, steps: int) -> None:
        """End the run of equal steps after so many of them."""
        assert self._seconds is not None
        self._steps = steps
        self._run += 1
        run = self._run
        self._clock.call_at(self._began + steps * self._seconds, lambda when: self._end(run, when))

    def _end(self, run: int, now: float) -> None:
        if run != self._run:
            return
        result = self._batch.complete(self._steps)
        for request in result.first:
            del self._uncached[request]
            self._reports.first_token(request, now)
        for request in result.finished:
            self._reports.finished(request, now)
        self._begin(now)

    def backlog(self, now: float) -> float:
        """Return the seconds until the prompts of all requests so far are computed, as it was expected when they arrived."""
        return sum(self._uncached.values()) * self._step_time.per_prefill_token

    @property
    def load(self) -> tuple[int, int]:
        """The waiting and the running requests."""
        return self._batch.waiting, self._batch.running
