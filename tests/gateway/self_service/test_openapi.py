"""The description of self-service: valid OpenAPI, and of each route a row in the documents."""

from __future__ import annotations

from openapi_spec_validator import validate

from gateway.self_service.openapi import ROUTES, document
from gateway.self_service.paths import endpoint_of
from tests.documents.blocks import DOCS


def test_the_description_is_valid() -> None:
    validate(document())
    assert {(method.upper(), path) for path, item in document()["paths"].items() for method in item} == {
        (route.method, route.template) for route in ROUTES
    }


def test_each_route_has_a_row_in_the_documents() -> None:
    page = (DOCS / "self-service.md").read_text()
    assert [route.template for route in ROUTES if f"`{route.template}`" not in page] == []


def test_each_route_is_passed_to_control_under_a_name_without_ids() -> None:
    for route in ROUTES:
        path = route.template.replace("{id}", "a/b").replace("{team}", "a/b").replace("{operation}", "rotate")
        assert endpoint_of(path) == route.template.replace("{operation}", "rotate")
    for path in (
        "/portal/v1",
        "/portal/v1/",
        "/portal/v2/keys",
        "/portal/v1/teams/a",
        "/portal/v1/teams/keys",
        "/portal/v1/me/x",
        "/v1/usage",
    ):
        assert endpoint_of(path) is None
    assert endpoint_of("/portal/v1/keys/rotate") == "/portal/v1/keys/{id}"
