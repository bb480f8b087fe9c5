"""Every refusal a client can meet: one table, one renderer.

The rule: whatever goes wrong, in whatever layer, becomes a ``Refusal`` with a row of ``ROWS``, and
``render`` alone turns it into bytes. What a server says is taken over only through ``from_server``, which
keeps the words that help the client and nothing that tells of the inside (addresses, paths, other models).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import orjson

from upstream.errors import (
    BadAnswer,
    ConnectFailed,
    Disconnected,
    EngineDead,
    FirstByteTimeout,
    IdleTimeout,
    LocalLimit,
    ServerError,
    StaleConnection,
    TotalTimeout,
    UpstreamError,
)

INVALID_REQUEST, AUTHENTICATION, RATE_LIMIT, SERVER = "invalid_request_error", "authentication_error", "rate_limit_error", "server_error"


@dataclass(frozen=True, slots=True)
class Row:
    """What a code means on the wire: the HTTP status and OpenAI's error type."""

    status: int
    type: str


ROWS: Mapping[str, Row] = MappingProxyType(
    {
        "invalid_json": Row(400, INVALID_REQUEST),
        "invalid_value": Row(400, INVALID_REQUEST),
        "invalid_request": Row(400, INVALID_REQUEST),
        "missing_required_parameter": Row(400, INVALID_REQUEST),
        "context_length_exceeded": Row(400, INVALID_REQUEST),
        "missing_api_key": Row(401, AUTHENTICATION),
        "invalid_api_key": Row(401, AUTHENTICATION),
        "expired_api_key": Row(401, AUTHENTICATION),
        "model_not_found": Row(404, INVALID_REQUEST),
        "not_found": Row(404, INVALID_REQUEST),
        "method_not_allowed": Row(405, INVALID_REQUEST),
        "request_timeout": Row(408, INVALID_REQUEST),
        "request_too_large": Row(413, INVALID_REQUEST),
        "unsupported_media_type": Row(415, INVALID_REQUEST),
        "headers_too_large": Row(431, INVALID_REQUEST),
        "rate_limit_exceeded": Row(429, RATE_LIMIT),
        "insufficient_quota": Row(429, RATE_LIMIT),
        "server_error": Row(500, SERVER),
        "internal_error": Row(500, SERVER),
        "upstream_unreachable": Row(502, SERVER),
        "upstream_disconnected": Row(502, SERVER),
        "upstream_timeout": Row(504, SERVER),
        "model_loading": Row(503, SERVER),
        "overloaded": Row(503, SERVER),
        "draining": Row(503, SERVER),
        "no_healthy_server": Row(503, SERVER),
    }
)

CLIENT_CLOSED_REQUEST = 499
"""The status that metrics and log give to a request whose client left (nginx's number; it is never sent)."""

_RETRY_AFTER_DIGITS = 5  # of a server's number of seconds: about a day
_RETRY_AFTER = {"rate_limit_exceeded": 1, "model_loading": 5, "overloaded": 1, "draining": 5, "no_healthy_server": 5}


