"""Query the ledger: sums over a time, grouped by the dimensions that an operator names.

Nothing is written. Days are UTC's; a time range includes its start and excludes its end. The totals of deleted rows are counted with the
rows, in one statement, so that a request is counted once while rows are replaced by totals. A day of totals counts if it is in the range
as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Engine, Row, Select, Table, func, inspect, null, or_, select, union_all

from gateway import config as conf
from gateway.config.problems import did_you_mean
from gateway.config.quantities import parse_duration
from gateway.ledger.months.tables import COST, SUMS, TOTALS
from gateway.ledger.months.totals import HALF, sums_of_rows
from gateway.ledger.row import UNBILLED_KEYS
from gateway.ledger.schema import USAGE
from gateway.snapshot.identity import subject_prefix
from gateway.snapshot.money import NANO, json_number
from gateway.usage.database import open_ledger, time_limited
from gateway.usage.dimensions import CHOICES, DIMENSIONS, LABEL, is_dimension
from gateway.usage.errors import QueryError, check_parameters

MAX_GROUPS = 50_000
"""Lines of a report. Clients choose the values of ``user``, so their number must be bounded."""

DEFAULT_BY, _DEFAULT_SINCE = "key,model", "30d"
_DURATION = re.compile(r"[0-9.]+[a-z]+")
_MONTH = re.compile(r"\d{4}-\d{2}")
_LONGEST_QUERY = 3600.0  # seconds
UNKNOWN_METHOD = "unknown"
"""The method of an estimate in a row of commit 3c1fad8."""


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """A query: sums by these dimensions over a time range, for one key, team or model, or for all.

    Subjects of tokens belong to the key of their entry, unless ``with_subjects`` is False. ``keys`` are all keys of the report, None: all.
    ``is_open``: the range ends now.
    """

    by: tuple[str, ...]
    since: datetime
    until: datetime
    key: str | None = None
    team: str | None = None
    model: str | None = None
    with_subjects: bool = True
    keys: tuple[str, ...] | None = None
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class UsageSum:
    """One line of a report. ``group`` is in the order of the query's dimensions; ``cost`` is in nano-units, None: no request had a price.

    ``incomplete`` and ``estimated`` are requests; the latter are those with estimated tokens.
    """

    group: tuple[str | None, ...]
    requests: int
    incomplete: int
    estimated: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    cost: int | None


MEASURES = tuple(each.name for each in fields(UsageSum) if each.name not in ("group", "cost"))
"""The names of the sums in a line, except its cost. A column of the ledger with the name of one is summed."""


@dataclass(frozen=True, slots=True)
class UsageReport:
    """The sums, the largest number of tokens first; grouped by day, in the order of the days.

    ``truncated``: there are more groups than a report has lines; those with the fewest tokens are left out. ``requests``: all requests of
    the report. ``estimated_by``: the requests with estimated tokens by the method of the estimate, UNKNOWN_METHOD for rows without one.
    """

    query: UsageQuery
    sums: Sequence[UsageSum]
    truncated: bool = False
    requests: int = 0
    estimated_by: Mapping[str, int] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the report as JSON, for an encoder of msgspec. A cost is a number with all of its digits."""
        query = self.query
        rows = [{**dict(zip(query.by, each.group, strict=True)), **_measures(each)} for each in self.sums]
        return {
            "since": query.since.isoformat(),
            "until": query.until.isoformat(),
            "by": list(query.by),
            "truncated": self.truncated,
            "requests": self.requests,
            "estimated_by": dict(self.estimated_by),
            "usage": rows,
        }


def parse_report(document: Mapping[str, Any]) -> UsageReport:
    """Parse a gateway's JSON report. Its numbers with decimals must be ``Decimal``."""
    by, since, until = tuple(document["by"]), *(datetime.fromisoformat(document[name]) for name in ("since", "until"))
    sums = [UsageSum(tuple(row.pop(part) for part in by), **row | {"cost": _nano(row["cost"])}) for row in map(dict, document["usage"])]
    query, truncated = UsageQuery(by, since, until), document.get("truncated", False)
    return UsageReport(query, sums, truncated, document.get("requests", 0), document.get("estimated_by", {}))


def _nano(cost: Decimal | int | None) -> int | None:
    return None if cost is None else int(cost * NANO)


def _measures(each: UsageSum) -> dict[str, Any]:
    return {name: getattr(each, name) for name in MEASURES} | {"cost": None if each.cost is None else json_number(each.cost)}


