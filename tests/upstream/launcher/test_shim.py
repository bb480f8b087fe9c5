"""The keeper program itself, spoken to over its socket as control does."""

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

from upstream.launcher.shim import ShimOptions, descendants, processes, read, unlink_socket

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


class Kept:
    """A keeper, and the test in control's place."""

    def __init__(self, folder: Path, *command: str, env: dict[str, str] | None = None) -> None:
        self.pids_file = folder / "pids"
        self.folder = folder / "runtime"
        self.folder.mkdir()
        self.socket = self.folder / "0.sock"
        self.output = folder / "output"
        self.control, theirs = socket.socketpair()
        self.control.settimeout(30)
        words = ["--name", "m#0", "--control", str(theirs.fileno()), "--socket", str(self.socket), "--folder", str(self.folder), "--"]
        with theirs, self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "upstream.launcher.shim", *words, *command],
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
        """What the kernel does for a control that dies."""
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
def keep(tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    kept: list[Kept] = []

    def start(*command: str, **options: dict[str, str]) -> Kept:
        kept.append(Kept(tmp_path, *command, **options))
        return kept[-1]

    yield start
    for each in kept:
        each.close()


@pytest.fixture
def server(keep: Callable[..., Kept], tmp_path: Path) -> Kept:
    paths = ("--uds", str(tmp_path / "runtime" / "0.sock"), "--pids", str(tmp_path / "pids"))
    return keep(sys.executable, str(SERVER), "m", "--served-model-name", "m", "--engine-core", *paths)


def shell(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


def test_the_exit_is_reported_as_subprocess_has_it(keep: Callable[..., Kept]) -> None:
    kept = keep(*shell("exit 3"))
    kept.begin()
    assert kept.report() == {"exit": 3}
    assert kept.process.wait(30) == 0
    assert kept.folder.exists(), "control lives and may start the server again"


def test_death_by_signal_is_reported_and_the_rest_is_killed(server: Kept) -> None:
    main = server.begin()
    pids = server.all_up()
    os.kill(main, signal.SIGKILL)
    assert server.report() == {"exit": -9}
    assert server.process.wait(30) == 0
    assert not any(map(alive, pids.values()))
    assert not server.socket.exists()


def test_it_leads_a_session_with_the_server_in_its_group(server: Kept) -> None:
    main = server.begin()
    keeper = server.process.pid
    assert os.getsid(main) == os.getsid(keeper) == os.getpgid(main) == keeper != os.getsid(0)


def test_when_control_is_gone_everything_is_killed_and_the_folder_taken_away(server: Kept) -> None:
    server.begin()
    pids = server.all_up()
    assert os.getsid(pids["stray"]) == pids["stray"]
    server.hang_up()
    assert server.process.wait(30) == 0
    assert not any(map(alive, pids.values()))
    assert not server.folder.exists()


def test_a_folder_that_others_use_stays(server: Kept) -> None:
    server.begin()
    server.all_up()
    (server.folder / "1.sock").touch()
    server.hang_up()
    assert server.process.wait(30) == 0
    assert [path.name for path in server.folder.iterdir()] == ["1.sock"]


def test_a_word_from_control_kills_everything_and_leaves_the_folder(server: Kept) -> None:
    server.begin()
    pids = server.all_up()
    server.control.sendall(b"kill\n")
    assert server.process.wait(30) == 0
    assert not any(map(alive, pids.values()))
    assert server.folder.exists()
    assert not server.socket.exists()


def test_when_control_goes_before_it_said_what_to_start_nothing_is_started(server: Kept) -> None:
    server.control.sendall(b'{"env": {')
    server.hang_up()
    assert server.process.wait(30) == 0
    assert server.pids() == {}
    assert not server.folder.exists()


def test_sigterm_is_passed_on_and_sigint_and_sighup_are_survived(server: Kept) -> None:
    server.begin()
    server.all_up()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        server.process.send_signal(number)
    assert server.report() == {"exit": 0}
    assert server.process.wait(30) == 0


def test_the_server_is_not_told_to_ignore_signals(keep: Callable[..., Kept]) -> None:
    kept = keep("sleep", "600")
    pid = kept.begin()
    until(lambda: is_called("sleep", pid))
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    # The C library's own signals, 32 and 33, are whatever our own parent left them.
    assert int(status["SigIgn"], 16) & (1 << 31) - 1 == 0
    assert int(status["SigBlk"], 16) == 0


def test_the_server_holds_no_end_of_the_socket(keep: Callable[..., Kept]) -> None:
    kept = keep("sleep", "600")
    pid = kept.begin()
    until(lambda: is_called("sleep", pid) and sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2"])


def test_the_server_dies_with_a_killed_keeper(keep: Callable[..., Kept]) -> None:
    kept = keep("sleep", "600")
    pid = kept.begin()
    until(lambda: is_called("sleep", pid))
    kept.process.kill()
    until(lambda: not alive(pid))
    assert kept.reports.readline() == "", "control sees the end of the stream"


def test_the_environment_is_the_servers_alone(keep: Callable[..., Kept]) -> None:
    kept = keep(*shell('echo "$VLLM_API_KEY $PYTHONHOME"'), env={"VLLM_API_KEY": "canary", "PYTHONHOME": "/nowhere"})
    kept.begin()
    assert kept.report() == {"exit": 0}
    kept.process.wait(30)
    assert kept.output.read_text() == "canary /nowhere\n"


def test_a_command_that_is_not_there_says_so(keep: Callable[..., Kept]) -> None:
    kept = keep("no-such-command")
    kept.begin()
    assert kept.report() == {"exit": 127}
    assert kept.process.wait(30) == 0
    assert kept.output.read_text() == "no-such-command: No such file or directory\n"


def test_adopted_processes_are_reaped_while_the_server_lives(keep: Callable[..., Kept]) -> None:
    kept = keep(*shell("(sh -c 'exit 0' & sleep 0.05 & ) ; exec sleep 600"))
    pid = kept.begin()
    until(lambda: [below.pid for below in descendants(kept.process.pid)] == [pid] and is_called("sleep", pid))


def test_shared_memory_of_a_killed_server_is_unlinked(keep: Callable[..., Kept], tmp_path: Path) -> None:
    name = f"vllm-gateway-test-{os.getpid()}"
    segment = Path("/dev/shm") / name
    kept = keep(sys.executable, str(SERVER), "m", "--uds", str(tmp_path / "s"), "--shared-memory", name)
    kept.begin()
    try:
        until((tmp_path / "s").exists)  # its segment is made, and the tracker knows of it
        assert segment.exists()
        kept.control.sendall(b"kill\n")
        assert kept.process.wait(30) == 0
        assert not segment.exists()
    finally:
        segment.unlink(missing_ok=True)


def test_the_command_line_is_read() -> None:
    assert ShimOptions.parse(["--name", "m#0", "--control", "7", "--", "vllm", "--", "x"]) == ShimOptions(
        "m#0", 7, "", "", "", ("vllm", "--", "x")
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
