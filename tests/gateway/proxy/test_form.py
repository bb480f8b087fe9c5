"""The server reads the checked fields of a form, the gateway's own among them; what must not be sent ends the request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import pairwise
from time import thread_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from gateway.api.errors import Refusal
from gateway.auth.body_policy import FORBIDDEN, BodyPolicy
from gateway.ledger.journal import Journal
from gateway.ledger.recorder import Recorder
from gateway.ledger.row import decode, frames
from gateway.proxy.form import MAX_PARTS, Form
from gateway.snapshot.snapshot import Allowance, BodyRules, Limits, Model, Queue
from tests.support.examples import examples
from tests.support.forms import KEY_MAX_TOKENS, SERVED, Sent, fields_at_server, read, send
from tests.support.running import KEY, Served, key, model, serving, until
from tests.support.scripted import Conversation, Request, scripted
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


def written(request: Request) -> bytes:
    """Return the form that the server received, with the client's boundary in place of the gateway's."""
    content_type, _, boundary = str(request.header("content-type")).partition("; boundary=")
    assert content_type == "multipart/form-data" and len(boundary) == 32
    return request.body.replace(boundary.encode(), BOUNDARY.encode())


async def responses(talk: Conversation) -> None:
    await talk.respond(RESPONSE)


ORDERS = {"first": (MODEL, FILE, LANGUAGE), "last": (FILE, LANGUAGE, MODEL), "in the middle": (LANGUAGE, MODEL, FILE)}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("chunks", [0, 7, 5000])
async def test_the_fields_are_sent_as_they_came(order: str, chunks: int) -> None:
    parts = ORDERS[order]
    async with scripted(responses) as server, serving([model(server.port, served="whisper-inside")]) as served, client(served.port) as one:
        for _ in range(2):
            reply = await one.request(form(*parts, chunks=chunks))
            assert (reply.status, reply.body) == (200, RESPONSE)
        seen = server.requests[0]
        assert written(seen) == b"".join(parts).replace(b"\r\n\r\ntiny\r\n", b"\r\n\r\nwhisper-inside\r\n") + END
        assert seen.header("content-type") != server.requests[1].header("content-type"), "each form has a boundary of its own"


async def test_a_form_is_sent_in_chunks_unless_it_was_read_to_its_end() -> None:
    with way() as one:
        one.client.data_received(form(MODEL, FILE))
        one.write_batch.flush()
        head, _, body = one.server_wire.take().partition(b"\r\n\r\n")
        assert b"content-length: %d" % len(body) in head and body.endswith(b"--\r\n")
    async with scripted(responses) as server, serving([model(server.port)]) as served, client(served.port) as one_client:
        whole = form(MODEL, FILE)
        one_client.send(whole[:-200])
        await until(lambda: server.open == 1)
        one_client.send(whole[-200:])
        assert (await one_client.reply()).body == RESPONSE
        assert server.requests[0].header("transfer-encoding") == "chunked" and written(server.requests[0]) == MODEL + FILE + END


@pytest.mark.parametrize(
    ("data", "message", "detail"),
    [
        (b"--x\r\ncontent-type: a\r\ncontent-type: b\r\n\r\n", "two Content-Type", "The form has a part with two Content-Type headers."),
        (b"--x\r\nsecret\xff: 1\r\n\r\n", "The form is not valid: ", "The form is not valid."),
        (b"hello", "does not begin with its boundary", "The form does not begin with its boundary."),
    ],
)
def test_the_log_gets_the_reason_without_the_clients_text(data: bytes, message: str, detail: str) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        Form.of(b"multipart/form-data; boundary=x").feed(data)
    assert (caught.value.code, caught.value.detail) == ("invalid_value", detail)


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
    "a model of two lines": (form(part("model", b"\r\ntiny"), FILE), 404, "model_not_found"),
    "a part without a name": (form(b"--" + BOUNDARY.encode() + b"\r\nx: y\r\n\r\nz\r\n", MODEL), 400, "invalid_value"),
    "an extended name alone": (
        form(part("\"; name*=utf-8''model; x=\"", b"secret").replace(b'; name=""', b""), MODEL),
        400,
        "invalid_value",
    ),
    "a name with a control character": (form(MODEL, part("a\nb", b"")), 400, "invalid_value"),
    "a content type with a control character": (
        form(MODEL, part("file", b"", '; filename="a"\r\nContent-Type: a\0b')),
        400,
        "invalid_value",
    ),
    "a name that no quotes can hold": (form(MODEL, part("x", b"").replace(b'"x"', b"a\\; filename=b")), 400, "invalid_value"),
    "two content types": (form(MODEL, part("a", b"", "\r\nContent-Type: a/b\r\nContent-Type: c/d")), 400, "invalid_value"),
    "a folded header": (form(MODEL, part("a", b"", '\r\n ; filename="b"')), 400, "invalid_value"),
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
    "only a header like a boundary": (form(MODEL, f"--{BOUNDARY}\r\n--{BOUNDARY}--: x\r\n\r\ny\r\n".encode()), 400, "invalid_value"),
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
        while not one.server_wire.written:
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
        assert written(server.requests[0]) == FILE + MODEL + END


@pytest.mark.parametrize("parts", [(FILE,), (part("model", b""), FILE), (FILE, part("model", b""))])
@pytest.mark.parametrize("chunks", [0, 7, 5000])
async def test_the_default_model_serves_a_form_without_one(parts: tuple[bytes, ...], chunks: int) -> None:
    """The server gets the model's name in place of an empty one, or after all other fields."""
    async with scripted(responses) as server:
        models = [model(server.port, served="inside"), model(server.port, identity="other")]
        async with serving(models, default_model="tiny") as served:
            assert (await request_once(served.port, form(*parts, chunks=chunks))).body == RESPONSE
            given, inside = b"".join(parts), part("model", b"inside")
            empty = part("model", b"")
            assert written(server.requests[0]) == (given.replace(empty, inside) if empty in given else given + inside) + END
            assert served.context.records[0].model == "tiny"


