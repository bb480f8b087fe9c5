"""Faults of launched servers, provoked for real: no process is left, and a server that can recover is up again."""

from __future__ import annotations

import os
import re
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.upstream.launcher.launching import QUICK, Case, alive, until
from upstream.launcher import memory
from upstream.launcher.launcher import Launcher
from upstream.launcher.lifecycle import LaunchState, RestartPolicy
from upstream.launcher.logfile import LIMIT, ROTATED
from upstream.vllm.health import Prober, ProbeTarget, ServerHealth

THRICE = RestartPolicy(first=0.01, cap=0.02, limit=3)


@asynccontextmanager
async def probed(launcher: Launcher, name: str = "org/m#0", grace: float = 5.0, deadline: float = 10.0) -> AsyncIterator[Prober]:
    """Frequent probes of a ready server. A lost server is restarted, as control does it."""
    (status,) = launcher.statuses()

    def renew(probe: ServerHealth) -> None:
        launcher.servers[name].restart(probe.reason, grace)

    prober = Prober(on_change=lambda _: None, on_lost=renew, interval=0.02, deadline=deadline)
    async with prober:
        prober.set_targets([ProbeTarget(name, status.address, launcher.servers[name].api_key)])
        yield prober


async def test_a_dead_engine_behind_a_living_server_is_renewed(case: Case) -> None:
    engine_is_dead = case.folder / "dead"
    async with case.launcher(QUICK) as launcher:
        launcher.start(case.spec(engine_core=True, sick_while=str(engine_is_dead)))
        await case.reached(LaunchState.READY)
        pids = case.pids()
        engine_is_dead.touch()
        async with probed(launcher):
            crashed = await case.reached(LaunchState.CRASHED)
            engine_is_dead.unlink()
        assert crashed.cause is not None and crashed.cause.code == "engine_died"
        assert crashed.reason.startswith("org/m#0 ended: ") and "it is restarted: GET /health: status 503" in crashed.reason
        await case.reached(LaunchState.READY, restarts=1)
        assert not any(map(alive, pids.values()))
    assert case.states()[:6] == [
        LaunchState.STARTING,
        LaunchState.READY,
        LaunchState.CRASHED,
        LaunchState.BACKING_OFF,
        LaunchState.STARTING,
        LaunchState.READY,
    ]


async def test_a_hung_server_is_renewed_though_it_hears_no_signal_but_sigkill(case: Case) -> None:
    async with case.launcher(QUICK) as launcher:
        launcher.start(case.spec(engine_core=True))
        await case.reached(LaunchState.READY)
        pids = case.pids()
        os.kill(pids["main"], signal.SIGSTOP)
        async with probed(launcher, grace=0.1, deadline=0.5):
            assert "it is restarted: no response within 0.5 s" in (await case.reached(LaunchState.CRASHED)).reason
            await case.reached(LaunchState.BACKING_OFF)
        assert not any(map(alive, pids.values()))
        await case.reached(LaunchState.READY, restarts=1)


async def test_only_a_ready_server_is_renewed_and_only_once(case: Case) -> None:
    async with case.launcher(QUICK) as launcher:
        with pytest.raises(KeyError):
            launcher.servers["org/m#0"].restart("nobody knows it", 0)
        launcher.start(case.spec())
        launcher.servers["org/m#0"].restart("too early", 0)
        await case.reached(LaunchState.READY)
        launcher.servers["org/m#0"].restart("first", 5)
        launcher.servers["org/m#0"].restart("second", 5)
        assert "it is restarted: first" in (await case.reached(LaunchState.CRASHED)).reason
        launcher.servers["org/m#0"].restart("too late", 0)
        await case.reached(LaunchState.READY, restarts=1)
    assert case.states().count(LaunchState.CRASHED) == 1


