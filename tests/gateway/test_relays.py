"""Control's side of the relays: their processes."""

from __future__ import annotations

import asyncio
from contextlib import closing

import psutil
import pytest

from gateway.link import Health
from gateway.relays import relays
from gateway.serve import listen
from gateway.state import State


@pytest.mark.parametrize("turns", range(8))
async def test_who_is_cancelled_while_a_relay_starts_leaves_no_process(turns: int) -> None:
    before = set(psutil.Process().children())
    with closing(listen("127.0.0.1", 0)) as listener:
        async with relays(listener, 1, lambda: None, lambda _: None) as kept:
            kept.configure(State(1, (), ()), Health({}, {}))
            for _ in range(turns):
                await asyncio.sleep(0)
    assert set(psutil.Process().children()) <= before
