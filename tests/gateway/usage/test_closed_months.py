"""Reports add up: closed months, corrections and the rows since then are what the engines have counted, to the token, over 2,000 requests.

A month cannot be closed while it lasts, so the requests before the closing are moved to the month before.
"""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gateway.ledger.row import UsageRow
from gateway.ledger.store import UsageStore, database_url
from tests.gateway.usage.test_reconciliation import KINDS, MODEL, of_servers, request_completely, rows
from tests.support.process import Gateway, configuration, gateway, wait_for
from tests.upstream.simulator.test_process import Simulated
from tests.upstream.simulator.test_process import running as simulated

REQUESTS = 1000
"""Before the closing, and again after it."""
LATE = 10
THIS_MONTH = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
DAY = THIS_MONTH - timedelta(days=3)
MONTH = f"{DAY:%Y-%m}"


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Simulated]]:
    with simulated("--sim-tokens-per-second", "0") as one, simulated("--sim-tokens-per-second", "0") as other:
        yield [one, other]


@pytest.fixture(scope="module")
def one(servers: list[Simulated], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    found = {"id": MODEL, "servers": [{"url": server.url} for server in servers], "price": {"prompt": 1, "completion": 3}}
    config = configuration(found, workers=2) | {"ledger": "sqlite:///usage.db"}
    config["keys"][0] |= {"labels": {"cost_center": "17"}}
    config["audit"] = {"secret": {"env": "AUDIT_SECRET"}, "file": "audit.jsonl"}
    with gateway(tmp_path_factory.mktemp("months"), config, variables={"AUDIT_SECRET": "s" * 32}) as running:
        yield running


async def complete(one: Gateway, count: int) -> None:
    """Send requests that succeed, and wait until their rows are stored."""
    slots, before = asyncio.Semaphore(16), len(rows(one))

    async def send(number: int) -> None:
        async with slots:
            await request_completely(one.data, number)

    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(send(number))
    await asyncio.to_thread(wait_for, lambda: len(rows(one)) == before + count, 60)


def change(one: Gateway, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(one.folder / "usage.db", timeout=30)) as connection, connection:
        connection.execute(statement, values)


def store(one: Gateway) -> closing[UsageStore]:
    return closing(UsageStore(database_url(f"sqlite:///{one.folder}/usage.db", one.folder)))


def arriving_later(found: Iterable[dict[str, Any]]) -> list[UsageRow]:
    """Return rows as a spool has them."""
    started = DAY.timestamp()
    tokens = ("prompt", "completion", "cached", "reasoning")
    return [
        UsageRow(
            each["request_id"], started, each["endpoint"], each["key"], None, each["model"], each["server"], status=each["status"],
            labels=json.loads(each["labels"]), **{kind: each[f"{kind}_tokens"] for kind in tokens},
        )
        for each in found
    ]  # fmt: skip


def summed(lines: Iterable[str]) -> Counter[str]:
    """Return the tokens and requests of report lines."""
    names = ("requests", "prompt_tokens", "completion_tokens")
    return sum((Counter({name: json.loads(line)[name] for name in names}) for line in lines), Counter[str]())


def reported(one: Gateway, since: str) -> Counter[str]:
    (line,) = one.get(f"/usage?by=key&since={since}").json()["usage"]
    return Counter({name: line[name] for name in ("requests", "prompt_tokens", "completion_tokens")})


async def test_frozen_months_and_open_rows_are_what_the_engines_count(one: Gateway, servers: list[Simulated]) -> None:
    await complete(one, REQUESTS)
    late = arriving_later(rows(one)[:LATE])
    for each in late:
        change(one, "DELETE FROM gateway_usage WHERE request_id = ?", each.id)
    change(one, "UPDATE gateway_usage SET time = ?, day = ?", f"{DAY:%Y-%m-%d %H:%M:%S}.000000", f"{DAY:%Y-%m-%d}")

    closed = json.loads((await asyncio.to_thread(one.command, "usage", "close", MONTH, "--format", "json")).stdout)
    assert closed["intact"] and not closed["corrections"]
    with store(one) as other:
        other.write(late)
    await complete(one, REQUESTS)

    again = json.loads((await asyncio.to_thread(one.command, "usage", "close", MONTH, "--format", "json")).stdout)
    assert {**again, "corrections": []} == closed, "it is frozen"
    frozen, corrections = summed(again["lines"]), summed(again["corrections"])
    assert (frozen["requests"], corrections["requests"]) == (REQUESTS - LATE, LATE)
    open_rows = reported(one, f"{THIS_MONTH:%Y-%m-%d}")
    in_all = frozen + corrections + open_rows
    assert in_all["requests"] == 2 * REQUESTS
    assert tuple(in_all[f"{kind}_tokens"] for kind in KINDS) == of_servers(servers)
    assert reported(one, MONTH) == in_all

    with store(one) as other:
        while other.prune(THIS_MONTH):
            pass
    assert len(rows(one)) == REQUESTS
    assert reported(one, MONTH) == in_all, "also when only the totals of the month are left"
    assert json.loads((await asyncio.to_thread(one.command, "usage", "close", MONTH, "--format", "json")).stdout) == again


def test_the_sheet_is_by_team_cost_center_and_model(one: Gateway) -> None:
    header, frozen, correction = csv.reader(io.StringIO(one.command("usage", "close", MONTH, "--format", "csv").stdout))
    assert frozen[:5] == [MONTH, "", "17", MODEL, str(REQUESTS - LATE)]
    assert correction[:5] == [MONTH, "", "17", MODEL, str(LATE)] and correction[-1]
    assert header[-1] == "arrived"


def test_the_hash_is_that_of_the_lines(one: Gateway) -> None:
    (known,) = one.get("/admin/v1/months").json()["months"]
    lines = one.command("usage", "close", MONTH, "--format", "lines").stdout
    assert known["month"] == MONTH and known["hash"] == hashlib.sha256(lines.encode()).hexdigest()
    assert one.get(f"/admin/v1/months/{MONTH}").json()["hash"] == known["hash"]


def test_the_closing_is_in_the_audit_log_once(one: Gateway) -> None:
    lines = [json.loads(line) for line in (one.folder / "audit.jsonl").read_text().splitlines()]
    assert [each["target"] for each in lines if each["action"] == "month.close"] == [MONTH]


def test_other_months_are_refused(one: Gateway) -> None:
    refused = one.command("usage", "close", f"{THIS_MONTH:%Y-%m}")
    assert refused.returncode == 1 and "has not ended" in refused.stderr
    assert "is not a month" in one.command("usage", "close", "October").stderr
    assert one.get("/admin/v1/months/2020-01").status_code == 404
    assert "--format is one of" in one.command("usage", "close", MONTH, "--format", "xlsx").stderr


def test_a_changed_report_is_reported(one: Gateway) -> None:
    change(one, "UPDATE gateway_closed_usage SET line = replace(line, 'team-a', 'team-b')")
    changed = one.command("usage", "close", MONTH)
    assert changed.returncode == 1 and "was changed after it was closed" in changed.stderr
