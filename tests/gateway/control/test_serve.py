"""The whole gateway: its processes, its messages, what remains after it stops, and its reaction when a process dies."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import orjson
import psutil
import pytest

from gateway.control.serve import StartError, listen
from gateway.telemetry.metrics import FAMILIES, PREFIX
from tests.support.process import PROGRAM, SIMULATOR, Gateway, alive, configuration, gateway, launched, wait_for, write
from tests.support.running import KEY

SLOW: dict[str, Any] = {"stream": True, "simulate": {"tokens": 35, "tokens_per_second": 5}}
"""A stream of seven seconds: long enough for the steps that run during it, also on a busy machine."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("gateway"), configuration(launched())) as one:
        yield one


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_a_port_in_use_is_refused_with_the_setting_to_change() -> None:
    with closing(listen("127.0.0.1", 0, "server.port")) as first:
        port = first.getsockname()[1]
        with pytest.raises(StartError) as refused:
            listen("127.0.0.1", port, "server.admin.port")
    expected = f"cannot listen on 127.0.0.1:{port}: Address already in use; end the other program, or change server.admin.port"
    assert str(refused.value) == expected


def test_requests_are_served_counted_and_logged(running: Gateway) -> None:
    tokens = 'vllm_gateway_tokens_total{key="team-a",model="sim/one",type="prompt"}'
    requests = 'vllm_gateway_requests_total{code="200",endpoint="/v1/chat/completions",error="",model="sim/one"}'
    before = running.metric(tokens), running.metric(requests)
    plain = running.request()
    assert plain.status_code == 200 and plain.json()["model"] == "sim/one"
    streamed = running.request(stream=True)
    assert streamed.text.endswith("data: [DONE]\n\n") and '"usage"' not in streamed.text
    used = running.request(stream=True, stream_options={"include_usage": True})
    usage = orjson.loads(used.text.split("\n\n")[-3].removeprefix("data: "))["usage"]
    prompt = plain.json()["usage"]["prompt_tokens"] + 2 * usage["prompt_tokens"]
    wait_for(lambda: (running.metric(tokens), running.metric(requests)) == (before[0] + prompt, before[1] + 3))
    ids = {each.headers["x-request-id"] for each in (plain, streamed, used)}
    wait_for(lambda: all(identity in running.log for identity in ids))
    lines = [line for line in map(orjson.loads, running.log.splitlines()) if line["request_id"] in ids]
    assert len(lines) == 3
    assert all((line["key"], line["status"], line["server"]) == ("team-a", 200, "sim/one#0") for line in lines)
    assert KEY not in running.log + running.output and "Hello" not in running.log + running.output


def test_the_admin_port(running: Gateway) -> None:
    assert (running.get("/livez").status_code, running.get("/readyz").status_code) == (200, 200)
    wait_for(lambda: running.get("/status").json()["models"][0]["in_flight"] == 0)
    status = running.get("/status").json()
    server = status["models"][0]["servers"][0]
    assert (status["ready"], server["condition"], server["state"], server["in_flight"]) == (True, "up", "ready", 0)
    assert psutil.Process(server["pid"]).is_running()

    def first() -> dict[str, Any]:
        listed = httpx2.get(running.url + "/v1/models", headers={"authorization": f"Bearer {KEY}"}, timeout=30).json()["data"]
        return dict(listed[0])

    wait_for(lambda: "max_model_len" in first())  # a separate probe reads it, after the probe that finds the server up
    assert first()["id"] == "sim/one" and first()["max_model_len"] > 0 and "root" not in first()
    assert httpx2.get(running.url + "/health", timeout=30).status_code == 200
    assert httpx2.get(running.url + "/metrics", timeout=30).status_code == 404


