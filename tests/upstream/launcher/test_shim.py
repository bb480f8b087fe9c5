"""The shim program, controlled over its socket as control does it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from upstream.launcher.shim import ServerCommand, descendants, kill, parse_options, processes, read, unlink_socket

SERVER = Path(__file__).with_name("launched_server.py")


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    return any(row.pid == pid and row.state not in "ZX" for row in processes())


def is_called(name: str, pid: int) -> bool:
    return read(f"/proc/{pid}/comm").decode() == f"{name}\n"


class ShimUnderTest:
    """A shim, with the test as its control process."""

    def __init__(self, folder: Path, *command: str, env: dict[str, str] | None = None) -> None:
        self.pids_file = folder / "pids"
        self.folder = folder / "runtime"
        self.folder.mkdir()
        self.socket = self.folder / "0.sock"
        self.output = folder / "output"
        self.control, theirs = socket.socketpair()
        self.control.settimeout(30)
        arguments = ["--name", "m#0", "--control", str(theirs.fileno()), "--socket", str(self.socket), "--folder", str(self.folder), "--"]
        with theirs, self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "upstream.launcher.shim", *arguments, *command],
                pass_fds=[theirs.fileno()],
                stdout=output,
                stderr=output,
            )
        self.reports = self.control.makefile()
        self.env = {**os.environ, "VLLM_API_KEY": "k", **(env or {})}

    def begin(self) -> int:
        self.control.sendall(json.dumps({"env": self.env}).encode() + b"\n")
        return self.report()["pid"]

    def report(self) -> dict[str, int]:
        report: dict[str, int] = json.loads(self.reports.readline())
        return report

    def hang_up(self) -> None:
        """Close the socket, as the kernel does when control exits."""
        self.reports.close()
        self.control.close()

    def pids(self) -> dict[str, int]:
        lines = self.pids_file.read_text().splitlines() if self.pids_file.exists() else []
        return {role: int(pid) for role, pid in (line.split() for line in lines)}

    def all_up(self) -> dict[str, int]:
        until(lambda: self.pids().keys() == {"engine", "stray", "main"} and self.socket.exists())
        return self.pids()

    def close(self) -> None:
        self.hang_up()
        for pid in self.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[..., ShimUnderTest]]:
    server_under_shim: list[ShimUnderTest] = []

    def start(*command: str, **options: dict[str, str]) -> ShimUnderTest:
        server_under_shim.append(ShimUnderTest(tmp_path, *command, **options))
        return server_under_shim[-1]

    yield start
    for each in server_under_shim:
        each.close()


@pytest.fixture
def server(keep: Callable[..., ShimUnderTest], tmp_path: Path) -> ShimUnderTest:
    paths = ("--uds", str(tmp_path / "runtime" / "0.sock"), "--pids", str(tmp_path / "pids"))
    return keep(sys.executable, str(SERVER), "m", "--served-model-name", "m", "--engine-core", *paths)


def shell(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


def test_the_exit_is_reported_as_in_subprocess(keep: Callable[..., ShimUnderTest]) -> None:
    server_under_shim = keep(*shell("exit 3"))
    server_under_shim.begin()
    assert server_under_shim.report() == {"exit": 3}
    assert server_under_shim.process.wait(30) == 0
    assert server_under_shim.folder.exists(), "control lives and may start the server again"


def test_death_by_signal_is_reported_and_the_rest_is_killed(server: ShimUnderTest) -> None:
    main = server.begin()
    pids = server.all_up()
    os.kill(main, signal.SIGKILL)
    assert server.report() == {"exit": -9}
    assert server.process.wait(30) == 0
    assert not any(map(alive, pids.values()))
    assert not server.socket.exists()


def test_it_leads_a_session_with_the_server_in_its_group(server: ShimUnderTest) -> None:
    main = server.begin()
    shim_pid = server.process.pid
    assert os.getsid(main) == os.getsid(shim_pid) == os.getpgid(main) == shim_pid != os.getsid(0)


def test_when_control_exits_everything_is_killed_and_the_folder_removed(server: ShimUnderTest) -> None:
    server.begin()
    pids = server.all_up()
    assert os.getsid(pids["stray"]) == pids["stray"]
    server.hang_up()
    assert server.process.wait(30) == 0
    assert not any(map(alive, pids.values()))
    assert not server.folder.exists()


def test_when_control_exits_with_unread_reports_everything_is_killed_too(server: ShimUnderTest) -> None:
    """The kernel then resets the connection."""
    server.control.sendall(json.dumps({"env": server.env}).encode() + b"\n")
    pids = server.all_up()
    server.hang_up()
    assert server.process.wait(30) == 0
    assert not any(map(alive, pids.values()))
    assert not server.folder.exists()


def test_a_process_that_has_exited_can_be_killed_again() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    kill(process.pid)
    kill(process.pid)


def test_a_folder_that_others_use_stays(server: ShimUnderTest) -> None:
    server.begin()
    server.all_up()
    (server.folder / "1.sock").touch()
    server.hang_up()
    assert server.process.wait(30) == 0
    assert [path.name for path in server.folder.iterdir()] == ["1.sock"]


def test_a_word_from_control_kills_everything_and_leaves_the_folder(server: ShimUnderTest) -> None:
    server.begin()
    pids = server.all_up()
    server.control.sendall(b"kill\n")
    assert server.process.wait(30) == 0
    assert not any(map(alive, pids.values()))
    assert server.folder.exists()
    assert not server.socket.exists()


def test_when_control_exits_before_it_sent_the_environment_nothing_is_started(server: ShimUnderTest) -> None:
    server.control.sendall(b'{"env": {')
    server.hang_up()
    assert server.process.wait(30) == 0
    assert server.pids() == {}
    assert not server.folder.exists()


def test_sigterm_is_passed_on_and_sigint_and_sighup_are_survived(server: ShimUnderTest) -> None:
    server.begin()
    server.all_up()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        server.process.send_signal(number)
    assert server.report() == {"exit": 0}
    assert server.process.wait(30) == 0


def test_the_server_does_not_inherit_ignored_signals(keep: Callable[..., ShimUnderTest]) -> None:
    server_under_shim = keep("sleep", "600")
    pid = server_under_shim.begin()
    until(lambda: is_called("sleep", pid))
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    # The C library's own signals, 32 and 33, are whatever our own parent left them.
    assert int(status["SigIgn"], 16) & (1 << 31) - 1 == 0
    assert int(status["SigBlk"], 16) == 0


def test_the_server_holds_no_end_of_the_socket(keep: Callable[..., ShimUnderTest]) -> None:
    server_under_shim = keep("sleep", "600")
    pid = server_under_shim.begin()
    until(lambda: is_called("sleep", pid) and sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2"])


def test_the_server_is_killed_with_its_shim(keep: Callable[..., ShimUnderTest]) -> None:
    server_under_shim = keep("sleep", "600")
    pid = server_under_shim.begin()
    until(lambda: is_called("sleep", pid))
    server_under_shim.process.kill()
    until(lambda: not alive(pid))
    assert server_under_shim.reports.readline() == "", "control sees the end of the stream"


def test_the_environment_is_the_servers_alone(keep: Callable[..., ShimUnderTest]) -> None:
    server_under_shim = keep(*shell('echo "$VLLM_API_KEY $PYTHONHOME"'), env={"VLLM_API_KEY": "canary", "PYTHONHOME": "/nowhere"})
    server_under_shim.begin()
    assert server_under_shim.report() == {"exit": 0}
    server_under_shim.process.wait(30)
    assert server_under_shim.output.read_text() == "canary /nowhere\n"


def test_a_command_that_is_not_there_says_so(keep: Callable[..., ShimUnderTest]) -> None:
    server_under_shim = keep("no-such-command")
    server_under_shim.begin()
    assert server_under_shim.report() == {"exit": 127}
    assert server_under_shim.process.wait(30) == 0
    assert server_under_shim.output.read_text() == "no-such-command: No such file or directory\n"


def test_adopted_processes_are_reaped_while_the_server_lives(keep: Callable[..., ShimUnderTest]) -> None:
    server_under_shim = keep(*shell("(sh -c 'exit 0' & sleep 0.05 & ) ; exec sleep 600"))
    pid = server_under_shim.begin()
    until(lambda: [below.pid for below in descendants(server_under_shim.process.pid)] == [pid] and is_called("sleep", pid))


def test_shared_memory_of_a_killed_server_is_unlinked(keep: Callable[..., ShimUnderTest], tmp_path: Path) -> None:
    name = f"vllm-gateway-test-{os.getpid()}"
    segment = Path("/dev/shm") / name
    server_under_shim = keep(sys.executable, str(SERVER), "m", "--uds", str(tmp_path / "s"), "--shared-memory", name)
    server_under_shim.begin()
    try:
        until((tmp_path / "s").exists)  # its segment exists, and the tracker has registered it
        assert segment.exists()
        server_under_shim.control.sendall(b"kill\n")
        assert server_under_shim.process.wait(30) == 0
        assert not segment.exists()
    finally:
        segment.unlink(missing_ok=True)


def test_the_command_line_is_read() -> None:
    assert parse_options(["--name", "m#0", "--control", "7", "--", "vllm", "--", "x"]) == (
        7,
        ServerCommand("m#0", ("vllm", "--", "x"), "", "", ""),
    )


def test_proc_is_read_whatever_a_process_calls_itself(tmp_path: Path) -> None:
    odd = tmp_path / "a) R 1 (b"
    odd.symlink_to("/bin/sleep")
    process = subprocess.Popen([odd, "600"], start_new_session=True)
    try:
        until(lambda: is_called("a) R 1 (b", process.pid))
        (row,) = (row for row in processes() if row.pid == process.pid)
        assert (row.parent, row.group, row.session) == (os.getpid(), process.pid, process.pid)
    finally:
        process.kill()
        process.wait()


def test_only_sockets_are_unlinked(tmp_path: Path) -> None:
    file, path = tmp_path / "file", tmp_path / "s"
    file.touch()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
    for each in (file, path, tmp_path / "absent"):
        unlink_socket(str(each))
    assert [left.name for left in tmp_path.iterdir()] == ["file"]
