"""Inline tasks: steps, cancellation, and what they can await."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.running import until
from upstream.http.inline_task import InlineTask, Signal


class Log(list[str]):
    async def wait(self, *signals: Signal) -> None:
        try:
            for number, signal in enumerate(signals):
                self.append(f"waits {number}")
                await signal
            self.append("ends")
        except asyncio.CancelledError:
            self.append("cancelled")


def test_each_step_runs_inside_the_call_that_sets_its_signal() -> None:
    log, first, second = Log(), Signal(), Signal()
    task = InlineTask(log.wait(first, second))
    assert log == []
    task.step()
    assert log == ["waits 0"]
    first.set()
    assert log == ["waits 0", "waits 1"]
    first.set()
    assert log == ["waits 0", "waits 1"], "setting a signal again has no effect"
    second.set()
    assert log[-1] == "ends" and task.done and not task.cancel()


def test_a_signal_set_earlier_is_not_waited_for() -> None:
    log, signal = Log(), Signal()
    signal.set()
    InlineTask(log.wait(signal, signal)).step()
    assert log == ["waits 0", "waits 1", "ends"]


@pytest.mark.parametrize("started", [True, False])
def test_a_cancelled_task_ends_at_its_wait(started: bool) -> None:
    log, signal = Log(), Signal()
    task = InlineTask(log.wait(signal))
    if started:
        task.step()
    assert task.cancel()
    if not started:
        assert log == [], "an unstarted task still runs its first step"
        task.step()
    assert log == ["waits 0", "cancelled"] and task.done
    signal.set()
    assert log == ["waits 0", "cancelled"]


def test_a_task_can_cancel_itself() -> None:
    log: list[str] = []

    async def run() -> None:
        task.cancel()
        log.append("continues")
        try:
            await Signal()
        finally:
            log.append("cancelled")

    task = InlineTask(run())
    with pytest.raises(asyncio.CancelledError):
        task.step()
    assert log == ["continues", "cancelled"]


async def test_a_task_that_cancelled_itself_does_not_wait_for_a_future() -> None:
    log: list[str] = []
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run() -> None:
        task.cancel()
        try:
            await future
        except asyncio.CancelledError:
            log.append("cancelled")

    task = InlineTask(run())
    task.step()
    await until(lambda: task.done)
    assert log == ["cancelled"] and future.cancelled()


async def test_futures_and_tasks_can_be_awaited() -> None:
    log: list[object] = []

    async def run(future: asyncio.Future[int]) -> None:
        log.append(await future)
        log.append(await asyncio.create_task(asyncio.sleep(0, "slept")))

    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = InlineTask(run(future))
    task.step()
    future.set_result(7)
    await until(lambda: task.done)
    assert log == [7, "slept"]


@pytest.mark.parametrize("late", [False, True])
async def test_a_wait_for_a_future_is_cancelled_even_if_it_has_just_finished(late: bool) -> None:
    log: list[str] = []
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run() -> None:
        try:
            await future
            log.append("continued")
        except asyncio.CancelledError:
            log.append("cancelled")

    task = InlineTask(run())
    task.step()
    if late:
        future.set_result(None)
    task.cancel()
    await until(lambda: task.done)
    assert log == ["cancelled"]


async def test_an_asyncio_task_can_await_a_signal() -> None:
    log, signal, other = Log(), Signal(), Signal()
    task = asyncio.create_task(log.wait(signal))
    cancelled = asyncio.create_task(log.wait(other))
    await asyncio.sleep(0)
    signal.set()
    cancelled.cancel()
    await asyncio.wait([task, cancelled])
    assert log == ["waits 0", "waits 0", "ends", "cancelled"]
    assert not other.cancel()
