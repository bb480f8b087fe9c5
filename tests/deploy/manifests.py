"""Validate Kubernetes manifests; run by the interpreter of `.venv-deploy-kubernetes`.

Standard input: a JSON object, name -> list of manifests. Standard output: name -> list of problems. The rule: a field that is not in
the schema is an error. Kubernetes' own kinds are validated with its schemas of the oldest version that the chart allows and of the
newest version, where a warning counts as an error. The operators' kinds are validated with models that are generated from their CRDs.
No package has a model for HTTPRoute: ROUTE is written by hand, with only the fields that the chart uses.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate.utils
from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as prometheus

VERSIONS = ("1.30.0", "1.37.0")

_NAME = {"type": "string", "minLength": 1}
_DURATION = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": list(required)}


def _some(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


_PATH = _object("type", "value", type={"enum": ["Exact", "PathPrefix", "RegularExpression"]}, value=_NAME)
_RULE = _object(
    matches=_some(_object(path=_PATH)),
    timeouts=_object(request=_DURATION, backendRequest=_DURATION),
    backendRefs=_some(_object("name", "port", name=_NAME, port={"type": "integer", "minimum": 1, "maximum": 65535})),
)
_PARENT = _object("name", name=_NAME, namespace=_NAME, sectionName=_NAME, port={"type": "integer"}, group=_NAME, kind=_NAME)
ROUTE = _object(
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    apiVersion={"const": "gateway.networking.k8s.io/v1"},
    kind={"const": "HTTPRoute"},
    metadata={"type": "object"},
    spec=_object("parentRefs", "rules", parentRefs=_some(_PARENT), hostnames=_some(_NAME), rules=_some(_RULE)),
)


def closed(schema: Any) -> Any:
    """The schema, in which an object has no members but those that are named."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(each) for name, each in schema.items()}
    return {"additionalProperties": False, **inner} if isinstance(inner.get("properties"), dict) else inner


def _of_model(model: Any) -> dict[str, Any]:
    schema = closed(model.model_json_schema())
    schema["properties"]["metadata"] = {"type": "object"}
    return dict(schema)


CUSTOM = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _of_model(prometheus.ServiceMonitor),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _of_model(prometheus.PrometheusRule),
    ("keda.sh/v1alpha1", "ScaledObject"): _of_model(keda.ScaledObject),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): ROUTE,
}


def complaints(manifest: dict[str, Any]) -> Iterator[str]:
    """Everything that is wrong with one object."""
    custom = CUSTOM.get((manifest["apiVersion"], manifest["kind"]))
    where = f"{manifest['kind']} {manifest['metadata']['name']}"
    if custom is not None:
        yield from (
            f"{where}: {error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(custom).iter_errors(manifest)
        )
        return
    for version in VERSIONS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                kubernetes_validate.utils.validate(manifest, version, strict=True)
        except Exception as error:
            yield f"{where}: {version}: {error}"


def main() -> None:
    kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)  # it reads megabytes for each object

    @cache  # most objects are in many cases
    def found(manifest: str) -> tuple[str, ...]:
        return tuple(complaints(json.loads(manifest)))

    given: dict[str, list[dict[str, Any]]] = json.load(sys.stdin)
    json.dump(
        {name: [arguments for each in manifests for arguments in found(json.dumps(each))] for name, manifests in given.items()}, sys.stdout
    )


if __name__ == "__main__":
    main()
