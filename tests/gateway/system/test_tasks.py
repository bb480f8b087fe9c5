"""Waiting for a limited time, and ending tasks."""

from __future__ import annotations

import asyncio

from gateway.system.tasks import cancel, wait_at_most


async def test_a_wait_ends_with_its_work_or_with_its_time() -> None:
    event = asyncio.Event()
    await wait_at_most(0.0, event.wait())
    event.set()
    await wait_at_most(None, event.wait())


async def test_tasks_have_ended_after_they_were_cancelled() -> None:
    async def fail() -> None:
        raise RuntimeError("a mistake")

    tasks = [asyncio.create_task(work) for work in (asyncio.Event().wait(), fail())]
    await asyncio.sleep(0)
    await cancel(*tasks)
    assert [task.done() for task in tasks] == [True, True]
