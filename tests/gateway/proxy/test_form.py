"""A form streams on byte for byte, but for its model's name; what must not be sent ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from time import thread_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.errors import Refusal
from gateway.auth.body_policy import FORBIDDEN, BodyPolicy
from gateway.ledger.journal import Journal
from gateway.ledger.recorder import Recorder
from gateway.ledger.row import decode, frames
from gateway.proxy.form import MAX_PARTS, Form
from gateway.snapshot.snapshot import Allowance, BodyRules, Limits, Queue
from tests.support.running import KEY, Served, key, model, serving, until
from tests.support.scripted import Conversation, scripted
from tests.support.way import way
from tests.support.wire import Client, Reply, client, request_once

PATH = "/v1/audio/transcriptions"
BOUNDARY = "----form-5e2"
AUDIO = bytes(range(256)) * 20 + b"\r\n--\r\n------form\r\n"
RESPONSE = b'{"text":"hello","usage":{"type":"duration","seconds":1}}'


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
FILE = part("file", AUDIO, '; filename="a.wav"\r\nContent-Type: audio/wav')
MODEL = part("model", b"tiny")
LANGUAGE = part("language", b"en")


def form(*parts: bytes, content_type: str = f"multipart/form-data; boundary={BOUNDARY}", chunks: int = 0, path: str = PATH) -> bytes:
    """Return the bytes of a form. ``chunks`` is the size of each chunk; 0 for a body with a Content-Length."""
    body = b"".join(parts) + END
    framing = "transfer-encoding: chunked" if chunks else f"content-length: {len(body)}"
    head = f"POST {path} HTTP/1.1\r\nhost: test\r\nauthorization: Bearer {KEY}\r\ncontent-type: {content_type}\r\n{framing}\r\n\r\n"
    if chunks:
        pieces = [body[at : at + chunks] for at in range(0, len(body), chunks)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    return head.encode() + body


async def responses(talk: Conversation) -> None:
    await talk.respond(RESPONSE)


ORDERS = {"first": (MODEL, FILE, LANGUAGE), "last": (FILE, LANGUAGE, MODEL), "in the middle": (LANGUAGE, MODEL, FILE)}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("chunks", [0, 7, 5000])
async def test_the_rest_is_sent_as_it_came(order: str, chunks: int) -> None:
    parts = ORDERS[order]
    async with scripted(responses) as server, serving([model(server.port, served="whisper-inside")]) as served, client(served.port) as one:
        for _ in range(2):
            reply = await one.request(form(*parts, chunks=chunks))
            assert (reply.status, reply.body) == (200, RESPONSE)
        seen = server.requests[0]
        assert seen.body == b"".join(parts).replace(b"\r\n\r\ntiny\r\n", b"\r\n\r\nwhisper-inside\r\n") + END
        assert seen.header("content-length") == (None if chunks else str(len(seen.body)))
        assert seen.header("content-type") == f'multipart/form-data; boundary="{BOUNDARY}"'


MANY = part("n", b"129")
REFUSED = {
    "something before the first boundary": (form(b"\r\n", MODEL), 400, "invalid_value"),
    "a text before the first boundary": (form(b"x\r\n", MODEL), 400, "invalid_value"),
    "more beams than there may be": (form(MANY, MODEL), 400, "invalid_value"),
    "more beams behind the model": (form(MODEL, FILE, MANY), 400, "invalid_value"),
    "beams in words": (form(MODEL, part("n", b"0x81")), 400, "invalid_value"),
    "a long number": (form(MODEL, part("n", b"1" * 5000)), 400, "invalid_value"),
    "too many parts": (form(*[LANGUAGE] * MAX_PARTS, MODEL), 400, "invalid_value"),
    "a part with a long head": (form(MODEL, part("a" * 9000, b"")), 400, "invalid_value"),
    "a part with a long name of a header": (
        form(b"--" + BOUNDARY.encode() + b"\r\n" + b"x" * 9000 + b": y\r\n\r\nz\r\n", MODEL),
        400,
        "invalid_value",
    ),
    "no model": (form(FILE), 400, "missing_required_parameter"),
    "an empty model": (form(part("model", b""), FILE), 400, "missing_required_parameter"),
    "an unknown model": (form(part("model", b"gpt-4"), FILE), 404, "model_not_found"),
    "two models": (form(MODEL, part("model", b"secret"), FILE), 400, "invalid_value"),
    "a model in bytes": (form(part("model", b"\xff\xfe"), FILE), 400, "invalid_value"),
    "a long model": (form(part("model", b"m" * 600), FILE), 400, "invalid_value"),
    "a model of two lines": (form(part("model", b"\r\ntiny"), FILE), 400, "invalid_value"),
    "a part without a name": (form(b"--" + BOUNDARY.encode() + b"\r\nx: y\r\n\r\nz\r\n", MODEL), 400, "invalid_value"),
    "an extended name": (form(part("x", b"secret", "; name*=utf-8''model"), MODEL), 400, "invalid_value"),
    "no boundary": (form(MODEL, content_type="multipart/form-data"), 400, "invalid_value"),
    "a strange boundary": (form(MODEL, content_type='multipart/form-data; boundary="a\\"b"'), 400, "invalid_value"),
    "a long boundary": (form(MODEL, content_type="multipart/form-data; boundary=" + "b" * 71), 400, "invalid_value"),
    "another boundary": (form(MODEL, content_type="multipart/form-data; boundary=other"), 400, "invalid_value"),
    "a content type of many options": (form(MODEL, content_type="multipart/form-data; boundary=b" + ";" * 60_000), 400, "invalid_value"),
    "a long content type": (form(MODEL, content_type=f"multipart/form-data; boundary={BOUNDARY}; a={'a' * 5000}"), 400, "invalid_value"),
    "a part of many options": (form(MODEL, part("a", b"", ";" * 4000)), 400, "invalid_value"),
    "two dispositions": (form(MODEL, part("a", b"", '\r\nContent-Disposition: form-data; name="b"')), 400, "invalid_value"),
    "too many headers": (form(MODEL, part("a", b"", "\r\na: b" * 8)), 400, "invalid_value"),
    "too many lines like a boundary": (form(MODEL, part("a", f"\r\n--{BOUNDARY}x".encode() * (MAX_PARTS + 2))), 400, "invalid_value"),
    "JSON": (form(MODEL, content_type="application/json"), 415, "unsupported_media_type"),
    "a header like a boundary": (form(MODEL, f"--{BOUNDARY}\r\n--{BOUNDARY}--: x\r\n\r\ny\r\n".encode()), 400, "invalid_value"),
    "other fields": (form(MODEL, content_type="application/x-www-form-urlencoded"), 415, "unsupported_media_type"),
    **{f"the field {name}": (form(part(name, b"1"), MODEL), 400, "invalid_value") for name in sorted(FORBIDDEN)},
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused_before_it_is_sent(name: str) -> None:
    data, status, code = REFUSED[name]
    async with scripted(responses) as server, serving([model(server.port), model(server.port, identity="secret")]) as served:
        reply = await request_once(served.port, data)
        assert (reply.status, reply.error["code"]) == (status, code), reply.body
        assert server.requests == [] and served.in_flight == 0


_DISPOSITION = b'Content-Disposition: form-data; name="a"'
EXPENSIVE = {
    "one part": _DISPOSITION + b"\r\n\r\n" + bytes(8_000_000),
    "carriage returns": _DISPOSITION + b"\r\n\r\n" + b"\r" * 8_000_000,
    "almost boundaries": _DISPOSITION + b"\r\n\r\n" + b"\r\n--" * 2_000_000,
    "headers": _DISPOSITION + b"\r\na: b" * 7 + b"\r\n\r\nx",
    "long headers": _DISPOSITION + (b"\r\na: " + b"b" * 4000) * 7 + b"\r\n\r\nx",
    "options": _DISPOSITION + b';b="\\""' * 15 + b"\r\n\r\nx",
    "long options": _DISPOSITION + (b';b="' + b'\\"' * 120 + b'"') * 15 + b"\r\n\r\nx",
    "open quotes": _DISPOSITION + (b';b="' + b'\\"' * 120) * 15 + b"\r\n\r\nx",
    "spaces": _DISPOSITION + (b";" + b" " * 250) * 15 + b"\r\n\r\nx",
}
"""The parts of a form: as many bytes as are needed to fill one part, or 990 parts."""


@pytest.mark.parametrize("name", EXPENSIVE)
def test_what_a_form_costs(name: str) -> None:
    """At most 60 ms of CPU per MB and 60 ms for the parts, and 100 ms for a piece; a machine may be five times as slow."""
    whole = EXPENSIVE[name]
    parts = 1 if len(whole) > 1_000_000 else 990
    body = b"".join([b"--%b\r\n%b\r\n" % (BOUNDARY.encode(), whole)] * parts) + END
    total = longest = 1e9
    for _ in range(3):
        costs = _costs(body)
        total, longest = min(total, sum(costs)), min(longest, max(costs))
    assert total < 5 * (0.06 + 0.06 * len(body) / 1e6)
    assert longest < 5 * 0.1


def _costs(body: bytes) -> list[float]:
    """CPU seconds of each piece of a form, of which each is processed in one event-loop iteration."""
    one = Form(BOUNDARY.encode())
    one.apply_policy(BodyPolicy(BodyRules(), {}, {}))
    pieces, costs = [body[at : at + 65536] for at in range(0, len(body), 65536)], []

    async def next_bytes() -> bytes:
        costs.append(thread_time())
        return pieces.pop(0) if pieces else b""

    reading = one.read_model(next_bytes)
    with pytest.raises(StopIteration):
        reading.send(None)
    one.check_end()
    return [after - before for before, after in pairwise(costs)]


async def test_a_form_that_came_at_once_is_processed_in_pieces() -> None:
    with way() as one:
        one.client.data_received(form(part("file", bytes(2_000_000)), MODEL))
        iterations = 0
        while not one.client_wire.written:  # there is no server, which is found out when the model is known
            await asyncio.sleep(0)
            one.write_batch.flush()
            iterations += 1
        assert iterations >= 2_000_000 // 65536


@pytest.mark.parametrize(
    "late", [part("model", b"secret"), part("vllm_xargs", b"{}"), b"--" + BOUNDARY.encode() + b"\r\nbad header\r\n\r\n"]
)
async def test_what_comes_late_ends_the_request(late: bytes) -> None:
    """The server has a part of the form by then, and never the whole of it."""
    async with scripted(responses) as server, serving([model(server.port)]) as served, client(served.port) as one:
        whole = form(MODEL, FILE, late)
        cut = whole.index(AUDIO) + 100
        one.send(whole[:cut])
        await until(lambda: served.total("server_inflight") == 1)
        one.send(whole[cut:])
        reply = await one.reply()
        assert (reply.status, reply.error["code"]) == (400, "invalid_value")
        await until(lambda: server.open == 0)
        assert server.requests == []


@pytest.mark.parametrize("parts", [(MODEL, FILE), (FILE,)], ids=["a model", "none"])
async def test_a_form_without_its_end_is_refused(parts: tuple[bytes, ...]) -> None:
    head, _, body = form(*parts, path="/i-1/1" + PATH).partition(b"\r\n\r\n")
    cut = body.removesuffix(END)
    async with scripted(responses) as server, serving([model(server.port, mounts=("/i-1/1",))]) as served:
        reply = await request_once(served.port, head.replace(b"%d" % len(body), b"%d" % len(cut)) + b"\r\n\r\n" + cut)
        assert (reply.status, reply.error["code"]) == (400, "invalid_value")
        assert server.requests == []


async def test_field_names_are_read_in_one_charset() -> None:
    """In UTF-7 the second field is another ``model``, so the server must not receive that charset."""
    smuggled = part("+AG0AbwBkAGUAbA-", b"secret")
    async with scripted(responses) as server, serving([model(server.port)]) as served:
        reply = await request_once(
            served.port, form(MODEL, smuggled, content_type=f"multipart/form-data; charset=utf-7; boundary={BOUNDARY}")
        )
        assert reply.status == 200
        assert "charset" not in str(server.requests[0].header("content-type"))


async def test_an_instance_needs_no_model() -> None:
    async with scripted(responses) as server, serving([model(server.port, mounts=("/i-1/1",))]) as served:
        assert (await request_once(served.port, form(FILE, path="/i-1/1" + PATH))).body == RESPONSE
        assert server.requests[0].body == FILE + MODEL + END


@pytest.mark.parametrize("parts", [(FILE,), (part("model", b""), FILE), (FILE, part("model", b""))])
@pytest.mark.parametrize("chunks", [0, 7, 5000])
async def test_the_default_model_serves_a_form_without_one(parts: tuple[bytes, ...], chunks: int) -> None:
    """The server gets the model's name after all other fields, where it takes precedence."""
    async with scripted(responses) as server:
        models = [model(server.port, served="inside"), model(server.port, identity="other")]
        async with serving(models, default_model="tiny") as served:
            assert (await request_once(served.port, form(*parts, chunks=chunks))).body == RESPONSE
            assert server.requests[0].body == b"".join(parts) + part("model", b"inside") + END
            assert served.context.records[0].model == "tiny"


