"""The shares of queues, from the workers' counters."""

from __future__ import annotations

import asyncio
import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from gateway.admin.queue_output import print_open_slots
from gateway.admin.queue_report import queue_report
from gateway.telemetry.metrics import Series
from tests.support.controlled import controlled
from tests.support.process import configuration, gateway, launched


def series(model: str, key: str, waiting: int, dispatched: int, wait: float, service: float) -> dict[Series, list[float]]:
    labels = (model, "default", "", key)
    return {
        Series("queue_waiting_requests", labels): [waiting],
        Series("queue_requests_total", labels): [dispatched],
        Series("queue_wait_seconds_total", labels): [wait],
        Series("queue_service_total", labels): [service],
        Series("queue_refused_total", (*labels, "predicted")): [3.0],
        Series("queue_refused_total", (*labels, "late")): [1.0],
        Series("tokens_total", (key, model, "prompt")): [99],
    }


SERIES = series("m", "a", 2, 10, 5.0, 100.0) | series("m", "b", 0, 4, 1.0, 300.0) | series("other", "c", 1, 0, 0.0, 0.0)


def test_the_largest_service_of_a_model_comes_first() -> None:
    flows = queue_report(SERIES)["flows"]
    assert [(row["model"], row["key"], row["service_share"], row["wait_seconds"]) for row in flows] == [
        ("m", "b", 0.75, 0.25),
        ("m", "a", 0.25, 0.5),
        ("other", "c", 0.0, 0.0),
    ]
    assert flows[1] == {
        "model": "m", "class": "default", "team": "", "key": "a", "waiting": 2, "dispatched": 10, "refused": 4, "wait_seconds": 0.5,
        "service": 100, "service_share": 0.25,
    }  # fmt: skip


def test_one_model_can_be_named() -> None:
    assert [row["key"] for row in queue_report(SERIES, "other")["flows"]] == ["c"]
    assert queue_report(SERIES, "unknown") == {"flows": [], "open_slots": []}


def slots(worker: str, opened: float, ttft: float, itl: float) -> dict[Series, list[float]]:
    """Return what a worker shows of the class ``chat`` of the model ``m``."""
    ratios = {Series("objective_ratio", ("m", "chat", name, worker)): [ratio] for name, ratio in (("ttft", ttft), ("itl", itl))}
    return {Series("open_slots", ("m", "chat", worker)): [opened]} | ratios


def test_the_workers_follow_the_least_number_of_open_slots() -> None:
    fixed = {Series("open_slots", ("a", "tools", "0")): [1.0], Series("open_slots", ("m", "removed", "0")): [0.0]}
    report = queue_report(SERIES | slots("0", 9.0, 0.5, 0.0) | slots("1", 8.0, 0.0, 1.1234) | fixed)["open_slots"]
    assert report == [
        {"model": "a", "class": "tools", "slots": 1, "objectives": {}},
        {"model": "m", "class": "chat", "slots": 8, "objectives": {"ttft": 0.5, "itl": 1.123}},
    ]
    assert queue_report(SERIES, "m")["open_slots"] == []
    output = io.StringIO()
    print_open_slots(report, Console(file=output))
    assert output.getvalue().splitlines() == [
        "a: the classes after tools may use 1 slot of each server (reserved_slots)",
        "m: the classes after chat may use 8 slots of each server (ttft at 50% of its objective and itl at 112% of its objective)",
    ]


async def test_a_key_that_waits_is_reported(tmp_path: Path) -> None:
    limited = launched("m", **{"sim-tokens": 4, "sim-tokens-per-second": 40}) | {"max_inflight": 1}
    async with controlled(tmp_path, limited) as one:
        await asyncio.gather(*(one.request("m") for _ in range(3)))
        [row] = queue_report(one.report.series(), "m")["flows"]
    assert (row["key"], row["waiting"], row["dispatched"]) == ("team-a", 0, 2)
    assert row["service"] > 0 and row["service_share"] == 1.0 and row["wait_seconds"] > 0


def test_the_command_prints_it(tmp_path: Path) -> None:
    limited = launched("sim/one", **{"sim-tokens": 4, "sim-tokens-per-second": 40}) | {"max_inflight": 1}
    with gateway(tmp_path, configuration(limited)) as one:
        assert one.command("queue").stdout == "no request has waited since the gateway started\n"
        assert json.loads(one.command("queue", "--format", "json").stdout) == {"flows": [], "open_slots": []}
        with ThreadPoolExecutor(3) as threads:
            assert [each.status_code for each in threads.map(lambda _: one.request(), range(3))] == [200] * 3
        [row] = json.loads(one.command("queue", "--format", "json").stdout)["flows"]
        assert row["wait_seconds"] > 0 and row["service_share"] == 1
        table = one.command("queue", "--model", "sim/one").stdout
        assert "team-a" in table and "100.0%" in table
        assert one.command("queue", "--model", "other").stdout.startswith("no request")
