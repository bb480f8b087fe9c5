"""Every alert fires and resolves: two gateways with two teams are broken in every way, then repaired, while a real Prometheus evaluates.

The rules are those of deploy/, with their durations shortened so that minutes become seconds: each range and offset is ``RANGE`` and each
``for`` is one second. Thresholds and minimum volumes are unchanged. test_rules.py has the unchanged durations, over written series.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import yaml

from gateway.auth import keys
from tests.deploy.test_dashboards import BUILD, substituted
from tests.deploy.test_rules import ALERTS, RULES
from tests.support import certificates, full_disk
from tests.support.full_disk import Disk
from tests.support.issuer import AUDIENCE, Issuer, Published, published
from tests.support.ports import refusing
from tests.support.process import PROGRAM, Gateway, configuration, gateway, launched, wait_for, write
from tests.support.prometheus import Prometheus, prometheus
from tests.support.running import KEY
from tests.support.simulated import simulated
from tests.support.webhooks import Receiver, receiver

RANGE = "20s"
BUDGET = 1000
"""Tokens a day of the key whose budget is nearly used."""
SPENDER = "sk-a-key-with-a-budget"
NIGHTLY = "sk-a-key-in-a-late-class"
SPOOLED = "vllm_gateway_ledger_spool_rows"
REQUESTS = 12
"""More than the minimum volume of ten."""
ONE, BUSY, WRONG, UNREACHABLE, LAUNCHED = "sim/one", "sim/busy", "sim/wrong", "sim/away", "sim/launched"
LOST: dict[str, Any] = {"model": "sim/lost", "stream": True, "temperature": 0, "simulate": {"cut_after": 3}}
"""A stream that loses its server, and no other server is up."""


def shortened(folder: Path) -> Path:
    """Write the rules with short durations."""
    document = yaml.safe_load(RULES.read_text())
    for rule in (rule for group in document["groups"] for rule in group["rules"]):
        rule["expr"] = re.sub(r"\[\d+[mhd]\]", f"[{RANGE}]", re.sub(r"offset \d+m", f"offset {RANGE}", rule["expr"]))
        if "for" in rule:
            rule["for"] = "1s"
        if rule.get("alert") == "VllmGatewayNoticesWait":
            rule["expr"] = rule["expr"].replace("900", "3")
    file = folder / "rules.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


@dataclass
class Scene:
    """Two gateways, with the means to break and to repair them."""

    one: Gateway
    other: Gateway
    repaired: dict[str, Any]
    disk: Disk
    engine: str
    issuer: Published
    hook: Receiver
    watching: Prometheus

    def fired(self) -> set[str]:
        """Return the alerts that have fired."""
        return self._names('last_over_time(ALERTS{alertstate="firing"}[10m])')

    def firing(self) -> set[str]:
        return self._names('ALERTS{alertstate="firing"}')

    def _names(self, query: str) -> set[str]:
        return {series["metric"]["alertname"] for series in self.watching.query(query)}

    def wait_until_fired(self, alerts: set[str]) -> None:
        wait_for(lambda: alerts <= self.fired(), 60, why=lambda: f"missing: {alerts - self.fired()}")


def broken(engine: str, other_engine: str, unreachable: str, hook: Receiver, issuer: Published) -> dict[str, Any]:
    """Return the configuration of the first gateway, with everything that a configuration can break."""
    config = configuration(
        {"id": ONE, "servers": [{"url": engine}]},
        {"id": BUSY, "servers": [{"url": other_engine, "model": "sim/other"}], "max_inflight": 1},
        {"id": WRONG, "servers": [{"url": other_engine}]},
        {"id": UNREACHABLE, "servers": [{"url": unreachable}]},
        {"id": LOST["model"], "servers": [{"url": each, "model": "sim/other"} for each in (other_engine, unreachable)]},
    )
    soon = (datetime.now(UTC) + timedelta(days=2)).strftime("%Y-%m-%d")
    config["keys"][0] |= {"team": "research", "expires": soon}
    config["keys"].append({"id": "spender", "hash": keys.hash_of(SPENDER), "team": "support", "limits": {"tokens_per_day": BUDGET}})
    config["teams"] = [
        {"id": "research", "limits": {"tokens_per_day": 10**9}},
        {"id": "support", "limits": {"budgets": [{"window": "day", "tokens": BUDGET // 2, "soft": True}]}},
    ]
    config["classes"] = [{"id": "chat", "strict": True}, {"id": "nightly"}]
    config["keys"][0]["class"] = "chat"
    config["keys"].append({"id": "nightly", "hash": keys.hash_of(NIGHTLY), "class": "nightly"})
    config["notices"] = [{"name": "ops", "webhook": hook.url, "for": ["team", "key"]}]
    config["jwt"] = [{"issuer": issuer.issuer.name, "audience": AUDIENCE, "jwks": issuer.url, "keys": "team-a", "refresh": "500ms"}]
    return config


def repaired(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with all mistakes corrected."""
    good = deepcopy(config)
    good["models"][2]["servers"][0]["model"] = "sim/other"
    good["models"][3]["servers"] = good["models"][1]["servers"]
    good["keys"][0]["expires"] = (datetime.now(UTC) + timedelta(days=90)).strftime("%Y-%m-%d")
    good["keys"][1]["limits"]["tokens_per_day"] = 10**9
    good["teams"][1]["limits"]["budgets"][0]["tokens"] = 10**9
    return good


