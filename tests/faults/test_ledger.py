"""The ledger survives crashes of its database, of a worker and of control. Every finished request has one row with its exact tokens."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from sqlalchemy import select

from gateway.ledger.row import LOST
from gateway.ledger.schema import USAGE
from gateway.ledger.store import UsageStore, database_url
from tests.faults.conftest import FULL
from tests.faults.invariants import ended, soon_idle, whole
from tests.support import postgres
from tests.support.process import Gateway, alive, configuration, gateway, launched, wait_for
from tests.support.running import until
from tests.support.wire import chat, client, request

MODEL = "sim/one"
OUTAGE = 30.0 if FULL else 5.0  # seconds
CLIENTS = 8 if FULL else 4
STREAMS = 20 if FULL else 5
TOKENS = 7
GATHERED = 2_000
"""The most lines of the access log that a worker buffers in a tick. They are lost if it is killed; their rows in the ledger are not."""


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Postgres]:
    if not postgres.installed():
        pytest.skip(postgres.NOT_INSTALLED)
    with postgres.postgres() as running:
        yield running


def settings(url: str, **server: Any) -> dict[str, Any]:
    model = soon_idle(launched(MODEL, **{"sim-tokens": TOKENS, "sim-tokens-per-second": 0}))
    return configuration(model, **server) | {"ledger": url}


def stored_rows(url: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Read every row, by request ID. The database enforces that IDs are unique."""
    with closing(UsageStore(database_url(url, folder))) as store, store.engine.connect() as connection:
        return {each["request_id"]: dict(each) for each in connection.execute(select(USAGE)).mappings()}


def spooled(one: Gateway) -> float:
    return one.metric("vllm_gateway_ledger_spool_rows")


def rows(one: Gateway, outcome: str) -> float:
    return one.metric(f'vllm_gateway_ledger_rows_total{{outcome="{outcome}"}}')


async def warm(one: Gateway) -> str:
    """Send one request and wait until it is in the ledger. Control has then opened its database. Return the request ID."""
    response = await asyncio.to_thread(one.request)
    await until(lambda: rows(one, "written") == 1, 60)
    return response.headers["x-request-id"]


@dataclass
class Load:
    """Clients that send one request after the other. ``answered`` has the completion tokens of each complete response by request ID."""

    port: int
    completed: dict[str, int] = field(default_factory=dict)
    refused: list[int] = field(default_factory=list)
    broken: int = 0
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    async def send_continuously(self) -> None:
        while not self.finished.is_set():
            try:
                async with client(self.port) as one:
                    await self._send(one)
            except (OSError, EOFError):
                self.broken += 1
                await asyncio.sleep(0.05)

    async def _send(self, one: Any) -> None:
        while not self.finished.is_set():
            reply = await one.request(request(chat(model=MODEL)))
            if not reply.whole:
                raise EOFError
            if reply.status == 200:
                self.completed[reply.headers["x-request-id"]] = orjson.loads(reply.body)["usage"]["completion_tokens"]
            else:
                self.refused.append(reply.status)


@asynccontextmanager
async def load(port: int) -> AsyncIterator[Load]:
    made = Load(port)
    tasks = [asyncio.create_task(made.send_continuously()) for _ in range(CLIENTS)]
    try:
        await until(lambda: len(made.completed) > 50, 60)
        yield made
    finally:
        made.finished.set()
        await asyncio.gather(*tasks)


@asynccontextmanager
async def long_streams(port: int, count: int) -> AsyncIterator[list[str]]:
    """Open ``count`` streams and yield their request IDs while they run."""
    simulate = {"tokens": 100_000, "tokens_per_second": 5}
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        opening = group.create_task(_hold(port, request(chat(model=MODEL, stream=True, simulate=simulate)), count, group))
        ids, tasks = await opening
        yield ids
        for task in tasks:
            task.cancel()


