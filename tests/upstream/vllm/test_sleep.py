"""Put a server to sleep and wake it, by the routes of vLLM's development mode."""

from __future__ import annotations

import pytest

from tests.support.ports import refusing
from tests.support.scripted import Conversation, scripted
from upstream.http.address import Address
from upstream.vllm.health import ProbeTarget
from upstream.vllm.sleep import Level, SleepError, fall_asleep, wake_up


async def respond(talk: Conversation) -> None:
    await talk.respond(b"")


@pytest.mark.parametrize(
    ("level", "steps"),
    [
        (1, ["/sleep?level=1", "/wake_up"]),
        (2, ["/sleep?level=2", "/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"]),
    ],
)
async def test_the_steps_of_a_level_in_their_order(level: Level, steps: list[str]) -> None:
    async with scripted(respond) as server:
        target = ProbeTarget("server", Address(port=server.port), "sk-server")
        await fall_asleep(target, level)
        await wake_up(target, level)
    assert [request.head.split()[1].decode() for request in server.requests] == steps
    assert {request.header("authorization") for request in server.requests} == {"Bearer sk-server"}
    assert [request.json for request in server.requests if request.body] == [{"method": "reload_weights"}] * (level - 1)


async def test_an_error_status_ends_the_steps() -> None:
    async def fails(talk: Conversation) -> None:
        await talk.respond(b"{}", "500 Internal Server Error" if talk.number == 2 else "200 OK")

    async with scripted(fails) as server:
        with pytest.raises(SleepError, match=r"^POST /collective_rpc: status 500$"):
            await wake_up(ProbeTarget("server", Address(port=server.port), None), 2)
    assert len(server.requests) == 2


async def test_a_server_that_cannot_be_reached_or_disconnects() -> None:
    async def disconnects(talk: Conversation) -> None:
        talk.writer.close()

    async with scripted(disconnects) as server:
        with refusing() as port:
            for each in (server.port, port):
                with pytest.raises(SleepError, match=r"^POST /sleep: ."):
                    await fall_asleep(ProbeTarget("server", Address(port=each), None), 1)
