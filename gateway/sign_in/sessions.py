"""Sessions: the signed cookie of a person, and its check by any process of any gateway. Pure.

The rules: a session is valid while it is signed, not revoked, of a trusted issuer, used within the idle time, and younger than the
lifetime. Its lifetime follows from the time of the sign-in, so a shorter setting also ends older sessions. While the revoked IDs are
unknown, no session is valid.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from gateway.access.actor import Actor, PersonId, Role
from gateway.sign_in.browser import Headers, Port, cookie, delete_cookie, session_cookie, set_cookie
from gateway.sign_in.errors import SignInError
from gateway.sign_in.signature import MAX_VALUE, Signer
from gateway.snapshot.snapshot import SessionRules

LINK_ISSUER = ""
"""The issuer of the people who use sign-in links."""
_CLOCKS = 60  # seconds by which the clocks of two gateways may differ
_RENEWALS = 10  # in the idle time


@dataclass(frozen=True, slots=True)
class Person:
    """A person as the last sign-in described them.

    ``issuer`` is a URL, or ``LINK_ISSUER``. ``provider`` is the ID of the issuer's entry in the configuration. ``teams`` are the IDs of the
    person's teams, and ``owned_teams`` of those that the person owns. ``name`` is for display only: people choose it.
    """

    issuer: str
    provider: str
    subject: str
    name: str
    role: Role | None
    teams: tuple[str, ...] = ()
    owned_teams: tuple[str, ...] = ()

    @property
    def identity(self) -> PersonId:
        """The issuer and the subject, without the role and the teams."""
        return PersonId(self.issuer, self.subject)

    @property
    def actor(self) -> Actor:
        """The person as an actor. Its name is unique: a subject contains no space, and no issuer has the same ``provider``."""
        return Actor("person", f"{self.provider}:{self.subject}", self.role, frozenset(self.owned_teams), self.identity)


@dataclass(frozen=True, slots=True)
class Session:
    """A session. ``created`` and ``seen`` (the last renewal) are in whole seconds since the epoch."""

    id: str
    person: Person
    created: int
    seen: int

    def document(self) -> dict[str, Any]:
        """Return the person of the session as JSON."""
        person = self.person
        return {"name": person.name, "role": person.role, "teams": person.teams, "owned_teams": person.owned_teams}


@dataclass(frozen=True, slots=True)
class Logout:
    """The verified claims of a logout token: the sessions with this ``sid``, or all of this subject.

    ``identity`` comes from the token. ``expires`` is in seconds since the epoch.
    """

    issuer: str
    identity: str
    expires: float
    subject: str | None
    sid: str | None


def new_session(person: Person, now: float) -> Session:
    """Return a new session with a random ID of 128 bits."""
    return Session(secrets.token_urlsafe(16), person, int(now), int(now))


class Sessions:
    """Writes and checks the session cookies of one port. ``revoked`` are the IDs of revoked sessions; None: they are not known yet."""

    def __init__(self, rules: SessionRules, port: Port, revoked: Collection[str] | None) -> None:
        self._rules = rules
        self.cookie = session_cookie(port, secure=rules.secure)
        self._revoked = None if revoked is None else frozenset(revoked)
        self._issuers = frozenset(rules.issuers)
        self._signer = Signer(rules.key, f"session {port}", Session)

    def write(self, session: Session) -> str:
        """Return the ``Set-Cookie`` value of a session. Raises SignInError if it is too large for a cookie."""
        text = self._signer.sign(session)
        if len(text) > MAX_VALUE:
            raise SignInError("Your account has too many teams for a session.", detail=f"the cookie has {len(text)} bytes", status=403)
        return set_cookie(self.cookie, text, self._rules.lifetime)

    def read(self, headers: Headers, now: float) -> Session | None:
        """Return the valid session of a request, None without one."""
        text = cookie(headers, self.cookie)
        session = None if text is None else self._signer.read(text)
        return session if session is not None and self._is_valid(session, now) else None

    def renewal(self, session: Session, now: float) -> dict[str, str]:
        """Return the header that records the use of a session, for its response; empty while the present cookie is recent enough."""
        if now - session.seen < self._rules.idle / _RENEWALS:
            return {}
        return {"set-cookie": self.write(replace(session, seen=int(now)))}

    def delete(self) -> str:
        """Return the ``Set-Cookie`` value that deletes the cookie."""
        return delete_cookie(self.cookie)

    def expires(self, session: Session) -> float:
        """Return when a session expires at the latest, in seconds since the epoch."""
        return session.created + self._rules.lifetime

    def _is_valid(self, session: Session, now: float) -> bool:
        if self._revoked is None or session.id in self._revoked or session.person.issuer not in self._issuers:
            return False
        if max(session.created, session.seen) > now + _CLOCKS:
            return False
        return now < session.seen + self._rules.idle and now < self.expires(session)
