"""The store's database: transactions that change entries, and what was changed since a row of the change log.

The rules: changes run one after the other, in all gateways together, so the rows of the log are visible in the order of their numbers. Each
change writes its entry, the index of hashes and its row of the log in one transaction, which also notifies the other gateways. Every call
may take as long as the database does, so calls belong on a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import JSON, ColumnElement, Connection, Select, Table, and_, cast, delete, func, insert, or_, select, update
from sqlalchemy.engine import URL
from sqlalchemy.exc import IntegrityError

from gateway.access.actor import PersonId
from gateway.ledger.schema import utc
from gateway.ledger.statements import batches
from gateway.ledger.store import Database, create_database_engine
from gateway.store.entries import Holder, Kind, Position, Row, hashes_and_team
from gateway.store.errors import Reason, RefusedChangeError
from gateway.store.schema import CHANGES, IDEMPOTENCY, KEY_HASHES, KEYS, RAISES, TEAMS

CHANNEL = "gateway_key_changes"
"""The channel of NOTIFY."""
_TABLES: Mapping[Kind, Table] = {"key": KEYS, "team": TEAMS}
# One change at a time, until the transaction ends. The number is arbitrary but unique to this project.
_LOCKS = {
    "postgresql": (
        "SET LOCAL lock_timeout = '5s'",
        "SET LOCAL statement_timeout = '10s'",
        # A gateway that is cut off during a change blocks the others only until the server ends its transaction.
        "SET LOCAL idle_in_transaction_session_timeout = '10s'",
        "SELECT pg_advisory_xact_lock(1986817134)",
    ),
    "sqlite": ("BEGIN IMMEDIATE",),
}
SEARCHED = 200_000
"""Entries that one search reads at most."""
_MAX_CHANGES = 100_000  # rows of the log that are kept
_PRUNE_EVERY = 1_000  # changes
_REMEMBERED = timedelta(hours=24)  # for which a request with an Idempotency-Key is remembered
T = TypeVar("T")


class Changed(NamedTuple):
    """Entries of one kind after changes: their JSON by ID, and the IDs that do not exist any more."""

    entries: Mapping[str, str]
    removed: Sequence[str] = ()


class Changes(NamedTuple):
    """The changes up to a position. ``is_complete``: everything that exists, not only what changed."""

    position: Position
    keys: Changed
    teams: Changed
    is_complete: bool = False
    raises: Mapping[Holder, str] = {}
    """The raises of limits as JSON, of each key or team that changed and has any."""


class SearchPage(NamedTuple):
    """The entries that a search has found, in the order of their IDs. ``last``: the last ID that was read; None: there are no more."""

    rows: list[Row]
    last: str | None


class Transaction:
    """One change of the database. Nothing of it is visible until it is committed."""

    def __init__(self, connection: Connection, now: datetime) -> None:
        self._connection = connection
        self._now = now

    def row(self, kind: Kind, identity: str) -> Row:
        """Return an entry. Raises RefusedChangeError."""
        if (found := self.find(kind, identity)) is None:
            raise RefusedChangeError(Reason.NOT_FOUND, f"there is no {kind} {identity} in the store")
        return found

    def find(self, kind: Kind, identity: str) -> Row | None:
        """Return an entry, or None."""
        return next(iter(_rows(self._connection, kind, [identity])), None)

    def teams(self) -> frozenset[str]:
        """Return the IDs of all teams."""
        return frozenset(self._connection.execute(select(TEAMS.c.id)).scalars())

    def made_by(self, person: PersonId) -> list[Row]:
        """Return the keys that a person has created."""
        return [_row(KEYS, each) for each in self._connection.execute(select(*_columns(KEYS)).where(_is_made_by(person)))]

    def known_hashes(self, hashes: Sequence[str]) -> set[str]:
        """Return which of some hashes belong to a key of the store."""
        queries = _of_some(select(KEY_HASHES.c.hash), KEY_HASHES.c.hash, hashes)
        return {known for query in queries for known in self._connection.execute(query).scalars()}

    def uses_team(self, team: str) -> str | None:
        """Return the ID of a key of a team, None without one."""
        return self._connection.execute(select(KEYS.c.id).where(KEYS.c.team == team).limit(1)).scalar()

    def add(self, kind: Kind, identity: str, entry: str, made_by: PersonId | None = None) -> Row:
        """Add an entry. Raises RefusedChangeError if there is one with this ID, or with one of its hashes."""
        (row,) = self.add_all(kind, {identity: entry}, made_by)
        return row

    def add_all(self, kind: Kind, entries: Mapping[str, str], made_by: PersonId | None = None) -> list[Row]:
        """Add entries by ID. Raises RefusedChangeError as ``add`` does."""
        if not entries:
            return []
        ids = list(entries)
        if found := _rows(self._connection, kind, ids):
            raise RefusedChangeError(Reason.CONFLICT, f"there is a {kind} {found[0].id} in the store already")
        numbered = enumerate(entries.items(), self._log(kind, ids))
        rows = [Row(identity, number, entry, self._now, self._now, made_by) for number, (identity, entry) in numbered]
        self._connection.execute(insert(_TABLES[kind]), [_values(kind, row) for row in rows])
        self._index_hashes(kind, rows)
        return rows

    def replace(self, kind: Kind, before: Row, entry: str) -> Row:
        """Replace an entry. Raises RefusedChangeError if another key has one of its hashes."""
        table, row = _TABLES[kind], before._replace(version=self._log(kind, [before.id]), entry=entry, changed=self._now)
        self._connection.execute(update(table).where(table.c.id == row.id).values(**_values(kind, row)))
        self._forget_hashes(kind, row.id)
        self._index_hashes(kind, [row])
        return row

    def remove(self, kind: Kind, identity: str) -> None:
        """Remove an entry."""
        table = _TABLES[kind]
        self._log(kind, [identity])
        self._connection.execute(delete(table).where(table.c.id == identity))
        self._connection.execute(delete(RAISES).where(RAISES.c.kind == kind, RAISES.c.id == identity))
        self._forget_hashes(kind, identity)

    def raises(self, kind: Kind, identity: str) -> str | None:
        """Return the raises of a key or team, None without any."""
        return _raises(self._connection, kind, [identity]).get((kind, identity))

    def set_raises(self, kind: Kind, identity: str, raises: str, last: datetime) -> None:
        """Replace the raises of a key or team. From ``last`` on, all of them have expired."""
        self._log(kind, [identity])
        self._connection.execute(delete(RAISES).where(((RAISES.c.kind == kind) & (RAISES.c.id == identity)) | (RAISES.c.ends <= self._now)))
        if last > self._now:
            self._connection.execute(insert(RAISES).values(kind=kind, id=identity, raises=raises, ends=last))

    def repeated(self, idempotency_key: str, request: str) -> str | None:
        """Return the ID that an earlier request with this Idempotency-Key has changed, None for the first request, which is remembered.

        ``request`` is the digest of the request. Raises RefusedChangeError if the earlier request was another one.
        """
        digest = sha256(idempotency_key.encode()).hexdigest()
        self._connection.execute(delete(IDEMPOTENCY).where(IDEMPOTENCY.c.time < self._now - _REMEMBERED))
        found = self._connection.execute(select(IDEMPOTENCY.c.request, IDEMPOTENCY.c.id).where(IDEMPOTENCY.c.hash == digest)).first()
        if found is None:
            return None
        if found[0] != request:
            raise RefusedChangeError(Reason.OTHER_REQUEST, "this Idempotency-Key was sent with another request")
        return str(found[1])

    def remember(self, idempotency_key: str, request: str, identity: str) -> None:
        """Remember a request with an Idempotency-Key, and the ID that it has changed."""
        digest = sha256(idempotency_key.encode()).hexdigest()
        self._connection.execute(insert(IDEMPOTENCY).values(hash=digest, request=request, id=identity, time=self._now))

    def _log(self, kind: Kind, ids: Sequence[str]) -> int:
        """Add a row to the log for each ID, and return the number of the first one."""
        first = (self._connection.execute(select(func.max(CHANGES.c.seq))).scalar() or 0) + 1
        rows = [
            {"seq": first + number, "mark": token_hex(8), "kind": kind, "id": each, "time": self._now} for number, each in enumerate(ids)
        ]
        self._connection.execute(insert(CHANGES), rows)
        last = first + len(ids) - 1
        if last // _PRUNE_EVERY > (first - 1) // _PRUNE_EVERY:
            self._connection.execute(delete(CHANGES).where(CHANGES.c.seq <= last - _MAX_CHANGES))
        return first

    def _index_hashes(self, kind: Kind, rows: Sequence[Row]) -> None:
        if kind != "key":
            return
        hashes = [{"hash": one, "key": row.id} for row in rows for one in hashes_and_team(row.entry)[0]]
        try:
            self._connection.execute(insert(KEY_HASHES), hashes)
        except IntegrityError:
            raise RefusedChangeError(Reason.CONFLICT, "another key of the store has this hash") from None

    def _forget_hashes(self, kind: Kind, identity: str) -> None:
        if kind == "key":
            self._connection.execute(delete(KEY_HASHES).where(KEY_HASHES.c.key == identity))


def _values(kind: Kind, row: Row) -> dict[str, Any]:
    """Return the values of a row by column."""
    values = row._asdict()
    issuer, subject = values.pop("made_by") or (None, None)
    of_key = {"team": hashes_and_team(row.entry)[1], "made_by_issuer": issuer, "made_by_subject": subject} if kind == "key" else {}
    return values | of_key


class KeyDatabase(Database):
    """Reads and changes the database. Every method raises DatabaseUnavailableError if the database does not respond."""

    def __init__(self, url: URL) -> None:
        if url.get_backend_name() == "sqlite" and url.database:
            with suppress(OSError):  # the first query reports it
                Path(url.database).touch(mode=0o600)  # it has the hashes of keys, also if another part of the gateway opens it first
        super().__init__(create_database_engine(url))
        self._record: Callable[[Any], None] | None = None

    def recorded(self, record: Callable[[Any], None]) -> KeyDatabase:
        """Return the same database for a change that is recorded: ``record`` gets its result before it is committed.

        If ``record`` raises, nothing is changed.
        """
        made = copy(self)
        made._record = record
        return made

    @property
    def is_postgres(self) -> bool:
        """Whether several gateways can share the database."""
        return self.engine.dialect.name == "postgresql"

    def change(self, work: Callable[[Transaction], T], now: datetime | None = None) -> T:
        """Run a change, and commit it. Raises RefusedChangeError, and then nothing was written."""
        with self.transaction() as connection:
            for statement in _LOCKS[connection.dialect.name]:
                connection.exec_driver_sql(statement)
            done = work(Transaction(connection, now or datetime.now(UTC)))
            if self.is_postgres:
                connection.exec_driver_sql(f"NOTIFY {CHANNEL}")
            if self._record is not None:
                self._record(done)
        return done

    def page(self, kind: Kind, after: str, limit: int, teams: Collection[str] | None = None, made_by: PersonId | None = None) -> list[Row]:
        """Return the first ``limit`` entries whose ID is after ``after``: all, those of teams, or the keys that a person has created."""
        table = _TABLES[kind]
        query = select(*_columns(table)).where(table.c.id > after).order_by(table.c.id).limit(limit)
        if teams is not None:
            query = query.where(_is_of(kind, teams))
        if made_by is not None:
            query = query.where(_is_made_by(made_by))
        return [_row(table, each) for each in self.rows(query)]

    def search(self, kind: Kind, text: str, after: str, limit: int, teams: Collection[str] | None = None) -> SearchPage:
        """Return the first ``limit`` entries after ``after``, all or those of teams, that contain a text: in ID, name or team.

        The query reads at most ``SEARCHED`` entries. Case does not matter.
        """
        table = _TABLES[kind]
        # Without the index, a database reads the table from its start to its end, which is several times faster than in the order of IDs.
        identity = func.coalesce(table.c.id, "")
        query = select(*_columns(table)).where(identity > after).order_by(identity).limit(limit)
        if teams is not None:
            query = query.where(_is_of(kind, teams))
        with self.transaction() as connection:
            later = select(table.c.id).where(table.c.id > after).order_by(table.c.id)
            if (last := connection.execute(later.offset(SEARCHED - 1).limit(1)).scalar()) is not None:
                query = query.where(identity <= last)
            rows = connection.execute(query.where(_contains(kind, text, connection.dialect.name)))
            return SearchPage([_row(table, each) for each in rows], last)

    def made_by(self, person: PersonId) -> list[Row]:
        """Return the keys that a person has created."""
        with self.transaction() as connection:
            return Transaction(connection, datetime.now(UTC)).made_by(person)

    def find(self, kind: Kind, identity: str) -> Row | None:
        """Return an entry, or None."""
        with self.transaction() as connection:
            return next(iter(_rows(connection, kind, [identity])), None)

    def has_change(self, kind: Kind, identity: str, first: int, last: int) -> bool:
        """Return whether the log has a change of an entry with a number from ``first`` to ``last``, or does not go back so far."""
        with self.transaction() as connection:
            oldest = connection.execute(select(func.min(CHANGES.c.seq))).scalar()
            if oldest is not None and oldest > max(first, 1):
                return True
            found = select(CHANGES.c.seq).where(CHANGES.c.seq.between(first, last), CHANGES.c.kind == kind, CHANGES.c.id == identity)
            return connection.execute(found.limit(1)).scalar() is not None

    def changes_since(self, last: Position | None) -> Changes:
        """Return what changed since a position; everything if it is None, or if the log does not lead on from it."""
        with self.transaction() as connection:
            if last is None:
                return _everything(connection)
            query = select(CHANGES.c.seq, CHANGES.c.mark, CHANGES.c.kind, CHANGES.c.id).where(CHANGES.c.seq >= last.seq)
            rows = connection.execute(query.order_by(CHANGES.c.seq)).all()
            if last == Position():
                leads_on, later = not rows or rows[0].seq == 1, rows
            else:
                leads_on, later = bool(rows) and (rows[0].seq, rows[0].mark) == last, rows[1:]
            if not leads_on:
                return _everything(connection)
            ids: dict[Kind, dict[str, None]] = {"key": {}, "team": {}}
            for row in later:
                ids[row.kind][row.id] = None
            keys, teams = (_changed(connection, kind, list(found)) for kind, found in ids.items())
            raises = {holder: text for kind, found in ids.items() for holder, text in _raises(connection, kind, list(found)).items()}
            return Changes(Position(later[-1].seq, later[-1].mark) if later else last, keys, teams, raises=raises)


def _everything(connection: Connection) -> Changes:
    # The position is read first: what is written meanwhile is read twice, which changes nothing.
    last = connection.execute(select(CHANGES.c.seq, CHANGES.c.mark).order_by(CHANGES.c.seq.desc()).limit(1)).first()
    keys, teams = (Changed(_entries(connection, table)) for table in (KEYS, TEAMS))
    raises = {holder: text for kind in _TABLES for holder, text in _raises(connection, kind).items()}
    return Changes(Position() if last is None else Position(*last), keys, teams, is_complete=True, raises=raises)


def _changed(connection: Connection, kind: Kind, ids: Sequence[str]) -> Changed:
    entries = _entries(connection, _TABLES[kind], ids)
    return Changed(entries, [identity for identity in ids if identity not in entries])


def _entries(connection: Connection, table: Table, ids: Sequence[str] | None = None) -> dict[str, str]:
    """Return the JSON of all entries, or of some, by ID."""
    queries = _of_some(select(table.c.id, table.c.entry), table.c.id, ids)
    return {identity: entry for query in queries for identity, entry in connection.execute(query)}


def _raises(connection: Connection, kind: Kind, ids: Sequence[str] | None = None) -> dict[Holder, str]:
    """Return the raises of all keys or teams, or of some."""
    queries = _of_some(select(RAISES.c.id, RAISES.c.raises).where(RAISES.c.kind == kind), RAISES.c.id, ids)
    return {(kind, identity): raises for query in queries for identity, raises in connection.execute(query)}


def _rows(connection: Connection, kind: Kind, ids: Sequence[str]) -> list[Row]:
    table = _TABLES[kind]
    queries = _of_some(select(*_columns(table)), table.c.id, ids)
    return [_row(table, each) for query in queries for each in connection.execute(query)]


def _of_some(query: Select[Any], column: ColumnElement[str], values: Sequence[str] | None) -> list[Select[Any]]:
    """Return the query as it is, or with ``values`` one query for each batch of the rows that have such a value in a column."""
    return [query] if values is None else [query.where(column.in_(some)) for some in batches(values)]


_COMMON = ("id", "version", "entry", "created", "changed")
_MADE_BY = ("made_by_issuer", "made_by_subject")


def _columns(table: Table) -> list[Any]:
    return [table.c[name] for name in (*_COMMON, *(_MADE_BY if table is KEYS else ()))]


def _row(table: Table, found: Any) -> Row:
    identity, version, entry, created, changed, *maker = found
    made_by = PersonId(*maker) if table is KEYS and maker[1] is not None else None
    return Row(identity, version, entry, utc(created), utc(changed), made_by)


def _is_made_by(person: PersonId) -> ColumnElement[bool]:
    return and_(KEYS.c.made_by_issuer == person.issuer, KEYS.c.made_by_subject == person.subject)


def _is_of(kind: Kind, teams: Collection[str]) -> ColumnElement[bool]:
    return (KEYS.c.team if kind == "key" else TEAMS.c.id).in_(teams)


def _contains(kind: Kind, text: str, dialect: str) -> ColumnElement[bool]:
    """Return the condition that the ID, the name or the team of an entry contains a text."""
    if kind == "team":
        return TEAMS.c.id.icontains(text, autoescape=True)
    name = cast(KEYS.c.entry, JSON)["name"].as_string() if dialect == "postgresql" else func.json_extract(KEYS.c.entry, "$.name")
    has_name = and_(KEYS.c.entry.contains('"name": ', autoescape=True), name.icontains(text, autoescape=True))
    return or_(KEYS.c.id.icontains(text, autoescape=True), KEYS.c.team.icontains(text, autoescape=True), has_name)
