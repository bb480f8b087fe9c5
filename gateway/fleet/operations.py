"""The operations on a running gateway and its models that operators request.

The names are the same in commands, in routes of the admin API and in methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gateway.access.actor import Requester
from gateway.config import Problem

OPERATIONS = ("start", "stop", "restart", "wake")
SERVER_OPERATIONS = ("cordon", "uncordon")


class RefusedOperation(Exception):
    """The operation was not started. The text explains the reason to the operator."""


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """The result of reading the configuration again.

    ``when`` is wall clock. The other fields are sentences: ``problems`` explain why the configuration was rejected, ``changes`` what
    changed, and ``needs_restart`` which changes take effect only after a restart. ``earlier``: for a result without changes, the result
    shortly before it that had some, because the files are also read when they change.
    """

    when: float
    problems: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()
    earlier: ReloadResult | None = None

    @property
    def successful(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Return the result in the form of /status."""
        earlier = None if self.earlier is None else {"when": self.earlier.when, "changes": self.earlier.changes}
        return {"successful": not self.problems, **asdict(self), "earlier": earlier}


@dataclass(frozen=True, slots=True)
class Preview:
    """The effects of the next reload, as the files are now.

    ``applied`` is when the configuration in use was read, and ``by`` who requested it, None for the start. ``last`` is the last reload. If
    there are ``problems``, it would be rejected, and the fields after it are empty. ``loaded`` and ``read`` have the values of the settings
    that differ, without secrets. ``restarts``, ``starts`` and ``stops`` are models with the numbers of their launched servers.
    """

    files: tuple[Path, ...]
    applied: float
    by: Requester | None
    last: ReloadResult
    problems: tuple[Problem, ...] = ()
    changes: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()
    loaded: Mapping[str, Any] = field(default_factory=dict)
    read: Mapping[str, Any] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    starts: Mapping[str, int] = field(default_factory=dict)
    stops: Mapping[str, int] = field(default_factory=dict)


class Operations(Protocol):
    """The operations of an operator. Each operation raises RefusedOperation.

    The operations named in ``OPERATIONS`` take a model ID, those in ``SERVER_OPERATIONS`` a server's name.

    Each returns when the workers have applied the change and /status shows it. No operation waits for servers to become ready.
    """

    async def reload(self, requester: Requester) -> ReloadResult:
        """Read the configuration again, and apply it if it is valid."""

    async def drain(self) -> None:
        """Start to stop as SIGTERM does: open requests finish."""

    async def start(self, model: str) -> None:
        """Start the model's servers, and keep them running."""

    async def stop(self, model: str) -> None:
        """Stop the model's servers, and return when they have ended. They stay down until ``start`` or ``wake``."""

    async def restart(self, model: str) -> None:
        """Start to replace the model's servers, one at a time. The first server is out of rotation on return."""

    async def wake(self, model: str) -> None:
        """Start the model's servers as a request would."""

    async def cordon(self, server: str) -> None:
        """Take one server out of rotation. Its requests finish or continue elsewhere."""

    async def uncordon(self, server: str) -> None:
        """Return a server to rotation."""
