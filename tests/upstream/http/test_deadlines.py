"""The clock that all exchanges share."""

from __future__ import annotations

import asyncio

from upstream.http.deadlines import Deadlines


class Item:
    def __init__(self, deadlines: Deadlines, *, forgets: bool) -> None:
        self.seen: list[float] = []
        self._deadlines = deadlines
        self._forgets = forgets

    def check(self, now: float) -> None:
        self.seen.append(now)
        if self._forgets:
            self._deadlines.forget(self)


async def test_every_tick_looks_at_what_is_watched() -> None:
    deadlines = Deadlines()
    stays, removed = Item(deadlines, forgets=False), Item(deadlines, forgets=True)
    for item in (stays, removed, stays):
        deadlines.watch(item)
    assert len(deadlines) == 2
    before = asyncio.get_running_loop().time()
    deadlines.tick()
    deadlines.tick()
    assert (len(stays.seen), len(removed.seen), len(deadlines)) == (2, 1, 1)
    assert before <= stays.seen[0] <= stays.seen[1] <= asyncio.get_running_loop().time()
    deadlines.forget(stays)
    deadlines.forget(stays)
    deadlines.tick()
    assert len(stays.seen) == 2 and len(deadlines) == 0
