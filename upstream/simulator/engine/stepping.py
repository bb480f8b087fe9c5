"""The steps of a batch in real time.

Owns the task that waits for each step. It runs while the batch has requests. The rule: a late step shortens the wait for the next one, so
that the speed over many steps is the planned one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from upstream.simulator.engine.batch import Batch

R = TypeVar("R", bound=Hashable)


class Stepping(Generic[R]):
    """Computes the steps of ``batch``, and calls ``on_token`` for each token of a request and ``on_finished`` after its last one."""

    def __init__(self, batch: Batch[R], on_token: Callable[[R], None], on_finished: Callable[[R], None]) -> None:
        self.batch = batch
        self._on_token = on_token
        self._on_finished = on_finished
        self._task: asyncio.Task[None] | None = None

    def add(self, request: R, tokens: int, priority: int) -> None:
        """Add a request that generates so many tokens. It takes part from the next step on."""
        self.batch.add(request, tokens, priority)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while (seconds := self.batch.begin_step()) is not None:
            due = max(due, loop.time() - seconds) + seconds
            await asyncio.sleep(due - loop.time())
            for request in self.batch.generating:
                self._on_token(request)
            completed = self.batch.complete()
            for request in completed.first:
                self._on_token(request)
            for request in completed.finished:
                self._on_finished(request)
