"""``max_inflight: auto``: the limits of a model's servers by their samples, and a gateway that follows the queue of an engine."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from gateway.config import load
from gateway.fleet.configured_servers import configured_servers, limit_bounds
from gateway.monitoring.auto_limits import AutoLimits
from gateway.monitoring.engine_loads import EngineLoads
from gateway.system.tasks import cancel
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.shared_counters import SharedCounters
from tests.gateway.config.test_models import HASH
from tests.support.controlled import controlled
from tests.support.process import launched, write
from tests.support.running import until
from upstream.vllm.auto_max_inflight import START, Bounds, most_useful
from upstream.vllm.engine_counters import EngineMetrics

URLS = ("http://10.0.0.5:8000", "http://10.0.0.6:8000")
MODEL: dict[str, Any] = {"id": "m", "servers": [{"url": url} for url in URLS], "max_inflight": "auto", "slo": {"ttft": "1s"}}


def written(folder: Path, *models: dict[str, Any], **server: Any) -> Any:
    write(folder / "gateway.yaml", {"server": server, "models": list(models), "keys": [{"id": "k", "hash": HASH}]})
    return load(folder / "gateway.yaml")


def test_the_limits_follow_the_samples_of_their_servers(tmp_path: Path) -> None:
    fixed = {"id": "fixed", "servers": [{"url": "http://10.0.0.7:8000"}], "max_inflight": 8}
    config, published = written(tmp_path, MODEL, fixed), list[int]()
    with ExitStack() as stack:
        counters = stack.enter_context(closing(SharedCounters.create("worker-0")))
        WorkerMetrics(counters).cells("server_inflight", "m", URLS[0])[0] = START
        limits = AutoLimits(lambda: config, [counters], lambda: published.append(1))
        assert limits.values() == dict.fromkeys(URLS, START)
        limits.observe({URLS[0]: (1.0, EngineMetrics(START, 0, 0)), URLS[1]: (1.0, EngineMetrics(0, 0, 0))})
        raised = limits.values()
        assert raised[URLS[0]] > START == raised[URLS[1]] and len(published) == 1
        limits.observe({URLS[0]: None})
        assert limits.values() == raised and len(published) == 1
        config = written(tmp_path, MODEL | {"servers": MODEL["servers"][1:]}, fixed)
        assert limits.values() == {URLS[1]: START}
        config = written(tmp_path, MODEL, fixed)
        assert limits.values() == dict.fromkeys(URLS, START), "it was forgotten"


def test_a_number_for_several_gateways_follows_the_samples(tmp_path: Path) -> None:
    shared = {"id": "m", "servers": MODEL["servers"][:1], "max_inflight": 80, "shared_servers": True}
    config = written(tmp_path, shared, workers=2)
    limits = AutoLimits(lambda: config, (), lambda: None)
    assert limits.values() == {URLS[0]: START}
    limits.observe({URLS[0]: (1.0, EngineMetrics(0, 0, 0))})
    assert limits.values() == {URLS[0]: 80}
    limits.observe({URLS[0]: (2.0, EngineMetrics(20, 10, 0))})
    assert limits.values() == {URLS[0]: 50}
    assert limits.limit(configured_servers(config)[0]).reason == "others have 30 of the 80 slots"
    config = written(tmp_path, shared | {"shared_servers": False})
    assert limits.values() == {}


def test_the_bounds_are_the_workers_and_what_a_launched_server_runs(tmp_path: Path) -> None:
    def bounds(**launch: Any) -> Bounds:
        config = written(tmp_path, {"id": "m", "launch": launch, "max_inflight": "auto"}, workers=2)
        return limit_bounds(config, config.models[0])

    assert bounds() == bounds(args={"max-num-seqs": 8, "config": "more.yaml"}) == Bounds(2)
    assert bounds(args={"max_num_seqs": 8}) == Bounds(2, most_useful(8))
    assert bounds(args={"max-num-seqs": 64, "data-parallel-size": 2}) == Bounds(2, most_useful(128))
    config = written(tmp_path, MODEL)
    assert limit_bounds(config, config.models[0]) == Bounds(1)


async def test_a_limit_follows_the_queue_of_an_engine(tmp_path: Path) -> None:
    """The engine runs four requests at a time, of which the gateway knows nothing: its flags are in a file."""
    (tmp_path / "flags.yaml").write_text("max-num-seqs: 4\n")
    model = launched("m", **{"config": str(tmp_path / "flags.yaml"), "sim-step-time": "0.01,0,0"}) | {"max_inflight": "auto"}
    async with controlled(tmp_path, model, workers=2) as gateway:

        def limit() -> tuple[int, str]:
            [server] = gateway.status("m")["servers"]
            return server["max_inflight"], server["max_inflight_reason"]

        control = gateway.control
        loads = EngineLoads(gateway.report.engines, lambda: control.config, control.workers.placements, control.auto_limits)
        assert gateway.status("m")["max_inflight"] == "auto" and limit()[0] == START
        work = [asyncio.create_task(loads.run()), *(asyncio.create_task(_send_repeatedly(gateway)) for _ in range(40))]
        await until(lambda: limit()[0] < 20 and gateway.in_flight("m") < 20, seconds=60)
        assert "in the engine" in limit()[1]
        assert gateway.value("server_max_inflight", "m", "m#0") == limit()[0]
        assert gateway.status("m")["queued"] > 0
        await cancel(*work)


async def _send_repeatedly(gateway: Any) -> None:
    while True:
        assert (await gateway.request("m", max_tokens=20)).status_code == 200
