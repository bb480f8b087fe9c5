"""The alerts for Prometheus over hours and days: each fires when it should, and resolves with its cause.

promtool evaluates the unchanged rules over series that are written here. test_alerts.py has the same alerts with real gateways.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.telemetry.metrics import FAMILIES, PREFIX
from tests.support.process import configuration, gateway, launched, wait_for
from tests.support.prometheus import prometheus

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yaml"
RUNBOOKS = DEPLOY.parent / "docs" / "alerts.md"
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule}


@dataclass(frozen=True, slots=True)
class Case:
    """A course of events. ``series``: by name, their values each ``every``; ``says``: words of the annotations."""

    alert: str
    series: Mapping[str, str]
    fires: str
    expires_at: str
    labels: Mapping[str, str] = field(default_factory=dict)
    says: tuple[str, str] = ("", "")
    every: str = "1m"


def _failing(bad: str, good: str) -> dict[str, str]:
    return {
        'vllm_gateway_requests_total{model="m", endpoint="/v1/completions", code="500"}': bad,
        'vllm_gateway_requests_total{model="m", endpoint="/v1/completions", code="200"}': good,
        'vllm_gateway_incomplete_total{model="m", reason="client"}': "0+50x600",
    }


def _broken(bad: str, good: str) -> dict[str, str]:
    return {
        'vllm_gateway_requests_total{model="m", endpoint="/v1/completions", code="200"}': good,
        'vllm_gateway_incomplete_total{model="m", reason="upstream"}': bad,
    }


def _continued(failed: str, continued: str) -> dict[str, str]:
    labels = 'model="m", path="token_ids", cause="moved"'
    counts = {"failed": failed, "continued": continued}
    return {f'vllm_gateway_continuations_total{{{labels}, outcome="{outcome}"}}': values for outcome, values in counts.items()}


def _late(soon: str, everything: str) -> dict[str, str]:
    name = "vllm_gateway_time_to_first_token_seconds"
    return {f'{name}_bucket{{model="m", le="2.5"}}': soon, f'{name}_count{{model="m"}}': everything}


def _queue(waiting: str, dispatched: str, of_others: str, in_flight: str = "0.0000001x60") -> dict[str, str]:
    batch, chat = (
        f'model="m", class="{name}", team="{team}", key="{key}"' for name, team, key in (("batch", "t", "nightly"), ("chat", "", "c"))
    )
    return {
        f"vllm_gateway_queue_waiting_requests{{{batch}}}": waiting,
        f"vllm_gateway_queue_requests_total{{{batch}}}": dispatched,
        f"vllm_gateway_queue_requests_total{{{chat}}}": of_others,
        f"vllm_gateway_queue_service_in_flight{{{batch}}}": in_flight,
    }


_M = {"model": "m"}
_WAITS = {"model": "m", "class": "batch", "team": "t", "key": "nightly"}
_SERVER = {"model": "m", "server": "m#0"}
_ROWS = 'vllm_gateway_ledger_spool_rows{instance="i"}'
_WRITTEN = 'vllm_gateway_ledger_rows_total{instance="i", outcome="written"}'
_BEHIND = (
    "At least {} rows have waited on disk for 15 minutes: more than the database stores in 10 seconds. Usage reports are late. "
    "Nothing is lost while the spool has space."
)
_MEMORY = "vllm_gateway_ledger_memory_rows"
_CERTIFICATE = "vllm_gateway_certificate_expires_timestamp_seconds"
_READY = 'vllm_gateway_ready_servers{model="m"}'
_OUT_OF_ROTATION = 'vllm_gateway_server_out_of_rotation{{model="m", server="m#{}"}}'
_NONE_READY = (
    "m: no server is ready",
    (
        "Its requests fail or wait. The gateway did not stop the servers itself: they crash, do not start, or cannot be reached. "
        "`vllm-gateway status` shows the reason for each."
    ),
)
_ON_I = 'instance="i"'
_I = {"instance": "i"}


def _fails(share: str, window: str, spent: str) -> tuple[str, str]:
    return (
        f"m: {share} of the requests fail",
        (
            f"Over the last {window}, clients got a 5xx or a truncated response. At this rate, the error budget of 30 days (0.1%) is used "
            f'in {spent}. The dashboard "Overview" shows the error codes.'
        ),
    )


def _starts_late(share: str, window: str, spent: str) -> tuple[str, str]:
    return (
        f"m: {share} of the streams start late",
        (
            f"Over the last {window}, their first token took more than 2.5 s. At this rate, the error budget of 30 days (5%) is used in "
            f'{spent}. The dashboard "vLLM and the gateway" shows where requests wait.'
        ),
    )


def _ledger(database: str, spool: str) -> dict[str, str]:
    return {
        f'vllm_gateway_dependency_up{{{_ON_I}, dependency="ledger_{name}"}}': up for name, up in (("database", database), ("spool", spool))
    }


CASES = (
    Case("VllmGatewayDown", {'up{job="vllm-gateway", instance="i"}': "1x4 0x10 1x10"}, "7m", "16m", {"job": "vllm-gateway", **_I},
         ("The gateway i does not respond",
          ("Prometheus cannot read its admin port, so it is probably down, and its clients get no responses. "
          "Check the process and its log."))),
    Case("VllmGatewayDown", {'up{job="vllm-gateway", instance="i"}': "1x4 _x10 1x10"}, "13m", "16m", {"job": "vllm-gateway"},
         ("Prometheus knows no gateway",
          "No target has the job vllm-gateway: no gateway runs, or service discovery does not find it. Check the process and its log.")),
    Case("VllmGatewayFailuresFast", _failing("0+10x70 700x200", "0+90x270"), "10m", "90m", _M, _fails("10%", "1h", "two days")),
    Case("VllmGatewayFailuresFast", _broken("0+10x70 700x200", "0+100x270"), "10m", "90m", _M, _fails("10%", "1h", "two days")),
    Case("VllmGatewayFailuresSlow", _failing("0+1x120 120x400", "0+99x520"), "60m", "200m", _M, _fails("1%", "6h", "five days")),
    Case("VllmGatewayFailuresSteady", _failing("0+1x600 600x800", "0+499x1400"), "30h", "70h", _M, _fails("0.2%", "3d", "30 days"),
         every="5m"),
    Case("VllmGatewayFirstTokensFast", _late("0+1x70 70+10x200", "0+10x270"), "10m", "100m", _M, _starts_late("90%", "1h", "two days")),
    Case("VllmGatewayFirstTokensSlow", _late("0+6x120 720+10x400", "0+10x520"), "60m", "200m", _M, _starts_late("40%", "6h", "five days")),
    Case("VllmGatewayFirstTokensSteady", _late("0+9x600 5400+10x800", "0+10x1400"), "30h", "70h", _M, _starts_late("10%", "3d", "30 days"),
         every="5m"),
    Case("VllmGatewayNoHealthyServer",
         {_READY: "2x4 0x20 1x10", _OUT_OF_ROTATION.format(0): "0x40", _OUT_OF_ROTATION.format(1): "0x40"},
         "12m", "28m", _M, _NONE_READY),
    Case("VllmGatewayNoHealthyServer", {_READY: "0x24 1x10"}, "6m", "28m", _M, _NONE_READY),  # discovery has found no server
    Case("VllmGatewayReloadFailed", {f"vllm_gateway_config_last_reload_successful{{{_ON_I}}}": "1x4 0x10 1x10"}, "7m", "17m", _I,
         ("i: the last configuration change was rejected",
          ("The previous configuration stays active, so requests are served, but the change has no effect. "
          "`vllm-gateway check` shows the problems."))),
    Case("VllmGatewayServerCrashLoop", {f'vllm_gateway_server_restarts_total{{{_ON_I}, model="m", server="m#0"}}': "0 1 2 3 4 5x60"},
         "8m", "30m", {**_SERVER, **_I},
         ("m#0 restarts repeatedly",
          ("i started it again 5 times in 15 minutes. Until it stays up, its model has less capacity, or none. "
          "`vllm-gateway status` shows its last failure."))),
    Case("VllmGatewayWorkerCrashLoop", {f"vllm_gateway_worker_restarts_total{{{_ON_I}}}": "0 1 2 3 4 5x60"}, "8m", "30m", _I,
         ("i: worker processes end unexpectedly",
          ("5 workers were replaced in 15 minutes. Each interrupted the requests that it served. The gateway's log and the kernel's log "
          "have the reason, often a lack of memory."))),
    Case("VllmGatewayDependencyDown", {f'vllm_gateway_dependency_up{{{_ON_I}, dependency="limits_store"}}': "1x4 0x20 1x10"}, "12m", "27m",
         {"dependency": "limits_store", **_I},
         ("i: limits_store is down",
          ("The gateway works on without it, with the restrictions that the runbook lists. "
          "`/status` shows the last error and since when."))),
    Case("VllmGatewayLedgerInMemory", _ledger("1x4 0x20 1x10", "1x4 0x10 1x20") | {f"{_MEMORY}{{{_ON_I}}}": "7x4 23x30"}, "8m", "18m", _I,
         ("i: usage is recorded in memory only",
          ("23 rows wait because neither the spool's disk nor the database accepts them. They may be lost if the gateway stops: free disk "
          "space or repair the database first."))),
    Case("VllmGatewayLedgerBehind", {_ROWS: "0x4 0+100x40 4000x40 0x10", _WRITTEN: "0x94"}, "30m", "90m", _I,
         ("i: the ledger falls behind", _BEHIND.format(1000))),
    Case("VllmGatewayLedgerBehind", {_ROWS: "0x4 4000x80 0x10", _WRITTEN: "0x4 0+6000x90"}, "80m", "90m", _I,
         ("i: the ledger falls behind", _BEHIND.format(4000))),
    Case("VllmGatewayLedgerLoses", {f'vllm_gateway_ledger_rows_total{{{_ON_I}, outcome="dropped"}}': "0x4 0+15x20 300x40",
          _ROWS: "4000x90"}, "20m", "60m", {"outcome": "dropped", **_I},
         ("i: the ledger loses rows",
          "225 rows of the last 15 minutes will never reach the database, so usage and budgets are too low. The log names the cause.")),
    Case("VllmGatewayDirectUse", {'vllm_gateway_unbilled_tokens_total{model="m", reason="direct_use"}': "0x9 4000x120"}, "30m", "80m", _M,
         ("m: requests reach its servers without the gateway",
          "They have used 4k tokens in an hour. No key, limit or ledger row applies to them. Let only the gateway reach the servers.")),
    Case("VllmGatewayKeyExpires", {'vllm_gateway_key_expires_timestamp_seconds{key="k"}': "1209600x400"}, "180h", "337h", {"key": "k"},
         ("The key k expires soon", "In 6d 12h 0m 0s, its requests will be rejected with 401. Rotate it, or tell its users."), every="1h"),
    Case("VllmGatewayCertificateExpires", {f'{_CERTIFICATE}{{{_ON_I}, setting="server.tls"}}': "1209600x340 4e6x20"},
         "180h", "345h", {"setting": "server.tls", **_I},
         ("i: the certificate of server.tls expires soon, or has expired",
          "In 6d 12h 0m 0s, clients will reject it. Renew the files: the gateway reads them again at once."), every="1h"),
    Case("VllmGatewayCertificateExpires", {f'{_CERTIFICATE}{{{_ON_I}, setting="server.tls"}}': "600x100 4e6x20"},
         "80m", "120m", {"setting": "server.tls", **_I},
         ("i: the certificate of server.tls expires soon, or has expired",
          "It has expired, and clients reject it. Renew the files: the gateway reads them again at once.")),
    Case("VllmGatewayWrongModel", {f'vllm_gateway_server_serves_model{{{_ON_I}, model="m", server="m#0"}}': "1x4 0x20 1x10"}, "12m", "27m",
         {**_SERVER, **_I},
         ("m#0 does not serve m",
          ("It lists other models only, so requests that it gets fail with 404. "
          "`/status` shows the names that it lists, and the setting to change."))),
    Case("VllmGatewayKeySetAway", {f'vllm_gateway_key_set_up{{{_ON_I}, issuer="j"}}': "1x4 0x30 1x10"}, "22m", "37m", {"issuer": "j", **_I},
         ("The keys of j cannot be fetched",
          ("i still accepts tokens signed with the keys that it knows. After a key change of the identity provider, new tokens get 401. "
          "`/status` has the reason."))),
    Case("VllmGatewayBudgetNearlyUsed",
         {'vllm_gateway_budget_used_ratio{holder="key a", budget="tokens_per_day", soft="false"}': "0.5x4 0.92x20 0x10"}, "12m", "27m",
         {"holder": "key a", "budget": "tokens_per_day"},
         ("key a: 92% of the budget tokens_per_day are used",
          "At 100%, requests are refused with 429 until the budget's window moves on. Raise the budget, or talk to its users.")),
    Case("VllmGatewaySoftBudgetExceeded",
         {'vllm_gateway_budget_used_ratio{holder="team t", budget="cost_per_7d", soft="true"}': "1x4 1.25x20 0x10"}, "12m", "27m",
         {"holder": "team t", "budget": "cost_per_7d"},
         ("team t: 125% of the soft budget cost_per_7d are used", "No request is refused. Raise the budget, or talk to its users.")),
    Case("VllmGatewayNoticesWait", {'vllm_gateway_notices_oldest_waiting_seconds{notice="ops"}': "0+60x20 0x10"}, "17m", "22m",
         {"notice": "ops"},
         ("ops: notices do not arrive",
          "The oldest has waited for 17m 0s. Users may not know about a budget that is nearly used, or a key that expires.")),
    Case("VllmGatewayContinuationsFail", _continued("0x9 0+1x40 40x60", "0+1x110"), "35m", "105m", _M,
         ("m: 41.67% of the lost streams could not be continued",
          "Their servers failed or were drained within the last hour, and their clients got an error event.")),
    Case("VllmGatewayQueueGrows", {'vllm_gateway_queued_requests{model="m"}': "0+5x20 100x40"}, "15m", "40m", _M,
         ("m: the queue grows",
          ("75 requests wait for a server, more than ten minutes ago. First tokens are late, and the queue refuses requests when it is "
          "full."))),
    Case("VllmGatewayStarvation", _queue("0x4 3x20 0x20", "0x60", "0+30x60"), "10m", "30m", _WAITS,
         ("m: the requests of nightly wait, and only others are served",
          ("3 requests of the key wait in the class batch. None was sent to a server in two minutes, while the model served others. "
          "Most often a strict class takes all capacity."))),
    Case("VllmGatewayAuthFailures", {'vllm_gateway_auth_failures_total{reason="invalid"}': "0+1x90 90+600x20 12090+1x60"}, "103m", "125m",
         {"reason": "invalid"},
         ("Many requests are rejected for their key (invalid)",
          "10 requests a second, more than five times as many as in the hour before: a client with an old key, or an attack.")),
)  # fmt: skip

QUIET = {
    "a model that rests": ("VllmGatewayNoHealthyServer", {_READY: "0x60", _OUT_OF_ROTATION.format(0): "1x60"}),
    "one of two servers": (
        "VllmGatewayNoHealthyServer",
        {_READY: "1x60", _OUT_OF_ROTATION.format(0): "0x60", _OUT_OF_ROTATION.format(1): "0x60"},
    ),
    "a model that another gateway serves": (
        "VllmGatewayNoHealthyServer",
        {'vllm_gateway_ready_servers{model="m", instance="a"}': "0x60", 'vllm_gateway_ready_servers{model="m", instance="b"}': "1x60"},
    ),
    "clients that leave": ("VllmGatewayFailuresFast", _failing("0x60", "0+100x60")),
    "a queue that is worked off": ("VllmGatewayQueueGrows", {'vllm_gateway_queued_requests{model="m"}': "300-5x60"}),
    "rows that are on their way": ("VllmGatewayLedgerBehind", {_ROWS: "7 0 9 12 0 3 8 5x10 0 4x10 0 9x14 0 6x20", _WRITTEN: "0+60x60"}),
    "rows that are gathered": ("VllmGatewayLedgerBehind", {_ROWS: "400x60", _WRITTEN: "0+9000x60"}),
    "rows that are written, and told as lost": (
        "VllmGatewayLedgerLoses",
        {
            f'vllm_gateway_ledger_rows_total{{outcome="{outcome}"}}': values
            for outcome, values in (("written", "0+90x60"), ("dropped", "0x60"))
        },
    ),
    "an identity provider that is away, which has an alert of its own": (
        "VllmGatewayDependencyDown",
        {'vllm_gateway_dependency_up{dependency="identity_provider"}': "0x60"},
    ),
    "rows in memory on their way to the disk": ("VllmGatewayLedgerInMemory", _ledger("0x60", "1x60") | {_MEMORY: "50x60"}),
    "tokens that clients did not wait for": (
        "VllmGatewayDirectUse",
        {
            f'vllm_gateway_unbilled_tokens_total{{model="m", reason="{reason}"}}': values
            for reason, values in (("not_delivered", "0+9000x60"), ("cancelled_prefill", "0+9000x60"), ("direct_use", "0+1x60"))
        },
    ),
    "one error in two requests": ("VllmGatewayFailuresFast", _failing("0x5 1x60", "0x5 1x60")),
    "nine truncated responses": ("VllmGatewayFailuresFast", _broken("0x5 9x60", "0x5 90x60")),
    "nine late streams": ("VllmGatewayFirstTokensFast", _late("0x60", "0x5 9x60")),
    "keys that all wait": ("VllmGatewayStarvation", _queue("3x60", "0x60", "0x60")),
    "a key that is served while it waits": ("VllmGatewayStarvation", _queue("3x60", "0+1x60", "0+90x60")),
    "a key whose request runs for long": ("VllmGatewayStarvation", _queue("3x60", "1x60", "0+90x60", "800x60")),
    "nine streams that were not continued": ("VllmGatewayContinuationsFail", _continued("0x5 9x60", "0x60")),
    "most streams are continued": ("VllmGatewayContinuationsFail", _continued("0+1x60", "0+20x60")),
    "a short queue": ("VllmGatewayQueueGrows", {'vllm_gateway_queued_requests{model="m"}': "0x5 0+1x8 9x60"}),
    "two restarts": ("VllmGatewayServerCrashLoop", {'vllm_gateway_server_restarts_total{model="m", server="m#0"}': "5x5 6 7x60"}),
    "a few wrong keys": ("VllmGatewayAuthFailures", {'vllm_gateway_auth_failures_total{reason="invalid"}': "0+30x60"}),
    "a soft budget that is nearly used": (
        "VllmGatewayBudgetNearlyUsed",
        {'vllm_gateway_budget_used_ratio{holder="key a", budget="tokens_per_day", soft="true"}': "0.95x60"},
    ),
    "a certificate that is renewed in time": (
        "VllmGatewayCertificateExpires",
        {f'{_CERTIFICATE}{{setting="server.tls"}}': "700000x60"},
    ),
    "an expired certificate, which has an alert of its own": (
        "VllmGatewayDependencyDown",
        {'vllm_gateway_dependency_up{dependency="certificate"}': "0x60"},
    ),
    "a key that has expired": ("VllmGatewayKeyExpires", {'vllm_gateway_key_expires_timestamp_seconds{key="k"}': "60x60"}),
}


def evaluated(tmp_path: Path, series: Mapping[str, str], every: str, checks: list[dict[str, Any]]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    document = {
        "rule_files": [str(RULES)],
        "evaluation_interval": every,
        "tests": [{"interval": every, "input_series": inputs, "alert_rule_test": checks}],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump(document))
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_and_resolves(tmp_path: Path, case: Case) -> None:
    annotations = dict(zip(("summary", "description"), case.says, strict=True))
    annotations["runbook_url"] = ALERTS[case.alert]["annotations"]["runbook_url"]
    expected = {"exp_labels": {**case.labels, **ALERTS[case.alert]["labels"]}, "exp_annotations": annotations}
    checks: list[dict[str, Any]] = [
        {"alertname": case.alert, "eval_time": "0m", "exp_alerts": []},
        {"alertname": case.alert, "eval_time": case.fires, "exp_alerts": [expected]},
        {"alertname": case.alert, "eval_time": case.expires_at, "exp_alerts": []},
    ]
    evaluated(tmp_path, case.series, case.every, checks)


@pytest.mark.parametrize("what", QUIET)
def test_what_is_no_cause_does_not_fire(tmp_path: Path, what: str) -> None:
    alert, series = QUIET[what]
    evaluated(tmp_path, series, "1m", [{"alertname": alert, "eval_time": f"{minutes}m", "exp_alerts": []} for minutes in range(0, 60, 3)])


def test_every_alert_is_tried() -> None:
    assert {case.alert for case in CASES} == set(ALERTS)
    assert all(rule["labels"]["severity"] in ("critical", "warning") for rule in ALERTS.values())


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    sections = {line.removeprefix("## ").lower().replace(" ", "-") for line in RUNBOOKS.read_text().splitlines() if line.startswith("## ")}
    links = {rule["annotations"]["runbook_url"].removeprefix("docs/alerts.md#") for rule in ALERTS.values()}
    assert links == sections - {"objectives"}
    table = dict(re.findall(r"^\| (`V.+?) \|.*\(#([a-z-]+)\) \|$", RUNBOOKS.read_text(), re.MULTILINE))
    for names, anchor in table.items():
        for name in re.findall(r"`(\w+)`", names):
            assert ALERTS[name]["annotations"]["runbook_url"] == f"docs/alerts.md#{anchor}"


def test_rules_name_metrics_that_exist() -> None:
    recorded = {rule["record"] for group in GROUPS for rule in group["rules"] if "record" in rule}
    named = {name for group in GROUPS for rule in group["rules"] for name in re.findall(r"[\w:]*vllm_gateway_\w+(?::\w+)?", rule["expr"])}
    known = {PREFIX + name + end for name in FAMILIES for end in ("", "_bucket", "_count", "_sum")}
    assert named - recorded - known == set()


@pytest.mark.parametrize(("check", "file"), [("rules", "rules.yaml"), ("config", "prometheus.yaml")])
def test_promtool_finds_nothing_wrong(check: str, file: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run([promtool, "check", check, DEPLOY / "prometheus" / file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "FAILED" not in done.stdout, done.stdout + done.stderr


def test_prometheus_reads_an_admin_port_that_asks_for_its_token(tmp_path: Path) -> None:
    """By what the configuration has as comments."""
    token = tmp_path / "token"
    token.write_text("a-token-for-prometheus\n")
    config = configuration(launched(), admin={"port": 0, "token": {"file": str(token)}})
    with gateway(tmp_path, config) as one, prometheus(tmp_path, one, token=token) as watching:
        wait_for(lambda: _up(watching.targets()) == {"vllm-gateway", "vllm"}, 60, why=lambda: f"{watching.targets()}")


def _up(targets: list[dict[str, Any]]) -> set[str]:
    """The jobs of those that answer."""
    return {target["labels"]["job"] for target in targets if target["health"] == "up"}


def test_the_alertmanagers_routes_lead_to_receivers_and_know_the_severities() -> None:
    document = yaml.safe_load((DEPLOY / "alertmanager" / "alertmanager.yaml").read_text())
    receivers = {receiver["name"] for receiver in document["receivers"]}
    routes = [document["route"], *document["route"]["routes"]]
    assert {route["receiver"] for route in routes} == receivers
    assert ['severity="critical"'] in [route.get("matchers") for route in routes]
    assert re.search(r'alertname="(\w+)"', document["inhibit_rules"][0]["source_matchers"][0])[1] in ALERTS  # type: ignore[index]


def test_one_gateway_that_is_away_mutes_its_own_alerts_alone() -> None:
    """Alertmanager treats a missing label as an empty one, so an alert without an instance is never muted."""
    (rule,) = yaml.safe_load((DEPLOY / "alertmanager" / "alertmanager.yaml").read_text())["inhibit_rules"]
    assert {"cluster", "instance"} <= set(rule["equal"])
