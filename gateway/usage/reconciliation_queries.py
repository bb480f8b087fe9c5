"""Reconcile the ledger with the engines' counters: read the samples and the rows of their windows, and classify.

Nothing is written. A row belongs to the window in which its response ended: the time of its arrival and its duration.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Engine, and_, case, func, inspect, or_, select

from gateway import config as conf
from gateway.ledger.engine_samples import read_samples
from gateway.ledger.row import CONTINUED, LOST, MIRRORED
from gateway.ledger.schema import ENGINE_SAMPLES, USAGE
from gateway.usage.database import connected, open_ledger
from gateway.usage.errors import QueryError
from gateway.usage.queries import UsageQuery, parse_query
from gateway.usage.reconciliation import KINDS, Classes, LedgerSums, ReconciledServer, ReconciledWindow, RowSums, classify, gaps, windows

LONGEST_RESPONSE = timedelta(hours=6)
"""A response that takes longer belongs to the window in which its request arrived."""

_WITHOUT_ENGINE = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")  # endpoints that never reach the engine
_NEVER_SENT = ("upstream_unreachable",)
_KNOWN = ("since", "until", "model", "reconcile")


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The result of a query, by server. The query decides the time and the model, or all models."""

    query: UsageQuery
    servers: Sequence[ReconciledServer]

    def document(self) -> dict[str, Any]:
        """Return the result as JSON."""
        since, until = self.query.since.isoformat(), self.query.until.isoformat()
        return {"since": since, "until": until, "servers": [asdict(each) for each in self.servers]}


def parse_reconciliation(document: Mapping[str, Any]) -> Reconciliation:
    """Parse a gateway's JSON result."""
    query = UsageQuery((), datetime.fromisoformat(document["since"]), datetime.fromisoformat(document["until"]))
    return Reconciliation(query, msgspec.convert(document["servers"], list[ReconciledServer]))


def parse_reconciliation_query(parameters: Mapping[str, str], now: datetime) -> UsageQuery:
    """Parse a query from the parameters ``since``, ``until`` and ``model``. Raises QueryError."""
    for name in parameters:
        if name not in _KNOWN:
            raise QueryError(f"the reconciliation is by model and server, and takes no {name}")
    return parse_query({name: value for name, value in parameters.items() if name != "reconcile"}, now)


def run_reconciliation(engine: Engine, query: UsageQuery) -> Reconciliation:
    """Reconcile. Raises DatabaseUnavailableError."""
    with connected(engine) as connection:
        has_samples = inspect(connection).has_table(ENGINE_SAMPLES.name)
        return Reconciliation(query, list(_servers(connection, query)) if has_samples else ())


def _servers(connection: Connection, query: UsageQuery) -> Iterator[ReconciledServer]:
    since, until = query.since.timestamp(), query.until.timestamp()
    samples = read_samples(connection, query.since, query.until, query.model)
    of_servers = {server: list(found) for server, found in groupby(windows(samples, since, until), attrgetter("server"))}
    models = Counter(found[0].model for found in of_servers.values())
    for server, found in of_servers.items():
        first, last = found[0], found[-1]
        rows = _rows_of(server, first.model, is_only=models[first.model] == 1)
        prompt, completion = Classes(), Classes()
        in_progress, unsampled = Counter[str](), Counter[str]()
        for window in found:
            classes = classify(window.growth, _ledger_sums(connection, rows, window.begin, window.end))
            prompt, completion = prompt + classes[0], completion + classes[1]
            if not window.is_quiet:
                in_progress += _in_flight(connection, rows, window)
        for begin, end in gaps(found, since, until):
            unsampled += _tokens(_ledger_sums(connection, rows, begin, end))
        further = {f"{kind}_in_progress": in_progress[kind] for kind in KINDS} | {f"{kind}_unsampled": unsampled[kind] for kind in KINDS}
        yield ReconciledServer(last.model, server, first.begin, last.end, len(found), prompt, completion, **further)


def _rows_of(server: str, model: str, *, is_only: bool) -> ColumnElement[bool]:
    """Return the condition of a server's rows. The row of a lost request names no server; it counts if its model has one server only."""
    usage = USAGE.c
    of_server = usage.server == server
    return or_(of_server, and_(usage.server.is_(None), usage.incomplete == LOST, usage.model == model)) if is_only else of_server