def parse_query(parameters: Mapping[str, str], now: datetime) -> UsageQuery:
    """Parse a query from the parameters ``by``, ``since``, ``until``, ``key``, ``team``, ``model``. Raises QueryError."""
    check_parameters(parameters, ("by", "since", "until", "key", "team", "model"))
    by = tuple(dict.fromkeys(part.strip() for part in parameters.get("by", DEFAULT_BY).split(",")))
    for part in by:
        if not is_dimension(part):
            raise QueryError(f"usage is not shown by {part or 'nothing'}{did_you_mean(part, CHOICES)}: choose from {', '.join(CHOICES)}")
    since = instant(parameters.get("since", _DEFAULT_SINCE), now)
    until = instant(parameters["until"], now) if "until" in parameters else now
    if since >= until:
        raise QueryError("the time ends before it starts")
    names = {what: parameters.get(what) for what in ("key", "team", "model")}
    for what, name in names.items():
        if name is not None and "\0" in name:  # PostgreSQL text cannot contain it
            raise QueryError(f"no {what} has a NUL in its name")
    return UsageQuery(by, since, until, names["key"], names["team"], names["model"], is_open="until" not in parameters)


def instant(text: str, now: datetime) -> datetime:
    """Return the time that a text names, in UTC: a date, a month, a time, the name of a day, or a duration before ``now``."""
    now = now.astimezone(UTC)
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    names = {"today": midnight, "yesterday": midnight - timedelta(days=1), "this-month": midnight.replace(day=1)}
    try:
        if text in names:
            return names[text]
        if _DURATION.fullmatch(text):
            return now - timedelta(seconds=parse_duration(text))
        made = datetime.fromisoformat(f"{text}-01" if _MONTH.fullmatch(text) else text)
        return made.astimezone(UTC) if made.tzinfo else made.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise QueryError(
            f"{text} is not a time: use a date such as 2027-01-01, a month such as 2027-01, a time such as 2027-01-01T12:00:00Z, "
            f"a duration such as 7d, or {', '.join(names)}"
        ) from None


def run_query(engine: Engine, query: UsageQuery, seconds: float = _LONGEST_QUERY, max_groups: int = MAX_GROUPS) -> UsageReport:
    """Query the database, for ``seconds`` at most. Raises DatabaseUnavailableError."""
    names = [f"group_{number}" for number in range(len(query.by))]
    rows, totals = _grouped(query, names)
    both = union_all(rows, totals).subquery()
    groups, tokens = [both.c[name] for name in names], func.sum(both.c.prompt_tokens) + func.sum(both.c.completion_tokens)
    sums = [func.sum(both.c[name]).label(name) for name in (*MEASURES, "high", "low")]
    statement = select(*groups, *sums).group_by(*groups).order_by(tokens.desc(), *groups).limit(max_groups + 1)
    with time_limited(engine, seconds) as connection:
        if not inspect(connection).has_table(TOTALS.name):
            return UsageReport(query, ())
        found = connection.execute(statement).all()
        methods = connection.execute(_methods(query)).all()
    lines = [_sum(tuple(_text(part) for part in row[: len(groups)]), row) for row in found[:max_groups]]
    estimates = {method or UNKNOWN_METHOD: int(count) for estimated, method, count in methods if estimated}
    requests = sum(int(count) for _, _, count in methods)
    return UsageReport(query, sorted(lines, key=lambda each: _order(query, each)), len(found) > max_groups, requests, estimates)


def _grouped(query: UsageQuery, names: Sequence[str]) -> tuple[Select[Any], Select[Any]]:
    """Return the sums of the rows and of the totals, each grouped by the dimensions of the query, which get these names.

    They are grouped by name: a label is a parameter, which PostgreSQL does not recognize as the same.
    """
    of_rows = {_STORED.get(name, name): value for name, value in sums_of_rows().items()}
    of_totals = {_STORED.get(name, name): func.sum(TOTALS.c[name]) for name in (*SUMS, *COST)}
    rows, totals = (
        select(
            *(_group(table, part).label(name) for name, part in zip(names, query.by, strict=True)),
            *(sums[name].label(name) for name in (*MEASURES, "high", "low")),
        )
        .where(*conditions)
        .group_by(*names)
        for table, sums, conditions in ((USAGE, of_rows, _conditions(query)), (TOTALS, of_totals, _conditions_of_totals(query)))
    )
    return rows, totals