async def test_a_stop_in_the_middle_of_a_renewal(case: Case) -> None:
    async with case.launcher() as launcher:
        launcher.start(case.spec(engine_core=True, ignore_term=True))
        await case.reached(LaunchState.READY)
        launcher.servers["org/m#0"].restart("ill", 600)
        await case.reached(LaunchState.CRASHED)
        await launcher.stop("org/m#0", grace=0.1)
        assert not any(map(alive, case.pids().values()))
    assert case.states()[-3:] == [LaunchState.CRASHED, LaunchState.STOPPING, LaunchState.STOPPED]


@pytest.mark.row(25)
async def test_a_server_that_keeps_failing_is_given_up_until_it_is_started_again(case: Case, measured: Callable[[str], None]) -> None:
    async with case.launcher(THRICE) as launcher:
        launcher.start(case.spec(no_such_flag=1))
        await until(lambda: case.status_updates[-1].given_up and case.status_updates[-1].pid is None)
        last = case.status_updates[-1]
        assert (last.state, last.restarts, last.first_start_finished) == (LaunchState.FAILED, 2, True)
        assert "unrecognized arguments: --no-such-flag 1 (exit code 2). It has failed 3 times in a row and stays down" in last.reason
        assert case.states() == 2 * [LaunchState.STARTING, LaunchState.FAILED, LaunchState.BACKING_OFF] + [
            LaunchState.STARTING,
            LaunchState.FAILED,
        ]
        await launcher.stop("org/m#0", grace=10)
        launcher.start(case.spec())
        assert not (await case.reached(LaunchState.READY)).given_up
    measured("fails at each start: given up after the number of times that was set, with its own words; started anew by an operator")


async def test_a_server_that_was_given_up_starts_again_with_a_longer_timeout(case: Case) -> None:
    async with case.launcher(THRICE) as launcher:
        launcher.start(case.spec(startup_timeout=0.001))
        await until(lambda: case.status_updates[-1].given_up and case.status_updates[-1].pid is None, 60.0)
        launcher.servers["org/m#0"].set_startup_timeout(120.0)
        assert not (await case.reached(LaunchState.READY, restarts=3)).given_up


async def test_a_start_that_is_under_way_lasts_as_long_as_is_allowed_now(case: Case) -> None:
    async with case.launcher(THRICE) as launcher:
        launcher.start(case.spec(startup_timeout=3600.0, never_ready=True))
        await until(lambda: case.status_updates[-1].state is LaunchState.STARTING and case.status_updates[-1].pid is not None, 60.0)
        launcher.servers["org/m#0"].set_startup_timeout(0.1)
        assert "no response to GET /health within 0.1 s" in (await case.reached(LaunchState.FAILED)).reason


async def test_a_server_that_exits_soon_after_every_start_is_given_up_too(case: Case) -> None:
    async with case.launcher(RestartPolicy(first=0.01, cap=0.02, limit=2)) as launcher:
        launcher.start(case.spec())
        for restarts in range(2):
            pid = (await case.reached(LaunchState.READY, restarts=restarts)).pid
            assert pid
            os.kill(pid, signal.SIGTERM)
        failed = await case.reached(LaunchState.FAILED, restarts=1)
        assert failed.given_up and "org/m#0 ended: exit code 0. It has failed 2 times in a row" in failed.reason
        await until(lambda: case.status_updates[-1].pid is None)
    assert case.states().count(LaunchState.CRASHED) == 1


@pytest.mark.row(25)
async def test_a_port_in_use_is_reported_with_its_process(case: Case, measured: Callable[[str], None]) -> None:
    async with case.launcher(QUICK) as launcher:
        with socket.create_server(("127.0.0.1", 0)) as holder:
            port = holder.getsockname()[1]
            launcher.start(case.spec(port=port))
            failed = await case.reached(LaunchState.FAILED)
        assert failed.cause is not None and failed.cause.code == "port_in_use"
        assert f"port {port} of 127.0.0.1 is taken by process {os.getpid()} (" in failed.reason
        await until(lambda: case.status_updates[-1].state is LaunchState.READY)
        assert case.status_updates[-1].address.port == port
    measured("its port is taken: told, with the process that has it; up once it is free")


