"""Bodies with a Content-Encoding are decoded within bounds, or refused in clear words."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.body_memory import FREE
from gateway.api.errors import Refusal
from gateway.client.http.content_encoding import ENCODINGS, decoded
from gateway.snapshot.snapshot import Clients
from gateway.system.steps import finished
from tests.gateway.proxy.test_form import BOUNDARY, FILE, form
from tests.gateway.proxy.test_form import MODEL as MODEL_PART
from tests.support import zstd
from tests.support.rows import each_row
from tests.support.running import MODEL, model, serving, until
from tests.support.scripted import Conversation, scripted
from tests.support.wire import COMPLETION, chat, client, request, request_once

ENCODE: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstd.compress}
WINDOW_LOG = zstd.CompressionParameter.window_log
LIMIT = 20 * 1024 * 1024
NOISE = os.urandom(1000)
"""Bytes that no encoder makes shorter."""


async def respond(talk: Conversation) -> None:
    await talk.respond(COMPLETION)


def encoded(body: object, encoding: str, path: str = "/v1/chat/completions") -> bytes:
    return request(ENCODE[encoding](orjson.dumps(body)), path, extra=(f"content-encoding: {encoding}",))


@settings(deadline=None)
@given(data=st.binary(max_size=2000), times=st.integers(1, 300), encoding=st.sampled_from(sorted(ENCODE)))
def test_what_was_encoded(data: bytes, times: int, encoding: str) -> None:
    body = data * times
    assert finished(decoded(ENCODE[encoding](body), encoding, LIMIT)) == body


@pytest.mark.parametrize("encoding", ENCODE)
@pytest.mark.parametrize("size", [0, 65_535, 65_536, 256 * 1024, 256 * 1024 + 1, 1024 * 1024])
def test_the_edges_of_steps(encoding: str, size: int) -> None:
    for body in (b"x" * size, os.urandom(size)):
        assert finished(decoded(ENCODE[encoding](body), encoding, LIMIT)) == body


BROKEN: dict[str, tuple[bytes, str, str]] = {
    "gzip: something else": (b"hello", "gzip", "not valid gzip"),
    "gzip: zlib": (zlib.compress(b"hello"), "gzip", "not valid gzip"),
    "gzip: nothing": (b"", "gzip", "ends before"),
    "gzip: cut": (gzip.compress(NOISE)[:-9], "gzip", "ends before"),
    "gzip: without its end": (gzip.compress(NOISE)[:-1], "gzip", "ends before"),
    "gzip: a wrong checksum": (gzip.compress(NOISE)[:-8] + bytes(8), "gzip", "not valid gzip"),
    "gzip: two members": (gzip.compress(b"a") * 2, "gzip", "after its gzip data"),
    "gzip: more behind it": (gzip.compress(b"a") + b"\n", "gzip", "after its gzip data"),
    "gzip: much more behind it": (gzip.compress(b"a") + bytes(200_000), "gzip", "after its gzip data"),
    "zstd: something else": (b"hello world", "zstd", "not a valid zstd"),
    "zstd: nothing": (b"", "zstd", "ends before"),
    "zstd: cut": (zstd.compress(NOISE)[:-1], "zstd", "ends before"),
    "zstd: two frames": (zstd.compress(b"a") * 2, "zstd", "after its zstd data"),
    "zstd: more behind it": (zstd.compress(b"a") + b"\n", "zstd", "after its zstd data"),
    "zstd: a large window": (zstd.compress(bytes(30_000_000), options={WINDOW_LOG: 24}), "zstd", "more than 8 MiB"),
    "zstd: a dictionary": (
        zstd.compress(b"hello", zstd_dict=zstd.train_dict([b"hello %d" % n for n in range(1000)], 1000)), "zstd", "needs a dictionary",
    ),
}  # fmt: skip


@each_row("name", BROKEN)
def test_invalid_data(name: str) -> None:
    data, encoding, message = BROKEN[name]
    with pytest.raises(Refusal, match=message) as caught:
        finished(decoded(data, encoding, LIMIT))
    assert (caught.value.code, caught.value.spec.status) == ("invalid_request", 400)


@pytest.mark.parametrize("encoding", ENCODE)
def test_decoding_stops_at_the_bounds(encoding: str) -> None:
    held: list[int] = []
    little, noise = ENCODE[encoding](bytes(100_000_000)), ENCODE[encoding](os.urandom(2_000_000))
    with pytest.raises(Refusal, match="100 times") as caught:
        finished(decoded(little, encoding, LIMIT, held.append))
    assert caught.value.code == "request_too_large"
    assert held[-1] <= max(1024 * 1024, 100 * len(little)) + len(little)
    held.clear()
    with pytest.raises(Refusal, match="larger than 1000000 bytes"):
        finished(decoded(noise, encoding, 1_000_000, held.append))
    assert held[-1] <= 1_000_000 + len(noise)


def test_what_little_becomes_is_never_refused_for_its_ratio() -> None:
    assert len(finished(decoded(gzip.compress(b"x" * 1_000_000), "gzip", LIMIT))) == 1_000_000


# Over the wire


@pytest.mark.parametrize("encoding", ENCODE)
@pytest.mark.parametrize("size", [1, 40_000, 300_000, 3_000_000])
async def test_a_body_arrives_as_its_client_meant_it(encoding: str, size: int) -> None:
    body = chat(user=os.urandom(size // 2 + 1).hex()[:size], stream=False)
    async with scripted(respond) as server, serving([model(server.port)]) as served, client(served.port) as one:
        assert (await one.request(encoded(body, encoding))).status == 200
        assert (await one.request(request(body, extra=("content-encoding: Identity",)))).status == 200
        assert [seen.json for seen in server.requests] == [{**body, "model": MODEL}] * 2
        assert server.requests[0].header("content-encoding") is None
        assert served.context.records[0].request_bytes == len(encoded(body, encoding).partition(b"\r\n\r\n")[2])
        await until(lambda: served.context.memory.held == 0)


async def test_other_encodings_are_refused_with_those_that_are_accepted() -> None:
    async with serving([model(1)]) as served:
        for encoding in ("br", "deflate", "gzip, identity", "gzip, gzip", "x-gzip", ""):
            reply = await request_once(served.port, request(extra=(f"content-encoding: {encoding}",)))
            assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type"), encoding
            assert ", ".join(ENCODINGS) in str(reply.error["message"])
        data = form(MODEL_PART, FILE).replace(b"\r\ncontent-type", b"\r\ncontent-encoding: gzip\r\ncontent-type", 1)
        reply = await request_once(served.port, data)
        assert reply.status == 415 and "form" in str(reply.error["message"]) and BOUNDARY


async def test_what_a_body_becomes_counts_as_memory() -> None:
    body = chat(user=NOISE.hex() * 500)
    data = encoded(body, "gzip")
    async with scripted(respond) as server, serving([model(server.port)], clients=Clients(body_memory=500_000)) as served:
        reply = await request_once(served.port, data)
        assert len(data) < FREE and (reply.status, reply.error["code"]) == (503, "overloaded")
        await until(lambda: served.context.memory.held == 0)
        assert (await request_once(served.port, encoded(chat(), "gzip"))).status == 200
