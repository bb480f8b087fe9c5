"""Check real requests and responses against the API reference.

The rule: a response may contain no field that the reference does not name. A request may, since unknown fields have no effect.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.protocols import Validator

from gateway.api.reference import document

Json = dict[str, Any]


@cache
def described() -> Json:
    """Return the reference as an OpenAPI document."""
    return document()


@cache
def _closed() -> Json:
    """Return the schemas, changed so that every object allows only the named fields."""
    components = copy.deepcopy(described()["components"]["schemas"])
    for shape in _every(components):
        if "properties" in shape and "type" in shape:
            shape.setdefault("additionalProperties", False)
    return {"schemas": components}


def _every(value: Any) -> Iterator[Json]:
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from _every(each)
    elif isinstance(value, list):
        for each in value:
            yield from _every(each)


def request_shape(path: str) -> Json:
    """Return the schema of a POST request's body."""
    (kind,) = described()["paths"][path]["post"]["requestBody"]["content"].values()
    shape: Json = kind["schema"]
    return shape


def request_problems(path: str, body: Json) -> list[str]:
    """Return every deviation of a JSON body from the reference."""
    return _problems(_validator(path, "request", ""), body)


def response_problems(path: str, status: int, media_type: str, text: str, method: str = "post") -> list[str]:
    """Return every deviation of a response from the reference. Events of a stream are checked one by one."""
    kind = media_type.partition(";")[0]
    validator = _validator(path, f"{method} {status}", kind)
    if kind == "text/event-stream":
        return [problem for event in data_of(text) for problem in _problems(validator, event)]
    return _problems(validator, text if kind == "text/plain" else json.loads(text))


def data_of(text: str) -> list[Any]:
    """Return the data of a stream's events, without the final ``[DONE]``."""
    lines = (line.removeprefix("data:").strip() for line in text.split("\n") if line.startswith("data:"))
    return [json.loads(line) for line in lines if line != "[DONE]"]


@cache
def _validator(path: str, what: str, kind: str) -> Validator:
    if what == "request":
        return Draft202012Validator({"allOf": [request_shape(path)], "components": described()["components"]})
    method, status = what.split()
    described_response: Mapping[str, Any] = described()["paths"][path][method]["responses"].get(status, {})
    if "$ref" in described_response:
        described_response = described()["components"]["responses"][described_response["$ref"].rpartition("/")[2]]
    schema = described_response.get("content", {}).get(kind, {}).get("schema", False)
    return Draft202012Validator({"allOf": [schema], "components": _closed()})


def _problems(validator: Validator, value: Any) -> list[str]:
    return [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(value)]
