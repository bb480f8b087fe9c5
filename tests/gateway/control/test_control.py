"""Control reports to the operator at the event, and not later."""

from __future__ import annotations

from pathlib import Path

from tests.support.controlled import controlled
from tests.support.process import launched
from tests.support.running import until


async def test_readiness_is_reported_at_the_event_that_completes_it(tmp_path: Path) -> None:
    """The announcer's interval, an hour here, is a timeout and delays nothing."""
    async with controlled(tmp_path, launched()) as one:
        await until(lambda: "ready: 1 of 1 servers up" in one.output.getvalue())
