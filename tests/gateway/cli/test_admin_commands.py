"""The commands that act on a running gateway, as an operator types them."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.cli.test_main import all_of
from tests.support.process import Gateway, configuration, gateway, launched, wait_for

ID = "sim/with spaces?no#but-slashes%2F".replace(" ", "_")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    model = launched() | {"aliases": ["one"], "loras": [{"id": "sim/adapter", "path": "/x", "aliases": ["adapter"]}]}
    config = configuration(model, launched(ID), {"id": "far", "servers": [{"url": "http://127.0.0.1:9"}]})
    with gateway(tmp_path_factory.mktemp("gateway"), config) as one:
        yield one


def state(one: Gateway, model: str) -> dict[str, Any]:
    known = json.loads(one.command("status", "--json").stdout)
    return next(each for each in known["models"] if each["id"] == model)


def until_ready(one: Gateway, model: str) -> dict[str, Any]:
    return dict(wait_for(lambda: (now := state(one, model))["state"] == "ready" and now, why=lambda: one.output))


def test_a_model_is_stopped_and_started(running: Gateway) -> None:
    before = until_ready(running, "sim/one")["servers"][0]["pid"]
    stopped = running.command("stop", "sim/one")
    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (0, "sim/one: stopped\n", "")
    assert not Path(f"/proc/{before}").exists()
    refused = running.request()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_healthy_server")
    assert running.get("/readyz").status_code == 200, "what the operator stopped keeps nobody from the other models"
    assert running.metric('vllm_gateway_server_up{model="sim/one",server="sim/one#0"}') == 0
    for operation in ("start", "wake"):
        assert running.command(operation, "sim/one").returncode == 0
    until_ready(running, "sim/one")
    wait_for(lambda: running.request().status_code == 200)


def test_a_model_is_restarted(running: Gateway) -> None:
    before = until_ready(running, ID)["servers"][0]["pid"]
    restarted = running.command("restart", ID)
    assert (restarted.returncode, restarted.stderr) == (0, "")
    assert restarted.stdout in (f"{ID}: draining\n", f"{ID}: starting\n")
    assert until_ready(running, ID)["servers"][0]["pid"] != before
    wait_for(lambda: running.request(model=ID).status_code == 200)


def test_an_alias_names_its_model(running: Gateway) -> None:
    until_ready(running, "sim/one")
    done = running.command("wake", "one")
    assert (done.returncode, done.stdout, done.stderr) == (0, "sim/one: ready\n", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("stop", "sim/on"), "there is no model sim/on; did you mean `sim/one`?"),
        (("restart", "sim/adapter"), "sim/adapter is a LoRA adapter on the servers of sim/one; use that ID"),
        (("restart", "adapter"), "adapter is a LoRA adapter on the servers of sim/one; use that ID"),
        (("start", "far"), "far is not launched by the gateway"),
    ],
)
def test_a_refused_operation_prints_one_line_and_exits_with_1(running: Gateway, arguments: tuple[str, ...], expected: str) -> None:
    done = running.command(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"vllm-gateway: {expected}\n")


def test_the_status_as_plain_text(running: Gateway) -> None:
    until_ready(running, "sim/one")
    wait_for(lambda: state(running, "far")["state"] == "failed")
    done = running.command("status")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.strip()}
    assert done.stdout.startswith("degraded: 1 of 3 models without a ready server  2 of 3 models ready, ")
    assert (lines["sim/one"][1], lines["far"][1], lines["http://127.0.0.1:9"][1]) == ("ready", "failed", "failed")
    assert "http://127.0.0.1:9: " in done.stdout, "and why"


def test_the_status_at_a_terminal_is_colored(running: Gateway) -> None:
    until_ready(running, "sim/one")
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", closefd=True) as terminal:
        environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "XDG_RUNTIME_DIR": str(running.runtime)}
        environ.pop("NO_COLOR", None)
        command = [str(Path(sys.executable).with_name("vllm-gateway")), "status", "--config", str(running.folder / "gateway.yaml")]
        done = subprocess.run(command, stdout=theirs, stderr=theirs, env=environ, timeout=60)
        os.close(theirs)
        shown = all_of(terminal.fileno())
    assert done.returncode == 0
    assert "\x1b[32mready" in shown and "\x1b[31mfailed" in shown and "\x1b[1;33mdegraded" in shown


def test_tokens_per_second_follow_the_requests(running: Gateway) -> None:
    def rate() -> dict[str, float]:
        """Read the rates from the admin port, which is faster than a command."""
        rates: dict[str, float] = next(each for each in running.get("/status").json()["models"] if each["id"] == ID)["tokens_per_second"]
        return rates

    until_ready(running, ID)
    wait_for(lambda: running.request(model=ID).status_code == 200)
    wait_for(lambda: all(each > 0 for each in rate().values()))
    assert state(running, ID)["tokens_per_second"].keys() == {"prompt", "completion"}
    wait_for(lambda: rate() == {"prompt": 0, "completion": 0})


def test_without_a_running_gateway_a_command_says_so(tmp_path: Path) -> None:
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    program = str(Path(sys.executable).with_name("vllm-gateway"))

    def run_command(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run([program, *arguments], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    missing = (
        "vllm-gateway: no gateway of this user runs with gateway.yaml, and there is no such file; name it as the last argument, "
        "or name the gateway with --admin URL\n"
    )
    assert run_command("status") == (1, "", missing)
    (tmp_path / "other.yaml").touch()
    assert run_command("stop", "x", "--config", "other.yaml") == (1, "", "vllm-gateway: no gateway of this user runs with other.yaml\n")


def test_a_second_gateway_of_the_same_file_does_not_start(running: Gateway) -> None:
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(running.runtime), "XDG_STATE_HOME": str(running.folder)}
    command = [str(Path(sys.executable).with_name("vllm-gateway")), "serve", str(running.folder / "gateway.yaml")]
    second = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (second.returncode, second.stdout) == (1, "")
    assert second.stderr.startswith("vllm-gateway: another gateway runs with this configuration (it responds on ")
    assert second.stderr.count("\n") == 1
    assert running.command("status").returncode == 0


def test_the_socket_of_a_killed_gateway_is_replaced(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched())) as first:
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(30)
        [left] = (first.runtime / "vllm-gateway").iterdir()
        assert first.command("status").returncode == 1
        with gateway(tmp_path, configuration(launched()), runtime=first.runtime) as second:
            assert second.command("status").returncode == 0
        assert not left.exists()
