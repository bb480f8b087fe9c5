"""Queries run on their own threads, for a bounded time."""

from __future__ import annotations

import threading

import pytest

from gateway.ledger.errors import DatabaseUnavailableError
from gateway.usage.database import run_in_thread


async def test_a_query_has_a_result_an_error_or_no_more_time() -> None:
    assert await run_in_thread(lambda: 5, 60) == 5
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(lambda: 1 / 0, 60)
    hanging = threading.Event()
    with pytest.raises(DatabaseUnavailableError, match=r"no response within 0\.05 s"):
        await run_in_thread(lambda: hanging.wait(60), 0.05)
    hanging.set()
