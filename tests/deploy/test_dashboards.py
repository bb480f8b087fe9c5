"""The dashboards show what is there: a real Prometheus has data for each query of two gateways, once traffic has gone every way.

All processes are real but vLLM, which is the simulator. The second gateway has the labels that it would have in Kubernetes.
"""

from __future__ import annotations

import json
import math
import re
import runpy
import subprocess
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gateway.telemetry.metrics import FAMILIES, PREFIX
from tests.clients.install import NODE, installed
from tests.support.process import gateway, wait_for
from tests.support.prometheus import Prometheus, prometheus
from tests.support.traffic import BAD, MODEL, ON_DEMAND, UNREACHABLE, Traffic, everything

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "grafana"
BUILD = runpy.run_path(str(FOLDER / "build.py"))
DASHBOARDS = BUILD["DASHBOARDS"]
PANELS = [(name, panel) for name, dashboard in DASHBOARDS.items() for panel in dashboard.panels]
QUERIES = [
    *(
        pytest.param(query, id=f"{name}: {panel.title} {number}")
        for name, panel in PANELS
        for number, (query, _) in enumerate(panel.queries)
    ),
    *(pytest.param(query, id=name) for name, _, query, _ in BUILD["ANNOTATIONS"] if "ALERTS" not in query),  # test_alerts.py has those
]
NAMESPACE, RELEASE = "ml", "gw"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_files_are_what_is_built(name: str) -> None:
    assert (FOLDER / name).read_text() == BUILD["made"](DASHBOARDS[name]), "run .venv/bin/python deploy/grafana/build.py"


def test_there_is_no_other_file() -> None:
    assert {file.name for file in FOLDER.glob("*.json")} == set(DASHBOARDS)


def type_errors(folder: Path, documents: Mapping[str, str]) -> str:
    """Return what TypeScript reports about documents that have Grafana's types."""
    if not installed(NODE / "node_modules", NODE / "package-lock.json"):
        pytest.skip("Grafana's types are not installed (make clients)")
    lines = [f'import type {{ File }} from "{Path(__file__).with_name("dashboards")}";']
    lines += [f"export const file{number}: File = {text}" for number, text in enumerate(documents.values())]
    (folder / "files.ts").write_text("\n".join(lines))
    options = ("--noEmit", "--strict", "--skipLibCheck", "--moduleResolution", "bundler", "--module", "esnext")
    run = subprocess.run([NODE / "node_modules" / ".bin" / "tsc", *options, "files.ts"], cwd=folder, capture_output=True, text=True)
    return run.stdout


