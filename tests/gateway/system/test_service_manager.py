"""Messages to a service manager, and their times: ready, reloading, stopping, and watchdog messages while the gateway works."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.config import Config, load
from gateway.control.readiness import task_failure
from gateway.fleet.observed_servers import ObservedServers
from gateway.fleet.snapshot_builder import build_snapshot
from gateway.snapshot.link import Health
from gateway.system.service_manager import VARIABLES, ServiceManager
from gateway.worker.supervisor import WorkerEvents, WorkerSupervisor
from tests.support.process import SIMULATOR, configuration, gateway, launched, wait_for, write
from tests.support.running import until
from tests.support.service_manager import Inbox, service_manager

EXTENSION = 60_000_000  # microseconds


class GatewayState:
    """The part of a gateway's state that its service manager receives."""

    def __init__(self) -> None:
        self.waits: str | None = "waiting for one"
        self.wrong: str | None = None

    def not_ready(self) -> str | None:
        return self.waits

    def broken(self) -> str | None:
        return self.wrong

    def headline(self) -> str:
        return self.wrong or self.waits or "1 of 1 servers up\nand more"


def manager(inbox: Inbox, microseconds: int | None = 3_000_000, pid: int = 0) -> ServiceManager:
    watchdog = {} if microseconds is None else {"WATCHDOG_USEC": str(microseconds), "WATCHDOG_PID": str(pid or os.getpid())}
    return ServiceManager.of({"NOTIFY_SOCKET": inbox.address, **watchdog}, os.getpid())


@pytest.fixture(params=["a path", "an abstract name"])
def inbox(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    with service_manager(str(tmp_path / "notify") if request.param == "a path" else "@") as found:
        yield found


def test_ready_is_sent_once_and_the_start_is_extended_until_then(inbox: Inbox) -> None:
    notifier, state = manager(inbox), GatewayState()
    notifier.notify(state, 0)
    notifier.notify(state, 1)
    assert inbox.notifications == [{"STATUS": "waiting for one", "EXTEND_TIMEOUT_USEC": str(EXTENSION)}]
    notifier.notify(state, 11)
    state.waits = None
    notifier.notify(state, 13)
    notifier.notify(state, 13.5)
    assert inbox.notifications[1:] == [
        {"EXTEND_TIMEOUT_USEC": str(EXTENSION)},
        {"READY": "1", "STATUS": "1 of 1 servers up and more"},
        {"WATCHDOG": "1"},
    ]
    assert inbox.senders == {os.getpid()}


def test_a_service_manager_that_has_exited_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with service_manager(str(tmp_path / "notify")) as first:
        notifier, state = manager(first), GatewayState()
    for tick in (0, 11, 22):
        notifier.notify(state, tick)
    assert caplog.text.count("the service manager cannot be notified") == 1
    (tmp_path / "notify").unlink(missing_ok=True)
    with service_manager(str(tmp_path / "notify")) as second:
        state.waits = None
        notifier.notify(state, 33)
        assert second.notifications[-1]["READY"] == "1"


def test_watchdog_messages_are_sent_three_times_per_timeout_and_only_while_healthy(inbox: Inbox) -> None:
    notifier, state = manager(inbox), GatewayState()
    state.waits = None
    for tick in range(12):
        notifier.notify(state, tick / 4)
    assert [each for each in inbox.notifications if "WATCHDOG" in each] == [{"WATCHDOG": "1"}] * 3
    inbox.forget()
    state.wrong = "no worker starts"
    for tick in range(12, 24):
        notifier.notify(state, tick / 4)
    assert inbox.notifications == [{"STATUS": "no worker starts"}]
    state.wrong = None
    notifier.notify(state, 7)
    assert inbox.has("WATCHDOG", "1")


def test_a_failing_start_is_not_extended(inbox: Inbox) -> None:
    notifier, state = manager(inbox), GatewayState()
    state.wrong = "no worker starts"
    notifier.notify(state, 0)
    assert inbox.notifications == [{"STATUS": "no worker starts"}]


@pytest.mark.parametrize(("microseconds", "pid"), [(None, 0), (3_000_000, 1)], ids=["none", "another's"])
def test_no_watchdog_messages_for_another_process(inbox: Inbox, microseconds: int | None, pid: int) -> None:
    notifier, state = manager(inbox, microseconds, pid), GatewayState()
    state.waits = None
    for tick in range(20):
        notifier.notify(state, tick)
    assert inbox.has("READY") and not inbox.has("WATCHDOG")


def test_a_reload_is_reported_with_its_start_time(inbox: Inbox) -> None:
    notifier, state = manager(inbox), GatewayState()
    with notifier.reloading():
        assert inbox.notifications == []  # a reload during startup is part of it
    state.waits = None
    notifier.notify(state, 0)
    inbox.forget()
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    with notifier.reloading():
        [reloading] = inbox.notifications
    assert reloading.pop("RELOADING") == "1"
    assert before <= int(reloading.pop("MONOTONIC_USEC")) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert inbox.notifications[1:] == [{"READY": "1"}] and not reloading


def test_no_ready_message_after_stopping(inbox: Inbox) -> None:
    notifier, state = manager(inbox), GatewayState()
    state.waits = None
    notifier.notify(state, 0)
    inbox.forget()
    with notifier.reloading():
        notifier.stopping(90.5)
    state.waits, state.wrong = "draining", "the reloader has ended"
    notifier.notify(state, 2)
    assert inbox.notifications[1:] == [{"STOPPING": "1", "STATUS": "stopping", "EXTEND_TIMEOUT_USEC": "90500000"}, {"WATCHDOG": "1"}]


def test_an_unsent_message_is_sent_again(tmp_path: Path) -> None:
    address, state = str(tmp_path / "notify"), GatewayState()
    state.waits = None
    notifier = ServiceManager.of({"NOTIFY_SOCKET": address}, os.getpid())
    notifier.notify(state, 0)
    with service_manager(address) as inbox:
        notifier.notify(state, 2)
        assert inbox.notifications == [{"READY": "1", "STATUS": "1 of 1 servers up and more"}]


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}, {"NOTIFY_SOCKET": "relative"}], ids=str)
async def test_without_a_service_manager_nothing_is_sent(environ: dict[str, str]) -> None:
    await ServiceManager.of(environ, 1).run(GatewayState())  # returns at once


