"""The data port as OpenAPI 3.1: the routes' table and the errors' table, with the shapes of their bodies.

The rule: paths, methods, kinds of bodies, statuses and codes come from the tables that serve; only the words and shapes are told here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from gateway import __version__
from gateway.api.errors import ERRORS
from gateway.api.reference.shapes import RouteDescription, Shapes, read
from gateway.api.routes import ROUTES, Body, Dialect, Route

JSON, FORM, STREAM = "application/json", "multipart/form-data", "text/event-stream"

_ABOUT = """One URL for all models. `GET /v1/models` lists those that a key may use; a request names one in `model`. Answers are the model
server's own bytes, so they may have members that are not told here.

A model may also have an instance URL of its own, such as `/i-7f3a/3900`: all routes but `/health` are below it too,
`/i-7f3a/3900/v1/chat/completions`, and serve that model alone; `model` may then be left out. Elsewhere it may be left out where the key may
use one model only, or where the operator has set a `default_model`. A slash at the end of a path changes nothing.

Errors have OpenAI's shape, on `/v1/messages` Anthropic's. `code` is for programs, `message` for people. Once a streamed answer has begun,
an error is an event of the stream."""

_LIMITS = {
    f"x-ratelimit-{what}-{kind}": f"{words.format(kind)}; for keys with a limit per minute"
    for kind in ("requests", "tokens")
    for what, words in (
        ("limit", "the limit on {}"),
        ("remaining", "{} that are left"),
        ("reset", "time until all {} are there again, such as `6m0s`"),
    )
}
_HEADERS = {
    "x-request-id": "the request's id, for the operator",
    "x-vllm-gateway-fallback": "the model that answered, where it is not the one that was asked for",
    "retry-after": "seconds to wait",
    "x-should-retry": "`false` where a retry of the same request cannot succeed; the SDKs of OpenAI and Anthropic obey it",
    "www-authenticate": "`Bearer`",
    "allow": "the method that the route takes",
    **_LIMITS,
}
_ALWAYS = ("x-request-id",)
_OF_STATUS: Mapping[int, tuple[str, ...]] = {
    200: ("x-vllm-gateway-fallback", *_LIMITS),
    **dict.fromkeys((400, 404, 413, 415, 431), ("x-should-retry",)),
    401: ("www-authenticate", "x-should-retry"),
    405: ("allow", "x-should-retry"),
    429: ("retry-after", "x-should-retry", *_LIMITS),
    503: ("retry-after",),
}
_ASKED = {
    "x-session-id": "requests with the same one go to the same server, as long as it is there (for models with `balance: prefix`)",
    "traceparent": "a trace to go on with (W3C Trace Context), where the operator traces",
}
_BY_EITHER: list[Any] = [{"bearer": []}, {"x-api-key": []}]
_STATUSES = tuple(dict.fromkeys(row.status for row in ERRORS.values()))
_NO_BODY = (400, 401, 404, 405, 408, 431, 500)
"""What a request without a body can end with."""


def document() -> dict[str, Any]:
    """The description as OpenAPI 3.1."""
    shapes = read()
    paths: dict[str, Any] = {path: {"post": _posted(route, shapes.routes[path])} for path, route in ROUTES.items()}
    paths |= {path: {"get": _read(path, told)} for path, told in shapes.gets.items()}
    tags = dict.fromkeys(operation["tags"][0] for methods in paths.values() for operation in methods.values())
    return {
        "openapi": "3.1.0",
        "info": {"title": "vllm-gateway", "version": __version__, "description": _ABOUT},
        "tags": [{"name": tag} for tag in tags],
        "security": [{"bearer": []}],
        "paths": paths,
        "components": _components(shapes),
    }


def _components(shapes: Shapes) -> dict[str, Any]:
    return {
        "schemas": shapes.schemas | _errors(),
        "headers": {name: {"description": words, "schema": {"type": "string"}} for name, words in _HEADERS.items()},
        "responses": {
            f"{prefix}{status}": _refused(status, schema)
            for prefix, schema in (("Error", "Error"), ("MessagesError", "MessagesError"))
            for status in _STATUSES
        },
        "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        },
    }


# Operations


def _posted(route: Route, told: RouteDescription) -> dict[str, Any]:
    prefix = "MessagesError" if route.anthropic else "Error"
    refusals = {str(status): {"$ref": f"#/components/responses/{prefix}{status}"} for status in _STATUSES}
    kind = FORM if route.body is Body.FORM else JSON
    body: dict[str, Any] = {"schema": _ref(told.request)} | ({"example": told.example} if told.example else {})
    asked = [{"name": name, "in": "header", "description": words, "schema": {"type": "string"}} for name, words in _ASKED.items()]
    security: dict[str, Any] = {"security": _BY_EITHER} if route.anthropic else {}
    return {
        **_head(told),
        **security,
        "parameters": asked,
        "requestBody": {"required": True, "content": {kind: body}},
        "responses": {"200": _answer(told, route), **refusals},
    }


def _read(path: str, told: RouteDescription) -> dict[str, Any]:
    named = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}] if "{" in path else []
    open_to_all = path == "/health"
    statuses = [status for status in _NO_BODY if not open_to_all or status not in (401, 404, 405)]
    refusals = {str(status): {"$ref": f"#/components/responses/Error{status}"} for status in statuses}
    security: list[Any] = [] if open_to_all else _BY_EITHER
    return {**_head(told), "security": security, "parameters": named, "responses": {"200": _answer(told, None), **refusals}}


def _head(told: RouteDescription) -> dict[str, Any]:
    about: dict[str, Any] = {"description": told.about} if told.about else {}
    return {"operationId": told.id, "tags": [told.tag], "summary": told.summary, **about}


def _answer(told: RouteDescription, route: Route | None) -> dict[str, Any]:
    names = _ALWAYS if route is None else (*_ALWAYS, *_OF_STATUS[200])
    content: dict[str, Any] = {JSON: {"schema": _ref(told.response)}}
    if route is not None and told.event is not None:
        content[STREAM] = {"schema": {"description": "the data of each event", "anyOf": [_ref(told.event), _ref(_STREAMED[route.dialect])]}}
    if route is not None and route.body is Body.FORM:
        content["text/plain"] = {"schema": {"type": "string"}}
    return {"description": "the answer", "headers": _headers(names), "content": content}


# Errors

_STREAMED = {
    **dict.fromkeys((Dialect.CHAT, Dialect.COMPLETIONS, Dialect.COHERE, Dialect.PLAIN), "Error"),
    Dialect.RESPONSES: "ResponsesError",
    Dialect.MESSAGES: "MessagesError",
}
"""How an error within a stream looks (``errors.render_event``)."""


def _errors() -> dict[str, Any]:
    text, name = {"type": "string"}, {"type": ["string", "null"], "description": "the field at fault"}
    code = {"type": "string", "enum": list(ERRORS)}
    kinds = {"type": "string", "enum": sorted({row.type for row in ERRORS.values()})}
    return {
        "Error": _closed(error=_closed(message=text, type=kinds, param=name, code=code)),
        "ResponsesError": _closed(type={"const": "error"}, code=code, message=text, param=name, sequence_number={"type": "integer"}),
        "MessagesError": _closed(type={"const": "error"}, error=_closed(type=text, message=text)),
    }


def _closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "additionalProperties": False, "properties": properties}


def _refused(status: int, schema: str) -> dict[str, Any]:
    names = (*_ALWAYS, *_OF_STATUS.get(status, ()))
    return {"description": _codes(status), "headers": _headers(names), "content": {JSON: {"schema": _ref(schema)}}}


def _codes(status: int) -> str:
    """The codes that have a status, in words."""
    by_status = groupby(sorted(ERRORS, key=lambda code: ERRORS[code].status), key=lambda code: ERRORS[code].status)
    return ", ".join(f"`{code}`" for found, codes in by_status if found == status for code in codes)


def _headers(names: Iterable[str]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _ref(schema: str | None) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}
