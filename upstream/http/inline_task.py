"""Runs a coroutine without an asyncio task: each step runs inside the callback that the coroutine waited for.

``asyncio.Task`` runs each step in a separate event-loop iteration, and creates a future, a handle and a context for it. A request
waits for its body and for its response, and these objects cost more than relaying it (docs/performance.md). An ``InlineTask`` runs its
first step where it is started, and each further step inside ``Signal.set``.

The code that resumes a waiting coroutine, and how its wait is cancelled:

| coroutine of | awaits | resumed by | cancelled by |
|---|---|---|---|
| an inline task | a ``Signal`` | ``Signal.set``, before it returns | ``InlineTask.cancel``, before it returns |
| an inline task | a future or task of asyncio | the event loop, after it is done | ``InlineTask.cancel``: it is cancelled first |
| an asyncio task | a ``Signal`` | the event loop, after ``Signal.set`` | ``Task.cancel``, by ``Signal.cancel`` |
| an inline task | nothing: it runs, or was not started | its own code, or ``step`` | its next wait |

The rule: an inline task must not await anything that needs the current task (``asyncio.timeout``): such code runs in an asyncio task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any


class Signal:
    """An event that one coroutine awaits and that is set once. ``set`` runs the waiting inline task's next step before it returns.

    It has the methods of a future that ``asyncio.Task`` calls.
    """

    __slots__ = ("_asyncio_future_blocking", "_cancelled", "_is_set", "waiter")

    def __init__(self) -> None:
        self._asyncio_future_blocking = False
        self._cancelled = False
        self._is_set = False
        self.waiter: Callable[[], None] | None = None

    def set(self) -> None:
        """Resume the waiting coroutine. A second call has no effect."""
        self._is_set = True
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter()

    def __await__(self) -> Generator[Signal, None, None]:
        if not self._is_set:
            self._asyncio_future_blocking = True
            yield self
        self.result()

    # The methods that asyncio.Task calls

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def add_done_callback(self, callback: Callable[[Signal], object], *, context: Context | None = None) -> None:
        loop = asyncio.get_running_loop()

        def schedule() -> None:
            loop.call_soon(callback, self, context=context)

        self.waiter = schedule

    def cancel(self, _: object = None) -> bool:
        if self._is_set:
            return False
        self._cancelled = True
        self.set()
        return True

    def result(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError


class InlineTask:
    """A coroutine whose steps run inside the callbacks that it waits for.

    An exception of the coroutine is raised in the code that caused the step, so the coroutine should raise none.
    """

    __slots__ = ("_awaited", "_cancelled", "_coroutine", "done")

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine = coroutine
        self._awaited: Any = None
        """The signal, or the future or task of asyncio, that the coroutine awaits."""
        self._cancelled = False
        """CancelledError is to be raised at the current or next wait."""
        self.done = False

    def step(self) -> None:
        """Run until the next wait. The first call starts the task. Later calls come from the object that it awaited."""
        self._awaited = None
        try:
            self._wait_for(self._coroutine.send(None))
        except StopIteration:
            self.done = True

    def cancel(self, msg: object = None) -> bool:
        """Cancel the wait as the table of this module states. Returns whether the task was not done."""
        if self.done:
            return False
        self._cancelled = True
        awaited = self._awaited
        if type(awaited) is Signal:
            awaited.waiter = None
            self._throw()
        elif awaited is not None:
            awaited.cancel(msg)
        return True

    def _wait_for(self, awaited: Any) -> None:
        self._awaited = awaited
        if type(awaited) is Signal:
            awaited.waiter = self.step
        else:
            awaited._asyncio_future_blocking = False
            awaited.add_done_callback(self._on_future_done)
        if self._cancelled:
            self.cancel()

    def _on_future_done(self, _: asyncio.Future[Any]) -> None:
        if self._cancelled:
            self._throw()
        else:
            self.step()

    def _throw(self) -> None:
        """Run until the next wait, from a CancelledError at the current one."""
        self._cancelled, self._awaited = False, None
        try:
            self._wait_for(self._coroutine.throw(asyncio.CancelledError()))
        except StopIteration:
            self.done = True