_STORED = {"estimated_requests": "estimated", "cost_high": "high", "cost_low": "low"}
"""The names in a report of the columns of totals that have another one."""


def _group(table: Table, part: str) -> ColumnElement[Any]:
    """Return the expression for a dimension; NULL if the totals are not grouped by it."""
    if (column := DIMENSIONS.get(part)) is None:
        label: ColumnElement[Any] = table.c.labels[part.removeprefix(LABEL)].as_string()
        return label
    return table.c[column] if column in table.c else null()


def cost_parts() -> tuple[ColumnElement[Any], ...]:
    """Return the expressions ``high`` and ``low`` of a sum of costs, which ``summed_cost`` puts together."""
    sums = sums_of_rows()
    return sums["cost_high"].label("high"), sums["cost_low"].label("low")


def summed_cost(totals: Row[Any]) -> int | None:
    """Return a sum of costs, in nano-units, from its ``cost_parts``; None if no row had a cost."""
    return None if totals.high is None else int(totals.high) * HALF + int(totals.low)


def _methods(query: UsageQuery) -> Select[Any]:
    """Return the statement that counts the requests by the method of their estimate, the most frequent first."""
    parts = ((USAGE, func.count(), _conditions(query)), (TOTALS, func.sum(TOTALS.c.requests), _conditions_of_totals(query)))
    both = union_all(
        *(
            select(table.c.estimated, table.c.estimated_by, count.label("requests"))
            .where(*conditions)
            .group_by(table.c.estimated, table.c.estimated_by)
            for table, count, conditions in parts
        )
    ).subquery()
    groups, total = (both.c.estimated, both.c.estimated_by), func.sum(both.c.requests)
    return select(*groups, total).group_by(*groups).order_by(total.desc(), *groups)


def _conditions(query: UsageQuery) -> list[ColumnElement[bool]]:
    return [USAGE.c.time >= query.since, USAGE.c.time < query.until, *_of_names(USAGE, query)]


def _conditions_of_totals(query: UsageQuery) -> list[ColumnElement[bool]]:
    first = query.since.date() + timedelta(days=query.since.time() != time.min)
    conditions = [TOTALS.c.day >= first, *_of_names(TOTALS, query)]
    return conditions if query.is_open else [*conditions, TOTALS.c.day < query.until.date()]


def _of_names(table: Table, query: UsageQuery) -> list[ColumnElement[bool]]:
    conditions = [table.c[name] == value for name, value in (("team", query.team), ("model", query.model)) if value is not None]
    if query.keys is not None:
        conditions.append(table.c.key.in_(query.keys))
    if query.key is None:
        return [*conditions, table.c.key.not_in(UNBILLED_KEYS)]
    return [*conditions, rows_of(query.key, with_subjects=query.with_subjects, table=table)]


def rows_of(key: str, *, with_subjects: bool, table: Table = USAGE) -> ColumnElement[bool]:
    """Return the condition for the rows of a key, and for those of its entry's subjects if they are requested."""
    own = table.c.key == key
    return or_(own, subjects_of(key, table)) if with_subjects else own


def subjects_of(entry: str, table: Table = USAGE) -> ColumnElement[bool]:
    """Return the condition for the rows of an entry's subjects."""
    return table.c.key.startswith(subject_prefix(entry), autoescape=True)


def _text(value: object) -> str | None:
    return value.isoformat() if isinstance(value, date) else None if value is None else str(value)


def _sum(group: tuple[str | None, ...], totals: Row[Any]) -> UsageSum:
    return UsageSum(group, **{name: int(getattr(totals, name) or 0) for name in MEASURES}, cost=summed_cost(totals))


def _order(query: UsageQuery, each: UsageSum) -> tuple[Any, ...]:
    day = each.group[query.by.index("day")] if "day" in query.by else ""
    return day, -(each.prompt_tokens + each.completion_tokens), tuple(part or "" for part in each.group)


def query_ledger(settings: conf.Ledger, beside: Path, parameters: Mapping[str, str]) -> UsageReport:
    """Query the ledger of a configuration in the folder ``beside``. Raises QueryError and DatabaseUnavailableError."""
    query = parse_query(parameters, datetime.now(UTC))
    with open_ledger(settings, beside) as engine:
        return run_query(engine, query)
