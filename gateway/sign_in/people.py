"""The database of people, sessions and sign-in links.

The rules: whatever may happen once is decided by the database, so it happens once with any number of gateways. A change is complete when
its call returns. Every call may take as long as the database does, so calls belong on a thread. Each raises DatabaseUnavailableError.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Select, delete, func, insert, select, tuple_, update

from gateway.access.actor import PersonId, Role
from gateway.ledger.schema import utc
from gateway.ledger.statements import insert_into
from gateway.ledger.store import Database
from gateway.sign_in.browser import Port
from gateway.sign_in.sessions import Logout, Person, Session
from gateway.sign_in.tables import PEOPLE, SESSIONS, SIGN_IN_LINKS, USED_ONCE

_ELEMENTS = {"postgresql": func.jsonb_array_elements_text, "sqlite": func.json_each}
"""The function with the elements of a list, each as ``value``."""


@dataclass(frozen=True, slots=True)
class NewSession:
    """A session to store. ``sid`` is the ID of the provider's own session, ``expires`` in seconds since the epoch."""

    session: Session
    port: Port
    expires: float
    sid: str | None = None
    id_token: str | None = None


@dataclass(frozen=True, slots=True)
class SignInLink:
    """The role and teams that a sign-in link grants. ``created_by`` is the actor that made it; times are in seconds since the epoch."""

    subject: str
    role: Role | None
    teams: tuple[str, ...]
    owned_teams: tuple[str, ...]
    created_by: str
    expires: float


@dataclass(frozen=True, slots=True)
class EndedSession:
    """A session that has been revoked. ``id_token`` is the hint for the provider's own logout."""

    id: str
    issuer: str
    subject: str
    id_token: str | None


@dataclass(frozen=True, slots=True)
class KnownPerson:
    """A person as the last sign-in described them. ``sessions`` is the number of valid sessions; times are in seconds since the epoch."""

    id: str
    identity: PersonId
    name: str
    role: Role | None
    teams: tuple[str, ...]
    owned_teams: tuple[str, ...]
    created: float
    last_sign_in: float
    sessions: int

    @property
    def position(self) -> str:
        """The position of the person in a list, as ``person_at`` reads it."""
        return json.dumps(self.identity)


def person_at(position: str) -> PersonId | None:
    """Return the person at a position of a list; None for its start. Raises ValueError with a message for the client."""
    if not position:
        return None
    try:
        found = json.loads(position)
    except (ValueError, RecursionError):
        found = None
    match found:
        case [str(issuer), str(subject)] if _is_text(issuer + subject):
            return PersonId(issuer, subject)
    raise ValueError("cursor: expected the next_cursor of an earlier page")


def _is_text(text: str) -> bool:
    """Return whether PostgreSQL can store a text: it has neither a NUL nor half of a surrogate pair."""
    return not any(each == "\0" or "\ud800" <= each <= "\udfff" for each in text)


def digest(purpose: str, *values: str) -> bytes:
    """Return the SHA-256 under which a value is stored."""
    return hashlib.sha256("\0".join((purpose, *values)).encode()).digest()


