"""Servers that die between a request's body and the first byte of its response's body: another server runs the request."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import closing

import orjson
import pytest

from gateway.client.keepalive import COMMENT
from gateway.ledger.journal import Journal
from gateway.ledger.recorder import Recorder
from gateway.ledger.row import CONTINUED, decode, frames
from gateway.snapshot.link import Health
from gateway.snapshot.snapshot import Resume
from gateway.telemetry.request_record import RequestRecord
from tests.faults.invariants import unharmed
from tests.support.ports import refusing
from tests.support.running import key, model, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import DEAD_ENGINE, DONE, EVENTS, ROLE, SHOWN, Reply, chat, client, request, request_once
from tests.upstream.simulator.test_process import running
from upstream.balancing.attempt import UpstreamResponse
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


@pytest.mark.parametrize("sent", [ROLE[:20], b"\n", DEAD_ENGINE], ids=["a part of an event", "a blank line", "a dead engine"])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.row(3)
async def test_comments_are_no_part_of_a_lost_response(sent: bytes, temperature: int) -> None:
    commented = asyncio.Event()

    async def dies_first(talk: Conversation) -> None:
        await talk.begin_stream()
        if talk.number == 1:
            await commented.wait()
            await talk.chunk(sent)
            talk.writer.close()
            return
        for event in EVENTS:
            await talk.chunk(event)
        await talk.end_stream()

    async with scripted(dies_first) as first, unharmed([model(first.port, first.port, keepalive=0.05)]) as served:
        async with client(served.port) as one:
            one.send(request(chat(stream=True, temperature=temperature)))
            reply = asyncio.create_task(one.reply())
            await one.begun.wait()
            commented.set()
            pieces = (await reply).pieces
        assert pieces[0] == COMMENT and b"".join(piece for piece in pieces if piece != COMMENT).strip() == b"".join(SHOWN).strip()
        [record] = served.context.records
        assert (record.retries, record.code, record.incomplete, record.continuations) == (1, None, None, ())


@pytest.mark.row(3)
async def test_a_server_that_is_stopped_aborts_its_responses() -> None:
    """A response with the finish reason ``abort`` reaches no client: another server gets the request. Its tokens are recorded."""
    path, body = "/v1/chat/completions", chat(max_tokens=40)
    older = {"functions": [{"name": "look", "parameters": {}}], "function_call": "none"}  # its response is translated as a whole
    requests = [(path, body), (path, {**body, "temperature": 0}), (path, {**body, "n": 2}), (path, {**body, **older})]
    requests += [("/v1/completions", PROMPT), ("/v1/messages", body)]
    with running("--sim-tokens=30", "--sim-tokens-per-second=1", *SERVED) as stopped, running("--sim-tokens=30", *SERVED) as other:
        with closing(Journal.create("test", 1 << 20, 8)) as journal:
            assert not stopped.requests() + other.requests()  # these connections stay open, so they are not left over
            async with unharmed([model(stopped.port, other.port)], [key()], ledger=Recorder(journal)) as served:
                served.worker.apply_health(Health({"tiny#0": Condition.UP, "tiny#1": Condition.DOWN}, {}))
                tasks = [asyncio.create_task(request_once(served.port, request(body, path))) for path, body in requests]
                await until(lambda: stopped.metric("vllm:generation_tokens_total") >= 2 * len(requests))
                served.worker.apply_health(Health({"tiny#0": Condition.UP, "tiny#1": Condition.UP}, {}))
                stopped.process.terminate()
                replies = await asyncio.gather(*tasks)
            assert {(reply.status, reply.whole, b'"abort"' in reply.body) for reply in replies} == {(200, True, False)}
            records = served.context.records
            assert [[reason for *_, reason in record.failures] for record in records] == [["aborted"]] * len(requests)
            assert {(record.retries, record.incomplete) for record in records} == {(1, None)}
            rows = [decode(payload) for payload in frames(journal.read().data)]
        own, lost = ([row for row in rows if (row.key == CONTINUED) is of_lost] for of_lost in (False, True))
        computed = sorted((entry["prompt_tokens"], entry["completion_tokens"]) for entry in other.requests())
        assert sorted((row.prompt, row.completion) for row in own) == computed and {row.server for row in own} == {"tiny#1"}
        assert {(row.server, row.incomplete, row.price) for row in lost} == {("tiny#0", "upstream", None)}
        assert sorted((row.prompt or 0, row.choices or 1) for row in lost) == sorted((row.prompt or 0, row.choices or 1) for row in own)
        assert all(0 < (row.completion or 0) < 30 * (row.choices or 1) for row in lost)


ABORTED = orjson.dumps({"choices": [{"finish_reason": "abort"}], "usage": {"prompt_tokens": 9, "completion_tokens": 2}})
COMPLETE = ABORTED.replace(b"abort", b"stop")


@pytest.mark.parametrize("received", [len(ABORTED), 1, 60])
@pytest.mark.row(3)
async def test_a_response_in_several_reads_is_sent_when_it_is_complete(received: int) -> None:
    """Aborted at its end, or truncated, it reaches no client."""

    async def fails_first(talk: Conversation) -> None:
        if talk.number > 1:
            await talk.trickle(COMPLETE)
        elif received == len(ABORTED):
            await talk.trickle(ABORTED)
        else:
            await talk.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ABORTED))
            await talk.write(ABORTED[:received])
            talk.writer.close()

    async with scripted(fails_first) as server, unharmed([model(server.port, server.port)]) as served:
        for path, body in (("/v1/chat/completions", chat()), ("/v1/completions", PROMPT)):
            server.requests.clear()
            reply = await request_once(served.port, request(body, path))
            assert (reply.status, reply.body) == (200, COMPLETE)
        assert {(record.retries, record.code, record.incomplete) for record in served.context.records} == {(1, None, None)}
        assert served.value("tokens_total", "team-a", "tiny") == 2 * 11, "the tokens of the second response are charged"


async def test_a_client_that_disconnects_before_the_end_of_such_a_response_is_charged() -> None:
    begun, left = asyncio.Event(), asyncio.Event()

    async def responds(talk: Conversation) -> None:
        await talk.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(COMPLETE))
        await talk.write(COMPLETE[:40])
        begun.set()
        await left.wait()
        await talk.write(COMPLETE[40:])

    async with scripted(responds) as server, unharmed([model(server.port, server.port)]) as served:
        async with client(served.port) as one:
            one.send(request())
            await begun.wait()
            watched = served.context.deadlines._watched
            await until(lambda: any(isinstance(each, UpstreamResponse) and each.pending for each in watched))
        await until(lambda: not served.connections)
        left.set()
        await until(lambda: served.context.records)
        [record] = served.context.records
        assert (record.status, record.incomplete) == (499, "client")
        assert record.usage is not None and (record.usage.prompt, record.usage.completion) == (9, 2)


@pytest.mark.row(3)
async def test_the_errors_of_a_dead_engine_reach_no_client() -> None:
    with running("--sim-error-first", *SERVED) as dead, running(*SERVED) as other:
        for name in ("chat", "chat, streamed", "completion", "completion, streamed", "message"):
            path, body = REQUESTS[name]
            async with unharmed([model(other.port, dead.port, balance="round_robin")]) as served:  # it starts with the second server
                reply = await request_once(served.port, request(body, path))
                assert (reply.status, reply.whole, b"error" in reply.body.lower()) == (200, True, False), reply.body
                [record] = served.context.records
                assert [reason for *_, reason in record.failures] == ["engine_dead"] and record.retries == 1
        assert len(dead.requests()) == len(other.requests()) == 5


async def test_a_server_that_finishes_its_requests_before_it_stops_gets_no_new_ones() -> None:
    with running("--shutdown-timeout=120", *SERVED) as stopping, running(*SERVED) as other:
        held = asyncio.create_task(request_once(stopping.port, request(chat(stream=True, simulate={"hang_after": 2}))))
        try:
            await until(lambda: len(stopping.requests()) == 1)
            stopping.process.terminate()
            await until(lambda: stopping.chat().status_code == 500)
            async with unharmed([model(other.port, stopping.port, balance="round_robin")]) as served:
                for _ in range(4):
                    assert (await request_once(served.port, request())).status == 200
                assert [reason for *_, reason in served.context.records[0].failures] == ["engine_dead"]
        finally:
            stopping.process.kill()
            await asyncio.gather(held, return_exceptions=True)


@pytest.mark.parametrize("fault", ["--sim-abort-after=3", "--sim-error-first", "--sim-status=500"])
async def test_without_another_server_or_resume_the_client_gets_what_the_server_sent(fault: str) -> None:
    with running(fault, *SERVED) as failing, running(*SERVED) as other:
        for models in (
            model(failing.port),
            model(failing.port, failing.port),
            model(other.port, failing.port, balance="round_robin", resume=Resume.OFF),
        ):
            async with unharmed([models]) as served:
                reply = await request_once(served.port, request(chat(max_tokens=9)))
                if "abort" in fault:
                    document = orjson.loads(reply.body)
                    assert (reply.status, document["choices"][0]["finish_reason"]) == (200, "abort")
                    [record] = served.context.records
                    assert record.usage is not None and document["usage"]["completion_tokens"] == 3 == record.usage.completion
                    assert record.incomplete == "upstream"
                else:
                    assert (reply.status, reply.error["code"]) == (500, "server_error")
        assert not other.requests()


async def test_another_error_of_a_server_is_not_sent_again() -> None:
    with running("--sim-status=500", *SERVED) as failing, running(*SERVED) as other:
        async with unharmed([model(other.port, failing.port, balance="round_robin")]) as served:
            assert (await request_once(served.port, request())).status == 500
        assert not other.requests()


@pytest.mark.parametrize("padding", [0, 20_000])
async def test_a_request_for_which_the_server_may_call_tools_is_not_sent_again(padding: int) -> None:
    function = {"type": "function", "name": "look", "parameters": {}}
    server = {"type": "mcp", "server_label": "shop", "server_url": "http://127.0.0.1:1/" + "x" * padding}
    body = {"model": "tiny", "input": "Hello"}
    flags = *SERVED, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"
    with running(DEATHS["at once"], *flags) as dying, running(*flags) as other:
        for tools, status in (([function], 200), ([function, server], 502)):
            async with unharmed([model(other.port, dying.port, balance="round_robin")]) as served:
                reply = await request_once(served.port, request({**body, "tools": tools}, "/v1/responses"))
                assert reply.status == status
        assert len(other.requests()) == 1


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
