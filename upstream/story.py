"""Running a coroutine without a task: its steps happen inside the callbacks that they waited for.

``asyncio.Task`` takes every step in a turn of the loop of its own, with a future, a handle and a context for each. A
request that waits for its body and for its answer pays more for those than for its relay (docs/performance.md). A
``Story`` takes its first step where it is started and every further one inside ``Signal.tell``.

The rule: a story may await a ``Signal`` or any asyncio future, a task too, but nothing that asks for the current task
(``asyncio.timeout``): that belongs into a task of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any


class Signal:
    """What one coroutine waits for and somebody tells it, once. In a story the waiter goes on at once, inside ``tell``.

    Also what asyncio's tasks take for a future, so that whoever awaits one need not be a story.
    """

    __slots__ = ("_asyncio_future_blocking", "_cancelled", "_told", "waiter")

    def __init__(self) -> None:
        self._asyncio_future_blocking = False
        self._cancelled = False
        self._told = False
        self.waiter: Callable[[], None] | None = None

    def tell(self) -> None:
        """It has happened. A second time means nothing."""
        self._told = True
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter()

    def __await__(self) -> Generator[Signal, None, None]:
        if not self._told:
            self._asyncio_future_blocking = True
            yield self
        self.result()

    # What asyncio.Task asks of a future

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def add_done_callback(self, callback: Callable[[Signal], object], *, context: Context | None = None) -> None:
        loop = asyncio.get_running_loop()

        def go_on() -> None:
            loop.call_soon(callback, self, context=context)

        self.waiter = go_on

    def cancel(self, _: object = None) -> bool:
        if self._told:
            return False
        self._cancelled = True
        self.tell()
        return True

    def result(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError


class Story:
    """A coroutine that is run by what it waits for. What it raises goes to whoever caused the step, so it should raise nothing."""

    __slots__ = ("_cancelled", "_coroutine", "_future", "_signal", "done")

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine = coroutine
        self._signal: Signal | None = None
        self._future: asyncio.Future[Any] | None = None
        self._cancelled = False
        self.done = False

    def step(self) -> None:
        """Go on until the next wait. Called once to begin; after that by what was waited for."""
        self._signal = self._future = None
        try:
            self._wait_for(self._coroutine.send(None))
        except StopIteration:
            self.done = True

    def cancel(self, msg: object = None) -> bool:
        """Raise CancelledError where it waits, now; in a story that is running or has not begun, at its next wait."""
        if self.done:
            return False
        self._cancelled = True
        if self._future is not None:
            self._future.cancel(msg)
        elif self._signal is not None:
            self._signal.waiter = None
            self._throw()
        return True

    def _throw(self) -> None:
        self._cancelled = False
        self._signal = self._future = None
        try:
            self._wait_for(self._coroutine.throw(asyncio.CancelledError()))
        except StopIteration:
            self.done = True

    def _wait_for(self, waited: Any) -> None:
        if type(waited) is Signal:
            self._signal = waited
            waited.waiter = self.step
            if self._cancelled:
                self.cancel()
            return
        waited._asyncio_future_blocking = False
        waited.add_done_callback(self._future_done)
        self._future = waited
        if self._cancelled:
            waited.cancel()

    def _future_done(self, _: asyncio.Future[Any]) -> None:
        if self._cancelled:
            self._throw()
        else:
            self.step()
