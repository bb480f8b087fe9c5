"""Launched servers, with real processes: started, watched, restarted, stopped, and never left behind."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.upstream.launcher.launching import QUICK, SERVER, Case, alive, until
from upstream.launcher.launcher import Launcher
from upstream.launcher.lifecycle import SHIM_LOST, LaunchSpec, LaunchState, LaunchStatus
from upstream.launcher.shim import ServerCommand, read
from upstream.launcher.shim_process import shim_process
from upstream.vllm.command_line import LaunchSettings
from upstream.vllm.health import HealthCheck, ProbeTarget


async def models(status: LaunchStatus, key: str) -> list[str] | str:
    seen = await HealthCheck(ProbeTarget("m", status.address, key), 30).run(models=True)
    assert seen is not None
    return [card.id for card in seen.models] if seen.models else seen.reason


def shim_of(pid: int) -> int:
    return os.getsid(pid)


async def test_start_ready_stop(case: Case) -> None:
    async with case.launcher() as launcher:
        launcher.start(case.spec(engine_core=True))
        ready = await case.reached(LaunchState.READY)
        pids = case.pids()
        assert ready.pid == pids["main"]
        assert ready.first_start_finished and ready.restarts == 0 and ready.reason == ""
        assert launcher.statuses() == (ready,)
        await launcher.stop("org/m#0", grace=10)
        assert launcher.statuses() == ()
        assert not any(map(alive, pids.values()))
    assert case.states() == [LaunchState.STARTING, LaunchState.READY, LaunchState.STOPPING, LaunchState.STOPPED]


async def test_the_server_demands_the_internal_key_which_is_shown_nowhere(case: Case) -> None:
    async with case.launcher() as launcher:
        launcher.start(case.spec())
        ready = await case.reached(LaunchState.READY)
        key = launcher.servers[ready.name].api_key
        assert await models(ready, key) == ["org/m", "m"]
        assert await models(ready, "another") == "the server rejected the gateway's key (GET /v1/models: status 401)"
        assert ready.pid is not None
        command_lines = [read(f"/proc/{pid}/cmdline") for pid in (ready.pid, shim_of(ready.pid))]
        assert b"launched_server.py" in command_lines[1], "the shim's command line carries the server's"
        assert not any(key.encode() in line for line in command_lines)
        assert key not in repr(case.status_updates) + repr(vars(launcher))


async def test_what_is_private_is_private(case: Case) -> None:
    async with case.launcher() as launcher:
        launcher.start(case.spec())
        ready = await case.reached(LaunchState.READY)
        assert ready.address.uds is not None
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (Path(ready.address.uds).parent, case.logs, ready.log)]
        assert modes == [0o700, 0o700, 0o600]


async def test_a_server_whose_log_was_removed_stays_up(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    async with case.launcher() as launcher:
        launcher.start(case.spec())
        ready = await case.reached(LaunchState.READY)
        ready.log.unlink()
        await until(lambda: "log of org/m#0: [Errno 2] No such file or directory" in caplog.text)
        assert launcher.statuses() == (ready,)
        assert await models(ready, launcher.servers[ready.name].api_key) == ["org/m", "m"]


async def test_a_folder_of_logs_that_others_could_write_is_closed_to_them(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    folder.chmod(0o777)
    async with Launcher(on_change=lambda _: None, log_folder=folder, environ=os.environ, runtime_parent="/tmp"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_a_bad_flag_is_a_failure_with_the_last_lines_of_the_log(case: Case) -> None:
    async with case.launcher() as launcher:
        launcher.start(case.spec(no_such_flag=1))
        failed = await case.reached(LaunchState.FAILED)
        assert failed.cause is not None and failed.cause.code == "unknown_flag"
        assert failed.reason.startswith(f"org/m#0 could not start: {failed.cause.summary}: ")
        assert failed.reason.endswith("error: unrecognized arguments: --no-such-flag 1 (exit code 2)")
        assert failed.tail.startswith("usage: ") and failed.first_start_finished
        waiting = await case.reached(LaunchState.BACKING_OFF)
        assert (waiting.reason, waiting.cause, waiting.pid) == (failed.reason, failed.cause, None)
        assert launcher.servers["org/m#0"].log.tail().endswith("--no-such-flag 1")


async def test_a_failed_start_is_repeated_and_shows_only_its_own_log(case: Case) -> None:
    async with case.launcher(QUICK) as launcher:
        launcher.start(case.spec(no_such_flag=1))
        again = await case.reached(LaunchState.FAILED, restarts=2)
        assert again.reason.count("unrecognized arguments") == 1
    assert case.states()[:5] == [
        LaunchState.STARTING,
        LaunchState.FAILED,
        LaunchState.BACKING_OFF,
        LaunchState.STARTING,
        LaunchState.FAILED,
    ]
    assert again.log.read_text().count("unrecognized arguments") >= 3


async def test_a_command_that_is_not_there_is_a_failure_that_names_it(case: Case) -> None:
    async with case.launcher() as launcher:
        launcher.start(LaunchSpec("m#0", LaunchSettings("m", ("m",), command=("no-such-vllm", "serve")), 30))
        failed = await case.reached(LaunchState.FAILED, "m#0")
        assert "exit code 127" in failed.reason and "no-such-vllm: No such file or directory" in failed.reason
        assert failed.cause is not None and failed.cause.code == "command_not_found"


async def test_a_server_that_never_responds_is_stopped_at_its_startup_timeout(case: Case) -> None:
    """A server that starts quickly. A machine may be too busy even for that; then another one is started, and so on."""
    spec, file = case.spec(startup_timeout=1.0), case.pids_file("org/m#0")
    script = f"echo main $$ >>{file}; setsid sleep 600 & echo stray $! >>{file}; wait"
    async with case.launcher(QUICK) as launcher:
        launcher.start(replace(spec, settings=replace(spec.settings, command=("sh", "-c", script))))
        await until(lambda: case.pids().keys() == {"main", "stray"}, 60.0)
        pids = case.pids()
        (restarts,) = {status.restarts for status in case.status_updates if status.pid == pids["main"]}
        failed = await case.reached(LaunchState.FAILED, restarts=restarts)
        assert "no response to GET /health within 1 s" in failed.reason
        await case.reached(LaunchState.BACKING_OFF, restarts=restarts)
        assert not alive(pids["main"])
        await until(lambda: not alive(pids["stray"]))  # which may be the next one's


async def test_a_killed_server_is_reported_at_once_and_started_again(case: Case) -> None:
    async with case.launcher(QUICK) as launcher:
        launcher.start(case.spec(engine_core=True))
        first = await case.reached(LaunchState.READY)
        pids, key = case.pids(), launcher.servers[first.name].api_key
        os.kill(pids["main"], signal.SIGKILL)
        crashed = await case.reached(LaunchState.CRASHED)
        assert crashed.reason.startswith("org/m#0 ended: ") and "signal SIGKILL" in crashed.reason
        assert crashed.tail == "loading org/m\nready"
        await case.reached(LaunchState.BACKING_OFF)
        assert not any(map(alive, pids.values()))
        second = await case.reached(LaunchState.READY, restarts=1)
        assert second.pid == case.pids()["main"] != first.pid
        assert (second.reason, second.cause, second.tail) == ("", None, "")
        assert await models(second, key) == ["org/m", "m"]
    assert case.states()[:6] == [
        LaunchState.STARTING,
        LaunchState.READY,
        LaunchState.CRASHED,
        LaunchState.BACKING_OFF,
        LaunchState.STARTING,
        LaunchState.READY,
    ]


async def test_an_end_with_exit_code_0_is_a_crash_too(case: Case) -> None:
    async with case.launcher() as launcher:
        launcher.start(case.spec())
        ready = await case.reached(LaunchState.READY)
        assert ready.pid
        os.kill(ready.pid, signal.SIGTERM)
        assert "ended: exit code 0" in (await case.reached(LaunchState.CRASHED)).reason


@pytest.mark.row(25)
async def test_a_server_that_ignores_sigterm_is_killed_at_the_deadline(case: Case, measured: Callable[[str], None]) -> None:
    async with case.launcher() as launcher:
        launcher.start(case.spec(engine_core=True, ignore_term=True))
        await case.reached(LaunchState.READY)
        began = time.monotonic()
        await launcher.stop("org/m#0", grace=0.3)
        took = time.monotonic() - began
        assert took >= 0.3
        assert not any(map(alive, case.pids().values()))
    assert case.states()[-1] is LaunchState.STOPPED
    measured(f"it ignores SIGTERM: gone {took:.2f} s after it, with a deadline of 0.3 s")


@pytest.mark.parametrize("flag", ["never_ready", "no_such_flag"], ids=["starting", "backing off"])
async def test_stop_before_it_was_ever_ready(case: Case, flag: str) -> None:
    async with case.launcher() as launcher:
        launcher.start(case.spec("org/m#0", 30.0, None, **{flag: True}))
        await until(lambda: bool(case.pids()) or LaunchState.BACKING_OFF in case.states())
        await launcher.stop("org/m#0", grace=10)
        assert case.states()[-2:] == [LaunchState.STOPPING, LaunchState.STOPPED]
        assert not any(map(alive, case.pids().values()))


async def test_stop_right_after_start_and_a_second_stop(case: Case) -> None:
    async with case.launcher() as launcher:
        launcher.start(case.spec())
        await asyncio.gather(launcher.stop("org/m#0", grace=10), launcher.stop("org/m#0", grace=10))
        assert case.states() == [LaunchState.STARTING, LaunchState.STOPPING, LaunchState.STOPPED]
        with pytest.raises(KeyError):
            await launcher.stop("org/m#0", grace=0)
        launcher.start(case.spec())
        await case.reached(LaunchState.READY)


async def test_the_end_of_the_launcher_ends_even_a_long_stop(case: Case) -> None:
    async with case.launcher() as launcher:
        launcher.start(case.spec(ignore_term=True, engine_core=True))
        await case.reached(LaunchState.READY)
        stopping = asyncio.create_task(launcher.stop("org/m#0", grace=600))
        await case.reached(LaunchState.STOPPING)
    async with asyncio.timeout(5):
        await stopping
    assert not any(map(alive, case.pids().values()))


async def test_a_killed_shim_is_noticed_and_its_server_is_killed(case: Case) -> None:
    async with case.launcher(QUICK) as launcher:
        name = f"vllm-gateway-test-{os.getpid()}"
        launcher.start(case.spec(engine_core=True, shared_memory=name))
        ready = await case.reached(LaunchState.READY)
        pids = case.pids()
        assert ready.pid and name in os.listdir("/dev/shm")
        os.kill(shim_of(ready.pid), signal.SIGKILL)
        assert SHIM_LOST in (await case.reached(LaunchState.CRASHED)).reason
        await case.reached(LaunchState.BACKING_OFF)
        assert not any(map(alive, pids.values()))
        assert name not in os.listdir("/dev/shm")
        await case.reached(LaunchState.READY, restarts=1)


async def test_control_does_the_work_of_a_frozen_shim(case: Case) -> None:
    pids_file = case.pids_file("m")
    argv = (sys.executable, str(SERVER), "m", "--uds", str(case.folder / "s"), "--engine-core", "--pids", str(pids_file))
    with (case.folder / "out").open("wb") as output:
        async with shim_process(
            ServerCommand("m", argv, str(case.folder / "s"), "", ""), os.environ, output.fileno(), timeout=0.2
        ) as process:
            await until(lambda: "main" in case.pids("m") and "stray" in case.pids("m"))
            shim_pid = shim_of(process.pid)
            os.kill(shim_pid, signal.SIGSTOP)
    assert not any(map(alive, [shim_pid, *case.pids("m").values()]))


@pytest.mark.parametrize("iterations", range(8))
async def test_a_cancelled_start_leaves_no_process(case: Case, iterations: int) -> None:
    async def start(output: int) -> None:
        async with shim_process(ServerCommand("m", (sys.executable, "-c", "pass"), "", "", ""), os.environ, output):
            await asyncio.sleep(60)

    before = set(psutil.Process().children())
    with (case.folder / "out").open("wb") as output:
        starting = asyncio.create_task(start(output.fileno()))
        for _ in range(iterations):
            await asyncio.sleep(0)
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
    assert set(psutil.Process().children()) <= before


CONTROL = """
import asyncio, json, os, sys
from pathlib import Path
from upstream.launcher.launcher import Launcher
from upstream.launcher.lifecycle import LaunchSpec
from upstream.vllm.command_line import LaunchSettings

