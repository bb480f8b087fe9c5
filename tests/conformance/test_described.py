"""The API reference and the gateway agree: on whatever bodies it admits, on its examples, and on what is only read.

That every other request and answer of these tests is as it says, the stage looks after.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gateway.api.routes import ROUTES, Body
from tests.conformance.examples import LLAMA, Json
from tests.conformance.stage import Stage, on
from tests.support.described import described, request_problems, response_problems
from tests.support.examples import examples

JSON = [path for path, route in ROUTES.items() if route.body is Body.JSON]
DISTINCT = [path for path in JSON if ROUTES[path].endpoint == path]
STEERING = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of", "min_tokens", "extra_body")
"""Fields that would only make responses long, or be merged into the rest."""


@on("simulator")
@pytest.mark.parametrize("path", JSON)
def test_the_example_works(stage: Stage, path: str) -> None:
    example = described()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
    response = stage.post({**example, "model": stage.model}, path)
    assert response.status_code == 200, response.text


@on("simulator")
@pytest.mark.parametrize("path", [path for path in JSON if "text/event-stream" in str(described()["paths"][path])])
def test_the_example_streams(stage: Stage, path: str) -> None:
    example = described()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
    response = stage.post({**example, "model": stage.model, "stream": True}, path)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")


@on("simulator", "qwen")
def test_what_is_only_read(stage: Stage) -> None:
    with stage.client() as client:
        for path, address in (("/health", "/health"), ("/v1/models", "/v1/models"), ("/v1/models/{model}", f"/v1/models/{stage.model}")):
            response = client.get(address)
            assert response_problems(path, 200, response.headers["content-type"], response.text, "get") == []
        wrong = client.get("/v1/models/nobody/knows")
        assert response_problems("/v1/models/{model}", wrong.status_code, wrong.headers["content-type"], wrong.text, "get") == []


@on("simulator")
@pytest.mark.parametrize("path", DISTINCT)
@settings(
    max_examples=examples(20),
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_any_body_that_it_admits_is_served_as_described(stage: Stage, path: str, data: st.DataObject) -> None:
    (kind,) = described()["paths"][path]["post"]["requestBody"]["content"].values()
    body = {**data.draw(made_by(kind["schema"])), "model": LLAMA}
    assert request_problems(path, body) == []
    assert stage.post(body, path).status_code < 500, json.dumps(body)


# Bodies by their schemas: as much of JSON Schema as the reference uses for requests

_PLAIN: dict[str, st.SearchStrategy[Any]] = {
    "null": st.none(),
    "boolean": st.booleans(),
    "string": st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
}


def made_by(schema: Json) -> st.SearchStrategy[Any]:
    """Values that a schema admits."""
    if "$ref" in schema:
        return made_by(described()["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    if "properties" in schema and "object" in schema.get("type", ()):
        whole = st.sampled_from(schema.get("anyOf", [{}])).flatmap(partial(_object, schema))
        return whole | st.none() if "null" in schema["type"] else whole
    if "anyOf" in schema:
        return st.one_of([made_by(each) for each in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    types = schema.get("type", ["null", "boolean", "string"])
    return st.one_of([_typed(schema, name) for name in ([types] if isinstance(types, str) else types)])


def _object(schema: Json, also: Json) -> st.SearchStrategy[Json]:
    needed = {*schema.get("required", ()), *also.get("required", ())}
    fields = {name: made_by(each) for name, each in schema["properties"].items() if name in needed or name not in STEERING}
    required = {name: each for name, each in fields.items() if name in needed}
    return st.fixed_dictionaries(required, optional={name: each for name, each in fields.items() if name not in needed})


def _typed(schema: Json, name: str) -> st.SearchStrategy[Any]:
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if name == "integer":
        return st.integers(-(2**31) if low is None else low, 2**31 if high is None else high)
    if name == "number":
        return st.floats(low, high, exclude_min="exclusiveMinimum" in schema, allow_nan=False, allow_infinity=False)
    if name == "array":
        return st.lists(made_by(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=3)
    if name == "object":
        below = schema.get("additionalProperties", True)
        names = st.from_regex(schema.get("propertyNames", {}).get("pattern", "^[abc]+$"), fullmatch=True, alphabet="abc0123456789")
        return st.dictionaries(names, st.integers(0, 9) if below is True else made_by(below), max_size=2)
    return _PLAIN[name].filter(len) if "minLength" in schema else _PLAIN[name]
