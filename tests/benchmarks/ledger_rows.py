"""Measures a ledger of millions of rows: finding a request, the cost of the indexes to the writer, closing a month, and retention.

``python -m tests.benchmarks.ledger_rows`` writes the results into docs/performance/ledger-rows.json. The rule: rows are made in the
database, by one statement, so that the size of the ledger is not that of this process; each time is that of the function that the gateway
calls.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, text

from gateway.ledger.months.closing import close_month
from gateway.ledger.schema import PARTIAL_INDEXES
from gateway.ledger.store import UsageStore, database_url
from gateway.usage.queries import parse_query, run_query
from gateway.usage.requests.query import find_requests, parse_request_query
from tests.gateway.ledger.rows import row
from tests.support.money import price
from tests.support.postgres import postgres

REPORT = Path(__file__).resolve().parents[2] / "docs" / "performance" / "ledger-rows.json"
ROWS = 5_000_000
WRITTEN = 50_000
"""Rows that are written with and without the indexes."""
DAYS = 60
END = datetime(2027, 3, 1, tzinfo=UTC)
QUERIES = 100
_FAILED = 33  # of that many requests one fails
_MADE = {
    "sqlite": {
        "numbers": "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :rows)",
        "from": "FROM n",
        "time": "strftime('%Y-%m-%d %H:%M:%S', :start + i * :step, 'unixepoch') || '.' || substr('000000' || (i % 1000000), -6)",
        "day": "strftime('%Y-%m-%d', :start + i * :step, 'unixepoch')",
        "false": "0",
        "labels": """'{"cost_center": "' || (i % 20) || '"}'""",
    },
    "postgresql": {
        "numbers": "",
        "from": "FROM generate_series(0, :rows - 1) AS n(i)",
        "time": "to_timestamp(CAST(:start AS float) + i * CAST(:step AS float))",
        "day": "(to_timestamp(CAST(:start AS float) + i * CAST(:step AS float)) AT TIME ZONE 'UTC')::date",
        "false": "false",
        "labels": """jsonb_build_object('cost_center', (i % 20)::text)""",
    },
}
_INSERT = """
INSERT INTO gateway_usage (request_id, time, day, endpoint, key, team, model, server, stream, status, code, reason, limit_holder, detail,
    prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens, total_ms, first_token_ms, queued_ms, cost_nano, labels, end_user,
    estimated)
{numbers} SELECT 'req_' || i, {time}, {day}, '/v1/chat/completions', 'key-' || (i * 7 % 200), 'team-' || (i * 7 % 20),
    'model-' || (i % 5), 'model-' || (i % 5) || '#0', {false}, CASE WHEN i % {failed} = 0 THEN 429 WHEN i % 50021 = 0 THEN 503 ELSE 200 END,
    CASE WHEN i % {failed} = 0 THEN 'rate_limit_exceeded' WHEN i % 50021 = 0 THEN 'overloaded' END,
    CASE WHEN i % {failed} = 0 THEN 'tokens_per_minute' END, CASE WHEN i % {failed} = 0 THEN 'key key-' || (i * 7 % 200) END,
    CASE WHEN i % {failed} = 0 THEN 'tokens_per_minute of key-' || (i * 7 % 200) || ': 100,000 tokens per minute are used up' END,
    100 + i % 900, 50 + i % 300, i % 50, 0, 1500.5, 120.25, 0.0, 100000 + i % 99991, {labels},
    CASE WHEN i % 2 = 0 THEN 'user-' || (i % 9973) END, {false} {from}
