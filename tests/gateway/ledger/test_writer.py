"""From the journals to the database, with the threads that do it: nothing is lost, nothing is doubled, whatever is unavailable."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import select

from gateway import config as conf
from gateway.ledger.engine_samples import EngineSample, PendingSamples
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.ledger.row import LOST, UsageRow, frame
from gateway.ledger.schema import ENGINE_SAMPLES, USAGE
from gateway.ledger.spool import Spool, save, spool
from gateway.ledger.store import UsageStore, database_url
from gateway.ledger.writer import Ledger, running
from gateway.telemetry.metrics import Series
from gateway.usage.queries import parse_query, run_query
from tests.gateway.ledger.rows import payload, row
from tests.support.process import wait_for

SHORTEST_PAUSE = 1.0
"""Seconds after which a database that accepted no rows is tried again, at the earliest."""


def ledger(url: str, folder: Path, *, workers: int = 1, **more: str | None) -> AbstractContextManager[Ledger]:
    return running(conf.Ledger.model_validate({"url": SecretStr(url), **more}), folder, spool(folder / "spool"), workers)


def stored(url: str, folder: Path) -> dict[str, str | None]:
    """Return the `incomplete` of each row by its ID."""
    with closing(UsageStore(database_url(url, folder))) as store:
        store.write([])
        with store.engine.connect() as connection:
            return {each.request_id: each.incomplete for each in connection.execute(select(USAGE))}


def rows_total(one: Ledger, outcome: str) -> float:
    return one.series()[Series("ledger_rows_total", (outcome,))][0]


def spooled(one: Ledger) -> float:
    return one.series()[Series("ledger_spool_rows", ())][0]


def test_rows_of_all_workers_reach_the_database(url: str, tmp_path: Path) -> None:
    with ledger(url, tmp_path, workers=2) as one:
        for number in range(100):
            one.journals[number % 2].append(payload(number))
        wait_for(lambda: one.written == 100 and spooled(one) == 0)
        wait_for(lambda: all(journal.read().rows == 0 for journal in one.journals))
    assert set(stored(url, tmp_path)) == {f"req_{number}" for number in range(100)}


def test_the_last_rows_are_written_before_the_ledger_stops(url: str, tmp_path: Path) -> None:
    with ledger(url, tmp_path) as one:
        one.journals[0].append(payload(1))
        wait_for(lambda: one.written == 1)  # making the table may take longer than the end waits
        one.journals[0].append(payload(2))
    assert set(stored(url, tmp_path)) == {"req_1", "req_2"}


def test_open_requests_of_a_dead_worker_are_recorded_as_lost(url: str, tmp_path: Path) -> None:
    with ledger(url, tmp_path) as one:
        journal = one.journals[0]
        journal.open_slot(payload(1, incomplete=LOST))
        journal.open_slot(payload(2, incomplete=LOST))
        journal.append(payload(2))  # it died between this and letting go of the slot
        one.worker_gone(0)
        wait_for(lambda: one.written >= 2)
        assert journal.open_rows() == [] and journal.open_slot(payload(3, incomplete=LOST)) is not None
    assert stored(url, tmp_path) == {"req_1": LOST, "req_2": None}


def test_rows_wait_on_disk_for_an_unavailable_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/later/usage.db"
    with ledger(url, tmp_path) as one:
        for number in range(50):
            one.journals[0].append(payload(number))
        wait_for(lambda: spooled(one) == 50 and one.unavailable is not None)
        wait_for(lambda: one.journals[0].read().rows == 0)
        assert rows_total(one, "written") == 0
        (tmp_path / "later").mkdir()
        wait_for(lambda: one.written == 50 and spooled(one) == 0)
        assert one.unavailable is None and rows_total(one, "dropped") == 0
    assert len(stored(url, tmp_path)) == 50


@pytest.mark.parametrize("retention", [None, "1h"])
def test_an_available_database_is_reported_without_new_rows(tmp_path: Path, retention: str | None) -> None:
    url = f"sqlite:///{tmp_path}/later/usage.db"
    with ledger(url, tmp_path, retention=retention) as one:
        wait_for(lambda: one.status()["unavailable"] is not None)
        (tmp_path / "later").mkdir()
        wait_for(lambda: one.status()["unavailable"] is None)
    with closing(sqlite3.connect(tmp_path / "later" / "usage.db")) as connection:
        assert connection.execute("SELECT count(*) FROM gateway_usage").fetchone() == (0,), "and its table is made"


def test_rows_wait_for_the_database_from_one_start_to_the_next(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/later/usage.db"
    with ledger(url, tmp_path) as one:
        one.journals[0].append(payload(1))
    with ledger(url, tmp_path) as one:
        assert spooled(one) == 1
        one.journals[0].append(payload(2))
        (tmp_path / "later").mkdir()
        wait_for(lambda: one.written == 2)
    assert set(stored(url, tmp_path)) == {"req_1", "req_2"}


def test_rows_that_a_worker_saved_are_found_while_the_ledger_runs(url: str, tmp_path: Path) -> None:
    with ledger(url, tmp_path) as one:
        save(one.folder, frame(payload(1)), [payload(2, incomplete=LOST), payload(1, incomplete=LOST)])
        wait_for(lambda: one.written == 3)
    assert stored(url, tmp_path) == {"req_1": None, "req_2": LOST}


def test_rows_go_to_the_database_if_the_disk_fails(url: str, tmp_path: Path) -> None:
    with ledger(url, tmp_path) as one:
        one.folder.rename(tmp_path / "elsewhere")
        one.journals[0].append(payload(1))
        wait_for(lambda: one.written == 1)
        (tmp_path / "elsewhere").rename(one.folder)
        one.journals[0].append(payload(2))
        wait_for(lambda: one.written == 2)
    assert set(stored(url, tmp_path)) == {"req_1", "req_2"}


def test_an_unreadable_spool_file_delays_no_other(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/later/usage.db"
    with ledger(url, tmp_path) as one:
        one.journals[0].append(payload(1))
        wait_for(lambda: spooled(one) == 1 and one.unavailable is not None)
        (file,) = one.folder.glob("*.rows")
        file.unlink()
        one.journals[0].append(payload(2))
        wait_for(lambda: one.journals[0].read().rows == 0)
        (tmp_path / "later").mkdir()
        wait_for(lambda: one.written == 1 and spooled(one) == 0)
        assert rows_total(one, "dropped") == 1 and one.unavailable is None
    assert set(stored(url, tmp_path)) == {"req_2"}


def test_without_disk_and_database_rows_wait_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"sqlite:///{tmp_path}/later/usage.db"
    with ledger(url, tmp_path) as one:
        one.folder.rename(tmp_path / "elsewhere")
        one.journals[0].append(payload(1))
        one.journals[0].open_slot(payload(2, incomplete=LOST))
        one.worker_gone(0)
        wait_for(lambda: "usage waits in memory" in caplog.text)
        assert one.journals[0].read().rows == 1
        (tmp_path / "later").mkdir()
        wait_for(lambda: one.written >= 2)
        (tmp_path / "elsewhere").rename(one.folder)
    assert stored(url, tmp_path) == {"req_1": None, "req_2": LOST}


def test_an_invalid_row_is_counted_and_skipped(url: str, tmp_path: Path) -> None:
    with ledger(url, tmp_path) as one:
        one.journals[0].append(b"\xc1 no MessagePack")
        one.journals[0].append(payload(1))
        wait_for(lambda: one.written == 1)
        assert rows_total(one, "dropped") == 1


def test_rows_are_deleted_after_the_retention_time(url: str, tmp_path: Path) -> None:
    now = datetime.now(UTC).timestamp()
    with closing(UsageStore(database_url(url, tmp_path))) as store:
        store.write([row(number, started=now - (86400 if number < 600 else 60)) for number in range(605)])
    with ledger(url, tmp_path, retention="1h"):
        wait_for(lambda: len(stored(url, tmp_path)) == 5)
    query = parse_query({"by": "key", "since": "3d"}, datetime.now(UTC))
    with closing(UsageStore(database_url(url, tmp_path))) as store:
        assert run_query(store.engine, query).requests == 605, "their totals stay"


def test_a_retention_of_thousands_of_years_deletes_nothing(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ledger(url, tmp_path, retention="999999d") as one:
        wait_for(lambda: one._prune_at > 0 or caplog.records)
        one.journals[0].append(payload(1))
        wait_for(lambda: one.written == 1)
    assert len(stored(url, tmp_path)) == 1
    assert [record.message for record in caplog.records if record.name == "vllm_gateway.ledger"] == []


class UnavailableStore(UsageStore):
    """A store whose database accepts no rows. It counts the attempts."""

    tries = 0

    def write(self, rows: Sequence[UsageRow]) -> int:
        self.tries += 1
        raise DatabaseUnavailableError("refused")


def test_an_unavailable_database_is_retried_with_pauses_during_the_stop(tmp_path: Path) -> None:
    with spool(tmp_path / "spool") as waiting, closing(UnavailableStore(database_url("sqlite:///usage.db", tmp_path))) as store:
        waiting.append(frame(payload(1)), 1)
        one = Ledger([], waiting, store, None, PendingSamples(15.0))
        delivering = threading.Thread(target=one.deliver)
        delivering.start()
        wait_for(lambda: store.tries >= 2)
        one.stop()
        before, since = store.tries, time.monotonic()
        time.sleep(0.3)
        tries = store.tries - before
        assert tries <= 1 + (time.monotonic() - since) / SHORTEST_PAUSE
        one.collect()
        delivering.join(30)
        assert not delivering.is_alive() and waiting.rows == 1, "and then once more, and no longer"


class GatheringStore(UsageStore):
    """A store that gathers rows for an hour, and keeps the sizes of its transactions."""

    def __init__(self, folder: Path) -> None:
        super().__init__(database_url("sqlite:///usage.db", folder))
        self.gather = 3600.0
        self.sizes: list[int] = []

    def write(self, rows: Sequence[UsageRow]) -> int:
        unfit = super().write(rows)
        self.sizes += [len(rows)] * bool(rows)
        return unfit

    def samples(self) -> list[str]:
        with self.engine.connect() as connection:
            return [each.server for each in connection.execute(select(ENGINE_SAMPLES))]


@contextmanager
def delivering(folder: Path) -> Iterator[tuple[Ledger, Spool, GatheringStore]]:
    """Run the second thread of a ledger. Its spool's files are full with about 1,000 rows."""
    (folder / "spool").mkdir()
    spooled = Spool(folder / "spool", segment=100_000)
    with closing(GatheringStore(folder)) as store:
        one = Ledger([], spooled, store, None, PendingSamples(15.0))
        thread = threading.Thread(target=one.deliver)
        thread.start()
        try:
            yield one, spooled, store
        finally:
            one.stop()
            one.collect()
            thread.join(30)


