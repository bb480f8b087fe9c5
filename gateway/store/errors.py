"""Errors of the store."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """Why a change was refused. The value is the HTTP status of the refusal."""

    INVALID = 400
    FORBIDDEN = 403
    NOT_FOUND = 404
    CONFLICT = 409
    CHANGED = 412
    OTHER_REQUEST = 422


class RefusedChangeError(Exception):
    """A change was refused, and nothing was written. The text explains the reason to the operator."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
