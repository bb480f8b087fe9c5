"""Find single requests: by each filter, in pages, and always with an index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, text

from gateway.admin.month_routes import PARAMETERS as DESCRIBED
from gateway.api.errors import ERRORS
from gateway.ledger.store import UsageStore, database_url
from gateway.snapshot.link import RejectedRequest
from gateway.telemetry.request_record import Continuation
from gateway.usage.errors import QueryError
from gateway.usage.requests.causes import CAUSES, OF_QUEUES
from gateway.usage.requests.explanation import causes, time_line
from gateway.usage.requests.query import FILTERS, PARAMETERS, RequestPage, find_requests, parse_request_query, statement
from tests.gateway.ledger.rows import STARTED, row
from tests.support.money import price

NOW = datetime.fromtimestamp(STARTED, UTC) + timedelta(seconds=10)
ROWS = [
    row(1, price=price(1.0, 2.0), queued=0.5, retries=1, failures="tiny#1 connect"),
    row(2, team="t", started=STARTED - 60, user="ada"),
    row(3, key="team-b", status=404, code="model_not_found", model=None, server=None, requested_model="x", param="model"),
    row(4, status=429, code="insufficient_quota", reason="tokens_per_day", limit_holder="key team-a", started=STARTED - 120),
    row(5, status=499, incomplete="client", reason="client", started=STARTED - 180),
    row(6, status=503, code="overloaded", started=STARTED - 8 * 86400),
    row(8, incomplete="drain", reason="drain", started=STARTED - 200),
    row(9, incomplete="upstream", reason="idle_timeout", started=STARTED - 190),
]
REJECTED = RejectedRequest("req_7", STARTED - 30, "/v1/chat/completions", 401, "invalid_api_key", "The API key is not valid.", "10.0.0.7")


@pytest.fixture
def store(url: str, tmp_path: Path) -> Iterator[UsageStore]:
    with closing(UsageStore(database_url(url, tmp_path))) as made:
        made.write(ROWS)
        yield made


def found(store: UsageStore, **parameters: str) -> RequestPage:
    return find_requests(store.engine, parse_request_query(parameters, NOW), [REJECTED])


def ids(store: UsageStore, **parameters: str) -> str:
    return "".join(str(each["id"]).removeprefix("req_") for each in found(store, **parameters).requests)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, "31724598"),
        ({"since": "30d"}, "317245986"),
        ({"since": "30d", "until": "2027-01-15T07:59"}, "45986"),
        ({"id": "req_6"}, "6"),
        ({"id": "req_7"}, "7"),
        ({"id": "req_7", "key": "team-a"}, ""),
        ({"key": "team-a"}, "124598"),
        ({"key": "team-b", "status": "404"}, "3"),
        ({"team": "t"}, "2"),
        ({"user": "ada"}, "2"),
        ({"model": "tiny", "status": "200"}, "1298"),
        ({"status": "failed"}, "3745"),
        ({"status": "rejected"}, "374"),
        ({"status": "errors", "since": "30d"}, "986"),
        ({"status": "errors", "since": "30d", "limit": "2"}, "98"),
        ({"status": "errors", "reason": "drain"}, "8"),
        ({"status": "4xx", "since": "30d"}, "3745"),
        ({"status": "5xx", "since": "30d"}, "6"),
        ({"status": "2xx"}, "1298"),
        ({"status": "401"}, "7"),
        ({"code": "insufficient_quota"}, "4"),
        ({"code": "invalid_api_key"}, "7"),
        ({"code": "insufficient_quota", "reason": "tokens_per_day", "key": "team-a", "model": "tiny", "status": "429"}, "4"),
        ({"reason": "client"}, "5"),
        ({"key": "%"}, ""),
    ],
    ids=str,
)
def test_requests_are_found_by_each_filter(store: UsageStore, parameters: dict[str, str], expected: str) -> None:
    assert ids(store, **parameters) == expected


def test_a_request_has_all_that_is_known(store: UsageStore) -> None:
    shown = dict(found(store, id="req_1").requests[0])
    assert bytes(shown.pop("cost")) == b"0.00002"
    assert {name: value for name, value in shown.items() if value is not None} == {
        "id": "req_1", "time": "2027-01-15T08:00:00.500000+00:00", "endpoint": "/v1/chat/completions", "key": "team-a", "model": "tiny",
        "server": "tiny#0", "stream": False, "status": 200, "prompt_tokens": 10, "completion_tokens": 5, "cached_tokens": 2,
        "reasoning_tokens": 1, "total_ms": 250.0, "queued_ms": 500.0, "labels": {}, "retries": 1, "failures": "tiny#1 connect",
    }  # fmt: skip
    assert shown.keys() == {*found(store, id="req_7").requests[0]} - {"cost"}, "a request without a valid key has the same fields"


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_pages_have_each_request_once(store: UsageStore, size: int) -> None:
    store.write([row(number) for number in range(10, 20)])  # all at the same time
    seen: list[Any] = []
    cursor: dict[str, str] = {}
    while True:
        page = found(store, since="30d", limit=str(size), **cursor)
        seen += [each["id"] for each in page.requests]
        if page.next_cursor is None:
            break
        cursor = {"cursor": page.next_cursor}
    assert len(seen) == len({*seen}) == len(ROWS) + 11


@pytest.mark.parametrize("name", [*FILTERS, "id", "time", "failed", "cut", "key and code", "model and status", "other success", "2xx"])
def test_each_filter_uses_an_index(store: UsageStore, name: str) -> None:
    indexes = {
        "id": "autoindex|pkey", "time": "usage_time", "status": "status_time", "failed": "status_time", "key and code": "code_time",
        "model and status": "status_time", "user": "user_time", "other success": "status_time", "2xx": "usage_time",
        "cut": "reason_time",
    }  # fmt: skip
    given: dict[str, dict[str, str]] = {
        "id": {"id": "x"}, "time": {}, "status": {"status": "503"}, "failed": {"status": "failed"}, "other success": {"status": "201"},
        "2xx": {"status": "2xx"}, "cut": {},
        "key and code": {"key": "team-a", "code": "x"}, "model and status": {"model": "tiny", "status": "5xx"},
    }  # fmt: skip
    query = parse_request_query(given.get(name, {name: "x"}), NOW)
    query = replace(query, with_cut=name == "cut")
    store.write([row(number, code="x" if number % 100 == 0 else None, team="t") for number in range(100, 1100)])
    with store.engine.connect() as connection:
        plan = explained(connection, statement(query, connection))
    assert any(each in plan for each in indexes.get(name, f"{name}_time").split("|")), plan
    assert "Seq Scan" not in plan and "SCAN gateway_usage\n" not in f"{plan}\n", plan


def explained(connection: Connection, query: Any) -> str:
    """Return the plan of a query. PostgreSQL would read a small table as a whole, so that is forbidden."""
    compiled = query.compile(connection, compile_kwargs={"literal_binds": True})
    if connection.dialect.name == "sqlite":
        return "\n".join(str(line[-1]) for line in connection.execute(text("EXPLAIN QUERY PLAN " + str(compiled).replace(":", r"\:"))))
    for setting in ("enable_seqscan", "enable_bitmapscan"):
        connection.execute(text(f"SET {setting} = off"))
    connection.execute(text("ANALYZE gateway_usage"))
    return "\n".join(str(line[0]) for line in connection.execute(text("EXPLAIN " + str(compiled).replace(":", r"\:"))))


def test_the_parameters_are_described() -> None:
    assert {*DESCRIBED} == {*PARAMETERS}


def test_each_error_has_a_cause() -> None:
    assert CAUSES.keys() == ERRORS.keys()


def test_the_refusal_of_a_queue_is_explained() -> None:
    request = dict.fromkeys(("param", "requested_model", "limit_holder", "incomplete", "detail"))
    for reason, sentence in OF_QUEUES.items():
        assert list(causes({**request, "code": "overloaded", "reason": reason})) == [CAUSES["overloaded"], sentence]


def test_a_continued_stream_has_a_time_line() -> None:
    lost = [
        Continuation("a#0", "connect_timeout", "token_ids", "continued", 0.1, sampled=True),
        Continuation("a#1", "moved", "regeneration", "failed"),
    ]
    request = {
        **dict.fromkeys(("key", "client", "queued_ms", "retries")),
        "time": "2026-01-02T03:04:05+00:00",
        "endpoint": "/v1/completions",
        "failures": "a#2 connect, a#0 connect_timeout, a#1 moved",
        "server": "a#1",
        "first_token_ms": 20.0,
        "total_ms": 500.0,
        "status": 200,
        "continuations": ", ".join(map(str, lost)),
    }
    moments, texts = zip(*time_line(request), strict=True)
    assert list(moments) == sorted(moments)
    assert texts[1:] == (
        "servers failed: a#2 connect",
        "sent to a#0",
        "first event after 0.020 s",
        "later a#0 was lost (connect timeout), and another server continued the stream, as another draw",
        "later a#1 was drained, and no other server could continue the stream",
        "ended with status 200 after 0.500 s",
    )


@given(st.dictionaries(st.sampled_from(PARAMETERS), st.text(max_size=20), max_size=4))
def test_any_text_is_a_query_or_refused(parameters: dict[str, str]) -> None:
    try:
        query = parse_request_query(parameters, NOW)
    except QueryError:
        return
    assert 1 <= query.size <= 1000 and query.since.tzinfo is not None
