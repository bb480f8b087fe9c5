"""A model that cannot take a request, and others that may answer in its place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import orjson
import pytest

from gateway.client.keepalive import COMMENT
from gateway.snapshot.link import Health
from gateway.snapshot.snapshot import BodyRules, Model, Queue
from gateway.telemetry.access_log import line
from gateway.telemetry.metrics import Series, sum_series
from tests.support.forms import read
from tests.support.ports import refusing, silent
from tests.support.running import Served, key, model, serving, until
from tests.support.scripted import Conversation, Scripted, scripted
from tests.support.wire import COMPLETION, SHOWN, Reply, chat, client, request, request_once
from upstream.balancing.server import Condition
from upstream.http.deadlines import Timeouts

FALLBACK_HEADER = "x-vllm-gateway-fallback"
DOWN_SERVER = "tiny#0"


async def responses(talk: Conversation) -> None:
    if talk.request.json.get("stream"):
        await talk.begin_stream()
        await talk.chunk(b"".join(SHOWN))
        await talk.end_stream()
    else:
        await talk.respond(COMPLETION)


def pair(server: Scripted, spare: Scripted) -> list[Model]:
    """A model, and its fallback."""
    return [model(server.port, fallbacks=("other",)), model(spare.port, identity="other")]


def down(served: Served, *models: Model, expected: Mapping[str, float] | None = None) -> None:
    """Control has said that the servers of these are down; ``expected``: when a model may be up."""
    names = [spec.name for each in models for spec in each.servers]
    served.worker.apply_health(Health(dict.fromkeys(names, Condition.DOWN), {}, expected or {}))


async def test_a_fallback_serves_for_a_model_that_is_down_and_is_named() -> None:
    async with scripted(responses) as server:
        requested = model(1, fallbacks=("o",), defaults={"top_k": 1})
        other = model(server.port, identity="other", served="inside", aliases=("o",), defaults={"top_p": 0.5}, overrides={"seed": 3})
        async with serving([requested, other]) as served:
            down(served, requested)
            assert Series("fallbacks_total", ("tiny", "other")) in sum_series([served.counters]), "there from the start, with 0"
            reply = await request_once(served.port, request(chat(extra_body={"min_p": 0.1})))
            assert (reply.status, reply.body, reply.headers[FALLBACK_HEADER]) == (200, COMPLETION, "other")
            messages = chat()["messages"]
            assert server.requests[0].json == {"model": "inside", "messages": messages, "min_p": 0.1, "top_p": 0.5, "seed": 3}
            stream = await request_once(served.port, request(chat(stream=True)))
            assert (stream.status, stream.body, stream.headers[FALLBACK_HEADER]) == (200, b"".join(SHOWN), "other")
            assert served.value("requests_total", "other", "/v1/chat/completions", "200") == 2
            assert served.value("requests_total", "tiny", "/v1/chat/completions", "200") == 0
            assert served.value("fallbacks_total", "tiny", "other") == 2
            assert served.value("tokens_total", "team-a", "other", "prompt") == 3
            await until(lambda: served.in_flight == 0)
            written = [orjson.loads(line(record)) for record in served.context.records]
            assert [(each["model"], each["requested_model"], each["server"]) for each in written] == [("other", "tiny", "other#0")] * 2


async def test_no_fallback_is_named_while_the_model_is_up() -> None:
    async with scripted(responses) as server, scripted(responses) as spare, serving(pair(server, spare)) as served:
        reply = await request_once(served.port, request())
        assert reply.status == 200 and FALLBACK_HEADER not in reply.headers
        assert (len(server.requests), len(spare.requests)) == (1, 0)
        assert b"requested_model" not in line(served.context.records[0])


async def test_in_order_and_only_where_the_key_may_go() -> None:
    async with scripted(responses) as first, scripted(responses) as second:
        models = [
            model(1, fallbacks=("forbidden", "down", "second")),
            model(first.port, identity="forbidden"),
            model(1, identity="down"),
            model(second.port, identity="second"),
        ]
        async with serving(models, [key(models=("tiny", "down", "second"))]) as served:
            down(served, models[0], models[2])
            reply = await request_once(served.port, request())
            assert (reply.status, reply.headers[FALLBACK_HEADER], len(first.requests)) == (200, "second", 0)
            assert served.value("fallbacks_total", "tiny", "second") == 1


async def test_if_no_fallback_can_serve_the_error_is_that_of_the_requested_model() -> None:
    with refusing() as port:
        requested, other = model(1, fallbacks=("other",)), model(port, identity="other")
        async with serving([requested, other]) as served:
            down(served, requested)
            reply = await request_once(served.port, request())
            assert (reply.status, reply.error["code"]) == (503, "no_healthy_server") and FALLBACK_HEADER not in reply.headers
            assert served.value("requests_total", "tiny", "/v1/chat/completions", "503") == 1
            assert served.value("server_failures_total", "other", "other#0", "connect") == 1
            assert served.total("fallbacks_total") == 0
            await until(lambda: served.in_flight == 0)


async def test_servers_that_refuse_are_counted_for_their_own_model() -> None:
    with refusing() as port:
        async with (
            scripted(responses) as server,
            serving([model(port, port, fallbacks=("other",)), model(server.port, identity="other")]) as served,
        ):
            reply = await request_once(served.port, request())
            assert (reply.status, reply.headers[FALLBACK_HEADER]) == (200, "other")
            assert [served.value("server_failures_total", "tiny", f"tiny#{n}", "connect") for n in range(2)] == [1, 1]
            assert served.context.records[0].retries == 1


async def test_a_server_that_may_have_run_it_is_the_last() -> None:
    async def dies(talk: Conversation) -> None:
        talk.writer.close()

    async with scripted(dies) as server, scripted(responses) as spare, serving(pair(server, spare)) as served:
        reply = await request_once(served.port, request())
        assert (reply.status, len(spare.requests)) == (502, 0)


@pytest.mark.parametrize("status", ["503 Service Unavailable", "429 Too Many Requests", "404 Not Found"])
async def test_a_servers_own_error_is_final(status: str) -> None:
    async def refuses(talk: Conversation) -> None:
        await talk.respond(b'{"error":{"message":"no","type":"x","param":null,"code":1}}', status)

    async with scripted(refuses) as server, scripted(responses) as spare, serving(pair(server, spare)) as served:
        reply = await request_once(served.port, request())
        assert (reply.status, len(spare.requests)) == (int(status[:3]), 0)


async def test_after_the_wait_for_a_model_that_does_not_come_up() -> None:
    requested = model(1, fallbacks=("other",), queue=Queue(size=1, wait=0.3))
    async with scripted(responses) as server, serving([requested, model(server.port, identity="other")]) as served:
        down(served, requested, expected={"tiny": time.monotonic() + 60})
        async with client(served.port) as waiting, client(served.port) as late:
            waiting.send(request())
            await until(lambda: served.value("queued_requests", "tiny") == 1 or served.context.records)  # or its wait is over already
            reply: Reply = await late.request(request())
            assert (reply.status, reply.headers[FALLBACK_HEADER]) == (200, "other"), "the queue is full"
            reply = await asyncio.wait_for(waiting.reply(), 20)
            assert (reply.status, reply.headers[FALLBACK_HEADER]) == (200, "other")
        await until(lambda: served.in_flight == 0)
        assert served.context.records[-1].queued >= 0.3


async def test_an_instance_url_serves_its_model_alone() -> None:
    async with scripted(responses) as server:
        requested = model(1, fallbacks=("other",), mounts=("/i/1",))
        async with serving([requested, model(server.port, identity="other")]) as served:
            down(served, requested)
            reply = await request_once(served.port, request(path="/i/1/v1/chat/completions"))
            assert (reply.status, reply.error["code"], len(server.requests)) == (503, "no_healthy_server", 0)


async def test_a_form_goes_there_as_well() -> None:
    async def transcribes(talk: Conversation) -> None:
        await talk.respond(b'{"text":"a"}')

    parts = [b'name="model"\r\n\r\ntiny', b'name="file"; filename="a.wav"\r\n\r\n' + b"x" * 300_000]
    body = b"".join(b"--b\r\ncontent-disposition: form-data; %b\r\n" % part for part in parts) + b"--b--\r\n"
    head = request(b"", "/v1/audio/transcriptions").replace(b"application/json", b"multipart/form-data; boundary=b")
    with refusing() as port:
        async with (
            scripted(transcribes) as server,
            serving([model(port, fallbacks=("other",)), model(server.port, identity="other", served="in")]) as served,
        ):
            reply = await request_once(served.port, head.replace(b"content-length: 0", b"content-length: %d" % len(body)) + body)
            assert (reply.status, reply.headers[FALLBACK_HEADER]) == (200, "other")
            fields = read(server.requests[0].header("content-type"), server.requests[0].body)
            assert fields == [("model", "in"), ("file", ("a.wav", None, b"x" * 300_000))]


async def test_a_model_that_queues_all_requests_is_left_before_others() -> None:
    with silent() as port:
        async with scripted(responses) as server:
            requested = model(port, fallbacks=("other",), timeouts=Timeouts(connect=0.2))
            async with serving([requested, model(server.port, identity="other")]) as served:
                reply = await asyncio.wait_for(request_once(served.port, request()), 20)
                assert (reply.status, reply.headers[FALLBACK_HEADER]) == (200, "other")


async def test_one_whose_policy_refuses_the_request_is_passed_over() -> None:
    lenient = BodyRules(allow=("chat_template",))
    async with scripted(responses) as server:
        requested = model(1, fallbacks=("strict", "other"), body=lenient)
        strict = model(server.port, identity="strict")
        other = model(server.port, identity="other", body=lenient)
        async with serving([requested, strict, other]) as served:
            down(served, requested)
            reply = await request_once(served.port, request(chat(chat_template="x")))
            assert (reply.status, reply.headers[FALLBACK_HEADER]) == (200, "other")
            down(served, requested, other)
            reply = await request_once(served.port, request(chat(chat_template="x")))
            assert (reply.status, reply.error["code"]) == (503, "no_healthy_server")
            assert FALLBACK_HEADER not in reply.headers, "nobody could take it: it is as if no other had been asked"


async def test_comments_continue_while_a_fallback_is_silent() -> None:
    """The first comment has started the response while the requested model hung. The fallback gets no second timer."""
    release = asyncio.Event()

    async def waits(talk: Conversation) -> None:
        await release.wait()
        await responses(talk)

    with silent() as port:
        async with scripted(waits) as server:
            requested = model(port, fallbacks=("other",), keepalive=0.05, timeouts=Timeouts(connect=0.5))
            async with serving([requested, model(server.port, identity="other", keepalive=0.05)]) as served, client(served.port) as one:
                one.send(request(chat(stream=True)))
                reply = asyncio.create_task(one.reply())
                await until(lambda: one.begun.is_set() and server.requests)
                release.set()
                pieces = (await reply).pieces
                assert b"".join(piece for piece in pieces if piece != COMMENT) == b"".join(SHOWN) and pieces[0] == COMMENT
                await until(lambda: served.in_flight == 0)


async def test_a_large_body_goes_there_as_well() -> None:
    content = "x" * 200_000
    async with scripted(responses) as server:
        requested = model(1, fallbacks=("other",), defaults={"top_k": 1})
        async with serving([requested, model(server.port, identity="other", served="in", overrides={"seed": 3})]) as served:
            down(served, requested)
            messages = [{"role": "user", "content": content}]
            reply = await request_once(served.port, request(chat(messages=messages)))
            assert (reply.status, reply.headers[FALLBACK_HEADER]) == (200, "other")
            assert server.requests[0].json == {"model": "in", "messages": messages, "seed": 3}
            await until(lambda: served.in_flight == served.context.memory.held == 0)
