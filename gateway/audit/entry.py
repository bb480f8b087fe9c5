"""The record of one change. The rule: an entry contains no secret, neither of the configuration nor of a key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.access.actor import Actor


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
