"""What must hold after every fault, whatever it was.

1. Whatever was started was finished and recorded: requests begun = requests settled = records.
2. Nothing is in flight: no ticket, gauge, server's slot, place in a queue or watched deadline.
3. Nothing is left: no task, connection, or file descriptor more than before.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from gateway.routes import ENDPOINTS
from gateway.state import Key, Model
from tests.support.running import Served, serving, until

_SETTLES_WITHIN = 15.0
"""Seconds that whatever is ending may take on a busy machine."""


@asynccontextmanager
async def unharmed(models: Sequence[Model], keys: Sequence[Key] = (), **more: Any) -> AsyncIterator[Served]:
    """Serve as ``serving`` does, through a fault that the block provokes; then check that everything is as it was."""
    tasks, descriptors = len(asyncio.all_tasks()), _descriptors()
    async with serving(models, keys, **more) as served:
        yield served
        await settled(served)
    await until(lambda: len(asyncio.all_tasks()) <= tasks, _SETTLES_WITHIN)
    await until(lambda: _descriptors() <= descriptors, _SETTLES_WITHIN)


async def settled(served: Served) -> None:
    """Wait until nothing is in flight, and check that whatever was begun was recorded, once.

    The other routes (``/health``, the model lists) have records too, and are not begun as stories.
    """
    await until(lambda: served.in_flight == 0 and served.total("queued_requests") == 0 and not served.stories, _SETTLES_WITHIN)
    records = [record for record in served.relay.records if record.endpoint in ENDPOINTS]
    assert served.relay.started == len(records), f"{served.relay.started} requests were begun and {len(records)} recorded"
    assert len({record.id for record in records}) == len(records), "a request was recorded twice"


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