def second(folder: Path) -> dict[str, Any]:
    """Return the configuration of the second gateway."""
    tls = {"cert": str(folder / "cert.pem"), "key": str(folder / "key.pem")}
    return configuration(launched(LAUNCHED), tls=tls) | {"ledger": f"sqlite:///{folder}/vllm-gateway/ledger/usage.db"}


def certify(folder: Path, days: int) -> None:
    """Create a certificate that expires in some days."""
    certificates.dated(folder, datetime.now(UTC) - timedelta(days=1), datetime.now(UTC) + timedelta(days=days))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    if not full_disk.allowed():
        pytest.skip(full_disk.NOT_ALLOWED)
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    ledgers = [folder / "vllm-gateway" / "ledger" for folder in folders]
    with ExitStack() as stack:
        engine, other_engine = (f"http://127.0.0.1:{stack.enter_context(simulated(model))}" for model in (ONE, "sim/other"))
        hook = stack.enter_context(receiver(share=1.0))
        issuer = stack.enter_context(published(Issuer()))
        issuer.status = 500
        config = broken(engine, other_engine, f"http://127.0.0.1:{stack.enter_context(refusing())}", hook, issuer)
        config["ledger"] = {"url": f"sqlite:///{ledgers[0]}/usage.db", "sample_interval": "100ms"}
        write(folders[0] / "gateway.yaml", config)
        one = replace(stack.enter_context(gateway(folders[0], None, line=full_disk.line(folders[0], ledgers[0]))), program=PROGRAM)
        certify(folders[1], days=2)
        ledgers[1].mkdir(parents=True)
        other = stack.enter_context(gateway(folders[1], second(folders[1])))
        watching = stack.enter_context(prometheus(folders[0], one, other, rules=shortened(folders[0])))
        yield Scene(one, other, repaired(config), Disk(one, ledgers[0]), engine, issuer, hook, watching)


def send(one: Gateway, model: str = ONE, token: str = KEY, *, scheme: str = "http", timeout: float = 30, **body: Any) -> dict[str, Any]:
    """Send a request; a failure is a result, too. Return the usage."""
    document = {"model": model, "messages": [{"role": "user", "content": "Hello"}], **body}
    headers = {"authorization": f"Bearer {token}"}
    url = f"{scheme}://127.0.0.1:{one.data}/v1/chat/completions"
    with suppress(httpx2.HTTPError, json.JSONDecodeError):
        response = httpx2.post(url, json=document, headers=headers, timeout=timeout, verify=False, trust_env=False)
        return dict(response.json().get("usage") or {})
    return {}


def bypass(scene: Scene) -> None:
    """Use a server without the gateway."""
    body = {"model": ONE, "messages": [{"role": "user", "content": "Hello"}], "simulate": {"tokens": 1500, "tokens_per_second": 0}}
    assert httpx2.post(f"{scene.engine}/v1/chat/completions", json=body, timeout=30, trust_env=False).status_code == 200


def spend(scene: Scene) -> None:
    """Use 95% of a budget."""
    used = send(scene.one, token=SPENDER, max_tokens=500, simulate={"tokens": 500, "tokens_per_second": 0})
    rest = int(BUDGET * 0.95) - used["total_tokens"] - used["prompt_tokens"]
    assert send(scene.one, token=SPENDER, max_tokens=rest, simulate={"tokens": rest, "tokens_per_second": 0})


def kill_repeatedly(one: Gateway, find: Callable[[], Iterable[int]], restarts: str) -> None:
    """Kill processes three times, each time as soon as they have been started again."""
    for number in range(1, 4):
        for pid in wait_for(lambda: list(find())):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: one.metric(restarts) >= number)  # noqa: B023  it is called at once


