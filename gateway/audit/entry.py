"""The record of one change. The rule: an entry contains no secret, neither of the configuration nor of a key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.access.actor import Actor, Requester

_MAX_TARGET = 256


@dataclass(frozen=True, slots=True)
class Entry:
    """A change, or an attempt that was refused.

    ``action`` names it with dots, for example ``key.create`` or ``model.restart``; an attempt that was refused ends in ``.refused``.
    ``origin`` is the client's address, or the process behind the admin socket. ``target`` is the ID of what was changed. ``before`` and
    ``after`` are JSON objects: only what the change is about. None: it did not exist before, or does not exist afterwards.
    """

    action: str
    actor: Actor
    origin: str
    target: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None


def refused_request(requester: Requester, method: str, path: str, reason: str) -> Entry:
    """Return the entry of a request to the admin port that was refused. A long path is cut."""
    return Entry("request.refused", requester.actor, requester.origin, f"{method} {path}"[:_MAX_TARGET], None, {"reason": reason})


class AuditUnavailableError(Exception):
    """An entry cannot be made durable, so the change must not be acknowledged. The text explains why."""


class Audit(Protocol):
    """The audit log, for the parts that change something. Each call may wait for a disk, so it belongs on a thread."""

    def check(self) -> None:
        """Raise AuditUnavailableError if an entry could not be recorded now. Call it before a change."""

    def record(self, entry: Entry) -> None:
        """Record a change. Returns when the entry is durable, and only then may the change be acknowledged.

        Raises AuditUnavailableError.
        """

    def record_refused(self, entry: Entry) -> None:
        """Record a refused attempt. Never raises. Their number is bounded, because any client can cause them."""


class NoAudit:
    """Records nothing: no audit log is configured."""

    def check(self) -> None:
        """Do nothing."""

    def record(self, entry: Entry) -> None:
        """Do nothing."""

    def record_refused(self, entry: Entry) -> None:
        """Do nothing."""