def test_the_metrics_are_well_formed(running: Gateway) -> None:
    running.request()
    running.request(model="nobody/knows")
    text = running.get("/metrics").text
    for name, family in FAMILIES.items():
        assert f"# TYPE {PREFIX}{name} {family.kind}" in text
    assert "nobody" not in text
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    checked = subprocess.run([promtool, "check", "metrics"], input=text, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_an_admin_port_open_to_other_machines_without_a_token_is_reported_at_start(tmp_path: Path, running: Gateway) -> None:
    warning = "other machines can read /status, /keys and /usage on the admin port without a token"
    with gateway(tmp_path, configuration(launched(), admin={"host": "0.0.0.0", "port": 0})) as one:
        assert warning in one.output
    assert warning not in running.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_every_process_ends_with_the_gateway(tmp_path: Path, number: int) -> None:
    with gateway(tmp_path, configuration(launched(), workers=2)) as one:
        tree, ports = one.tree(), (one.data, one.admin)
        assert len(one.workers()) == 2 and len(one.named("upstream.launcher.shim")) == 1
        assert one.stop(number) == 0
        assert alive(tree) == []
        assert all(port_is_free(port) for port in ports)
        assert "Traceback" not in one.output


def test_ctrl_c_stops_the_whole_process_group_cleanly(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched())) as one:
        tree = one.tree()
        os.killpg(one.process.pid, signal.SIGINT)
        assert one.process.wait(30) == 0
        assert alive(tree) == [] and "Traceback" not in one.output


def test_streams_finish_before_the_gateway_ends(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched(), drain="20s")) as one:
        replies: list[httpx2.Response] = []
        thread = threading.Thread(target=lambda: replies.append(one.request(**SLOW)))
        thread.start()
        wait_for(lambda: one.metric('vllm_gateway_inflight_requests{model="sim/one"}') == 1)
        one.process.send_signal(signal.SIGTERM)
        wait_for(lambda: one.get("/readyz").status_code == 503)
        thread.join(30)
        assert one.process.wait(30) == 0
        assert replies[0].text.endswith("data: [DONE]\n\n") and '"error"' not in replies[0].text


def test_a_stream_that_outlasts_the_drain_ends_with_an_error(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched(), drain="300ms")) as one:
        replies: list[httpx2.Response] = []
        endless: dict[str, Any] = {"stream": True, "simulate": {"tokens": 4000, "tokens_per_second": 20}}
        thread = threading.Thread(target=lambda: replies.append(one.request(**endless)))
        thread.start()
        wait_for(lambda: one.metric('vllm_gateway_inflight_requests{model="sim/one"}') == 1)
        assert one.stop() == 0
        thread.join(30)
        assert replies[0].text.endswith("data: [DONE]\n\n")
        assert '"code":"draining"' in replies[0].text
        assert '"incomplete":"drain"' in one.log


def test_a_worker_that_is_killed_is_replaced(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched(), workers=2)) as one:
        for _ in range(8):
            assert one.request().status_code == 200
        counted = 'vllm_gateway_requests_total{code="200",endpoint="/v1/chat/completions",error="",model="sim/one"}'
        wait_for(lambda: one.metric(counted) == 8)
        before, vllm = one.workers(), [each.pid for each in one.named("upstream.simulator")]
        os.kill(before[0], signal.SIGKILL)
        wait_for(lambda: one.workers().get(0) not in (None, before[0]))
        wait_for(lambda: one.get("/status").json()["workers"][0]["up"])
        assert one.workers()[1] == before[1]
        assert [each.pid for each in one.named("upstream.simulator")] == vllm
        assert one.metric(counted) == 8
        assert one.request().status_code == 200
        assert one.get("/status").json()["workers"][0]["restarts"] == 1


def test_the_gateway_is_ready_when_its_workers_have_the_state_of_the_servers(tmp_path: Path) -> None:
    fifo, model = tmp_path / "fifo", launched()
    os.mkfifo(fifo)
    model["launch"]["command"] = ["sh", "-c", f'read go <{fifo} && exec "$@"', "-", *SIMULATOR]
    with gateway(tmp_path, configuration(model, workers=2), ready=False) as one:
        wait_for(lambda: one.admin and all(worker["up"] for worker in one.get("/status").json()["workers"]))
        deaf = one.workers()[1]
        os.kill(deaf, signal.SIGSTOP)
        try:
            fifo.write_text("go\n")
            wait_for(lambda: one.get("/status").json()["models"][0]["state"] == "ready")
            response = one.get("/readyz")
            assert (response.status_code, response.json()["reasons"]) == (
                503,
                ["waiting for the workers to receive the state of their servers"],
            )
        finally:
            os.kill(deaf, signal.SIGCONT)
        wait_for(lambda: one.get("/readyz").status_code == 200)
        assert [one.request().status_code for _ in range(8)] == [200] * 8


