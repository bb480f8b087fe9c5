"""A name that several models serve: by weight, sticky or not, with the facts of the model that serves the request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from typing import Any

import httpx2
import orjson
import pytest

from gateway.ledger.journal import Journal
from gateway.ledger.recorder import Recorder
from gateway.ledger.row import decode, frames
from gateway.snapshot.link import Health
from gateway.snapshot.snapshot import Allowance, Limits, Model
from gateway.telemetry.access_log import line
from gateway.telemetry.metrics import Series, sum_series
from tests.support.forms import read
from tests.support.money import price
from tests.support.running import Served, key, model, serving, until
from tests.support.scripted import Conversation, Scripted, scripted
from tests.support.wire import COMPLETION, SHOWN, chat, client, request, request_once
from upstream.balancing.server import Condition

HEADER = "x-vllm-gateway-model"


async def responds(talk: Conversation) -> None:
    if talk.request.json.get("stream"):
        await talk.begin_stream()
        await talk.chunk(b"".join(SHOWN))
        await talk.end_stream()
    else:
        await talk.respond(COMPLETION)


def split(sticky: str | None = None, **weights: int) -> Model:
    return Model("chat", (), aliases=("c",), mounts=("/i/chat",), split=tuple(weights.items()), sticky=sticky)


@asynccontextmanager
async def canary(
    named: Model, *keys: Any, more: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Served, Scripted, Scripted]]:
    """Serve the models ``a`` and ``b`` and their split. ``more``: settings of ``b``."""
    async with scripted(responds) as first, scripted(responds) as second:
        models = [model(first.port, identity="a"), model(second.port, identity="b", **(more or {})), named]
        async with serving(models, keys, **settings) as served:
            yield served, first, second


async def responders(served: Served, times: int, *extra: str, token: str | None = None) -> list[str]:
    """Send requests for the split, and return the models that the responses name."""
    found = []
    async with client(served.port) as one:
        for _ in range(times):
            body = request(chat(model="chat"), extra=extra, **({} if token is None else {"token": token}))
            reply = await one.request(body)
            assert reply.status == 200 and reply.body == COMPLETION
            found.append(reply.headers[HEADER])
    return found


async def test_each_request_is_drawn_and_counts_for_the_model_that_served_it() -> None:
    async with canary(split(a=1, b=1)) as (served, first, second):
        assert Series("split_requests_total", ("chat", "b")) in sum_series([served.counters]), "there from the start, with 0"
        counts = Counter(await responders(served, 60))
        assert counts["a"] > 5 and counts["b"] > 5 and counts.total() == 60
        assert (len(first.requests), len(second.requests)) == (counts["a"], counts["b"])
        assert {each.json["model"] for each in second.requests} == {"b"}
        await until(lambda: served.in_flight == 0)
        for name in "ab":
            assert served.value("split_requests_total", "chat", name) == counts[name]
            assert served.value("requests_total", name, "/v1/chat/completions", "200") == counts[name]
        assert served.value("requests_total", "chat") == 0
        written = [orjson.loads(line(record)) for record in served.context.records]
        assert Counter((each["split"], each["model"], each["server"]) for each in written) == {
            ("chat", name, f"{name}#0"): counts[name] for name in "ab"
        }


async def test_a_request_for_a_model_of_the_split_itself_is_not_divided() -> None:
    async with canary(split(a=1, b=1)) as (served, first, second):
        for _ in range(8):
            reply = await request_once(served.port, request(chat(model="a")))
            assert reply.status == 200 and HEADER not in reply.headers
        assert (len(first.requests), len(second.requests)) == (8, 0)
        assert served.total("split_requests_total") == 0
        assert all(b'"split"' not in line(record) for record in served.context.records)


@pytest.mark.parametrize("name", ["chat", "c", None])
async def test_by_its_id_an_alias_a_mount_or_as_the_only_model_of_a_key(name: str | None) -> None:
    async with canary(split(a=0, b=1), key(models=("chat",))) as (served, _, second):
        for body, path in ((chat(model=name), ""), (chat(model=name), "/i/chat")):
            reply = await request_once(served.port, request(body, f"{path}/v1/chat/completions"))
            assert (reply.status, reply.headers[HEADER]) == (200, "b")
        assert len(second.requests) == 2
        stream = await request_once(served.port, request(chat(model=name, stream=True)))
        assert (stream.status, stream.body, stream.headers[HEADER]) == (200, b"".join(SHOWN), "b")


async def test_a_default_model_may_be_a_split() -> None:
    async with canary(split(a=0, b=1), default_model="c") as (served, _, _):
        reply = await request_once(served.port, request({"messages": chat()["messages"]}))
        assert (reply.status, reply.headers[HEADER]) == (200, "b")


async def test_the_key_needs_the_name_and_not_the_models() -> None:
    allowed, other = key(models=("chat",)), key("other", "sk-other", models=("a", "b"))
    async with canary(split(a=1, b=1), allowed, other) as (served, _, _):
        assert len(await responders(served, 3)) == 3
        assert (await request_once(served.port, request(chat(model="a")))).status == 404
        refused = await request_once(served.port, request(chat(model="chat"), token="sk-other"))
        assert (refused.status, refused.error["code"]) == (404, "model_not_found") and HEADER not in refused.headers
        async with httpx2.AsyncClient(base_url=served.url, headers={"authorization": "Bearer sk-a-test-key"}) as http:
            listed = (await http.get("/v1/models")).json()["data"]
        assert [(each["id"], each.get("root")) for each in listed] == [("chat", None), ("c", "chat")]


async def test_all_requests_of_a_key_go_to_the_same_model() -> None:
    keys = [key(f"team-{number}", f"sk-{number}") for number in range(40)]
    async with canary(split("key", a=1, b=1), *keys) as (served, _, _):
        found = [await responders(served, 3, token=f"sk-{number}") for number in range(40)]
        assert all(len(set(models)) == 1 for models in found)
        assert 5 < sum(models[0] == "a" for models in found) < 35


async def test_all_requests_of_a_session_go_to_the_same_model() -> None:
    async with canary(split("session", a=1, b=1)) as (served, _, _):
        found = [await responders(served, 2, f"x-session-id: s-{number}") for number in range(40)]
        assert all(len(set(models)) == 1 for models in found)
        assert 5 < sum(models[0] == "a" for models in found) < 35
        named = [
            (await request_once(served.port, request(chat(model="chat", metadata={"session_id": f"s-{number}"})))).headers[HEADER]
            for number in range(40)
        ]
        assert named == [models[0] for models in found], "in the body as well"
        assert set(await responders(served, 60)) == {"a", "b"}, "without a session, each is drawn"


async def test_a_form_is_divided_too() -> None:
    async def transcribes(talk: Conversation) -> None:
        await talk.respond(b'{"text":"a"}')

    body = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nchat\r\n--b--\r\n'
    head = request(b"", "/v1/audio/transcriptions").replace(b"application/json", b"multipart/form-data; boundary=b")
    async with scripted(transcribes) as server, serving([model(server.port, identity="b"), split(b=1)]) as served:
        reply = await request_once(served.port, head.replace(b"content-length: 0", b"content-length: %d" % len(body)) + body)
        assert (reply.status, reply.headers[HEADER]) == (200, "b")
        assert read(server.requests[0].header("content-type"), server.requests[0].body) == [("model", "b")]


async def test_changed_weights_apply_to_the_next_request_and_to_no_open_one() -> None:
    release = asyncio.Event()

    async def waits(talk: Conversation) -> None:
        await release.wait()
        await talk.respond(COMPLETION)

    async with scripted(waits) as first, scripted(responds) as second:
        models = [model(first.port, identity="a"), model(second.port, identity="b")]
        async with serving([*models, split("key", a=1, b=0)]) as served, client(served.port) as open_one:
            open_one.send(request(chat(model="chat")))
            await until(lambda: len(first.requests) == 1)
            served.worker.apply_snapshot(replace(served.worker.snapshot, version=2, models=(*models, split("key", a=0, b=1))))
            served.worker.apply_health(Health({"a#0": Condition.UP, "b#0": Condition.UP}, {}))
            assert await responders(served, 2) == ["b", "b"]
            release.set()
            reply = await open_one.reply()
            assert (reply.status, reply.headers[HEADER]) == (200, "a")


@pytest.fixture
def journal() -> Iterator[Journal]:
    with closing(Journal.create("test")) as made:
        yield made


async def test_the_model_that_serves_decides_about_policy_price_and_limits(journal: Journal) -> None:
    limited = key(models=("chat",), allowances=(Allowance("key team-a for b", Limits(requests_per_minute=2), ("b",)),))
    more = {"overrides": {"seed": 3}, "price": price(5.0, 5.0)}
    async with canary(split(a=0, b=1), limited, more=more, ledger=Recorder(journal)) as (served, _, second):
        assert await responders(served, 2) == ["b", "b"]
        reply = await request_once(served.port, request(chat(model="chat")))
        assert (reply.status, reply.headers[HEADER]) == (429, "b"), "a limit for b counts"
        assert [each.json.get("seed") for each in second.requests] == [3, 3]
        await until(lambda: served.in_flight == 0)
        rows = [decode(payload) for payload in frames(journal.read().data)]
        assert [(row.model, row.status, row.price) for row in rows] == [("b", status, more["price"]) for status in (200, 200, 429)]


async def test_a_fallback_of_the_chosen_model_serves() -> None:
    async with canary(split(a=0, b=1), key(models=("chat",)), more={"fallbacks": ("a",)}) as (served, first, _):
        served.worker.apply_health(Health({"b#0": Condition.DOWN}, {}, {}))
        reply = await request_once(served.port, request(chat(model="chat")))
        assert reply.status == 200 and len(first.requests) == 1
        assert (reply.headers[HEADER], reply.headers["x-vllm-gateway-fallback"]) == ("a", "a")
        assert served.value("split_requests_total", "chat", "a") == served.value("fallbacks_total", "b", "a") == 1
        assert served.value("split_requests_total", "chat", "b") == 0
        (record,) = served.context.records
        assert (record.split, record.requested_model, record.model) == ("chat", "b", "a")
        assert (await request_once(served.port, request(chat(model="a")))).status == 404, "a model of the split, and nothing else"


async def test_an_error_names_the_model_that_was_chosen() -> None:
    async with canary(split(a=0, b=1)) as (served, _, _):
        served.worker.apply_health(Health({"b#0": Condition.DOWN}, {}, {}))
        reply = await request_once(served.port, request(chat(model="chat")))
        assert (reply.status, reply.error["code"], reply.headers[HEADER]) == (503, "no_healthy_server", "b")
        assert served.value("requests_total", "b", "/v1/chat/completions", "503") == 1
