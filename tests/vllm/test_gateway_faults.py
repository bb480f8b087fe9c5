"""Clients and processes when a part of a real vLLM is killed, when vLLM cannot start, and when the gateway is killed."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil
import pytest

from tests.support.process import alive, configuration, gateway, launched, wait_for
from tests.vllm.dialogues import Json, user
from tests.vllm.gateway import HEADERS, MODEL, NotAchieved, Real, attempted, chat, real_model
from tests.vllm.server import NOT_INSTALLED, START_WITHIN, installed

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ENDLESS: Json = {"model": MODEL, "messages": [user("Never stop.")], "temperature": 0, "max_tokens": 1900}
UNDER_WAY: Mapping[str, tuple[str, Json]] = {
    "chat": (CHAT, {**ENDLESS, "stream": True}),
    "completion": (COMPLETIONS, {"model": MODEL, "prompt": "Hi", "ignore_eos": True, "max_tokens": 1900, "stream": True}),
    "response": (RESPONSES, {"model": MODEL, "input": "Never stop.", "temperature": 0, "stream": True}),
    "message": (MESSAGES, {**ENDLESS, "stream": True}),
    "plain chat": (CHAT, ENDLESS),
    "plain message": (MESSAGES, ENDLESS),
}
FAILED = {"server_error", "upstream_disconnected"}
SENT_AGAIN = {"upstream_unreachable", "no_healthy_server"}  # no part of the response arrived within a second, and then no server was up
GONE_WITHIN = {"EngineCore": 20.0, "API server": 15.0}  # seconds: without its engine vLLM exits by itself after a while


def option(shim: psutil.Process, name: str) -> Path:
    """Return a path from the shim's command line."""
    arguments = shim.cmdline()
    return Path(arguments[arguments.index(name) + 1])


@dataclass
class OpenRequest:
    """A request and the received part of its response."""

    path: str
    body: Json
    status: int = 0
    text: str = ""

    def read(self, url: str) -> None:
        with httpx2.stream("POST", url + self.path, json=self.body, headers=HEADERS, timeout=60) as response:
            self.status = response.status_code
            for piece in response.iter_text():
                self.text += piece

    @property
    def under_way(self) -> bool:
        """Whether some tokens were received (a response starts with four other events)."""
        return self.text.count("\n\n") > 6

    @property
    def is_complete(self) -> bool:
        """Whether the engine has generated the whole response."""
        if "stream" not in self.body:
            return self.status == 200
        return any(end in self.text for end in ('"finish_reason":"length"', "response.completed", "response.incomplete", "message_stop"))


@contextmanager
def under_way(real: Real) -> Iterator[dict[str, OpenRequest]]:
    """Start the requests of UNDER_WAY and yield when all are in mid-response. Read the responses to the end after the `with` block."""
    requested = {name: OpenRequest(*each) for name, each in UNDER_WAY.items()}
    in_flight = f'vllm_gateway_server_inflight{{model="{MODEL}",server="{MODEL}#0"}}'
    with real.held() as work_until, ThreadPoolExecutor(len(requested)) as pool:
        reading = [pool.submit(each.read, real.gateway.url) for each in requested.values()]
        wait_for(lambda: real.gateway.metric(in_flight) == len(requested))
        work_until(lambda: all(each.under_way for each in requested.values() if "stream" in each.body))
        yield requested
        for each in reading:
            each.result()


def check_failures_reported(responses: Mapping[str, OpenRequest]) -> None:
    """Check that every client got the server's failure in the shape of its route."""
    for name in ("chat", "completion"):
        *_, error, done, end = responses[name].text.split("\n\n")
        assert (responses[name].status, done, end) == (200, "data: [DONE]", "")
        check_error(json.loads(error.removeprefix("data: ")))
    *_, error, end = responses["response"].text.split("\n\n")
    kind, data = error.split("\n")
    assert (kind, end) == ("event: error", "") and "[DONE]" not in error
    assert json.loads(data.removeprefix("data: ")).items() >= {"type": "error", "code": "upstream_disconnected"}.items()
    *_, error, end = responses["message"].text.split("\n\n")
    kind, data = error.split("\n")
    assert (kind, end) == ("event: error", "")
    check_anthropic(json.loads(data.removeprefix("data: ")))
    for name in ("plain chat", "plain message"):
        assert responses[name].status in {500, 502, 503}, responses[name].text
    check_error(json.loads(responses["plain chat"].text))
    check_anthropic(json.loads(responses["plain message"].text))


