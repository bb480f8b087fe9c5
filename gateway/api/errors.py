"""Define every error that a client can receive, and render errors.

The rule: every failure in any layer becomes a ``Refusal`` with a row of ``ERRORS``, and only ``render`` turns it into bytes. The errors of
vLLM are mapped in ``vllm.errors``. To add an error, add a row to ``ERRORS``; a test names the documents that need one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import orjson

from upstream.http.errors import (
    BadResponse,
    ConnectFailed,
    Disconnected,
    FirstByteTimeout,
    IdleTimeout,
    LocalLimit,
    StaleConnection,
    TotalTimeout,
    UpstreamError,
)

INVALID_REQUEST, AUTHENTICATION, RATE_LIMIT, SERVER = "invalid_request_error", "authentication_error", "rate_limit_error", "server_error"


@dataclass(frozen=True, slots=True)
class ErrorSpec:
    """The HTTP status and OpenAI's error type of a code.

    ``retry_after``: the seconds after which another request may succeed, for errors that do not set them themselves.
    """

    status: int
    type: str
    retry_after: int | None = None


ERRORS: Mapping[str, ErrorSpec] = {
    "invalid_json": ErrorSpec(400, INVALID_REQUEST),
    "invalid_value": ErrorSpec(400, INVALID_REQUEST),
    "invalid_request": ErrorSpec(400, INVALID_REQUEST),
    "feature_not_enabled": ErrorSpec(400, INVALID_REQUEST),
    "missing_required_parameter": ErrorSpec(400, INVALID_REQUEST),
    "context_length_exceeded": ErrorSpec(400, INVALID_REQUEST),
    "missing_api_key": ErrorSpec(401, AUTHENTICATION),
    "invalid_api_key": ErrorSpec(401, AUTHENTICATION),
    "expired_api_key": ErrorSpec(401, AUTHENTICATION),
    "permission_denied": ErrorSpec(403, INVALID_REQUEST),
    "model_not_found": ErrorSpec(404, INVALID_REQUEST),
    "not_found": ErrorSpec(404, INVALID_REQUEST),
    "method_not_allowed": ErrorSpec(405, INVALID_REQUEST),
    "conflict": ErrorSpec(409, INVALID_REQUEST),
    "request_timeout": ErrorSpec(408, INVALID_REQUEST),
    "request_too_large": ErrorSpec(413, INVALID_REQUEST),
    "unsupported_media_type": ErrorSpec(415, INVALID_REQUEST),
    "headers_too_large": ErrorSpec(431, INVALID_REQUEST),
    "rate_limit_exceeded": ErrorSpec(429, RATE_LIMIT, 1),
    "insufficient_quota": ErrorSpec(429, RATE_LIMIT),
    "server_error": ErrorSpec(500, SERVER),
    "internal_error": ErrorSpec(500, SERVER),
    "upstream_unreachable": ErrorSpec(502, SERVER),
    "upstream_disconnected": ErrorSpec(502, SERVER),
    "upstream_timeout": ErrorSpec(504, SERVER),
    "model_loading": ErrorSpec(503, SERVER, 5),
    "overloaded": ErrorSpec(503, SERVER, 1),
    "draining": ErrorSpec(503, SERVER, 5),
    "no_healthy_server": ErrorSpec(503, SERVER, 5),
}

AUTH_REASONS: Mapping[str, str] = {code: code.removesuffix("_api_key") for code, row in ERRORS.items() if row.type == AUTHENTICATION}
"""The ``reason`` label of ``vllm_gateway_auth_failures_total`` by the error's code."""

NAME_LIMIT = 200
"""Maximum characters of a client's model name in a message."""

CLIENT_CLOSED_REQUEST = 499
"""The status in metrics and log of a request whose client disconnected (nginx's number; it is never sent)."""

OF_PEOPLE = frozenset({403, 409})
"""Statuses of self-service only. Routes for keys never return them."""

_RETRIED = frozenset({"request_timeout", "rate_limit_exceeded"})
"""Errors below 500 that a retry of the same request may resolve."""


_EXPLAINED = frozenset({*AUTH_REASONS, "invalid_json"})
"""Errors whose message is the ``detail``."""