class Refusal(Exception):
    """A request ends with this error. ``code`` is a key of ``ROWS``; ``param`` names the field at fault."""

    def __init__(self, code: str, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.row = ROWS[code]
        self._headers = headers or {}

    @property
    def headers(self) -> dict[str, str]:
        """The headers that belong to the error: WWW-Authenticate with 401, Retry-After where it may be another one later."""
        headers = dict(self._headers)
        if self.row.status == 401:
            headers.setdefault("www-authenticate", "Bearer")
        if self.code in _RETRY_AFTER:
            headers.setdefault("retry-after", str(_RETRY_AFTER[self.code]))
        return headers


# What is said in more than one place


def draining() -> Refusal:
    return Refusal("draining", "The gateway is shutting down.")


def none_healthy() -> Refusal:
    return Refusal("no_healthy_server", "No server of this model is healthy at the moment.")


def internal_error() -> Refusal:
    return Refusal("internal_error", "The gateway failed. The request id tells the operator where to look.")


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
    """``{"error": {"message", "type", "param", "code"}}``."""
    return {"error": {"message": refusal.message, "type": refusal.row.type, "param": refusal.param, "code": refusal.code}}


def anthropic_error(refusal: Refusal) -> dict[str, Any]:
    """``{"type": "error", "error": {"type", "message"}}``, as Anthropic's API documents it."""
    fallback = "invalid_request_error" if refusal.row.status < 500 else "api_error"
    message, param = refusal.message, refusal.param
    if param is not None and param not in message:  # there is no member for it, so it is said as Anthropic says it
        message = f"{param}: {message}"
    return {"type": "error", "error": {"type": _ANTHROPIC_TYPES.get(refusal.row.status, fallback), "message": message}}


def render(refusal: Refusal, *, anthropic: bool = False) -> bytes:
    """The JSON body of an error."""
    return orjson.dumps(anthropic_error(refusal) if anthropic else openai_error(refusal))


def render_event(refusal: Refusal, *, dialect: str, number: int = 0) -> bytes:
    """The error as the last event of a stream that is already under way.

    ``dialect``: ``chat`` (also completions) ends with ``[DONE]``; ``responses`` and ``messages`` have named events, those of
    ``responses`` a ``number``: how many came before.
    """
    if dialect == "messages":
        return b"event: error\ndata: " + render(refusal, anthropic=True) + b"\n\n"
    if dialect == "responses":
        error = {"type": "error", "code": refusal.code, "message": refusal.message, "param": refusal.param, "sequence_number": number}
        return b"event: error\ndata: " + orjson.dumps(error) + b"\n\n"
    return b"data: " + render(refusal) + b"\n\ndata: [DONE]\n\n"


# Failures of a server

_FAILURES: Mapping[type[UpstreamError], tuple[str, str]] = MappingProxyType(
    {
        ConnectFailed: ("upstream_unreachable", "The model's server could not be reached."),
        LocalLimit: ("overloaded", "The gateway can open no more connections at the moment."),
        StaleConnection: ("upstream_disconnected", "The model's server closed the connection before it answered."),
        Disconnected: ("upstream_disconnected", "The model's server broke off its answer."),
        BadAnswer: ("upstream_disconnected", "The model's server gave no valid answer."),
        FirstByteTimeout: ("upstream_timeout", "The model's server did not begin to answer in time."),
        IdleTimeout: ("upstream_timeout", "The model's server fell silent in its answer."),
        TotalTimeout: ("upstream_timeout", "The answer took longer than this model's limit."),
    }
)


def from_failure(error: UpstreamError) -> Refusal:
    """What a client is told of a failure of the upstream side; the details are for the log."""
    for kind in type(error).__mro__:
        if kind in _FAILURES:
            return Refusal(*_FAILURES[kind])
    return Refusal("upstream_disconnected", "The model's server failed.")


_DEAD = ("EngineCore encountered an issue", "EngineDeadError", "cannot schedule new futures after shutdown")
"""The words of a vLLM whose engine is dead, or that is shutting down (vllm/v1/engine/exceptions.py; seen on a running one)."""


def fault(server: str, status: int, words: str) -> UpstreamError | None:
    """What a server's error answer says of the server itself; None for one that is its request's."""
    if status < 500:
        return None
    kind = EngineDead if any(mark in words for mark in _DEAD) else ServerError
    return kind(server, f"answered with status {status}")


# A server's own errors (facts read from vLLM 0.32's entrypoints and checked against a running one)

_PARAMETER = re.compile(r"\(parameter=[\w.\[\]]+(?:, value=|\)$)")
_OVERFLOW = re.compile(
    r"maximum context length is \d+|cannot be greater than max_model_len|longer than the maximum model length|max_model_len"
)
_INSIDE = re.compile(r"(?:unix|https?|tcp|ipc)://?\S+|(?<![\w.<])/(?:[\w.@+-]+/)+[\w.@+-]*|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")
_BODY_FIELD = re.compile(r"^body\.(?!\d+$)")
_FOUND_WRONG = re.compile(r"""'msg': (?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"), 'input': """)  # pydantic's findings as Python writes them
_TOO_LONG = ("input_tokens", "input_text")  # what vLLM blames when the text does not fit
_MESSAGE_LIMIT = 2000


def from_server(status: int, body: bytes, model: str, input_field: str, retry_after: bytes | None = None) -> Refusal:
    """Map an error answer of vLLM's (any of its shapes) to the contract.

    ``model`` is what the client asked for (a server's list of "valid aliases" never reaches it);
    ``input_field`` is the field of this route that holds the text, blamed when the text is too long;
    ``retry_after`` is the server's header of that name, kept where it is a number of seconds of up to five digits.
    """
    message, kind, param = _read(body)
    refusal = classify(status, message, kind, param, model, input_field)
    if retry_after is not None and retry_after.isdigit() and len(retry_after) <= _RETRY_AFTER_DIGITS and refusal.code in _RETRY_AFTER:
        return Refusal(refusal.code, refusal.message, headers={"retry-after": retry_after.decode()})
    return refusal


def from_event(error: Mapping[str, Any], model: str, input_field: str) -> Refusal:
    """Map vLLM's in-band error object (``{"message", "type", "param", "code"}``) to the contract."""
    return classify(
        event_status(error), _text(error.get("message")), _text(error.get("type")), _name(error.get("param")), model, input_field
    )


def event_status(error: Mapping[str, Any]) -> int:
    """The status that an in-band error would have had."""
    code = error.get("code")
    return code if isinstance(code, int) and 400 <= code <= 599 else 500


def classify(status: int, message: str, kind: str, param: str | None, model: str, input_field: str) -> Refusal:
    """The decision behind ``from_server`` and ``from_event``, in the order of the rules below."""
    if status == 404 or kind == "NotFoundError":
        return _no_route(model) if message == "Not Found" else unknown_model(model)  # the words are FastAPI's, for a path it does not have
    if status in (401, 403):  # our key was refused by our server: not the client's fault
        return Refusal("server_error", "The model's server refused the gateway.")
    if status == 429:  # no vLLM says so, but what stands in front of one may
        return Refusal("rate_limit_exceeded", "The model's server takes no more requests at the moment.")
    if status == 503:
        return Refusal("overloaded", "The model's server is overloaded.")
    if status >= 500 or status < 400:
        return Refusal("server_error", "The model's server failed.")
    words = _helpful(message)
    if param in _TOO_LONG or (_OVERFLOW.search(message) and status == 400):
        blamed = input_field if param in _TOO_LONG else param
        return Refusal("context_length_exceeded", words or "The input is too long for this model.", param=blamed)
    if status == 413:
        return Refusal("request_too_large", words or "The request is too large.")
    if status == 415:
        return Refusal("unsupported_media_type", words or "The content type is not supported.")
    return Refusal("invalid_value" if param else "invalid_request", words or "The request is not valid.", param=param)


def _no_route(model: str) -> Refusal:
    """A chat model has no /v1/embeddings, and the other way round."""
    return Refusal("not_found", f"The model `{model[:200]}` does not serve this route.")


def unknown_model(model: str) -> Refusal:
    """One wording for a model that does not exist and for one outside the key's scope."""
    return Refusal("model_not_found", f"The model `{model[:200]}` does not exist or you do not have access to it.", param="model")


def _read(body: bytes) -> tuple[str, str, str | None]:
    """(message, type, param) of any error shape vLLM has: its own, FastAPI's ``detail``, Anthropic's, a bare string."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "", "", None
    if not isinstance(document, dict):
        return "", "", None
    error = document.get("error", document.get("detail"))
    if isinstance(error, dict):
        return _text(error.get("message")), _text(error.get("type")), _name(error.get("param"))
    return _text(error), "", None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _name(value: object) -> str | None:
    """The field's name; vLLM writes ``body.9`` for a byte offset, which names no field."""
    if not isinstance(value, str) or re.fullmatch(r"body\.\d+", value):
        return None
    return _BODY_FIELD.sub("", value) or None


def _helpful(message: str) -> str:
    """The server's words without its internals. Takes time in proportion to their length: a client's text may be in them.

    Of pydantic's findings the sentences alone: with them comes what the client sent, a prompt perhaps, and who logs an
    error does not expect it.
    """
    message = message.rstrip()
    if " validation error" in message[:40]:
        found = ("".join(match.groups("")) for match in _FOUND_WRONG.finditer(message))
        message = "; ".join(dict.fromkeys(found)) or "The request does not have the right shape."
    parameter = _PARAMETER.search(message) if message.endswith(")") else None
    if parameter is not None:
        message = message[: parameter.start()]
    return _INSIDE.sub("…", message).strip()[:_MESSAGE_LIMIT]