async def _hold(port: int, data: bytes, count: int, group: asyncio.TaskGroup) -> tuple[list[str], list[asyncio.Task[None]]]:
    ids: list[str] = []

    async def hold() -> None:
        async with client(port) as one:
            one.send(data)
            head = (await one.reader.readuntil(b"\r\n\r\n")).decode()
            ids.append(next(line.split(": ")[1] for line in head.split("\r\n") if line.startswith("x-request-id")))
            try:
                while await one.reader.read(65536):
                    pass
            except ConnectionError:
                pass
            await asyncio.Event().wait()

    tasks = [group.create_task(hold()) for _ in range(count)]
    await until(lambda: len(ids) == count, 60)
    return ids, tasks


def check(found: dict[str, dict[str, Any]], seen: Load) -> None:
    """Check that every complete response has a row with the tokens that its client received."""
    assert {identity: found[identity]["completion_tokens"] for identity in seen.completed} == seen.completed
    assert all(found[identity]["incomplete"] is None for identity in seen.completed)


def _stopped(server: postgres.Postgres) -> Callable[[], None]:
    server.stop()
    return server.start


def _frozen(server: postgres.Postgres) -> Callable[[], None]:
    """Freeze the database: its connections stay open, and nothing on them gets a response."""
    assert server.process is not None
    whole = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children()]
    for each in whole:
        each.suspend()

    def thaw() -> None:
        for each in whole:
            each.resume()

    return thaw


@pytest.mark.row(28)
@pytest.mark.parametrize("harm", [_stopped, _frozen])
async def test_an_unavailable_database_costs_no_request_and_no_row(
    server: postgres.Postgres, tmp_path: Path, harm: Callable[[postgres.Postgres], Callable[[], None]], measured: Callable[[str], None]
) -> None:
    url = server.database()
    with gateway(tmp_path, settings(url, workers=2)) as one:
        first = await warm(one)
        async with whole(one), load(one.data) as seen:
            await until(lambda: rows(one, "written") > 1, 60)
            heal = await asyncio.to_thread(harm, server)
            try:
                before = len(seen.completed)
                await asyncio.sleep(OUTAGE)
                assert len(seen.completed) > before
                await until(lambda: spooled(one) > 0, 60)
            finally:
                heal()  # on this thread: the server exits with the thread that started it
            most = spooled(one)
        assert (seen.refused, seen.broken) == ([], 0)
        await asyncio.to_thread(wait_for, lambda: rows(one, "written") == len(seen.completed) + 1 and spooled(one) == 0, 120)
        assert (rows(one, "lost"), rows(one, "dropped")) == (0, 0)
        found = stored_rows(url, tmp_path)
    assert set(found) == {first, *seen.completed}
    check(found, seen)
    waited = f"{most:g} rows waited, 0 were lost or doubled"
    measured(f"database {harm.__name__[1:]} for {OUTAGE:g} s under load: {len(found)} requests, 0 failed; {waited}")


@pytest.mark.row(28)
def test_requests_are_served_if_the_database_is_unavailable_at_the_start(server: postgres.Postgres, tmp_path: Path) -> None:
    url = server.database()
    server.stop()
    try:
        with gateway(tmp_path, settings(url)) as one:
            request_ids = {one.request().headers["x-request-id"] for _ in range(5)}
            wait_for(lambda: spooled(one) == 5)
            wait_for(lambda: "the ledger's database accepts no rows" in one.output)
            wait_for(lambda: one.get("/status").json()["ledger"]["unavailable"])
            state = one.get("/status").json()["ledger"]
            assert (state["waiting_rows"], state["dropped_rows"]) == (5, 0)
            usage = one.get("/usage")
            assert (usage.status_code, "does not respond" in usage.json()["error"]) == (503, True)
            assert one.stop() == 0
        server.start()
        with gateway(tmp_path, settings(url)) as one:
            request_ids.add(one.request().headers["x-request-id"])
            wait_for(lambda: rows(one, "written") == 6)
    finally:
        if server.process is None:
            server.start()
    assert set(stored_rows(url, tmp_path)) == request_ids


