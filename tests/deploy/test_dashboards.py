"""The dashboards show what is there: a real Prometheus has data for each panel, once traffic has gone every way."""

from __future__ import annotations

import json
import math
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.telemetry.metrics import FAMILIES, PREFIX
from tests.support.process import Gateway, gateway, wait_for
from tests.support.prometheus import Prometheus, prometheus
from tests.support.traffic import BAD, MODEL, ON_DEMAND, UNREACHABLE, Traffic, everything

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "grafana"
BUILD = runpy.run_path(str(FOLDER / "build.py"))
DASHBOARDS = BUILD["DASHBOARDS"]
QUERIES = [
    pytest.param(query, id=f"{name}: {panel.title} {number}")
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard.panels
    for number, (query, _) in enumerate(panel.queries)
]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_files_are_what_is_built(name: str) -> None:
    assert (FOLDER / name).read_text() == BUILD["made"](DASHBOARDS[name]), "run .venv/bin/python deploy/grafana/build.py"


def test_there_is_no_other_file() -> None:
    assert {file.name for file in FOLDER.glob("*.json")} == set(DASHBOARDS)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_lie_side_by_side_and_under_one_another(name: str) -> None:
    document = json.loads((FOLDER / name).read_text())
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        grid = panel["gridPos"]
        cells = {(x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
    variables = {variable["name"] for variable in document["templating"]["list"]} | {"__rate_interval"}
    used = {name for panel in document["panels"] for target in panel["targets"] for name in re.findall(r"\$(\w+)", target["expr"])}
    assert used <= variables


def test_only_existing_metrics_are_queried() -> None:
    text = "\n".join(query for dashboard in DASHBOARDS.values() for panel in dashboard.panels for query, _ in panel.queries)
    named = {re.sub("_(bucket|count|sum)$", "", name) for name in re.findall(rf"{PREFIX}(\w+)", text)}
    assert named <= set(FAMILIES)


SERVERS = 3
"""Servers that are up: two of one model, and the requested one."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Prometheus, Traffic]]:
    """A gateway whose traffic has gone every way while a Prometheus looked on."""
    folder = tmp_path_factory.mktemp("watched")
    with gateway(folder, everything(), seconds=60) as one, prometheus(folder, one) as watching:
        traffic = Traffic(one)
        traffic.wake()
        wait_for(lambda: sum(target["health"] == "up" for target in watching.targets()) == 1 + SERVERS, 100)
        for _ in range(4):
            traffic.round()
        yield one, watching, traffic


def substituted(query: str) -> str:
    """A panel's query as Grafana sends it."""
    query = query.replace("$__rate_interval", "5m")
    return re.sub(r"\$\w+", ".*", query)


def has_data(watching: Prometheus, query: str) -> bool:
    return any(math.isfinite(float(series["value"][1])) for series in watching.query(substituted(query)))


def test_traffic_went_every_way(running: tuple[Gateway, Prometheus, Traffic]) -> None:
    _, _, traffic = running
    assert {200, 401, 404, 429, 500, 502, 503} <= traffic.seen


@pytest.mark.parametrize("query", QUERIES)
def test_a_panels_query_has_data(running: tuple[Gateway, Prometheus, Traffic], query: str) -> None:
    _, watching, _ = running
    wait_for(lambda: has_data(watching, query), 60, why=lambda: substituted(query))


def test_the_servers_are_found_with_their_labels(running: tuple[Gateway, Prometheus, Traffic]) -> None:
    _, watching, _ = running
    found = {(series["metric"]["model"], series["metric"]["server"]) for series in watching.query('up{job="vllm"} == 1')}
    assert found == {(MODEL, f"{MODEL}#0"), (MODEL, f"{MODEL}#1"), (ON_DEMAND, f"{ON_DEMAND}#0")}
    joined = watching.query('vllm_gateway_server_up{model="sim/one"} * on (model, server) group_left () up{job="vllm"}')
    assert len(joined) == 2


def test_the_rules_are_evaluated_and_what_is_wrong_is_noticed(running: tuple[Gateway, Prometheus, Traffic]) -> None:
    _, watching, _ = running

    def state(alert: str) -> Any:
        return next(rule["state"] for rule in watching.rules() if rule["name"] == alert)

    wait_for(lambda: all(rule["health"] == "ok" for rule in watching.rules()), 60)
    wait_for(lambda: state("VllmGatewayNoHealthyServer") == "pending", 60)
    pending = watching.query('ALERTS{alertname="VllmGatewayNoHealthyServer"}')
    assert {alert["metric"]["model"] for alert in pending} == {BAD, UNREACHABLE}
    wait_for(lambda: state("VllmGatewayFailuresFast") != "inactive", 60)
    assert state("VllmGatewayDown") == "inactive"
