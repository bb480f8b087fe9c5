"""The chart as the tests see it: rendered by Helm, taken apart, and put where a process of this machine finds it."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.install import tool

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "vllm-gateway"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
Manifest = dict[str, Any]
_APIS = ("monitoring.coreos.com/v1", "keda.sh/v1alpha1", "gateway.networking.k8s.io/v1")


def program(name: str) -> str:
    """A tool's program. Skips the test where it is not installed."""
    found = tool(name)
    if found is None:
        pytest.skip(f"{name} is not installed (make deploy-tools)")
    return str(found)


def helm(*arguments: str | Path, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Run Helm; ``values`` come after those that the words name."""
    given = ["--values", "-"] if values is not None else []
    text = None if values is None else json.dumps(values)
    return subprocess.run([program("helm"), *map(str, arguments), *given], input=text, capture_output=True, text=True, timeout=100)


def template(*files: Path, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Render the chart as the release ``gw`` of the namespace ``llm``."""
    more = [argument for file in files for argument in ("--values", file)]
    apis = [argument for api in _APIS for argument in ("--api-versions", api)]
    return helm("template", "gw", CHART, "--namespace", "llm", *apis, *more, values=values or {})


@dataclass(frozen=True, slots=True)
class Rendered:
    """The manifests for some values."""

    manifests: tuple[Manifest, ...]

    @classmethod
    def of(cls, *files: Path, values: Mapping[str, Any] | None = None) -> Rendered:
        done = template(*files, values=values)
        assert done.returncode == 0, done.stderr
        return cls(tuple(each for each in yaml.safe_load_all(done.stdout) if each))

    def all(self, kind: str) -> list[Manifest]:
        return [each for each in self.manifests if each["kind"] == kind]

    def one(self, kind: str, name: str = "gw-vllm-gateway") -> Manifest:
        (found,) = [each for each in self.all(kind) if each["metadata"]["name"] == name]
        return found

    def workloads(self) -> dict[str, Manifest]:
        """Every Deployment and StatefulSet, by its component."""
        found = [*self.all("Deployment"), *self.all("StatefulSet")]
        return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in found}

    def workload(self, component: str = "gateway") -> Manifest:
        return self.workloads()[component]

    def pod(self, component: str = "gateway") -> dict[str, Any]:
        """The specification of a workload's pods."""
        spec: dict[str, Any] = self.workload(component)["spec"]["template"]["spec"]
        return spec

    def container(self, component: str = "gateway") -> dict[str, Any]:
        (container,) = self.pod(component)["containers"]
        return dict(container)

    @property
    def config(self) -> dict[str, Any]:
        """The gateway's configuration."""
        return dict(yaml.safe_load(self.one("ConfigMap")["data"]["gateway.yaml"]))

    def mount(self, root: Path, secrets: Iterable[Manifest] = (), component: str = "gateway") -> None:
        """Write below ``root`` what a component's container finds mounted; ``secrets`` are those that the chart does not make."""
        there = {each["metadata"]["name"]: each for each in (*self.all("Secret"), *secrets)}
        volumes = {each["name"]: each for each in self.pod(component)["volumes"]}
        for target in self.container(component)["volumeMounts"]:
            folder = root / target["mountPath"].lstrip("/")
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in _files(volumes.get(target["name"], {}), there, self):
                folder.joinpath(name).write_text(text)


def _files(volume: dict[str, Any], secrets: Mapping[str, Manifest], rendered: Rendered) -> Iterator[tuple[str, str]]:
    if "configMap" in volume:
        yield from rendered.one("ConfigMap", volume["configMap"]["name"])["data"].items()
    if "secret" in volume:
        data = content(secrets[volume["secret"]["secretName"]])
        yield from ((item["path"], data[item["key"]]) for item in volume["secret"]["items"])


def content(secret: Manifest) -> dict[str, str]:
    """A Secret's texts."""
    encoded = {name: base64.b64decode(text).decode() for name, text in secret.get("data", {}).items()}
    return encoded | dict(secret.get("stringData", {}))


def judged(cases: Mapping[str, Rendered]) -> dict[str, list[str]]:
    """Return the violations of the schemas in the manifests of each case."""
    checker = Path(__file__).with_name("manifests.py")
    given = json.dumps({name: rendered.manifests for name, rendered in cases.items()}, default=str)
    done = subprocess.run([program("kubernetes"), checker], input=given, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))
