"""What signals ask of the gateway: to end, or to read its configuration.

The rule: SIGHUP means both in the world, so what it means here is decided by what has happened: where the terminal that the
gateway was started from is gone, it asks for the end, and otherwise for the files.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

_TERMINALS = (0, 2)  # standard input and error


def stop_signals() -> asyncio.Queue[int]:
    """The signals that ask for the end, as a queue."""
    asked: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.put_nowait, number)
    return asked


def on_hangup(asked: asyncio.Queue[int], read: Callable[[], None]) -> None:
    """Have SIGHUP call ``read``, or ask for the end where it comes because the terminal was closed."""
    terminals = [fd for fd in _TERMINALS if os.isatty(fd)]

    def hung_up() -> None:
        if all(map(os.isatty, terminals)):  # one that was closed is none any more
            read()
        else:
            asked.put_nowait(signal.SIGHUP)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hung_up)
