"""Build the most expensive request bodies, and measure what it costs to process them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Mapping
from time import thread_time
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from gateway.api.errors import Refusal
from gateway.api.routes import ROUTES
from gateway.api.strict_json import parse
from gateway.auth.body_policy import BodyPolicy
from gateway.limits.estimate import estimate
from gateway.prompts.prefix import affinity_key
from gateway.proxy.payload import merge, prepare
from gateway.snapshot.snapshot import BodyRules
from gateway.system.garbage_collector import collector_paused
from gateway.telemetry.body_shape import shape

LIMIT = 20 * 1024 * 1024
VALUES = 500_000
"""The default bounds of a body."""
POLICY = BodyPolicy(BodyRules(media_hosts=("*.example.com",), max_tokens=100), {"temperature": 1}, {"seed": 1})
T = TypeVar("T")

UNITS: Mapping[str, bytes] = MappingProxyType(
    {
        "empty lists": b"[]",
        "empty objects": b"{}",
        "small objects": b'{"a":1}',
        "objects with long names": b'{"%b":1}' % (b"k" * 70),
        "deep lists": b"[" * 60 + b"]" * 60,
        "numbers": b"1",
        "digits": b"9" * 18,
        "floats": b"1.2345678901234567e-100",
        "huge floats and digits": b'1e19,"%b"' % (b"1" * 19),
        "strings": b'"' + b"x" * 38 + b'"',
        "escapes": b'"' + b"\\n" * 18 + b'"',
        "quotes": b'"' + b'\\"[{' * 10 + b'"',
        "backslashes": b'"' + b"\\\\" * 20 + b'"',
        "brackets in strings": b'"[["',
        "emoji": b'"' + "\U0001f600".encode() * 9 + b'"',
        "escaped emoji": b'"' + b"\\ud83d\\ude00" * 3 + b'"',
        "developer messages": b'{"role":"developer","content":"%b"}' % (b"x" * 200),
        "short developer messages": b'{"role":"developer"}',
        "developer messages of parts": b'{"role":"developer","content":[{"type":"text","text":"x"}]}',
        "function calls": b'{"function_call":{}}',
        "function results": b'{"role":"function","content":"x"}',
        "images": b'{"image_url":"https://a.example.com/x"}',
        "image parts": b'{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]}',
        "long URLs": b'{"image_url":"https://%b.example.com/%b"}' % (b"a-a." * 50, b"a" * 4000),
        "ordinary messages": b'{"role":"user","content":"%b"}' % (b"word, " * 40),
    }
)
"""Elements that fill a list in a body, by name."""

POSITIONS: Mapping[str, tuple[str, bytes, bytes]] = MappingProxyType(
    {
        "messages": ("/v1/chat/completions", b'{"model":"m","messages":[', b"]}"),
        "messages in extra_body": ("/v1/chat/completions", b'{"model":"m","messages":[],"extra_body":{"messages":[', b"]}}"),
        "functions beside messages": ("/v1/chat/completions", b'{"model":"m","functions":[],"messages":[', b"]}"),
        "a message's parts": ("/v1/chat/completions", b'{"model":"m","messages":[{"role":"user","content":[', b"]}]}"),
        "tools": ("/v1/chat/completions", b'{"model":"m","messages":[],"tools":[', b"]}"),
        "input": ("/v1/responses", b'{"model":"m","input":[', b"]}"),
        "prompt": ("/v1/completions", b'{"model":"m","n":2,"prompt":[', b"]}"),
        "system": ("/v1/messages", b'{"model":"m","messages":[],"system":[', b"]}"),
        "metadata": ("/v1/chat/completions", b'{"model":"m","messages":[],"metadata":[', b"]}"),
    }
)
"""Positions of the list by name: the route, and the bytes before and after the list."""


def text(piece: bytes, size: int) -> bytes:
    """Return a body of ``size`` bytes whose only message is one text."""
    opening, closing = b'{"model":"m","messages":[{"role":"user","content":"', b'"}]}'
    return opening + piece * ((size - len(opening) - len(closing)) // len(piece)) + closing


TEXTS: Mapping[str, bytes] = MappingProxyType(
    {
        "letters": b"x",
        "newlines": b"\\n",
        "quotes": b'\\"',
        "emoji": "\U0001f600".encode(),
        "letters and emoji": b"x" * 1000 + "\U0001f600".encode(),
        "commas": b", ",
    }
)
"""Pieces that fill one long text, by name."""


def filled(position: str, unit: bytes, size: int, values: int = VALUES) -> tuple[str, bytes]:
    """Return a route, and a body that is as large as ``size`` bytes and ``values`` allow."""
    path, opening, closing = POSITIONS[position]
    marks = sum(unit.count(mark) for mark in (b",", b":", b"[", b"{")) + 1
    count = max(min((size - len(opening) - len(closing)) // (len(unit) + 1), (values - 30) // marks), 0)
    return path, opening + b",".join([unit] * count) + closing


class Cost(NamedTuple):
    """CPU time in seconds: of all steps together, and of the longest step."""

    total: float
    longest: float


class StepTimer:
    """Measure the CPU time of steps. Each step corresponds to one event-loop iteration."""

    def __init__(self) -> None:
        self.costs: dict[str, Cost] = {}

    def steps(self, name: str, work: Generator[None, None, T]) -> T:
        total = longest = 0.0
        try:
            while True:
                began = thread_time()
                try:
                    next(work)
                except StopIteration as end:
                    value: T = end.value
                    return value
                finally:
                    took = thread_time() - began
                    total, longest = total + took, max(longest, took)
        finally:
            self.costs[name] = Cost(total, longest)

    def step(self, name: str, work: Callable[[], T]) -> T:
        began = thread_time()
        try:
            return work()
        finally:
            took = thread_time() - began
            self.costs[name] = Cost(took, took)


def processed(path: str, body: bytes) -> dict[str, Cost]:
    """Return the cost of each transformation of a body, up to the transformation that rejects it."""
    route, measured = ROUTES[path], StepTimer()
    gc.collect()
    with collector_paused():
        try:
            document: dict[str, Any] = merge(measured.steps("parse", parse(body, VALUES)))
            measured.step("shape", lambda: shape(document))
            prepared = measured.steps("prepare", prepare(document, POLICY, route, len(body), large=True))
            measured.step("estimate", lambda: estimate(prepared.document, prepared.path, len(body), prepared.media))
            measured.step("affinity_key", lambda: affinity_key(prepared.document))
            measured.step("encode", lambda: prepared.serialized("m"))
        except Refusal as refusal:
            measured.costs["refused: " + refusal.message[:60]] = Cost(0.0, 0.0)
    return measured.costs
