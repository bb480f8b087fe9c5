"""Store and read the samples of the engines' token counters.

The rules: a sample is identified by its server, the start of its engine, its slot of time, and whether it is quiet. The latest sample with
the same identity is stored. So the table has at most two rows for each slot in which an engine has worked, for any number of gateways that
sample it. The first sample of an engine has slot 0, and stays. An engine whose counters have not changed since its last quiet sample gets
no new row.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Row, and_, func, select

from gateway.ledger.schema import COUNTERS, ENGINE_SAMPLES, utc
from gateway.ledger.statements import insert_into

SAMPLES_PER_SLOT = 40
"""The length of a slot, in intervals between two samples."""
_MOST_PENDING = 10_000  # samples in memory while the database accepts none
_KEY = ("server", "started", "slot", "quiet")


@dataclass(frozen=True, slots=True)
class EngineSample:
    """The counters of an engine at a time. ``time``: seconds since the epoch.

    ``started``: when the engine's process started, in milliseconds since the epoch, 0 if it is unknown. ``quiet``: neither the engine nor
    the gateway had a request in flight. ``prompt``, ``completion``: all tokens. ``finished_prompt``, ``finished_completion``: the tokens of
    requests that the engine has finished; a request that its client aborted is never among them. ``responses``: HTTP responses of the
    routes that use the engine, None if the server does not count them. ``is_first``: it is the first sample of the engine.
    """

    server: str
    model: str
    started: int
    time: float
    quiet: bool
    prompt: int
    completion: int
    finished_prompt: int
    finished_completion: int
    responses: int | None
    is_first: bool = False

    def falls_below(self, other: EngineSample) -> bool:
        """Return whether a counter is lower than in ``other``, so that the engine must have restarted between the two."""
        return self.prompt < other.prompt or self.completion < other.completion

    def has_counters_of(self, other: EngineSample) -> bool:
        """Return whether it is from the same engine as ``other``, and the engine has counted nothing in between."""
        return replace(other, time=self.time, quiet=self.quiet, is_first=self.is_first) == self

    def at_start(self, time: float) -> EngineSample:
        """Return the sample of this engine at its start: all counters are zero."""
        zero: dict[str, Any] = {name: 0 for name in COUNTERS if getattr(self, name) is not None}
        return replace(self, time=time, quiet=True, is_first=True, **zero)


def slot_length(interval: float) -> int:
    """Return the seconds of a slot, for an interval between two samples in seconds."""
    return max(round(interval * SAMPLES_PER_SLOT), 1)


class PendingSamples:
    """The samples that are not in the database yet. They are added by control's event loop and released by the ledger's thread."""

    def __init__(self, interval: float) -> None:
        self.slot_length = slot_length(interval)
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, int, int, bool], EngineSample] = {}
        self._stored: dict[str, EngineSample] = {}

    def add(self, samples: Iterable[EngineSample]) -> None:
        """Add samples. Later samples of the same slot replace earlier ones. If too many wait, the oldest are dropped."""
        with self._lock:
            for sample in samples:
                if self._is_news(sample):
                    key = self.key(sample)
                    self._pending.pop(key, None)
                    self._pending[key] = sample
            while len(self._pending) > _MOST_PENDING:
                del self._pending[next(iter(self._pending))]

    def _is_news(self, sample: EngineSample) -> bool:
        before = self._stored.pop(sample.server, None)
        if sample.quiet:
            self._stored[sample.server] = sample
        return before is None or not sample.quiet or sample.is_first or not sample.has_counters_of(before)

    def key(self, sample: EngineSample) -> tuple[str, int, int, bool]:
        """Return the primary key of a sample."""
        slot = 0 if sample.is_first else int(sample.time) // self.slot_length * self.slot_length
        return sample.server, sample.started, slot, sample.quiet

    def due(self, before: float) -> list[EngineSample]:
        """Return the samples up to a time, in seconds since the epoch."""
        with self._lock:
            return [sample for sample in self._pending.values() if sample.time <= before]

    def release(self, written: Sequence[EngineSample]) -> None:
        """Forget samples that are in the database."""
        with self._lock:
            for sample in written:
                key = self.key(sample)
                if self._pending.get(key) is sample:
                    del self._pending[key]

    def values(self, sample: EngineSample) -> dict[str, Any]:
        """Return the row of a sample."""
        return {
            **dict(zip(_KEY, self.key(sample), strict=True)),
            "time": datetime.fromtimestamp(sample.time, UTC),
            "model": sample.model,
            **{column: getattr(sample, name) for name, column in COUNTERS.items()},
        }


def write_samples(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of samples. For a slot, the later of two samples is stored; for the first sample of an engine, the earlier."""
    insert = insert_into(ENGINE_SAMPLES, connection.dialect.name)
    new = insert.excluded
    others = {column.name: new[column.name] for column in ENGINE_SAMPLES.columns if column.name not in _KEY}
    is_later = and_(ENGINE_SAMPLES.c.slot != 0, new["time"] > ENGINE_SAMPLES.c.time)
    connection.execute(insert.on_conflict_do_update(index_elements=list(_KEY), set_=others, where=is_later), list(rows))


def read_samples(connection: Connection, since: datetime, until: datetime, model: str | None = None) -> Iterator[EngineSample]:
    """Yield the samples after ``since`` up to ``until``.

    For each engine, also yield its last quiet sample and its last other sample up to ``since``.
    """
    table = ENGINE_SAMPLES
    engine = (table.c.server, table.c.started, table.c.quiet)
    last = select(*engine, func.max(table.c.time).label("time")).where(table.c.time <= since).group_by(*engine).subquery()
    joined = table.join(last, and_(*(table.c[name] == last.c[name] for name in ("server", "started", "quiet", "time"))))
    for statement in (select(table).select_from(joined), select(table).where(table.c.time > since, table.c.time <= until)):
        yield from map(_sample, connection.execute(statement if model is None else statement.where(table.c.model == model)))


def _sample(row: Row[Any]) -> EngineSample:
    return EngineSample(
        row.server,
        row.model,
        row.started,
        utc(row.time).timestamp(),
        row.quiet,
        **{name: getattr(row, column) for name, column in COUNTERS.items()},
        is_first=row.slot == 0,
    )