def test_nothing_outlives_a_killed_control(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched(), workers=2)) as one:
        tree, ports = one.tree(), (one.data, one.admin)
        os.kill(one.process.pid, signal.SIGKILL)
        one.process.wait(30)
        wait_for(lambda: alive(tree) == [], why=lambda: str(alive(tree)))
        assert all(port_is_free(port) for port in ports)


def test_a_server_that_cannot_start_is_reported_and_others_serve(tmp_path: Path) -> None:
    config = configuration(launched(), launched("sim/bad", **{"reasoning-parser": "no_such_parser"}))
    with gateway(tmp_path, config) as one:
        assert one.request().status_code == 200

        def refused() -> httpx2.Response:
            response = one.request(model="sim/bad")
            assert response.status_code == 503 and response.headers["retry-after"].isdigit()
            return response

        def bad() -> dict[str, Any]:
            return dict(next(each for each in one.get("/status").json()["models"] if each["id"] == "sim/bad")["servers"][0])

        # The launch is repeated, and the model counts as loading meanwhile
        wait_for(lambda: refused().json()["error"]["code"] == "no_healthy_server")
        assert "sim/bad#0" in one.output and "no_such_parser" in one.output
        wait_for(lambda: bad()["condition"] == "down")
        assert "no_such_parser" in bad()["reason"]
        assert one.metric('vllm_gateway_launches_total{model="sim/bad",outcome="failed"}') >= 1
        assert one.metric('vllm_gateway_server_up{model="sim/bad",server="sim/bad#0"}') == 0
        assert one.metric('vllm_gateway_server_up{model="sim/one",server="sim/one#0"}') == 1


def test_a_program_that_is_missing_is_reported_with_its_line_and_others_serve(tmp_path: Path) -> None:
    config = configuration(launched(), {"id": "m", "launch": {"command": ["no-such-vllm", "serve"], "start": "on_demand"}})
    with gateway(tmp_path, config) as one:
        expected = r"ERROR control: \S+gateway\.yaml:\d+: models\[1\]\.launch\.command: no-such-vllm is not found in PATH"
        assert re.search(expected, one.output), one.output
        assert one.request().status_code == 200


def test_requests_for_a_loading_model_are_refused_with_a_reason(tmp_path: Path) -> None:
    config = configuration(launched(), launched("sim/slow", **{"sim-healthy-after": 60}))
    with gateway(tmp_path, config, ready=False) as one:
        wait_for(lambda: one.get("/metrics").status_code == 200 and one.request().status_code == 200, why=lambda: one.output)
        assert one.get("/readyz").status_code == 503
        refused = one.request(model="sim/slow")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
        wait_for(lambda: re.search(r"waiting for sim/slow#0 \(\d+ s\)", one.output))


def test_a_server_that_dies_is_started_again(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched())) as one:
        psutil.Process(one.get("/status").json()["models"][0]["servers"][0]["pid"]).kill()
        wait_for(lambda: one.get("/status").json()["models"][0]["servers"][0]["restarts"] == 1)
        wait_for(lambda: one.request().status_code == 200)
        [server] = one.get("/status").json()["models"][0]["servers"]
        failure = server["last_failure"]
        assert server["reason"] == "" and "SIGKILL" in failure["line"] and server["since"] >= failure["when"] > 0
        shown = one.command("status").stdout
        assert f"ago ({failure['cause']}, 1 restart): {failure['line']}" in " ".join(shown.split()), shown


