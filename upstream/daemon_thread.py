"""Wait for blocking work on a thread that cannot keep the process alive.

The interpreter waits for asyncio's own threads when it exits, which a hanging database or name server would block. So each call gets
its own daemon thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def run_in_daemon_thread(work: Callable[[], T], name: str) -> T:
    """Return what ``work`` returns, or raise what it raises, from a thread of this name.

    If the waiting task is cancelled, the work continues.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # from now on, a cancellation of the waiting task does not reach it

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:  # noqa: BLE001  the caller gets it
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(outcome)
