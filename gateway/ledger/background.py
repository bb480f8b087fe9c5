"""Work that may take long or for ever, beside the loop, on a thread that keeps no process from ending."""

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
    """What ``work`` returns, or raises. Raises DatabaseUnavailableError when it takes longer; it is then left to itself.

    asyncio's own threads are waited for when the interpreter ends, which a database that hangs would hold up.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            tell = partial(outcome.set_result, work())
        except Exception as error:  # noqa: BLE001  whoever waits gets it
            tell = partial(outcome.set_exception, error)
        with suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(lambda: outcome.done() or tell())

    threading.Thread(target=run, name="ledger-answer", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            return await outcome
    except TimeoutError:
        raise DatabaseUnavailableError(f"no answer within {seconds:g} s") from None
