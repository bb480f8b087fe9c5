"""The actor of a request or a change: an admin token, a person, the admin socket, or an unauthenticated client of the loopback interface.

The rule: an actor is made once, where it is authenticated, and is never changed. It contains no secret, so it can be logged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

Kind = Literal["token", "person", "socket", "loopback", "unauthenticated", "gateway"]
"""``loopback`` is a client of an admin port without tokens, and ``gateway`` the gateway itself, for example after a file has changed."""


class Role(StrEnum):
    """The rights of an actor on the whole gateway, from the fewest to the most."""

    VIEWER = "viewer"
    """Reads metrics, status, usage, limits and keys."""
    OPERATOR = "operator"
    """Also operates models and servers, reloads and drains."""
    ADMIN = "admin"
    """Also changes keys, teams and sign-ins, and reads the audit log."""


RANKS = {role: rank for rank, role in enumerate(Role)}


class PersonId(NamedTuple):
    """A person: the URL of the issuer, empty for sign-in links, and the subject there. Only the pair is unique."""

    issuer: str
    subject: str


@dataclass(frozen=True, slots=True)
class Actor:
    """An authenticated client.

    ``name`` is the name of the token, the person's subject, or the process behind the socket. ``role`` is None without a role on the whole
    gateway, as for the owner of a team. ``teams`` are the IDs of the teams that the actor owns. ``person`` is None for other kinds; two
    actors with the same ``name`` are the same person.
    """

    kind: Kind
    name: str
    role: Role | None
    teams: frozenset[str] = frozenset()
    person: PersonId | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.name else self.kind


@dataclass(frozen=True, slots=True)
class Requester:
    """The actor of a request, and where it comes from: the client's address, or the process behind the admin socket."""

    actor: Actor
    origin: str

    def __str__(self) -> str:
        return f"{self.actor.name} ({self.origin})" if self.actor.kind == "socket" else f"the {self.actor}, from {self.origin}"
