"""Errors that clients see when a launched server dies, is unhealthy, hangs or cannot bind its port; and the recovery from each."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.running import KEY

ENDLESS: dict[str, Any] = {"stream": True, "simulate": {"tokens": 100_000, "tokens_per_second": 20}}
NEXT = ("no_healthy_server", "model_loading", "upstream_unreachable", "upstream_disconnected")  # error codes of the next request
HUNG_WITHIN = 110.0  # seconds until an unresponsive server is up again: a timeout of a minute, the grace period, its start


class Stream:
    """An endless stream, read by one client."""

    def __init__(self, one: Gateway, model: str, pool: ThreadPoolExecutor) -> None:
        self.output = ""
        self._url = one.url
        self._body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], **ENDLESS}
        self._reading = pool.submit(self._read)

    def _read(self) -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx2.stream("POST", f"{self._url}/v1/chat/completions", json=self._body, headers=headers, timeout=HUNG_WITHIN) as response:
            for piece in response.iter_text():
                self.output += piece

    def whole(self) -> str:
        """Return all the text after the stream has finished."""
        self._reading.result(HUNG_WITHIN)
        return self.output


@dataclass
class Stage:
    """The gateway, the file that makes a server unhealthy, the socket that holds a port, and the open stream of the hung server."""

    gateway: Gateway
    illness: Path
    holder: socket.socket
    pool: ThreadPoolExecutor
    hung: Stream | None = None

    def server(self, model: str) -> dict[str, Any]:
        """Return the first server of a model, as /status shows it."""
        models = self.gateway.get("/status").json()["models"]
        shown: dict[str, Any] = next(each for each in models if each["id"] == model)["servers"][0]
        return shown

    def begin(self, model: str) -> Stream:
        """Start a stream and return it after its first text."""
        stream = Stream(self.gateway, model, self.pool)
        wait_for(lambda: "content" in stream.output and self.in_flight(model) == 1)
        return stream

    def in_flight(self, model: str) -> float:
        return self.gateway.metric(f'vllm_gateway_inflight_requests{{model="{model}"}}')

    def check_it_is_over(self, model: str, restarts: int, seconds: float = 30.0) -> None:
        """Check that the server is restarted, that nothing is in flight, and that the next request succeeds."""
        wait_for(lambda: (self.server(model)["restarts"], self.server(model)["condition"]) == (restarts, "up"), seconds)
        wait_for(lambda: self.in_flight(model) == self.server(model)["in_flight"] == 0)
        wait_for(lambda: responds(self.gateway, model))  # after the workers received the snapshot, too

    def error_of(self, model: str, timeout: float = 60) -> str | None:
        """Return the error code of a request; None if it succeeds or times out."""
        try:
            response = self.gateway.request(model=model, timeout=timeout)
        except httpx2.TimeoutException:
            return None
        return None if response.status_code == 200 else str(response.json()["error"]["code"])


def responds(one: Gateway, model: str) -> bool:
    return one.request(model=model).status_code == 200


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("faults")
    illness = folder / "dead-engine"
    with socket.create_server(("127.0.0.1", 0)) as holder, ThreadPoolExecutor() as pool:
        port = holder.getsockname()[1]
        models = [launched("sim/hung"), launched("sim/dead"), launched("sim/ill", **{"sim-sick-while": str(illness)}),
                  launched("sim/port", port=port), launched("sim/slow", **{"sim-healthy-after": 600})]  # fmt: skip
        with gateway(folder, configuration(*models), ready=False) as one:
            for model in ("sim/hung", "sim/dead", "sim/ill"):
                wait_for(partial(responds, one, model), why=lambda: one.output)
            stage = Stage(one, illness, holder, pool)
            stage.hung = stage.begin("sim/hung")
            os.kill(stage.server("sim/hung")["pid"], signal.SIGSTOP)  # first, because its detection takes a minute
            yield stage


def test_a_server_that_is_killed(stage: Stage) -> None:
    streaming = stage.begin("sim/dead")
    psutil.Process(stage.server("sim/dead")["pid"]).kill()
    assert '"code":"upstream_disconnected"' in streaming.whole()
    assert stage.error_of("sim/dead") in NEXT or stage.server("sim/dead")["restarts"] == 1, "unless it is up again so soon"
    stage.check_it_is_over("sim/dead", restarts=1)


def test_a_dead_engine_behind_a_living_server(stage: Stage) -> None:
    streaming = stage.begin("sim/ill")
    before = stage.server("sim/ill")["pid"]
    stage.illness.touch()
    wait_for(lambda: stage.server("sim/ill")["state"] != "ready")
    assert "it is restarted: GET /health: status 503" in stage.server("sim/ill")["reason"]
    assert stage.server("sim/ill")["cause"] == "engine_died"
    stage.illness.unlink()
    assert '"finish_reason":"abort"' in streaming.whole(), "as vLLM says it when it is ended"
    stage.check_it_is_over("sim/ill", restarts=1)
    assert not psutil.pid_exists(before)


def test_a_port_that_is_taken(stage: Stage) -> None:
    port = stage.holder.getsockname()[1]
    taken = f"port {port} of 127.0.0.1 is taken by process {os.getpid()} ("
    wait_for(lambda: taken in stage.gateway.output)
    assert taken in stage.server("sim/port")["reason"] and stage.server("sim/port")["condition"] != "up"
    assert stage.gateway.request(model="sim/port").json()["error"]["code"] in ("no_healthy_server", "model_loading")
    stage.holder.close()
    wait_for(lambda: stage.server("sim/port")["condition"] == "up", 90)
    wait_for(lambda: responds(stage.gateway, "sim/port"))


def test_what_a_starting_server_says_is_shown(stage: Stage) -> None:
    shown = wait_for(lambda: stage.server("sim/slow")["progress"] and stage.server("sim/slow"))
    assert shown["state"] == "starting" and "Starting vLLM server" in shown["progress"]


def test_a_hung_server(stage: Stage) -> None:
    assert stage.hung is not None
    reasons = ("no response within 10 s", "its engine makes no progress")  # of a probe, or of its request: whichever is noticed first
    wait_for(lambda: any(f"it is restarted: {reason}" in stage.gateway.output for reason in reasons), HUNG_WITHIN)
    assert re.search('"code":"upstream_(disconnected|timeout)"', stage.hung.whole())
    stage.check_it_is_over("sim/hung", restarts=1)
