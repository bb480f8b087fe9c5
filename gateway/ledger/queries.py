"""What operators ask the ledger: sums over a time, by whatever they like to see apart.

Reading only. Days are UTC's; a time is from its beginning up to, and without, its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Engine, Integer, cast, func, inspect, or_, select
from sqlalchemy.exc import SQLAlchemyError

from gateway import config as conf
from gateway.config.problems import did_you_mean
from gateway.config.quantities import parse_duration
from gateway.ledger.errors import DatabaseUnavailableError, QueryError
from gateway.ledger.schema import USAGE
from gateway.ledger.store import create_database_engine, database_url, reason

DIMENSIONS = ("key", "team", "model", "day", "server")
"""What sums may be by."""

_DEFAULT_BY, _DEFAULT_SINCE = "key,model", "30d"
_DURATION = re.compile(r"[0-9.]+[a-z]+")
_MONTH = re.compile(r"\d{4}-\d{2}")
_NANO = 1_000_000_000
_HALF = 2**32


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """What is asked: sums by these dimensions over a time, of one key, team or model or of all. Subjects of tokens belong to the key
    that their entry has."""

    by: tuple[str, ...]
    since: datetime
    until: datetime
    key: str | None = None
    team: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class UsageSum:
    """One line of an answer. ``group`` is in the order of the question's dimensions; ``cost`` None: no request had a price.

    ``incomplete`` and ``estimated`` are requests, among them those whose tokens are an estimate.
    """

    group: tuple[str | None, ...]
    requests: int
    incomplete: int
    estimated: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    cost: float | None


@dataclass(frozen=True, slots=True)
class UsageReport:
    """The sums, the largest number of tokens first; by day, in the order of the days."""

    query: UsageQuery
    sums: Sequence[UsageSum]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        query = self.query
        rows = [{**dict(zip(query.by, each.group, strict=True)), **_without_group(each)} for each in self.sums]
        return {"since": query.since.isoformat(), "until": query.until.isoformat(), "by": list(query.by), "usage": rows}


def parse_report(document: Mapping[str, Any]) -> UsageReport:
    """The answer that a document, as a gateway gives it, holds."""
    by, since, until = tuple(document["by"]), *(datetime.fromisoformat(document[name]) for name in ("since", "until"))
    sums = [UsageSum(tuple(row.pop(part) for part in by), **row) for row in map(dict, document["usage"])]
    return UsageReport(UsageQuery(by, since, until), sums)


def _without_group(each: UsageSum) -> dict[str, Any]:
    return {name: value for name, value in asdict(each).items() if name != "group"}


def parse_query(words: Mapping[str, str], now: datetime) -> UsageQuery:
    """A question from words: ``by``, ``since``, ``until``, ``key``, ``team``, ``model``. Raises QueryError."""
    known = ("by", "since", "until", "key", "team", "model")
    for word in words:
        if word not in known:
            raise QueryError(f"there is no parameter {word}{did_you_mean(word, known)}")
    by = tuple(dict.fromkeys(part.strip() for part in words.get("by", _DEFAULT_BY).split(",")))
    for part in by:
        if part not in DIMENSIONS:
            raise QueryError(
                f"usage is not shown by {part or 'nothing'}{did_you_mean(part, DIMENSIONS)}: choose of {', '.join(DIMENSIONS)}"
            )
    since, until = _instant(words.get("since", _DEFAULT_SINCE), now), _instant(words["until"], now) if "until" in words else now
    if since >= until:
        raise QueryError("the time ends before it begins")
    named = {what: words.get(what) for what in ("key", "team", "model")}
    for what, name in named.items():
        if name is not None and "\0" in name:  # PostgreSQL's texts cannot hold it
            raise QueryError(f"no {what} has a NUL in its name")
    return UsageQuery(by, since, until, **named)


def _instant(text: str, now: datetime) -> datetime:
    """Return the time that a text names, in UTC: a date, a month, a time, a day by its name, or so long before ``now``."""
    now = now.astimezone(UTC)
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    named = {"today": midnight, "yesterday": midnight - timedelta(days=1), "this-month": midnight.replace(day=1)}
    try:
        if text in named:
            return named[text]
        if _DURATION.fullmatch(text):
            return now - timedelta(seconds=parse_duration(text))
        made = datetime.fromisoformat(f"{text}-01" if _MONTH.fullmatch(text) else text)
        return made.astimezone(UTC) if made.tzinfo else made.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise QueryError(
            f"{text} is no date such as 2027-01-01, no month such as 2027-01, no time such as 2027-01-01T12:00:00Z, "
            f"no duration such as 7d, and none of {', '.join(named)}"
        ) from None


def run_query(way: Engine, asked: UsageQuery) -> UsageReport:
    """Ask the database. Raises DatabaseUnavailableError."""
    groups = [USAGE.c[name] for name in asked.by]
    statement = select(*groups, *_totals()).where(*_conditions(asked)).group_by(*groups)
    try:
        with way.connect() as connection:
            if not inspect(connection).has_table(USAGE.name):
                return UsageReport(asked, ())
            found = connection.execute(statement).all()
    except SQLAlchemyError as error:
        raise DatabaseUnavailableError(reason(error)) from error
    width = len(groups)
    sums = [_sum(tuple(_text(part) for part in row[:width]), [*row[width:]]) for row in found]
    return UsageReport(asked, sorted(sums, key=lambda each: _order(asked, each)))


def _totals() -> tuple[ColumnElement[Any], ...]:
    count = func.count()
    return (
        count,
        func.count(USAGE.c.incomplete),
        func.sum(cast(USAGE.c.estimated, Integer)),
        *(func.sum(USAGE.c[f"{kind}_tokens"]) for kind in ("prompt", "completion", "cached", "reasoning")),
        func.sum(USAGE.c.cost_nano // _HALF),  # in two parts: a sum of whole numbers ends at 64 bits in SQLite
        func.sum(USAGE.c.cost_nano % _HALF),
    )


def _conditions(asked: UsageQuery) -> list[ColumnElement[bool]]:
    conditions = [USAGE.c.time >= asked.since, USAGE.c.time < asked.until]
    conditions += [USAGE.c[name] == value for name, value in (("team", asked.team), ("model", asked.model)) if value is not None]
    return conditions if asked.key is None else [*conditions, or_(*rows_of(asked.key))]


def rows_of(key: str) -> Iterator[ColumnElement[bool]]:
    """Which rows are a key's: its own, and those of the subjects behind its entry, ``key/…``."""
    yield USAGE.c.key == key
    yield USAGE.c.key.startswith(f"{key}/", autoescape=True)


