"""Wait for a limited time or for a condition, and end tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any


async def wait_at_most(seconds: float | None, work: Awaitable[object]) -> None:
    """Wait for ``work``, which is cancelled after this time; None: without a limit."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work


async def wait_until(condition: Callable[[], bool], pause: float) -> None:
    """Wait until a condition holds whose changes nothing reports: check it every ``pause`` seconds."""
    while not condition():  # noqa: ASYNC110  the callers' conditions are in the kernel, in other processes or in threads
        await asyncio.sleep(pause)


@asynccontextmanager
async def background(work: Any) -> AsyncIterator[asyncio.Task[None]]:
    """Run a coroutine in a task that ends with the block."""
    task = asyncio.create_task(work, name=work.__qualname__)
    try:
        yield task
    finally:
        await cancel(task)


def start_task(work: Coroutine[Any, Any, None], running: set[asyncio.Task[None]], name: str) -> None:
    """Run a coroutine in a task. It is in ``running`` until it ends, because the event loop does not retain its tasks."""
    task = asyncio.create_task(work, name=name)
    running.add(task)
    task.add_done_callback(running.discard)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