async def test_a_form_without_parts_is_the_servers_to_refuse() -> None:
    async with scripted(responses) as server, serving([model(server.port)], default_model="tiny") as served:
        assert (await request_once(served.port, form())).body == RESPONSE
        assert server.requests[0].body == END


async def test_a_large_file_streams_through() -> None:
    size = 48 << 20
    got = 0

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal got
        await reader.readuntil(b"\r\n\r\n")
        await release.wait()
        tail = b""
        while not tail.endswith(b"\r\n0\r\n\r\n"):
            data = await reader.read(1 << 20)
            assert data, f"it ended after {got} bytes"
            got, tail = got + len(data), (tail + data)[-7:]
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(RESPONSE), RESPONSE))
        await reader.read()
        writer.close()
        closed.set()

    release, closed = asyncio.Event(), asyncio.Event()
    server = await asyncio.start_server(slow, "127.0.0.1", 0)
    async with server:
        async with serving([model(server.sockets[0].getsockname()[1])], body_limit=1 << 30) as served, client(served.port) as one:
            one.send(form(MODEL, part("file", b"x" * size, '; filename="a.wav"')))
            left = await unsent(one)
            assert left > size - (24 << 20), "what the sockets hold, and a little; the rest waits at the client"
            release.set()
            assert (await one.reply()).body == RESPONSE
            assert got > size - (1 << 20)
        await closed.wait()


