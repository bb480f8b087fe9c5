"""Requests that wait for their model: in order, within bounds, told the truth, and gone at once when their client is."""

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
from tests.support.wire import COMPLETION, DONE, HELLO, ROLE, SHOWN, STOP, Client, Reply, ask, chat, client, request
from upstream.balancing.server import Condition, ServerSpec
from upstream.http.address import Address

QUEUE = Queue(size=3, wait=60.0)
SERVER = "tiny#0"


async def answers(talk: Conversation) -> None:
    await talk.respond(COMPLETION)


async def streams(talk: Conversation) -> None:
    await talk.begin_stream()
    await talk.chunk(b"".join(SHOWN))
    await talk.end_stream()


def _current(served: Served) -> list[ClientRequest]:
    return [each.current for each in served.connections if isinstance(each.current, ClientRequest)]


def waiting_model(*ports: int, **more: Any) -> Model:
    return model(*ports, **{"queue": QUEUE, **more})


def comes_in(served: Served, seconds: float = 30.0) -> float:
    """Control has said that the model is on its way; returns when it is due."""
    due = time.monotonic() + seconds
    _learn(served, Condition.LOADING, {"tiny": due})
    return due


def told_now(due: float) -> int:
    """In how many whole seconds to come back, for whoever is told now."""
    return math.ceil(due - time.monotonic())


def is_up(served: Served) -> None:
    _learn(served, Condition.UP, {})


def is_down(served: Served) -> None:
    _learn(served, Condition.DOWN, {})


def _learn(served: Served, condition: Condition, expected: Mapping[str, float]) -> None:
    served.worker.apply_health(Health({SERVER: condition}, {}, expected))


def queued(served: Served) -> float:
    return served.value("queued_requests", "tiny")


async def enter(served: Served, one: Client, number: int = 1, **fields: Any) -> None:
    """Send a request and see it wait as the so many-th."""
    one.send(request(chat(**fields)))
    await until(lambda: queued(served) == number)


async def refused(served: Served, status: int = 503, **fields: Any) -> Reply:
    reply = await ask(served.port, request(chat(**fields)))
    assert reply.status == status
    return reply


async def test_they_go_on_in_the_order_in_which_they_came() -> None:
    async with scripted(answers) as server, serving([waiting_model(server.port)], up=False) as served:
        comes_in(served)
        async with client(served.port) as a, client(served.port) as b, client(served.port) as c:
            for number, one in enumerate((b, a, c), 1):
                await enter(served, one, number, seed=number)
            assert served.value("inflight_requests", "tiny") == served.context.inflight.in_flight == 3
            assert served.total("server_inflight") == 0 and server.requests == []
            is_up(served)
            assert [(await one.reply()).status for one in (a, b, c)] == [200, 200, 200]
        assert [each.json["seed"] for each in server.requests] == [1, 2, 3]
        await until(lambda: served.in_flight == 0)
        assert queued(served) == 0
        name, since = served.asked[0]
        assert name == "tiny" and since is not None and time.monotonic() - since < 60
        assert served.asked[-1] == ("tiny", None) and (await ask(served.port, request())).status == 200


async def test_time_in_the_queue_is_written_down_and_is_not_the_gateways_own() -> None:
    async with scripted(answers) as server, serving([waiting_model(server.port)], up=False) as served, client(served.port) as one:
        comes_in(served)
        await enter(served, one)
        await asyncio.sleep(0.3)
        is_up(served)
        await one.reply()
        await until(lambda: served.in_flight == 0)
        [record] = served.context.records
        assert 0.3 <= record.queued <= record.duration
        assert record.overhead <= record.duration - record.queued


async def test_no_more_wait_than_there_is_room_for_and_the_rest_is_told_when_to_come_back() -> None:
    async with scripted(answers) as server, serving([waiting_model(server.port)], up=False) as served:
        due = comes_in(served, 57.5)
        async with client(served.port) as a, client(served.port) as b, client(served.port) as c:
            for number, one in enumerate((a, b, c), 1):
                await enter(served, one, number)
            latest = told_now(due)
            reply = await refused(served)
            assert reply.error["code"] == "model_loading" and told_now(due) <= int(reply.headers["retry-after"]) <= latest
            b.leave()
            await until(lambda: queued(served) == 2)
            async with client(served.port) as d:
                await enter(served, d, 3)
        await until(lambda: queued(served) == 0)
        assert served.asked[-1][1] is not None, "who was told to come back still wants the model"
        is_up(served)
        assert served.asked[-1][1] is None


