"""The requests of one client that cost the gateway the most, and bounds on their cost. ``FLOODS`` is the table.

The rule: the bounds are steps of the interpreter (see ``tests.support.opcodes``): in one event-loop iteration, for which another client
waits, and in total for each KiB that the client sends. A step takes about 6 ns.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import orjson

from tests.support.bodies import UNITS, filled
from tests.support.issuer import Issuer, SigningKey
from tests.support.running import KEY, MODEL

ISSUER = Issuer("https://login.example.com/", SigningKey("RS256", "rs"))
"""Has signed the tokens of a flood, which were changed afterwards."""
_SMALL = 64 * 1024 - 300
_BOUNDARY = "----flood"
_ONE = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]})


@dataclass(frozen=True, slots=True)
class Flood:
    """The bytes of one connection; ``make`` gets the number of the connection."""

    make: Callable[[int], bytes]
    iteration: int
    """Steps in one event-loop iteration."""
    per_kib: int
    """Steps for each KiB that is sent."""
    responses: int = 1


def post(body: bytes, *lines: bytes, path: str = "/v1/chat/completions", token: str = KEY, media: str = "application/json") -> bytes:
    """Return a request."""
    start = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {token}\r\nContent-Type: {media}\r\n".encode()
    return start + b"".join(lines) + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _body(unit: bytes, position: str, size: int) -> tuple[str, bytes]:
    path, body = filled(position, unit, size)
    return path, body.replace(b'"model":"m"', b'"model":"%b"' % MODEL.encode(), 1)


def _json(unit: bytes, position: str = "messages", size: int = _SMALL) -> Callable[[int], bytes]:
    path, body = _body(unit, position, size)
    return lambda _: post(body, path=path)


def _zipped(_: int) -> bytes:
    return post(gzip.compress(_body(b"[]", "metadata", 1 << 20)[1], 9), b"Content-Encoding: gzip\r\n")


def _single_byte_chunks(_: int) -> bytes:
    body = orjson.dumps({**orjson.loads(_ONE), "user": "x" * 40_000})
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    return post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + chunks + b"0\r\n\r\n"


def _form(_: int) -> bytes:
    part = '--{}\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    parts = [part.format(_BOUNDARY, "model", MODEL), *(part.format(_BOUNDARY, f"a{number}", "x") for number in range(990))]
    body = "".join([*parts, f"--{_BOUNDARY}--\r\n"]).encode()
    return post(body, path="/v1/audio/transcriptions", media=f"multipart/form-data; boundary={_BOUNDARY}")


def _pipelined(_: int) -> bytes:
    return post(_ONE, b"".join(b"X-%d: b\r\n" % number for number in range(95))) * 17


def _forged_tokens(number: int) -> bytes:
    """Return pipelined requests, each with another token whose signature is wrong."""
    start, _, signature = ISSUER.token().rpartition(".")
    tokens = [f"{start}.{number * 17 + each:08}{signature[8:]}" for each in range(17)]
    return b"".join(post(_ONE, token=token) for token in tokens)


def _trailers(_: int) -> bytes:
    start = post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    return start + b"%x\r\n%b\r\n0\r\n" % (len(_ONE), _ONE) + b"a: b\r\n" * 10_000 + b"\r\n"


FLOODS: Mapping[str, Flood] = MappingProxyType(
    {
        "lists of 60 levels": Flood(_json(UNITS["deep lists"]), 800_000, 45_000),
        "empty objects as messages": Flood(_json(b"{}"), 800_000, 21_000),
        "messages with image URLs": Flood(_json(UNITS["images"]), 800_000, 4_000),
        "numbers as messages": Flood(_json(b"1", "functions beside messages"), 950_000, 15_000),
        "a megabyte of deep lists": Flood(_json(UNITS["deep lists"], "metadata", 1 << 20), 800_000, 1_000),
        "a megabyte of empty lists": Flood(_json(b"[]", "metadata", 1 << 20), 800_000, 1_000),
        "a megabyte of empty objects": Flood(_json(b"{}", "messages", 1 << 20), 800_000, 21_000),
        "a kilobyte of gzip": Flood(_zipped, 800_000, 90_000),
        "chunks of one byte": Flood(_single_byte_chunks, 800_000, 38_000),
        "a form of 991 parts": Flood(_form, 800_000, 35_000),
        "pipelined requests with 100 headers": Flood(_pipelined, 150_000, 8_000, responses=17),
        "pipelined forged tokens": Flood(_forged_tokens, 300_000, 8_000),
        "10,000 trailers": Flood(_trailers, 300_000, 24_000),
    }
)
