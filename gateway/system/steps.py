"""Long work on request bodies in steps, so that no client can stall a worker.

Owns the order of the steps. The rules: one event-loop iteration resumes one waiting work, so the loop serves other clients between two
steps; large bodies are processed one at a time, and so are medium ones beside them, each in the order of their arrival; work on one body
gives way once it has used ``SLICE``. A step is what a generator does between two ``yield``; each is kept below 100 ms of CPU for a body
of 20 MiB by the module that owns the generator.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from time import monotonic
from typing import TypeVar

from gateway.system.garbage_collector import collector_paused
from upstream.http.inline_task import Signal

SMALL = 64 * 1024
"""Bytes up to which a body is processed at once: at most about 10 ms."""
MEDIUM = 1024 * 1024
"""Bytes up to which a body does not wait for larger ones."""
SLICE = 0.005
"""Seconds after which work on a body gives way to others."""
T = TypeVar("T")


def finished(work: Generator[None, None, T]) -> T:
    """Run all steps at once. Raises what the work raises."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            value: T = end.value
            return value


class Steps:
    """The steps of one worker."""

    def __init__(self) -> None:
        self._waiting: deque[Signal] = deque()
        self._medium = asyncio.Lock()
        self._large = asyncio.Lock()

    def pause(self) -> Signal:
        """Return what is to be awaited before the next step: a later event-loop iteration, one waiting work in each."""
        signal = Signal()
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._resume_next)
        self._waiting.append(signal)
        return signal

    def _resume_next(self) -> None:
        signal = self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._resume_next)
        signal.set()

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[Pace]:
        """Wait until a body of ``size`` bytes may be processed. The collector is paused while its document exists."""
        async with self._medium if size <= MEDIUM else self._large:
            with collector_paused():
                yield Pace(self)


class Pace:
    """How work on one body gives way to the others."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._since = monotonic()

    async def rest(self) -> None:
        """Give way if the slice is used up."""
        if monotonic() - self._since >= SLICE:
            await self._steps.pause()
            self._since = monotonic()

    async def run(self, work: Generator[None, None, T]) -> T:
        """Run a generator to its end, giving way between its steps. Raises what the work raises."""
        await self.rest()
        while True:
            try:
                next(work)
            except StopIteration as end:
                value: T = end.value
                return value
            await self.rest()
