"""The table of notices: what is to be sent, what was sent, and which gateway sends it.

The rules: a notice has one row in all gateways, by its ID. A gateway claims a row before it sends it, for the time of ``CLAIM``, and the
claim of a gateway that ended expires. So usually one gateway sends a notice, and each is sent at least once. Every call may take as long as
the database does, so calls belong on a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sqlalchemy import Column, DateTime, Index, Integer, String, Table, delete, func, select, update
from sqlalchemy.engine import URL

from gateway.ledger.schema import METADATA, utc
from gateway.ledger.statements import batches, insert_into
from gateway.ledger.store import Database, create_database_engine
from gateway.notices.notice import Notice

Delivery = Literal["waiting", "sent", "failed"]
NOTICES = Table(
    "gateway_notices",
    METADATA,
    *(
        Column("id", String, primary_key=True),
        Column("rule", String, nullable=False),
        Column("event", String, nullable=False),
        Column("subject", String, nullable=False),
        Column("body", String, nullable=False),
        Column("created", DateTime(timezone=True), nullable=False),
        Column("ends", DateTime(timezone=True), nullable=False),
        Column("state", String, nullable=False),
        Column("due", DateTime(timezone=True), nullable=False),
        Column("attempts", Integer, nullable=False),
        Column("result", String, nullable=False),
        Index("gateway_notices_due", "state", "due"),
        Index("gateway_notices_created", "created"),
        Index("gateway_notices_ends", "ends"),
    ),
)
CLAIM = timedelta(seconds=60)
"""The time for which a claim keeps other gateways from sending a notice. An attempt takes less."""
_REMEMBERED = timedelta(days=7)  # for which a row is kept after the end of its window: longer than it is sent


class Row(NamedTuple):
    """A notice and its delivery. ``due`` is the time of the next attempt, ``result`` that of the last one, empty before the first."""

    id: str
    rule: str
    event: str
    subject: str
    body: str
    created: datetime
    state: Delivery
    due: datetime
    attempts: int
    result: str


class Waiting(NamedTuple):
    """The notices of a rule that were not sent yet: their number, and when the oldest one was created."""

    number: int
    oldest: datetime


class NoticeTable(Database):
    """Reads and writes the rows. Every method raises DatabaseUnavailableError if the database does not respond."""

    def __init__(self, url: URL) -> None:
        super().__init__(create_database_engine(url))

    def create_file(self, file: Path) -> None:
        """Create the file, and its folder if it does not exist."""
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        super().create_file(file)

    def add(self, notices: Sequence[Notice], now: datetime) -> None:
        """Add notices that have no row yet."""
        rows = [
            {
                "id": each.id,
                "rule": each.rule,
                "event": each.event,
                "subject": each.subject,
                "body": each.body(now.timestamp()),
                "created": now,
                "ends": datetime.fromtimestamp(each.end, UTC),
                "state": "waiting",
                "due": now,
                "attempts": 0,
                "result": "",
            }
            for each in notices
        ]
        with self.transaction() as connection:
            for some in batches(rows):
                connection.execute(insert_into(NOTICES, connection.dialect.name).on_conflict_do_nothing(), some)

    def due(self, rule: str, now: datetime, limit: int) -> list[Row]:
        """Return notices of a rule that are due, the oldest first."""
        query = select(*_COLUMNS).where(NOTICES.c.state == "waiting", NOTICES.c.due <= now, NOTICES.c.rule == rule)
        return [_row(each) for each in self.rows(query.order_by(NOTICES.c.due).limit(limit))]

    def claim(self, row: Row, now: datetime) -> bool:
        """Claim a notice for one attempt. False: another gateway has claimed it since it was read."""
        unchanged = NOTICES.c.id == row.id, NOTICES.c.state == "waiting", NOTICES.c.attempts == row.attempts
        statement = update(NOTICES).where(*unchanged).values(due=now + CLAIM, attempts=row.attempts + 1)
        return self.run(statement) == 1

    def finish(self, row: Row, state: Delivery, result: str) -> None:
        """Record that a notice was sent, or that no more attempts are made. A notice that another gateway has sent stays sent."""
        self.run(update(NOTICES).where(NOTICES.c.id == row.id, NOTICES.c.state != "sent").values(state=state, result=result))

    def retry(self, row: Row, due: datetime, result: str) -> None:
        """Record that a claimed attempt has failed, and when the next one is due. ``row`` is from before the claim."""
        mine = NOTICES.c.id == row.id, NOTICES.c.state == "waiting", NOTICES.c.attempts == row.attempts + 1
        self.run(update(NOTICES).where(*mine).values(due=due, result=result))

    def recent(self, limit: int) -> list[Row]:
        """Return the last notices, the newest first."""
        query = select(*_COLUMNS).order_by(NOTICES.c.created.desc(), NOTICES.c.id).limit(limit)
        return [_row(each) for each in self.rows(query)]

    def waiting(self) -> dict[str, Waiting]:
        """Return what was not sent yet, by rule."""
        query = select(NOTICES.c.rule, func.count(), func.min(NOTICES.c.created)).where(NOTICES.c.state == "waiting")
        return {rule: Waiting(count, utc(oldest)) for rule, count, oldest in self.rows(query.group_by(NOTICES.c.rule))}

    def prune(self, now: datetime) -> None:
        """Delete the rows of windows that ended long ago."""
        self.run(delete(NOTICES).where(NOTICES.c.ends < now - _REMEMBERED))


_COLUMNS = [NOTICES.c[name] for name in Row._fields]


def _row(found: Any) -> Row:
    row = Row(*found)
    return row._replace(created=utc(row.created), due=utc(row.due))