async def test_who_has_waited_long_enough_is_told_when_to_come_back() -> None:
    async with (
        scripted(answers) as server,
        serving([waiting_model(server.port, queue=Queue(3, 0.3))], up=False) as served,
        client(served.port) as one,
    ):
        due, began = comes_in(served, 60.5), time.monotonic()
        latest = told_now(due)
        reply = await one.ask(request())
        assert time.monotonic() - began >= 0.3
        assert (reply.status, reply.error["code"]) == (503, "model_loading")
        assert told_now(due) <= int(reply.headers["retry-after"]) <= latest
        await until(lambda: served.in_flight == 0)
        comes_in(served, -5.0)
        assert (await refused(served)).headers["retry-after"] == "1"


async def test_a_model_without_a_queue_says_when_it_comes() -> None:
    async with scripted(answers) as server, serving([model(server.port)], up=False) as served:
        due = comes_in(served, 57.5)
        latest = told_now(due)
        reply = await refused(served)
        assert reply.error["code"] == "model_loading" and told_now(due) <= int(reply.headers["retry-after"]) <= latest


@pytest.mark.parametrize("way", ["reset", "close"])
@pytest.mark.parametrize("fields", [{}, {"stream": True}])
async def test_a_client_that_leaves_frees_its_place_at_once(way: str, fields: dict[str, Any]) -> None:
    async with scripted(answers) as server, serving([waiting_model(server.port)], up=False) as served, client(served.port) as one:
        comes_in(served)
        await enter(served, one, **fields)
        one.leave() if way == "reset" else one.writer.close()
        await until(lambda: served.in_flight == 0)
        assert queued(served) == 0 and served.asked[-1] == ("tiny", None)
        assert served.value("requests_total", "tiny", "/v1/chat/completions", "499") == 1
        is_up(served)
        await asyncio.sleep(0.05)
        assert server.requests == []


async def test_a_client_that_uploads_and_leaves_is_seen() -> None:
    body = (
        b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\ntiny\r\n'
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + bytes(3 << 20)
    )
    head = (
        f"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        f"content-type: multipart/form-data; boundary=b\r\ncontent-length: {len(body) + 9}\r\n\r\n"
    )
    async with scripted(answers) as server, serving([waiting_model(server.port)], up=False) as served, client(served.port) as one:
        comes_in(served)
        one.send(head.encode() + body)
        await until(lambda: queued(served) == 1)
        await one.writer.drain()
        one.leave()
        await until(lambda: served.in_flight == 0)
        assert queued(served) == 0


async def test_nobody_waits_for_what_does_not_come() -> None:
    async with scripted(answers) as server, serving([waiting_model(server.port)], up=False) as served, client(served.port) as one:
        is_down(served)
        assert (await refused(served)).error["code"] == "no_healthy_server"
        comes_in(served)
        await enter(served, one)
        is_down(served)
        reply = await one.reply()
        assert (reply.status, reply.error["code"]) == (503, "no_healthy_server")
        assert served.asked[-1] == ("tiny", None)


async def test_the_end_of_the_gateway_is_told() -> None:
    async with scripted(answers) as server, serving([waiting_model(server.port)], up=False) as served, client(served.port) as one:
        comes_in(served)
        await enter(served, one)
        served.context.queues.close()
        reply = await one.reply()
        assert (reply.status, reply.error["code"]) == (503, "draining")
        assert (await refused(served)).error["code"] == "draining"


async def test_the_servers_are_those_of_the_newest_generation() -> None:
    async with scripted(answers) as server, serving([waiting_model(queue=QUEUE)], up=False) as served, client(served.port) as one:
        comes_in(served)
        await enter(served, one)
        spec = ServerSpec(SERVER, Address(port=server.port), "tiny")
        served.worker.apply_snapshot(replace(served.worker.snapshot, version=2, models=(waiting_model(server.port),)))
        assert served.worker.snapshot.models[0].servers == (spec,)
        is_up(served)
        assert (await one.reply()).status == 200


async def test_a_model_that_is_gone_is_not_waited_for() -> None:
    async with serving([waiting_model(queue=QUEUE)], up=False) as served, client(served.port) as one:
        comes_in(served)
        await enter(served, one)
        served.worker.apply_snapshot(replace(served.worker.snapshot, version=2, models=()))
        reply = await one.reply()
        assert (reply.status, reply.error["code"]) == (503, "no_healthy_server")
        await until(lambda: served.in_flight == 0)


