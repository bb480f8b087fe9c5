"""One event for all readers: slow ones skip, unpermitted ones stop, and their number has a bound."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from gateway.control.live_overview import MOST_LISTENERS, LiveOverview
from tests.support.controlled import Controlled, controlled
from tests.support.process import launched
from tests.support.running import until


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def live_of(one: Controlled, clock: Clock) -> LiveOverview:
    return LiveOverview(one.control, one.report, None, None, (clock, clock))


def requests(one: Controlled) -> float:
    return sum(cells[0] for series, cells in one.report.series().items() if series.family == "requests_total")


def decoded(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2
    return dict(msgspec.json.decode(event[6:]))


async def test_the_state_with_its_history_and_alerts(tmp_path: Path) -> None:
    async with controlled(tmp_path, launched("sim/a"), {"id": "far", "servers": [{"url": "http://127.0.0.1:9"}]}) as one:
        clock = Clock()
        live = live_of(one, clock)
        live.tick()
        await one.request("sim/a")
        await until(lambda: requests(one) == 1)  # the worker counts it after the client has the response
        clock.now += 5
        live.tick()
        shown = msgspec.json.decode(live.document())
        assert shown["status"] == "degraded" and shown["models"] == {"ready": 1, "all": 2}
        assert shown["cost"] == {"unknown": "no ledger is configured"} and "unknown" in await live.changes()
        point = dict(zip(shown["history"]["columns"], shown["history"]["points"][-1], strict=True))
        assert point["time"] == clock.now and point["succeeded"] == 0.2
        (alert,) = shown["alerts"]
        assert (alert["name"], alert["subject"], alert["fires"]) == ("VllmGatewayNoHealthyServer", "far", 1_800_000_300.0)
        assert live.document() is live.document()


async def test_all_readers_get_the_same_bytes_and_a_slow_one_skips(tmp_path: Path) -> None:
    async with controlled(tmp_path, launched("sim/a")) as one:
        clock = Clock()
        live = live_of(one, clock)
        live.tick()
        fast, slow = live.events(lambda: True), live.events(lambda: True)
        async with aclosing(fast), aclosing(slow):
            assert await anext(fast) is await anext(slow)
            received = []
            for _ in range(3):
                waiting = asyncio.ensure_future(anext(fast))
                await asyncio.sleep(0)
                clock.now += 5
                live.tick()
                received.append(await waiting)
            waiting = asyncio.ensure_future(anext(slow))
            await asyncio.sleep(0)
            assert not waiting.done()  # what it has missed is not stored for it
            clock.now += 5
            live.tick()
            assert await waiting not in received


async def test_a_reader_stops_when_it_may_no_longer_read(tmp_path: Path) -> None:
    async with controlled(tmp_path, launched("sim/a")) as one:
        live, permitted = live_of(one, Clock()), True
        live.tick()
        async with aclosing(live.events(lambda: permitted)) as events:
            assert decoded(await anext(events))["status"] == "ready" and live.listeners == 1
            permitted = False
            waiting = asyncio.ensure_future(anext(events, None))
            await asyncio.sleep(0)
            live.tick()
            assert await waiting is None and live.listeners == 0


async def test_a_stop_ends_the_events(tmp_path: Path) -> None:
    async with controlled(tmp_path, launched("sim/a")) as one:
        live = live_of(one, Clock())
        live.tick()
        events = live.events(lambda: True)
        await anext(events)
        waiting = asyncio.ensure_future(anext(events, None))
        await asyncio.sleep(0)
        await live.close()
        assert await waiting is None and live.listeners == 0


async def test_the_number_of_readers_has_a_bound(tmp_path: Path) -> None:
    async with controlled(tmp_path, launched("sim/a")) as one:
        live = live_of(one, Clock())
        live.tick()
        readers = [live.events(lambda: True) for _ in range(MOST_LISTENERS)]
        for each in readers:
            assert not live.is_full
            await anext(each)
        assert live.is_full
        for each in readers:
            await each.aclose()
        assert not live.is_full