def test_every_alert_fires_and_resolves(scene: Scene) -> None:
    one, other, ledger = scene.one, scene.other, scene.other.folder / "vllm-gateway" / "ledger"
    wait_for(lambda: sum(target["health"] == "up" for target in scene.watching.targets()) >= 4, 60)
    send(one)
    send(one, simulate={"status": 500})  # the series of an error begins with the first one, which `increase` does not see
    send(one, **LOST)
    wait_for(lambda: one.get("/usage").json()["usage"], 30)
    bypass(scene)
    spend(scene)
    (other.folder / "gateway.yaml").write_text("models: no list\n")
    assert other.command("reload").returncode != 0
    with (
        ThreadPoolExecutor(5 * REQUESTS) as clients,
        closing(sqlite3.connect(ledger / "usage.db", isolation_level=None)) as database,
    ):
        database.execute("BEGIN IMMEDIATE")  # as a backup or a stuck migration does: rows wait on disk
        for _ in range(3):
            send(other, LAUNCHED, scheme="https")
        restarts = f'vllm_gateway_server_restarts_total{{model="{LAUNCHED}",server="{LAUNCHED}#0"}}'
        killing = (  # the pauses before restarts grow: three restarts take some seconds
            clients.submit(kill_repeatedly, other, lambda: [each.pid for each in other.named("upstream.simulator")], restarts),
            clients.submit(kill_repeatedly, other, lambda: other.workers().values(), "vllm_gateway_worker_restarts_total"),
        )
        scene.wait_until_fired({"VllmGatewayDirectUse", "VllmGatewayNoticesWait"})  # both need the database of the first gateway
        scene.hook.share = 0.0

        scene.disk.fill()
        slow = {"time_to_first_token": 2.6, "tokens": 3}
        for _ in range(REQUESTS):
            clients.submit(send, one, simulate={"status": 500})
            clients.submit(send, one, stream=True, simulate=slow)
            clients.submit(send, one, **LOST)
            clients.submit(send, one, BUSY, simulate={"time_to_first_token": 2.4})
        wait_for(lambda: one.metric(f'vllm_gateway_queued_requests{{model="{BUSY}"}}') > REQUESTS / 2)
        clients.submit(send, one, BUSY, NIGHTLY)  # waits until all of them are served
        for _ in range(4 * REQUESTS):
            clients.submit(send, one, token="sk-unknown")
        for each in killing:
            each.result()
        scene.wait_until_fired(set(ALERTS) - {"VllmGatewayDown", "VllmGatewayLedgerLoses"})
        active = [alert["annotations"] for rule in scene.watching.rules() for alert in rule.get("alerts", ())]
        assert active and not [text for each in active for text in each.values() if "<" in text], "a template failed"
        marked = next(query for name, _, query, _ in BUILD["ANNOTATIONS"] if name == "Firing alerts")
        assert scene.watching.query(substituted(marked))

        waiting = other.metric(SPOOLED)
        wait_for(lambda: send(other, LAUNCHED, scheme="https") and other.metric(SPOOLED) > waiting, 60)
        for file in ledger.rglob("*.rows"):  # as a disk that loses files; rows on their way to the database are not lost with them
            file.unlink()
        database.rollback()
    control = psutil.Process(other.process.pid)
    control.suspend()
    try:
        scene.wait_until_fired(set(ALERTS) - {"VllmGatewayLedgerLoses"})
    finally:
        control.resume()
    scene.wait_until_fired(set(ALERTS))

    scene.disk.free()
    scene.issuer.status = 200
    write(one.folder / "gateway.yaml", scene.repaired)
    assert one.command("reload").returncode == 0
    certify(other.folder, days=90)
    write(other.folder / "gateway.yaml", second(other.folder))
    assert other.command("reload").returncode == 0
    wait_for(lambda: not scene.firing(), 90, why=lambda: f"still firing: {scene.firing()}")


def test_only_durations_are_shortened(tmp_path: Path) -> None:
    def plain(text: str) -> str:
        return re.sub(r"\[\w+\]|offset \w+|\b900\b|\b3\b", "", text)

    changed = [rule for group in yaml.safe_load(shortened(tmp_path).read_text())["groups"] for rule in group["rules"]]
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    for short, rule in zip(changed, rules, strict=True):
        assert plain(short["expr"]) == plain(rule["expr"])
        assert {**short, "expr": "", "for": ""} == {**rule, "expr": "", "for": ""}
