"""Pass on requests to control, which may use the database, and wait for its replies.

The rule: the worker holds a bounded number of these requests, for a bounded time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from gateway.api.errors import Refusal
from gateway.snapshot.link import Message, PageResponded, UsageReported, UsageRequested
from gateway.snapshot.snapshot import Key

_MAX_WAITING = 64
_TIMEOUT = 15.0  # seconds: longer than control's own timeout
_FULL = "Too many clients are reading their usage. Try again in a moment."
_UNAVAILABLE = "The usage can't be read at the moment."
T = TypeVar("T", UsageReported, PageResponded)


class ControlRequests(Generic[T]):
    """The requests that wait for a reply of control, by number. ``send`` sends a message to it."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._number = 0
        self._waiting: dict[int, asyncio.Future[T]] = {}

    async def request(self, send: Callable[[int], None], *, full: str, unavailable: str) -> T:
        """Send a request with a new number, and return the reply.

        Raises Refusal with the text ``full`` if too many requests wait, and with ``unavailable`` if the reply does not come in time.
        """
        if len(self._waiting) >= _MAX_WAITING:
            raise Refusal("overloaded", full)
        self._number += 1
        number = self._number
        reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        try:
            send(number)
            async with asyncio.timeout(_TIMEOUT):
                return await reply
        except TimeoutError:
            raise Refusal("overloaded", unavailable) from None
        finally:
            del self._waiting[number]

    def reply(self, reply: T) -> None:
        """Pass control's reply to the request that waits for it."""
        waiting = self._waiting.get(reply.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)


class UsageRequests(ControlRequests[UsageReported]):
    """The requests for usage that wait for control."""

    async def report(self, key: Key, parameters: Mapping[str, str]) -> bytes:
        """Return the usage of a key as JSON. Raises Refusal."""
        reported = await self.request(
            lambda number: self._send(UsageRequested(number, key.id, dict(parameters))), full=_FULL, unavailable=_UNAVAILABLE
        )
        if reported.error is not None:
            raise Refusal(reported.error, reported.text, headers={"retry-after": str(math.ceil(reported.wait))} if reported.wait else {})
        return reported.body
