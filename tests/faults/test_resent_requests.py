"""Servers that die between a request's body and the first byte of its response's body: another server runs the request."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence

import pytest

from gateway.snapshot.link import Health
from gateway.snapshot.snapshot import Resume
from gateway.telemetry.request_record import RequestRecord
from tests.faults.invariants import unharmed
from tests.support.ports import refusing
from tests.support.running import model, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import DONE, Reply, chat, request, request_once
from tests.upstream.simulator.test_process import running
from upstream.balancing.server import Condition

PROMPT: dict[str, object] = {"model": "tiny", "prompt": "Hello"}
REQUESTS: Mapping[str, tuple[str, dict[str, object]]] = {
    "chat": ("/v1/chat/completions", chat()),
    "chat, streamed": ("/v1/chat/completions", chat(stream=True)),
    "completion": ("/v1/completions", PROMPT),
    "completion, streamed": ("/v1/completions", {**PROMPT, "stream": True}),
    "message": ("/v1/messages", chat(max_tokens=20)),
    "response, streamed": ("/v1/responses", {"model": "tiny", "input": "Hello", "stream": True}),
    "embedding": ("/v1/embeddings", {"model": "tiny", "input": "Hello"}),
    "rerank": ("/v1/rerank", {"model": "tiny", "query": "Hello", "documents": ["one", "two"]}),
}
WIRES = [request(body, path) for path, body in REQUESTS.values()]
SERVED = ("--served-model-name", "tiny")
DEATHS = {"at once": "--sim-cut-before-headers", "after its headers": "--sim-cut-bytes=0"}


def check(replies: Sequence[Reply], records: Sequence[RequestRecord]) -> None:
    """Check that each client has a whole response, and that each request was recorded once."""
    for reply, (name, (_, body)) in zip(replies, REQUESTS.items(), strict=True):
        assert (reply.status, reply.whole) == (200, True), name
        assert name.startswith("response") or not body.get("stream") or reply.body.endswith(DONE), name
    assert [[reason for *_, reason in record.failures] for record in records] == [["disconnected"]] * len(REQUESTS)
    assert {(record.retries, record.status, record.incomplete) for record in records} == {(1, 200, None)}


@pytest.mark.row(3)
async def test_a_server_is_killed_before_its_first_byte() -> None:
    with running("--sim-hang-before-headers", *SERVED) as dying, running(*SERVED) as other:
        assert not dying.requests() + other.requests()  # these connections stay open, so they are not left over
        async with unharmed([model(dying.port, other.port)]) as served:
            served.worker.apply_health(Health({"tiny#0": Condition.UP, "tiny#1": Condition.DOWN}, {}))
            tasks = [asyncio.create_task(request_once(served.port, wire)) for wire in WIRES]
            await until(lambda: len(dying.requests()) == len(WIRES))
            served.worker.apply_health(Health({"tiny#0": Condition.UP, "tiny#1": Condition.UP}, {}))
            os.kill(dying.process.pid, signal.SIGKILL)
            check(await asyncio.gather(*tasks), served.context.records)
            computed = other.requests()
            assert sorted(entry["path"] for entry in computed) == sorted(path for path, _ in REQUESTS.values())
            assert served.value("retries_total", "tiny") == len(WIRES)
            made = sum(entry["prompt_tokens"] + entry["completion_tokens"] for entry in computed)
            assert served.value("tokens_total", "team-a") == made, "only the second server's tokens are charged"


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.row(3)
async def test_a_server_accepts_requests_and_closes(death: str) -> None:
    replies, records = [], []
    with running(DEATHS[death], *SERVED) as dying, running(*SERVED) as other:
        for wire in WIRES:
            async with unharmed([model(other.port, dying.port, balance="round_robin")]) as served:  # it starts with the second server
                replies.append(await request_once(served.port, wire))
            records += served.context.records
        assert len(dying.requests()) == len(other.requests()) == len(WIRES)
    check(replies, records)


async def test_without_resume_a_lost_request_is_an_error() -> None:
    with running(DEATHS["at once"], *SERVED) as dying, running(*SERVED) as other:
        async with unharmed([model(other.port, dying.port, balance="round_robin", resume=Resume.OFF)]) as served:
            reply = await request_once(served.port, request())
            assert (reply.status, reply.error["code"]) == (502, "upstream_disconnected")
        assert not other.requests()


async def test_a_form_that_was_uploaded_is_lost() -> None:
    sound = b"\0" * 1_000_000
    parts = b'"model"\r\n\r\ntiny', b'"file"; filename="a.wav"\r\n\r\n' + sound
    body = b"".join(b"--x\r\ncontent-disposition: form-data; name=%b\r\n" % part for part in parts) + b"--x--\r\n"
    wire = request(body, "/v1/audio/transcriptions").replace(b"application/json", b"multipart/form-data; boundary=x")

    async def closes(talk: Conversation) -> None:
        talk.writer.close()

    async def responds(talk: Conversation) -> None:
        await talk.respond(b'{"text":"Hello"}')

    async with scripted(closes) as dying, scripted(responds) as other:
        async with unharmed([model(other.port, dying.port, balance="round_robin")]) as served:
            reply = await request_once(served.port, wire)
            assert (reply.status, reply.error["code"]) == (502, "upstream_disconnected")
            assert (await request_once(served.port, wire)).status == 200
        assert (len(dying.requests), len(other.requests)) == (1, 1)


async def test_a_fallback_does_not_get_what_two_servers_have_run() -> None:
    """A request that kills servers must not reach those of another model, also if the second one refuses connections."""

    async def closes(talk: Conversation) -> None:
        talk.writer.close()

    async with scripted(closes) as dying, scripted(closes) as other:
        with refusing() as refused:
            models = [model(refused, dying.port, balance="round_robin", fallbacks=("spare",)), model(other.port, identity="spare")]
            async with unharmed(models) as served:
                assert (await request_once(served.port, request())).status == 502
                assert [reason for *_, reason in served.context.records[0].failures] == ["disconnected", "connect"]
        assert (len(dying.requests), len(other.requests)) == (1, 0)
