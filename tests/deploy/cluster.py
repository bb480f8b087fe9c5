"""A stand-in for a Kubernetes API server from which Helm reads the objects that exist: `lookup` in the chart's templates.

It knows the kinds that the chart makes, and returns the objects that a test has stored, Secrets with `data` only. It takes no writes.
"""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.chart import CHART, Manifest, Rendered, content, helm
from tests.support.http_server import threaded

_KINDS = {
    "v1": ("ConfigMap", "PersistentVolumeClaim", "Pod", "Secret", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "keda.sh/v1alpha1": ("ScaledObject",),
    "policy/v1": ("PodDisruptionBudget",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
}


class Cluster(ThreadingHTTPServer):
    """The server and what it stores."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.stored: dict[str, Manifest] = {}

    def store(self, *manifests: Manifest) -> None:
        """Keep objects as if they had been applied; an object of the same name is replaced."""
        self.stored |= {_path(each): _as_stored(each) for each in manifests}

    def render(self, folder: Path, values: Mapping[str, Any], chart: Path = CHART) -> subprocess.CompletedProcess[str]:
        """Render the chart as the release ``gw`` of the namespace ``llm``, as an upgrade would in this cluster. ``folder``: for a file."""
        arguments: list[str | Path] = ["--dry-run=server", "--disable-openapi-validation", "--kubeconfig", self._kubeconfig(folder)]
        return helm("template", "gw", chart, "--namespace", "llm", *arguments, values=values)

    def upgrade(self, folder: Path, values: Mapping[str, Any]) -> Rendered:
        """Render the chart, and store its objects."""
        done = self.render(folder, values)
        assert done.returncode == 0, done.stderr
        rendered = Rendered(tuple(each for each in yaml.safe_load_all(done.stdout) if each))
        self.store(*rendered.manifests)
        return rendered

    def _kubeconfig(self, folder: Path) -> Path:
        here: dict[str, Any] = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{self.server_port}"}}
        context = {"name": "here", "context": {"cluster": "here", "user": "here"}}
        config = {"apiVersion": "v1", "kind": "Config", "clusters": [here], "contexts": [context], "current-context": "here"}
        file = folder / "kubeconfig"
        file.write_text(yaml.safe_dump(config | {"users": [{"name": "here", "user": {}}]}))
        return file

    def response(self, path: str) -> Manifest | None:
        """Return the document at a path; None if it does not exist."""
        return {**_DISCOVERY, **self.stored}.get(path)


def _path(manifest: Manifest) -> str:
    version, metadata = manifest["apiVersion"], manifest["metadata"]
    return f"{_root(version)}/namespaces/{metadata['namespace']}/{manifest['kind'].lower()}s/{metadata['name']}"


def _as_stored(manifest: Manifest) -> Manifest:
    metadata = manifest["metadata"]
    owner = {"meta.helm.sh/release-name": "gw", "meta.helm.sh/release-namespace": metadata["namespace"]}
    stored = manifest | {"metadata": metadata | {"annotations": metadata.get("annotations", {}) | owner}}
    if manifest["kind"] != "Secret":
        return stored
    encoded = {name: base64.b64encode(text.encode()).decode() for name, text in content(manifest).items()}
    return {name: value for name, value in stored.items() if name != "stringData"} | {"data": encoded}


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _resources(version: str) -> Manifest:
    kinds = [
        {"name": f"{kind.lower()}s", "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get"]} for kind in _KINDS[version]
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": kinds}


def _group(version: str) -> Manifest:
    named = {"groupVersion": version, "version": version.partition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [named], "preferredVersion": named}


_DISCOVERY: dict[str, Manifest] = {
    "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.2"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(version) for version in _KINDS if "/" in version]},
    **{_root(version): _resources(version) for version in _KINDS},
}


class _Handler(BaseHTTPRequestHandler):
    server: Cluster

    def do_GET(self) -> None:
        found = self.server.response(self.path.partition("?")[0])
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        body = json.dumps(found or missing).encode()
        self.send_response(200 if found else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A running one without objects."""
    with threaded(Cluster()) as server:
        yield server