async def test_a_form_without_parts_is_the_servers_to_refuse() -> None:
    async with scripted(responses) as server, serving([model(server.port)], default_model="tiny") as served:
        assert (await request_once(served.port, form())).body == RESPONSE
        assert written(server.requests[0]) == MODEL + END


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


# The fields at the server

TEXT = st.lists(
    st.sampled_from(
        [b"\r\n", b"\r", b"\n", b"--", b"-", b"B", b"\r\n--B", b"--B--", b"--B\r\n", b" ", b"true", b"1", b"40", b"41", b"\xff", b"x"]
    )
    | st.binary(max_size=4),
    max_size=6,
).map(b"".join)
NAME = st.sampled_from(
    [b"model", b"stream", b"stream_include_usage", b"stream_continuous_usage_stats", b"max_completion_tokens", b"prompt", b"vllm_xargs"]
) | st.lists(
    st.sampled_from([b'\\"', b"\\\\", b"\\", b";", b"%22", b"=", b" ", b"'", b"name", b"\xc3\xa9", b"\xe9", b"\n", b"\0", b"model", b'"']),
    max_size=5,
).map(b"".join)
LINES = st.sampled_from(
    [
        b"",
        b"\r\nContent-Type: text/plain; charset=utf-7",
        b"\r\nX: y",
        b"\r\n--B--: x",
        b"\r\nContent-Type:\t",
        b"\r\ncontent-disposition: a",
    ]
)


@st.composite
def parts(draw: st.DrawFn) -> bytes:
    options = [b'name="%b"' % draw(NAME)]
    options += draw(st.lists(st.sampled_from([b"filename=a", b"name*=model", b"name=x", b'x="; name=model"']), max_size=2))
    options += [b'filename="%b"' % draw(NAME)] * draw(st.booleans())
    disposition = b"; ".join([b"form-data", *draw(st.permutations(options))])
    padding = draw(st.sampled_from([b"", b"", b"", b" \t"]))
    return b"--B%b\r\nContent-Disposition: %b%b\r\n\r\n%b\r\n" % (padding, disposition, draw(LINES), draw(TEXT))