async def unsent(one: Client) -> int:
    """Return the number of bytes that the client has not sent when it is blocked."""
    before = -1
    async with asyncio.timeout(30):
        while (left := one.writer.transport.get_write_buffer_size()) != before:
            before = left
            await asyncio.sleep(0.3)
    return before


async def test_a_form_over_the_limit_ends() -> None:
    async with scripted(responses) as server, serving([model(server.port)], body_limit=100_000) as served:
        for chunks in (0, 10_000):
            reply: Reply = await request_once(served.port, form(MODEL, part("file", b"x" * 200_000), chunks=chunks))
            assert (reply.status, reply.error["code"]) == (413, "request_too_large")
        assert server.requests == []


async def test_a_disconnect_during_an_upload() -> None:
    async with scripted(responses) as server, serving([model(server.port)]) as served, client(served.port) as one:
        one.send(form(MODEL, FILE)[:-200])
        await until(lambda: server.open == 1)
        one.disconnect()
        await gone(served)
        await until(lambda: server.open == 0)


async def test_a_disconnect_is_noticed_while_a_large_form_is_queued() -> None:
    """The gateway reads on, although no server takes the form yet. It had paused, because it reads faster than it looks for the model."""

    async def hangs(talk: Conversation) -> None:
        await talk.closed_by_peer()

    async with (
        scripted(hangs) as server,
        serving([model(server.port, max_inflight=1, queue=Queue(5, 60.0))]) as served,
        client(served.port) as first,
        client(served.port) as one,
    ):
        first.send(form(MODEL, FILE))
        await until(lambda: len(server.requests) == 1)
        one.send(form(part("file", b"x" * 600_000), MODEL, part("more", b"x" * 3_000_000)))
        await until(lambda: served.value("queued_requests", "tiny") == 1)
        await one.writer.drain()
        one.disconnect()
        await until(lambda: len(served.context.records) == 1 and served.value("queued_requests", "tiny") == 0)
        assert (served.context.records[0].status, served.context.records[0].incomplete) == (499, "client")
        await until(lambda: served.context.memory.held == 0)


