"""Failures of a real vLLM, provoked one after the other: each time the operator reads the root cause first, in every place that shows it.

The eighth, an engine core that is killed, is in test_gateway_faults.py, where one is killed anyway.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest

from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.vllm.dialogues import Json
from tests.vllm.server import NOT_INSTALLED, START_WITHIN, Flag, installed, launch

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED), pytest.mark.timeout(900)]

LIMIT = 3_000_000_000
"""Bytes of address space: enough to import vLLM, and too little for its worker's cache of a gigabyte."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What is wrong with a model's ``launch``, and what has to be said about it: the cause, and words of vLLM's own line."""

    name: str
    launch: Json
    cause: str
    words: str


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
PORT = "port"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with a model that works, and the broken ones, which nothing starts yet."""
    with closing(socket.create_server(("127.0.0.1", 0))) as holder:
        models = [{"id": each.name, "launch": {**each.launch, "start": "on_demand"}} for each in FAILURES]
        models.append({"id": PORT, "launch": {**broken(port=holder.getsockname()[1]), "start": "on_demand"}})
        with gateway(tmp_path_factory.mktemp("failures"), configuration(launched(), *models)) as running:
            yield running


def failed(one: Gateway, model: str) -> Json:
    """Start a model, and its server as /status shows it once it has failed; stopped again, it is not tried again."""
    assert one.command("start", model).returncode == 0

    def shown() -> Json:
        [server] = next(each for each in one.get("/status").json()["models"] if each["id"] == model)["servers"]
        return dict(server)

    wait_for(lambda: shown().get("cause"), START_WITHIN, why=lambda: one.said[-4000:])
    return shown()


def check_it_is_said_first(one: Gateway, model: str, cause: str, words: str) -> None:
    server = failed(one, model)
    assert server["cause"] == cause and words in server["reason"] and server["hint"]
    lines = one.command("status").stdout.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(f"{model}#0: "))
    assert lines[first].startswith(f"{model}#0: could not start: ") and words in lines[first]
    assert lines[first + 1] == f"  Hint: {server['hint']}"
    said = one.said.partition(f"{model}#0 could not start")[2]
    assert words in said.splitlines()[0] and "Traceback" not in one.said
    assert one.metric(f'vllm_gateway_launch_failures_total{{cause="{cause}",model="{model}"}}') >= 1
    refused = one.ask(model=model)
    assert refused.status_code == 503 and words not in refused.text, "clients are told nothing of it"
    assert one.ask().status_code == 200, "the others are served"
    assert one.command("stop", model).returncode == 0


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
def test_the_root_cause_of_a_failed_start_is_said_first(one: Gateway, failure: Failure) -> None:
    check_it_is_said_first(one, failure.name, failure.cause, failure.words)


def test_a_port_that_is_in_use_is_said_first(one: Gateway) -> None:
    check_it_is_said_first(one, PORT, "port_in_use", "is taken by process")