class PeopleStore(Database):
    """Reads and changes the tables. ``engine`` is the store's, which closes it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._dialect = engine.dialect.name

    def use_once(self, value: bytes, expires: float) -> bool:
        """Note that a value is used; False if it was used before. ``expires``: when the value is invalid anyway."""
        with self.transaction() as connection:
            return self._use(connection, value, expires)

    def sign_in(self, new: NewSession, replaced: Sequence[str], now: float) -> bool:
        """Store a person and a new session, and revoke the ``replaced`` ones; False if the provider's session has ended meanwhile."""
        person = new.session.person
        with self.transaction() as connection:
            identity = self._store(connection, person, now)
            if new.sid is not None and self._was_used(connection, _ended(person.issuer, new.sid)):
                return False
            row = {"id": new.session.id, "person": identity, "port": new.port, "sid": new.sid, "id_token": new.id_token}
            connection.execute(insert(SESSIONS).values(**row, created=_time(now), expires=_time(new.expires)))
            _revoke(connection, select(SESSIONS.c.id).where(SESSIONS.c.id.in_(replaced)), now)
            return True

    def sign_out(self, sessions: Sequence[str], now: float) -> list[EndedSession]:
        """Revoke sessions, and those of the same session at the provider, on both ports. Returns them."""
        with self.transaction() as connection:
            same = select(SESSIONS.c.person, SESSIONS.c.sid).where(SESSIONS.c.id.in_(sessions), SESSIONS.c.sid.is_not(None)).subquery()
            siblings = select(SESSIONS.c.id).join(same, (SESSIONS.c.person == same.c.person) & (SESSIONS.c.sid == same.c.sid))
            return _revoke(connection, select(SESSIONS.c.id).where(SESSIONS.c.id.in_(sessions)).union(siblings), now)

    def log_out(self, logout: Logout, lifetime: float, now: float) -> list[EndedSession]:
        """Revoke the sessions that a logout token names: of one session at the provider, or of the whole person. Returns them.

        A repeated token revokes nothing: it would also end sessions that began after it. A sign-in of the same provider's session that is
        not complete yet is refused within ``lifetime``.
        """
        issuer, subject, sid = logout.issuer, logout.subject, logout.sid
        with self.transaction() as connection:
            if not self._use(connection, digest("logout", issuer, logout.identity), logout.expires):
                return []
            wanted = select(SESSIONS.c.id).join(PEOPLE, SESSIONS.c.person == PEOPLE.c.id).where(PEOPLE.c.issuer == issuer)
            if subject is not None:
                wanted = wanted.where(PEOPLE.c.subject == subject)
            if sid is not None:
                self._use(connection, _ended(issuer, sid), now + lifetime)
                wanted = wanted.where(SESSIONS.c.sid == sid)
            return _revoke(connection, wanted, now)

    def revoked(self, now: float) -> tuple[str, ...]:
        """Return the IDs of the revoked sessions that would still be valid."""
        query = select(SESSIONS.c.id).where(SESSIONS.c.expires > _time(now), SESSIONS.c.revoked.is_not(None))
        return tuple(sorted(row.id for row in self.rows(query)))

    def people(
        self, after: PersonId | None, limit: int, now: float, *, subject: str | None = None, team: str | None = None
    ) -> list[KnownPerson]:
        """Return the first ``limit`` people after one, by issuer and subject: all, those with a subject, or those of a team."""
        is_valid = (SESSIONS.c.person == PEOPLE.c.id, SESSIONS.c.revoked.is_(None), SESSIONS.c.expires > _time(now))
        sessions = select(func.count()).select_from(SESSIONS).where(*is_valid).scalar_subquery().label("sessions")
        query = select(*PEOPLE.c, sessions).order_by(PEOPLE.c.issuer, PEOPLE.c.subject).limit(limit)
        if after is not None:
            query = query.where(tuple_(PEOPLE.c.issuer, PEOPLE.c.subject) > tuple_(*after))
        if subject is not None:
            query = query.where(PEOPLE.c.subject == subject)
        if team is not None:
            elements = _ELEMENTS[self._dialect](PEOPLE.c.teams).table_valued("value")
            query = query.where(select(elements.c.value).where(elements.c.value == team).exists())
        return [_known(row) for row in self.rows(query)]

    def end_sessions(self, person: str, now: float) -> tuple[PersonId, list[EndedSession]] | None:
        """Revoke all sessions of the person with this ID, on both ports. Returns the person and the sessions; None without the person."""
        with self.transaction() as connection:
            found = connection.execute(select(PEOPLE.c.issuer, PEOPLE.c.subject).where(PEOPLE.c.id == person)).first()
            if found is None:
                return None
            return PersonId(*found), _revoke(connection, select(SESSIONS.c.id).where(SESSIONS.c.person == person), now)

    def add_link(self, token: str, link: SignInLink, now: float) -> None:
        """Store a sign-in link under the digest of its token."""
        granted = {"role": link.role, "teams": list(link.teams), "owned_teams": list(link.owned_teams)}
        times = {"created": _time(now), "expires": _time(link.expires)}
        row = {"digest": digest("link", token), "subject": link.subject, "created_by": link.created_by}
        self.run(insert(SIGN_IN_LINKS).values(**row, **granted, **times))

    def link(self, token: str, now: float) -> SignInLink | None:
        """Return an unused sign-in link; None if it was used, has expired or does not exist."""
        return next(map(_link, self.rows(select(SIGN_IN_LINKS).where(*_unused(token, now)))), None)

    def use_link(self, token: str, now: float) -> SignInLink | None:
        """Use a sign-in link, once; None if it was used, has expired or does not exist."""
        used = update(SIGN_IN_LINKS).where(*_unused(token, now)).values(used=_time(now)).returning(*SIGN_IN_LINKS.c)
        return next(map(_link, self.rows(used)), None)

    def prune(self, now: float) -> None:
        """Delete what has expired. People are retained."""
        with self.transaction() as connection:
            for table in (SESSIONS, SIGN_IN_LINKS, USED_ONCE):
                connection.execute(delete(table).where(table.c.expires <= _time(now)))

    def _use(self, connection: Connection, value: bytes, expires: float) -> bool:
        # The driver of PostgreSQL reports no number of rows for an INSERT, so the row itself is returned.
        row = insert_into(USED_ONCE, self._dialect).values(digest=value, expires=_time(expires)).on_conflict_do_nothing()
        return connection.execute(row.returning(USED_ONCE.c.digest)).first() is not None

    def _was_used(self, connection: Connection, value: bytes) -> bool:
        return connection.execute(select(USED_ONCE.c.digest).where(USED_ONCE.c.digest == value)).first() is not None

    def _store(self, connection: Connection, person: Person, now: float) -> str:
        """Store a person as the sign-in describes them, and return the ID of the row."""
        granted = {"name": person.name, "role": person.role, "teams": list(person.teams), "owned_teams": list(person.owned_teams)}
        row = {"id": secrets.token_urlsafe(16), "issuer": person.issuer, "subject": person.subject, "created": _time(now)}
        known = {**granted, "last_sign_in": _time(now)}
        made = insert_into(PEOPLE, self._dialect).values(**row, **known)
        made = made.on_conflict_do_update(index_elements=["issuer", "subject"], set_=known)
        return str(connection.execute(made.returning(PEOPLE.c.id)).scalar_one())


