"""Thousands of clients disconnect, in every state. Their requests end at the server, and nothing is left."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import orjson
import pytest

from gateway.snapshot.link import Health
from gateway.snapshot.snapshot import Queue
from tests.faults.conftest import FULL
from tests.faults.invariants import unharmed
from tests.gateway.proxy.test_form import AUDIO, form, part
from tests.support.ports import silent
from tests.support.running import model, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, HELLO, ROLE, Client, chat, client, request
from upstream.balancing.server import Condition
from upstream.http.deadlines import Timeouts

DISCONNECTING = 10_000 if FULL else 600
AT_ONCE = 16
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STATES: dict[str, bytes] = {
    "before the head": b"",
    "before the first event": STREAM,
    "in a stream": STREAM + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in (ROLE, HELLO)),
    "in half an event": STREAM + b"%x\r\n%b" % (len(ROLE), ROLE[:-9]),
    "in a plain text": b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 1000\r\n\r\na",
}
"""The bytes that the server has sent when the client disconnects."""
UNSEEN = ("in its head", "in its body", "while connecting", "in the queue", "while a fallback is tried")
"""States in which the server has not received the request."""
UPLOADING = "in the upload of a form"
"""The state in which the server has received the start of a form."""
EVERY = (*STATES, *UNSEEN, UPLOADING)
HOLDER = -2
"""The number of the request that holds the only slot of a model, so that other requests are queued."""


class Server:
    """A server that sends the bytes of the requested state, waits until the connection is closed, and records the time."""

    def __init__(self) -> None:
        self.arrivals: dict[int, asyncio.Event] = {}
        self.ended: dict[int, float] = {}

    async def __call__(self, talk: Conversation) -> None:
        number = talk.request.json["seed"]
        state = talk.request.json["top_k"]
        assert isinstance(number, int) and isinstance(state, str)
        if state == "none":
            await talk.respond(COMPLETION)
            return
        await talk.write(STATES[state])
        self.arrivals[number].set()
        await talk.closed_by_peer()
        self.ended[number] = time.monotonic()

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive a form that never ends. Its start contains its number."""
        received = b""
        while (found := re.search(rb"number-(\d+)-", received)) is None:
            piece = await reader.read(65536)
            assert piece, f"it ended: {received!r}"
            received += piece
        self.arrivals[int(found[1])].set()
        while await reader.read(65536):
            pass
        self.ended[int(found[1])] = time.monotonic()
        writer.close()


@asynccontextmanager
async def _listening(server: Server) -> AsyncIterator[int]:
    """Open a port on which the server receives forms."""
    listener = await asyncio.start_server(server.hear, "127.0.0.1", 0)
    async with listener:
        yield listener.sockets[0].getsockname()[1]


def _disconnect(one: Client, dice: random.Random) -> None:
    if dice.random() < 0.5:
        one.disconnect()
    else:
        one.writer.close()


@pytest.mark.row(7)
@pytest.mark.timeout(1200)
async def test_thousands_disconnect_in_every_state(measured: Callable[[str], None]) -> None:
    server, dice, disconnected, seen = Server(), random.Random(7), dict[int, float](), Counter[str]()
    numbers = iter(range(DISCONNECTING))
    with silent() as full:
        async with (
            scripted(server) as upstream,
            _listening(server) as forms,
            unharmed(
                [
                    model(upstream.port),
                    model(full, identity="full", timeouts=Timeouts(connect=60.0)),
                    model(forms, identity="forms"),
                    model(upstream.port, identity="busy", max_inflight=1, queue=Queue(DISCONNECTING, 600.0)),
                    model(full, identity="down", fallbacks=("full",)),
                ]
            ) as served,
            client(served.port) as holder,
        ):
            served.worker.apply_health(Health({"down#0": Condition.DOWN}, {}))
            server.arrivals[HOLDER] = asyncio.Event()
            holder.send(request(chat(seed=HOLDER, top_k="before the head", model="busy")))
            await server.arrivals[HOLDER].wait()
            baseline = sum(len(each._idle) for each in served.worker.fleet)

            async def disconnect(number: int) -> None:
                state = dice.choice(EVERY)
                seen[state] += 1
                async with client(served.port) as one:
                    await begun[state](one, number, state)
                    _disconnect(one, dice)
                    disconnected[number] = time.monotonic()

            async def to_the_server(one: Client, number: int, state: str) -> None:
                event = server.arrivals[number] = asyncio.Event()
                one.send(request(chat(seed=number, top_k=state, stream=state != "in a plain text")))
                await event.wait()
                if dice.random() < 0.5:
                    await asyncio.sleep(0.005)  # so that the response has arrived in some cases

            async def in_head(one: Client, number: int, _: str) -> None:
                one.send(request(chat(seed=number))[: dice.randrange(1, 60)])
                await asyncio.sleep(0.001)

            async def in_body(one: Client, number: int, _: str) -> None:
                one.send(request(chat(seed=number))[:-1])
                await asyncio.sleep(0.001)

            async def connecting(one: Client, number: int, _: str) -> None:
                one.send(request(chat(seed=number, model="full")))
                await asyncio.sleep(0.002)

            async def in_the_queue(one: Client, number: int, _: str) -> None:
                one.send(request(chat(seed=number, model="busy")))
                await until(lambda: served.value("queued_requests", "busy"))

            async def elsewhere(one: Client, number: int, _: str) -> None:
                one.send(request(chat(seed=number, model="down")))
                await asyncio.sleep(0.002)

            async def uploading(one: Client, number: int, _: str) -> None:
                event = server.arrivals[number] = asyncio.Event()
                whole = form(part("model", b"forms"), part("prompt", b"number-%d-" % number), part("file", AUDIO, '; filename="a.wav"'))
                one.send(whole[: -dice.randrange(100, 5000)])
                await event.wait()

            begun: dict[str, Callable[[Client, int, str], Awaitable[None]]] = dict.fromkeys(STATES, to_the_server)
            begun |= dict(zip(UNSEEN, (in_head, in_body, connecting, in_the_queue, elsewhere), strict=True)) | {UPLOADING: uploading}

            async def many() -> None:
                for number in numbers:
                    await disconnect(number)

            await asyncio.gather(*(many() for _ in range(AT_ONCE)))
            disconnected[HOLDER] = time.monotonic()
            holder.disconnect()
            await until(lambda: len(server.ended) == len(server.arrivals), 30)
            await until(lambda: served.in_flight == 0, 30)
            assert set(seen) == set(EVERY)
            assert sum(record.queued > 0 for record in served.context.records) > seen["in the queue"] / 2
            assert sum(record.requested_model == "down" for record in served.context.records) > seen["while a fallback is tried"] / 2
            assert {record.status for record in served.context.records} == {499}
            assert served.total("server_failures_total") == 0, "a client's leaving is no failure of a server"
            assert served.total("server_ejected") == 0
            took = sorted(server.ended[number] - disconnected[number] for number in server.ended)
            p99 = took[int(0.99 * len(took))]
            assert p99 < (0.2 if FULL else 20.0)
            await until(lambda: upstream.open == 0)
            assert sum(len(each._idle) for each in served.worker.fleet) == baseline
            async with client(served.port) as one:
                reply = await one.request(request(chat(seed=-1, top_k="none")))
                assert (reply.status, orjson.loads(reply.body)["id"]) == (200, "chatcmpl-1")
    measured(f"{DISCONNECTING:,} clients disconnected in {len(seen)} states; {len(took):,} requests ended at the server, "
             f"p99 {p99 * 1000:.0f} ms later (most {took[-1] * 1000:.0f} ms); nothing left over")  # fmt: skip