async def gone(served: Served) -> None:
    await until(lambda: served.in_flight == 0)


@settings(deadline=None)
@given(parts=st.permutations([MODEL, FILE, LANGUAGE]), sizes=st.lists(st.integers(1, 400), min_size=1, max_size=20))
def test_the_model_is_found_however_the_reads_are_cut(parts: list[bytes], sizes: list[int]) -> None:
    body = b"".join(parts) + END
    reads: list[bytes] = []
    at = 0
    while at < len(body):
        size = sizes[len(reads) % len(sizes)]
        reads.append(body[at : at + size])
        at += size
    coming = iter(reads)
    sent: list[bytes] = []

    async def next_bytes() -> bytes:
        return next(coming, b"")

    async def drained() -> bool:
        return True

    async def run() -> str | None:
        one = Form.of(f"multipart/form-data; boundary={BOUNDARY}".encode())
        name = await one.read_model(next_bytes)
        sent.append(one.opening("a-longer-name"))
        behind = one.remaining(len(body)) if one.ended else None
        await one.upload(next_bytes, chunked=False)(lambda data, _: sent.append(data), drained)
        assert behind is None or len(sent[0]) + behind == sum(map(len, sent))
        return name

    assert asyncio.run(run()) == "tiny"
    assert b"".join(sent) == body.replace(b"\r\n\r\ntiny\r\n", b"\r\n\r\na-longer-name\r\n")


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_form_or_refused(data: bytes) -> None:
    coming = iter([data])

    async def next_bytes() -> bytes:
        return next(coming, b"")

    one = Form.of(b"multipart/form-data; boundary=b")
    try:
        assert asyncio.run(one.read_model(next_bytes)) is None
    except Refusal as refusal:
        code = refusal.code
    else:
        code = "invalid_value"
    assert code == "invalid_value"