def _revoke(connection: Connection, ids: Any, now: float) -> list[EndedSession]:
    """Revoke the sessions that a query selects, and return those that were not revoked before. Their ID tokens are forgotten."""
    wanted: Select[Any] = (
        select(SESSIONS.c.id, PEOPLE.c.issuer, PEOPLE.c.subject, SESSIONS.c.id_token)
        .join(PEOPLE, SESSIONS.c.person == PEOPLE.c.id)
        .where(SESSIONS.c.id.in_(ids), SESSIONS.c.revoked.is_(None))
    )
    ended = [EndedSession(*row) for row in connection.execute(wanted)]
    revoked = update(SESSIONS).where(SESSIONS.c.id.in_([each.id for each in ended])).values(revoked=_time(now), id_token=None)
    connection.execute(revoked)
    return ended


def _ended(issuer: str, sid: str) -> bytes:
    return digest("ended", issuer, sid)


def _unused(token: str, now: float) -> tuple[ColumnElement[bool], ...]:
    links = SIGN_IN_LINKS.c
    return links.digest == digest("link", token), links.used.is_(None), links.expires > _time(now)


def _link(row: Any) -> SignInLink:
    return SignInLink(row.subject, _role(row), tuple(row.teams), tuple(row.owned_teams), row.created_by, _seconds(row.expires))


def _known(row: Any) -> KnownPerson:
    identity, teams, owned = PersonId(row.issuer, row.subject), tuple(row.teams), tuple(row.owned_teams)
    times = _seconds(row.created), _seconds(row.last_sign_in)
    return KnownPerson(row.id, identity, row.name, _role(row), teams, owned, *times, row.sessions)


def _role(row: Any) -> Role | None:
    return None if row.role is None else Role(row.role)


def _seconds(moment: datetime) -> float:
    """Return a time of the database in seconds since the epoch."""
    return utc(moment).timestamp()


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
