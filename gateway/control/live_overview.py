"""The state of the gateway and its last hour, for the first page of the console: computed and encoded once for all its readers.

The rules: a tick makes one sample, one event and no query. A reader that is slow gets the latest event when it is ready, so nothing waits
for it, and nothing is stored for it. The cost of today, which needs the ledger's database, is queried only while the page is open.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from gateway import __version__
from gateway.audit.listing import actor_text
from gateway.control import starvation
from gateway.control.alert_rules import Alert, Alerts, Facts
from gateway.control.control import Control
from gateway.control.recent_history import COLUMNS, FAMILIES_READ, HOUR, STEP, Counts, Point, RecentHistory, sampled
from gateway.control.report import GatewayReport
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.system.compiled_core import core
from gateway.telemetry.metrics import Series, sum_series

if TYPE_CHECKING:
    from gateway.audit.log import AuditLog
    from gateway.usage.reader import UsageReader

_JUDGED_EVERY = 3  # ticks; a pass over budgets and processes costs as much as a scrape by Prometheus
_COST_EVERY = 60.0  # seconds between two queries
_SHARE = 20  # a query is followed by a pause of at least so many times its length
_log = logging.getLogger("vllm_gateway.control")
_DAY = timedelta(days=1)
_CLOSE_STEPS = 100  # of 10 ms
MOST_LISTENERS = 200
"""Readers of the events. The other connections of the admin port are left for probes, Prometheus and commands."""
_COUNTED = {
    "server_restarts_total": ("server_restarts", 1),
    "worker_restarts_total": ("worker_restarts", None),
    "ledger_rows_total": ("ledger_dropped", None),
    "unbilled_tokens_total": ("direct_use", 0),
}
"""Control's own counters that alerts need, by family: their name in the history, and which label they are by."""
_PROCESS = ("worker_resident_memory_bytes", "worker_open_fds")
_ONLY = {"ledger_rows_total": ("dropped",), "unbilled_tokens_total": ("direct_use",)}


