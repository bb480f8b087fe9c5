"""Generate the chart's derived files: ``python deploy/helm/sync.py``.

Owns values.schema.json, README.md and files/ of the chart. The rule: every fact has one source. A value's description is in values.yaml,
its type is that of its default unless TYPES overrides it, `config` is the gateway's own schema, alerts and dashboards are those of deploy/.
A test compares the files with the generated ones.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gateway.config.models import Config

DEPLOY = Path(__file__).resolve().parents[1]
CHART = DEPLOY / "helm" / "vllm-gateway"
Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FREE: Schema = {"type": "object"}
_STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_DURATION: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(ms|s|m|h|d)$"}
_PULL: Schema = {"enum": ["Always", "IfNotPresent", "Never"]}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_VARIABLES = _list(_object(name=_TEXT, value=_TEXT, valueFrom=_FREE) | {"required": ["name"]})
_VOLUMES = _list({"type": "object", "required": ["name"]})
_MOUNTS = _list(
    _object(name=_TEXT, mountPath=_TEXT, subPath=_TEXT, subPathExpr=_TEXT, readOnly=_FLAG, mountPropagation=_TEXT)
    | {"required": ["name", "mountPath"]}
)
_TOLERATIONS = _list(_object(key=_TEXT, operator=_TEXT, value=_TEXT, effect=_TEXT, tolerationSeconds={"type": "integer"}))
_AFFINITY = _object(nodeAffinity=_FREE, podAffinity=_FREE, podAntiAffinity=_FREE)
_RESOURCES = _object(requests=_FREE, limits=_FREE, claims=_list(_FREE))
_IDENTITY: dict[str, Schema] = {
    "runAsNonRoot": _FLAG,
    "runAsUser": _COUNT,
    "runAsGroup": _COUNT,
    "seccompProfile": _object(type=_TEXT, localhostProfile=_TEXT),
    "appArmorProfile": _object(type=_TEXT, localhostProfile=_TEXT),
    "seLinuxOptions": _object(level=_TEXT, role=_TEXT, type=_TEXT, user=_TEXT),
}
_POD_CONTEXT = _object(
    **_IDENTITY,
    fsGroup=_COUNT,
    fsGroupChangePolicy={"enum": ["Always", "OnRootMismatch"]},
    supplementalGroups=_list(_COUNT),
    supplementalGroupsPolicy=_TEXT,
    seLinuxChangePolicy=_TEXT,
    sysctls=_list(_object(name=_TEXT, value=_TEXT)),
)
_CONTEXT = _object(
    **_IDENTITY,
    allowPrivilegeEscalation=_FLAG,
    privileged=_FLAG,
    readOnlyRootFilesystem=_FLAG,
    capabilities=_object(add=_list(_TEXT), drop=_list(_TEXT)),
    procMount=_TEXT,
)
_SPREAD = _object(
    maxSkew=_COUNT,
    minDomains=_COUNT,
    topologyKey=_TEXT,
    whenUnsatisfiable={"enum": ["DoNotSchedule", "ScheduleAnyway"]},
    labelSelector=_object(matchLabels=_STRINGS, matchExpressions=_list(_FREE)),
    matchLabelKeys=_list(_TEXT),
    nodeAffinityPolicy=_TEXT,
    nodeTaintsPolicy=_TEXT,
)
_STRATEGY = _object(type={"enum": ["RollingUpdate", "Recreate"]}, rollingUpdate=_FREE)
_RETENTION: Schema = {"enum": ["Retain", "Delete"]}
_POD: dict[str, Schema] = {
    "accessModes": _list({"enum": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]} | {"type": "string"}),
    "extraEnv": _VARIABLES,
    "extraVolumes": _VOLUMES,
    "extraVolumeMounts": _MOUNTS,
    "tolerations": _TOLERATIONS,
    "affinity": _AFFINITY,
    "resources": _RESOURCES,
    "nodeSelector": _STRINGS,
    "podLabels": _STRINGS,
    "podAnnotations": _STRINGS,
    "podSecurityContext": _POD_CONTEXT,
    "securityContext": _CONTEXT,
    "labels": _STRINGS,
    "annotations": _STRINGS,
    "pullPolicy": _PULL,
    "preStopSleep": _COUNT,
    "replicas": _COUNT,
    "minReplicas": _COUNT,
    "maxReplicas": _COUNT | {"minimum": 1},
    "maxUnavailable": {"type": ["integer", "string"]},
    "port": {"type": "integer", "minimum": 1, "maximum": 65535},
}
"""By the last part of the name."""

TYPES: dict[str, Schema] = {
    "commonLabels": _STRINGS,
    "imagePullSecrets": _list(_object(name=_TEXT)),
    "config": {"$ref": "#/$defs/Config"},
    "engines": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$"},
        "additionalProperties": {"$ref": "#/$defs/Engine"},
    },
    "engineDefaults.args": {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean", "array", "object"]}},
    "engineDefaults.env": _STRINGS,
    "engineDefaults.gpus": _COUNT,
    "engineDefaults.command": _list(_TEXT) | {"minItems": 1},
    "engineDefaults.startupTimeout": _DURATION,
    "engineDefaults.drain": _DURATION,
    "strategy": _STRATEGY,
    "engineDefaults.strategy": _STRATEGY,
    "persistence.updateStrategy": _object(type={"enum": ["RollingUpdate", "OnDelete"]}, rollingUpdate=_FREE),
    "persistence.retention": _object(whenDeleted=_RETENTION, whenScaled=_RETENTION),
    "engineKey.generation": {"type": "integer", "minimum": 1},
    "discovery": {"enum": ["auto", "kubernetes", "dns"]},
    "service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "httpRoute.parentRefs": _list(_object(name=_TEXT, namespace=_TEXT, sectionName=_TEXT, port=_COUNT, group=_TEXT, kind=_TEXT)),
    "httpRoute.hostnames": _list(_TEXT),
    "ingress.hosts": _list(_TEXT),
    "ingress.tls": _list(_object(secretName=_TEXT, hosts=_list(_TEXT))),
    "terminationGracePeriodSeconds": {"type": ["integer", "null"], "minimum": 0},
    "topologySpreadConstraints": _list(_SPREAD),
    "monitoring.serviceMonitor.tlsConfig": _object(
        serverName=_TEXT, ca=_FREE, cert=_FREE, keySecret=_FREE, insecureSkipVerify=_FLAG, minVersion=_TEXT, maxVersion=_TEXT
    ),
    "extraObjects": _list({"type": ["object", "string"]}),
    "networkPolicy.clients": _list(_object(podSelector=_FREE, namespaceSelector=_FREE, ipBlock=_FREE)),
    "networkPolicy.monitoring": _list(_object(podSelector=_FREE, namespaceSelector=_FREE, ipBlock=_FREE)),
    "networkPolicy.egress": _list(_object(to=_list(_FREE), ports=_list(_FREE))),
}
"""By the whole name."""

_BY_DEFAULT: dict[type, Schema] = {
    str: _TEXT,
    bool: _FLAG,
    int: {"type": "integer"},
}
_ELSEWHERE = ("launch", "servers", "discover")
"""Settings of a model that say where its servers are: an engine's are known."""