def test_a_server_is_taken_out_of_rotation_and_returned_by_commands(running: Gateway) -> None:
    done = running.command("cordon", "sim/one#0")
    assert (done.returncode, done.stdout) == (0, "sim/one: ready (sim/one#0: stopped)\n"), done.stderr
    assert "return it with `vllm-gateway uncordon sim/one#0`" in running.get("/status").json()["models"][0]["servers"][0]["reason"]
    assert running.request().status_code == 503
    done = running.command("uncordon", "sim/one#0")
    assert (done.returncode, done.stdout) == (0, "sim/one: ready (sim/one#0: ready)\n"), done.stderr
    assert running.request().status_code == 200
    unknown = running.command("cordon", "sim/one#1")
    assert unknown.returncode == 1 and "there is no server sim/one#1" in unknown.stderr
    model = running.command("cordon", "sim/one")
    assert model.returncode == 1 and "there is no server sim/one; the servers of this model are sim/one#0" in model.stderr


def task_of(one: Gateway) -> object:
    reply = httpx2.get(one.url + "/v1/models", headers={"authorization": f"Bearer {KEY}"}, timeout=60)
    return reply.json()["data"][0].get("task")


def test_a_server_that_runs_elsewhere_is_reported_once(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched())) as engine:
        (tmp_path / "front").mkdir()
        model = {"id": "sim/one", "servers": [{"url": engine.url, "api_key": {"env": "ENGINE_KEY"}}]}
        with gateway(tmp_path / "front", configuration(model), variables={"ENGINE_KEY": KEY}) as one:
            wait_for(lambda: "ready: 1 of 1 servers up" in one.output)
            wait_for(lambda: task_of(one) == "chat")  # a second result of the same probe
            assert one.output.count(" is up\n") == 1, one.output


def test_a_port_in_use_is_reported_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with gateway(tmp_path, configuration(launched(), port=port), ready=False) as one:
            assert one.process.wait(30) == 1
            assert len(one.output.strip().splitlines()) == 1 and f"127.0.0.1:{port}" in one.output


def test_a_spool_that_cannot_be_opened_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "vllm-gateway").mkdir()
    (tmp_path / "vllm-gateway" / "ledger").touch()
    with gateway(tmp_path, configuration(launched()) | {"ledger": "sqlite:///usage.db"}, ready=False) as one:
        assert one.process.wait(60) == 1
        [line] = one.output.strip().splitlines()
        assert "the ledger's spool cannot be opened: " in line


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_the_unspecified_ipv6_address_listens_on_ipv4_too(tmp_path: Path) -> None:
    """One setting serves a dual-stack network, as in vLLM."""
    config = configuration(launched(), host="::", admin={"host": "::", "port": 0})
    with gateway(tmp_path, config) as one:
        for host in ("127.0.0.1", "[::1]"):
            url = f"http://{host}:{one.data}/v1/models"
            assert httpx2.get(url, headers={"authorization": f"Bearer {KEY}"}, timeout=60).status_code == 200
            assert httpx2.get(f"http://{host}:{one.admin}/readyz", timeout=60).status_code == 200
        assert one.request().status_code == 200
        wait_for(lambda: '"client":"127.0.0.1"' in one.log, why=lambda: one.log)


def test_a_closed_terminal_stops_the_gateway_cleanly(tmp_path: Path) -> None:
    screen, keyboard = pty.openpty()
    with gateway(tmp_path, configuration(launched(), drain="20s"), stdin=keyboard) as one:
        os.close(keyboard)
        replies: list[httpx2.Response] = []
        thread = threading.Thread(target=lambda: replies.append(one.request(**SLOW)))
        thread.start()
        wait_for(lambda: one.metric('vllm_gateway_inflight_requests{model="sim/one"}') == 1)
        os.close(screen)
        os.killpg(one.process.pid, signal.SIGHUP)
        wait_for(lambda: one.get("/readyz").status_code == 503)
        with pytest.raises(httpx2.ConnectError):
            one.request()
        thread.join(30)
        assert one.process.wait(30) == 0
        assert replies[0].text.endswith("data: [DONE]\n\n") and '"error"' not in replies[0].text


def test_the_gateway_serves_with_a_closed_standard_output(tmp_path: Path) -> None:
    write(tmp_path / "gateway.yaml", configuration(launched()))
    line = ("sh", "-c", 'exec "$0" serve "$1" >&-', PROGRAM, tmp_path / "gateway.yaml")
    with gateway(tmp_path, None, line=line) as one:
        assert one.request().status_code == 200
