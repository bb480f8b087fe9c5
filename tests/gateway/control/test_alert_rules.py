"""The alerts that control judges mean the same as those of Prometheus, and know since when they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from gateway.config.quantities import parse_duration
from gateway.console.pages import PAGES
from gateway.control.alert_rules import RULES, Alerts, Facts
from gateway.control.recent_history import MinuteCounts
from gateway.control.starvation import Unserved
from gateway.telemetry.metrics import Series

_FILE = Path(__file__).resolve().parents[3] / "deploy" / "prometheus" / "rules.yaml"
LEFT_TO_PROMETHEUS = {
    "VllmGatewayDown",
    "VllmGatewayFailuresSlow",
    "VllmGatewayFailuresSteady",
    "VllmGatewayFirstTokensSlow",
    "VllmGatewayFirstTokensSteady",
    "VllmGatewayLedgerBehind",
}
NOW = 1_800_000_000.0
HEALTHY: Mapping[Series, float] = {
    Series("ready_servers", ("m",)): 1,
    Series("server_out_of_rotation", ("m", "s")): 0,
    Series("config_last_reload_successful", ()): 1,
    Series("dependency_up", ("ledger_database",)): 1,
    Series("ledger_memory_rows", ()): 3,
    Series("key_expires_timestamp_seconds", ("k",)): NOW + 30 * 86400,
    Series("certificate_expires_timestamp_seconds", ("server.tls",)): NOW + 30 * 86400,
    Series("server_serves_model", ("m", "s")): 1,
    Series("key_set_up", ("https://issuer",)): 1,
    Series("budget_used_ratio", ("k", "day", "false")): 0.5,
    Series("budget_used_ratio", ("k", "day", "true")): 0.95,
    Series("notices_oldest_waiting_seconds", ("mail",)): 5,
}
QUIET: Mapping[tuple[str, str], float] = {
    ("requests", "m"): 1000,
    ("failures", "m"): 0,
    ("streams", "m"): 1000,
    ("late", "m"): 5,
    ("queued", "m"): 0,
    ("continuations", "m"): 100,
    ("not_continued", "m"): 9,
    ("server_restarts", "s"): 1,
    ("worker_restarts", ""): 1,
    ("ledger_dropped", ""): 0,
    ("direct_use", "m"): 10,
    ("auth_failures", "unknown"): 20,
}


def facts(values: Mapping[Series, float] = HEALTHY, counts: Mapping[tuple[str, str], float] = QUIET, *, after: float = 0.0) -> Facts:
    history = MinuteCounts()
    history.add(0.0, dict.fromkeys(counts, 0.0))
    for minute in range(1, 6):
        history.add(60.0 * minute, counts if minute == 5 else dict.fromkeys(counts, 0.0))
    return Facts(NOW + after, values, history)


def test_every_alert_of_prometheus_is_judged_with_its_severity_and_duration_or_left_to_it() -> None:
    rules = [rule for group in yaml.safe_load(_FILE.read_text())["groups"] for rule in group["rules"] if "alert" in rule]
    known = {rule["alert"]: (rule["labels"]["severity"], parse_duration(rule["for"]) if "for" in rule else 0.0) for rule in rules}
    assert {name: (rule.severity, rule.hold) for name, rule in RULES.items()} == {
        name: values for name, values in known.items() if name not in LEFT_TO_PROMETHEUS
    }
    assert {rule.page.partition("?")[0] for rule in RULES.values()} <= set(PAGES)


def test_nothing_fires_while_all_is_well() -> None:
    assert Alerts().evaluated(facts()) == []


@pytest.mark.parametrize(
    ("name", "values", "counts"),
    [
        ("NoHealthyServer", {Series("ready_servers", ("m",)): 0}, {}),
        ("FailuresFast", {}, {("failures", "m"): 20}),
        ("FirstTokensFast", {}, {("late", "m"): 800}),
        ("ServerCrashLoop", {}, {("server_restarts", "s"): 3}),
        ("WorkerCrashLoop", {}, {("worker_restarts", ""): 3}),
        ("ReloadFailed", {Series("config_last_reload_successful", ()): 0}, {}),
        ("DependencyDown", {Series("dependency_up", ("key_store",)): 0}, {}),
        ("LedgerLoses", {}, {("ledger_dropped", ""): 1}),
        ("DirectUse", {}, {("direct_use", "m"): 1001}),
        ("KeyExpires", {Series("key_expires_timestamp_seconds", ("k",)): NOW + 86400}, {}),
        ("CertificateExpires", {Series("certificate_expires_timestamp_seconds", ("server.tls",)): NOW - 1}, {}),
        ("WrongModel", {Series("server_serves_model", ("m", "s")): 0}, {}),
        ("KeySetAway", {Series("key_set_up", ("https://issuer",)): 0}, {}),
        ("BudgetNearlyUsed", {Series("budget_used_ratio", ("k", "day", "false")): 0.9}, {}),
        ("SoftBudgetExceeded", {Series("budget_used_ratio", ("k", "day", "true")): 1.01}, {}),
        ("NoticesWait", {Series("notices_oldest_waiting_seconds", ("mail",)): 901}, {}),
        ("ContinuationsFail", {}, {("not_continued", "m"): 11}),
        ("QueueGrows", {}, {("queued", "m"): 4}),
        ("AuthFailures", {}, {("auth_failures", "unknown"): 400}),
    ],
)
def test_each_condition(name: str, values: dict[Series, float], counts: dict[tuple[str, str], float]) -> None:
    found = Alerts().evaluated(facts({**HEALTHY, **values}, {**QUIET, **counts}))
    assert [each.name for each in found] == [f"VllmGateway{name}"]


def test_a_key_that_is_not_served_is_named() -> None:
    starving = Unserved("m", "batch", "research", "nightly", 3, dispatched=1, of_model=7, since=0, seen=120)
    [found] = Alerts().evaluated(replace(facts(), unserved=[starving]))
    assert (found.name, found.summary) == (
        "VllmGatewayStarvation",
        "nightly waits for m and gets no service, while others do: 3 requests of batch.",
    )


def test_rows_in_memory_are_an_alert_only_while_nothing_stores_them() -> None:
    found = Alerts().evaluated(facts({**HEALTHY, Series("dependency_up", ("ledger_database",)): 0}))
    assert {each.name for each in found} == {"VllmGatewayDependencyDown", "VllmGatewayLedgerInMemory"}


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ({Series("ready_servers", ("m",)): 0, Series("server_out_of_rotation", ("m", "s")): 1}, {}),  # stopped by the gateway itself
        ({Series("dependency_up", ("certificate",)): 0}, {}),  # has its own alert
        ({}, {("requests", "m"): 100, ("failures", "m"): 9}),  # too few for a share to mean something
        ({}, {("continuations", "m"): 20}),  # too few as well
        ({Series("key_expires_timestamp_seconds", ("k",)): NOW - 1}, {}),  # has expired
    ],
)
def test_what_is_no_alert(values: dict[Series, float], counts: dict[tuple[str, str], float]) -> None:
    assert Alerts().evaluated(facts({**HEALTHY, **values}, {**QUIET, **counts})) == []


def test_an_alert_fires_after_its_duration_and_begins_again_after_it_was_resolved() -> None:
    alerts, down = Alerts(), {**HEALTHY, Series("ready_servers", ("m",)): 0}
    (first,) = alerts.evaluated(facts(down))
    assert (first.since, first.fires) == (NOW, NOW + 300)
    (later,) = alerts.evaluated(facts(down, after=400))
    assert later.since == NOW
    assert alerts.evaluated(facts(after=410)) == []
    (again,) = alerts.evaluated(facts(down, after=420))
    assert again.since == NOW + 420


def test_a_condition_of_many_holders_is_listed_in_part() -> None:
    many = {Series("budget_used_ratio", (f"k{number}", "day", "false")): 1.0 for number in range(1000)}
    assert len(Alerts().evaluated(facts({**HEALTHY, **many}))) == 50
