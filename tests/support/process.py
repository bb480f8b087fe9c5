"""Run the whole gateway as an operator does: the process, its terminal output, and all its child processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
import yaml

from gateway.auth import keys
from tests.support.running import KEY

PROGRAM = Path(sys.executable).with_name("vllm-gateway")
SIMULATOR = [sys.executable, "-P", "-m", "upstream.simulator"]
_STARTS_WITHIN = 90.0
"""Seconds. A start with a ledger needs several seconds of CPU time, which can take long on a busy machine."""
_ADDRESS = re.compile(r"""(?:^|"message": ")(requests|metrics)\s+https?://([^:/]+):(\d+)""", re.MULTILINE)


def launched(identity: str = "sim/one", **args: Any) -> dict[str, Any]:
    """Return a model that the gateway launches as a simulator."""
    return {"id": identity, "launch": {"command": SIMULATOR, "args": args}}


def configuration(*models: dict[str, Any], **server: Any) -> dict[str, Any]:
    """Return a configuration on ephemeral ports with one key for all models."""
    ports = {"host": "127.0.0.1", "port": 0, "admin": {"port": 0}, "drain": "5s"}
    return {"server": {**ports, **server}, "models": list(models), "keys": [{"id": "team-a", "hash": keys.hash_of(KEY)}]}


@dataclass
class Gateway:
    """A running gateway."""

    process: subprocess.Popen[bytes]
    folder: Path
    runtime: Path
    program: Path
    data: int = 0
    admin: int = 0

    @property
    def output(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def log(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.data}"

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a ``vllm-gateway`` command against this gateway."""
        line = [str(self.program), *arguments, "--config", str(self.folder / "gateway.yaml")]
        environ = {**os.environ, "XDG_RUNTIME_DIR": str(self.runtime)}
        return subprocess.run(line, env=environ, capture_output=True, text=True, timeout=600)

    def tree(self) -> list[psutil.Process]:
        """Return all child processes, without the main process."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def workers(self) -> dict[int, int]:
        """Return process IDs by worker number."""
        found = {}
        for each in psutil.Process(self.process.pid).children():
            arguments = command_line(each)
            if "worker" in arguments:
                found[int(arguments[arguments.index("worker") + 1])] = each.pid
        return found

    def named(self, text: str) -> list[psutil.Process]:
        """Return the child processes whose command line contains this text."""
        return [each for each in self.tree() if any(text in argument for argument in command_line(each))]

    def get(self, path: str) -> httpx2.Response:
        """Send a GET request to the admin port."""
        return httpx2.get(f"http://127.0.0.1:{self.admin}{path}", timeout=30, verify=False)

    def request(self, path: str = "/v1/chat/completions", *, timeout: float = 60, **body: Any) -> httpx2.Response:
        """Send a request with the key; ``timeout`` is in seconds."""
        document = {"model": "sim/one", "messages": [{"role": "user", "content": "Hello"}], **body}
        return httpx2.post(self.url + path, json=document, headers={"authorization": f"Bearer {KEY}"}, timeout=timeout, verify=False)

    def metric(self, text: str) -> float:
        """Return the value of one sample, or 0 if it does not exist."""
        line = next((line for line in self.get("/metrics").text.splitlines() if line.startswith(text + " ")), None)
        return float(line.rsplit(" ", 1)[1]) if line else 0.0

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait until the process exits. Return its exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)


def command_line(process: psutil.Process) -> list[str]:
    """Return a process's command line, or an empty list if it has exited."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def stop(process: subprocess.Popen[Any]) -> None:
    """Send SIGTERM, wait until a process exits, and close its pipes. Raises subprocess.TimeoutExpired after it has killed the process."""
    with process:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()  # without effect on a process that has exited


def wait_for(condition: Callable[[], Any], seconds: float = 30.0, why: Callable[[], str] = str) -> Any:
    """Poll until a condition is true and return its value. Raises AssertionError with ``why`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"it did not happen within {seconds} s {why()}"
        time.sleep(0.02)
    return value


@contextmanager
def gateway(
    folder: Path,
    config: dict[str, Any] | None,
    *,
    ready: bool = True,
    seconds: float = 60.0,
    runtime: Path | None = None,
    stdin: int = subprocess.DEVNULL,
    variables: Mapping[str, str] | None = None,
    line: Sequence[str | Path] = (),
) -> Iterator[Gateway]:
    """Run ``vllm-gateway serve``; no process is left at the end.

    ``config`` is written to gateway.yaml; None: use the existing file. ``runtime`` replaces the temporary runtime folder;
    ``variables`` are added to the environment; ``line`` replaces the whole command line.
    """
    if config is not None:
        write(folder / "gateway.yaml", config)
    with tempfile.TemporaryDirectory(prefix="gw-") as own:  # a short path: unix sockets allow 107 bytes
        command = line or (PROGRAM, "serve", folder / "gateway.yaml")
        yield from _running(command, folder, runtime or Path(own), ready, seconds, stdin, variables or {})


def write(file: Path, config: Any) -> None:
    """Write a file as editors do: to another name first, then rename it."""
    fresh = file.with_name(f".{file.name}.new")
    fresh.write_text(yaml.safe_dump(config))
    fresh.replace(file)


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that have not exited."""
    return [each for each in processes if _status(each) not in (None, psutil.STATUS_ZOMBIE)]


def _status(process: psutil.Process) -> str | None:
    """Return a process's status, or None if it has exited."""
    try:
        return process.status() if process.is_running() else None
    except psutil.NoSuchProcess:
        return None


def _appending(path: str, flags: int) -> int:
    """Open a file in append mode, so that text that a test writes itself is not overwritten."""
    return os.open(path, flags | os.O_APPEND, 0o666)


def _running(
    line: Sequence[str | Path], folder: Path, runtime: Path, ready: bool, seconds: float, stdin: int, variables: Mapping[str, str]
) -> Iterator[Gateway]:
    environ = {**os.environ, "XDG_STATE_HOME": str(folder), "XDG_RUNTIME_DIR": str(runtime), "PYTHONUNBUFFERED": "1", **variables}
    with open(folder / "stdout", "wb", opener=_appending) as out, open(folder / "stderr", "wb", opener=_appending) as err:
        process = subprocess.Popen(line, stdin=stdin, stdout=out, stderr=err, env=environ, start_new_session=True)
    running = Gateway(process, folder, runtime, Path(line[0]))
    tree: list[psutil.Process] = []
    try:
        wait_for(
            lambda: len(_ADDRESS.findall(running.output)) == 2 or process.poll() is not None, _STARTS_WITHIN, why=lambda: running.output
        )
        ports = [int(port) for _, _, port in _ADDRESS.findall(running.output)]
        running.data, running.admin = ports or (0, 0)
        if ready:
            wait_for(lambda: process.poll() is not None or running.get("/readyz").status_code == 200, seconds, why=lambda: running.output)
            assert process.poll() is None, running.output
        yield running
    finally:
        if process.poll() is None:
            tree = running.tree()
            running.stop()
        left = alive(tree)
        for each in left:
            each.kill()
        assert not left, f"left behind: {left}"
