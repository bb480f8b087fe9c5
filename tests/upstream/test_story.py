"""A coroutine run by what it waits for."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.running import until
from upstream.story import Signal, Story


class Log(list[str]):
    async def wait(self, *signals: Signal) -> None:
        try:
            for number, signal in enumerate(signals):
                self.append(f"waits {number}")
                await signal
            self.append("ends")
        except asyncio.CancelledError:
            self.append("cancelled")


def test_every_step_is_taken_where_it_is_caused() -> None:
    log, first, second = Log(), Signal(), Signal()
    story = Story(log.wait(first, second))
    assert log == []
    story.step()
    assert log == ["waits 0"]
    first.tell()
    assert log == ["waits 0", "waits 1"]
    first.tell()
    assert log == ["waits 0", "waits 1"], "a second word means nothing"
    second.tell()
    assert log[-1] == "ends" and story.done and not story.cancel()


def test_what_was_told_before_is_not_waited_for() -> None:
    log, told = Log(), Signal()
    told.tell()
    Story(log.wait(told, told)).step()
    assert log == ["waits 0", "waits 1", "ends"]


@pytest.mark.parametrize("begun", [True, False])
def test_a_cancelled_story_ends_at_its_wait(begun: bool) -> None:
    log, signal = Log(), Signal()
    story = Story(log.wait(signal))
    if begun:
        story.step()
    assert story.cancel()
    if not begun:
        assert log == [], "it has not begun: its first step settles what was counted"
        story.step()
    assert log == ["waits 0", "cancelled"] and story.done
    signal.tell()
    assert log == ["waits 0", "cancelled"]


def test_it_can_cancel_itself() -> None:
    log: list[str] = []

    async def run() -> None:
        story.cancel()
        log.append("runs on")
        try:
            await Signal()
        finally:
            log.append("cancelled")

    story = Story(run())
    with pytest.raises(asyncio.CancelledError):
        story.step()
    assert log == ["runs on", "cancelled"]


async def test_futures_and_tasks_are_waited_for() -> None:
    log: list[object] = []

    async def run(future: asyncio.Future[int]) -> None:
        log.append(await future)
        log.append(await asyncio.create_task(asyncio.sleep(0, "slept")))

    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    story = Story(run(future))
    story.step()
    future.set_result(7)
    await until(lambda: story.done)
    assert log == [7, "slept"]


@pytest.mark.parametrize("late", [False, True])
async def test_a_wait_for_a_future_is_cancelled_even_when_it_has_just_ended(late: bool) -> None:
    log: list[str] = []
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run() -> None:
        try:
            await future
            log.append("went on")
        except asyncio.CancelledError:
            log.append("cancelled")

    story = Story(run())
    story.step()
    if late:
        future.set_result(None)
    story.cancel()
    await until(lambda: story.done)
    assert log == ["cancelled"]


async def test_a_task_may_wait_for_a_signal() -> None:
    log, signal, other = Log(), Signal(), Signal()
    task = asyncio.create_task(log.wait(signal))
    cancelled = asyncio.create_task(log.wait(other))
    await asyncio.sleep(0)
    signal.tell()
    cancelled.cancel()
    await asyncio.wait([task, cancelled])
    assert log == ["waits 0", "waits 0", "ends", "cancelled"]
    assert not other.cancel()
