"""Budgets survive restarts: what the ledger recorded before a start is restored once, to the token and the billionth."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import sqlite3
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, closing, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from pydantic import SecretStr

from gateway import config as conf
from gateway.control.budgets import BudgetRestorer
from gateway.ledger.row import LOST, frame
from gateway.ledger.spool import save, spool
from gateway.ledger.store import UsageStore, database_url
from gateway.ledger.writer import Ledger, running
from gateway.limits.decision import DAY, MONTH, Amounts
from gateway.limits.shared_counts import Buckets
from gateway.limits.windows import SPENT, USED, moment
from gateway.snapshot.snapshot import Allowance, Issuer, Key, Limits, Model, Snapshot
from gateway.usage.reader import UsageReader
from tests.gateway.ledger.rows import payload, row
from tests.support.money import price
from tests.support.process import Gateway, alive, configuration, gateway, launched, wait_for
from tests.support.running import KEY, until
from tests.support.simulated import simulated
from tests.support.wire import client, request

NOW = 1_800_000_000.0
"""2027-01-15T08:00:00Z"""
DAYS = 86400.0
BUDGET = Limits(tokens_per_day=1_000_000, tokens_per_month=1_000_000, cost_per_month=5_000_000_000)
SNAPSHOT = Snapshot(
    1,
    (
        Key("team-a", allowances=(Allowance("key team-a", BUDGET), Allowance("team lab", BUDGET)), team="lab"),
        Key("big-only", allowances=(Allowance("key big-only for b*", BUDGET, ("b*",)),)),
        Key("staff", allowances=(Allowance("key staff", BUDGET),)),
        Key("other"),
    ),
    (Model("tiny", ()), Model("large", (), aliases=("big",))),
    issuers=(Issuer("https://id.example", ("gateway",), ("staff",), ("RS256",)),),
)


def store_rows(url: str, folder: Path, *rows: Any) -> None:
    with closing(UsageStore(database_url(url, folder))) as store:
        assert store.write(rows) == 0


@pytest.fixture
def buckets() -> Iterator[Buckets]:
    with closing(Buckets.create("test", 2)) as made:
        yield made


@asynccontextmanager
async def restoring(url: str, folder: Path, buckets: Buckets, clock: float = NOW) -> AsyncIterator[tuple[Ledger, BudgetRestorer]]:
    settings = conf.Ledger.model_validate({"url": SecretStr(url)})
    with running(settings, folder, spool(folder / "spool"), 1) as ledger:
        async with aclosing(BudgetRestorer(ledger, UsageReader(ledger.engine), buckets, NOW, clock=lambda: clock)) as restorer:
            yield ledger, restorer


def counted(buckets: Buckets, holder: str, at: float = NOW) -> tuple[float, float, float, float]:
    """Return the tokens and cost that are counted for this day and month."""
    offset, day = buckets.holder(holder, BUDGET).offset, moment(0.0, at)
    found = []
    for window, period in ((DAY, day.periods[0]), (MONTH, day.periods[2])):
        known = buckets.cells[offset + window] == period
        found += [buckets.cells[offset + window + part] if known else 0.0 for part in (USED, SPENT)]
    return found[0], found[1], found[2], found[3]


async def test_what_was_used_before_the_start_counts_by_key_team_and_model(url: str, tmp_path: Path, buckets: Buckets) -> None:
    priced: dict[str, Any] = {"price": price(0.1, 0.0002)}  # 10 prompt and 5 completion tokens cost 1,001 nano-units
    store_rows(
        url,
        tmp_path,
        row(1, started=NOW - 10, team="lab", **priced),
        row(2, started=NOW - 2 * DAYS, team="lab", **priced),
        row(3, started=NOW - 40 * DAYS, team="lab", **priced),
        row(4, started=NOW, team="lab", **priced),  # the running gateway's own
        row(5, started=NOW - 10, key="other", team="lab", **priced),
        row(6, started=NOW - 10, key="big-only", model="tiny"),
        row(7, started=NOW - 10, key="big-only", model="large"),
        row(8, started=NOW - 10, key="staff/alice"),
        row(9, started=NOW - 10, key="staffing"),
        row(10, started=NOW - 10, key="staff"),
        row(11, started=NOW - 10, incomplete=LOST, status=None, prompt=7, completion=None),
    )
    async with restoring(url, tmp_path, buckets) as (_, restorer):
        await restorer.start(SNAPSHOT)
    assert counted(buckets, "key team-a") == (22, 1001, 37, 2002)
    assert counted(buckets, "team lab") == (30, 2002, 45, 3003)
    assert counted(buckets, "key big-only for b*") == (15, 0, 15, 0)
    assert counted(buckets, "key staff/alice") == (15, 0, 15, 0)
    assert counted(buckets, "key staff") == (15, 0, 15, 0)


async def test_rows_on_disk_count_once_though_some_are_in_the_database(url: str, tmp_path: Path, buckets: Buckets) -> None:
    store_rows(url, tmp_path, row(1, started=NOW - 10), row(2, started=NOW - 10))
    (tmp_path / "spool").mkdir()
    save(tmp_path / "spool", b"".join(frame(payload(number, started=NOW - 10)) for number in (2, 3, 3)), [])
    async with restoring(url, tmp_path, buckets) as (ledger, restorer):
        await restorer.start(SNAPSHOT)
        assert counted(buckets, "key team-a")[::2] == (45, 45)
        late = [payload(4, started=NOW - 10), payload(3, started=NOW - 10), payload(5, started=NOW + 10)]
        save(ledger.folder, b"".join(map(frame, late)), [])
        await until(lambda: counted(buckets, "key team-a")[::2] == (60, 60))


async def test_without_a_database_requests_are_counted_from_zero_and_the_rest_is_added_later(tmp_path: Path, buckets: Buckets) -> None:
    url = f"sqlite:///{tmp_path}/later/usage.db"
    (tmp_path / "spool").mkdir()
    save(tmp_path / "spool", b"".join(frame(payload(number, started=NOW - 10)) for number in (1, 2)), [])
    async with restoring(url, tmp_path, buckets) as (ledger, restorer):
        await restorer.start(SNAPSHOT)
        state = restorer.as_json()
        assert state is not None and not state["restored"] and state["last_error"]
        holder, amounts = buckets.holder("key team-a", BUDGET), Amounts(tokens=100)
        assert buckets.reserve([(holder, amounts)], moment(0.0, NOW), {}) is None
        ledger.journals[0].append(payload(3, started=NOW + 1, prompt=100, completion=0))  # the row of that request
        (tmp_path / "later").mkdir()
        await until(lambda: bool((restorer.as_json() or {})["restored"]))
        assert counted(buckets, "key team-a")[::2] == (130, 130)


async def test_a_database_that_comes_back_is_queried_again(tmp_path: Path, buckets: Buckets) -> None:
    (tmp_path / "away").mkdir()
    store_rows(f"sqlite:///{tmp_path}/away/usage.db", tmp_path, row(1, started=NOW - 10))
    async with restoring(f"sqlite:///{tmp_path}/back/usage.db", tmp_path, buckets) as (_, restorer):
        await restorer.start(SNAPSHOT)
        state = restorer.as_json()
        assert state is not None and not state["restored"] and "unable to open database file" in state["last_error"]
        (tmp_path / "away").rename(tmp_path / "back")
        await until(lambda: bool((restorer.as_json() or {})["restored"]))
        assert (restorer.as_json() or {})["last_error"] is None
    assert counted(buckets, "key team-a")[::2] == (15, 15)


async def test_a_row_that_no_gateway_wrote_delays_no_start(tmp_path: Path, buckets: Buckets, caplog: pytest.LogCaptureFixture) -> None:
    store_rows(f"sqlite:///{tmp_path}/usage.db", tmp_path, row(1, started=NOW - 10, team="lab"))
    with closing(sqlite3.connect(tmp_path / "usage.db")) as connection, connection:
        connection.execute("UPDATE gateway_usage SET key = x'00'")
    async with restoring(f"sqlite:///{tmp_path}/usage.db", tmp_path, buckets) as (_, restorer):
        await restorer.start(SNAPSHOT)
        state = restorer.as_json()
    assert state is not None and not state["restored"] and state["last_error"]
    assert "the budgets could not be restored; this is retried" in caplog.messages


async def test_every_subject_of_many_gets_its_own_use(tmp_path: Path, buckets: Buckets) -> None:
    url, many = f"sqlite:///{tmp_path}/usage.db", 600
    store_rows(
        url, tmp_path, *(row(number, started=NOW - 10, key=f"staff/{number}", prompt=number, completion=0) for number in range(many))
    )
    async with restoring(url, tmp_path, buckets) as (_, restorer):
        await restorer.start(SNAPSHOT)
    assert [counted(buckets, f"key staff/{number}")[0] for number in range(many)] == [*range(many)]


async def test_subjects_without_space_are_counted_together(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/usage.db"
    store_rows(url, tmp_path, *(row(number, started=NOW - 10, key=f"staff/{number}") for number in range(5)))
    memory = mmap.mmap(-1, 512)  # a second holder would be in the last quarter, which subjects do not get
    struct.pack_into("<QQ", memory, 0, 1, 0)
    with closing(Buckets(memory, worker=None)) as small:
        small.holder("key staff", BUDGET)
        async with restoring(url, tmp_path, small) as (_, restorer):
            await restorer.start(SNAPSHOT)
        assert counted(small, "key staff")[::2] == (75, 75)


async def test_a_worker_that_counts_without_a_lock_is_waited_for(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/usage.db"
    store_rows(url, tmp_path, row(1, started=NOW - 10))
    with closing(Buckets.create("test", 1)) as shared, closing(Buckets.inherited(os.dup(shared.fd), 0)) as worker:
        async with restoring(url, tmp_path, shared) as (_, restorer):
            starting = asyncio.create_task(restorer.start(SNAPSHOT))
            await until(lambda: not shared.may_write)
            assert counted(worker, "key team-a")[0] == 0 and not starting.done()
            worker.tick()
            await starting
        assert counted(worker, "key team-a")[::2] == (15, 15)


@pytest.mark.parametrize("budget", [Limits(requests_per_minute=5), Limits(concurrent=1)])
async def test_without_a_budget_the_database_is_not_queried(tmp_path: Path, buckets: Buckets, budget: Limits) -> None:
    async with restoring(f"sqlite:///{tmp_path}/nowhere/usage.db", tmp_path, buckets) as (_, restorer):
        await restorer.start(Snapshot(1, (Key("team-a", allowances=(Allowance("key team-a", budget),)),), ()))
        assert restorer.as_json() is None


async def test_a_month_that_has_just_begun_starts_with_nothing(url: str, tmp_path: Path, buckets: Buckets) -> None:
    first = 1_801_440_000.0  # 2027-02-01T00:00:00Z
    store_rows(url, tmp_path, row(1, started=first - 1), row(2, started=first), row(3, started=first + 1))
    settings = conf.Ledger.model_validate({"url": SecretStr(url)})
    with running(settings, tmp_path, spool(tmp_path / "spool"), 1) as ledger:
        async with aclosing(BudgetRestorer(ledger, UsageReader(ledger.engine), buckets, first + 2, clock=lambda: first + 2)) as restorer:
            await restorer.start(SNAPSHOT)
    assert counted(buckets, "key team-a", first + 2)[::2] == (30, 30)


# The whole gateway


LIMIT = 1_000_000


def left(one: Gateway) -> int:
    """Return the tokens that are left of the month, as the refusal of a large request states them."""
    refusal = one.request(max_tokens=LIMIT - 50)
    assert refusal.status_code == 429, refusal.text
    message = refusal.json()["error"]["message"]
    return int(message.partition(" only ")[2].partition(" ")[0].replace(",", ""))


def counts(one: Gateway) -> tuple[Any, ...]:
    """Return the tokens of the month and of the last seven days, and the cost of the last seven days."""
    reply = httpx2.get(f"{one.url}/v1/limits", headers={"authorization": f"Bearer {KEY}"}, timeout=60, verify=False)
    used = {each["limit"]: each["used"] for each in json.loads(reply.text, parse_float=Decimal)["limits"]}
    return tuple(used[name] for name in ("tokens_per_month", "tokens_per_7d", "cost_per_7d"))


def use(one: Gateway, count: int) -> int:
    """Send requests and return the tokens of their responses."""
    return sum(one.request(max_tokens=20).json()["usage"]["total_tokens"] for _ in range(count))


def stop_gracefully(one: Gateway) -> None:
    assert one.stop() == 0


def kill_control(one: Gateway) -> None:
    tree = one.tree()
    one.process.kill()
    one.process.wait(60)
    await_exit(tree)


def kill_everything(one: Gateway) -> None:
    wait_for(lambda: one.get("/status").json()["ledger"]["waiting_rows"] == 0)
    tree = one.tree()
    one.process.kill()
    for each in tree:
        with suppress(psutil.NoSuchProcess):  # it has exited because its parent was killed
            each.kill()
    one.process.wait(60)
    await_exit(tree)


def await_exit(tree: list[Any]) -> None:
    wait_for(lambda: not alive(tree), 60)


def kill_worker(one: Gateway) -> None:
    """Kill a worker, and then stop the gateway."""
    os.kill(one.workers()[0], signal.SIGKILL)
    wait_for(lambda: one.metric("vllm_gateway_worker_restarts_total") == 1)
    stop_gracefully(one)


@pytest.mark.parametrize(
    ("end", "workers"),
    [(stop_gracefully, 1), (kill_worker, 2), (kill_control, 2), (kill_everything, 1)],
    ids=["stop", "kill a worker", "kill control", "kill everything"],
)
def test_a_restart_keeps_the_budget_of_the_month_to_the_token(
    url: str, tmp_path: Path, end: Callable[[Gateway], None], workers: int
) -> None:
    config = configuration(launched("sim/one", **{"sim-tokens-per-second": 0}), workers=workers) | {"ledger": url}
    config["models"][0] |= {"price": {"prompt": 0.1, "completion": 0.7}}
    rolling = {"budgets": [{"window": "7d", "tokens": LIMIT, "cost": 1}]}
    config["keys"][0] |= {"limits": {"tokens_per_month": LIMIT, **rolling}}
    used, spent = 0, Decimal(0)
    for _ in range(2):
        with gateway(tmp_path, config) as one:
            assert counts(one) == (used, used, spent)
            used += use(one, 5)
            spent = counts(one)[2]
            assert counts(one) == (used, used, spent) and left(one) == LIMIT - used
            assert one.get("/status").json()["budgets"]["restored"]
            end(one)
    with gateway(tmp_path, config) as one:
        assert counts(one) == (used, used, spent) and left(one) == LIMIT - used


SLOW = {"tokens": 100_000, "tokens_per_second": 5}


def recorded(folder: Path) -> int:
    """Return the tokens of all rows in the ledger."""
    with closing(sqlite3.connect(folder / "usage.db")) as connection:
        statement = "SELECT sum(coalesce(prompt_tokens, 0) + coalesce(completion_tokens, 0)), count(*) FROM gateway_usage"
        return int(connection.execute(statement).fetchone()[0] or 0)


@pytest.fixture(scope="module")
def outside() -> Iterator[int]:
    """The port of a server that outlives the gateway, so that an open stream ends with the worker, and is lost."""
    with simulated("sim/one") as port:
        yield port


async def test_limits_equal_the_ledger_after_disconnects_and_open_streams_at_a_kill(tmp_path: Path, outside: int) -> None:
    model = {"id": "sim/one", "servers": [{"url": f"http://127.0.0.1:{outside}"}]}
    config = configuration(model, workers=2) | {"ledger": "sqlite:///usage.db"}
    config["keys"][0] |= {"limits": {"tokens_per_month": LIMIT}}
    stream = {"model": "sim/one", "messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_tokens": 1000, "simulate": SLOW}
    with gateway(tmp_path, config) as one:
        for events in (1, 2, 5, 9):
            async with client(one.data) as disconnecting:
                disconnecting.send(request(stream))
                await disconnecting.events(events)
        await until(lambda: one.metric('vllm_gateway_ledger_rows_total{outcome="written"}') == 4)
        assert left(one) == LIMIT - recorded(tmp_path)
        async with client(one.data) as first, client(one.data) as second:
            for open_stream in (first, second):
                open_stream.send(request(stream))
                await open_stream.events(3)
            kill_control(one)
    with gateway(tmp_path, config) as one:
        await until(lambda: one.get("/status").json()["ledger"]["waiting_rows"] == 0)
        await until(lambda: left(one) == LIMIT - recorded(tmp_path))
    with closing(sqlite3.connect(tmp_path / "usage.db")) as connection:
        lost = connection.execute("SELECT count(*), min(prompt_tokens) FROM gateway_usage WHERE incomplete = 'lost'").fetchone()
    assert lost[0] == 2 and lost[1] > 0
