"""Streams of each dialect, in any chunks and reads: what a client gets, and what the request is charged for.

The reference parses each event with Python's ``json`` and leaves out what docs/routes.md says: the usage that the client did not request.
No other byte may differ, whether an event takes the fast path or not.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple, TypeGuard

from gateway.api.usage import Usage
from gateway.snapshot.link import Health
from gateway.snapshot.snapshot import Allowance, Limits
from tests.fuzz.differential.cases import Case, check, choose, cut
from tests.support.running import KEY, MODEL, key
from tests.support.way import Way, Wire, way
from tests.support.wire import DONE, ROLE, STREAM_HEAD, request
from upstream.balancing.server import Condition
from upstream.http.connection import Connection

# The reference


_OF_CHOICES = ("chat", "completions")
"""The dialects whose events have choices and usage."""


class _Options(NamedTuple):
    """The usage that a request requests. ``counted``: its key has a limit on tokens, so the gateway needs the running usage."""

    include_usage: bool
    continuous: bool
    counted: bool
    dialect: str

    @property
    def hides_final(self) -> bool:
        return not self.include_usage and self.dialect in _OF_CHOICES

    @property
    def hides_running(self) -> bool:
        return self.counted and not (self.include_usage and self.continuous) and self.dialect in _OF_CHOICES


def _document(event: bytes) -> Any:
    lines = [line.partition(b":")[2].removeprefix(b" ") for line in re.split(rb"\r\n|\n|\r", event) if line.startswith(b"data:")]
    try:
        return json.loads(b"\n".join(lines), strict=False)
    except ValueError:
        return None


def _has_counts(usage: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(usage, dict) and ("prompt_tokens" in usage or "completion_tokens" in usage)


def _expected(events: Sequence[bytes], options: _Options) -> bytes:
    """Return the bytes that the client gets of these events."""
    return b"".join(_fingerprinted(_shown(event, options), event, after, options) for event, after in pairwise((*events, b"")))


def _fingerprinted(shown: bytes, event: bytes, after: bytes, options: _Options) -> bytes:
    """Return the last event of a choice with the fingerprint that its server has moved to the final usage."""
    document, final = _document(event), _document(after)
    if not (isinstance(document, dict) and isinstance(final, dict) and options.hides_final and final.get("choices") == []):
        return shown
    choices, name = document.get("choices"), final.get("system_fingerprint")
    is_last = isinstance(choices, list) and any(isinstance(each, dict) and each.get("finish_reason") is not None for each in choices)
    if not (is_last and isinstance(name, str) and _has_counts(final.get("usage"))) or "system_fingerprint" in document:
        return shown
    data = shown.rstrip(b"\r\n")
    return b'%b,"system_fingerprint":%b}%b' % (data[:-1], json.dumps(name).encode(), shown[len(data) :]) if data.endswith(b"}") else shown


def _shown(event: bytes, options: _Options) -> bytes:
    document = _document(event)
    if not isinstance(document, dict):
        return event
    usage, choices = document.get("usage"), document.get("choices")
    if choices == [] and _has_counts(usage) and options.hides_final:
        return b""
    if choices and usage is not None and options.hides_running:
        return _without(event.decode(), "usage").encode()
    return event


_SPACE = re.compile(r"[ \t]*")


def _without(text: str, name: str) -> str:
    """Return the event without a field of its object, and without one comma."""
    decoder = json.JSONDecoder(strict=False)
    at = text.index("{") + 1
    while True:
        start = at
        key, at = decoder.raw_decode(text, _skip(text, at))
        at = _skip(text, at) + 1  # behind the colon
        _, at = decoder.raw_decode(text, _skip(text, at))
        if key == name:
            break
        at = _skip(text, at) + 1  # behind the comma
    if text[start - 1] == ",":
        return text[: start - 1] + text[at:]
    at = _skip(text, at)
    return text[:start] + text[at + (text[at] == ",") :]


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


_TOKENS = re.compile(rb'("(?:\\.|[^"\\])*")|[ \t]+')


def _packed(body: bytes) -> bytes:
    """Return the bytes without spaces outside of strings: which spaces a removed field takes with it has no meaning."""
    return _TOKENS.sub(lambda found: found[1] or b"", body)


def _usage(usage: dict[str, Any]) -> Usage:
    inward, outward = (usage.get(f"{name}_tokens_details") or {} for name in ("prompt", "completion"))
    cached, reasoning = inward.get("cached_tokens") or 0, outward.get("reasoning_tokens") or 0
    return Usage(usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0, cached, reasoning)


def _charge(events: Sequence[bytes], options: _Options) -> Usage | None:
    """Return what these events of choices cost by the server's counts; None if the counts do not cover them."""
    final: Usage | None = None
    running: dict[int, Usage] = {}
    covered = True
    for event in events:
        document = _document(event)
        if not isinstance(document, dict) or not isinstance(document.get("choices"), list):
            continue
        choices, usage = document["choices"], document.get("usage")
        if choices == []:
            final = _usage(usage) if _has_counts(usage) else final
        elif _has_counts(usage) and len(choices) == 1 and isinstance(choices[0].get("index"), int):
            running[choices[0]["index"]] = _usage(usage)
        else:
            covered = False
    if final is not None:
        return final
    if not running or not covered or not options.counted:
        return None
    each = running.values()
    return Usage(max(one.prompt for one in each), sum(one.completion for one in each), 0, sum(one.reasoning for one in each))


