"""Find single requests: the newest first, in pages, by any of the filters.

The rules: each filter has an index, and a query uses the one with the fewest rows. A request without a valid key has no row; control
remembers some of them, and they are in the same list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Row, Select, inspect, literal_column, select, tuple_

from gateway import config as conf
from gateway.ledger.months.tables import TOTALS
from gateway.ledger.row import COLUMNS, CONTINUED
from gateway.ledger.schema import USAGE, utc
from gateway.snapshot.link import RejectedRequest
from gateway.snapshot.money import json_number
from gateway.store.cursor import cursor_to, page_length, position_of
from gateway.usage.database import open_ledger, time_limited
from gateway.usage.errors import QueryError, check_parameters
from gateway.usage.queries import instant
from upstream.http import errors

_DEFAULT_SINCE = "7d"
_STATUS = re.compile(r"[1-5](?:[0-9]{2}|xx)")
_GROUPS: Mapping[str, tuple[int, int]] = {"errors": (500, 599), "rejected": (400, 498), "failed": (400, 599)}
"""Groups of statuses, the first two as the overview of the console counts them. A client that disconnected (499) was not rejected."""
_CUT = ("upstream", "drain")
_FAILURES = (each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.UpstreamError))
_CUT_REASONS = (*_CUT, *(each.reason for each in _FAILURES))
"""``incomplete`` of responses that the server or the gateway cut off, which are errors too, and their reasons."""
_QUERY_TIMEOUT = 30.0  # seconds

FILTERS: Mapping[str, str] = {
    "reason": "reason",
    "code": "code",
    "user": "end_user",
    "status": "status",
    "key": "key",
    "team": "team",
    "model": "model",
}
"""The filters and their columns, the filter that usually leaves the fewest rows first."""
PARAMETERS = ("id", *sorted(FILTERS), "since", "until", "cursor", "limit")
"""The parameters of a query."""

_NAMES = {"request_id": "id", "end_user": "user"}
_HIDDEN = frozenset({"day", "metadata", "late", "cost_nano", "estimated"})
_SHOWN = {_NAMES.get(column.name, column.name): column.name for column in COLUMNS if column.name not in _HIDDEN}
"""The fields of a request in responses, and their columns."""


@dataclass(frozen=True, slots=True)
class RequestQuery:
    """A query: the filters by name, the time range, the page. ``after``: the time and ID of the last request of the page before.

    ``statuses`` are the lowest and the highest status. ``with_cut``: also responses that were cut off. ``id``: this request, at any time.
    """

    filters: Mapping[str, str]
    since: datetime
    until: datetime | None = None
    id: str | None = None
    statuses: tuple[int, int] | None = None
    with_cut: bool = False
    after: tuple[datetime, str] | None = None
    size: int = 100


@dataclass(frozen=True, slots=True)
class RequestPage:
    """A page of requests as JSON objects, the newest first. ``next_cursor`` is None on the last page."""

    requests: Sequence[Mapping[str, Any]]
    next_cursor: str | None

    def document(self) -> dict[str, Any]:
        """Return the page as JSON, for an encoder of msgspec. A cost is a number with all of its digits."""
        return {"requests": list(self.requests), "next_cursor": self.next_cursor}


def parse_request_query(parameters: Mapping[str, str], now: datetime) -> RequestQuery:
    """Parse a query from ``PARAMETERS``. Raises QueryError."""
    check_parameters(parameters, PARAMETERS)
    for name, value in parameters.items():
        if "\0" in value:  # PostgreSQL text cannot contain it
            raise QueryError(f"{name}: a NUL is not allowed")
    since = instant(parameters.get("since", _DEFAULT_SINCE), now)
    until = instant(parameters["until"], now) if "until" in parameters else None
    if until is not None and since >= until:
        raise QueryError("the time ends before it starts")
    filters = {name: parameters[name] for name in FILTERS if name in parameters and name != "status"}
    statuses = _statuses(parameters["status"]) if "status" in parameters else None
    try:
        after = _position(position_of(parameters["cursor"])) if "cursor" in parameters else None
        size = page_length(parameters.get("limit"))
    except ValueError as error:
        raise QueryError(str(error)) from None
    return RequestQuery(filters, since, until, parameters.get("id"), statuses, parameters.get("status") == "errors", after, size)


def _statuses(text: str) -> tuple[int, int]:
    if text in _GROUPS:
        return _GROUPS[text]
    if not _STATUS.fullmatch(text):
        raise QueryError(f"status: expected a status such as 429, a class such as 5xx, or one of {', '.join(_GROUPS)}")
    return int(text.replace("x", "0")), int(text.replace("x", "9"))


def _position(text: str) -> tuple[datetime, str]:
    moment, _, identity = text.partition(" ")
    try:
        found = datetime.fromisoformat(moment)
    except ValueError:
        found = datetime.min
    if found.tzinfo is None or "\0" in identity:
        raise QueryError("cursor: expected the next_cursor of an earlier page")
    return found, identity


def find_requests(
    engine: Engine, query: RequestQuery, rejections: Iterable[RejectedRequest] = (), seconds: float = _QUERY_TIMEOUT
) -> RequestPage:
    """Find the requests of a page, for ``seconds`` at most. ``rejections``: the requests without a valid key.

    Raises DatabaseUnavailableError.
    """
    with time_limited(engine, seconds) as connection:
        known = inspect(connection).has_table(TOTALS.name)  # of this version, like the columns of requests
        rows = [row for each in _parts(query) for row in connection.execute(statement(each, connection))] if known else []
    found = [((utc(row.time), row.request_id), _shown_row(row)) for row in rows]
    found += [((_started(each), each.id), _shown_rejection(each)) for each in rejections if _matches(query, each)]
    found.sort(key=lambda each: each[0], reverse=True)
    page, cursor = found[: query.size], None
    if len(found) > query.size:
        moment, identity = page[-1][0]
        cursor = cursor_to(f"{moment.isoformat()} {identity}")
    return RequestPage([shown for _, shown in page], cursor)


def _parts(query: RequestQuery) -> Iterator[RequestQuery]:
    """Yield the queries of a query, each of which has an index."""
    yield replace(query, with_cut=False)
    if query.with_cut:
        yield replace(query, statuses=None)


def statement(query: RequestQuery, connection: Connection) -> Select[Any]:
    """Return the statement for a page of rows, and one row more if there is another page."""
    usage = USAGE.c
    conditions: list[ColumnElement[bool]] = []
    if query.id is not None:
        conditions.append(usage.request_id == query.id)
    else:
        conditions += (usage.key != CONTINUED, *_of_time(query))
    if query.with_cut:
        conditions += usage.reason.in_(_CUT_REASONS), usage.incomplete.in_(_CUT), usage.status < 500
    is_first = query.id is None and not query.with_cut
    for name, column in FILTERS.items():
        if name == "status":
            if query.statuses is not None:
                conditions += _of_status(query.statuses)
                is_first = is_first and _has_success(query.statuses)
        elif name in query.filters:
            conditions.append(_compared(column, connection, uses_index=is_first) == query.filters[name])
            is_first = False
    columns = [usage[name] for name in (*_SHOWN.values(), "cost_nano")]
    ordered = (usage.time.desc(), usage.request_id.desc())
    return select(*columns).where(*conditions).order_by(*ordered).limit(query.size + 1)


def _compared(column: str, connection: Connection, *, uses_index: bool) -> ColumnElement[Any]:
    """Return a column to compare. SQLite has no statistics, so only the best filter may use its index (sqlite.org/optoverview.html)."""
    if uses_index or connection.dialect.name != "sqlite":
        return USAGE.c[column]
    return literal_column(f'+"{column}"', USAGE.c[column].type)


def _of_time(query: RequestQuery) -> Iterator[ColumnElement[bool]]:
    usage = USAGE.c
    yield usage.time >= query.since
    if query.until is not None:
        yield usage.time < query.until
    if query.after is not None:
        yield usage.time <= query.after[0]  # with this, an index on the time begins there
        yield tuple_(usage.time, usage.request_id) < query.after


def _of_status(statuses: tuple[int, int]) -> Iterator[ColumnElement[bool]]:
    lowest, highest = statuses
    if not _has_success(statuses):
        yield USAGE.c.status != literal_column("200")  # as in the condition of the index
    yield USAGE.c.status == lowest if lowest == highest else USAGE.c.status.between(lowest, highest)


def _has_success(statuses: tuple[int, int]) -> bool:
    """Return whether ordinary requests have one of these statuses. The others have an index."""
    return statuses[0] <= 200 <= statuses[1]


def _shown_row(row: Row[Any]) -> Mapping[str, Any]:
    shown = {name: getattr(row, column) for name, column in _SHOWN.items()}
    cost = None if row.cost_nano is None else json_number(row.cost_nano)
    return shown | {"time": utc(row.time).isoformat(), "cost": cost, "client": None}


def _shown_rejection(request: RejectedRequest) -> Mapping[str, Any]:
    known = {"id": request.id, "time": _started(request).isoformat(), "endpoint": request.endpoint, "status": request.status}
    more: dict[str, Any] = {"code": request.code, "detail": request.detail, "client": request.client, "stream": False, "labels": {}}
    return dict.fromkeys((*_SHOWN, "cost")) | known | more


def _started(request: RejectedRequest) -> datetime:
    return datetime.fromtimestamp(request.started, UTC)


def _matches(query: RequestQuery, request: RejectedRequest) -> bool:
    if query.id is not None and query.id != request.id:
        return False
    started = _started(request)
    is_in_time = query.since <= started and (query.until is None or started < query.until)
    is_after = query.after is None or (started, request.id) < query.after
    has_status = query.statuses is None or query.statuses[0] <= request.status <= query.statuses[1]
    has_values = all(name == "code" and value == request.code for name, value in query.filters.items())
    return (query.id is not None or (is_in_time and is_after)) and has_status and has_values


def query_requests(settings: conf.Ledger, beside: Path, parameters: Mapping[str, str]) -> RequestPage:
    """Query the ledger of a configuration in the folder ``beside``. Raises QueryError and DatabaseUnavailableError."""
    query = parse_request_query(parameters, datetime.now(UTC))
    with open_ledger(settings, beside) as engine:
        return find_requests(engine, query)
