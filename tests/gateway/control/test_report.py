"""The status on the admin port costs control little, even with many models."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.controlled import controlled, on_demand
from tests.support.kv_engine import PlainEngine
from tests.support.kv_publisher import kv_publisher
from tests.support.process import configuration, gateway, launched, wait_for, write
from tests.support.running import until
from tests.support.simulated import simulated

A = "sim/a"


async def calls_for_a_status(folder: Path, count: int) -> int:
    """Return the number of function calls that a status of this number of models takes."""
    calls = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    os.mkdir(folder)
    async with controlled(folder, *(on_demand(f"m{number}") for number in range(count))) as one:
        one.report.status()  # the first call reads the names of the workers' counters
        sys.setprofile(note)
        try:
            shown = one.report.status()
        finally:
            sys.setprofile(None)
        assert [len(model["servers"]) for model in shown["models"]] == [1] * count
    return calls


async def test_the_cost_of_a_status_is_linear_in_the_number_of_models(tmp_path: Path) -> None:
    few, many = await calls_for_a_status(tmp_path / "few", 25), await calls_for_a_status(tmp_path / "many", 100)
    assert many < 5 * few


WITHOUT = ["1 of 1 model without a ready server"]


async def test_a_gateway_is_ready_and_degraded_while_a_model_has_no_server_that_is_up(tmp_path: Path) -> None:
    async with controlled(tmp_path, {"id": "far", "servers": [{"url": "http://127.0.0.1:9"}]}) as one:
        assert (one.report.not_ready(), one.report.degraded(), one.report.status()["degraded"]) == (None, WITHOUT, WITHOUT)


async def test_a_launched_server_that_does_not_respond_to_probes_degrades_the_gateway(tmp_path: Path) -> None:
    async with controlled(tmp_path, launched(A)) as one:
        assert one.report.degraded() == []
        with one.frozen(A):
            await until(lambda: one.report.degraded() == WITHOUT, 60)
            assert one.report.not_ready() is None


async def test_a_stopped_or_starting_model_does_not_degrade_the_gateway(tmp_path: Path) -> None:
    async with controlled(tmp_path, on_demand(A)) as one:
        assert (one.state(A), one.report.degraded()) == ("stopped", [])
        request = asyncio.create_task(one.request(A))
        while not request.done():
            assert one.report.degraded() == []
            await asyncio.sleep(0.01)
        assert (one.state(A), request.result().status_code, one.report.degraded()) == ("ready", 200, [])
        await one.operations.stop(A)
        assert (one.state(A), one.report.degraded()) == ("stopped", [])


async def test_a_split_is_listed_with_the_facts_of_its_models_and_is_not_a_model_without_servers(tmp_path: Path) -> None:
    models = [launched(A, **{"max-model-len": 4096}), launched("sim/b", **{"max-model-len": 2048})]
    async with controlled(tmp_path, *models, {"id": "chat", "aliases": ["c"], "split": {A: 0, "sim/b": 1}, "sticky": "key"}) as one:
        shown = one.report.status()
        assert shown["splits"] == [{"id": "chat", "aliases": ["c"], "models": {A: 0, "sim/b": 1}, "sticky": "key"}]
        assert [model["id"] for model in shown["models"]] == [A, "sim/b"] and one.report.degraded() == []
        assert {series.labels for series in one.report.series() if series.family == "ready_servers"} == {(A,), ("sim/b",)}
        reply = await one.request("chat")
        assert (reply.status_code, reply.headers["x-vllm-gateway-model"], reply.json()["model"]) == (200, "sim/b", "sim/b")
        listed = {each["id"]: each for each in (await one.client.get("/v1/models")).json()["data"]}
        assert listed["chat"]["max_model_len"] == listed["c"]["max_model_len"] == 2048 and listed["chat"]["task"] == "chat"
        result = await one.reload(*models, {"id": "chat", "split": {A: 1, "sim/b": 0}})
        assert result.changes == ("model chat changed: aliases, split, sticky",)
        await until(
            lambda: (
                len({one.report.status()["snapshot_version"], *(each["snapshot_version"] for each in one.report.status()["workers"])}) == 1
            )
        )
        assert (await one.request("chat")).headers["x-vllm-gateway-model"] == A


async def test_the_events_of_a_server_are_shown_if_it_publishes_any(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    async with kv_publisher(tmp_path / "a", PlainEngine(block_size=16)) as first, kv_publisher(tmp_path / "b") as second:
        servers = [{"url": f"http://127.0.0.1:{each.port}"} for each in (first, second)]
        async with controlled(tmp_path, {"id": "far", "balance": "cost", "servers": servers}) as one:
            await first.compute([1] * 16)
            await until(lambda: one.status("far")["servers"][0].get("kv_events", {}).get("blocks") == 1)
            assert "kv_events" not in one.status("far")["servers"][1]


async def test_a_log_that_blocks_does_not_delay_other_requests(tmp_path: Path) -> None:
    async with controlled(tmp_path, launched(A)) as one:
        [server] = (await one.report.status_with_logs())["models"][0]["servers"]
        assert server["last_log_lines"] == one.control.launcher.servers[f"{A}#0"].log.tail().splitlines() != []
        os.unlink(server["log"])
        os.mkfifo(server["log"])
        reading = asyncio.create_task(one.report.status_with_logs())
        assert not (await asyncio.wait([reading], timeout=0.2))[0]
        assert (await one.request(A)).status_code == 200 and one.state(A) == "ready"
        other_end = os.open(server["log"], os.O_RDWR)
        try:
            await until(reading.done)
        finally:
            os.close(other_end)
        assert reading.result()["models"][0]["servers"][0]["last_log_lines"] == []


def test_a_server_that_does_not_serve_the_model_is_reported(tmp_path: Path) -> None:
    with simulated("m") as port:
        url = f"http://127.0.0.1:{port}"
        wrong, right = {"id": "x", "servers": [{"url": url}]}, {"id": "x", "servers": [{"url": url, "model": "m"}]}
        with gateway(tmp_path, configuration(wrong)) as one:
            reasons = ["1 of 1 model unknown to a server"]
            wait_for(lambda: one.get("/readyz").json() == {"status": "degraded", "reasons": reasons})
            explained = "serves only [m] and not x: set servers[].model"
            wait_for(lambda: f"{url} {explained}" in one.output)
            (server,) = one.get("/status").json()["models"][0]["servers"]
            assert (server["condition"], server["reason"]) == ("up", explained)
            assert explained in one.command("status").stdout
            series = f'vllm_gateway_server_serves_model{{model="x",server="{url}"}}'
            assert one.metric(series) == 0
            write(tmp_path / "gateway.yaml", configuration(right))
            wait_for(lambda: one.get("/readyz").json()["status"] == "ready")
            wait_for(lambda: f"{url} serves its model now" in one.output)
            assert one.metric(series) == 1
            assert one.output.count(explained) == 1
