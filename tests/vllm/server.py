"""A real vLLM for the tests: its path, its options for the CPU, and a server that runs during a `with` block.

The rule: after `running` has exited, no process of the server is left. vLLM is a family of processes (API server, EngineCore, Worker) and
does not always stop on SIGTERM (see `_end`), so the API server leads a separate process group, and the group is killed.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.process import command_line
from tests.vllm.dialogues import Architecture

HERE = Path(__file__).resolve().parent
COMMAND = HERE.parents[1] / ".venv-vllm" / "bin" / "vllm"
NOT_INSTALLED = "the real vLLM is not installed (make vllm)"

START_WITHIN = 300.0  # seconds until /health: 30 to 40 on two idle cores
STOP_WITHIN = 15.0  # seconds from SIGTERM to SIGKILL
POLL = 0.1

Flag = str | int | bool

ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" pins the workers of all servers to the same core, which the test may use too
}
FLAGS: Mapping[str, Flag] = {"enforce-eager": True, "max-model-len": 2048, "dtype": "float32"}
"""In float32 a model generates the same text on every processor. In bfloat16, a processor with AMX selects other tokens, and a pooling
server dies of SIGILL if its first request is short: it uses AMX before AMX is enabled."""
PARSERS: Mapping[Architecture, Mapping[str, Flag]] = {
    "qwen3": {"reasoning-parser": "qwen3", "enable-auto-tool-choice": True, "tool-call-parser": "qwen3_coder"},
    "llama": {"enable-auto-tool-choice": True, "tool-call-parser": "llama3_json"},
}
REPEATING: Mapping[str, Flag] = {
    "logits-processors": "tests.vllm.repeating:Repeating",
    "tool-parser-plugin": str(HERE / "repeating.py"),
    "tool-call-parser": "by_request",
}
"""More flags of a server whose responses are texts of the prompts (repeating.py)."""
POOLING: Mapping[str, Flag] = {
    "runner": "pooling",
    "convert": "embed",
}  # instead of parsers: embeddings, score and rerank, with meaningless values


class NotStarted(Exception):
    """vLLM exited or did not become healthy in time. The message has the end of its log."""


def installed() -> Path | None:
    """Return the `vllm` command that `make vllm` installed, or None."""
    return COMMAND if COMMAND.exists() else None


def model_path(architecture: Architecture) -> Path:
    """Return the folder with a tiny model's weights."""
    return HERE / "models" / architecture


def launch(architecture: Architecture, flags: Mapping[str, Flag] | None = None) -> dict[str, Any]:
    """Return the `launch` settings that start this server from a gateway's configuration, as plain data for YAML.

    `flags` replace the architecture's parsers.
    """
    return {
        "command": [str(COMMAND), "serve"],
        "model": str(model_path(architecture)),
        "args": {**FLAGS, **(PARSERS[architecture] if flags is None else flags)},
        "env": dict(ENVIRONMENT),
        "startup_timeout": f"{START_WITHIN:.0f}s",
    }


@dataclass(frozen=True, slots=True)
class Server:
    """A healthy vLLM. It listens on `port` of 127.0.0.1, or on the unix socket `uds` (then `port` is 0)."""

    pid: int  # of the API server, which is also its process group
    port: int
    uds: Path | None
    log: Path

    @property
    def url(self) -> str:
        return "http://localhost" if self.uds else f"http://127.0.0.1:{self.port}"


@contextmanager
def running(
    architecture: Architecture, *, name: str = "tiny", flags: Mapping[str, Flag] | None = None, uds: Path | None = None
) -> Iterator[Server]:
    """Run a vLLM that serves the architecture's model as `name`. Yield when it is healthy; stop it at the end of the `with` block.

    `flags` replace the architecture's parsers. It listens on a free port of 127.0.0.1, or on `uds`.

    Raises:
        NotStarted: it never became healthy.
    """
    settings = launch(architecture, flags)
    port = 0 if uds else _free_port()
    path: dict[str, Flag] = {"uds": str(uds)} if uds else {"host": "127.0.0.1", "port": port}
    arguments = [*settings["command"], settings["model"], *_arguments({**settings["args"], **path, "served-model-name": name})]
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder, (Path(folder) / "log").open("wb") as log:
        environment = {**os.environ, **settings["env"], "PYTHONPATH": str(HERE.parents[1])}  # for REPEATING
        process = subprocess.Popen(arguments, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            server = Server(process.pid, port, uds, Path(log.name))
            _await_health(server)
            yield server
        finally:
            _end(process)


def process_of(api_server: psutil.Process, title: str) -> psutil.Process:
    """Return another process of a vLLM: `EngineCore` or `Worker`."""
    [found] = [each for each in api_server.children(recursive=True) if f"VLLM::{title}" in " ".join(command_line(each))]
    return found


def alive(group: int) -> bool:
    """Return whether a process group still has a process (a zombie counts)."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _arguments(flags: Mapping[str, Flag]) -> list[str]:
    return [argument for flag, value in flags.items() for argument in ([f"--{flag}"] if value is True else [f"--{flag}", str(value)])]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _await_health(server: Server) -> None:
    _wait_until(lambda: _healthy(server) or _exited(server.pid), START_WITHIN)
    if _exited(server.pid) or not _healthy(server):
        raise NotStarted(f"vLLM did not start; its log ends with\n{server.log.read_text(errors='replace')[-4000:]}")


def _healthy(server: Server) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    try:
        connection.sock = _connect(server)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _connect(server: Server) -> socket.socket:
    if server.uds is None:
        return socket.create_connection(("127.0.0.1", server.port), timeout=5)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(5)
    try:
        connection.connect(str(server.uds))
    except OSError:
        connection.close()
        raise
    return connection


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the leader, which stops its children. Since it may hang, or die without them, always send SIGKILL to the group.

    The leader is waited for last: until then its id cannot have become another group's.
    """
    os.kill(process.pid, signal.SIGTERM)  # not terminate(): that waits for a leader that has already ended
    _wait_until(lambda: _exited(process.pid), STOP_WITHIN)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _wait_until(lambda: not alive(process.pid), STOP_WITHIN)


def _exited(pid: int) -> bool:
    """Return whether this child has exited. It remains a zombie until it is waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(POLL)