@settings(deadline=None, max_examples=examples(300))
@given(form_parts=st.lists(parts(), max_size=4), ending=st.sampled_from([b"--B--", b"--B--\r\n", b"--B--x\r\n--B--\r\n"]), data=st.data())
def test_the_server_reads_the_clients_fields_and_the_gateways(form_parts: list[bytes], ending: bytes, data: st.DataObject) -> None:
    """However the form arrives, or it is refused."""
    model_part = [b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n'] * data.draw(st.booleans())
    body = b"".join(data.draw(st.permutations(form_parts + model_part))) + ending
    cuts = sorted(data.draw(st.sets(st.integers(0, len(body)), max_size=8)))
    pieces = [body[start:end] for start, end in pairwise([0, *cuts, len(body)])]
    with suppress(Refusal):
        fields_at_server(b"B", pieces, cuts)


NAMES = {
    "a quote": (rb'name="a\"b"', 'a"b'),
    "a backslash": (rb'name="a\\b"', "a\\b"),
    "a percent sign": (b'name="a%22b"', "a%22b"),
    "a semicolon": (b'name="a; name=model"', "a; name=model"),
    "UTF-8": ('name="é"'.encode(), "é"),
    "Latin-1": ('name="é"'.encode("latin-1"), "é"),
    "a token": (b"name=a", "a"),
    "two names": (b'name="model"; name="a"', "a"),
    "an extended name": (b"name=a; name*=utf-8''model", "a"),
    "capitals": (b'NAME="Model"', "Model"),
    "apostrophes": (b"name='model'", "'model'"),
    "spaces": (b'name=" model "', " model "),
    "a header like a boundary": (b'name="a"\r\n--B--: x', "a"),
    "another type of text": (b'name="a"\r\nContent-Type: text/plain; charset=utf-16', "a"),
}


@pytest.mark.parametrize("what", NAMES)
def test_a_name_is_sent_as_it_was_checked(what: str) -> None:
    options, name = NAMES[what]
    fields = fields_at_server(b"B", [b"--B\r\nContent-Disposition: form-data; %b\r\n\r\nx\r\n--B--" % options])
    assert fields == [(name, "x"), ("model", SERVED), ("max_completion_tokens", str(KEY_MAX_TOKENS))]


def test_quotes_in_a_name_are_written_with_escapes() -> None:
    """Other readers than vLLM's need them."""
    sent = sent_parts(part('a\\"b', b"x", '; filename="c\\"d"'))
    assert rb'; name="a\"b"; filename="c\"d"' in sent.body


FILES = {
    "a quote": (rb'filename="a\"b"', 'a"b'),
    "backslashes": (rb'filename="a\\\\b\c\\"', "a\\\\b\\c\\"),
    "a path": (rb'filename="C:\d\e"', "e"),
    "only quotes": (b'filename="' + b'\\"' * 40 + b'"', '"' * 40),
    "UTF-8": ('filename="é.wav"'.encode(), "é.wav"),
    "nothing": (b'filename=""', ""),
}


@pytest.mark.parametrize("what", FILES)
def test_a_file_has_its_name_and_type(what: str) -> None:
    option, name = FILES[what]
    head = b'Content-Disposition: form-data; name="file"; %b\r\nContent-Transfer-Encoding: binary\r\nContent-Type: audio/x; a="b"' % option
    fields = fields_at_server(b"B", [b"--B\r\n%b\r\n\r\n--B--\r\n--B--" % head])
    assert fields[0] == ("file", (name, 'audio/x; a="b"', b"--B--"))


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


# Bounds


def sent_parts(*parts: bytes, key_max_tokens: int | None = None, content_type: bytes | None = None) -> Sent:
    """Return what the gateway sends for these parts. Raises Refusal."""
    reads = [b"".join((*parts, END))]
    return send(BOUNDARY.encode(), reads, BodyPolicy(BodyRules(), {}, {}), key_max_tokens, "tiny", content_type)


def header_of(size: int) -> bytes:
    """Return a Content-Disposition whose value has this size."""
    start = b'form-data; name="a"; filename="'
    return start + b"x" * (size - len(start) - 1) + b'"'


def options(number: int) -> bytes:
    return b"multipart/form-data; boundary=" + BOUNDARY.encode() + b"; a=b" * (number - 1)


BOUNDS: dict[str, tuple[Callable[[int], Sent], int]] = {
    "parts": (lambda number: sent_parts(*[part("a", b"x")] * number), MAX_PARTS),
    "parts and delimiters inside data": (
        lambda number: sent_parts(part("a", (b"\r\n--" + BOUNDARY.encode() + b"x") * (number - 1))),
        MAX_PARTS,
    ),
    "bytes of a model": (lambda size: sent_parts(part("model", b"m" * size)), 512),
    "options of the content type": (lambda number: sent_parts(content_type=options(number)), 16),
    "bytes of the content type": (lambda size: sent_parts(content_type=options(1).ljust(size)), 4096),
    "bytes of a part's header": (
        lambda size: sent_parts(b"--%b\r\nContent-Disposition: %b\r\n\r\nx\r\n" % (BOUNDARY.encode(), header_of(size))),
        4096,
    ),
    "digits of a number": (lambda size: sent_parts(part("n", b"0" * (size - 1) + b"1"), key_max_tokens=9), 18),
}


@pytest.mark.parametrize("what", BOUNDS)
def test_the_bounds_of_a_form(what: str) -> None:
    sent, most = BOUNDS[what]
    assert sent(most).body
    with pytest.raises(Refusal):
        sent(most + 1)


def test_a_number_is_compared_with_all_of_its_digits() -> None:
    for digits in (b"0" * 15 + b"500", b"0" * 16 + b"500", b"5" * 50):
        with pytest.raises(Refusal):
            sent_parts(part("max_completion_tokens", digits), key_max_tokens=50)


@pytest.mark.parametrize("field", ["stream", "stream_include_usage"])
def test_flags_are_read_as_pydantic_reads_them(field: str) -> None:
    """vLLM's model of the form has fields of the type bool."""
    reads = TypeAdapter(bool).validate_python
    shorts = [*"0123tfynTFYNx", "tr", "10"]
    texts = [*shorts, "on", "off", "On", "oFF", "true", "false", "TRUE", "yes", "no", "Yes", "NO"]
    for text in ("", *texts):
        other = STREAM if field == "stream_include_usage" else b""
        try:
            value = bool(text) and reads(text)
        except ValidationError:
            value = None
        requested = sent_parts(other, part(field, text.encode()), MODEL).hides_usage
        assert requested is (value is True if field == "stream" else value is False), text


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
def test_fields_are_added_at_the_end(what: str, behind: bytes) -> None:
    """However the reads are cut."""
    parts, of_model, of_key, added = ADDED[what]
    body = b"".join(parts) + END + behind
    for size in (1, 2, 3, 5, 17, 1000, len(body)):
        reads = (body[at : at + size] for at in range(0, len(body), size))
        sent = send(BOUNDARY.encode(), reads, BodyPolicy(BodyRules(max_tokens=of_model), {}, {}), of_key, "tiny")
        assert sent.model == "tiny" and sent.hides_usage is (USAGE in added)
        expected = Request(b"\r\ncontent-type: " + sent.content_type, sent.body)
        assert written(expected) == b"".join(parts) + added + END


@pytest.mark.parametrize("chunks", [0, 700])
@pytest.mark.parametrize("requested", [False, True])
async def test_streams_of_forms_are_counted(chunks: int, requested: bool) -> None:
    """vLLM reports usage at the end of a transcription's stream if requested. The client gets it only if it requested it."""
    text = b'data: {"object":"transcription.chunk","choices":[{"delta":{"content":"hi"}}]}\n\n'
    count = b'data: {"object":"transcription.chunk","choices":[],"usage":{"prompt_tokens":30,"completion_tokens":7,"total_tokens":37}}\n\n'
    done = b"data: [DONE]\n\n"

    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        for each in (text, count, done) if USAGE in written(talk.request) else (text, done):
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
        assert written(server.requests[0]) == MODEL + bound(10) + FILE + END
        assert written(server.requests[1]) == MODEL + FILE + bound(10) + END


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


SWALLOWING = part("prompt", f"--{BOUNDARY}--".encode())
"""A text that looks like the last boundary, directly behind the headers, which end with the line break that belongs to a boundary."""


async def test_a_text_like_the_last_boundary_does_not_cancel_the_keys_limit() -> None:
    limited = key(allowances=(Allowance("key team-a", Limits(max_tokens=40)),))
    async with scripted(responses) as server, serving([model(server.port)], [limited]) as served:
        assert (await request_once(served.port, form(MODEL, FILE, SWALLOWING))).status == 200
        fields = read(server.requests[0].header("content-type"), server.requests[0].body)
        assert [name for name, _ in fields] == ["model", "file", "prompt", "max_completion_tokens"]
        assert dict(fields)["prompt"] == f"--{BOUNDARY}--" and dict(fields)["max_completion_tokens"] == "40"


async def test_a_text_like_the_last_boundary_does_not_choose_the_base_model() -> None:
    """The key may use the LoRA adapter only. Without a ``model``, vLLM would serve the base."""
    limited, adapter = key(models=("lora",)), Model("lora", (), parent="tiny", served="lora")
    async with (
        scripted(responses) as server,
        serving([model(server.port), adapter], [limited]) as served,
    ):
        assert (await request_once(served.port, form(FILE, SWALLOWING))).status == 200
        fields = read(server.requests[0].header("content-type"), server.requests[0].body)
        assert [(name, value) for name, value in fields if name != "file"] == [("prompt", f"--{BOUNDARY}--"), ("model", "lora")]


async def test_a_text_like_the_last_boundary_does_not_cancel_the_request_for_usage() -> None:
    async with scripted(responses) as server, serving([model(server.port)]) as served:
        assert (await request_once(served.port, form(MODEL, part("stream", b"true"), FILE, SWALLOWING))).status == 200
        fields = read(server.requests[0].header("content-type"), server.requests[0].body)
        assert dict(fields)["stream_include_usage"] == "true"
