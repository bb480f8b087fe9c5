"""The clock that all exchanges share."""

from __future__ import annotations

import asyncio

from upstream.http.deadlines import SLICE, TICK, Deadlines


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


async def test_many_objects_are_checked_in_slices_before_the_next_tick() -> None:
    deadlines = Deadlines()
    items = [Item(deadlines, forgets=number % 2 == 0) for number in range(3 * SLICE + 1)]
    for item in items:
        deadlines.watch(item)
    deadlines.tick()
    assert sum(len(item.seen) for item in items) == SLICE
    removed = next(item for item in items if not item.seen)
    deadlines.forget(removed)
    await asyncio.sleep(TICK)
    assert all(len(item.seen) == (item is not removed) for item in items)
    times = sorted({time for item in items for time in item.seen})
    assert len(times) == 4 and times[-1] - times[0] >= TICK / 2
