"""Long work on request bodies in steps, so that no client can stall a worker.

Owns the order of the steps. The rules: one event-loop iteration resumes one waiting generator, so the loop serves other clients between two
steps. Large bodies are processed one at a time, in the order of their arrival. Medium bodies have a separate queue with the same rule. Work
on one body pauses once it has used ``SLICE``. A step is the code between two ``yield`` of a generator; the module that owns the generator
keeps each step below 100 ms of CPU for a body of 20 MiB.

Small bodies, as most bodies are, pass through the same generators in one call (``finished``).
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
"""A body of at most this many bytes is processed in one call, unless it has many objects and lists (see ``is_small``)."""
_TINY = 4096  # bytes up to which brackets are not counted
_FEW = 1024  # opening brackets that a small body may have, also in strings; each costs up to 4 µs of Python
MEDIUM = 1024 * 1024
"""A body of at most this many bytes does not wait for larger bodies."""
SLICE = 0.005
"""Seconds after which work on a body pauses."""
T = TypeVar("T")


def is_small(body: bytes | bytearray) -> bool:
    """Return whether a JSON body may be processed in one call: this takes at most about 5 ms then."""
    size = len(body)
    return size <= _TINY or (size <= SMALL and body.count(b"[") + body.count(b"{") <= _FEW)


def finished(work: Generator[None, None, T]) -> T:
    """Run all steps in one call. Raises the exceptions of the work."""
    try:
        while True:
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
        """Return a signal to await before the next step. Each event-loop iteration sets one waiting signal."""
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

    async def run(self, work: Generator[None, None, T], size: int) -> T:
        """Run the work on a body of ``size`` bytes when it may be processed, with pauses. Raises the exceptions of the work."""
        async with self.admit(size) as pace:
            return await pace.run(work)

    @asynccontextmanager
    async def admit(self, size: int) -> AsyncIterator[Pace]:
        """Wait until a body of ``size`` bytes may be processed. The garbage collector is paused until the end of the block."""
        async with self._medium if size <= MEDIUM else self._large:
            with collector_paused():
                yield Pace(self)


class Pace:
    """Pauses the work on one body so that other requests are served."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._since = monotonic()

    async def run(self, work: Generator[None, None, T]) -> T:
        """Run a generator to its end, with a pause before a step if the slice is used up. Raises the exceptions of the generator."""
        while True:
            if monotonic() - self._since >= SLICE:
                await self._steps.pause()
                self._since = monotonic()
            try:
                next(work)
            except StopIteration as end:
                value: T = end.value
                return value
