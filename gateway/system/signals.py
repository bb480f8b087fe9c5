"""The signals that stop the gateway, or reload its configuration.

The rule: SIGHUP is used for both, so its meaning depends on the terminal. If the gateway's terminal is closed, the signal stops the
gateway. Otherwise it reloads the configuration.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

_TERMINALS = (0, 2)  # standard input and error


def stop_signals() -> asyncio.Queue[int]:
    """Return a queue of stop requests: SIGTERM and SIGINT add to it."""
    requests: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, requests.put_nowait, number)
    return requests


def on_hangup(stop_requests: asyncio.Queue[int], reload: Callable[[], None]) -> None:
    """Let SIGHUP call ``reload``, or add a stop request if the terminal was closed."""
    terminals = [fd for fd in _TERMINALS if os.isatty(fd)]

    def hung_up() -> None:
        if all(map(os.isatty, terminals)):  # a closed terminal is not a terminal any longer
            reload()
        else:
            stop_requests.put_nowait(signal.SIGHUP)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hung_up)
