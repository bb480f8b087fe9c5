"""Pass on the requests for a key's own usage to control, which queries the ledger, and wait for its replies.

The rule: the worker holds a bounded number of these requests, for a bounded time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping

from gateway.api.errors import Refusal
from gateway.snapshot.link import UsageReported, UsageRequested
from gateway.snapshot.snapshot import Key

_MAX_WAITING = 64
_TIMEOUT = 15.0  # seconds: longer than control's own timeout


class UsageRequests:
    """The requests that wait for control. ``send`` sends a message to it."""

    def __init__(self, send: Callable[[UsageRequested], None]) -> None:
        self._send = send
        self._number = 0
        self._waiting: dict[int, asyncio.Future[UsageReported]] = {}

    async def report(self, key: Key, parameters: Mapping[str, str]) -> bytes:
        """Return the usage of a key as JSON. Raises Refusal."""
        if len(self._waiting) >= _MAX_WAITING:
            raise Refusal("overloaded", "Too many clients are reading their usage. Try again in a moment.")
        self._number += 1
        number, reply = self._number, asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        try:
            self._send(UsageRequested(number, key.id, dict(parameters)))
            async with asyncio.timeout(_TIMEOUT):
                reported: UsageReported = await reply
        except TimeoutError:
            raise Refusal("overloaded", "The usage can't be read at the moment.") from None
        finally:
            del self._waiting[number]
        if reported.error is not None:
            wait = {"retry-after": str(math.ceil(reported.wait))} if reported.wait else {}
            raise Refusal(reported.error, reported.text, headers=wait)
        return reported.body

    def reported(self, message: UsageReported) -> None:
        """Pass control's reply to the request that waits for it."""
        waiting = self._waiting.get(message.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
