"""The table of the audit log in the store's database, and its rows.

The rules: rows are only added; triggers refuse any other statement. ``entry`` is the line as it was written, with its HMAC, and decides. A
row that is there already is not written again, and must be the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import BigInteger, Column, DateTime, Index, Row, String, Table, inspect, select, tuple_
from sqlalchemy.engine import URL

from gateway.audit.chain import read_line
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.ledger.schema import METADATA, utc
from gateway.ledger.statements import batches, insert_into
from gateway.ledger.store import Database, available, create_database_engine

AUDIT = Table(
    "gateway_audit",
    METADATA,
    Column("chain", String, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("time", DateTime(timezone=True), nullable=False),
    Column("entry", String, nullable=False),
    Index("gateway_audit_time", "time"),
)
_BATCH = 500  # rows of a query


class AuditTable(Database):
    """Writes and reads rows. Every method raises DatabaseUnavailableError, and may take as long as the database does."""

    def __init__(self, url: URL) -> None:
        super().__init__(create_database_engine(url))

    def write(self, lines: Sequence[bytes]) -> None:
        """Write lines that are not in the table yet."""
        rows = []
        for data in lines:
            if (line := read_line(data)) is None:
                raise DatabaseUnavailableError("a waiting entry is damaged")
            rows.append({"chain": line.chain, "seq": line.seq, "time": line.time, "entry": data.decode()})
        for some in batches(rows):
            self._write(some)

    def _write(self, rows: Sequence[dict[str, object]]) -> None:
        with self.transaction() as connection:
            connection.execute(insert_into(AUDIT, connection.dialect.name).on_conflict_do_nothing(), rows)
            for chain in {str(row["chain"]) for row in rows}:
                own = {row["seq"]: row["entry"] for row in rows if row["chain"] == chain}
                query = select(AUDIT.c.seq, AUDIT.c.entry).where(AUDIT.c.chain == chain, AUDIT.c.seq.in_(own))
                for seq, entry in connection.execute(query):
                    if own[seq] != entry:
                        raise DatabaseUnavailableError(f"gateway_audit has another entry {seq} of chain {chain}")

    def read(self) -> Iterator[tuple[str, bytes]]:
        """Yield the rows in the order of their chains and numbers: a text that names the row, and its line.

        A row whose columns contradict its line has no line. Nothing is created or migrated, so reading needs no other right.
        """
        last = ("", 0)
        while rows := self._page(last):
            for row in rows:
                data = row.entry.encode("utf-8", "surrogatepass")
                line = read_line(data)
                is_whole = line is not None and (line.chain, line.seq) == (row.chain, row.seq) and line.time == utc(row.time)
                yield f"chain {row.chain}, entry {row.seq}", data if is_whole else b""
            last = rows[-1].chain, rows[-1].seq

    def read_before(self, chain: str, seq: int) -> list[bytes]:
        """Return the last lines of a chain before a number, the newest first, at most as many as a statement has."""
        query = select(AUDIT.c.entry).where(AUDIT.c.chain == chain, AUDIT.c.seq < seq).order_by(AUDIT.c.seq.desc()).limit(_BATCH)
        return [row.entry.encode("utf-8", "surrogatepass") for row in self.rows(query)]

    def newest_first(self, before: tuple[datetime, str, int] | None) -> Iterator[bytes]:
        """Yield the lines before a time, chain and number, the newest first."""
        order = AUDIT.c.time, AUDIT.c.chain, AUDIT.c.seq
        query = select(*order, AUDIT.c.entry).order_by(*(column.desc() for column in order)).limit(_BATCH)
        while True:
            rows = self.rows(query if before is None else query.where(AUDIT.c.time <= before[0], tuple_(*order) < before))
            yield from (row.entry.encode("utf-8", "surrogatepass") for row in rows)
            if len(rows) < _BATCH:
                return
            before = utc(rows[-1].time), rows[-1].chain, rows[-1].seq

    def _page(self, last: tuple[str, int]) -> Sequence[Row[Any]]:
        """Return the next rows after one, none of a table that does not exist yet."""
        if self.engine.dialect.name == "sqlite" and not Path(str(self.engine.url.database)).exists():
            return ()
        query = select(AUDIT).where(tuple_(AUDIT.c.chain, AUDIT.c.seq) > last).order_by(AUDIT.c.chain, AUDIT.c.seq).limit(_BATCH)
        with available(), self.engine.connect() as connection:
            return connection.execute(query).all() if inspect(connection).has_table(AUDIT.name) else ()