# The gateway

LIMITED = "sk-limited"
_COUNT = b'{"count":9,"input_tokens":9}'
_COUNTED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(_COUNT), _COUNT)
_ITERATIONS = 50
"""Event-loop iterations in which a request ends when its server has counted the prompt."""


def _request(options: _Options, choices: int) -> bytes:
    token = LIMITED if options.counted else KEY
    stream: dict[str, Any] = {"model": MODEL, "stream": True}
    if options.dialect in _OF_CHOICES:
        stream["stream_options"] = {"include_usage": options.include_usage, "continuous_usage_stats": options.continuous}
        stream["n"] = choices
    messages = [{"role": "user", "content": "Hello"}]
    match options.dialect:
        case "chat":
            return request(stream | {"messages": messages}, token=token)
        case "completions":
            return request(stream | {"prompt": "Hello"}, "/v1/completions", token=token)
        case "responses":
            return request(stream | {"input": "Hello"}, "/v1/responses", token=token)
    return request(stream | {"messages": messages, "max_tokens": 9}, "/v1/messages", token=token)


class _Relayed(NamedTuple):
    """The response of a client, and the record of its request."""

    body: bytes
    complete: bool
    status: int
    code: str | None
    incomplete: str | None
    usage: Usage | None
    estimated_by: str | None
    response_bytes: int


class _Gateway:
    """A worker between transports without sockets, for one stream after the other."""

    def __init__(self, one: Way) -> None:
        self._one = one
        (self._server,) = one.worker.fleet
        before = one.worker.snapshot
        limited = key("limited", LIMITED, allowances=(Allowance("key limited", Limits(tokens_per_day=1 << 50)),))
        one.worker.apply_snapshot(replace(before, keys=(*before.keys, limited)))
        one.worker.apply_health(Health({self._server.spec.name: Condition.UP}, {}))

    def _reconnect(self) -> None:
        """Add an idle connection to the server, and lose the one before."""
        one, lost = self._one, self._one.server
        one.server, one.server_wire = Connection(self._server.spec.name, self._server.add_idle_connection, one.write_batch), Wire()
        one.server_wire.set_protocol(one.server)
        one.server.connection_made(one.server_wire)
        self._server.add_idle_connection(one.server)
        lost.connection_lost(None)
        one.write_batch.flush()

    async def stream(self, sent: bytes, reads: Sequence[bytes], *, truncated: bool) -> _Relayed:
        """Return what the client gets of a stream that arrives in these reads, and of which the server omits the rest."""
        one, records = self._one, self._one.context.records
        one.client.data_received(sent)
        one.write_batch.flush()
        check(one.server_wire.take(), "the request is forwarded", sent)
        for read in (STREAM_HEAD, *reads):
            if not one.server_wire.is_closing():
                one.server_wire.receive(read)
                one.write_batch.flush()
        if truncated or one.server_wire.is_closing():
            self._reconnect()
        for _ in range(_ITERATIONS):
            if records:
                break
            if one.server_wire.take():  # the gateway lets the server count the prompt
                one.server_wire.receive(_COUNTED)
            await asyncio.sleep(0)
        body, complete = _unframed(one.client_wire.take())
        check(len(records) == 1, "one record for a request", records, body, reads)
        record = records.pop()
        if one.client_wire.is_closing():
            one.client.connection_lost(None)
            one.client, one.client_wire = one.worker.connection(), Wire()
            one.client.connection_made(one.client_wire)
        return _Relayed(
            body, complete, record.status, record.code, record.incomplete, record.usage, record.estimated_by, record.response_bytes
        )


