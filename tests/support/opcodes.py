"""Count the steps of the interpreter in code of the program. Unlike times, they do not depend on the machine's load."""

from __future__ import annotations

import asyncio
import selectors
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

_NOT_COUNTED = (str(Path(__file__).resolve().parent.parent), str(Path(asyncio.__file__).parent), selectors.__file__)
"""The tests, and the event loop itself: it turns while it waits, so its steps would be a measure of time."""


@dataclass
class Steps:
    """Counted steps: of all event-loop iterations, and of the longest one."""

    total: int = 0
    longest: int = 0


@asynccontextmanager
async def counting() -> AsyncIterator[Steps]:
    """Count this thread's steps during the block, also those of coroutines that run already. The tests and the event loop do not count."""
    steps = Steps()

    def on_step(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename.startswith(_NOT_COUNTED):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps.total += event == "opcode"
        return on_step

    async def compare() -> None:
        before = steps.total
        while True:
            await asyncio.sleep(0)
            steps.longest = max(steps.longest, steps.total - before)
            before = steps.total

    former = sys.gettrace()
    sys.settrace(on_step)
    comparing = asyncio.create_task(compare())
    try:
        yield steps
    finally:
        sys.settrace(former)
        comparing.cancel()
        await asyncio.gather(comparing, return_exceptions=True)
