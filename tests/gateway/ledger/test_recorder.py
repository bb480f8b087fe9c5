"""The row that a worker writes for each request, however the request ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest

from gateway.api.settlement import BYTES_PER_TOKEN, Method
from gateway.ledger.journal import Journal
from gateway.ledger.recorder import Recorder
from gateway.ledger.row import LOST, UsageRow, decode, frames
from gateway.limits.decision import DAY
from gateway.limits.windows import SPENT
from gateway.snapshot.money import Price
from gateway.snapshot.snapshot import Allowance, Budget, Limits, Tracing
from tests.support.collector import collector
from tests.support.money import price
from tests.support.running import KEY, Served, key, model, serving, until
from tests.support.scripted import Conversation, Script, scripted
from tests.support.wire import COMPLETION, DONE, EVENTS, HELLO, ROLE, STOP, chat, client, event, request, request_once
from upstream.http.deadlines import Timeouts

SENT = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
PROMPT = len(orjson.dumps(SENT)) // BYTES_PER_TOKEN
"""The estimated tokens of the prompt, with the fields that the gateway adds."""
TERMS: dict[str, Any] = {"team": "research", "labels": {"cost_center": "17"}}


@pytest.fixture
def journal() -> Iterator[Journal]:
    made = Journal.create("test", 1 << 16, 8)
    yield made
    made.close()


def rows(journal: Journal) -> list[UsageRow]:
    reading = journal.read()
    journal.release(reading)
    return [decode(payload) for payload in frames(reading.data)]


async def _completion(talk: Conversation) -> None:
    await talk.respond(COMPLETION)


async def _stream(talk: Conversation) -> None:
    await talk.begin_stream()
    for each in EVENTS:
        await talk.chunk(each)
    await talk.end_stream()


async def _endless(talk: Conversation) -> None:
    """Send a first event and three more, each separately, and then nothing."""
    await talk.begin_stream()
    for each in (ROLE, HELLO, HELLO, HELLO):
        await talk.chunk(each)
        await asyncio.sleep(0.05)
    await talk.closed_by_peer()


async def test_a_request_has_a_row_with_all_facts(journal: Journal) -> None:
    async with (
        scripted(_completion) as server,
        serving([model(server.port, price=price(0.5, 2.0))], [key(**TERMS)], ledger=Recorder(journal)) as served,
    ):
        reply = await request_once(served.port, request(chat(user="u", metadata={"a": "b"})))
        (row,) = rows(journal)
    assert (row.id, row.key, row.team, row.labels) == (reply.headers["x-request-id"], "team-a", "research", {"cost_center": "17"})
    assert (row.model, row.server, row.endpoint, row.stream) == ("tiny", "tiny#0", "/v1/chat/completions", False)
    assert (row.status, row.code, row.incomplete) == (200, None, None)
    assert (row.prompt, row.completion, row.cached, row.reasoning, row.estimated_by) == (3, 2, 1, 0, None)
    assert row.cost == 1500 + 4000 and (row.user, row.metadata) == (None, None), "which nobody wanted"
    assert row.duration is not None and row.queued == 0.0 and journal.open_rows() == []


@pytest.mark.parametrize("ending", ["complete", "disconnect"])
async def test_the_cost_of_a_row_is_what_the_limits_have_counted(journal: Journal, ending: str) -> None:
    """With odd prices for each kind of token, to the last digit."""
    odd, allowance = price(0.123456789, 1.000000007, cached=0.000000013, reasoning=2.5), Allowance("key team-a", Limits(cost_per_day=10**9))
    async with (
        scripted(_completion if ending == "complete" else _endless) as server,
        serving([model(server.port, price=odd)], [key(allowances=(allowance,))], ledger=Recorder(journal)) as served,
        client(served.port) as one,
    ):
        one.send(request(chat(stream=ending != "complete", max_tokens=20)))
        await (one.reply() if ending == "complete" else one.events(3))
        one.disconnect()
        await until(lambda: not served.inline_tasks)
        (row,) = rows(journal)
        buckets = served.context.limiter.buckets
        spent = buckets.cells[buckets.holder(allowance.holder, allowance.limits).offset + DAY + SPENT]
    assert row.cost and row.cost == spent


async def test_an_admitted_request_has_the_budget_that_is_nearly_used(journal: Journal) -> None:
    """Each request uses 5 tokens."""
    of_key, of_team = Limits(tokens_per_day=100), Limits(budgets=(Budget("30d", 30 * 86400.0, tokens=16, soft=True),))
    allowances = (Allowance("key team-a", of_key), Allowance("team research for t*", of_team, ("t*",)))
    async with (
        scripted(_completion) as server,
        serving([model(server.port)], [key(allowances=allowances)], ledger=Recorder(journal)) as served,
    ):
        for _ in range(4):
            await request_once(served.port, request(chat(max_tokens=1)))
        found = [(row.status, row.nearest_limit) for row in rows(journal)]
    of_team_used = [f"{share}% of tokens_per_30d of team research" for share in (93, 125)]
    assert found == [(200, None), (200, None), *((200, each) for each in of_team_used)]


@pytest.mark.parametrize("sample", [None, 0.5])
async def test_a_row_has_the_id_of_an_exported_trace(journal: Journal, sample: float | None) -> None:
    """The trace ID decides whether a trace is exported. The first one of these is, with a share of 0.5."""
    ids = ("0af7651916cd43dd0448eb211c80319c", "0af7651916cd43dd8448eb211c80319c")
    with collector() as collected:
        tracing = None if sample is None else Tracing(collected.url, sample)
        async with scripted(_completion) as server, serving([model(server.port)], ledger=Recorder(journal), tracing=tracing) as served:
            for trace_id in ids:
                await request_once(served.port, request(chat(), extra=(f"traceparent: 00-{trace_id}-b7ad6b7169203331-01",)))
            found = [row.trace_id for row in rows(journal)]
    assert found == [None if sample is None else ids[0], None]


async def test_a_stream_is_counted_without_the_clients_request_for_usage(journal: Journal) -> None:
    async with scripted(_stream) as server, serving([model(server.port)], ledger=Recorder(journal)) as served:
        assert b"usage" not in (await request_once(served.port, request(chat(stream=True)))).body
        (row,) = rows(journal)
    assert (row.stream, row.prompt, row.completion, row.estimated_by, row.cost, row.chunks) == (True, 3, 2, None, None, 0)
    assert row.first_token is not None


async def test_user_and_metadata_are_stored_if_configured(journal: Journal) -> None:
    bodies: list[dict[str, Any]] = [
        {"user": "u\0ser" + 300 * "x", "metadata": {"order": "7"}}, {"user": 7, "metadata": "none"}, {"metadata": {"a": "\0"}},
        {"metadata": {"a": 20_000 * "x"}}, {}, {"metadata": {"a": "\\\0"}}, {"metadata": {"path": r"c:\u0000"}},
    ]  # fmt: skip
    async with (
        scripted(_completion) as server,
        serving([model(server.port)], ledger=Recorder(journal), ledger_user=True, ledger_metadata=True) as served,
    ):
        for body in bodies:
            assert (await request_once(served.port, request(chat(**body)))).status == 200
        first, *others, last = rows(journal)
    assert (first.user, first.metadata) == ("user" + 251 * "x", {"order": "7"})
    assert {(row.user, row.metadata is None) for row in others} == {(None, True)}
    assert last.metadata == {"path": r"c:\u0000"}, "which is a text without a NUL"


@pytest.mark.parametrize(
    ("user_header", "ledger_user", "sent", "stored"),
    [
        (b"x-openwebui-user-id", False, ("X-OpenWebUI-User-Id: 17",), "17"),
        (b"x-openwebui-user-id", True, ("X-OpenWebUI-User-Id: 17",), "17"),
        (b"x-openwebui-user-id", True, (), "of the body"),
        (b"x-openwebui-user-id", True, ("X-OpenWebUI-User-Id:",), "of the body"),
        (b"x-openwebui-user-id", False, (), None),
        (None, False, ("X-OpenWebUI-User-Id: 17",), None),
        (None, True, ("X-OpenWebUI-User-Id: 17",), "of the body"),
        (b"x-user", False, (f"x-user: {'u' * 300}",), "u" * 256),
        (b"x-user", False, ("x-user: Jürgen",), "Jürgen"),
    ],
    ids=["header", "header before body", "body", "empty", "no user", "untrusted key", "untrusted key and body", "long", "beyond ASCII"],
)
async def test_the_end_user_of_a_request(
    journal: Journal, user_header: bytes | None, ledger_user: bool, sent: tuple[str, ...], stored: str | None
) -> None:
    """A header names the end user only for keys that are configured for it. It is not forwarded."""
    async with (
        scripted(_completion) as server,
        serving([model(server.port)], [key(user_header=user_header)], ledger=Recorder(journal), ledger_user=ledger_user) as served,
    ):
        await request_once(served.port, request(chat(user="of the body"), extra=sent))
        (row,) = rows(journal)
        assert row.user == stored
        assert [server.requests[0].header(name) for name in ("x-openwebui-user-id", "x-user")] == [None, None]


async def test_the_key_decides_whose_header_is_read(journal: Journal) -> None:
    """Another key of the same gateway cannot name an end user."""
    keys = [key(user_header=b"x-user"), key("team-b", "sk-other")]
    async with scripted(_completion) as server, serving([model(server.port)], keys, ledger=Recorder(journal)) as served:
        for token in (KEY, "sk-other"):
            await request_once(served.port, request(token=token, extra=("x-user: 17",)))
        assert [(row.key, row.user) for row in rows(journal)] == [("team-a", "17"), ("team-b", None)]


@pytest.mark.parametrize(("value", "text"), [("Jürgen".encode("latin-1"), "Jürgen"), ("Jürgen".encode(), "Jürgen")])
async def test_the_end_user_in_older_encodings(journal: Journal, value: bytes, text: str) -> None:
    async with (
        scripted(_completion) as server,
        serving([model(server.port)], [key(user_header=b"x-user")], ledger=Recorder(journal)) as served,
    ):
        await request_once(served.port, request(extra=("x-user: @",)).replace(b"@", value))
        (row,) = rows(journal)
    assert row.user == text


async def test_refusals_have_rows_where_the_key_is_known(journal: Journal) -> None:
    async with scripted(_completion) as server, serving([model(server.port)], [key(**TERMS)], ledger=Recorder(journal)) as served:
        for body, token in ((chat(model="nobody"), KEY), (b"{", KEY), (chat(), "sk-wrong"), (chat(), None)):
            await request_once(served.port, request(body, token=token))
        await request_once(served.port, request(b"", "/v1/models", method="GET"))
        found = rows(journal)
    assert [(row.status, row.code, row.model, row.team, row.prompt) for row in found] == [
        (404, "model_not_found", None, "research", None),
        (400, "invalid_json", None, "research", None),
    ]


async def test_a_stream_after_a_disconnect_is_estimated_by_its_events(journal: Journal) -> None:
    async with (
        scripted(_endless) as server,
        serving([model(server.port, price=price(1.0, 2.0))], ledger=Recorder(journal)) as served,
        client(served.port) as one,
    ):
        one.send(request(chat(stream=True)))
        await one.events(4)
        one.disconnect()
        await until(lambda: not served.inline_tasks)
        (row,) = rows(journal)
    assert (row.status, row.incomplete, row.prompt, row.completion, row.estimated_by) == (499, "client", PROMPT, 3, Method.EVENTS)
    assert (row.completion, row.estimated_by) == (3, "events") and row.cost == PROMPT * 1000 + 6000 and journal.open_rows() == []


@pytest.mark.parametrize("together", [2, 20, 200])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
async def test_events_in_one_read_are_counted_separately(journal: Journal, together: int, newline: bytes) -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}],"padding":"so that it is an ordinary one"}\n\n'.replace(b"\n", newline)

    async def several(talk: Conversation) -> None:
        await talk.begin_stream()
        for _ in range(3):
            await talk.chunk(together * event)
            await asyncio.sleep(0.05)
        await talk.closed_by_peer()

    async with scripted(several) as server, serving([model(server.port)], ledger=Recorder(journal)) as served, client(served.port) as one:
        one.send(request(chat(stream=True, n=2)))
        for _ in range(3 * together):
            await one.reader.readuntil(event)
        one.disconnect()
        await until(lambda: not served.inline_tasks)
        (row,) = rows(journal)
    assert (row.completion, row.estimated_by) == (3 * together - 1, "events")


async def test_a_model_can_be_configured_without_running_usage(journal: Journal) -> None:
    async with (
        scripted(_endless) as server,
        serving([model(server.port, running_usage=False)], ledger=Recorder(journal)) as served,
        client(served.port) as one,
    ):
        one.send(request(chat(stream=True)))
        await one.events(4)
        assert server.requests[0].json["stream_options"] == {"include_usage": True, "continuous_usage_stats": False}
        one.disconnect()
        await until(lambda: not served.inline_tasks)
        (row,) = rows(journal)
    assert (row.completion, row.estimated_by) == (3, Method.EVENTS)


async def test_the_counts_of_several_choices_are_added(journal: Journal) -> None:
    def counted(index: int, tokens: int) -> bytes:
        return event(f'[{{"index":{index},"delta":{{"content":"a"}}}}]', f',"usage":{{"prompt_tokens":3,"completion_tokens":{tokens}}}')

    async def several(talk: Conversation) -> None:
        await talk.begin_stream()
        for tokens in range(1, 5):
            for index in range(3):
                await talk.chunk(counted(index, tokens))
        await talk.closed_by_peer()

    async with scripted(several) as server, serving([model(server.port)], ledger=Recorder(journal)) as served, client(served.port) as one:
        one.send(request(chat(stream=True, n=3)))
        await one.events(12)
        one.disconnect()
        await until(lambda: not served.inline_tasks)
        (row,) = rows(journal)
    assert (row.prompt, row.completion, row.estimated_by) == (3, 12, None)


async def _row_after_disconnect(journal: Journal, events: list[bytes], path: str) -> UsageRow:
    """Return the row of a stream whose client disconnects after these events."""

    async def partly(talk: Conversation) -> None:
        await talk.begin_stream()
        for each in events:
            await talk.chunk(each)
        await talk.closed_by_peer()

    async with (
        scripted(partly) as server,
        serving([model(server.port)], ledger=Recorder(journal)) as served,
        client(served.port) as one,
    ):
        one.send(request(chat(stream=True, stream_options={"include_usage": True}), path))
        await one.events(len(events))
        one.disconnect()
        await until(lambda: not served.inline_tasks)
        (row,) = rows(journal)
        return row


TOKEN = event('[{"index":0,"delta":{"content":"a"},"finish_reason":null}]')
FIVE = ',"usage":{"prompt_tokens":3,"completion_tokens":5}'
MESSAGE_TOKEN = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"a"}}\n\n'
MESSAGE_COUNT = b'event: message_delta\ndata: {"type":"message_delta","delta":{},"usage":{"input_tokens":3,"output_tokens":5}}\n\n'


@pytest.mark.parametrize(
    ("path", "events"),
    [
        ("/v1/chat/completions", [ROLE, *5 * [TOKEN], STOP, event("[]", FIVE)]),
        ("/v1/chat/completions", [event('[{"index":0,"delta":{"content":"a"}}]', FIVE)] * 9),
        ("/v1/messages", [*8 * [MESSAGE_TOKEN], MESSAGE_COUNT]),
    ],
    ids=["chat", "a count with each event", "messages"],
)
async def test_a_received_count_is_not_an_estimate(journal: Journal, path: str, events: list[bytes]) -> None:
    """Send events without a token too, such as the one with the finish reason."""
    row = await _row_after_disconnect(journal, events, path)
    assert (row.status, row.incomplete, row.prompt, row.completion, row.estimated_by) == (499, "client", 3, 5, None)


async def test_a_count_of_earlier_events_is_an_estimate(journal: Journal) -> None:
    row = await _row_after_disconnect(journal, [event('[{"index":0,"delta":{"content":"a"}}]', FIVE), *9 * [TOKEN]], "/v1/chat/completions")
    assert (row.prompt, row.completion, row.estimated_by) == (3, 9, "events")


async def test_a_stream_without_a_count_is_estimated_by_its_events(journal: Journal) -> None:
    async def silent(talk: Conversation) -> None:
        await talk.begin_stream()
        for each in (ROLE, HELLO, HELLO, STOP, DONE):
            await talk.chunk(each)
        await talk.end_stream()

    async with scripted(silent) as server, serving([model(server.port)], ledger=Recorder(journal)) as served:
        assert (await request_once(served.port, request(chat(stream=True)))).status == 200
        (row,) = rows(journal)
    assert (row.incomplete, row.prompt, row.completion, row.estimated_by) == (None, PROMPT, 4, Method.EVENTS)


@pytest.mark.parametrize("renamed", [False, True])
async def test_the_usage_of_a_response_is_read_after_a_disconnect(journal: Journal, renamed: bool) -> None:
    whole = COMPLETION.replace(b'"choices"', b'"padding":"' + 8_000_000 * b"x" + b'","choices"')

    async def large(talk: Conversation) -> None:
        await talk.respond(whole)

    async with (
        scripted(large) as server,
        serving([model(server.port, rewrite=renamed)], ledger=Recorder(journal)) as served,
        client(served.port) as one,
    ):
        one.send(request())
        await one.reader.readexactly(50_000)
        one.disconnect()
        await until(lambda: not served.inline_tasks)
        (row,) = rows(journal)
        assert (await request_once(served.port, request())).status == 200 and server.accepted == 1, "and its connection is as good as any"
    assert (row.status, row.incomplete, row.prompt, row.completion, row.estimated_by) == (499, "client", 3, 2, None)


FRAMINGS = {"length": b"content-length: %d\r\n" % len(COMPLETION), "chunked": b"transfer-encoding: chunked\r\n", "close": b""}
TEXT_END = COMPLETION.index(b'"finish_reason"')
WITHOUT_USAGE = COMPLETION[:TEXT_END] + b'"finish_reason":"stop"}]}'
ESTIMATE = (len(orjson.dumps(chat())) // BYTES_PER_TOKEN, TEXT_END // BYTES_PER_TOKEN)
"""The prompt and completion of a client that was sent ``COMPLETION`` up to the end of its text."""


def paused_response(framing: str, resumed: asyncio.Event) -> Script:
    """Return a server that sends the text of a response, waits, and sends the usage."""

    async def script(talk: Conversation) -> None:
        await talk.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n%b\r\n" % FRAMINGS[framing])
        for part in (COMPLETION[:TEXT_END], COMPLETION[TEXT_END:]):
            await (talk.chunk(part) if framing == "chunked" else talk.write(part))
            await resumed.wait()
        if framing == "chunked":
            await talk.end_stream()
        elif framing == "close":
            talk.writer.close()

    return script


@asynccontextmanager
async def disconnected(journal: Journal, script: Script, **settings: Any) -> AsyncIterator[Served]:
    """Serve a request whose client has received the text of a response and has disconnected."""
    async with scripted(script) as server, serving([model(server.port, **settings)], ledger=Recorder(journal)) as served:
        async with client(served.port) as one:
            one.send(request())
            await one.reader.readuntil(COMPLETION[TEXT_END - 20 : TEXT_END])
            one.disconnect()
            await until(lambda: not served.connections)
        yield served
        await until(lambda: not served.inline_tasks)
        assert served.in_flight == 0


class Ticks:
    """Counts the checks of deadlines."""

    def __init__(self) -> None:
        self.count = 0

    def check(self, _: float) -> None:
        self.count += 1


@pytest.mark.parametrize("framing", FRAMINGS)
async def test_the_usage_is_awaited_after_a_disconnect(journal: Journal, framing: str) -> None:
    resumed, ticks = asyncio.Event(), Ticks()
    async with disconnected(journal, paused_response(framing, resumed)) as served:
        served.context.deadlines.watch(ticks)
        await until(lambda: ticks.count == 3)
        served.context.deadlines.forget(ticks)
        assert served.inline_tasks, "the rest is awaited although no byte arrives"
        resumed.set()
    (row,) = rows(journal)
    assert (row.status, row.incomplete, row.prompt, row.completion, row.estimated_by) == (499, "client", 3, 2, None)


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("end", ["idle", "drain"])
async def test_a_count_that_never_arrives_is_estimated(journal: Journal, framing: str, end: str) -> None:
    timeouts = Timeouts(idle=0.1 if end == "idle" else 60.0)
    async with disconnected(journal, paused_response(framing, asyncio.Event()), timeouts=timeouts) as served:
        if end == "drain":
            for handler in tuple(served.inline_tasks):
                handler.cancel()
    (row,) = rows(journal)
    assert (row.status, row.incomplete, row.prompt, row.completion, row.estimated_by) == (499, "client", *ESTIMATE, Method.BYTES)


async def test_the_rest_of_a_response_is_bounded(journal: Journal) -> None:
    piece = b"x" * 1024 * 1024

    async def endless(talk: Conversation) -> None:
        await talk.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + COMPLETION[:TEXT_END])
        while True:
            await talk.write(piece)

    async with disconnected(journal, endless):
        pass
    (row,) = rows(journal)
    assert (row.status, row.prompt, row.estimated_by) == (499, ESTIMATE[0], Method.BYTES)


@pytest.mark.parametrize("cut", [False, True])
async def test_a_response_without_a_count_is_estimated(journal: Journal, cut: bool) -> None:
    """The server reports no usage, or closes the connection before it."""

    async def script(talk: Conversation) -> None:
        if not cut:
            await talk.respond(WITHOUT_USAGE)
            return
        await talk.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n%b\r\n" % FRAMINGS["length"])
        await talk.write(COMPLETION[:TEXT_END])
        talk.writer.close()

    async with scripted(script) as server, serving([model(server.port)], ledger=Recorder(journal)) as served:
        reply = await request_once(served.port, request())
        await until(lambda: not served.inline_tasks)
    (row,) = rows(journal)
    assert (reply.status, reply.whole, row.status, row.incomplete) == (200, not cut, 200, "upstream" if cut else None)
    completion = ESTIMATE[1] if cut else len(WITHOUT_USAGE) // BYTES_PER_TOKEN
    assert (row.prompt, row.completion, row.estimated_by) == (ESTIMATE[0], completion, Method.BYTES)


async def test_an_older_form_whose_client_disconnects_is_free(journal: Journal) -> None:
    """The response is translated as a whole, so nothing of it was sent."""
    received = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n%b\r\n" % FRAMINGS["length"])
        await talk.write(COMPLETION[:TEXT_END])
        received.set()
        await talk.closed_by_peer()

    async with scripted(script) as server, serving([model(server.port)], ledger=Recorder(journal)) as served, client(served.port) as one:
        one.send(request(chat(functions=[{"name": "f"}])))
        await received.wait()
        one.disconnect()
        await until(lambda: not served.inline_tasks and server.open == 0)
    (row,) = rows(journal)
    assert (row.status, row.incomplete, row.prompt, row.estimated_by) == (499, "client", None, None)


@pytest.mark.parametrize(("path", "free"), [("/v1/embeddings", False), ("/tokenize", True)])
async def test_only_routes_of_the_engine_are_estimated(journal: Journal, path: str, free: bool) -> None:
    body = {"model": "tiny", "input": "word " * 70, "prompt": "word"}

    async def script(talk: Conversation) -> None:
        await talk.respond(b'{"tokens":[1,2,3],"data":[]}')

    async with scripted(script) as server, serving([model(server.port)], ledger=Recorder(journal)) as served:
        await request_once(served.port, request(body, path))
        (row,) = rows(journal)
    expected = (None, None, None) if free else (len(orjson.dumps(body)) // BYTES_PER_TOKEN, 0, Method.BYTES)
    assert (row.prompt, row.completion, row.estimated_by) == expected


async def test_a_stream_that_the_server_truncates_is_estimated_too(journal: Journal) -> None:
    async def breaks(talk: Conversation) -> None:
        await talk.begin_stream()
        for each in (ROLE, HELLO, STOP):
            await talk.chunk(each)
            await asyncio.sleep(0.05)
        talk.writer.transport.abort()

    async with scripted(breaks) as server, serving([model(server.port)], ledger=Recorder(journal)) as served:
        await request_once(served.port, request(chat(stream=True)))
        (row,) = rows(journal)
    assert (row.incomplete, row.code) == ("upstream", "upstream_disconnected")
    assert (row.completion, row.estimated_by) == (2, "events")


async def test_an_open_request_has_a_row_until_it_finishes(journal: Journal) -> None:
    async with (
        scripted(_endless) as server,
        serving([model(server.port)], [key(**TERMS)], ledger=Recorder(journal)) as served,
        client(served.port) as one,
    ):
        one.send(request(chat(stream=True)))
        await one.events(1)
        (payload,) = journal.open_rows()
        row = decode(payload)
        one.disconnect()
        await until(lambda: not served.inline_tasks)
        (settled,) = rows(journal)
    assert (row.id, row.incomplete, row.status, row.prompt, row.cost) == (settled.id, LOST, None, None, None)
    assert (row.key, row.team, row.labels, row.model, row.stream, row.started) == (
        settled.key, settled.team, settled.labels, settled.model, True, settled.started,
    )  # fmt: skip


@pytest.mark.parametrize(("user", "stored"), [("17", "17"), ("\U0001f600" * 256, None)], ids=["short", "longer than a slot"])
async def test_an_open_request_has_its_end_user_if_there_is_space(journal: Journal, user: str, stored: str | None) -> None:
    async with (
        scripted(_endless) as server,
        serving([model(server.port)], ledger=Recorder(journal), ledger_user=True) as served,
        client(served.port) as one,
    ):
        one.send(request(chat(stream=True, user=user)))
        await one.events(1)
        assert [decode(payload).user for payload in journal.open_rows()] == [stored]
        one.disconnect()
        await until(lambda: not served.inline_tasks)
        assert [row.user for row in rows(journal)] == [user]


@pytest.mark.parametrize("later", [None, price(9.0, 9.0)])
async def test_a_request_has_the_price_of_its_start(journal: Journal, later: Price | None) -> None:
    """Apply a configuration without the model, or with another price, while the request runs. The limits use the first price too."""
    go_on = asyncio.Event()

    async def waits(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(EVENTS[0])
        await go_on.wait()
        for each in EVENTS[1:]:
            await talk.chunk(each)
        await talk.end_stream()

    async with scripted(waits) as server:
        dear, other = model(server.port, price=price(1.0, 2.0)), model(server.port, identity="other", price=price(5.0, 5.0))
        async with serving([dear, other], ledger=Recorder(journal)) as served, client(served.port) as one:
            one.send(request(chat(stream=True)))
            await one.events(1)
            left = [other] if later is None else [model(server.port, price=later), other]
            served.worker.apply_snapshot(replace(served.worker.snapshot, version=2, models=tuple(left)))
            go_on.set()
            await until(lambda: not served.inline_tasks)
            (row,) = rows(journal)
            assert (row.model, row.prompt, row.completion, row.cost) == ("tiny", 3, 2, 3 * 1000 + 2 * 2000)
            await request_once(served.port, request(chat(stream=True)))
            (row,) = rows(journal)
    assert (row.model, row.cost) == ((None, None) if later is None else ("tiny", 5 * 9000))


async def test_a_fallback_has_the_price_of_the_requests_start(journal: Journal) -> None:
    """Remove the fallback from the configuration while it responds."""
    requested, go_on = asyncio.Event(), asyncio.Event()

    async def waits(talk: Conversation) -> None:
        requested.set()
        await go_on.wait()
        await talk.respond(COMPLETION)

    async with scripted(waits) as server:
        models = [
            model(identity="tiny", fallbacks=("other",), price=price(5.0, 5.0)),
            model(server.port, identity="other", price=price(1.0, 2.0)),
        ]
        async with serving(models, ledger=Recorder(journal)) as served:
            reply = asyncio.create_task(request_once(served.port, request(chat())))
            await requested.wait()
            served.worker.apply_snapshot(replace(served.worker.snapshot, version=2, models=(replace(models[0], fallbacks=()),)))
            go_on.set()
            assert (await reply).status == 200
            (row,) = rows(journal)
    assert (row.model, row.cost) == ("other", 3 * 1000 + 2 * 2000)


async def test_a_full_journal_fails_no_request() -> None:
    journal = Journal.create("test", 64, 0)
    async with scripted(_completion) as server, serving([model(server.port)], ledger=Recorder(journal)) as served:
        for _ in range(3):
            assert (await request_once(served.port, request(chat()))).status == 200
    assert (journal.dropped, rows(journal)) == (3, [])
    journal.close()
