"""Wait for a limited time, and end tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any


async def wait_at_most(seconds: float | None, work: Awaitable[object]) -> None:
    """Wait for ``work``, which is cancelled after this time; None: without a limit."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