async def test_a_server_that_goes_again_at_once_was_there_for_those_who_waited() -> None:
    async with scripted(answers) as server, serving([waiting_model(server.port)], up=False) as served:
        comes_in(served)
        async with client(served.port) as a, client(served.port) as b, client(served.port) as c:
            await enter(served, a, 1, seed=1)
            await enter(served, b, 2, seed=2)
            is_up(served)
            assert queued(served) == 0
            comes_in(served)
            await enter(served, c, 1, seed=3)
            assert [(await one.reply()).status for one in (a, b)] == [200, 200]
            assert queued(served) == 1
            is_up(served)
            assert (await c.reply()).status == 200
        assert [each.json["seed"] for each in server.requests] == [1, 2, 3]


async def test_who_comes_from_the_servers_of_before_does_not_wait_for_those_of_now() -> None:
    """A fallback was chosen when the request came, and has got another server since."""
    go_on = asyncio.Event()

    async def held(talk: Conversation) -> None:
        await go_on.wait()
        await talk.respond(COMPLETION)

    async with scripted(held) as slow, scripted(answers) as server:
        one, two = (model(*ports, identity="other", max_inflight=1, queue=QUEUE) for ports in ((slow.port,), (slow.port, server.port)))
        main = waiting_model(server.port, fallbacks=("other",))
        async with serving([one, main], up=False) as served, client(served.port) as first, client(served.port) as second:
            due = time.monotonic() + 3600
            served.worker.apply_health(Health({SERVER: Condition.LOADING, "other#0": Condition.UP}, {}, {"tiny": due}))
            first.send(request(chat(model="other")))
            await until(lambda: slow.requests)
            await enter(served, second)
            served.worker.apply_snapshot(replace(served.worker.snapshot, version=2, models=(two, main)))
            served.worker.apply_health(
                Health({SERVER: Condition.LOADING, "other#0": Condition.UP, "other#1": Condition.UP}, {}, {"tiny": due})
            )
            is_down(served)  # nobody expects it any more
            async with asyncio.timeout(30):
                assert (await second.reply()).status == 200
            go_on.set()
            assert (await first.reply()).status == 200
            await until(lambda: served.in_flight == 0)


# Comments that keep a stream open

COMMENT = b": keep-alive\n\n"


async def test_comments_while_a_stream_waits_and_then_its_events_as_they_are() -> None:
    async with scripted(streams) as server, serving([waiting_model(server.port, keepalive=0.1)], up=False) as served:
        comes_in(served)
        async with client(served.port) as one, client(served.port) as plain:
            await enter(served, one, 1, stream=True)
            await enter(served, plain, 2)
            await one.reader.readuntil(b"text/event-stream")
            await one.reader.readuntil(COMMENT + b"\r\n")
            await one.reader.readuntil(COMMENT + b"\r\n")
            is_up(served)
            rest = await one.reader.readuntil(b"0\r\n\r\n")
            assert b"".join(rest.split(b"\r\n")[1::2]).replace(COMMENT, b"") == b"".join(SHOWN)
            assert (await plain.reply()).status == 200, "one that is no stream has had no comment"


@pytest.mark.parametrize("answer", ["error", "json", "none"])
async def test_an_error_after_a_comment_is_told_in_the_stream(answer: str) -> None:
    async def script(talk: Conversation) -> None:
        if answer == "error":
            await talk.respond(b'{"error":{"message":"no","type":"BadRequestError","param":"seed","code":400}}', "400 Bad Request")
        else:
            await talk.respond(COMPLETION)

    async with (
        scripted(script) as server,
        serving([waiting_model(server.port, keepalive=0.1)], up=False) as served,
        client(served.port) as one,
    ):
        comes_in(served)
        await enter(served, one, stream=True)
        await until(lambda: any(each.is_event_stream for each in _current(served)))
        is_down(served) if answer == "none" else is_up(served)
        reply = await one.reply()
        events = [event for event in reply.body.split(b"\n\n") if event and event != COMMENT.strip()]
        assert (reply.status, reply.whole, events[-1]) == (200, True, b"data: [DONE]")
        code = orjson.loads(events[0].removeprefix(b"data: "))["error"]["code"]
        assert code == {"error": "invalid_value", "json": "upstream_disconnected", "none": "no_healthy_server"}[answer]
        await until(lambda: served.in_flight == 0)
        assert served.value("incomplete_total", "tiny", "upstream") == 1


