"""Play the phases of an accounting run: requests, faults, and the comparison of the rows of each phase.

The rules: a phase ends when no request is in flight and all rows are in the database. Its rows are then compared, and only the verdicts are
stored, so a run may have any number of requests. Every wait has a bound.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from random import Random
from typing import Any

from sqlalchemy import select

from gateway.ledger.schema import ENGINE_SAMPLES, USAGE
from gateway.ledger.store import UsageStore, database_url
from tests.accounting.client import Received, send_request
from tests.accounting.comparison import LOST, Verdict, compare, journal_age
from tests.accounting.engines import LaunchedEngine
from tests.accounting.evidence import Exchange, References, references
from tests.accounting.workload import MOST_TEXTS, PlannedRequest, draw, reference_requests
from tests.support.process import Gateway, wait_for
from tests.vllm.dialogues import Json

SETTLES_WITHIN = 120.0
"""Seconds from the last response of a phase until all rows are in the database."""
RESTARTS_WITHIN = 300.0
"""Seconds from the kill of an engine until it is up again."""

_MOST_AT_ONCE = 2_000  # requests whose responses are in memory

Fault = Callable[[], object]
Adapt = Callable[[Random, PlannedRequest], PlannedRequest]


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run: ``share`` of its requests, the probability of a disconnect, and a fault in its middle.

    ``fault`` is called before the first request and returns what causes the fault, when half of the requests were sent. ``repair``: what
    ends the fault, after the last request. ``waits``: whether the phase starts only when all engines are up.
    """

    name: str
    share: float
    disconnecting: float = 0.0
    fault: Callable[[], Fault] | None = None
    repair: Fault | None = None
    waits: bool = False


