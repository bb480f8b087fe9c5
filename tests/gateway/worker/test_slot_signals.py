"""The slots of a server, shared by real workers: exactly as many as configured, used by any worker, and released when a worker dies."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack, closing
from pathlib import Path

from gateway.auth.keys import hash_of
from gateway.telemetry.metrics import Series
from gateway.telemetry.shared_counters import SharedCounters
from gateway.worker.slot_signals import SlotSignals
from tests.support.controlled import controlled
from tests.support.running import until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import chat, client, request

LIMIT, CLIENTS = 4, 24


def slots_of(counters: SharedCounters) -> float:
    """Return the slots that a worker uses."""
    return sum(values[0] for name, values in counters.readings() if Series.decode(name).family == "server_inflight")


async def test_a_dead_worker_gives_its_slots_back_and_the_other_uses_all(tmp_path: Path) -> None:
    at_once, most = 0, 0

    async def hold(talk: Conversation) -> None:
        """Hold each request until its connection ends."""
        nonlocal at_once, most
        if talk.request.head.startswith(b"GET"):  # a probe
            await talk.respond(b'{"object":"list","data":[]}')
            return
        at_once += 1
        most = max(most, at_once)
        try:
            await talk.closed_by_peer()
        finally:
            at_once -= 1

    async with scripted(hold) as server, AsyncExitStack() as stack:
        bounded = {
            "id": "tiny",
            "max_inflight": LIMIT,
            "queue": {"size": 100, "wait": "120s"},
            "servers": [{"url": f"http://127.0.0.1:{server.port}"}],
        }
        keys = [{"id": "a", "hash": hash_of("sk-a")}]
        one = await stack.enter_async_context(controlled(tmp_path, bounded, keys=keys, workers=2))
        for _ in range(CLIENTS):  # the workers share the connections
            each = await stack.enter_async_context(client(one.port))
            each.send(request(chat(), token="sk-a"))
        await until(lambda: at_once == LIMIT)
        await until(lambda: sum(status.connections or 0 for status in one.control.workers.statuses) == CLIENTS)
        used = [slots_of(counters) for counters in one.control.workers.boards]
        victim = one.control.workers.statuses[used.index(max(used))].pid
        assert victim is not None and sum(used) == LIMIT
        arrived = len(server.requests)
        os.kill(victim, signal.SIGKILL)
        # The requests of the dead worker end. Its slots are used by requests that were queued in the other one.
        await until(lambda: len(server.requests) >= arrived + max(used) and at_once == LIMIT)
        assert most <= LIMIT


async def test_a_worker_is_woken_until_it_stops_listening() -> None:
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1

    with closing(SlotSignals.create(2)) as signals:
        with signals.listening(1, check):
            signals.wake(0)
            signals.wake(1)
            signals.wake(1)
            await until(lambda: checks == 1)
            signals.wake_all()
            await until(lambda: checks == 2)
        signals.wake(1)
        await asyncio.sleep(0)
        assert checks == 2