async def test_an_operators_rules_hold_wherever_the_model_stands() -> None:
    rules = BodyRules(allow=("vllm_xargs",), refuse=("prompt",), max_tokens=10)
    async with scripted(responses) as server, serving([model(server.port, body=rules)]) as served:
        for wrong in (part("prompt", b"x"), part("max_completion_tokens", b"11"), part("use_beam_search", b"1")):
            for parts in ((wrong, MODEL, FILE), (MODEL, FILE, wrong)):
                reply = await request_once(served.port, form(*parts))
                assert (reply.status, reply.error["code"]) == (400, "invalid_value")
        for fine in (part("vllm_xargs", b"{}"), part("max_completion_tokens", b"10"), part("n", b""), part("temperature", b"1" * 50)):
            for parts in ((fine, MODEL, FILE), (MODEL, FILE, fine)):
                assert (await request_once(served.port, form(*parts))).status == 200


# Fields that the gateway adds

STREAM, USAGE = part("stream", b"true"), part("stream_include_usage", b"true")
LIMIT_FIELD = part("max_completion_tokens", b"7")


def bound(tokens: int) -> bytes:
    return part("max_completion_tokens", b"%d" % tokens)


ADDED = {
    "nothing to what is no stream": ((MODEL, FILE), None, None, b""),
    "a stream": ((MODEL, STREAM, FILE), None, None, USAGE),
    "a stream behind the file": ((MODEL, FILE, part("stream", b"ON")), None, None, USAGE),
    "a stream of a client that declines usage": ((MODEL, STREAM, part("stream_include_usage", b"False"), FILE), None, None, USAGE),
    "a stream that says more about usage": (
        (MODEL, STREAM, part("stream_continuous_usage_stats", b"1"), FILE),
        None,
        None,
        USAGE + part("stream_continuous_usage_stats", b"false"),
    ),
    "nothing where usage is asked for": ((MODEL, STREAM, part("stream_include_usage", b"1"), FILE), None, None, b""),
    "nothing to what the server refuses": ((MODEL, STREAM, part("stream_include_usage", b"maybe"), FILE), None, None, b""),
    "nothing to what is no stream in the end": ((MODEL, STREAM, part("stream", b"false"), FILE), None, None, b""),
    "the key's bound": ((MODEL, FILE), None, 10, bound(10)),
    "the model's bound": ((MODEL, FILE), 9, None, bound(9)),
    "the smaller bound": ((FILE, MODEL), 9, 10, bound(9)),
    "no bound where one is named": ((MODEL, FILE, LIMIT_FIELD), 9, 10, b""),
    "a bound where the last one is empty": ((MODEL, LIMIT_FIELD, part("max_completion_tokens", b""), FILE), None, 10, bound(10)),
    "both": ((STREAM, FILE, MODEL), None, 10, USAGE + bound(10)),
}


