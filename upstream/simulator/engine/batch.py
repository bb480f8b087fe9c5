"""The batch of an engine: which requests compute in a step, and how long the step takes. A model of vLLM's scheduler.

The rules follow vLLM's v1 scheduler with chunked prefill. A step has a budget of tokens. Each running request takes one token of
it. The rest goes to prompts, by priority and then in the order of their arrival, and a prompt that does not fit continues in the next step.
A request that has started keeps its place, whatever arrives. It has its first token at the end of the step that computes the end of its
prompt. A step takes a base time, a time for each request in it, and a time for each token of a prompt.

Pure: it has no clock. The simulator waits for the steps, and the prefix benchmark plays them. Left out: preemption, and the limit that
the KV cache sets for the number of running requests.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)


@dataclass(frozen=True, slots=True)
class StepTime:
    """The duration of a step in seconds: ``base``, and more for each request and for each token of a prompt in it."""

    base: float
    per_sequence: float
    per_prefill_token: float

    def seconds(self, sequences: int, prefill_tokens: int) -> float:
        """Return the duration of a step with so many requests, which computes so many tokens of prompts."""
        return self.base + self.per_sequence * sequences + self.per_prefill_token * prefill_tokens


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """vLLM's ``--max-num-batched-tokens`` and ``--max-num-seqs``, with its defaults for a server on most GPUs."""

    tokens: int = 2048
    sequences: int = 256


@dataclass(frozen=True, slots=True)
class StepResult(Generic[R]):
    """The requests that have their first token after a step, and the requests that have their last one; both may name a request."""

    first: tuple[R, ...]
    finished: tuple[R, ...]


class Batch(Generic[R]):
    """The waiting and the running requests of one engine.

    ``prefill_tokens`` returns how many tokens of a request's prompt are not cached. It is called when the request leaves the queue.
    """

    def __init__(self, step_time: StepTime, limits: BatchLimits, prefill_tokens: Callable[[R], int]) -> None:
        self._step_time = step_time
        self._limits = limits
        self._prefill_tokens = prefill_tokens
        self._steps = 0
        self._waiting: dict[R, int] = {}  # the tokens to generate
        self._by_priority: list[tuple[int, int, R]] = []  # the same as a heap; entries of removed requests stay
        self._partial: tuple[R, int, int] | None = None  # a request, the tokens to generate, the prompt tokens to compute
        self._prefilled: dict[R, int] = {}  # the requests whose prompts are complete after this step
        self._last_step: dict[R, int] = {}  # the number of the step in which a request finishes
        self._by_last_step: list[tuple[int, int, R]] = []  # the same as a heap; entries of removed requests stay
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        """The requests that have not been in a step yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """The requests that have been in a step, and are not finished."""
        return len(self._last_step) + len(self._prefilled) + (self._partial is not None)

    @property
    def generating(self) -> Iterable[R]:
        """The requests that have their first token, and get one with each step."""
        return self._last_step

    def add(self, request: R, tokens: int, priority: int = 0) -> None:
        """Queue a request that generates so many tokens, at least one. A lower ``priority`` starts earlier."""
        self._waiting[request] = max(tokens, 1)
        heapq.heappush(self._by_priority, (priority, next(self._numbers), request))

    def remove(self, request: R) -> None:
        """Remove a request in any state. A request that is not in the batch is ignored."""
        for requests in (self._waiting, self._prefilled, self._last_step):
            requests.pop(request, None)
        if self._partial is not None and self._partial[0] == request:
            self._partial = None

    def begin_step(self) -> float | None:
        """Choose the requests of the next step. Return its duration in seconds, or None if there is no request."""
        budget = self._limits.tokens - len(self._last_step)
        computed = 0
        while computed < budget and (partial := self._next_prompt()) is not None:
            request, tokens, left = partial
            chunk = min(left, budget - computed)
            computed += chunk
            if chunk < left:
                self._partial = (request, tokens, left - chunk)
            else:
                self._partial = None
                self._prefilled[request] = tokens
        return self._step_time.seconds(self.running, computed) if self.running else None

    def _next_prompt(self) -> tuple[R, int, int] | None:
        """Return the prompt to continue, or else the next one of the queue."""
        if self._partial is not None:
            return self._partial
        if not self._waiting or self.running >= self._limits.sequences:
            return None
        while (request := heapq.heappop(self._by_priority)[2]) not in self._waiting:
            pass  # it was removed
        return request, self._waiting.pop(request), max(self._prefill_tokens(request), 1)

    @property
    def equal_steps(self) -> int:
        """How many steps take the same requests and the same time, the begun one included, unless a request is added or removed."""
        if self._prefilled or self._partial is not None:
            return 1
        return max(self._by_last_step[0][0] - self._steps, 1) if self._by_last_step else 1

    def complete(self, steps: int = 1) -> StepResult[R]:
        """End the begun step, or several equal steps."""
        self._steps += steps
        first = tuple(self._prefilled)
        for request, tokens in self._prefilled.items():
            last = self._last_step[request] = self._steps + tokens - 1
            heapq.heappush(self._by_last_step, (last, next(self._numbers), request))
        self._prefilled.clear()
        finished = []
        while self._by_last_step and self._by_last_step[0][0] <= self._steps:
            last, _, request = heapq.heappop(self._by_last_step)
            if self._last_step.get(request) == last:
                del self._last_step[request]
                finished.append(request)
        return StepResult(first, tuple(finished))
