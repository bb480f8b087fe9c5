"""What an operator may have done to a running gateway and its models.

The words are the same everywhere: commands, routes of the admin API, methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

OPERATIONS = ("start", "stop", "restart", "wake")


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of the files. ``when``: wall clock. All are sentences: ``problems`` is why it was not taken, ``changes`` what it
    brought, ``waiting`` what of it needs a restart."""

    when: float
    problems: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()

    @property
    def successful(self) -> bool:
        return not self.problems

    def shown(self) -> dict[str, Any]:
        """As /status shows it."""
        return {
            "successful": self.successful,
            "when": self.when,
            "problems": list(self.problems),
            "changes": list(self.changes),
            "needs_restart": list(self.waiting),
        }


class RefusedOperation(Exception):
    """It is not done; the text tells the operator why."""


class Operations(Protocol):
    """Those of ``OPERATIONS`` take a model's id. Each raises RefusedOperation.

    They return when the workers know of it and what /status says of the model is the answer; how long servers take to come up nobody
    waits for.
    """

    async def reload(self) -> Reading:
        """Read the configuration again, and serve by it if it is good."""

    async def drain(self) -> None:
        """Begin to stop as at a SIGTERM: requests under way go on to their end."""

    async def start(self, model: str) -> None:
        """Begin to bring the servers up, and keep them up."""

    async def stop(self, model: str) -> None:
        """End the servers, and wait for that; none is started again until ``start`` or ``wake``."""

    async def restart(self, model: str) -> None:
        """Begin to replace the servers, one after the other: the first one gets no more requests."""

    async def wake(self, model: str) -> None:
        """Begin to bring the servers up as a request would."""