@pytest.mark.parametrize("status", ["200 OK", "400 Bad Request"])
async def test_no_comment_comes_before_an_answer_that_is_no_stream(status: str) -> None:
    """Its head has come and its body is slow: a comment would begin an answer, and this one would be a second."""
    body = b'{"object":"text_completion","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":"stop"}]}'

    async def script(talk: Conversation) -> None:
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status.encode(), len(body))
        assert len(served.context.deadlines) == 2, "the answer's, and the comments'"
        await talk.write(head + body[:9])
        await until(lambda: len(served.context.deadlines) == 1)
        await talk.write(body[9:])

    async with scripted(script) as server, serving([waiting_model(server.port, keepalive=3600.0)]) as served, client(served.port) as one:
        reply = await one.ask(request({"model": "tiny", "prompt": "x", "stream": True}))
        assert (reply.status, reply.headers["content-type"]) == (int(status[:3]), "application/json")
        assert orjson.loads(reply.body).keys() & {"error", "choices"}
        await until(lambda: served.in_flight == 0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_an_error_that_comes_first_is_told_though_a_comment_comes_before_its_end(path: str) -> None:
    go_on = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(b'data: {"error":{"message":"no","type":"BadRequestError","param":"seed","code":400}}\n\n')
        await go_on.wait()
        await talk.chunk(DONE)
        await talk.end_stream()

    async with scripted(script) as server, serving([waiting_model(server.port, keepalive=0.1)]) as served, client(served.port) as one:
        one.send(request(chat(stream=True, input="x"), path))
        await one.reader.readuntil(COMMENT + b"\r\n")
        go_on.set()
        rest = b"".join((await one.reader.readuntil(b"0\r\n\r\n")).split(b"\r\n")[1::2]).replace(COMMENT, b"")
        error, *more = [orjson.loads(event.partition(b"data: ")[2]) for event in rest.removesuffix(DONE).split(b"\n\n")[:-1]]
        assert more == [] and rest.endswith(DONE) is (path == "/v1/chat/completions")
        assert (error.get("error", error)["code"], error.get("sequence_number", 0)) == ("invalid_value", 0)
        await until(lambda: served.in_flight == 0)
        assert (served.context.records[0].code, served.context.records[0].incomplete) == ("invalid_value", "upstream")


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/embeddings"])
async def test_no_comments_where_nothing_is_ever_streamed(path: str) -> None:
    """Some send the body of another route there, with its ``stream``, which vLLM ignores."""

    async def script(talk: Conversation) -> None:
        await asyncio.sleep(1)  # some comments long
        await talk.respond(b'{"input_tokens":3}')

    async with scripted(script) as server, serving([waiting_model(server.port, keepalive=0.1)]) as served:
        reply = await ask(served.port, request(chat(stream=True, input="x"), path))
        assert (reply.status, reply.headers["content-type"], reply.body) == (200, "application/json", b'{"input_tokens":3}')


async def test_comments_in_a_silent_stream_stand_between_its_events() -> None:
    go_on = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(ROLE)
        await talk.chunk(HELLO[:20])  # half an event: what follows is not to be in it
        await go_on.wait()
        await talk.chunk(HELLO[20:] + STOP + DONE)
        await talk.end_stream()

    async with scripted(script) as server, serving([waiting_model(server.port, keepalive=0.1)]) as served, client(served.port) as one:
        one.send(request(chat(stream=True)))
        await one.reader.readuntil(ROLE)
        await one.reader.readuntil(COMMENT)
        go_on.set()
        rest = b"".join((await one.reader.readuntil(b"0\r\n\r\n")).split(b"\r\n")[1:])
        assert HELLO in rest and rest.endswith(b"0") and DONE in rest
        await until(lambda: served.in_flight == 0)


async def test_openais_client_understands_both() -> None:
    async with scripted(streams) as server, serving([waiting_model(server.port, keepalive=0.1)], up=False) as served:
        sdk = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0)
        async with sdk:
            for word, fails in ((is_up, False), (is_down, True)):
                comes_in(served)
                task = asyncio.create_task(_text(sdk))
                await until(
                    lambda: any(isinstance(each.current, ClientRequest) and each.current.is_event_stream for each in served.connections)
                )
                word(served)
                if fails:
                    with pytest.raises(openai.APIError, match="No server of this model is healthy"):
                        await task
                else:
                    assert "你好" in await task
        await until(lambda: served.in_flight == 0)


async def _text(sdk: openai.AsyncOpenAI) -> str:
    stream = await sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}], stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
