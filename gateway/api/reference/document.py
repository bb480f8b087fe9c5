"""Write the data port as OpenAPI 3.1, from the tables of routes and errors and the shapes of their bodies.

The rule: paths, methods, kinds of bodies, statuses and codes come from the tables that handle requests; only texts and shapes are added
here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gateway import __version__
from gateway.api.errors import ERRORS, OF_PEOPLE
from gateway.api.reference.shapes import RouteDescription, Shapes, read
from gateway.api.routes import ROUTES, Dialect, Route

JSON, FORM, STREAM = "application/json", "multipart/form-data", "text/event-stream"
_TEXT = {"type": "string"}

_DESCRIPTION = """One URL for all models. `GET /v1/models` lists those that a key may use; a request names one in `model`. Responses are
the model server's own bytes, so they may contain fields not documented here.

A model may also have its own instance URL, such as `/i-7f3a/3900`. The routes that use models exist below it too, for example
`/i-7f3a/3900/v1/chat/completions`, and serve only that model; `model` may be omitted there. Elsewhere it may be omitted if the key may use
only one model, or if the operator has set a `default_model`. A trailing slash changes nothing.

Errors have OpenAI's shape, on `/v1/messages` Anthropic's. `code` is for programs, `message` for people. After a streamed response has
started, an error is an event of the stream."""

_LIMITS = {
    f"x-ratelimit-{what}-{kind}": f"{text.format(kind)}; for keys with a limit per minute"
    for kind in ("requests", "tokens")
    for what, text in (
        ("limit", "the limit on {}"),
        ("remaining", "{} that are left"),
        ("reset", "time until all {} are available again, such as `6m0s`"),
    )
} | {
    "x-ratelimit-remaining-tokens-day": "tokens that are left of the budget of the day. Each budget has such headers: `limit`, `remaining` "
    "and `reset`, of `tokens` or `cost`, with its window: `day`, `week`, `month`, `session`, or a length such as `7d`",
    "x-vllm-gateway-budget-warning": "budgets that are nearly used, such as `tokens_per_day;used=0.83`",
}
_HEADERS = {
    "x-request-id": "the id of the request, for the operator",
    "x-vllm-gateway-fallback": "the model that served the request, if it is not the requested one",
    "x-vllm-gateway-model": "the model that serves the request, if the requested name is divided between models",
    "x-vllm-gateway-recorded": "`true` if the operator records the request and its response",
    "retry-after": "seconds to wait",
    "x-should-retry": "`false` if a retry of the same request cannot succeed; the SDKs of OpenAI and Anthropic obey it",
    "www-authenticate": "`Bearer`",
    "allow": "the method that the route takes",
    **_LIMITS,
}
_STATUS_HEADERS: Mapping[int, tuple[str, ...]] = {
    200: ("x-vllm-gateway-fallback", "x-vllm-gateway-model", "x-vllm-gateway-recorded", *_LIMITS),
    **dict.fromkeys((400, 403, 404, 409, 413, 415, 431), ("x-should-retry",)),
    401: ("www-authenticate", "x-should-retry"),
    405: ("allow", "x-should-retry"),
    429: ("retry-after", "x-should-retry", *_LIMITS),
    503: ("retry-after",),
}
_REQUEST_HEADERS = {
    "x-session-id": "requests with the same value count for the same session; with `balance: prefix` they also go to the same server "
    "while it is available, and with `sticky: session` to the same model of a split",
    "traceparent": "a trace to continue (W3C Trace Context), if the operator traces",
}
_BY_EITHER: list[Any] = [{"bearer": []}, {"x-api-key": []}]
_STATUSES = tuple(dict.fromkeys(row.status for row in ERRORS.values()))
_OF_KEYS = tuple(status for status in _STATUSES if status not in OF_PEOPLE)
_NO_BODY = (400, 401, 404, 405, 408, 431, 500)
"""Statuses that a request without a body can get."""


def document() -> dict[str, Any]:
    """Return the description as OpenAPI 3.1."""
    shapes = read()
    paths: dict[str, Any] = {path: {"post": _post_operation(route, shapes.routes[path])} for path, route in ROUTES.items()}
    paths |= {path: {"get": _get_operation(path, description)} for path, description in shapes.gets.items()}
    tags = dict.fromkeys(operation["tags"][0] for methods in paths.values() for operation in methods.values())
    return {
        "openapi": "3.1.0",
        "info": {"title": "vllm-gateway", "version": __version__, "description": _DESCRIPTION},
        "tags": [{"name": tag} for tag in tags],
        "security": [{"bearer": []}],
        "paths": paths,
        "components": _components(shapes),
    }


def _components(shapes: Shapes) -> dict[str, Any]:
    return {
        "schemas": shapes.schemas | _errors(),
        "headers": {name: {"description": text, "schema": _TEXT} for name, text in _HEADERS.items()},
        "responses": {
            f"{schema}{status}": _error_response(status, schema) for schema in ("Error", "MessagesError") for status in _STATUSES
        },
        "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        },
    }


# Operations


def _post_operation(route: Route, description: RouteDescription) -> dict[str, Any]:
    kind = FORM if route.takes_form else JSON
    body: dict[str, Any] = {"schema": _ref(description.request)} | ({"example": description.example} if description.example else {})
    security: dict[str, Any] = {"security": _BY_EITHER} if route.anthropic else {}
    return {
        **_summary(description),
        **security,
        "parameters": _parameters("header", _REQUEST_HEADERS),
        "requestBody": {"required": True, "content": {kind: body}},
        "responses": {"200": _response(description, route), **_refusals("MessagesError" if route.anthropic else "Error", _OF_KEYS)},
    }


def _get_operation(path: str, description: RouteDescription) -> dict[str, Any]:
    model: list[Any] = [{"name": "model", "in": "path", "required": True, "schema": _TEXT}] if "{" in path else []
    open_to_all = path == "/health"
    statuses = [status for status in _NO_BODY if not open_to_all or status not in (401, 404, 405)] + [*description.more_statuses]
    return {
        **_summary(description),
        "security": [] if open_to_all else _BY_EITHER,
        "parameters": model + _parameters("query", description.query),
        "responses": {"200": _response(description, None), **_refusals("Error", statuses)},
    }


def _parameters(location: str, texts: Mapping[str, str]) -> list[Any]:
    return [{"name": name, "in": location, "description": text, "schema": _TEXT} for name, text in texts.items()]


def _refusals(schema: str, statuses: Iterable[int]) -> dict[str, Any]:
    return {str(status): {"$ref": f"#/components/responses/{schema}{status}"} for status in statuses}


def _summary(description: RouteDescription) -> dict[str, Any]:
    about: dict[str, Any] = {"description": description.about} if description.about else {}
    return {"operationId": description.id, "tags": [description.tag], "summary": description.summary, **about}


def _response(description: RouteDescription, route: Route | None) -> dict[str, Any]:
    content: dict[str, Any] = {JSON: {"schema": _ref(description.response)}}
    if route is not None and description.event is not None:
        shapes = [_ref(description.event), _ref(_STREAMED[route.dialect])]
        content[STREAM] = {"schema": {"description": "the data of each event", "anyOf": shapes}}
    if route is not None and route.takes_form:
        content["text/plain"] = {"schema": _TEXT}
    return {"description": "the response", "headers": _headers(() if route is None else _STATUS_HEADERS[200]), "content": content}


# Errors

_STREAMED = {
    **dict.fromkeys((Dialect.CHAT, Dialect.COMPLETIONS, Dialect.COHERE, Dialect.PLAIN), "Error"),
    Dialect.RESPONSES: "ResponsesError",
    Dialect.MESSAGES: "MessagesError",
}
"""The schema of an error within a stream (``errors.render_event``)."""


def _errors() -> dict[str, Any]:
    name = {"type": ["string", "null"], "description": "the invalid field"}
    code = {"type": "string", "enum": list(ERRORS)}
    kinds = {"type": "string", "enum": sorted({row.type for row in ERRORS.values()})}
    return {
        "Error": _closed(error=_closed(message=_TEXT, type=kinds, param=name, code=code)),
        "ResponsesError": _closed(type={"const": "error"}, code=code, message=_TEXT, param=name, sequence_number={"type": "integer"}),
        "MessagesError": _closed(type={"const": "error"}, error=_closed(type=_TEXT, message=_TEXT)),
    }


def _closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "additionalProperties": False, "properties": properties}


def _error_response(status: int, schema: str) -> dict[str, Any]:
    codes = ", ".join(f"`{code}`" for code, row in ERRORS.items() if row.status == status)
    return {"description": codes, "headers": _headers(_STATUS_HEADERS.get(status, ())), "content": {JSON: {"schema": _ref(schema)}}}


def _headers(names: Iterable[str]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in ("x-request-id", *names)}


def _ref(schema: str | None) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}
