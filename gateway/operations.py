"""What an operator may have done to a model of a running gateway.

The words are the same everywhere: commands, routes of the admin socket, methods.
"""

from __future__ import annotations

from typing import Protocol

OPERATIONS = ("start", "stop", "restart", "wake")


class RefusedOperation(Exception):
    """It is not done; the text tells the operator why."""


class Operations(Protocol):
    """Each takes a model's id, and raises RefusedOperation."""

    async def start(self, model: str) -> None:
        """Bring the servers up and keep them up."""

    async def stop(self, model: str) -> None:
        """End the servers; none is started again until ``start`` or ``wake``."""

    async def restart(self, model: str) -> None:
        """End the servers and start them anew."""

    async def wake(self, model: str) -> None:
        """Bring the servers up as a request would."""