async def main(folder, command, args):
    settings = LaunchSettings("m", ("m",), command=tuple(command), args=args)
    told = lambda status: print(status.state, flush=True)
    async with Launcher(on_change=told, log_folder=folder / "logs", environ=os.environ, runtime_parent=sys.argv[2]) as launcher:
        launcher.start(LaunchSpec("org/m#0", settings, 30))
        await asyncio.sleep(600)

asyncio.run(main(Path(sys.argv[1]), *map(json.loads, sys.argv[3:])))
"""


async def test_after_kill_9_of_control_no_process_is_left_after_5_seconds(case: Case) -> None:
    settings = case.spec(engine_core=True, ignore_term=True).settings
    arguments = [json.dumps(part) for part in (settings.command, settings.args)]
    control = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CONTROL, str(case.folder), str(case.runtime), *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert control.stdout
        assert (await control.stdout.readuntil(b"ready\n")).startswith(b"starting\n")
        pids = case.pids()
        shim_pid = shim_of(pids["main"])
        control.kill()
        await until(lambda: not any(map(alive, [shim_pid, *pids.values()])), 5)
        assert list(case.runtime.iterdir()) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            control.kill()
        await control.communicate()


async def test_a_stale_socket_is_no_obstacle(case: Case) -> None:
    path = case.folder / "own.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with case.launcher() as launcher:
        launcher.start(case.spec(uds=str(path)))
        assert (await case.reached(LaunchState.READY)).address.uds == str(path)
        await launcher.stop("org/m#0", grace=10)
    assert not path.exists()


async def test_two_servers_on_a_socket_and_on_tcp_are_independent(case: Case) -> None:
    async with case.launcher() as launcher:
        launcher.start(case.spec("a#0"))
        launcher.start(case.spec("b#0", host="127.0.0.1"))
        a, b = await case.reached(LaunchState.READY, "a#0"), await case.reached(LaunchState.READY, "b#0")
        assert a.address.uds and b.address.port and a.log != b.log
        assert launcher.servers["a#0"].api_key != launcher.servers["b#0"].api_key
        assert await models(b, launcher.servers["b#0"].api_key) == ["org/m", "m"]
        await launcher.stop("a#0", grace=10)
        assert [left.name for left in launcher.statuses()] == ["b#0"]
        assert b.pid and alive(b.pid)


async def test_a_name_is_launched_once_and_bad_settings_never(case: Case) -> None:
    async with case.launcher() as launcher:
        launcher.start(case.spec())
        with pytest.raises(ValueError, match="org/m#0 is launched already"):
            launcher.start(case.spec())
        with pytest.raises(ValueError, match="api-key: the gateway gives"):
            launcher.start(case.spec("other#0", api_key="x"))
        assert [status.name for status in launcher.statuses()] == ["org/m#0"]


async def test_a_log_that_cannot_be_written_is_a_failure_with_its_reason(case: Case) -> None:
    async with case.launcher() as launcher:
        (case.logs / "org%2Fm#0.log").mkdir()
        launcher.start(case.spec())
        assert "Is a directory" in (await case.reached(LaunchState.FAILED)).reason


async def test_a_runtime_folder_too_deep_for_a_socket_is_refused(case: Case) -> None:
    deep = case.runtime / ("x" * 100)
    deep.mkdir()
    with pytest.raises(OSError, match="too long for unix sockets"):
        async with Launcher(on_change=case.status_updates.append, log_folder=case.logs, environ={}, runtime_parent=str(deep)):
            pass
    assert list(deep.iterdir()) == []


async def test_an_error_ends_the_servers_too(case: Case) -> None:
    with contextlib.suppress(RuntimeError):
        async with case.launcher() as launcher:
            launcher.start(case.spec(engine_core=True))
            await case.reached(LaunchState.READY)
            raise RuntimeError
    assert list(case.runtime.iterdir()) == []
    assert case.pids() and not any(map(alive, case.pids().values()))


async def test_the_simulator_is_launched_like_vllm(case: Case) -> None:
    settings = LaunchSettings("org/m", ("org/m", "m"), command=(sys.executable, "-P", "-m", "upstream.simulator"))
    async with case.launcher() as launcher:
        launcher.start(LaunchSpec("org/m#0", settings, 30))
        ready = await case.reached(LaunchState.READY)
        assert await models(ready, launcher.servers[ready.name].api_key) == ["org/m", "m"]
        await launcher.stop("org/m#0", grace=10)


async def test_a_command_that_knows_no_unix_socket_gets_a_loopback_port(case: Case) -> None:
    script = case.folder / "no_uds.py"
    script.write_text(
        "import runpy, sys\n"
        "if '--uds' in sys.argv:\n"
        "    sys.exit('error: unrecognized arguments: --uds')\n"
        f"runpy.run_path({str(SERVER)!r}, run_name='__main__')\n"
    )
    async with case.launcher(QUICK) as launcher:
        spec = case.spec()
        launcher.start(LaunchSpec(spec.name, replace(spec.settings, command=(sys.executable, str(script))), 30.0))
        failed = await case.reached(LaunchState.FAILED)
        assert "tried on a loopback port next" in failed.reason
        ready = await case.reached(LaunchState.READY, restarts=1)
        assert ready.address.uds is None and ready.address.host == "127.0.0.1"
