"""Query the ledger: sums over a time, grouped by the dimensions that an operator names.

Nothing is written. Days are UTC's; a time range includes its start and excludes its end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Engine, Integer, Row, Select, cast, func, inspect, or_, select

from gateway import config as conf
from gateway.config.problems import did_you_mean
from gateway.config.quantities import parse_duration
from gateway.ledger.row import MIRRORED
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
_HALF = 2**32
"""Costs are summed in two parts, because SQLite's integer sums overflow at 64 bits."""


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """A query: sums by these dimensions over a time range, for one key, team or model, or for all.

    Subjects of tokens belong to the key of their entry, unless ``with_subjects`` is False. ``keys`` are all keys of the report, None: all.
    """

    by: tuple[str, ...]
    since: datetime
    until: datetime
    key: str | None = None
    team: str | None = None
    model: str | None = None
    with_subjects: bool = True
    keys: tuple[str, ...] | None = None


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
    since = _instant(parameters.get("since", _DEFAULT_SINCE), now)
    until = _instant(parameters["until"], now) if "until" in parameters else now
    if since >= until:
        raise QueryError("the time ends before it starts")
    names = {what: parameters.get(what) for what in ("key", "team", "model")}
    for what, name in names.items():
        if name is not None and "\0" in name:  # PostgreSQL text cannot contain it
            raise QueryError(f"no {what} has a NUL in its name")
    return UsageQuery(by, since, until, names["key"], names["team"], names["model"])


def _instant(text: str, now: datetime) -> datetime:
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
    groups = [_group(part).label(f"group_{number}") for number, part in enumerate(query.by)]
    tokens = func.coalesce(func.sum(USAGE.c.prompt_tokens), 0) + func.coalesce(func.sum(USAGE.c.completion_tokens), 0)
    names = [each.name for each in groups]  # grouped by name: a label is a parameter, which PostgreSQL does not recognize as the same
    statement = (
        select(*groups, *_totals()).where(*_conditions(query)).group_by(*names).order_by(tokens.desc(), *names).limit(max_groups + 1)
    )
    with time_limited(engine, seconds) as connection:
        if not inspect(connection).has_table(USAGE.name):
            return UsageReport(query, ())
        found = connection.execute(statement).all()
        methods = connection.execute(_methods(query)).all()
    sums = [_sum(tuple(_text(part) for part in row[: len(groups)]), row) for row in found[:max_groups]]
    estimates = {method or UNKNOWN_METHOD: count for estimated, method, count in methods if estimated}
    requests = sum(count for _, _, count in methods)
    return UsageReport(query, sorted(sums, key=lambda each: _order(query, each)), len(found) > max_groups, requests, estimates)


def _group(part: str) -> ColumnElement[Any]:
    """Return the expression for a dimension."""
    column = DIMENSIONS.get(part)
    return USAGE.c.labels[part.removeprefix(LABEL)].as_string() if column is None else USAGE.c[column]


def _totals() -> tuple[ColumnElement[Any], ...]:
    """Return the expressions of a line's measures by their names, and of the two parts of its cost."""
    counts: dict[str, ColumnElement[Any]] = {
        "requests": func.count(),
        "incomplete": func.count(USAGE.c.incomplete),
        "estimated": func.sum(cast(USAGE.c.estimated, Integer)),
    }
    measures = ((counts[name] if name in counts else func.sum(USAGE.c[name])).label(name) for name in MEASURES)
    return *measures, *cost_parts()


def cost_parts() -> tuple[ColumnElement[Any], ...]:
    """Return the expressions ``high`` and ``low`` of a sum of costs, which ``summed_cost`` puts together."""
    return func.sum(USAGE.c.cost_nano // _HALF).label("high"), func.sum(USAGE.c.cost_nano % _HALF).label("low")


def summed_cost(totals: Row[Any]) -> int | None:
    """Return a sum of costs, in nano-units, from its ``cost_parts``; None if no row had a cost."""
    return None if totals.high is None else int(totals.high) * _HALF + int(totals.low)


def _methods(query: UsageQuery) -> Select[Any]:
    """Return the statement that counts the requests by the method of their estimate, the most frequent first."""
    groups, count = (USAGE.c.estimated, USAGE.c.estimated_by), func.count()
    return select(*groups, count).where(*_conditions(query)).group_by(*groups).order_by(count.desc(), *groups)


def _conditions(query: UsageQuery) -> list[ColumnElement[bool]]:
    conditions = [USAGE.c.time >= query.since, USAGE.c.time < query.until]
    conditions += [USAGE.c[name] == value for name, value in (("team", query.team), ("model", query.model)) if value is not None]
    if query.keys is not None:
        conditions.append(USAGE.c.key.in_(query.keys))
    if query.key is None:
        return [*conditions, USAGE.c.key != MIRRORED]
    return [*conditions, rows_of(query.key, with_subjects=query.with_subjects)]


def rows_of(key: str, *, with_subjects: bool) -> ColumnElement[bool]:
    """Return the condition for the rows of a key, and for those of its entry's subjects if they are requested."""
    own = USAGE.c.key == key
    return or_(own, subjects_of(key)) if with_subjects else own


def subjects_of(entry: str) -> ColumnElement[bool]:
    """Return the condition for the rows of an entry's subjects."""
    return USAGE.c.key.startswith(subject_prefix(entry), autoescape=True)


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