def append(spooled: Spool, first: int, count: int) -> None:
    spooled.append(b"".join(frame(payload(number)) for number in range(first, first + count)), count)


def test_many_rows_are_gathered_until_a_file_is_full_or_the_ledger_stops(tmp_path: Path) -> None:
    with delivering(tmp_path) as (one, spooled, store):
        append(spooled, 0, 600)
        wait_for(lambda: one.written == 600)
        append(spooled, 600, 1)
        append(spooled, 601, 1399)
        wait_for(lambda: one.written == 2000)
        append(spooled, 2000, 1)
        append(spooled, 2001, 1)
    assert store.sizes == [600, 1400, 2] and spooled.rows == 0


def test_engine_samples_are_written_while_rows_are_gathered_but_not_before_earlier_rows(tmp_path: Path) -> None:
    def sample(server: str, at: float) -> EngineSample:
        return EngineSample(server, "tiny", 1, at, False, 1, 1, 1, 1, 1)

    with delivering(tmp_path) as (one, spooled, store):
        append(spooled, 0, 600)
        wait_for(lambda: one.written == 600)
        append(spooled, 600, 1)
        one.samples.add([sample("later", time.time()), sample("earlier", time.time() - 60.0)])
        wait_for(lambda: store.samples() == ["earlier"])
        assert store.sizes == [600], "the other row may be of a request before the later sample"
    assert sorted(store.samples()) == ["earlier", "later"] and store.sizes == [600, 1]
