"""The API reference: valid OpenAPI, of all that is served and of nothing else."""

from __future__ import annotations

import html
import re

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from gateway.admin.openapi import document as admin_document
from gateway.api.errors import ERRORS, Refusal, anthropic_error, openai_error, render_event
from gateway.api.reference import descriptions, page
from gateway.api.routes import ENDPOINTS, ROUTES, Body, Dialect
from gateway.auth.body_policy import FORBIDDEN, MAXIMA
from tests.support.described import described, request_problems, response_problems
from tests.support.rows import each_row

DOCUMENT = described()
PAGE = bytes(page(DOCUMENT).body).decode()
SCHEMAS = DOCUMENT["components"]["schemas"]
READ_ONLY = {"/v1/models", "/v1/models/{model}", "/v1/usage", "/v1/limits", "/version", "/health"}


def test_both_descriptions_are_valid_openapi() -> None:
    validate(DOCUMENT)
    validate(admin_document())


def test_every_shape_is_json_schema() -> None:
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)


def test_what_is_described_is_what_is_served() -> None:
    documented = {path: set(methods) for path, methods in DOCUMENT["paths"].items()}
    assert documented == {path: {"post"} for path in ROUTES} | {path: {"get"} for path in READ_ONLY}


def test_no_shape_is_left_over_and_none_is_missing() -> None:
    referred = set(re.findall(r"#/components/schemas/(\w+)", str(DOCUMENT)))
    assert referred == set(SCHEMAS)


def test_every_code_is_documented_with_exactly_its_status() -> None:
    shared = DOCUMENT["components"]["responses"]
    for prefix in ("Error", "MessagesError"):
        documented = {(code, int(name.removeprefix(prefix))) for name, each in shared.items() if re.fullmatch(rf"{prefix}\d+", name)
                for code in re.findall(r"`(\w+)`", each["description"])}  # fmt: skip
        assert documented == {(code, row.status) for code, row in ERRORS.items()}
    assert SCHEMAS["Error"]["properties"]["error"]["properties"]["code"]["enum"] == list(ERRORS)


@each_row("code", ERRORS)
def test_errors_have_the_documented_shape(code: str) -> None:
    refusal = Refusal(code, "-", param="model")
    for name, error in (("Error", openai_error(refusal)), ("MessagesError", anthropic_error(refusal))):
        validator = Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]})
        validator.validate(error)


@pytest.mark.parametrize("path", [path for path, route in ROUTES.items() if route.dialect is not Dialect.PLAIN and route.endpoint == path])
def test_errors_within_a_stream_have_the_documented_shape(path: str) -> None:
    if "text/event-stream" in DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]:
        dialect = ROUTES[path].dialect
        event = render_event(Refusal("upstream_timeout", "-"), dialect=dialect.value).decode()
        assert response_problems(path, 200, "text/event-stream", event) == []


def test_no_documented_field_is_removed() -> None:
    for path in ENDPOINTS:
        offered = set(SCHEMAS[request_name(path)]["properties"])
        assert offered & FORBIDDEN == set(), path


def test_an_extra_body_is_an_object_and_nothing_else() -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
    assert request_problems("/v1/chat/completions", {**body, "extra_body": {"top_k": 5}}) == []
    assert request_problems("/v1/chat/completions", {**body, "extra_body": None}) != []


def test_the_largest_numbers_are_those_of_the_policy() -> None:
    for path in ROUTES:
        if ROUTES[path].body is Body.JSON:
            for name, schema in SCHEMAS[request_name(path)]["properties"].items():
                assert name not in MAXIMA or "boolean" in schema["type"] or schema["maximum"] == MAXIMA[name], (path, name)


def request_name(path: str) -> str:
    path = next(each for each in ROUTES if ROUTES[each].endpoint == path) if path not in ROUTES else path
    (kind,) = DOCUMENT["paths"][path]["post"]["requestBody"]["content"].values()
    return str(kind["schema"]["$ref"].rpartition("/")[2])


@each_row("path", [path for path, route in ROUTES.items() if route.body is Body.JSON])
def test_the_examples_are_valid_requests(path: str) -> None:
    example = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert request_problems(path, example) == []
    assert request_problems(path, {}) != []


def test_every_route_is_shown_with_a_curl_command() -> None:
    text = html.unescape(PAGE)
    for operation in descriptions.operations(DOCUMENT):
        call = descriptions.curl(operation)
        assert (call is None) == (operation.path == "/health"), operation.path
        assert call is None or f"<pre>{call}</pre>" in text
    assert {descriptions.curl(operation) for operation in descriptions.operations(admin_document())} == {None}
    calls = {operation.path: descriptions.curl(operation) for operation in descriptions.operations(DOCUMENT)}
    assert str(calls["/v1/chat/completions"]).startswith('curl "$OPENAI_BASE_URL/chat/completions" \\\n  -H "Authorization: Bearer ')
    assert str(calls["/rerank"]).startswith('curl "${OPENAI_BASE_URL%/v1}/rerank" \\\n')
    assert str(calls["/v1/models/{model}"]).startswith('curl "$OPENAI_BASE_URL/models/MODEL" \\\n')


def test_a_difference_is_seen() -> None:
    response = '{"object": "list", "data": [{"index": 0, "object": "score", "score": 1, "more": 1}], "model": "m", "usage": 1}'
    problems = response_problems("/v1/score", 200, "application/json", response)
    assert [problem.partition(":")[0] for problem in sorted(problems)] == ["$.data[0]", "$.usage"]
    assert response_problems("/v1/score", 201, "application/json", response) != []
    assert response_problems("/v1/score", 200, "text/event-stream", "data: {}\n\n") != []


def test_the_page_has_everything_and_links_only_to_itself() -> None:
    text = PAGE
    for path in DOCUMENT["paths"]:
        assert f"{path}</h3>" in text
    links, ids = (set(re.findall(rf'{attribute}="([^"]*)"', text)) for attribute in ("href", "id"))
    assert links <= {f"#{identity}" for identity in ids} and ids == set(SCHEMAS)
    assert "src=" not in text and "<script" not in text
