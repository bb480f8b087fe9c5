"""The most expensive requests of one client: how many steps of the interpreter they take in one event-loop iteration, and for each KiB.

Another client waits for the iteration in progress, so no iteration may be long. Steps are counted while a real request is served in the
test's own loop. ``make floods`` measures the times of another client beside the same requests.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from gateway.system.steps import SMALL, is_small
from tests.floods.requests import FLOODS, ISSUER, Flood
from tests.gateway.auth.test_jwt import trusted
from tests.support.opcodes import Steps, counting
from tests.support.running import key, model, serving
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION


def _sent(port: int, data: bytes, responses: int) -> None:
    """Send some bytes and read the responses, in a separate thread, which is not counted."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        received = b""
        with suppress(ConnectionError):
            connection.sendall(data)
        while received.count(b"HTTP/1.1 ") < responses and (piece := connection.recv(65536)):
            received += piece


async def _respond(talk: Conversation) -> None:
    await talk.respond(COMPLETION)


@asynccontextmanager
async def _gateway() -> AsyncIterator[int]:
    async with (
        scripted(_respond) as server,
        serving([model(server.port)], [key(), key("staff", "sk-staff")], issuers=(trusted(ISSUER),)) as served,
    ):
        yield served.port


async def _cost(flood: Flood) -> tuple[Steps, int]:
    """Return the steps of a flood's second connection, and its bytes. The first one fills the caches."""
    async with _gateway() as port:
        await asyncio.to_thread(_sent, port, flood.make(0), flood.responses)
        data = flood.make(1)
        async with counting() as steps:
            await asyncio.to_thread(_sent, port, data, flood.responses)
    return steps, len(data)


@pytest.mark.parametrize("name", FLOODS)
async def test_no_flood_costs_more_than_its_bounds(name: str) -> None:
    flood = FLOODS[name]
    steps, size = await _cost(flood)
    per_kib = steps.total * 1024 // size
    print(f"{name}: {size:,} bytes, {steps.longest:,} steps in one iteration, {per_kib:,} for each KiB")
    assert steps.longest <= flood.iteration
    assert per_kib <= flood.per_kib


def test_a_small_body_with_many_objects_or_lists_is_not_processed_in_one_call() -> None:
    assert is_small(b"[" * 4096) and is_small(b"x" * SMALL) and is_small(b"[{" * 512 + b"x" * 8000)
    assert not is_small(b"[{" * 512 + b"[" + b"x" * 8000) and not is_small(b"x" * (SMALL + 1))