def _unframed(response: bytes) -> tuple[bytes, bool]:
    """Return the body of a chunked response, and whether its end has been sent."""
    head, _, rest = response.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head:
        return rest, True
    body, at = b"", 0
    while (line := rest.find(b"\r\n", at)) >= 0:
        size = int(rest[at:line], 16)
        if size == 0:
            return body, rest[line:] == b"\r\n\r\n"
        body, at = body + rest[line + 2 : line + 2 + size], line + size + 4
    return body, False


# Generated streams

_TEXTS = (
    *[b"a", b" the", b"", b"hello"] * 4,
    b"error",
    b"usage",
    b"x" * 300,
    b'\\"',
    b"\\\\",
    b"\\n",
    b"abort",
    b'\\"abort\\"',
    b"\\u0022",
    b"\\u00e9",
    b"\\u0075sage",
    "é".encode(),
    b"}",
    b"{",
    b"data: [DONE]",
    b'\\"usage\\":{',
    b'},\\"usage\\":{\\"prompt_tokens\\":9}',
    b"b" * 1990,
    b"\\ud83d\\ude00",
    b'\\"choices\\":[]',
)
_DETAILS = (b"", b"", b',"completion_tokens_details":null', b',"completion_tokens_details":{"reasoning_tokens":%d}')
_FINAL_DETAILS = (b"", b',"prompt_tokens_details":{"cached_tokens":1}', b',"prompt_tokens_details":null', b',"x":[1,{"y":2}]')
_FIRST_FIELDS: tuple[list[bytes], ...] = (
    [b'"id":"chatcmpl-1"', b'"object":"chat.completion.chunk"', b'"created":1', b'"model":"tiny"'],
    [b'"id":"chatcmpl-1"', b'"object":"chat.completion.chunk"'],
    [b'"id":"cmpl-1"'],
    [],
)
_FINISHES = (b'"stop"', b'"length"', b'"abort"', b'"\\u0061bort"', b'"tool_calls"')
_COMMENTS = (
    b": ping\n\n",
    b":\n\n",
    b": %b\n\n" % (b"c" * 80),
    b": usage\n\n",
    b"\n: x\n\n",
    b"id: 1\nretry: 5\n\n",
    b"data: x\n\n",
    b"data: [1]\n\n",
)
_DONE = b"data: [DONE]\n\n"


