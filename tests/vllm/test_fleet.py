"""Two real models that cannot run together: each is started on demand, after the other has been stopped."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.process import Gateway, configuration, gateway, wait_for
from tests.vllm.dialogues import Architecture, Json
from tests.vllm.gateway import chat
from tests.vllm.server import NOT_INSTALLED, START_WITHIN, installed, launch

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED)]

QWEN, LLAMA = "tests/qwen", "tests/llama"


def lazy(identity: str, architecture: Architecture, folder: str) -> Json:
    settings = launch(architecture)
    settings |= {"start": "on_demand", "group": "cores"}
    settings["env"] |= {"TMPDIR": folder, "TORCH_COMPILE_DISABLE": "1"}
    return {"id": identity, "launch": settings, "queue": {"wait": f"{2 * START_WITHIN:.0f}s"}, "timeouts": {"first_byte": "300s"}}


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Gateway]:
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        config = configuration(lazy(QWEN, "qwen3", folder), lazy(LLAMA, "llama", folder))
        with gateway(tmp_path, config) as running:
            yield running


def state(one: Gateway, model: str) -> Json:
    found: Json = next(each for each in one.get("/status").json()["models"] if each["id"] == model)
    return found


def test_they_alternate(one: Gateway) -> None:
    assert [state(one, model)["state"] for model in (QWEN, LLAMA)] == ["stopped", "stopped"]
    seen: list[int] = []
    for model, other in ((QWEN, LLAMA), (LLAMA, QWEN)) * 2:
        response = one.request(timeout=2 * START_WITHIN, **chat("Hello", model=model, max_tokens=8))
        assert response.status_code == 200, one.output
        assert response.json()["model"] == model and response.json()["usage"]["completion_tokens"] > 0
        assert (state(one, model)["state"], state(one, other)["state"]) == ("ready", "stopped")
        [server] = state(one, model)["servers"]
        assert server["pid"] not in seen, "a server of its own each time"
        assert "--shutdown-timeout" in psutil.Process(server["pid"]).cmdline()
        assert not any(psutil.pid_exists(pid) for pid in seen), "nothing is left of those before"
        seen.append(server["pid"])
    for model in (QWEN, LLAMA):
        assert one.metric(f'vllm_gateway_launches_total{{model="{model}",outcome="ready"}}') == 2
        assert one.metric(f'vllm_gateway_launches_total{{model="{model}",outcome="failed"}}') == 0
    assert one.stop() == 0
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in seen))