@pytest.mark.row(25)
async def test_a_flood_of_words_is_cut_while_it_starts(case: Case, measured: Callable[[str], None]) -> None:
    async with case.launcher() as launcher:
        launcher.start(case.spec(flood=LIMIT + (1 << 20), never_ready=True))
        log = (await case.reached(LaunchState.STARTING)).log
        older = log.with_suffix(".log.1")
        await until(lambda: older.exists() and older.stat().st_size == ROTATED)
        await until(lambda: log.stat().st_size < LIMIT)
        assert case.states() == [LaunchState.STARTING]
        for file in (log, older):
            file.unlink()
    measured(f"a log of {LIMIT >> 20} MiB and more: cut to its last {ROTATED >> 20} MiB")


async def test_the_exit_of_a_killed_server_mentions_the_memory(case: Case) -> None:
    async with case.launcher() as launcher:
        launcher.start(case.spec())
        pid = (await case.reached(LaunchState.READY)).pid
        assert pid
        os.kill(pid, signal.SIGKILL)
        reason = "signal SIGKILL" if memory.kills() is not None else "killed by SIGKILL, perhaps by the kernel for lack of memory"
        assert reason in (await case.reached(LaunchState.CRASHED)).reason


@pytest.mark.parametrize(
    ("group", "file"),
    [
        ("0::/a.slice/b.scope\n", "sys/fs/cgroup/a.slice/b.scope/memory.events"),
        ("2:cpu,cpuacct:/\n4:memory:/jobs/7\n0::/\n", "sys/fs/cgroup/memory/jobs/7/memory.oom_control"),
        ("0::/\n", "proc/vmstat"),
        ("", "proc/vmstat"),
    ],
)
def test_where_the_kernel_counts_its_kills(tmp_path: Path, group: str, file: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(group)
    assert memory.kills(tmp_path) is None
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("low 0\noom 9\noom_kill 3\noom_group_kill 1\n")
    assert memory.kills(tmp_path) == 3


async def test_what_a_server_says_while_it_starts_is_its_progress(case: Case) -> None:
    line = "(Worker pid=7) INFO 11-21 14:37:21 [default_loader.py:501] Loading weights took 0.01 seconds"
    ready = case.folder / "not yet"
    ready.touch()
    async with case.launcher() as launcher:
        launcher.start(case.spec(say=line, sick_while=str(ready)))
        await until(lambda: case.status_updates[-1].progress == "ready")
        ready.unlink()
        assert (await case.reached(LaunchState.READY)).progress == ""
        launcher.start(case.spec("b#0", say=line, never_ready=True))
        await until(lambda: case.status_updates[-1].progress == "Loading weights took 0.01 seconds")


async def test_what_a_server_leaves_in_its_own_folder_goes_with_it(case: Case) -> None:
    def left() -> list[str]:
        return [path.name for folder in case.runtime.iterdir() for path in folder.glob("*/*")]

    async with case.launcher(QUICK) as launcher:
        launcher.start(case.spec(leave_socket=True))
        ready = await case.reached(LaunchState.READY)
        assert ready.pid and len(left()) == 1 and re.fullmatch(r"[0-9a-f-]{36}", left()[0])
        os.kill(ready.pid, signal.SIGKILL)
        await case.reached(LaunchState.BACKING_OFF)
        assert left() == []
        again = await case.reached(LaunchState.READY, restarts=1)
        assert again.pid and len(left()) == 1
        os.kill(os.getsid(again.pid), signal.SIGKILL)  # its shim; the remaining files are removed at the next start
        await case.reached(LaunchState.READY, restarts=2)
        assert len(left()) == 1
        await launcher.stop("org/m#0", grace=10)
        assert left() == []


async def test_where_it_puts_its_sockets_is_the_operators_to_say(case: Case) -> None:
    with tempfile.TemporaryDirectory(prefix="rpc-") as own:
        async with case.launcher() as launcher:
            launcher.start(case.spec(leave_socket=True, env={"VLLM_RPC_BASE_PATH": own}))
            await case.reached(LaunchState.READY)
            await launcher.stop("org/m#0", grace=10)
        assert len(os.listdir(own)) == 1
