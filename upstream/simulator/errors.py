"""The errors of vLLM: statuses, shapes and messages.

Owns the error bodies (serve/exception_handling and the request models of vLLM 0.32). An ``ApiError`` is raised
where the error is detected. The response renders it once, as a status or as an event of the stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any, Final

from pydantic_core import ErrorDetails

ENGINE_DEAD: Final = "EngineCore encountered an issue. See stack trace (above) for the root cause."
OVERLOADED: Final = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."

# pydantic's names for the branches of a union, which are not part of a field's path.
_INTERNAL = re.compile(r"[\[\]{}()]|^(?:str|int|float|bool|list|dict|none|constrained-.*)$", re.IGNORECASE)
_MOST_ERRORS = 10
_MOST_CHARACTERS = 200


class ApiError(Exception):
    """An error response: its ``status``, and the fields of the error object."""

    def __init__(self, message: str, status: int = 400, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}

    def event(self) -> bytes:
        """Return the error event of a chat or completions stream; only here vLLM's ``json.dumps`` leaves spaces."""
        return b"data: " + json.dumps(self.body()).encode() + b"\n\n"

    def messages_body(self) -> dict[str, Any]:
        """Return the error of /v1/messages."""
        return {"type": "error", "error": {"type": self.kind, "message": self.message}}


def bad(message: str, param: str | None = None, value: object = None) -> ApiError:
    """Return vLLM's VLLMValidationError, which appends its parameter and value to the message."""
    extras = [f"{name}={given}" for name, given in (("parameter", param), ("value", value)) if given is not None]
    return ApiError(f"{message} ({', '.join(extras)})" if extras else message, param=param)


def plain(message: str, param: str | None = None) -> ApiError:
    """Return a BadRequestError without parameter and value."""
    return ApiError(message, param=param)


def status(code: int) -> ApiError:
    """Return an error for a status, with vLLM's message for an HTTP error."""
    phrase = HTTPStatus(code).phrase
    return ApiError(OVERLOADED if code == 503 else phrase, code, phrase)


def engine_dead() -> ApiError:
    """Return the error of requests after the engine has died."""
    return ApiError(ENGINE_DEAD, 500, "InternalServerError")


def shut_down() -> ApiError:
    """Return the error of requests during the shutdown."""
    return ApiError("cannot schedule new futures after shutdown", 500, "InternalServerError")


def unknown_model(name: object, served: Iterable[str]) -> ApiError:
    """Return the error of an unknown model name. ``served``: the valid names."""
    return ApiError(f"The model `{name}` does not exist. Valid aliases: {', '.join(served)}.", 404, "NotFoundError", "model")


def scale_out_disabled() -> ApiError:
    """Return the error of the scale-out routes without their flag."""
    message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
    return ApiError(message, 403, "PermissionDeniedError")


def not_simulated(message: str) -> ApiError:
    """Return the error of a valid request that vLLM serves, and the simulator does not."""
    return ApiError(message, 501, "NotImplementedError")


def wrong_content_type() -> ApiError:
    """Return the error of a body that is not declared as JSON."""
    return ApiError("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", 400, "Bad Request")


def bad_json(error: json.JSONDecodeError) -> ApiError:
    """Return the error of a body that is not valid JSON."""
    detail = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {}, "ctx": {"error": error.msg}}
    return malformed([detail])


def malformed(errors: Sequence[ErrorDetails | dict[str, Any]], prefix: tuple[str, ...] = ()) -> ApiError:
    """Return an error about wrong types and missing fields. It lists pydantic's errors as vLLM does (handlers/validation.py)."""
    listed = [_readable(error, prefix) for error in errors[:_MOST_ERRORS]]
    label = "error" if len(errors) == 1 else "errors"
    lines = [f"{len(errors)} validation {label}:", *(f"  {error}" for error in listed)]
    if len(errors) > len(listed):
        lines.append(f"  ...and {len(errors) - len(listed)} more {label}")
    return ApiError("\n".join(lines), 400, "Bad Request", listed[0]["loc"])


def _readable(error: ErrorDetails | dict[str, Any], prefix: tuple[str, ...]) -> dict[str, Any]:
    path = [str(step) for step in (*prefix, *error["loc"]) if not _INTERNAL.search(str(step))]
    return {**error, "loc": ".".join(path), "input": _summary(error.get("input"))}


def _summary(value: object) -> object:
    if isinstance(value, str):
        return value if len(value) <= _MOST_CHARACTERS else value[:_MOST_CHARACTERS] + "...[truncated]"
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)[:_MOST_CHARACTERS]
