"""Workers share their placements, and the engines' load reaches them: a gateway with two workers and two simulators."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack, closing
from pathlib import Path

import pytest

from gateway.admin.engine_metrics import Engine
from gateway.config import load
from gateway.monitoring.auto_limits import AutoLimits
from gateway.monitoring.engine_loads import EngineLoads
from tests.support.ports import refusing
from tests.support.process import Gateway, configuration, gateway, launched, wait_for, write
from tests.support.running import until
from tests.support.scripted import Conversation, scripted
from upstream.balancing.placement_log import Kind, PlacementLog, Record, server_key
from upstream.http.address import Address
from upstream.vllm.health import ProbeTarget

CONTEXT = "You are the assistant of a customer. " * 200


def servers(served: Gateway) -> list[str]:
    """The servers of all requests so far, in their order, by the access log."""
    lines = [json.loads(line) for line in served.log.splitlines() if '"endpoint"' in line]
    return [line["server"] for line in sorted(lines, key=lambda line: line["time"])]


def test_two_workers_route_one_context_to_one_server(tmp_path: Path) -> None:
    model = launched()
    model["launch"]["replicas"] = 2
    model |= {"balance": "cost", "cost_policy": {"explain": True}}
    with gateway(tmp_path, configuration(model, workers=2)) as served:
        for customer in range(4):
            for number in range(6):  # each request has a separate connection, so both workers get some
                system = {"role": "system", "content": f"{customer} {CONTEXT}"}
                response = served.request(messages=[system, {"role": "user", "content": f"{number}"}], max_tokens=2)
                assert response.status_code == 200
        found = wait_for(lambda: len(each := servers(served)) == 24 and each)
        assert [len(set(found[6 * customer : 6 * customer + 6])) for customer in range(4)] == [1, 1, 1, 1]
        choice = wait_for(lambda: served.get("/status").json()["models"][0].get("last_choice"))
        assert choice["server"] in choice["candidates"] and len(choice["candidates"]) == 2
        sizes = [f'vllm_gateway_prefix_index_blocks{{model="sim/one",worker="{number}"}}' for number in (0, 1)]
        wait_for(lambda: all(served.metric(size) for size in sizes))


LOADED = b"vllm:num_requests_running 3\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc 0.25\n"
SIZED = LOADED + b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
MODEL = {"id": "m", "balance": "cost", "servers": [{"url": "http://127.0.0.1:1"}]}


async def test_servers_that_report_no_load_hide_no_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Sample a server that is down, one without vLLM's metrics, one without the size of its cache, and a complete one."""
    write(tmp_path / "gateway.yaml", configuration(MODEL))
    config, texts, failures = load(tmp_path / "gateway.yaml"), (b"other 1\n", LOADED, SIZED), [KeyError("m")]
    records: list[Record] = []
    async with AsyncExitStack() as stack:
        ports = [stack.enter_context(refusing())]
        for text in texts:

            async def script(talk: Conversation, text: bytes = text) -> None:
                await talk.respond(text, kind="text/plain")

            ports.append((await stack.enter_async_context(scripted(script))).port)
        engines = {f"m#{at}": Engine("m", ProbeTarget(f"m#{at}", Address("127.0.0.1", port))) for at, port in enumerate(ports)}

        def known() -> Mapping[str, Engine]:
            if failures:
                raise failures.pop()
            return engines

        log = stack.enter_context(closing(PlacementLog.create(2, 1)))
        reader = stack.enter_context(closing(PlacementLog(os.dup(log.fd), 0)))
        sampling = asyncio.create_task(EngineLoads(known, lambda: config, log, AutoLimits(lambda: config, (), lambda: None)).run())

        def complete() -> bool:
            records.extend(reader.read())
            return len(records) == 3

        await until(complete)
        sampling.cancel()
    assert "the servers' load could not be sampled" in caplog.messages, "the first sample failed, the next did not"
    loads = {each.server: list(each.keys) for each in records if each.kind is Kind.LOAD}
    assert loads == {server_key("m#2"): [3, 1, 250], server_key("m#3"): [3, 1, 250]}
    assert [(each.server, each.value) for each in records if each.kind is Kind.CAPACITY] == [(server_key("m#3"), 1600)]