_LINE = re.compile(r"^( *)(?:# ?(.*)|([A-Za-z]\w*):(.*))$")


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the chart: its dotted name, what it is for, its default."""

    name: str
    says: str
    default: Any


def contents() -> dict[Path, str]:
    """Every file that is made, by its path."""
    texts = {CHART / "files" / "rules.yaml": (DEPLOY / "prometheus" / "rules.yaml").read_text()}
    for dashboard in sorted((DEPLOY / "grafana").glob("*.json")):
        texts[CHART / "files" / "dashboards" / dashboard.name] = dashboard.read_text()
    text = (CHART / "values.yaml").read_text()
    texts[CHART / "values.schema.json"] = json.dumps(schema(yaml.safe_load(text)), indent=1, ensure_ascii=False) + "\n"
    texts[CHART / "README.md"] = readme(list(documented(text)))
    return texts


def schema(values: Mapping[str, Any]) -> Schema:
    """Return the schema of the chart's values, whose defaults are `values`."""
    config = Config.model_json_schema(mode="validation")
    definitions: dict[str, Schema] = config.pop("$defs")
    defaults = _section("engineDefaults.", values["engineDefaults"])
    model = definitions["Model"]
    there = {name: kind for name, kind in model["properties"].items() if name not in _ELSEWHERE}
    definitions["EngineModel"] = model | {"properties": there}
    definitions["Engine"] = _object(model={"$ref": "#/$defs/EngineModel"}, **defaults["properties"]) | {"required": ["model"]}
    top = _section("", {name: value for name, value in values.items() if name != "engineDefaults"})
    properties = top["properties"] | {"engineDefaults": defaults, "global": _FREE}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **top,
        "properties": properties,
        "$defs": {**definitions, "Config": config},
    }


def _section(path: str, values: Mapping[str, Any]) -> Schema:
    return _object(**{name: _type(path + name, default) for name, default in values.items()})


def _type(name: str, default: Any) -> Schema:
    by_part = _POD.get(name.rpartition(".")[2])
    if (known := TYPES.get(name, by_part)) is not None:
        return known
    return _section(f"{name}.", default) if isinstance(default, dict) else _BY_DEFAULT[type(default)]


def documented(text: str) -> Iterator[Value]:
    """Yield the values of values.yaml, in its order. A value that is described has none below it that is."""
    defaults = yaml.safe_load(text)
    path: list[str] = []
    says: list[str] = []
    described = -1
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            says = []
            continue
        indent, comment, key, _ = found.groups()
        depth = len(indent) // 2
        if comment is not None:
            says = [comment.removeprefix("-- ")] if comment.startswith("-- ") else [*says, comment] if says else []
            continue
        described = -1 if depth <= described else described
        path = [*path[:depth], key]
        if says:
            yield Value(".".join(path), " ".join(says), _at(defaults, path))
            described = depth
        elif described < 0 and not isinstance(_at(defaults, path), dict):
            raise ValueError(f"values.yaml: {'.'.join(path)} is not described")
        says = []


def _at(values: Any, path: list[str]) -> Any:
    for part in path:
        values = values[part]
    return values


_README = """\
# vllm-gateway

The chart of [vllm-gateway](../../../README.md): the gateway and its vLLM servers. [docs/kubernetes.md](../../../docs/kubernetes.md)
describes how to install, upgrade, scale and drain it; [examples](examples) has values to start with.

This page lists all values. It is generated from values.yaml by `python deploy/helm/sync.py`.

| value | default | meaning |
|---|---|---|
"""


def readme(values: list[Value]) -> str:
    """Return the page with a row for each value."""
    rows = (f"| `{value.name}` | `{_short(value.default)}` | {value.says.replace('|', chr(92) + '|')} |\n" for value in values)
    return _README + "".join(rows)


def _short(default: Any) -> str:
    return json.dumps(default, ensure_ascii=False).replace("|", "\\|")


def main() -> int:
    for path, text in contents().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