def _tokens(sums: LedgerSums) -> Counter[str]:
    return Counter(prompt=sums.prompt.total, completion=sums.completion.total)


def _ledger_sums(connection: Connection, rows: ColumnElement[bool], begin: float, end: float) -> LedgerSums:
    """Return the sums of the rows whose responses ended after ``begin`` and not after ``end``."""
    usage, start, stop = USAGE.c, datetime.fromtimestamp(begin, UTC), datetime.fromtimestamp(end, UTC)
    in_time = (
        rows,
        usage.time > start - LONGEST_RESPONSE,
        usage.time <= stop,
        or_(usage.time > start, _ended_after(connection, start)),
        or_(usage.time <= stop - LONGEST_RESPONSE, ~_ended_after(connection, stop)),
    )
    return _sums(connection, in_time)


def _in_flight(connection: Connection, rows: ColumnElement[bool], window: ReconciledWindow) -> Counter[str]:
    """Return the tokens of requests that were in flight at either end of a window."""
    found = Counter[str]()
    for time in (window.begin, window.end):
        moment = datetime.fromtimestamp(time, UTC)
        conditions = (rows, USAGE.c.time > moment - LONGEST_RESPONSE, USAGE.c.time <= moment)
        found += _tokens(_sums(connection, (*conditions, _ended_after(connection, moment))))
    return found


def _ended_after(connection: Connection, moment: datetime) -> ColumnElement[bool]:
    """Return the condition that a row's response ended after a given time. A row without a duration ended when it arrived."""
    duration = func.coalesce(USAGE.c.total_ms, 0.0)
    if connection.dialect.name == "sqlite":  # julianday is in days, exact to a millisecond
        text = moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
        return (func.julianday(USAGE.c.time) - func.julianday(text)) * 86_400_000.0 + duration > 0.5
    return USAGE.c.time + func.make_interval(0, 0, 0, 0, 0, 0, duration / 1000.0) > moment


def _sums(connection: Connection, conditions: Sequence[ColumnElement[bool]]) -> LedgerSums:
    usage = USAGE.c
    lost, complete = usage.incomplete == LOST, usage.incomplete.is_(None)
    truncated = and_(usage.incomplete.is_not(None), usage.incomplete != LOST)
    used_engine = usage.endpoint.not_in(_WITHOUT_ENGINE)
    was_sent = and_(used_engine, or_(usage.code.is_(None), usage.code.not_in(_NEVER_SENT)))
    is_estimated = or_(usage.estimated, usage.estimated_by.is_not(None))
    is_uncounted = and_(used_engine, complete, usage.status == 200, or_(usage.prompt_tokens.is_(None), is_estimated))
    is_mirrored, is_continued = usage.key == MIRRORED, usage.key == CONTINUED
    again = usage.prompt_tokens * (func.coalesce(usage.choices, 1) - 1)

    def total(value: Any, condition: ColumnElement[bool]) -> ColumnElement[Any]:
        return func.coalesce(func.sum(case((condition, func.coalesce(value, 0)), else_=0)), 0)

    parts = {"complete": complete, "truncated": truncated, "lost": lost, "estimated": is_estimated}
    parts |= {"mirrored": is_mirrored, "continued": is_continued}
    columns = {
        **{f"{kind} {name}": total(usage[f"{kind}_tokens"], part) for kind in KINDS for name, part in parts.items()},
        "prompt choices": total(again, complete),
        "prompt truncated_choices": total(again, truncated),
        "rows requests": total(1, was_sent),
        "rows uncounted": total(1, is_uncounted),
    }
    sums: dict[str, dict[str, int]] = defaultdict(dict)
    for label, value in zip(columns, connection.execute(select(*columns.values()).where(*conditions)).one(), strict=True):
        subject, name = label.split()
        sums[subject][name] = int(value)
    return LedgerSums(RowSums(**sums["prompt"]), RowSums(**sums["completion"]), **sums["rows"])


def reconcile_ledger(settings: conf.Ledger, beside: Path, parameters: Mapping[str, str]) -> Reconciliation:
    """Reconcile the ledger of a configuration in the folder ``beside``. Raises QueryError and DatabaseUnavailableError."""
    query = parse_reconciliation_query(parameters, datetime.now(UTC))
    with open_ledger(settings, beside) as engine:
        return run_reconciliation(engine, query)