def check_error(document: Json) -> None:
    error = document["error"]
    assert document.keys() == {"error"} and error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "server_error" and error["code"] in FAILED | SENT_AGAIN and "EngineCore" not in error["message"]


def check_anthropic(document: Json) -> None:
    assert document.keys() == {"type", "error"} and document["error"].keys() == {"type", "message"}
    assert document["type"] == "error" and document["error"]["type"] in {"api_error", "overloaded_error"}
    assert "EngineCore" not in document["error"]["message"]


def check_it_comes_back(real: Real, before: Json) -> None:
    """Check that the server is restarted and responds, and that clients get the reason until then."""
    reported: set[tuple[int, str]] = set()

    def is_back() -> bool:
        response = real.post(CHAT, chat("Who are you?"))
        if response.status_code != 200:
            reported.add((response.status_code, response.json()["error"]["code"]))
        time.sleep(0.1)
        return response.status_code == 200 and real.status["restarts"] == before["restarts"] + 1

    wait_for(is_back, START_WITHIN, why=lambda: real.gateway.output[-4000:])
    print(f"until it was back: {sorted(reported)}")
    assert (503, "model_loading") in reported
    assert {code for status, code in reported if status != 503} <= FAILED | {"upstream_unreachable"}
    assert real.gateway.metric(f'vllm_gateway_inflight_requests{{model="{MODEL}"}}') == 0


@pytest.mark.parametrize("victim", ["EngineCore", "API server"])
def test_a_server_that_is_killed_in_mid_response(real: Real, victim: str) -> None:
    attempted(lambda _: check_that_every_failure_is_reported(real, victim))


def check_that_every_failure_is_reported(real: Real, victim: str) -> None:
    """Check both sides of a kill. Raises NotAchieved if vLLM had finished a response before it was killed."""
    before, shim = real.status, real.shim()
    tree, scratch = [shim, *shim.children(recursive=True)], option(shim, "--scratch")
    assert list(scratch.iterdir()), "vLLM's sockets between its processes"
    incomplete = f'vllm_gateway_incomplete_total{{model="{MODEL}",reason="upstream"}}'
    broken_off = real.gateway.metric(incomplete)
    with under_way(real) as responses:
        (real.process("EngineCore") if victim == "EngineCore" else real.api_server).kill()
        killed = time.monotonic()
    print(f"{victim}: all clients had their end after {1000 * (time.monotonic() - killed):.0f} ms")
    if any(each.is_complete for each in responses.values()):
        check_it_comes_back(real, before)
        raise NotAchieved
    check_failures_reported(responses)
    assert real.gateway.metric(incomplete) - broken_off == 4  # the streams; the other requests got an error response
    wait_for(lambda: not alive(tree), GONE_WITHIN[victim], why=lambda: str(alive(tree)))
    assert not scratch.exists() or not list(scratch.iterdir())
    print(f"{victim}: nothing of its tree was left after {time.monotonic() - killed:.1f} s")
    check_it_comes_back(real, before)


def test_nothing_outlives_a_killed_control_and_it_can_be_started_again_at_once(real: Real, tmp_path: Path) -> None:
    tree = real.gateway.tree()
    assert {real.api_server.pid, real.process("EngineCore").pid} < {each.pid for each in tree}
    folder = option(real.shim(), "--folder")
    ports = real.gateway.data, real.gateway.admin
    os.kill(real.gateway.process.pid, signal.SIGKILL)
    killed = time.monotonic()
    real.gateway.process.wait(30)
    wait_for(lambda: not alive(tree), 15.0, why=lambda: str(alive(tree)))
    print(f"nothing was left {1000 * (time.monotonic() - killed):.0f} ms after control was killed")
    assert not folder.exists()
    again = configuration(launched(), port=ports[0], admin={"port": ports[1]})
    with tempfile.TemporaryDirectory(prefix="tee-") as recordings:
        again["models"].append(real_model(MODEL, Path(recordings)))
        with gateway(tmp_path, again, ready=False) as one:
            print(f"started again {1000 * (time.monotonic() - killed):.0f} ms after control was killed")
            wait_for(lambda: one.request(model=MODEL).status_code == 200, START_WITHIN, why=lambda: one.output)
            assert (one.data, one.admin) == ports
