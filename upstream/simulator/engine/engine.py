"""Makes the planned tokens at the planned speed, and counts them.

Owns what is in flight. The rule: tokens are generated inside ``slot``, which releases the slot on every
way out, and a wait always ends when the client disconnects (a cancellation) or the server stops (``abort_all``).
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from upstream.simulator import errors
from upstream.simulator.behavior import Behavior
from upstream.simulator.engine.batch import Batch
from upstream.simulator.engine.metrics import EngineState, ServerMetrics
from upstream.simulator.engine.prefix_cache import Allocation, PrefixCache
from upstream.simulator.engine.stepping import Stepping
from upstream.simulator.flags import Settings
from upstream.simulator.text.plan import Plan, Token

DIED = 1


@dataclass(frozen=True, slots=True)
class Emission:
    """One token of one choice, or None if the choice is aborted. ``finish``: on the last token."""

    choice: int
    token: Token | None
    finish: str | None = None
    stop: str | None = None


class Slot:
    """One request in flight: its blocks of the cache, the tokens generated so far, and its current wait."""

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.plan: Plan | None = None
        self.allocations: tuple[Allocation, ...] = ()
        self.prompt_tokens = 0
        self.made = 0
        self.cached = 0
        self.scheduled_at = 0.0
        self.finish: str | None = None
        self.aborted = False
        self.computed = False  # the batch has computed all tokens
        self._waiting: asyncio.Future[None] | None = None
        self._waits_for_token = False
        self._tokens = 0  # that the batch has computed, and the response has not taken

    async def wait(self, seconds: float | None) -> None:
        """Wait for ``seconds``, or without a limit if None. ``abort`` ends the wait."""
        if self.aborted:
            return
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        timer = loop.call_later(seconds, _release, self._waiting) if seconds is not None else None
        try:
            await self._waiting
        finally:
            if timer is not None:
                timer.cancel()

    async def wait_for_token(self) -> None:
        """Wait until the batch has computed the next token. ``abort`` ends the wait."""
        while not self._tokens and not self.aborted:
            self._waits_for_token = True
            try:
                await self.wait(None)
            finally:
                self._waits_for_token = False
        self._tokens -= 1

    def add_token(self) -> None:
        """Count a token that the batch has computed."""
        self._tokens += 1
        if self._waits_for_token and self._waiting is not None:
            _release(self._waiting)

    def finish_computing(self) -> None:
        """Leave the batch."""
        self.computed = True

    def abort(self) -> None:
        self.aborted = True
        if self._waiting is not None:
            _release(self._waiting)


def _release(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class Engine:
    """All requests of one server."""

    def __init__(self, settings: Settings) -> None:
        self.metrics = ServerMetrics()
        self.draining = False
        self.awake = asyncio.Event()
        self.awake.set()
        self.idle = asyncio.Event()
        self.idle.set()
        self._start = settings.start
        self._completed = 0
        self._slots: set[Slot] = set()
        self._cache = PrefixCache(settings.block_size, settings.num_gpu_blocks)
        self._stepping: Stepping[Slot] | None = None
        if settings.step_time is not None:
            batch = Batch(settings.step_time, settings.batch_limits, self._allocate)
            self._stepping = Stepping(batch, Slot.add_token, Slot.finish_computing)
        self._by_priority = settings.scheduling_policy == "priority"

    @contextmanager
    def slot(self, priority: int) -> Iterator[Slot]:
        """Yield a slot in the batch. Raises ApiError while the server shuts down."""
        if self.draining:
            raise errors.shut_down()
        slot, began = Slot(priority), time.monotonic()
        self._slots.add(slot)
        self.idle.clear()
        try:
            yield slot
        finally:
            self._slots.discard(slot)
            if not self._slots:
                self.idle.set()
            self._settle(slot, time.monotonic() - began)

    def state(self) -> EngineState:
        """Return what the gauges of the metrics show now."""
        waiting = 0 if self._stepping is None else self._stepping.batch.waiting
        unfinished = sum(not slot.computed for slot in self._slots)
        size = self._cache.block_size
        own = sum(-(-(slot.prompt_tokens + slot.made) // size) - slot.prompt_tokens // size for slot in self._slots)
        usage = min((self._cache.used + own) / self._cache.capacity, 1.0)
        return EngineState(unfinished - waiting, waiting, usage, size, self._cache.capacity)

    def _settle(self, slot: Slot, seconds: float) -> None:
        if self._stepping is not None:
            self._stepping.batch.remove(slot)
        for allocation in slot.allocations:
            self._cache.free(allocation)
        if slot.finish is not None:  # vLLM observes no request that its client has aborted
            self.metrics.whole.observe(seconds)

    def count_response(self) -> None:
        """Count a complete response, and exit if the server is configured to exit after it."""
        self._completed += 1
        if self._start.die_after_requests is not None and self._completed >= self._start.die_after_requests:
            os._exit(DIED)

    def abort_all(self) -> None:
        """End every request immediately. Their choices finish with ``abort``."""
        self.draining = True
        self.awake.set()
        for slot in self._slots:
            slot.abort()

    async def steps(self, slot: Slot, plan: Plan, behavior: Behavior) -> AsyncIterator[list[Emission]]:
        """Yield the response step by step: one token of each unfinished choice. The first step may be empty.

        Raises ApiError if the engine is configured to fail.
        """
        began = time.monotonic()
        length = max((len(choice.tokens) for choice in plan.choices), default=0)
        slot.plan = plan
        await self.awake.wait()
        await slot.wait(behavior.time_to_first_token if behavior.hang_after != 0 else None)
        if self._stepping is not None:
            tokens = length if behavior.hang_after is None else sys.maxsize  # the batch never finishes a request that hangs
            self._stepping.add(slot, tokens, slot.priority if self._by_priority else 0)
            await slot.wait_for_token()
        elif not slot.aborted:
            self._allocate(slot)
        if not slot.aborted:
            self._prefill(slot, plan, began)
        yield []
        for number in range(length):
            await self._pace(slot, behavior, number)
            if slot.aborted or _reached(behavior.abort_after, slot.made):
                slot.finish = "abort"
                unfinished = [at for at, choice in enumerate(plan.choices) if len(choice.tokens) > number]
                for at in unfinished:
                    self._observe_finished(plan, at, "abort", number)
                yield [Emission(at, None, "abort") for at in unfinished]
                return
            if _reached(behavior.error_after, slot.made):
                slot.finish = "error"
                raise errors.engine_dead()
            yield self._step(slot, plan, number, behavior)
        if not plan.choices:
            for prompt in plan.prompts:
                self.metrics.observe_finished("stop", len(prompt.ids), 0)
        slot.finish = slot.finish or "stop"

    def _allocate(self, slot: Slot) -> int:
        """Look the prompts up in the cache, and store them. Return the tokens to compute."""
        plan = slot.plan
        assert plan is not None
        slot.prompt_tokens = plan.prompt_tokens
        slot.allocations = tuple(self._cache.allocate(prompt.ids, plan.cache_salt) for prompt in plan.prompts)
        slot.cached = sum(allocation.cached for allocation in slot.allocations)
        slot.scheduled_at = time.monotonic()
        return slot.prompt_tokens - slot.cached

    def _prefill(self, slot: Slot, plan: Plan, began: float) -> None:
        self.metrics.prompt_tokens += slot.prompt_tokens * _choices_per_prompt(plan)
        self.metrics.cache_queries += slot.prompt_tokens
        self.metrics.cache_hits += slot.cached
        self.metrics.queue.observe(0.0 if self._stepping is None else slot.scheduled_at - began)
        self.metrics.first_token.observe(time.monotonic() - began)

    async def _pace(self, slot: Slot, behavior: Behavior, number: int) -> None:
        if _reached(behavior.hang_after, slot.made):
            await slot.wait(None)
        elif number and self._stepping is not None:
            before = time.monotonic()
            await slot.wait_for_token()
            self.metrics.between_tokens.observe(time.monotonic() - before)
        elif number and behavior.tokens_per_second:
            await slot.wait(1 / behavior.tokens_per_second)
            self.metrics.between_tokens.observe(1 / behavior.tokens_per_second)
        elif number:
            await asyncio.sleep(0)

    def _step(self, slot: Slot, plan: Plan, number: int, behavior: Behavior) -> list[Emission]:
        emissions = []
        for at, choice in enumerate(plan.choices):
            if number < len(choice.tokens):
                last = number == len(choice.tokens) - 1
                emissions.append(Emission(at, choice.tokens[number], choice.finish if last else None, choice.stop if last else None))
                self._made(slot, behavior)
                slot.finish = choice.finish if last else slot.finish
                if last:
                    self._observe_finished(plan, at, choice.finish, len(choice.tokens))
        return emissions

    def _observe_finished(self, plan: Plan, at: int, finish: str, made: int) -> None:
        """Count a choice as vLLM counts it: as a separate request, with its prompt."""
        prompt = plan.prompts[at // _choices_per_prompt(plan)]
        self.metrics.observe_finished(finish, len(prompt.ids), made)

    def _made(self, slot: Slot, behavior: Behavior) -> None:
        slot.made += 1
        self.metrics.generation_tokens += 1
        if _reached(behavior.die_after, slot.made) or _reached(self._start.die_after_tokens, self.metrics.generation_tokens):
            os._exit(DIED)


def _choices_per_prompt(plan: Plan) -> int:
    return max(len(plan.choices) // max(len(plan.prompts), 1), 1)


def _reached(limit: int | None, made: int) -> bool:
    return limit is not None and made >= limit
