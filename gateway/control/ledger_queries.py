"""Run the ledger queries that workers pass on for ``GET /v1/usage``.

The rules: a worker never waits for a database, so control queries it, on a thread. The number of running queries, the number of waiting
queries, the time of each query and the rate of each key are limited. Beyond these bounds a client gets an error and no query runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from gateway.ledger.errors import DatabaseUnavailableError
from gateway.snapshot.link import UsageReported, UsageRequested
from gateway.system.tasks import cancel, start_task
from gateway.usage.errors import QueryError

if TYPE_CHECKING:
    from gateway.usage.queries import UsageQuery
    from gateway.usage.reader import UsageReader

_AT_ONCE, _MAX_WAITING = 2, 64  # queries
_BURST, _INTERVAL = 10, 1.0  # queries of a key at once, and seconds after which one more is allowed
_MAX_KEYS = 10_000  # keys whose last queries are remembered
_UNAVAILABLE = "The usage can't be read at the moment."
_BUSY = "Too many clients are reading their usage. Try again in a moment."
_log = logging.getLogger("vllm_gateway.control")

Reply = Callable[[UsageReported], None]


class QueryRate:
    """The rate of the queries of each key, or of each person: a bucket of ``burst`` that refills by one in each ``interval`` (seconds)."""

    def __init__(self, burst: int = _BURST, interval: float = _INTERVAL) -> None:
        self._burst = burst
        self._interval = interval
        self._full_at: dict[str, float] = {}

    def wait(self, key: str, now: float) -> float:
        """Count a query of a key and return 0; or return the seconds after which a query is allowed."""
        full = max(self._full_at.get(key, 0.0), now) + self._interval
        if full - now > self._burst * self._interval:
            return full - now - self._burst * self._interval
        if len(self._full_at) >= _MAX_KEYS:
            self._full_at = {name: at for name, at in self._full_at.items() if at > now}
        if key in self._full_at or len(self._full_at) < _MAX_KEYS:
            self._full_at[key] = full
        return 0.0


class KeyUsage:
    """Runs the queries. Without a ledger, workers send none."""

    def __init__(self, reader: UsageReader | None) -> None:
        self._reader = reader
        self._rate = QueryRate()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def request(self, message: UsageRequested, reply: Reply) -> None:
        """Run the query of a message, and reply to its worker when it has finished."""
        if (refused := self._refused(message)) is not None:
            reply(refused)
        else:
            start_task(self._run(message, reply), self._tasks, "key-usage")

    async def of_people(self, query: UsageQuery) -> dict[str, Any] | None:
        """Run a query of a person, in turn with those of keys; None without a ledger. Raises DatabaseUnavailableError."""
        if self._reader is None:
            return None
        async with self._slots:
            return await self._reader.usage_of_people(query)

    def _refused(self, message: UsageRequested) -> UsageReported | None:
        if len(self._tasks) >= _MAX_WAITING:
            return UsageReported(message.number, error="overloaded", text=_BUSY)
        wait = self._rate.wait(message.key, time.monotonic())
        text = f"The usage of a key can be read {_BURST} times at once, and then once a second."
        return UsageReported(message.number, error="rate_limit_exceeded", text=text, wait=wait) if wait else None

    async def _run(self, message: UsageRequested, reply: Reply) -> None:
        async with self._slots:
            reply(await self._result(message))

    async def _result(self, message: UsageRequested) -> UsageReported:
        if self._reader is None:
            return UsageReported(message.number, error="overloaded", text=_UNAVAILABLE)
        try:
            body = await self._reader.own_usage(message, datetime.now(UTC))
        except QueryError as error:
            return UsageReported(message.number, error="invalid_value", text=f"The query is invalid: {error}.")
        except DatabaseUnavailableError as error:
            _log.warning("a key's usage could not be read: %s", error)
        except Exception:  # noqa: BLE001  the outer edge: the client must get a response
            _log.exception("a key's usage could not be read")
        else:
            return UsageReported(message.number, body)
        return UsageReported(message.number, error="overloaded", text=_UNAVAILABLE)

    async def aclose(self) -> None:
        """End all queries."""
        await cancel(*self._tasks)