@dataclass(eq=False)
class LiveOverview:
    """Samples the gateway. ``reader`` and ``audit`` are None if no ledger or audit log is configured. ``clocks``: monotonic and wall."""

    _control: Control
    _report: GatewayReport
    _reader: UsageReader | None
    _audit: AuditLog | None
    _clocks: tuple[Callable[[], float], Callable[[], float]] = (time.monotonic, time.time)

    def __post_init__(self) -> None:
        self._history = RecentHistory()
        self._alerts = Alerts()
        self._starvation = starvation.Starvation()
        self._judged: list[Alert] = []
        self._values: Mapping[Series, float] = {}
        self._cost: dict[str, Any] | None = {"unknown": "no ledger is configured"} if self._reader is None else None
        self._is_read = asyncio.Event()
        self._ticks = count()
        self._state: dict[str, Any] = {}
        self._event = b""
        self._document: bytes | None = None
        self._changed = asyncio.Event()
        self._is_closed = False
        self.listeners = 0

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            try:
                self.tick()
            except Exception:  # noqa: BLE001  the outer edge: requests are served without this page, and the next tick may succeed
                _log.exception("the overview could not be updated")
            await asyncio.sleep(STEP)

    async def close(self) -> None:
        """End the events of all readers, so that no response is cut off when the admin port closes. A reader that is slow is left."""
        self._is_closed = True
        self._changed.set()
        for _ in range(_CLOSE_STEPS):
            if not self.listeners:
                return
            await asyncio.sleep(0.01)

    async def follow_cost(self) -> None:
        """Query the cost of today while someone reads the page, until cancelled."""
        while self._reader is not None:
            await self._is_read.wait()
            started = time.monotonic()
            try:
                found = await self._reader.report({"since": "today", "by": "model"})
                costs = [each["cost"] for each in msgspec.json.decode(msgspec.json.encode(found))["usage"]]
                known = [each for each in costs if each is not None]
                self._cost = {"today": round(sum(known), 6)} if known else {"unknown": "no request of today has a price"}
            except DatabaseUnavailableError as error:
                self._cost = {"unknown": f"the ledger's database does not respond: {error}"}
            self._is_read.clear()
            await asyncio.sleep(max(_COST_EVERY, _SHARE * (time.monotonic() - started)))

    def tick(self) -> None:
        """Sample the gateway, judge its alerts, and make the event for all readers."""
        control, at, wall = self._control, *(clock() for clock in self._clocks)
        is_due = next(self._ticks) % _JUDGED_EVERY == 0
        if is_due:
            self._values = self._report.own_series()
        series = sum_series(control.workers.boards, FAMILIES_READ)
        point = self._history.add(sampled(at, series, control.monitor.rates.latest, _own_counts(self._values)), wall)
        if is_due:
            unserved = self._starvation.update(at, sum_series(control.workers.boards, starvation.FAMILIES_READ))
            self._judged = self._alerts.evaluated(Facts(wall, self._values, self._history.counts, unserved))
        self._publish(wall, point)

    def _publish(self, wall: float, point: Point | None) -> None:
        self._state = {**self._shown(wall), "point": point}
        self._event = b"data: " + msgspec.json.encode(self._state) + b"\n\n"
        self._document = None
        if self.listeners:
            self._is_read.set()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _shown(self, wall: float) -> dict[str, Any]:
        control = self._control
        reason, degraded = self._report.not_ready(), self._report.degraded()
        status = "not_ready" if reason is not None else "degraded" if degraded else "ready"
        ready = control.observer.ready_servers()
        models = [model.id for model in control.config.served_models]
        workers = control.workers.statuses
        return {
            "time": wall,
            "started": control.started,
            "build": {"version": __version__, "core": core(), "python": platform.python_version()},
            "status": status,
            "reasons": degraded if reason is None else [reason],
            "models": {"ready": sum(bool(ready[model]) for model in models), "all": len(models)},
            "servers": {"ready": control.observer.up(), "all": control.observer.in_rotation()},
            "workers": {"ready": sum(worker.up for worker in workers), "all": len(workers)},
            "processes": self._processes(),
            "reload": {"when": control.history.last.when, "successful": control.history.last.successful},
            "outcomes": self._outcomes(wall),
            "alerts": [asdict(each) for each in self._judged],
            "cost": self._cost,
            "recorded": None if self._audit is None else self._audit.recorded,
        }

    def _outcomes(self, wall: float) -> dict[str, float]:
        """Return the errors and rejected requests of the last hour, and since when they are counted."""
        counts = self._history.counts
        errors, rejected = (int(sum(counts.increase(name, HOUR).values())) for name in ("failures", "rejected"))
        return {"since": wall - counts.covered(HOUR), "errors": errors, "rejected": rejected}

    def _processes(self) -> dict[str, dict[str, float]]:
        """Return the resources of each worker's process, by its number."""
        found: dict[str, dict[str, float]] = {}
        for each, value in self._values.items():
            if each.family in _PROCESS:
                found.setdefault(each.labels[0], {})[each.family.removeprefix("worker_")] = value
        return found

    # For the routes

    def document(self) -> bytes:
        """Return the JSON of the state with the last hour."""
        self._is_read.set()
        if self._document is None:
            history = {"step": STEP, "columns": ("time", *COLUMNS), "points": tuple(self._history.points)}
            self._document = msgspec.json.encode({**self._state, "history": history})
        return self._document

    async def changes(self) -> dict[str, Any]:
        """Return the changes of the last day, the newest first, or why they are unknown."""
        if (audit := self._audit) is None:
            return {"unknown": "no audit log is configured; add `audit` to the configuration"}
        since = datetime.now(UTC) - _DAY
        try:
            lines = await asyncio.to_thread(audit.recent, since)
        except DatabaseUnavailableError as error:
            return {"unknown": f"the audit log's database does not respond: {error}"}
        return {
            "changes": [
                {"time": line.time.timestamp(), "action": line.action, "target": line.target, "by": actor_text(line), "seq": line.seq}
                for line in lines
            ]
        }

    @property
    def is_full(self) -> bool:
        """Whether no more readers of the events are admitted."""
        return self.listeners >= MOST_LISTENERS

    async def events(self, is_permitted: Callable[[], bool]) -> AsyncGenerator[bytes]:
        """Yield the state now and after each tick, as long as the reader is permitted to read it."""
        self.listeners += 1
        try:
            while not self._is_closed and is_permitted():
                yield self._event
                await self._changed.wait()
        finally:
            self.listeners -= 1


def _own_counts(values: Mapping[Series, float]) -> Counts:
    """Return control's counters for the history."""
    counts: dict[tuple[str, str], float] = {}
    for each, value in values.items():
        if each.family in _COUNTED and (each.family not in _ONLY or each.labels[-1:] == _ONLY[each.family]):
            name, label = _COUNTED[each.family]
            counts[name, "" if label is None else each.labels[label]] = value
    return counts