@dataclass
class AccountingRun:
    """A run against one gateway. ``ledger`` is the URL of its database; ``adapt`` changes each drawn request.

    ``texts``: the number of texts of each kind. ``merged``: an engine may send several tokens with an event. ``verdicts`` are those of the
    finished phases, without the bodies. ``ages``: of the rows of lost streams, in seconds.
    """

    gateway: Gateway
    engines: Sequence[LaunchedEngine]
    ledger: str
    clients: int
    rng: Random
    adapt: Adapt = field(default=lambda _, planned: planned)
    verdicts: list[Verdict] = field(default_factory=list)
    ages: list[float] = field(default_factory=list)
    merged: bool = True
    texts: int = MOST_TEXTS
    known: References = field(default_factory=lambda: References({}, {}))

    def play_references(self) -> None:
        """Play the requests that show the tokens of prompts and texts. Their responses are complete."""
        played, since = self._play("reference", iter(reference_requests(self.texts)), None), time.time()
        self.known = references([(planned, received.body) for planned, received in played if received.status == 200], merged=self.merged)
        self._settle()
        self._compare("reference", played, since - SETTLES_WITHIN)

    def play(self, phase: Phase, requests: int) -> None:
        """Play a phase of this number of requests, and compare its rows. A long phase is played in parts; the first one has the fault."""
        if phase.waits:
            self.wait_until_up()
        self._play_part(phase, min(requests, _MOST_AT_ONCE))
        while (requests := requests - _MOST_AT_ONCE) > 0:
            part = Phase(f"{phase.name}, {requests} left", phase.share, phase.disconnecting)
            self._play_part(part, min(requests, _MOST_AT_ONCE))

    def _play_part(self, phase: Phase, requests: int) -> None:
        since = time.time()
        print(f"{datetime.now(UTC):%H:%M:%S} {phase.name}: {requests} requests, after {len(self.verdicts)}", flush=True)
        planned = (self.adapt(self.rng, draw(self.rng, number, phase.disconnecting, self.texts)) for number in range(requests))
        fault = phase.fault() if phase.fault is not None else None
        played = self._play(phase.name, planned, None if fault is None else (requests // 2, fault))
        if phase.repair is not None:
            phase.repair()
        self._settle()
        self._compare(phase.name, played, since)

    def wait_until_up(self) -> None:
        wait_for(lambda: all(engine.is_up for engine in self.engines), RESTARTS_WITHIN, why=lambda: self.gateway.output[-4000:])

    def _play(self, name: str, planned: Iterator[PlannedRequest], fault: tuple[int, Fault] | None) -> list[tuple[PlannedRequest, Received]]:
        async def all_clients() -> list[tuple[PlannedRequest, Received]]:
            played: list[tuple[PlannedRequest, Received]] = []

            async def client() -> None:
                for each in planned:
                    model = self.engines[each.number % len(self.engines)].model
                    if fault is not None and each.number == fault[0]:
                        fault[1]()  # the other clients are in mid-response
                    played.append((each, await send_request(self.gateway.data, each, model, f"{name}/{each.number}")))

            async with asyncio.TaskGroup() as group:
                for _ in range(self.clients):
                    group.create_task(client())
            return played

        return asyncio.run(all_clients())

    def _settle(self) -> None:
        """Wait until nothing is in flight and all rows are in the database."""

        def waiting() -> dict[str, float]:
            metrics = self.gateway.get("/metrics").text.splitlines()
            names = ("vllm_gateway_inflight_requests", "vllm_gateway_ledger_spool_rows", "vllm_gateway_ledger_memory_rows")
            found = (line.rpartition(" ") for line in metrics if line.startswith(names))
            return {name: float(value) for name, _, value in found if float(value)}

        def is_settled() -> bool:
            workers = self.gateway.get("/status").json()["workers"]
            return all(worker["up"] for worker in workers) and not waiting() and self._engines_are_idle()

        wait_for(is_settled, SETTLES_WITHIN, why=lambda: str(waiting()))

    def _engines_are_idle(self) -> bool:
        return all(not engine.is_up or engine.is_idle() for engine in self.engines)

    def _compare(self, name: str, played: Sequence[tuple[PlannedRequest, Received]], since: float) -> None:
        sent = {engine.name: engine.recorded(since) for engine in self.engines}
        rows = {row["end_user"]: row for row in self._query(select(USAGE).where(USAGE.c.end_user.startswith(f"{name}/")))}
        for planned, received in played:
            row = rows.get(received.user)
            server_body = _server_body(row, sent)
            exchange = Exchange(planned, received.status, received.body, received.whole, received.broken, server_body)
            verdict = compare(exchange, row, self.known)
            if verdict.end == LOST and verdict.estimated_by is not None and not verdict.problem:
                self.ages.append(journal_age(verdict, received.bodies(), self.known))
            shown = planned if verdict.problem else replace(planned, body={"stream": planned.streamed})
            self.verdicts.append(replace(verdict, exchange=replace(exchange, planned=shown, body=b"", server_body=None)))

    def _query(self, statement: Any) -> list[dict[str, Any]]:
        with closing(UsageStore(database_url(self.ledger, self.gateway.folder))) as store, store.engine.connect() as connection:
            return [dict(row) for row in connection.execute(statement).mappings()]

    def reconciled(self, since: float = 0.0, until: float | None = None) -> dict[str, Json]:
        """Return the result of the reconciliation by server."""
        times = {"since": since, "until": time.time() if until is None else until}
        query = "&".join(f"{name}={datetime.fromtimestamp(value, UTC).isoformat().replace('+00:00', 'Z')}" for name, value in times.items())
        found = self.gateway.get(f"/usage?reconcile=true&{query}").json()["servers"]
        return {each["server"]: each for each in found}

    def starts(self, engine: LaunchedEngine) -> list[float]:
        """Return the start times of a server's processes, in seconds since the epoch."""
        table = ENGINE_SAMPLES.c
        found = self._query(select(table.started).where(table.server == engine.name).distinct().order_by(table.started))
        return [row["started"] / 1000 for row in found]


def _server_body(row: Mapping[str, Any] | None, sent: Mapping[str, Mapping[str, bytes]]) -> bytes | None:
    """Return what the last server of a request has sent for it, if that was recorded. The row of a lost request names no server."""
    if row is None:
        return None
    servers = [row["server"]] if row["server"] is not None else list(sent)
    return next((sent[name][row["request_id"]] for name in servers if row["request_id"] in sent.get(name, {})), None)