def _text(value: object) -> str | None:
    return value.isoformat() if isinstance(value, date) else None if value is None else str(value)


def _sum(group: tuple[str | None, ...], totals: Sequence[Any]) -> UsageSum:
    *counts, high, low = totals
    requests, incomplete, estimated, prompt, completion, cached, reasoning = (int(count or 0) for count in counts)
    cost = None if high is None else (int(high) * _HALF + int(low)) / _NANO
    return UsageSum(group, requests, incomplete, estimated, prompt, completion, cached, reasoning, cost)


def _order(asked: UsageQuery, each: UsageSum) -> tuple[Any, ...]:
    day = each.group[asked.by.index("day")] if "day" in asked.by else ""
    return day, -(each.prompt_tokens + each.completion_tokens), tuple(part or "" for part in each.group)


def query_ledger(settings: conf.Ledger, beside: Path, words: Mapping[str, str]) -> UsageReport:
    """Ask the ledger of a configuration in the folder ``beside``. Raises QueryError and DatabaseUnavailableError."""
    asked, url = parse_query(words, datetime.now(UTC)), database_url(settings.url.get_secret_value(), beside)
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").exists():
        raise DatabaseUnavailableError(f"there is no file {url.database}; the gateway makes it with its first row")  # asking would make it
    way = create_database_engine(url)
    try:
        return run_query(way, asked)
    finally:
        way.dispose()