@pytest.mark.parametrize("what", ADDED)
@pytest.mark.parametrize("behind", [b"", b"epilogue\r\n" + END], ids=["", "with something behind the form"])
async def test_fields_are_added_at_the_end(what: str, behind: bytes) -> None:
    """However the reads are cut: nothing of the last boundary has been sent before."""
    parts, of_model, of_key, added = ADDED[what]
    body = b"".join(parts) + END + behind
    whole = b"".join(parts) + added + END + behind
    for size in (1, 2, 3, 5, 17, 1000, len(body)):
        reads = iter([body[at : at + size] for at in range(0, len(body), size)])
        sent = bytearray()

        async def next_bytes(reads: Iterator[bytes] = reads) -> bytes:
            return next(reads, b"")

        async def drained() -> bool:
            return True

        one = Form.of(f"multipart/form-data; boundary={BOUNDARY}".encode())
        assert await one.read_model(next_bytes) == "tiny"
        one.apply_policy(BodyPolicy(BodyRules(max_tokens=of_model), {}, {}), of_key)
        sent += one.opening("tiny")
        await one.upload(next_bytes, chunked=False)(lambda data, _, sent=sent: sent.extend(data), drained)  # type: ignore[misc]
        assert bytes(sent) == whole
        assert one.hides_usage is (USAGE in added)


