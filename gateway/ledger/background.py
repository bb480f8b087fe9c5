"""Run work that may block for a long time on a separate thread that does not keep the process alive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from gateway.ledger.errors import DatabaseUnavailableError

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T], seconds: float) -> T:
    """Return what ``work`` returns, or raise what it raises.

    Raises DatabaseUnavailableError after ``seconds``; the work then continues. The interpreter waits for asyncio's own threads when
    it exits, which a hanging database would block.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            report = partial(outcome.set_result, work())
        except Exception as error:  # noqa: BLE001  the caller gets it
            report = partial(outcome.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: outcome.done() or report())

    threading.Thread(target=run, name="ledger-query", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            return await outcome
    except TimeoutError:
        raise DatabaseUnavailableError(f"no response within {seconds:g} s") from None
