"""Provoke failures of a real vLLM. Each time, every output reports the root cause first."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import psutil
import pytest

from tests.support.process import Gateway, command_line, configuration, gateway, launched, wait_for
from tests.vllm.dialogues import Json
from tests.vllm.server import NOT_INSTALLED, START_WITHIN, Flag, installed, launch

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

LIMIT = 3_000_000_000
"""Bytes of address space: enough to import vLLM, but too few for its worker's cache of a gigabyte."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error in a model's ``launch``, the cause that must be reported, and a part of vLLM's own message."""

    name: str
    launch: Json
    cause: str
    message: str


def broken(**flags: Flag) -> Json:
    settings = launch("qwen3", {name.replace("_", "-"): value for name, value in flags.items()})
    settings["env"]["TORCH_COMPILE_DISABLE"] = "1"
    return settings


def limited() -> Json:
    settings = broken()
    return settings | {"command": ["prlimit", f"--as={LIMIT}", *settings["command"]]}


FAILURES = (
    Failure("kv-cache", broken(num_gpu_blocks_override=1), "kv_cache_too_small", "No available memory for the cache blocks"),
    Failure("context", broken(num_gpu_blocks_override=2), "context_exceeds_kv_cache", "the estimated maximum model length is 128"),
    Failure(
        "weights", broken() | {"model": "no-such-org/no-such-model"}, "weights_not_found", "Cannot find an appropriate cached snapshot"
    ),
    Failure("flag", broken(no_such_flag=1), "unknown_flag", "unrecognized arguments: --no-such-flag 1"),
    Failure("parser", broken(enable_auto_tool_choice=True, tool_call_parser="nonsense"), "unknown_parser", "nonsense"),
    Failure("memory", limited(), "host_out_of_memory", "can't allocate memory"),
)
PORT, KILLED = "port", "killed"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Yield a gateway with a working model and the broken models, which are not started yet."""
    with closing(socket.create_server(("127.0.0.1", 0))) as holder:
        models = [{"id": each.name, "launch": {**each.launch, "start": "on_demand"}} for each in FAILURES]
        models.append({"id": PORT, "launch": {**broken(port=holder.getsockname()[1]), "start": "on_demand"}})
        models.append({"id": KILLED, "launch": {**broken(), "start": "on_demand"}})
        with gateway(tmp_path_factory.mktemp("failures"), configuration(launched(), *models)) as running:
            yield running


def shown(one: Gateway, model: str) -> Json:
    """Return the model's server as /status shows it."""
    [server] = next(each for each in one.get("/status").json()["models"] if each["id"] == model)["servers"]
    return dict(server)


def check_it_is_reported_first(one: Gateway, model: str, cause: str, message: str, what: str = "could not start") -> None:
    """Wait until a started model has failed, and check all outputs. Then stop the model, so that it is not retried."""
    server = wait_for(lambda: (seen := shown(one, model)).get("cause") and seen, START_WITHIN, why=lambda: one.output[-4000:])
    refused = one.request(model=model)  # at once: a model that was up is restarted
    assert refused.status_code == 503 and message not in refused.text, "clients do not get the cause"
    assert server["cause"] == cause and message in server["reason"] and server["hint"]
    lines = one.command("status").stdout.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(f"{model}#0: "))
    assert lines[first].startswith(f"{model}#0: {what}: ") and message in lines[first]
    assert lines[first + 1] == f"  Hint: {server['hint']}"
    report = one.output.rpartition(f"{model}#0 {what}")[2]
    assert message in report.splitlines()[0] and "Traceback" not in one.output
    assert one.metric(f'vllm_gateway_launch_failures_total{{cause="{cause}",model="{model}"}}') >= 1
    assert one.request().status_code == 200, "the others are served"
    assert one.command("stop", model).returncode == 0


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
def test_the_root_cause_of_a_failed_start_is_reported_first(one: Gateway, failure: Failure) -> None:
    assert one.command("start", failure.name).returncode == 0
    check_it_is_reported_first(one, failure.name, failure.cause, failure.message)


def test_a_port_that_is_in_use_is_reported_first(one: Gateway) -> None:
    assert one.command("start", PORT).returncode == 0
    check_it_is_reported_first(one, PORT, "port_in_use", "is taken by process")


def engine_of(one: Gateway) -> psutil.Process:
    """Start the model KILLED, and return its engine's process."""
    assert one.command("start", KILLED).returncode == 0
    wait_for(lambda: shown(one, KILLED)["condition"] == "up", START_WITHIN, why=lambda: one.output[-4000:])
    children = psutil.Process(shown(one, KILLED)["pid"]).children(recursive=True)
    [engine] = [each for each in children if "VLLM::EngineCore" in " ".join(command_line(each))]
    return engine


def test_a_hung_engine_is_reported_first_and_replaced(one: Gateway) -> None:
    """Its API server still responds to /health with 200."""
    engine_of(one).suspend()
    waiting = threading.Thread(target=lambda: one.request(model=KILLED, timeout=START_WITHIN))
    waiting.start()
    check_it_is_reported_first(one, KILLED, "engine_hung", "its engine makes no progress", what="ended")
    waiting.join(START_WITHIN)


def test_a_killed_engine_is_reported_first_although_vllm_exits_with_0(one: Gateway) -> None:
    engine_of(one).kill()
    check_it_is_reported_first(one, KILLED, "engine_died", "engine process died", what="ended")