@pytest.mark.row(24)
async def test_a_killed_worker_loses_no_row_and_its_requests_in_flight_are_recorded_as_lost(
    tmp_path: Path, measured: Callable[[str], None]
) -> None:
    url = "sqlite:///usage.db"
    with gateway(tmp_path, settings(url)) as one:
        await warm(one)
        async with whole(one, lost=GATHERED), long_streams(one.data, STREAMS) as streams, load(one.data) as seen:
            before = len(seen.completed)
            os.kill(one.workers()[0], signal.SIGKILL)
            await until(lambda: len(seen.completed) > before + 50, 60)
        wait_for(lambda: rows(one, "lost") >= STREAMS)
        assert one.stop() == 0
    found = stored_rows(url, tmp_path)
    check(found, seen)
    lost = {identity for identity, row in found.items() if row["incomplete"] == LOST}
    assert lost >= set(streams) and all((found[each]["key"], found[each]["model"]) == ("team-a", MODEL) for each in lost)
    responses = 1 + len(seen.completed) + len(seen.refused)  # a worker that has just started may not have a server yet
    assert len(lost) - STREAMS <= CLIENTS and 0 <= len(found) - responses - STREAMS <= CLIENTS
    measured(
        f"kill -9 of a worker: {len(seen.completed)} of {len(seen.completed)} finished requests in the ledger, {len(lost)} recorded as lost"
    )


@pytest.mark.row(24)
async def test_a_killed_worker_leaves_what_its_streams_have_sent(tmp_path: Path, measured: Callable[[str], None]) -> None:
    """The journal has the exact prompt, and a completion that is as old as the last update of its slot."""
    url, events = "sqlite:///usage.db", 12
    body = chat(model=MODEL, stream=True, simulate={"tokens": 100_000, "tokens_per_second": 5})
    with gateway(tmp_path, settings(url)) as one:
        await warm(one)
        complete = one.request(model=MODEL, messages=body["messages"], max_tokens=1).json()["usage"]
        async with client(one.data) as streaming:
            streaming.send(request(body))
            head = (await streaming.reader.readuntil(b"\r\n\r\n")).decode()
            for _ in range(events):
                await streaming.reader.readuntil(b"\n\n")
            os.kill(one.workers()[0], signal.SIGKILL)
            rest = await streaming.reader.read()
        wait_for(lambda: rows(one, "lost") == 1)
        assert one.stop() == 0
    identity = next(line.split(": ")[1] for line in head.split("\r\n") if line.startswith("x-request-id"))
    row = stored_rows(url, tmp_path)[identity]
    received = events - 1 + rest.count(b"\n\n")  # without the role
    assert (row["prompt_tokens"], row["incomplete"], row["estimated_by"]) == (complete["prompt_tokens"], LOST, "journal")
    assert 0 < row["completion_tokens"] <= received
    measured(f"kill -9 of a worker: an open stream is charged for its prompt and {row['completion_tokens']} of {received} received tokens")


@pytest.mark.row(24)
async def test_killed_control_loses_no_row(tmp_path: Path, measured: Callable[[str], None]) -> None:
    url = "sqlite:///usage.db"
    with gateway(tmp_path, settings(url, workers=2)) as one, ended(one):
        workers = [psutil.Process(pid) for pid in one.workers().values()]
        async with long_streams(one.data, STREAMS) as streams, load(one.data) as seen:
            one.process.kill()
            await asyncio.to_thread(one.process.wait)
            await until(lambda: not alive(workers), 60)
    with gateway(tmp_path, settings(url)) as again:
        await asyncio.to_thread(
            wait_for, lambda: spooled(again) == 0 and len(stored_rows(url, tmp_path)) >= len(seen.completed) + STREAMS, 60
        )
    found = stored_rows(url, tmp_path)
    check(found, seen)
    lost = {identity for identity, row in found.items() if row["incomplete"] == LOST}
    # The server ends too. A worker that sees this first records what the server's end did to the stream.
    assert {found[identity]["incomplete"] for identity in streams} <= {LOST, "upstream"} and len(lost) - STREAMS <= CLIENTS
    measured(
        f"kill -9 of control: {len(seen.completed)} of {len(seen.completed)} finished requests in the ledger, {len(lost)} recorded as lost"
    )
