"""Close a month in an accounting run, and compare closed month and open rows with what the engines have counted.

The rules: the rows are moved into two months only after the engines have been reconciled. The gateway closes the month and reports the open
rows, as for an operator. So each request is counted in a row or in a sum, also if its row has been replaced by totals.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import select, update

from gateway.ledger.schema import USAGE
from gateway.ledger.store import UsageStore, database_url
from tests.accounting.run import AccountingRun
from tests.vllm.dialogues import Json

KINDS = ("prompt", "completion")
_IN_ROWS = ("ledger", "lost")
"""The classes of the reconciliation whose tokens are in the rows of a month. The other ones are what only the engine has counted."""


@dataclass(frozen=True, slots=True)
class MonthSum:
    """The tokens of one kind of a model in the closed month and in the open rows.

    ``engine`` is the count of its engine, and ``unbilled`` the part of it that the reconciliation explains and no row has. ``unsampled``:
    tokens of rows that no sample of a killed engine confirms.
    """

    model: str
    kind: str
    closed: int
    opened: int
    engine: int
    unbilled: int
    unsampled: int

    @property
    def difference(self) -> int:
        return self.closed + self.opened - (self.engine - self.unbilled + self.unsampled)


@dataclass(frozen=True, slots=True)
class MonthResult:
    """The requests of a run in its closed month and in open rows, those of both that are totals now, and the sums of tokens."""

    closed: int
    opened: int
    replaced: int
    sums: Sequence[MonthSum]

    def problems(self) -> list[str]:
        """List what is wrong, as text."""
        return [f"months: {each}" for each in self.sums if each.difference]

    def lines(self) -> Iterator[str]:
        """Render the table in Markdown."""
        yield f"Rows: {self.closed:,} in the closed month, {self.replaced:,} of them replaced by totals before, and {self.opened:,} open."
        yield ""
        columns = ("tokens", "closed month", "open rows", "engine", "not in rows", "rows after the last sample", "difference")
        yield f"| engine | {' | '.join(columns)} |"
        yield "|" + "---|" * (len(columns) + 1)
        for each in self.sums:
            numbers = (each.closed, each.opened, each.engine, each.unbilled, each.unsampled, each.difference)
            yield f"| {each.model}#0 | {each.kind} | {' | '.join(f'{number:,}' for number in numbers)} |"


def close_month(run: AccountingRun) -> MonthResult:
    """Move the first half of the rows to the end of the month before, replace a part of them by totals, and close that month."""
    reconciled = run.reconciled()
    first = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    month, later = f"{first - timedelta(days=1):%Y-%m}", datetime.now(UTC) - first
    replaced = 0
    with closing(UsageStore(database_url(run.ledger, run.gateway.folder))) as store:
        with store.engine.begin() as connection:
            times = list(connection.execute(select(USAGE.c.time).order_by(USAGE.c.time)).scalars())
            moved = {"time": USAGE.c.time - later, "day": (first - timedelta(days=1)).date()}
            connection.execute(update(USAGE).where(USAGE.c.time < times[len(times) // 2]).values(moved))
        while store.prune(times[len(times) // 4] - later):
            pass
        with store.engine.connect() as connection:
            replaced = len(times) - len(connection.execute(select(USAGE.c.time)).all())
    done = run.gateway.command("usage", "close", month, "--format", "json")
    closed = json.loads(done.stdout)
    assert closed["intact"] and not closed["corrections"], done
    lines = [json.loads(line) for line in closed["lines"]]
    opened = run.gateway.get(f"/usage?by=model&since={first:%Y-%m-%d}").json()["usage"]
    sums = [_sum(engine.model, kind, lines, opened, reconciled[engine.name]) for engine in run.engines for kind in KINDS]
    return MonthResult(_total(lines, "requests"), _total(opened, "requests"), replaced, sums)


def _sum(model: str, kind: str, lines: Iterable[Json], opened: Iterable[Json], found: Json) -> MonthSum:
    tokens = f"{kind}_tokens"
    in_month, in_rows = (_total((line for line in part if line["model"] == model), tokens) for part in (lines, opened))
    unbilled = sum(tokens for name, tokens in found[kind].items() if name not in (*_IN_ROWS, "engine", "difference"))
    return MonthSum(model, kind, in_month, in_rows, found[kind]["engine"], unbilled, found[f"{kind}_unsampled"])


def _total(lines: Iterable[Json], name: str) -> int:
    return sum(line[name] for line in lines)