class _Writer:
    """Writes the events of one stream of choices, with one style for most of them, as a server does."""

    def __init__(self, random: Random, dialect: str, choices: int) -> None:
        self._random = random
        self._choices = choices
        self._first_fields = choose(random, _FIRST_FIELDS)
        self._is_chat = dialect != "completions"
        self._details = choose(random, _DETAILS)
        self._total = [0] * choices
        self._finish = choose(random, (b',"finish_reason":null', b',"finish_reason":null', b""))
        self.running = random.random() < 0.75
        self.spaced = random.random() < 0.15
        self.odd = random.random() < 0.3
        """Events may differ in the order of their fields, and some have no running usage."""

    def _usage(self, completion: int, details: bytes) -> bytes:
        if b"%d" in details:
            details %= completion
        order = self._random.random()
        if order < 0.9 or not self.odd:
            return b'"usage":{"prompt_tokens":9,"total_tokens":%d,"completion_tokens":%d%b}' % (9 + completion, completion, details)
        if order < 0.97:
            return b'"usage":{"completion_tokens":%d,"prompt_tokens":9%b}' % (completion, details)
        return b'"\\u0075sage":{"prompt_tokens":9,"completion_tokens":%d}' % completion

    def _event(self, choices: bytes, usage: bytes | None, more: Sequence[bytes] = ()) -> bytes:
        fields = [*self._first_fields, b'"choices":' + choices, *more]
        if usage is not None:
            fields.append(usage)
        if self.odd and self._random.random() < 0.15:
            self._random.shuffle(fields)
        if self.spaced:
            return b"data: {" + b", ".join(field.replace(b'":', b'": ', 1) for field in fields) + b"}\n\n"
        return b"data: {" + b",".join(fields) + b"}\n\n"

    def chunk(self, text: bytes, finish: bytes | None = None) -> bytes:
        random = self._random
        index = int(random.random() * self._choices)
        self._total[index] += 1 + (random.random() < 0.1)
        delta = b'"text":"%b"' % text
        if self._is_chat:
            kind = random.random()
            content = b'{"content":"%b"}'
            if kind < 0.1:
                content = choose(
                    random,
                    (
                        b'{"reasoning":"%b"}',
                        b'{"tool_calls":[{"index":0,"function":{"arguments":"%b"}}]}',
                        b'{"role":"assistant","content":"%b"}',
                    ),
                )
            delta = b'"delta":' + content % text
        rest = self._finish if finish is None else b',"finish_reason":' + finish
        if self.odd and random.random() < 0.1:
            rest = b',"logprobs":{"content":[{"token":"%b","logprob":-0.5}]}' % text + rest
        choice = b'[{"index":%d,%b%b}]' % (index, delta, rest)
        has_usage = self.running and not (self.odd and random.random() < 0.15)
        usage = self._usage(self._total[index], self._details) if has_usage else None
        if usage is None and self.odd and random.random() < 0.2:
            usage = b'"usage":null'
        return self._event(choice, usage)

    def last(self) -> bytes:
        random = self._random
        details = self._details if random.random() < 0.6 else choose(random, _FINAL_DETAILS)
        more = [b'"system_fingerprint":"v"'] if random.random() < 0.4 else []
        usage = self._usage(sum(self._total), details)
        return self._event(b"[]", *((usage, more) if random.random() < 0.5 else (None, [usage, *more])))


def _choice_events(random: Random, dialect: str, choices: int) -> tuple[list[bytes], bool]:
    writer = _Writer(random, dialect, choices)
    events = [writer.chunk(b"")] if dialect == "chat" else []
    for _ in range(int(random.random() * 9)):
        kind = random.random()
        if kind < 0.88:
            events.append(writer.chunk(choose(random, _TEXTS)))
        elif kind < 0.94:
            events.append(choose(random, _COMMENTS))
        elif kind < 0.97:
            events.append(writer.chunk(b"", choose(random, _FINISHES)))
        elif writer.odd:
            events.append(writer.last())
    if random.random() < 0.8:
        events.append(writer.chunk(b"", b'"stop"'))
    if random.random() < 0.85:
        events.append(writer.last())
    return [*events, _DONE], writer.spaced


def _named(kind: str, fields: bytes = b"") -> bytes:
    return b'event: %b\ndata: {"type":"%b"%b}\n\n' % (kind.encode(), kind.encode(), fields)


def _response_events(random: Random) -> list[bytes]:
    usage = b'"usage":{"input_tokens":9,"output_tokens":%d}' % (random.random() * 9)
    events = [
        _named("response.created", b',"response":{"status":"in_progress","usage":null}'),
        _named("response.output_item.added", b',"item":{"type":"message","status":"in_progress"}'),
    ]
    events += [_named("response.output_text.delta", b',"delta":"%b"' % choose(random, _TEXTS)) for _ in range(int(random.random() * 6))]
    last = choose(random, ("response.completed", "response.completed", "response.incomplete"))
    status = b"cancelled" if random.random() < 0.1 else b"completed"
    return [*events, _named(last, b',"response":{"status":"%b",%b}' % (status, usage))]


def _message_events(random: Random) -> list[bytes]:
    events = [
        _named("message_start", b',"message":{"usage":{"input_tokens":9,"output_tokens":0}}'),
        _named("content_block_start", b',"index":0,"content_block":{"type":"text","text":""}'),
    ]
    for _ in range(int(random.random() * 6)):
        text = choose(random, _TEXTS)
        events.append(_named("content_block_delta", b',"index":0,"delta":{"type":"text_delta","text":"%b"}' % text))
    usage = b',"delta":{"stop_reason":"end_turn"},"usage":{"input_tokens":9,"output_tokens":%d}' % (random.random() * 9)
    return [*events, _named("content_block_stop", b',"index":0'), _named("message_delta", usage), _named("message_stop")]


_DIALECTS = (*["chat"] * 6, "completions", "completions", "responses", "messages")


