"""Requests that wait for their model: their order, the queue's bounds, `Retry-After`, comments, and disconnected clients."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import openai
import orjson
import pytest

from gateway.client.request import ClientRequest
from gateway.snapshot.link import Health
from gateway.snapshot.snapshot import Model, Queue
from tests.support.running import KEY, Served, model, serving, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, DONE, HELLO, ROLE, SHOWN, STOP, Client, Reply, chat, client, request, request_once
from upstream.balancing.server import Condition, ServerSpec
from upstream.http.address import Address

QUEUE = Queue(size=3, wait=60.0)
SERVER = "tiny#0"


async def respond(talk: Conversation) -> None:
    await talk.respond(COMPLETION)


async def stream_events(talk: Conversation) -> None:
    await talk.begin_stream()
    await talk.chunk(b"".join(SHOWN))
    await talk.end_stream()


def _current_requests(served: Served) -> list[ClientRequest]:
    return [each.current for each in served.connections if isinstance(each.current, ClientRequest)]


def waiting_model(*ports: int, **more: Any) -> Model:
    return model(*ports, **{"queue": QUEUE, **more})


def model_is_loading(served: Served, seconds: float = 30.0) -> float:
    """Report that the model is loading, and return when it is expected to be ready."""
    due = time.monotonic() + seconds
    _apply_health(served, Condition.LOADING, {"tiny": due})
    return due


def retry_after_now(due: float) -> int:
    """Return the `Retry-After` value, in whole seconds, of a response sent now."""
    return math.ceil(due - time.monotonic())


def is_up(served: Served) -> None:
    _apply_health(served, Condition.UP, {})


def is_down(served: Served) -> None:
    _apply_health(served, Condition.DOWN, {})


def _apply_health(served: Served, condition: Condition, expected: Mapping[str, float]) -> None:
    served.worker.apply_health(Health({SERVER: condition}, {}, expected))


def queued(served: Served) -> float:
    return served.value("queued_requests", "tiny")


async def send_and_queue(served: Served, one: Client, number: int = 1, **fields: Any) -> None:
    """Send a request, and wait until the queue holds ``number`` requests."""
    one.send(request(chat(**fields)))
    await until(lambda: queued(served) == number)


async def send_and_expect_refusal(served: Served, status: int = 503, **fields: Any) -> Reply:
    reply = await request_once(served.port, request(chat(**fields)))
    assert reply.status == status
    return reply


async def test_requests_resume_in_order_of_arrival() -> None:
    async with scripted(respond) as server, serving([waiting_model(server.port)], up=False) as served:
        model_is_loading(served)
        async with client(served.port) as a, client(served.port) as b, client(served.port) as c:
            for number, one in enumerate((b, a, c), 1):
                await send_and_queue(served, one, number, seed=number)
            assert served.value("inflight_requests", "tiny") == served.context.inflight.in_flight == 3
            assert served.total("server_inflight") == 0 and server.requests == []
            is_up(served)
            assert [(await one.reply()).status for one in (a, b, c)] == [200, 200, 200]
        assert [each.json["seed"] for each in server.requests] == [1, 2, 3]
        await until(lambda: served.in_flight == 0)
        assert queued(served) == 0
        name, since = served.demand[0]
        assert name == "tiny" and since is not None and time.monotonic() - since < 60
        assert served.demand[-1] == ("tiny", None) and (await request_once(served.port, request())).status == 200


async def test_queue_time_is_recorded_and_is_not_overhead() -> None:
    async with scripted(respond) as server, serving([waiting_model(server.port)], up=False) as served, client(served.port) as one:
        model_is_loading(served)
        await send_and_queue(served, one)
        await asyncio.sleep(0.3)
        is_up(served)
        await one.reply()
        await until(lambda: served.in_flight == 0)
        [record] = served.context.records
        assert 0.3 <= record.queued <= record.duration
        assert record.overhead <= record.duration - record.queued


async def test_a_request_to_a_full_queue_is_refused_with_retry_after() -> None:
    async with scripted(respond) as server, serving([waiting_model(server.port)], up=False) as served:
        due = model_is_loading(served, 57.5)
        async with client(served.port) as a, client(served.port) as b, client(served.port) as c:
            for number, one in enumerate((a, b, c), 1):
                await send_and_queue(served, one, number)
            latest = retry_after_now(due)
            reply = await send_and_expect_refusal(served)
            assert reply.error["code"] == "model_loading" and retry_after_now(due) <= int(reply.headers["retry-after"]) <= latest
            b.disconnect()
            await until(lambda: queued(served) == 2)
            async with client(served.port) as d:
                await send_and_queue(served, d, 3)
        await until(lambda: queued(served) == 0)
        assert served.demand[-1][1] is not None, "who was told to come back still wants the model"
        is_up(served)
        assert served.demand[-1][1] is None


async def test_a_queue_timeout_is_reported_with_retry_after() -> None:
    async with (
        scripted(respond) as server,
        serving([waiting_model(server.port, queue=Queue(3, 0.3))], up=False) as served,
        client(served.port) as one,
    ):
        due, began = model_is_loading(served, 60.5), time.monotonic()
        latest = retry_after_now(due)
        reply = await one.request(request())
        assert time.monotonic() - began >= 0.3
        assert (reply.status, reply.error["code"]) == (503, "model_loading")
        assert retry_after_now(due) <= int(reply.headers["retry-after"]) <= latest
        await until(lambda: served.in_flight == 0)
        model_is_loading(served, -5.0)
        assert (await send_and_expect_refusal(served)).headers["retry-after"] == "1"


async def test_a_loading_model_without_a_queue_reports_retry_after() -> None:
    async with scripted(respond) as server, serving([model(server.port)], up=False) as served:
        due = model_is_loading(served, 57.5)
        latest = retry_after_now(due)
        reply = await send_and_expect_refusal(served)
        assert reply.error["code"] == "model_loading" and retry_after_now(due) <= int(reply.headers["retry-after"]) <= latest


@pytest.mark.parametrize("way", ["reset", "close"])
@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_a_disconnected_client_frees_its_queue_slot_at_once(way: str, fields: dict[str, Any]) -> None:
    async with scripted(respond) as server, serving([waiting_model(server.port)], up=False) as served, client(served.port) as one:
        model_is_loading(served)
        await send_and_queue(served, one, **fields)
        one.disconnect() if way == "reset" else one.writer.close()
        await until(lambda: served.in_flight == 0)
        assert queued(served) == 0 and served.demand[-1] == ("tiny", None)
        assert served.value("requests_total", "tiny", "/v1/chat/completions", "499") == 1
        is_up(served)
        await asyncio.sleep(0.05)
        assert server.requests == []


async def test_a_client_that_disconnects_during_an_upload_is_noticed() -> None:
    body = (
        b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\ntiny\r\n'
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + bytes(3 << 20)
    )
    head = (
        f"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: multipart/form-data; boundary=b\r\ncontent-length: {len(body) + 9}\r\n\r\n"
    )
    async with scripted(respond) as server, serving([waiting_model(server.port)], up=False) as served, client(served.port) as one:
        model_is_loading(served)
        one.send(head.encode() + body)
        await until(lambda: queued(served) == 1)
        await one.writer.drain()
        one.disconnect()
        await until(lambda: served.in_flight == 0)
        assert queued(served) == 0


async def test_no_request_waits_for_a_model_that_is_down() -> None:
    async with scripted(respond) as server, serving([waiting_model(server.port)], up=False) as served, client(served.port) as one:
        is_down(served)
        assert (await send_and_expect_refusal(served)).error["code"] == "no_healthy_server"
        model_is_loading(served)
        await send_and_queue(served, one)
        is_down(served)
        reply = await one.reply()
        assert (reply.status, reply.error["code"]) == (503, "no_healthy_server")
        assert served.demand[-1] == ("tiny", None)


async def test_queued_requests_are_refused_when_the_gateway_drains() -> None:
    async with scripted(respond) as server, serving([waiting_model(server.port)], up=False) as served, client(served.port) as one:
        model_is_loading(served)
        await send_and_queue(served, one)
        served.context.queues.close()
        reply = await one.reply()
        assert (reply.status, reply.error["code"]) == (503, "draining")
        assert (await send_and_expect_refusal(served)).error["code"] == "draining"


async def test_queued_requests_use_the_servers_of_the_newest_snapshot() -> None:
    async with scripted(respond) as server, serving([waiting_model(queue=QUEUE)], up=False) as served, client(served.port) as one:
        model_is_loading(served)
        await send_and_queue(served, one)
        spec = ServerSpec(SERVER, Address(port=server.port), "tiny")
        served.worker.apply_snapshot(replace(served.worker.snapshot, version=2, models=(waiting_model(server.port),)))
        assert served.worker.snapshot.models[0].servers == (spec,)
        is_up(served)
        assert (await one.reply()).status == 200


async def test_no_request_waits_for_a_removed_model() -> None:
    async with serving([waiting_model(queue=QUEUE)], up=False) as served, client(served.port) as one:
        model_is_loading(served)
        await send_and_queue(served, one)
        served.worker.apply_snapshot(replace(served.worker.snapshot, version=2, models=()))
        reply = await one.reply()
        assert (reply.status, reply.error["code"]) == (503, "no_healthy_server")
        await until(lambda: served.in_flight == 0)


async def test_queued_requests_use_a_server_that_is_up_only_briefly() -> None:
    async with scripted(respond) as server, serving([waiting_model(server.port)], up=False) as served:
        model_is_loading(served)
        async with client(served.port) as a, client(served.port) as b, client(served.port) as c:
            await send_and_queue(served, a, 1, seed=1)
            await send_and_queue(served, b, 2, seed=2)
            is_up(served)
            assert queued(served) == 0
            model_is_loading(served)
            await send_and_queue(served, c, 1, seed=3)
            assert [(await one.reply()).status for one in (a, b)] == [200, 200]
            assert queued(served) == 1
            is_up(served)
            assert (await c.reply()).status == 200
        assert [each.json["seed"] for each in server.requests] == [1, 2, 3]


async def test_a_request_with_an_old_fallback_does_not_wait_for_the_new_one() -> None:
    """The fallback was chosen when the request arrived, and has gained another server since."""
    release = asyncio.Event()

    async def respond_after_release(talk: Conversation) -> None:
        await release.wait()
        await talk.respond(COMPLETION)

    async with scripted(respond_after_release) as slow, scripted(respond) as server:
        one, two = (model(*ports, identity="other", max_inflight=1, queue=QUEUE) for ports in ((slow.port,), (slow.port, server.port)))
        main = waiting_model(server.port, fallbacks=("other",))
        async with serving([one, main], up=False) as served, client(served.port) as first, client(served.port) as second:
            due = time.monotonic() + 3600
            served.worker.apply_health(Health({SERVER: Condition.LOADING, "other#0": Condition.UP}, {}, {"tiny": due}))
            first.send(request(chat(model="other")))
            await until(lambda: slow.requests)
            await send_and_queue(served, second)
            served.worker.apply_snapshot(replace(served.worker.snapshot, version=2, models=(two, main)))
            served.worker.apply_health(
                Health({SERVER: Condition.LOADING, "other#0": Condition.UP, "other#1": Condition.UP}, {}, {"tiny": due})
            )
            is_down(served)  # the model is no longer expected
            async with asyncio.timeout(30):
                assert (await second.reply()).status == 200
            release.set()
            assert (await first.reply()).status == 200
            await until(lambda: served.in_flight == 0)


# Comments that keep a stream open

COMMENT = b": keep-alive\n\n"


async def test_comments_are_sent_while_a_stream_waits_and_its_events_are_unchanged() -> None:
    async with scripted(stream_events) as server, serving([waiting_model(server.port, keepalive=0.1)], up=False) as served:
        model_is_loading(served)
        async with client(served.port) as one, client(served.port) as plain:
            await send_and_queue(served, one, 1, stream=True)
            await send_and_queue(served, plain, 2)
            await one.reader.readuntil(b"text/event-stream")
            await one.reader.readuntil(COMMENT + b"\r\n")
            await one.reader.readuntil(COMMENT + b"\r\n")
            is_up(served)
            rest = await one.reader.readuntil(b"0\r\n\r\n")
            assert b"".join(rest.split(b"\r\n")[1::2]).replace(COMMENT, b"") == b"".join(SHOWN)
            assert (await plain.reply()).status == 200, "one that is no stream has had no comment"


@pytest.mark.parametrize("outcome", ["error", "json", "none"])
async def test_an_error_after_a_comment_is_sent_in_the_stream(outcome: str) -> None:
    async def script(talk: Conversation) -> None:
        if outcome == "error":
            await talk.respond(b'{"error":{"message":"no","type":"BadRequestError","param":"seed","code":400}}', "400 Bad Request")
        else:
            await talk.respond(COMPLETION)

    async with (
        scripted(script) as server,
        serving([waiting_model(server.port, keepalive=0.1)], up=False) as served,
        client(served.port) as one,
    ):
        model_is_loading(served)
        await send_and_queue(served, one, stream=True)
        await until(lambda: any(each.is_event_stream for each in _current_requests(served)))
        is_down(served) if outcome == "none" else is_up(served)
        reply = await one.reply()
        events = [event for event in reply.body.split(b"\n\n") if event and event != COMMENT.strip()]
        assert (reply.status, reply.whole, events[-1]) == (200, True, b"data: [DONE]")
        code = orjson.loads(events[0].removeprefix(b"data: "))["error"]["code"]
        assert code == {"error": "invalid_value", "json": "upstream_disconnected", "none": "no_healthy_server"}[outcome]
        await until(lambda: served.in_flight == 0)
        assert served.value("incomplete_total", "tiny", "upstream") == 1


@pytest.mark.parametrize("status", ["200 OK", "400 Bad Request"])
async def test_no_comment_precedes_a_non_streaming_response(status: str) -> None:
    """The headers have arrived and the body is slow. A comment would start another response before this one."""
    body = b'{"object":"text_completion","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":"stop"}]}'

    async def script(talk: Conversation) -> None:
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status.encode(), len(body))
        assert len(served.context.deadlines) == 2, "the answer's, and the comments'"
        await talk.write(head + body[:9])
        await until(lambda: len(served.context.deadlines) == 1)
        await talk.write(body[9:])

    async with scripted(script) as server, serving([waiting_model(server.port, keepalive=3600.0)]) as served, client(served.port) as one:
        reply = await one.request(request({"model": "tiny", "prompt": "x", "stream": True}))
        assert (reply.status, reply.headers["content-type"]) == (int(status[:3]), "application/json")
        assert orjson.loads(reply.body).keys() & {"error", "choices"}
        await until(lambda: served.in_flight == 0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_an_initial_error_is_sent_even_if_a_comment_precedes_its_end(path: str) -> None:
    release = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(b'data: {"error":{"message":"no","type":"BadRequestError","param":"seed","code":400}}\n\n')
        await release.wait()
        await talk.chunk(DONE)
        await talk.end_stream()

    async with scripted(script) as server, serving([waiting_model(server.port, keepalive=0.1)]) as served, client(served.port) as one:
        one.send(request(chat(stream=True, input="x"), path))
        await one.reader.readuntil(COMMENT + b"\r\n")
        release.set()
        rest = b"".join((await one.reader.readuntil(b"0\r\n\r\n")).split(b"\r\n")[1::2]).replace(COMMENT, b"")
        error, *more = [orjson.loads(event.partition(b"data: ")[2]) for event in rest.removesuffix(DONE).split(b"\n\n")[:-1]]
        assert more == [] and rest.endswith(DONE) is (path == "/v1/chat/completions")
        assert (error.get("error", error)["code"], error.get("sequence_number", 0)) == ("invalid_value", 0)
        await until(lambda: served.in_flight == 0)
        assert (served.context.records[0].code, served.context.records[0].incomplete) == ("invalid_value", "upstream")


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/embeddings"])
async def test_no_comments_on_routes_that_never_stream(path: str) -> None:
    """Some clients send the body of another route, with its ``stream`` field, which vLLM ignores."""

    async def script(talk: Conversation) -> None:
        await asyncio.sleep(1)  # longer than several comment intervals
        await talk.respond(b'{"input_tokens":3}')

    async with scripted(script) as server, serving([waiting_model(server.port, keepalive=0.1)]) as served:
        reply = await request_once(served.port, request(chat(stream=True, input="x"), path))
        assert (reply.status, reply.headers["content-type"], reply.body) == (200, "application/json", b'{"input_tokens":3}')


async def test_comments_in_an_idle_stream_are_sent_between_events() -> None:
    release = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(ROLE)
        await talk.chunk(HELLO[:20])  # half an event: no comment may be inserted into it
        await release.wait()
        await talk.chunk(HELLO[20:] + STOP + DONE)
        await talk.end_stream()

    async with scripted(script) as server, serving([waiting_model(server.port, keepalive=0.1)]) as served, client(served.port) as one:
        one.send(request(chat(stream=True)))
        await one.reader.readuntil(ROLE)
        await one.reader.readuntil(COMMENT)
        release.set()
        rest = b"".join((await one.reader.readuntil(b"0\r\n\r\n")).split(b"\r\n")[1:])
        assert HELLO in rest and rest.endswith(b"0") and DONE in rest
        await until(lambda: served.in_flight == 0)


async def test_the_openai_client_accepts_comments_before_text_and_errors() -> None:
    async with scripted(stream_events) as server, serving([waiting_model(server.port, keepalive=0.1)], up=False) as served:
        sdk = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0)
        async with sdk:
            for report, fails in ((is_up, False), (is_down, True)):
                model_is_loading(served)
                task = asyncio.create_task(_text(sdk))
                await until(
                    lambda: any(isinstance(each.current, ClientRequest) and each.current.is_event_stream for each in served.connections)
                )
                report(served)
                if fails:
                    with pytest.raises(openai.APIError, match="No server of this model is healthy"):
                        await task
                else:
                    assert "你好" in await task
        await until(lambda: served.in_flight == 0)


async def _text(sdk: openai.AsyncOpenAI) -> str:
    stream = await sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}], stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
