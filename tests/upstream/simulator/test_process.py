"""The simulator as a process: its arguments, its socket, how it starts and how it ends; and ``running``, for all who need one."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.process import stop

COMMAND = [sys.executable, "-m", "upstream.simulator"]
WITHIN = 60.0


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulator that listens on ``port`` of 127.0.0.1, or on the unix socket ``uds`` (then ``port`` is 0)."""

    process: subprocess.Popen[str]
    port: int
    uds: Path | None
    client: httpx2.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Any, **more: Any) -> httpx2.Response:
        return self.client.post(path, json=body, **more)

    def chat(self, **fields: Any) -> httpx2.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], **fields})

    def metric(self, name: str, **labels: str) -> float:
        """The value of one line of /metrics."""
        text = self.client.get("/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(name + "{")]
        (found,) = [line for line in lines if all(f'{label}="{value}"' in line for label, value in labels.items())]
        return float(found.rsplit(" ", 1)[1])

    def requests(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.client.get("/sim/requests").json()
        return entries


@contextmanager
def running(*flags: str, uds: Path | None = None, environ: Mapping[str, str] | None = None) -> Iterator[Simulated]:
    """A simulator that serves ``tiny``, until the ``with`` ends."""
    listen = ["--uds", str(uds)] if uds else ["--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(
        [*COMMAND, "tiny", *listen, *flags], stderr=subprocess.PIPE, text=True, env={**os.environ, **(environ or {})}
    )
    transport = httpx2.HTTPTransport(uds=str(uds)) if uds else None
    try:
        port = _announced(process)
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=WITHIN) as client:
            yield Simulated(process, port, uds, client)
    finally:
        stop(process)


def _announced(process: subprocess.Popen[str]) -> int:
    """The port that the process says it listens on, 0 for a unix socket."""
    assert process.stderr is not None
    text = ""
    for line in process.stderr:
        text += line
        found = re.search(r"Starting vLLM server on (?:unix:|http://.*:(\d+))", line)
        if found:
            return int(found[1] or 0)
    raise AssertionError(f"the simulator did not start: {text}")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def ended(*arguments: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=WITHIN, env={**os.environ, **(environ or {})}, check=False
    )


def test_a_misspelt_flag_fails_as_argparse_fails_it() -> None:
    done = ended("tiny", "--max-modellen", "5")
    assert done.returncode == 2
    assert "error: unrecognized arguments: --max-modellen" in done.stderr


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_an_unknown_parser_fails_and_names_the_choices(flag: str) -> None:
    done = ended("tiny", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", flag, "qwen33")
    assert done.returncode == 1
    assert "parser: qwen33 (chose from {" in done.stderr
    assert "qwen3" in done.stderr.split("chose from")[1]


def test_auto_tool_choice_needs_a_parser() -> None:
    done = ended("tiny", "--enable-auto-tool-choice")
    assert done.returncode == 1
    assert "--enable-auto-tool-choice requires --tool-call-parser" in done.stderr


def test_vllm_flags_without_meaning_are_accepted() -> None:
    flags = ["--tensor-parallel-size=2", "-tp", "2", "--gpu_memory_utilization", "0.9", "--no-enable-prefix-caching", "-O3"]
    flags += ["--compilation-config.mode", "3", "--allowed-origins", '["*"]', "--logits-processors", "a", "b", "--enforce-eager"]
    with running(*flags) as simulated:
        assert simulated.client.get("/health").status_code == 200


def test_names_and_context_come_from_the_flags() -> None:
    with running("--served-model-name", "a", "b", "--max-model-len", "32k", "--enable-lora", "--lora-modules", "x=/x") as simulated:
        cards = simulated.client.get("/v1/models").json()["data"]
        assert [(card["id"], card["max_model_len"], card["parent"]) for card in cards] == [
            ("a", 32000, None),
            ("b", 32000, None),
            ("x", None, "a"),
        ]
        assert [simulated.chat(model=name).json()["model"] for name in ("b", "x", "")] == ["a", "x", "a"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["x=/x"], "LoRA is not enabled"),
        (["--enable-lora", '{"name": "x", "path"'], "Invalid JSON format for --lora-modules"),
        (["--enable-lora", '{"name": "x", "path": "/x", "rank": 8}'], "Invalid fields for --lora-modules"),
    ],
)
def test_adapters_that_vllm_rejects(flags: list[str], expected: str) -> None:
    done = ended("tiny", *flags[:-1], "--lora-modules", flags[-1])
    assert done.returncode != 0 and expected in done.stderr


def test_flags_of_a_file_and_then_those_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("served-model-name: [from-file]\nmax-model-len: 77\nenable-prompt-tokens-details: true\n")
    with running("--config", str(file), "--max-model-len", "99") as simulated:
        card = simulated.client.get("/v1/models").json()["data"][0]
        assert (card["id"], card["max_model_len"]) == ("from-file", 99)


@pytest.mark.parametrize("by", ["flag", "environment"])
def test_a_key_guards_what_vllm_guards(by: str) -> None:
    flags, environ = (["--api-key", "k"], {}) if by == "flag" else ([], {"VLLM_API_KEY": "k"})
    with running(*flags, environ=environ) as simulated:
        refused = simulated.client.get("/v1/models")
        assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        assert simulated.client.get("/v1/models", headers={"authorization": "Bearer k"}).status_code == 200
        assert simulated.post("/tokenize", {"prompt": "a"}).status_code == 200
        assert simulated.client.get("/metrics").status_code == 200


def test_a_unix_socket_serves_and_its_file_fails_the_next_start(tmp_path: Path) -> None:
    uds = tmp_path / "s.sock"
    with running(uds=uds) as simulated:
        assert simulated.chat(max_tokens=3).json()["usage"]["completion_tokens"] == 3
        simulated.process.send_signal(signal.SIGTERM)
        assert simulated.process.wait(WITHIN) == 0
    assert uds.exists()
    done = ended("tiny", "--uds", str(uds))
    assert done.returncode == 1
    assert "Address already in use" in done.stderr


def test_a_taken_port_fails_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = ended("tiny", "--host", "127.0.0.1", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "Address already in use" in done.stderr


def test_a_start_that_is_configured_to_fail_fails() -> None:
    done = ended("tiny", "--host", "127.0.0.1", "--port", "0", "--sim-failure")
    assert done.returncode == 1
    assert "Engine core initialization failed" in done.stderr


def test_connections_are_refused_until_it_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [*COMMAND, "tiny", "--host", "127.0.0.1", "--port", str(port), "--sim-listen-after", "1.5"], stderr=subprocess.PIPE
    )
    try:
        until(lambda: _refuses(port) and process.poll() is None)
        until(lambda: not _refuses(port))
    finally:
        process.kill()
        process.communicate()


def _refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_health_waits_for_its_time() -> None:
    began = time.monotonic()
    with running("--sim-healthy-after", "5") as simulated:
        statuses: list[int] = []

        def well() -> bool:
            statuses.append(simulated.client.get("/health").status_code)
            return statuses[-1] == 200

        until(well)
        assert time.monotonic() - began >= 5
        assert set(statuses[:-1]) <= {503}, "all of it refused, but where the machine has slept for so long"


def test_idle_connections_are_closed_after_the_time_of_the_environment() -> None:
    with (
        running(environ={"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "1"}) as simulated,
        socket.create_connection(("127.0.0.1", simulated.port)) as raw,
    ):
        raw.settimeout(WITHIN)
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 200")
        assert raw.recv(4096) == b""


def test_sigterm_aborts_what_is_in_flight() -> None:
    with running("--sim-tokens", "100000", "--max-model-len", "200000") as simulated:
        with simulated.client.stream("POST", "/v1/chat/completions", json=_LONG) as response:
            lines = response.iter_lines()
            next(lines)
            simulated.process.send_signal(signal.SIGTERM)
            frames = [line for line in lines if line]
        assert '"finish_reason":"abort"' in frames[-2]
        assert frames[-1] == "data: [DONE]"
        assert simulated.process.wait(WITHIN) == 0


_LONG = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}


def test_sigterm_waits_for_requests_in_flight_if_configured() -> None:
    with running("--shutdown-timeout", "20", "--sim-tokens", "40", "--sim-tokens-per-second", "60") as simulated:
        with simulated.client.stream("POST", "/v1/chat/completions", json=_LONG) as response:
            lines = response.iter_lines()
            next(lines)
            simulated.process.send_signal(signal.SIGTERM)
            frames = [line for line in lines if line]
        assert '"finish_reason":"stop"' in frames[-2]
        assert simulated.process.wait(WITHIN) == 0


def test_a_draining_server_lives_and_fails_new_requests() -> None:
    with running("--shutdown-timeout", "600") as simulated:
        opened, finish = threading.Event(), threading.Event()
        holder = threading.Thread(target=_hold, args=(simulated, opened, finish))
        holder.start()
        try:
            assert opened.wait(WITHIN)
            simulated.process.send_signal(signal.SIGTERM)
            until(lambda: simulated.chat().status_code == 500)
            assert simulated.chat().json()["error"]["message"] == "cannot schedule new futures after shutdown"
            assert simulated.client.get("/health").status_code == 200
            assert simulated.metric("vllm:num_requests_running") == 1, "the open stream"
        finally:
            finish.set()
            holder.join()
        assert simulated.process.wait(WITHIN) == 0


def _hold(simulated: Simulated, opened: threading.Event, finish: threading.Event) -> None:
    """Hold a stream that has fallen silent open, and then leave."""
    with simulated.client.stream("POST", "/v1/chat/completions", json={**_LONG, "simulate": {"hang_after": 2}}) as response:
        lines = response.iter_lines()  # the connection closes with the iterator
        next(lines)
        opened.set()
        finish.wait()


@pytest.mark.parametrize(("flag", "status"), [("--sim-die-after-tokens", 1), ("--sim-die-after-requests", 1)])
def test_it_exits_when_it_is_configured_to(flag: str, status: int) -> None:
    with running(flag, "2", "--sim-tokens", "1") as simulated:
        assert simulated.chat().status_code == 200
        assert not _responds(simulated)
        assert simulated.process.wait(WITHIN) == status


def _responds(simulated: Simulated) -> bool:
    """Whether it answers a request. It may write its last answer before it dies of it."""
    try:
        return simulated.chat().status_code == 200 and simulated.chat().status_code == 200
    except httpx2.TransportError:
        return False


def test_sleep_mode_holds_requests_until_it_wakes() -> None:
    with running("--enable-sleep-mode", environ={"VLLM_SERVER_DEV_MODE": "1"}) as simulated:
        assert simulated.client.post("/sleep?level=1").json() == {"status": "sleeping", "level": 1}
        assert simulated.client.get("/is_sleeping").json() == {"is_sleeping": True}
        statuses: list[int] = []
        requesting = threading.Thread(target=lambda: statuses.append(simulated.chat().status_code))
        requesting.start()
        until(lambda: simulated.metric("vllm:num_requests_running") == 1)
        assert statuses == []
        simulated.client.post("/wake_up")
        requesting.join()
        assert statuses == [200]


def test_sleep_routes_are_absent_otherwise() -> None:
    with running("--enable-sleep-mode") as simulated:
        assert simulated.client.post("/sleep").json() == {"detail": "Not Found"}