def test_the_files_have_the_types_of_grafana(tmp_path: Path) -> None:
    assert type_errors(tmp_path, {name: (FOLDER / name).read_text() for name in DASHBOARDS}) == ""


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('"gridPos"', '"gridPosition"'),
        ('"fillOpacity"', '"fillOpaque"'),
        ('"palette-classic-by-name"', '"palette-by-name"'),
        ('"textMode"', '"textStyle"'),
        ('"schemaVersion": ', '"schemaVersion": "1" + '),
    ],
)
def test_a_mistake_in_a_file_is_found(tmp_path: Path, text: str, wrong: str) -> None:
    documents = {name: (FOLDER / name).read_text() for name in DASHBOARDS}
    assert text in "".join(documents.values())
    assert "files.ts(" in type_errors(tmp_path, {name: each.replace(text, wrong) for name, each in documents.items()})


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_lie_side_by_side_and_under_one_another(name: str) -> None:
    document = json.loads((FOLDER / name).read_text())
    taken: set[tuple[int, int]] = set()
    assert {link["type"]: link.get("url") for link in document["links"]} == {"dashboards": None, "link": "${console:raw}/console"}
    for panel in document["panels"]:
        grid = panel["gridPos"]
        cells = {(x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
    variables = {variable["name"] for variable in document["templating"]["list"]} | {"__rate_interval"}
    targets = [target for panel in document["panels"] for target in panel.get("targets", ())]
    used = {name for each in (*targets, *document["annotations"]["list"]) for name in re.findall(r"\$(\w+)", each["expr"])}
    assert used <= variables
    assert variables >= {"datasource", "instance", "namespace", "release", "console"}


NEUTRAL = {
    "at a glance": {"Requests", "Active keys", "Tokens in a day"},
    "amounts": {"Requests", "Tokens", "Tokens in a day", "Models used", "Tokens generated", "In flight and queued", "In flight, by server",
                "Waiting requests, by key"},
    "by status or outcome, with fixed colors": {"Requests by status", "Status", "Incomplete requests", "Starts", "Mirrored requests"},
    "events, each with its own meaning": {"Errors by code", "Failed attempts", "Events in an hour", "Rejected by a limit",
                                          "Connections closed because of the client", "Fallbacks and splits", "Ledger",
                                          "Continued streams"},
    "depend on the use": {"Duration", "Memory", "Cached prompt tokens", "Prefix cache hits", "End users with their own limits",
                          "Cached prompt tokens, predicted and reported", "Finished and preempted requests", "Unbilled tokens", "Versions",
                          "Share of the service, by class", "Share of the service, by team", "Share of the service, by key"},
}  # fmt: skip
"""Panels without thresholds, and why."""


@pytest.mark.parametrize(("name", "panel"), PANELS, ids=lambda value: getattr(value, "title", value))
def test_a_panel_explains_itself(name: str, panel: Any) -> None:
    assert len(panel.says) > 20 and panel.says.endswith(".")
    assert all(legend for _, legend in panel.queries)
    assert panel.unit and (panel.unit != "short" or panel.axis or panel.kind != "timeseries")
    assert panel.steps or panel.states or any(panel.title in titles for titles in NEUTRAL.values()), "without a good and a bad side?"
    assert all(low < high for low, high in pairwise(value for value, _ in panel.steps))


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_state_has_one_color(name: str) -> None:
    """As Grafana decides: the last matching override."""
    colors: dict[str, set[str]] = {"200": set(), "500": set(), "429": set(), "499": set(), "by client": set(), "by upstream": set()}
    for panel in json.loads((FOLDER / name).read_text())["panels"]:
        for override in panel.get("fieldConfig", {}).get("overrides", ()):
            for series in colors:
                if re.search(override["matcher"]["options"].strip("/"), series):
                    colors[series] = {override["properties"][0]["value"]["fixedColor"]}
    wrong = {series for series, found in colors.items() if found - {EXPECTED[series]}}
    assert not wrong


EXPECTED = {"200": "green", "500": "red", "429": "yellow", "499": "#8e8e99", "by client": "#8e8e99", "by upstream": "red"}


def test_only_existing_metrics_are_queried() -> None:
    text = "\n".join(query for dashboard in DASHBOARDS.values() for panel in dashboard.panels for query, _ in panel.queries)
    named = {re.sub("_(bucket|count|sum)$", "", name) for name in re.findall(rf"{PREFIX}(\w+)", text)}
    assert named <= set(FAMILIES)


SERVERS = 3
"""Servers of a gateway that are up: two of one model, and the requested one."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, list[Traffic]]]:
    """Two gateways whose traffic has gone every way while a Prometheus looked on."""
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    labels = {"namespace": NAMESPACE, "release": RELEASE}
    with (
        gateway(folders[0], everything(), seconds=60) as one,
        gateway(folders[1], everything(), seconds=60) as other,
        prometheus(folders[0], one, other, labels=labels) as watching,
    ):
        traffic = [Traffic(one), Traffic(other)]
        for each in traffic:
            each.wake()
        wait_for(lambda: sum(target["health"] == "up" for target in watching.targets()) == 2 * (1 + SERVERS), 100)
        for _ in range(4):
            for each in traffic:
                each.round()
        assert one.command("reload").returncode == 0
        yield watching, traffic


def substituted(query: str, **chosen: str) -> str:
    """A query as Grafana sends it. ``chosen``: the values of variables, All without."""
    query = query.replace("$__rate_interval", "5m")
    return re.sub(r"\$(\w+)", lambda match: chosen.get(match[1], ".*"), query)


def has_data(watching: Prometheus, query: str) -> bool:
    return any(math.isfinite(float(series["value"][1])) for series in watching.query(substituted(query)))


def test_traffic_went_every_way(running: tuple[Prometheus, list[Traffic]]) -> None:
    for traffic in running[1]:
        assert {200, 401, 404, 429, 500, 502, 503} <= traffic.seen


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_has_data(running: tuple[Prometheus, list[Traffic]], query: str) -> None:
    watching, _ = running
    wait_for(lambda: has_data(watching, query), 60, why=lambda: substituted(query))


VARIABLES = sorted({variable for dashboard in DASHBOARDS.values() for variable in dashboard.variables})


@pytest.mark.parametrize(("name", "query"), VARIABLES)
def test_a_variable_has_values(running: tuple[Prometheus, list[Traffic]], name: str, query: str) -> None:
    watching, _ = running
    found = re.fullmatch(r"label_values\((\S.*), (\w+)\)", query)
    assert found is not None and found[2] == name
    values = {series["metric"].get(name) for series in watching.query(substituted(found[1]))}
    expected = {"namespace": {NAMESPACE, None}, "release": {RELEASE, None}, "key": {"chat", "batch"}}
    assert values == expected[name] if name in expected else len(values - {None}) >= 2


def test_a_release_and_an_instance_can_be_chosen(running: tuple[Prometheus, list[Traffic]]) -> None:
    watching, _ = running
    query = next(query for _, panel in PANELS for query, _ in panel.queries if panel.title == "Gateways")
    instances = {series["metric"]["instance"] for series in watching.query(substituted(query))}
    (chosen,) = watching.query(substituted(query, namespace=NAMESPACE, release=RELEASE))
    (other,) = watching.query(substituted(query, instance=(instances - {chosen["metric"]["instance"]}).pop()))
    assert "release" not in other["metric"] and chosen["metric"]["release"] == RELEASE


def test_the_servers_are_found_with_their_labels(running: tuple[Prometheus, list[Traffic]]) -> None:
    watching, _ = running
    found = sorted((series["metric"]["model"], series["metric"]["server"]) for series in watching.query('up{job="vllm"} == 1'))
    assert found == sorted(2 * [(MODEL, f"{MODEL}#0"), (MODEL, f"{MODEL}#1"), (ON_DEMAND, f"{ON_DEMAND}#0")])
    joined = watching.query('vllm_gateway_server_up{model="sim/one"} * on (model, server, instance) group_left () up{job="vllm"}')
    assert len(joined) == 4


def test_the_unchanged_rules_are_evaluated_and_what_is_wrong_is_noticed(running: tuple[Prometheus, list[Traffic]]) -> None:
    watching, _ = running

    def state(alert: str) -> Any:
        return next(rule["state"] for rule in watching.rules() if rule["name"] == alert)

    wait_for(lambda: all(rule["health"] == "ok" for rule in watching.rules()), 60)
    wait_for(lambda: state("VllmGatewayNoHealthyServer") == "pending", 60)
    pending = watching.query('ALERTS{alertname="VllmGatewayNoHealthyServer"}')
    assert {alert["metric"]["model"] for alert in pending} == {BAD, UNREACHABLE}
    wait_for(lambda: state("VllmGatewayFailuresFast") != "inactive", 60)
    assert state("VllmGatewayDown") == "inactive"
