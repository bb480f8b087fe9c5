"""Control's supervision of the worker processes."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from contextlib import aclosing, closing

import psutil
import pytest

from gateway.control.serve import listen
from gateway.snapshot.link import Health
from gateway.snapshot.snapshot import Snapshot
from gateway.worker.supervisor import PAUSES, WorkerEvents, WorkerSupervisor, pause_after
from tests.support.running import until
from upstream.backoff import Backoff

NO_EVENTS = WorkerEvents(lambda: None, lambda _: None)


@pytest.mark.parametrize("iterations", range(8))
async def test_cancellation_while_a_worker_starts_leaves_no_process(iterations: int) -> None:
    before = set(psutil.Process().children())
    with closing(listen("127.0.0.1", 0, "server.port")) as listener:
        async with aclosing(WorkerSupervisor(listener, 1, NO_EVENTS)) as supervisor:
            supervisor.apply_snapshot(Snapshot(1, (), ()), Health({}, {}))
            for _ in range(iterations):
                await asyncio.sleep(0)
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize("iterations", [0, 1, 3])
async def test_the_gateway_does_not_wait_for_a_starting_worker_when_it_stops(iterations: int) -> None:
    with closing(listen("127.0.0.1", 0, "server.port")) as listener:
        async with aclosing(WorkerSupervisor(listener, 1, NO_EVENTS)) as supervisor:
            supervisor.apply_snapshot(Snapshot(1, (), ()), Health({}, {}))
            for _ in range(iterations):
                await asyncio.sleep(0)
            async with asyncio.timeout(60):  # for the start and the exit; no request is in flight
                await supervisor.drain(600)


async def test_without_workers_there_is_nothing_to_drain() -> None:
    with closing(listen("127.0.0.1", 0, "server.port")) as listener:
        async with aclosing(WorkerSupervisor(listener, 1, NO_EVENTS)) as supervisor:
            await supervisor.drain(600)


async def test_a_failed_preparation_is_a_failure_of_the_supervision() -> None:
    async def fails(_: Snapshot) -> None:
        raise OSError

    with closing(listen("127.0.0.1", 0, "server.port")) as listener:
        async with aclosing(WorkerSupervisor(listener, 1, NO_EVENTS)) as supervisor:
            assert supervisor.failure(time.monotonic()) is None
            supervisor.before_start = fails
            supervisor.apply_snapshot(Snapshot(1, (), ()), Health({}, {}))
            await until(lambda: supervisor.failure(time.monotonic()) == "the supervision of a worker has ended")
            assert not supervisor.statuses[0].up


async def test_a_worker_that_does_not_exit_is_killed() -> None:
    """It is stopped, so that it cannot notice that its link has closed."""
    with closing(listen("127.0.0.1", 0, "server.port")) as listener:
        async with aclosing(WorkerSupervisor(listener, 1, NO_EVENTS)) as supervisor:
            supervisor.apply_snapshot(Snapshot(1, (), ()), Health({}, {}))
            await until(lambda: supervisor.statuses[0].up, 60)
            pid = supervisor.statuses[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
    assert not psutil.pid_exists(pid)


async def test_a_worker_that_cannot_be_replaced_at_once_is_replaced_later(caplog: pytest.LogCaptureFixture) -> None:
    with closing(listen("127.0.0.1", 0, "server.port")) as listener:
        async with aclosing(WorkerSupervisor(listener, 1, NO_EVENTS)) as supervisor:
            supervisor.apply_snapshot(Snapshot(1, (), ()), Health({}, {}))
            await until(lambda: supervisor.statuses[0].up, 60)
            pid = supervisor.statuses[0].pid
            assert pid is not None
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # open descriptors stay open, and no more can be opened
            try:
                os.kill(pid, signal.SIGKILL)
                await until(lambda: "worker 0 cannot be started" in caplog.text, 60)
                assert not supervisor.statuses[0].up
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await until(lambda: supervisor.statuses[0].up, 60)
            assert (supervisor.statuses[0].pid, supervisor.statuses[0].restarts) != (pid, 0)


@pytest.mark.parametrize(
    ("lives", "pauses"),
    [
        ([100, 100], [0, 0]),
        ([0.1, 0.1, 0.1, 0.1, 0.1], [1, 2, 4, 8, 8]),
        ([0.1, 0.1, 5, 0.1], [1, 2, 0, 1]),
    ],
)
def test_a_worker_that_keeps_exiting_early_is_replaced_more_slowly(lives: list[float], pauses: list[float]) -> None:
    backoff = Backoff(*PAUSES, spread=0.0)
    assert [pause_after(lived, backoff) for lived in lives] == pauses
