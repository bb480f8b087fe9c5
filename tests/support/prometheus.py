"""Run a real Prometheus with the configuration in deploy/, but with shorter intervals, against running gateways and their servers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx2
import pytest
import yaml

from tests.support.ports import reserved
from tests.support.process import Gateway, wait_for

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yaml"
NO_LABELS: Mapping[str, str] = MappingProxyType({})


@dataclass
class Prometheus:
    """A running Prometheus."""

    port: int

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the current result vector of an expression."""
        return self._data("query", {"query": expression})["result"]  # type: ignore[no-any-return]

    def range(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Return the values of an expression over a range. Times are in seconds since 1970."""
        parameters = {"query": expression, "start": str(start), "end": str(end), "step": str(step)}
        return self._data("query_range", parameters)["result"]  # type: ignore[no-any-return]

    def targets(self) -> list[dict[str, Any]]:
        """Return the active scrape targets."""
        return self._data("targets", {"state": "active"})["activeTargets"]  # type: ignore[no-any-return]

    def names(self) -> set[str]:
        """Return the names of all stored metrics."""
        return set(self._get("label/__name__/values", {}))

    def rules(self) -> list[dict[str, Any]]:
        """Return all rules with their health."""
        return [rule for group in self._data("rules", {})["groups"] for rule in group["rules"]]

    def _data(self, path: str, parameters: Mapping[str, str]) -> dict[str, Any]:
        return self._get(path, parameters)  # type: ignore[no-any-return]

    def _get(self, path: str, parameters: Mapping[str, str]) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}"
        response = httpx2.get(url, params=dict(parameters), timeout=30, verify=False, trust_env=False).json()
        assert response["status"] == "success", response
        return response["data"]


@contextmanager
def prometheus(
    folder: Path,
    *gateways: Gateway,
    every: str = "1s",
    token: Path | None = None,
    rules: Path = RULES,
    labels: Mapping[str, str] = NO_LABELS,
) -> Iterator[Prometheus]:
    """Run Prometheus with the configuration in deploy/ and the gateways' ports. Skip the test if Prometheus is not installed.

    ``token``: the file with the token of the admin ports, if they require one. ``labels`` are added to all but the first gateway, as
    Kubernetes adds its own.
    """
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian: prometheus)")
    file = folder / "prometheus.yaml"
    file.write_text(yaml.safe_dump(configuration(gateways, every, token, rules, labels)))
    with reserved() as port, open(folder / "prometheus.log", "wb") as log:
        options = [f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"]
        process = subprocess.Popen([program, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            wait_for(lambda: _ready(port) or process.poll() is not None, 60)
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            yield Prometheus(port)
        finally:
            process.terminate()
            process.wait(30)


def configuration(gateways: Sequence[Gateway], every: str, token: Path | None, rules: Path, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return deploy/prometheus/prometheus.yaml for these gateways. With a token, the commented authorization is enabled."""
    text = (DEPLOY / "prometheus" / "prometheus.yaml").read_text()
    if token is not None:
        text = text.replace("# authorization:", "authorization:").replace("/etc/prometheus/vllm-gateway.token", str(token))
    documents = [yaml.safe_load(text.replace("127.0.0.1:9090", f"127.0.0.1:{gateway.admin}")) for gateway in gateways]
    document: dict[str, Any] = documents[0]
    for number, other in enumerate(documents[1:], 2):
        for job in other["scrape_configs"]:
            added = {"job": job["job_name"], **labels}
            job["relabel_configs"] = [{"target_label": name, "replacement": value} for name, value in added.items()]
            document["scrape_configs"].append(job | {"job_name": f"{job['job_name']}-{number}"})
    document["global"] = {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every}
    document["rule_files"] = [str(rules)]
    del document["alerting"]
    for job in document["scrape_configs"]:
        for discovery in job.get("http_sd_configs", ()):
            discovery["refresh_interval"] = every
    return document


def _ready(port: int) -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/-/ready", timeout=10, verify=False, trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False
