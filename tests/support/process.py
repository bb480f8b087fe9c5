"""The whole gateway as an operator runs it: a process, its terminal output, and every process behind it."""

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
"""Seconds; a start with a ledger takes seconds of CPU time, of which a busy machine may give little."""
_ADDRESS = re.compile(r"""(?:^|"message": ")(requests|metrics)\s+https?://([^:/]+):(\d+)""", re.MULTILINE)


def launched(identity: str = "sim/one", **args: Any) -> dict[str, Any]:
    """A model that the gateway launches as a simulator."""
    return {"id": identity, "launch": {"command": SIMULATOR, "args": args}}


def configuration(*models: dict[str, Any], **server: Any) -> dict[str, Any]:
    """A configuration on ephemeral ports with one key for all models."""
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
        """Run a command that acts on this gateway."""
        line = [str(self.program), *arguments, "--config", str(self.folder / "gateway.yaml")]
        environ = {**os.environ, "XDG_RUNTIME_DIR": str(self.runtime)}
        return subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60)

    def tree(self) -> list[psutil.Process]:
        """Every process behind it, without itself."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def workers(self) -> dict[int, int]:
        """Process ids by worker number."""
        found = {}
        for each in psutil.Process(self.process.pid).children():
            arguments = command_line(each)
            if "worker" in arguments:
                found[int(arguments[arguments.index("worker") + 1])] = each.pid
        return found

    def named(self, text: str) -> list[psutil.Process]:
        """The processes whose command line has this word in it."""
        return [each for each in self.tree() if any(text in argument for argument in command_line(each))]

    def get(self, path: str) -> httpx2.Response:
        """From the admin port."""
        return httpx2.get(f"http://127.0.0.1:{self.admin}{path}", timeout=30, verify=False)

    def request(self, path: str = "/v1/chat/completions", *, timeout: float = 60, **body: Any) -> httpx2.Response:
        """A request with the key; ``timeout`` is in seconds."""
        document = {"model": "sim/one", "messages": [{"role": "user", "content": "Hello"}], **body}
        return httpx2.post(self.url + path, json=document, headers={"authorization": f"Bearer {KEY}"}, timeout=timeout, verify=False)

    def metric(self, text: str) -> float:
        """The value of one sample, 0 when it is not there."""
        line = next((line for line in self.get("/metrics").text.splitlines() if line.startswith(text + " ")), None)
        return float(line.rsplit(" ", 1)[1]) if line else 0.0

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait for its end."""
        self.process.send_signal(number)
        return self.process.wait(60)


def command_line(process: psutil.Process) -> list[str]:
    """A process's command line; empty when it has just ended."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def wait_for(condition: Callable[[], Any], seconds: float = 30.0, why: Callable[[], str] = str) -> Any:
    """Poll for a condition. Raises AssertionError, with ``why``, when it does not come true."""
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
    """Run ``vllm-gateway serve``; in the end nothing of it is left.

    ``config`` is written to gateway.yaml; None: what is there already is served. ``runtime`` stands in for a runtime folder of its own;
    ``variables`` are more of the environment, ``line`` is another command line, with a program of its own.
    """
    if config is not None:
        write(folder / "gateway.yaml", config)
    with tempfile.TemporaryDirectory(prefix="gw-") as own:  # a short path: unix sockets allow 107 bytes
        command = line or (PROGRAM, "serve", folder / "gateway.yaml")
        yield from _running(command, folder, runtime or Path(own), ready, seconds, stdin, variables or {})


def write(file: Path, config: Any) -> None:
    """Put a file in place as editors do: whole, under another name first."""
    fresh = file.with_name(f".{file.name}.new")
    fresh.write_text(yaml.safe_dump(config))
    fresh.replace(file)


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those of them that have not ended."""
    return [each for each in processes if _status(each) not in (None, psutil.STATUS_ZOMBIE)]


def _status(process: psutil.Process) -> str | None:
    """None of one that is gone, or is just going."""
    try:
        return process.status() if process.is_running() else None
    except psutil.NoSuchProcess:
        return None


def _appending(path: str, flags: int) -> int:
    """Open so that what a test writes itself is kept: each write goes to the file's end."""
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
