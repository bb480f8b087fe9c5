"""Samples in both databases: the latest of each slot stays, and nothing is stored of an idle engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.ledger.engine_samples import EngineSample, PendingSamples, read_samples, slot_length
from gateway.ledger.store import UsageStore, database_url
from tests.gateway.ledger.rows import STARTED

NOON = float(STARTED // 600 * 600)
FIRST = EngineSample("tiny#0", "tiny", 1_000, NOON, True, 1, 2, 3, 4, 5)


@pytest.fixture
def store(url: str, tmp_path: Path) -> Iterator[UsageStore]:
    with closing(UsageStore(database_url(url, tmp_path))) as made:
        yield made


def grown(sample: EngineSample, seconds: float, *, quiet: bool = True) -> EngineSample:
    return replace(sample, time=sample.time + seconds, quiet=quiet, prompt=sample.prompt + 1)


def write(store: UsageStore, samples: Sequence[EngineSample]) -> None:
    pending = PendingSamples(15.0)
    for sample in samples:
        pending.add([sample])
    rows = pending.due(NOON * 2)
    store.write_samples([pending.values(row) for row in rows])
    pending.release(rows)
    assert not pending.due(NOON * 2)


def stored(store: UsageStore, since: float, until: float, model: str | None = None) -> list[EngineSample]:
    with store.engine.connect() as connection:
        found = read_samples(connection, datetime.fromtimestamp(since, UTC), datetime.fromtimestamp(until, UTC), model)
        return sorted(found, key=lambda sample: sample.time)


def test_the_latest_sample_of_a_slot_of_all_gateways_stays(store: UsageStore) -> None:
    busy, later = grown(FIRST, 30, quiet=False), grown(FIRST, 60)
    next_slot = grown(later, 700)
    write(store, [FIRST, busy, later, next_slot])
    write(store, [grown(FIRST, 45)])  # another gateway, whose sample is older
    assert stored(store, NOON - 1, NOON + 1000) == [busy, later, next_slot]


def test_the_first_sample_of_an_engine_stays(store: UsageStore) -> None:
    first = replace(FIRST, is_first=True)
    write(store, [first, FIRST, grown(FIRST, 30)])
    write(store, [replace(first, time=NOON + 20, prompt=2)])  # another gateway, which begins later
    assert stored(store, NOON - 1, NOON + 1000) == [first, grown(FIRST, 30)]


def test_the_last_samples_before_the_time_are_read_too(store: UsageStore) -> None:
    samples = [replace(FIRST, responses=None), grown(FIRST, 700), grown(FIRST, 1400, quiet=False), grown(FIRST, 2100), grown(FIRST, 2800)]
    write(store, [*samples, replace(FIRST, server="other", model="big", time=NOON + 2100)])
    assert stored(store, NOON + 1500, NOON + 2200, "tiny") == samples[1:4]
    assert [sample.server for sample in stored(store, NOON + 1500, NOON + 2200, "big")] == ["other"]


def test_old_samples_are_deleted(store: UsageStore) -> None:
    write(store, [FIRST, grown(FIRST, 700)])
    assert not store.prune(datetime.fromtimestamp(NOON + 600, UTC))
    assert stored(store, NOON + 2000, NOON + 3000) == [grown(FIRST, 700)]


def test_an_idle_engine_adds_nothing() -> None:
    pending = PendingSamples(15.0)
    pending.add([FIRST])
    pending.release(pending.due(NOON))
    pending.add([replace(FIRST, time=NOON + 5000)])
    assert not pending.due(NOON * 2)
    busy = replace(FIRST, time=NOON + 5010, quiet=False)
    pending.add([busy, replace(FIRST, time=NOON + 5020)])
    assert pending.due(NOON * 2) == [busy, replace(FIRST, time=NOON + 5020)]


def test_samples_of_an_outage_are_bounded_and_a_replaced_one_is_not_forgotten() -> None:
    pending = PendingSamples(15.0)
    pending.add([FIRST])
    written = pending.due(NOON)
    pending.add([grown(FIRST, 1)])
    pending.release(written)
    assert pending.due(NOON * 2) == [grown(FIRST, 1)]
    pending.add(replace(FIRST, server=f"tiny#{number}") for number in range(1, 12_000))
    assert len(pending.due(NOON * 2)) == 10_000


def test_a_slot_is_at_least_a_second() -> None:
    assert (slot_length(15.0), slot_length(0.001)) == (600, 1)