class Refusal(Exception):
    """An error that ends a request. ``code`` is a key of ``ERRORS``; ``param`` names the invalid field.

    For the operator: ``model`` is the name of a model that was not found, and ``detail`` says more than the client may know. It is the
    message if that tells several causes apart, and has no text of the client. ``limit`` is the name of the exceeded limit, and
    ``limit_holder`` the key, team or session that has it.
    """

    model: str | None = None
    detail: str | None = None
    limit: str | None = None
    limit_holder: str | None = None

    def __init__(self, code: str, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.spec = ERRORS[code]
        if code in _EXPLAINED:
            self.detail = message
        self._headers = headers or {}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the error.

        ``WWW-Authenticate`` with 401, ``Retry-After`` if the same request may succeed later, and ``x-should-retry: false`` if it
        cannot (the SDKs of OpenAI and Anthropic obey it).
        """
        headers = dict(self._headers)
        if self.spec.status == 401:
            headers.setdefault("www-authenticate", "Bearer")
        if self.spec.status < 500 and self.code not in _RETRIED:
            headers.setdefault("x-should-retry", "false")
        if self.spec.retry_after is not None and headers.get("x-should-retry") != "false":
            headers.setdefault("retry-after", str(self.spec.retry_after))
        return headers


# Errors that several modules raise


def draining() -> Refusal:
    """Return the error for a gateway that is stopping."""
    return Refusal("draining", "The gateway is shutting down.")


def none_healthy() -> Refusal:
    """Return the error for a model without a healthy server."""
    return Refusal("no_healthy_server", "No server of this model is healthy at the moment.")


def unknown_model(model: str) -> Refusal:
    """Return one error for a model that does not exist and for a model outside the key's scope."""
    text = f"The model `{model[:NAME_LIMIT]}` does not exist or you do not have access to it."
    refusal = Refusal("model_not_found", text, param="model")
    refusal.model = model
    return refusal


def invalid_value(message: str, *, param: str | None = None, detail: str | None = None) -> Refusal:
    """Return the error for a field that the gateway itself refuses. ``detail``: the message without the client's values, if it has any."""
    refusal = Refusal("invalid_value", message, param=param)
    refusal.detail = detail or message
    return refusal


def internal_error() -> Refusal:
    """Return the error for a bug of the gateway."""
    return Refusal("internal_error", "The gateway failed. The operator can find the cause by the request id.")


_UNITS = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))


def duration(seconds: int) -> str:
    """Write whole seconds in the two largest units: ``8 hours 42 minutes``. Rounded up, so that no client retries too early."""
    for (name, size), (smaller, part) in pairwise(_UNITS):
        if seconds >= size:
            whole, rest = divmod(-(-seconds // part), size // part)
            return counted(whole, name) + (f" {counted(rest, smaller)}" if rest else "")
    return counted(max(seconds, 1), "second")


def counted(number: int, noun: str) -> str:
    """Return ``1 model`` or ``2 models``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


# Rendering

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def openai_error(refusal: Refusal) -> dict[str, Any]:
    """Return ``{"error": {"message", "type", "param", "code"}}``."""
    return {"error": {"message": refusal.message, "type": refusal.spec.type, "param": refusal.param, "code": refusal.code}}


def anthropic_error(refusal: Refusal) -> dict[str, Any]:
    """Return ``{"type": "error", "error": {"type", "message"}}``, as Anthropic's API documents it."""
    fallback = "invalid_request_error" if refusal.spec.status < 500 else "api_error"
    message, param = refusal.message, refusal.param
    if param is not None and param not in message:  # Anthropic's shape has no field for it, so it is in the message as Anthropic writes it
        message = f"{param}: {message}"
    return {"type": "error", "error": {"type": _ANTHROPIC_TYPES.get(refusal.spec.status, fallback), "message": message}}


def render(refusal: Refusal, *, anthropic: bool = False) -> bytes:
    """Render the JSON body of an error."""
    return orjson.dumps(anthropic_error(refusal) if anthropic else openai_error(refusal))


def render_event(refusal: Refusal, *, dialect: str, number: int = 0) -> bytes:
    """Render the error as the last event of a stream that has started.

    ``dialect``: ``chat`` (also completions) ends with ``[DONE]``; ``responses`` and ``messages`` have named events. The events of
    ``responses`` have a sequence number; ``number`` is the number of earlier events.
    """
    if dialect == "messages":
        return b"event: error\ndata: " + render(refusal, anthropic=True) + b"\n\n"
    if dialect == "responses":
        error = {"type": "error", "code": refusal.code, "message": refusal.message, "param": refusal.param, "sequence_number": number}
        return b"event: error\ndata: " + orjson.dumps(error) + b"\n\n"
    return b"data: " + render(refusal) + b"\n\ndata: [DONE]\n\n"


# Failures of a server

_FAILURES: Mapping[type[UpstreamError], tuple[str, str]] = {
    ConnectFailed: ("upstream_unreachable", "The model's server could not be reached."),
    LocalLimit: ("overloaded", "The gateway can open no more connections at the moment."),
    StaleConnection: ("upstream_disconnected", "The model's server closed the connection before it responded."),
    Disconnected: ("upstream_disconnected", "The model's server closed the connection before the end of its response."),
    BadResponse: ("upstream_disconnected", "The model's server sent an invalid response."),
    FirstByteTimeout: ("upstream_timeout", "The model's server did not start to respond in time."),
    IdleTimeout: ("upstream_timeout", "The model's server stopped sending in the middle of its response."),
    TotalTimeout: ("upstream_timeout", "The response took longer than this model's limit."),
    UpstreamError: ("upstream_disconnected", "The model's server failed."),
}


def from_failure(error: UpstreamError) -> Refusal:
    """Map a failure of a server to the error for the client; the details are for the log."""
    return Refusal(*next(_FAILURES[kind] for kind in type(error).__mro__ if kind in _FAILURES))