@pytest.mark.parametrize("chunks", [0, 700])
@pytest.mark.parametrize("requested", [False, True])
async def test_streams_of_forms_are_counted(chunks: int, requested: bool) -> None:
    """vLLM reports usage at the end of a transcription's stream if requested. The client gets it only if it requested it."""
    text = b'data: {"object":"transcription.chunk","choices":[{"delta":{"content":"hi"}}]}\n\n'
    count = b'data: {"object":"transcription.chunk","choices":[],"usage":{"prompt_tokens":30,"completion_tokens":7,"total_tokens":37}}\n\n'
    done = b"data: [DONE]\n\n"

    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        for each in (text, count, done) if USAGE in talk.request.body else (text, done):
            await talk.chunk(each)
        await talk.end_stream()

    limited = key(allowances=(Allowance("key team-a", Limits(tokens_per_day=1000)),))
    async with scripted(script) as server, serving([model(server.port)], [limited]) as served:
        parts = (MODEL, STREAM, USAGE, FILE) if requested else (MODEL, FILE, STREAM)
        reply = await request_once(served.port, form(*parts, chunks=chunks))
        assert (reply.status, reply.body) == (200, text + count + done if requested else text + done)
        await until(lambda: served.total("tokens_total") == 37)
        assert served.context.records[-1].stream


async def test_the_stream_of_a_form_has_its_own_last_event() -> None:
    """A client that disconnects after ``[DONE]`` has the complete stream; a stream without it is truncated."""
    text, done = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n', b"data: [DONE]\n\n"
    left = asyncio.Event()

    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        await talk.chunk(text)
        if not left.is_set():
            await talk.chunk(done)
            await left.wait()
        await talk.end_stream()

    async with scripted(script) as server, serving([model(server.port)]) as served:
        async with client(served.port) as one:
            one.send(form(MODEL, STREAM, FILE))
            await one.reader.readuntil(done)
        await until(lambda: len(served.context.records) == 1)
        left.set()
        assert (served.context.records[0].status, served.context.records[0].incomplete) == (200, None)

        reply = await request_once(served.port, form(MODEL, STREAM, FILE))
        assert reply.body.startswith(text + b'data: {"error":') and reply.body.endswith(done)
        await until(lambda: len(served.context.records) == 2)
        assert (served.context.records[1].code, served.context.records[1].incomplete) == ("upstream_disconnected", "upstream")


async def test_a_keys_bound_holds_for_forms() -> None:
    limited = key(allowances=(Allowance("key team-a", Limits(max_tokens=10)),))
    async with scripted(responses) as server, serving([model(server.port)], [limited]) as served:
        for wrong in (b"11", b"9999", b"11.0", b" 11", b"1_1", b"-1"):
            for parts in ((part("max_completion_tokens", wrong), MODEL, FILE), (MODEL, FILE, part("max_completion_tokens", wrong))):
                reply = await request_once(served.port, form(*parts))
                assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "invalid_value", "max_completion_tokens"), wrong
        assert server.requests == []
        assert (await request_once(served.port, form(MODEL, bound(10), FILE))).status == 200
        assert (await request_once(served.port, form(MODEL, FILE))).status == 200
        assert server.requests[0].body == MODEL + bound(10) + FILE + END
        assert server.requests[1].body == MODEL + FILE + bound(10) + END


async def test_a_transcription_has_a_row() -> None:
    with closing(Journal.create("test", 1 << 16, 8)) as journal:
        async with scripted(responses) as server, serving([model(server.port)], ledger=Recorder(journal)) as served:
            assert (await request_once(served.port, form(MODEL, FILE))).body == RESPONSE
            await until(lambda: len(served.context.records) == 1)
        (row,) = [decode(payload) for payload in frames(journal.read().data)]
    assert (row.key, row.model, row.endpoint, row.status, row.incomplete) == ("team-a", "tiny", PATH, 200, None)


async def test_a_server_that_disconnects_during_an_upload() -> None:
    async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    server = await asyncio.start_server(refuses, "127.0.0.1", 0)
    async with server, serving([model(server.sockets[0].getsockname()[1])]) as served, client(served.port) as one:
        one.send(form(MODEL, part("file", b"x" * 4_000_000)))
        reply = await one.reply()
        assert (reply.status, reply.error["code"]) == (502, "upstream_disconnected")
        await gone(served)
        assert served.value("server_failures_total", "tiny", "tiny#0") == 1