def _frame(random: Random, data: bytes) -> bytes:
    form = b"%x" if random.random() < 0.95 else choose(random, (b"%X", b"0%x", b"%x;e=1"))
    return form % len(data) + b"\r\n" + data + b"\r\n"


def _reads(random: Random, events: Sequence[bytes], end: bytes) -> list[list[bytes]]:
    """Return the same events in several ways: one in each read, each in two, some joined, and cut anywhere."""
    frames = [_frame(random, event) for event in events]
    halves = [half for frame in frames for half in (frame[: len(frame) // 2], frame[len(frame) // 2 :])]
    joined, pending = list[bytes](), b""
    for event in events:
        pending += event
        if random.random() < 0.6:
            joined.append(_frame(random, pending))
            pending = b""
    if pending:
        joined.append(_frame(random, pending))
    data = b"".join(events)
    anywhere = [_frame(random, piece) for piece in cut(random, data, 9)]
    return [[*frames, end], [*halves, end], [*joined, end], cut(random, b"".join(anywhere) + end, 9)]


async def _compare(random: Random, gateway: _Gateway) -> None:
    dialect = choose(random, _DIALECTS)
    choices = 2 if dialect in _OF_CHOICES and random.random() < 0.15 else 1
    options = _Options(random.random() < 0.4, random.random() < 0.3, random.random() < 0.8, dialect)
    makers: dict[str, Callable[[Random], list[bytes]]] = {"responses": _response_events, "messages": _message_events}
    maker = makers.get(dialect)
    events, spaced = (maker(random), False) if maker is not None else _choice_events(random, dialect, choices)
    if random.random() < 0.1:
        events = [event.replace(b"\n", choose(random, (b"\r\n", b"\r\n", b"\n"))) for event in events]
    truncated = random.random() < 0.25
    sent = events[: 1 + int(random.random() * len(events))] if truncated else events
    expected = _expected(sent, options)
    results = []
    query = _request(options, choices)
    for reads in _reads(random, sent, b"" if truncated else b"0\r\n\r\n"):
        result = await gateway.stream(query, reads, truncated=truncated)
        if truncated:  # a complete stream resets the failures of the server, which is ejected for several
            await gateway.stream(_request(_PLAIN, 1), _PLAIN_READS, truncated=False)
        _check_bytes(result.body, expected, options, reads, spaced=spaced, whole=not truncated)
        results.append((result, reads))
    first, one_by_one = results[0]
    for result, reads in results[1:]:
        differing = [name for name, value, other in zip(_Relayed._fields, result, first, strict=True) if value != other]
        if differing:
            values = [(getattr(result, name), getattr(first, name)) for name in differing]
            check(False, f"the reads change {', '.join(differing)}", options, values, reads, one_by_one)
    charge = _charge(sent, options) if dialect in _OF_CHOICES else None
    if charge is not None and first.status < 400:
        check(first.usage == charge, "a charge differs from the server's count", options, first, charge, sent)


def _check_bytes(body: bytes, expected: bytes, options: _Options, reads: Sequence[bytes], *, spaced: bool, whole: bool) -> None:
    if spaced:
        body, expected = _packed(body), _packed(expected)
    same = body == expected if whole else body.startswith(expected)
    check(same, "a client gets other bytes than the reference", options, body, expected, reads)


_PLAIN = _Options(False, False, False, "chat")
_PLAIN_READS = [b"%x\r\n%b\r\n" % (len(event), event) for event in (ROLE, DONE)] + [b"0\r\n\r\n"]


class _Streams:
    """Runs the cases in one event loop. A gateway that failed in a case is replaced, so that the next case is independent of it."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._stack = ExitStack()
        self._gateway: _Gateway | None = None

    def case(self, random: Random) -> None:
        self._runner.run(self._case(random))

    async def _case(self, random: Random) -> None:
        if self._gateway is None:
            self._gateway = _Gateway(self._stack.enter_context(way()))
        try:
            await _compare(random, self._gateway)
        except BaseException:
            await self._close()
            raise

    async def _close(self) -> None:
        self._gateway = None
        self._stack.close()
        await asyncio.sleep(0)

    def close(self) -> None:
        self._runner.run(self._close())


@contextmanager
def opened() -> Iterator[Case]:
    """Provide the function for one case, in an event loop."""
    with asyncio.Runner() as runner, closing(_Streams(runner)) as streams:
        yield streams.case