"""
FILTERS: Mapping[str, Callable[[random.Random], dict[str, str]]] = {
    "id": lambda r: {"id": f"req_{r.randrange(ROWS)}"},
    "time": lambda _: {},
    "key": lambda r: {"key": f"key-{r.randrange(200)}"},
    "team": lambda r: {"team": f"team-{r.randrange(20)}"},
    "user": lambda r: {"user": f"user-{r.randrange(9973)}"},
    "model": lambda r: {"model": f"model-{r.randrange(6)}"},  # the last one is unknown
    "failed": lambda _: {"status": "failed"},
    "status 503": lambda _: {"status": "503"},
    "status 5xx": lambda _: {"status": "5xx"},
    "status 204": lambda _: {"status": "204"},  # no request has it
    "code": lambda r: {"code": r.choice(("overloaded", "rate_limit_exceeded", "draining"))},
    "reason": lambda _: {"reason": "tokens_per_minute"},
    "key and code": lambda r: {"key": f"key-{r.randrange(200)}", "code": "overloaded"},
    "team and failed": lambda r: {"team": f"team-{r.randrange(20)}", "status": "failed"},
    "model and user": lambda r: {"model": f"model-{r.randrange(5)}", "user": f"user-{r.randrange(9973)}"},
    # No request has both, so all rows of one are read: 150,000, 25,000 and 250,000 of 5 million.
    "reason and unknown key": lambda r: {"reason": "tokens_per_minute", "key": f"key-{200 + r.randrange(200)}"},
    "key and unknown model": lambda r: {"key": f"key-{r.randrange(200)}", "model": "model-5"},
    "team and model of others": lambda r: (lambda n: {"team": f"team-{n}", "model": f"model-{(3 * n + 1) % 5}"})(r.randrange(20)),
}


def make(connection: Connection, rows: int) -> None:
    """Make rows up to ``END``, and then the indexes, which is faster than the other way around."""
    names = _MADE[connection.dialect.name]
    for name in PARTIAL_INDEXES:
        connection.execute(text(f"DROP INDEX {name}"))
    statement = _INSERT.format(**names, failed=_FAILED)
    start = (END - timedelta(days=DAYS)).timestamp()
    connection.execute(text(statement), {"rows": rows, "start": start, "step": DAYS * 86400.0 / rows})
    create_indexes(connection)


def create_indexes(connection: Connection) -> None:
    for name, (columns, condition) in PARTIAL_INDEXES.items():
        connection.execute(text(f"CREATE INDEX {name} ON gateway_usage ({', '.join(columns)}) WHERE {condition}"))


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def found(store: UsageStore, rows: int) -> dict[str, float]:
    """Return the 95th percentile of the time to find a page, in milliseconds, by filter: of first pages, and of pages after them."""
    now, chosen, results = END, random.Random(5), {}
    for name, make_filter in FILTERS.items():
        times: list[float] = []
        cursor: dict[str, str] = {}
        for number in range(QUERIES):
            query = make_filter(chosen)
            if query.get("id", "").startswith("req_"):
                query = {"id": f"req_{chosen.randrange(rows)}"}
            parsed = parse_request_query({**query, "since": f"{DAYS + 1}d", **(cursor if number % 2 else {})}, now)
            began = time.perf_counter()
            page = find_requests(store.engine, parsed)
            times.append(time.perf_counter() - began)
            cursor = {"cursor": page.next_cursor} if page.next_cursor is not None else {}
        results[name] = round(sorted(times)[int(len(times) * 0.95)] * 1000, 1)
    return results


def written(store: UsageStore, numbers: Iterator[int]) -> float:
    """Return the rows that the writer stores in a second."""
    made = [
        row(
            number, started=END.timestamp() + number * 0.001, key=f"key-{number * 7 % 200}", team=f"team-{number % 20}",
            model=f"model-{number % 5}", user=f"user-{number % 9973}", labels={"cost_center": "1"}, price=price(1, 2),
            status=429 if number % _FAILED == 0 else 200,
            code="rate_limit_exceeded" if number % _FAILED == 0 else None, reason="tokens_per_minute" if number % _FAILED == 0 else None,
        )
        for number in itertools.islice(numbers, WRITTEN)
    ]  # fmt: skip
    return round(WRITTEN / seconds(lambda: store.write(made)))


def measure(url: str, folder: Path, rows: int) -> dict[str, Any]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins here
    numbers = itertools.count(10 * ROWS)
    result: dict[str, Any] = {}
    with closing(UsageStore(database_url(url, folder))) as store:
        store.write([])
        with store.engine.begin() as connection:
            result["made_s"] = round(seconds(lambda: make(connection, rows)), 1)
        if store.engine.dialect.name == "postgresql":
            with store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.execute(text("VACUUM ANALYZE gateway_usage"))
        result["found_p95_ms"] = found(store, rows)
        query = parse_query({"by": "team,model", "since": f"{DAYS + 1}d"}, END)
        result["usage_report_s"] = round(seconds(lambda: run_query(store.engine, query)), 1)
        closed = []
        result["close_month_s"] = round(seconds(lambda: closed.append(close_month(store.engine, "2027-01", END + timedelta(days=99)))), 1)
        result["closed_requests"] = sum(json.loads(line)["requests"] for line in closed[0].lines)
        pruned = 40
        result["retention_rows_per_s"] = round(pruned * 500 / seconds(lambda: [store.prune(END) for _ in range(pruned)]))
        left = run_query(store.engine, query)
        result["reported_after_retention"] = left.requests
        result["peak_memory_mb"] = peak_memory()  # before this process makes rows
        rates: dict[str, list[float]] = {"with_indexes": [], "without_indexes": []}
        for _ in range(3):
            rates["with_indexes"].append(written(store, numbers))
            with store.engine.begin() as connection:
                for name in PARTIAL_INDEXES:
                    connection.execute(text(f"DROP INDEX {name}"))
            rates["without_indexes"].append(written(store, numbers))
            with store.engine.begin() as connection:
                create_indexes(connection)
        result["written_rows_per_s"] = {name: sorted(each)[1] for name, each in rates.items()}
    return result


def peak_memory() -> int:
    """Return the most memory that this process has had, in megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024)


def databases(folder: Path, kinds: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each kind of database with the URL of an empty one, which is removed afterwards."""
    if "sqlite" in kinds:
        yield "sqlite", f"sqlite:///{folder}/usage.db"
        for file in folder.glob("usage.db*"):
            file.unlink()
    if "postgresql" in kinds:
        with postgres() as server:
            yield "postgresql", server.database()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--to", type=Path, default=REPORT)
    parser.add_argument("kinds", nargs="*", default=["sqlite", "postgresql"])
    options = parser.parse_args()
    report: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "python": sys.version.split()[0]}
    report |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", "rows": options.rows}
    with tempfile.TemporaryDirectory(prefix="ledger-rows-") as folder:
        for kind, url in databases(Path(folder), options.kinds):
            report[kind] = measure(url, Path(folder), options.rows)
            print(json.dumps({kind: report[kind]}, indent=2), flush=True)
    options.to.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
