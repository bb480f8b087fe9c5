"""What the API reference says of a request and its answer, held against real ones.

The rule: an answer may have no member that the reference does not name; a request may have, since what is unknown does nothing.
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
    """The reference as OpenAPI."""
    return document()


@cache
def _closed() -> Json:
    """The shapes, in which every object has the members that are named and no other."""
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
    """The schema of a POST's body."""
    (kind,) = described()["paths"][path]["post"]["requestBody"]["content"].values()
    shape: Json = kind["schema"]
    return shape


def request_problems(path: str, body: Json) -> list[str]:
    """Every way in which a JSON body is not what the reference asks for."""
    return _problems(_validator(path, "request", ""), body)


def response_problems(path: str, status: int, media_type: str, text: str, method: str = "post") -> list[str]:
    """Every way in which an answer is not what the reference says. Events of a stream are looked at one by one."""
    kind = media_type.partition(";")[0]
    validator = _validator(path, f"{method} {status}", kind)
    if kind == "text/event-stream":
        return [problem for event in data_of(text) for problem in _problems(validator, event)]
    return _problems(validator, text if kind == "text/plain" else json.loads(text))


def data_of(text: str) -> list[Any]:
    """What the events of a stream carry, but for the end's mark."""
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