async def test_notifications_continue_after_a_failed_check(inbox: Inbox) -> None:
    class Failing(GatewayState):
        def not_ready(self) -> str | None:
            self.waits, waits = None, self.waits
            if waits is not None:
                raise KeyError
            return None

    running = asyncio.create_task(manager(inbox).run(Failing()))
    await until(lambda: inbox.has("READY"), 60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


# The whole gateway


def test_a_service_manager_follows_the_gateway_from_its_start_to_its_end(tmp_path: Path) -> None:
    fifo, model = tmp_path / "fifo", launched()
    os.mkfifo(fifo)
    model["launch"]["command"] = ["sh", "-c", f'read go <{fifo} && exec "$@"', "-", *SIMULATOR]
    config = configuration(model)
    with service_manager("@") as inbox:
        variables = {"NOTIFY_SOCKET": inbox.address, "WATCHDOG_USEC": "600000"}
        with gateway(tmp_path, config, ready=False, variables=variables) as one:
            inbox.wait_for("STATUS", "waiting for sim/one#0")
            assert one.get("/readyz").status_code == 503 and not inbox.has("READY")
            fifo.write_text("go\n")
            inbox.wait_for("READY")
            assert one.get("/readyz").status_code == 200
            inbox.wait_for("STATUS", "1 of 1 servers up")
            inbox.forget()
            inbox.wait_for("WATCHDOG")
            assert one.command("reload").returncode == 0
            inbox.wait_for("READY")
            write(tmp_path / "gateway.yaml", config | {"modles": []})
            inbox.wait_for("STATUS", "1 of 1 servers up; the last configuration was rejected")
            assert inbox.order("RELOADING", "READY") == ["RELOADING", "READY"] * 2
            [server] = [each for each in one.named("upstream.simulator") if "upstream.launcher.shim" not in each.cmdline()]
            assert not {*VARIABLES} & server.environ().keys()
            inbox.forget()
            one.stop()
            assert inbox.order("READY", "STOPPING") == ["STOPPING"]
            assert [int(each["EXTEND_TIMEOUT_USEC"]) for each in inbox.notifications if "STOPPING" in each] == [(5 + 10 + 30) * 1_000_000]
            assert inbox.senders == {one.process.pid}


def test_a_control_process_that_hangs_sends_no_watchdog_messages(tmp_path: Path) -> None:
    with service_manager("@") as inbox:
        variables = {"NOTIFY_SOCKET": inbox.address, "WATCHDOG_USEC": "300000"}
        with gateway(tmp_path, configuration(launched()), variables=variables) as one:
            inbox.wait_for("WATCHDOG")
            one.process.send_signal(signal.SIGSTOP)
            wait_for(lambda: psutil.Process(one.process.pid).status() == psutil.STATUS_STOPPED)
            inbox.forget()
            time.sleep(1)  # no message may arrive, so a wait is the only check
            assert inbox.notifications == []
            one.process.send_signal(signal.SIGCONT)
            inbox.wait_for("WATCHDOG")


async def test_a_critical_task_that_has_ended_is_reported() -> None:
    async def part() -> None:
        pass

    task = asyncio.create_task(part(), name="Reloader.run")
    assert task_failure([task]) is None
    await task
    assert task_failure([task]) == "Reloader.run has ended"


# Workers that hang


def config_and_listener(folder: Path, count: int) -> tuple[Config, socket.socket]:
    write(folder / "gateway.yaml", configuration({"id": "m", "servers": [{"url": "http://127.0.0.1:9"}]}, workers=count))
    return load(folder / "gateway.yaml"), socket.create_server(("127.0.0.1", 0))


def suspend(pid: int) -> None:
    """Stop a process with SIGSTOP."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


async def test_a_worker_that_hangs_is_replaced_and_the_others_are_not(tmp_path: Path) -> None:
    config, listener = config_and_listener(tmp_path, 2)
    with closing(listener):
        async with aclosing(WorkerSupervisor(listener, 2, WorkerEvents(lambda: None, lambda _: None))) as supervisor:
            supervisor.apply_snapshot(build_snapshot(config, ObservedServers({}, {}, {}), 1, 1), Health({}, {}))
            await until(lambda: all(worker.up for worker in supervisor.statuses), 60)
            first, second = (worker.pid for worker in supervisor.statuses)
            assert first is not None
            suspend(first)
            for _ in range(7):
                supervisor.check(time.monotonic())
                await until(lambda: not supervisor.statuses[1].unanswered, 60)
            await until(lambda: supervisor.statuses[0].up and supervisor.statuses[0].pid != first, 60)
            assert [(worker.restarts, worker.pid) for worker in supervisor.statuses][1] == (0, second)
            assert supervisor.statuses[0].restarts == 1


async def test_a_worker_that_hangs_before_it_serves_is_replaced_too(tmp_path: Path) -> None:
    config, listener = config_and_listener(tmp_path, 1)
    with closing(listener):
        async with aclosing(WorkerSupervisor(listener, 1, WorkerEvents(lambda: None, lambda _: None))) as supervisor:
            supervisor.apply_snapshot(build_snapshot(config, ObservedServers({}, {}, {}), 1, 1), Health({}, {}))
            await until(lambda: supervisor.statuses[0].pid is not None, 60)
            first = supervisor.statuses[0].pid
            assert first is not None
            suspend(first)
            for _ in range(13):
                assert not supervisor.statuses[0].up
                supervisor.check(time.monotonic())
            # A worker that served before it was stopped may have reported it, and counts as up until its exit is noticed
            await until(lambda: supervisor.statuses[0].up and supervisor.statuses[0].pid != first, 60)
            assert supervisor.statuses[0].restarts == 1


async def test_workers_that_do_not_start_are_reported(tmp_path: Path) -> None:
    config, listener = config_and_listener(tmp_path, 1)
    with closing(listener):
        async with aclosing(WorkerSupervisor(listener, 1, WorkerEvents(lambda: None, lambda _: None))) as supervisor:
            now = time.monotonic()
            assert supervisor.failure(now) is None
            supervisor.check(now)
            assert supervisor.failure(now + 61) == "no worker starts"
            supervisor.apply_snapshot(build_snapshot(config, ObservedServers({}, {}, {}), 1, 1), Health({}, {}))
            await until(lambda: supervisor.statuses[0].up, 60)
            supervisor.check(now + 61)
            assert supervisor.failure(now + 61) is None
