"""Properties of each parser, for any bytes. Only the project is required, so that the suite can replay the findings.

The rule: a target returns for what is handled, however it is handled, and raises for everything else.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import msgspec
import orjson

from gateway.api.errors import ERRORS, Refusal, render
from gateway.api.json_scan import ELEMENT, Scanner, Wanted
from gateway.api.media_urls import MediaHosts
from gateway.api.response_fields import WHOLE_SIZE, Fields, Observer, of_body, of_event
from gateway.api.routes import ENDPOINTS, OUTPUTS, ROUTES, Body, Dialect
from gateway.api.strict_json import parse
from gateway.api.usage import Usage
from gateway.api.vllm.errors import from_server
from gateway.auth import keys
from gateway.auth.body_policy import BATCHES, FORBIDDEN, IN_TEMPLATE, MAX_BATCH, BodyPolicy
from gateway.auth.jwks import verification_keys
from gateway.auth.jwt import TokenVerifier
from gateway.auth.keyring import Keyring
from gateway.check import preflight
from gateway.client.http.content_encoding import decoded
from gateway.config import ConfigurationError, drafted, load
from gateway.fleet.configured_servers import launches
from gateway.fleet.observed_servers import ObservedServers
from gateway.fleet.snapshot_builder import build_snapshot
from gateway.prompts.prefix import affinity_key
from gateway.proxy.json_body import JsonBody
from gateway.proxy.payload import merge, prepare
from gateway.snapshot.link import Health
from gateway.snapshot.snapshot import BodyRules, Issuer, Key, Snapshot
from gateway.system.steps import finished
from tests.support import zstd
from tests.support.forms import send
from tests.support.way import unchunked, way
from tests.support.wire import STREAM_HEAD
from upstream.balancing.server import Condition
from upstream.http.sse import EventTooLongError, Splitter, data_of, is_error, split
from upstream.vllm import known_names

Target = Callable[[bytes], None]


def _pieces(data: bytes) -> Iterator[bytes]:
    """The bytes behind the first, cut where the first says."""
    step = data[0] % 16 + 1 if data else 1
    for start in range(1, len(data), step):
        yield data[start : start + step]


# The configuration

_SPLIT = b"\n--- keys\n"
_MACHINE = preflight.Machine(lambda _: known_names.built_in(), 2, Path("/nonexistent"))


def config(data: bytes) -> None:
    """Any two files are a configuration, of which a Snapshot can be made and sent, or problems with words and places."""
    main, _, more = data.partition(_SPLIT)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "gateway.yaml"
        file.write_bytes(main)
        (folder / "keys.yaml").write_bytes(more)
        draft = drafted(file)
        if draft is not None:
            assert all(problem.message for problem in preflight.problems(draft, _MACHINE))
        try:
            loaded = load(file, {"SECRET": "s3cret"})
        except ConfigurationError as error:
            assert error.problems and all(problem.message and "s3cret" not in str(problem) for problem in error.problems)
            return
        snapshot = build_snapshot(loaded, ObservedServers({}, {}, {}), 1, 0)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=Snapshot) == snapshot
        launches(loaded)


# Request bodies

_ROUTES = [route for route in ROUTES.values() if route.body is Body.JSON]
_POLICIES = [
    BodyPolicy(BodyRules(), {}, {}),
    BodyPolicy(
        BodyRules(allow=("priority", "n"), refuse=("user", "tools"), max_n=3, max_tokens=9, media_hosts=("*.a.org",)),
        {"temperature": 1},
        {"seed": 1},
    ),
]


def payload(data: bytes) -> None:
    """The sent body is the checked one: an object without forbidden fields, or else a refusal."""
    if len(data) < 2:
        return
    route, number = _ROUTES[data[0] % len(_ROUTES)], data[1] % len(_POLICIES)
    try:
        prepared = _prepared(data[2:], route, _POLICIES[number])
    except Refusal as refusal:
        assert refusal.spec.status in (400, 413) and orjson.loads(render(refusal))
        return
    sent = orjson.loads(prepared.encode("inside"))
    affinity_key(prepared.document)
    assert sent["model"] == "inside" and "extra_body" not in sent and sent == prepared.document
    if number and (output := OUTPUTS.get(prepared.path)) is not None:
        assert any(sent.get(name) is not None for name in output.names), "an answer without a bound"
    assert all(len(sent.get(name) or ()) <= MAX_BATCH for name in BATCHES if isinstance(sent.get(name), list) and not _numbers(sent[name]))
    kwargs = sent.get("chat_template_kwargs")
    nested = kwargs.keys() if isinstance(kwargs, dict) else set()
    forbidden = FORBIDDEN - {"priority"} if number else FORBIDDEN
    assert (
        not (forbidden & sent.keys()) - ({"cache_salt"} if sent.get("cache_salt") == "salt" else set())
        and not (forbidden | IN_TEMPLATE) & nested
    )


def _numbers(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


_VALUES = 200


def _prepared(body: bytes, route: Any, policy: BodyPolicy) -> JsonBody:
    """A body that is prepared at once and in steps, which must not differ. Raises Refusal."""
    own = {"cache_salt": "salt"} if route.takes and b"user" in body else {}

    def prepared(*, large: bool) -> JsonBody:
        return finished(prepare(merge(finished(parse(body, _VALUES))), policy, route, len(body), own, large=large))

    at_once = _outcome(lambda: prepared(large=False))
    assert _alike_prepared(at_once) == _alike_prepared(_outcome(lambda: prepared(large=True)))
    if isinstance(at_once, JsonBody):
        assert orjson.loads(at_once.serialized("x").encode("inside")) == orjson.loads(at_once.encode("inside"))
        return at_once
    raise Refusal(*at_once)


def _outcome(work: Callable[[], JsonBody]) -> JsonBody | tuple[str, str]:
    try:
        return work()
    except Refusal as refusal:
        return refusal.code, refusal.message


def _alike_prepared(outcome: JsonBody | tuple[str, str]) -> object:
    return (msgspec.structs.replace(outcome, translation=None), type(outcome.translation)) if isinstance(outcome, JsonBody) else outcome


# Encoded bodies

_LIMIT = 200_000


def encoded(data: bytes) -> None:
    """The decoded body equals a library's result, within the bounds; or it is rejected."""
    if not data:
        return
    encoding, body, held = ("gzip", "zstd")[data[0] % 2], data[1:], [0]
    try:
        found = finished(decoded(body, encoding, _LIMIT, held.append))
    except Refusal as refusal:
        assert refusal.spec.status in (400, 413) and held[-1] <= _LIMIT + len(body)
        return
    assert len(found) <= _LIMIT
    assert found == (gzip.decompress(body) if encoding == "gzip" else zstd.decompress(body))


# Forms


def form(data: bytes) -> None:
    """A form is read alike however it is cut."""
    assert _read(list(_pieces(data))) == _read([data[1:]])


def _read(pieces: list[bytes]) -> tuple[str | None, bytes] | str:
    try:
        sent = send(b"b", pieces, _POLICIES[1], None, "inside")
    except Refusal as refusal:
        return refusal.code
    return sent.model, sent.body.replace(sent.content_type.rpartition(b"=")[2], b"b")


# Streams


def sse(data: bytes) -> None:
    """The splitter gives what it got, whole events at a time, however it is cut."""
    limit = 64
    splitter, given = Splitter(limit), b""
    try:
        for piece in _pieces(data):
            whole = splitter.feed(piece)
            assert not whole or whole.endswith((b"\n", b"\r"))
            assert b"".join(split(whole)) == whole
            assert all(len(data_of(event)) <= len(event) for event in split(whole))
            given += whole
    except EventTooLongError:
        assert len(splitter.held) > limit
        return
    assert len(splitter.held) <= limit
    assert given + splitter.take() == data[1:]


# The fields of responses

_WANTED: Wanted = {"usage": None, "choices": {ELEMENT: {"finish_reason": None}}, "response": {"status": None}}
_DIALECTS = tuple(Dialect)
_DEEP = 500  # brackets; Python's parser has a bound


def scan(data: bytes) -> None:
    """In a valid document the scanner finds what a parser finds, however the document is cut. A malformed one it only survives."""
    wire = data[1:]
    found, cut = _scanned([wire]), _scanned(list(_pieces(data)))
    if wire.count(b"[") + wire.count(b"{") > _DEEP:
        return
    try:
        document = json.loads(wire.decode(), object_pairs_hook=_Pairs)
    except ValueError:
        return
    assert cut == found
    if isinstance(document, _Pairs):
        assert [(path, _plain(value)) for path, value in found] == [
            (path, repr(value)) for path, value in _wanted_in(document, _WANTED, ())
        ]


class _Pairs(list[tuple[str, Any]]):
    """An object with its fields in their order; keys may repeat."""


def _scanned(pieces: list[bytes]) -> list[tuple[tuple[str, ...], bytes]]:
    scanner, found, value = Scanner(_WANTED), [], b""
    for piece in pieces:
        for path, start, end, is_last in scanner.feed(piece):
            value += piece[start:end]
            if is_last:
                found.append((path, value))
                value = b""
    return found


def _plain(value: bytes) -> str:
    return repr(json.loads(value, object_pairs_hook=_Pairs))


def _wanted_in(document: Any, wanted: Wanted, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    is_object = isinstance(document, _Pairs)
    if is_object is (ELEMENT in wanted) or not isinstance(document, list):
        return
    for name, value in document if is_object else [(ELEMENT, each) for each in document]:
        inner = wanted.get(name, {})
        if inner is None:
            yield (*path, name), value
        else:
            yield from _wanted_in(value, inner, (*path, name))


def echo(data: bytes) -> None:
    """A client's text in a response changes nothing of what is read from it, as text or, where it is JSON, as that."""
    if not data:
        return
    dialect, text = _DIALECTS[data[0] % len(_DIALECTS)], data[1:].decode(errors="replace")
    echoed: list[Any] = [text]
    with suppress(ValueError):
        echoed.append(orjson.loads(data[1:]))
    usage = {"input_tokens": 5, "output_tokens": 7}
    choice = {"index": 0, "message": {"content": text, "x": echoed}, "delta": {"content": text}, "finish_reason": "stop"}
    body = {"x": echoed, "metadata": {text: text}, "choices": [choice], "status": "completed", "usage": usage, "input_messages": echoed}
    if dialect is Dialect.COHERE:
        body["meta"] = {"x": {"billed_units": text}, "billed_units": usage}
    for wire in (orjson.dumps(body), orjson.dumps(body | {"y": "z" * WHOLE_SIZE})):
        observer = Observer(dialect)
        for piece in _pieces(data[:1] + wire) if len(wire) < WHOLE_SIZE else [wire[: len(text)], wire[len(text) :]]:
            observer.feed(piece)
        assert observer.fields == of_body(wire, dialect) == Fields(Usage(5, 7), is_final=True)
    event = b"event: x\ndata: %b\n\n" % orjson.dumps({"type": "x", "delta": text, "item": echoed, "choices": [choice]})
    assert split(event) == [event] and not is_error(event)
    assert of_event(orjson.loads(data_of(event)), dialect) == Fields()


# Answers and requests on the wire: Connection, lane, relay and edge, with stand-ins for transports


def stream(data: bytes) -> None:
    """A server's stream, whatever it is, comes to its client as the same events, however the network has cut it; and ends."""
    if data:
        frames = re.split(rb"(?<=\n\n\r\n)", data[1:])
        got = [asyncio.run(_streamed(cut)) for cut in (list(_pieces(data)), [data[1:]], frames)]
        assert got[0] == got[1] == got[2], got


async def _streamed(pieces: list[bytes]) -> tuple[bytes, list[object]] | None:
    """The body, and what was noted of the request, when the server has sent this and left; None for an error in place of the stream.

    Which error that is may depend on how much was read with the first event.
    """
    with way() as one:
        printed = one.streamed([STREAM_HEAD, *pieces], include_usage=False)
        one.server.connection_lost(None)
        one.write_batch.flush()
        printed += one.client_wire.take()
        (noted,) = one.context.records
        assert one.context.metrics.cells("inflight_requests", "tiny")[0] == 0
        if noted.status >= 400:
            assert printed.startswith(b"HTTP/1.1 %d " % noted.status) and noted.code in ERRORS
            return None
        return _alike(unchunked(printed)), [noted.code, noted.incomplete, noted.usage]


def _alike(body: bytes) -> bytes:
    """Without what may differ: the last blank lines may not have come, and what follows an answer is seen only where it came with it."""
    lines = re.sub(rb"\n{2,}", b"\n\n", re.sub(rb"\r\n?", b"\n", body))
    return lines.replace(b"server sent an invalid response", b"server closed the connection before the end of its response")


def connection(data: bytes) -> None:
    """A client's bytes are the same requests however they are split. A client rejected before its body has arrived may get no further."""
    if data:
        wholly, by_pieces = (asyncio.run(_requests(cut)) for cut in ([data[1:]], list(_pieces(data))))
        assert wholly[: len(by_pieces)] == by_pieces, (wholly, by_pieces)
        assert len(by_pieces) == len(wholly) or (by_pieces and by_pieces[-1][1] >= 400), (wholly, by_pieces)


_ITERATIONS = 60
"""Event-loop iterations in which every request that has arrived is answered."""


async def _requests(pieces: list[bytes]) -> list[tuple[str, int, str | None]]:
    """The requests for inference that came of it: endpoint, status, code. There is no server, so none is answered with 200."""
    with way() as one:
        one.server.connection_lost(None)
        one.worker.apply_health(Health({"tiny#0": Condition.DOWN}, {}))
        for piece in pieces:
            if not one.client_wire.is_closing():
                one.client.data_received(piece)
                one.write_batch.flush()
        for _ in range(_ITERATIONS):
            await asyncio.sleep(0)  # requests that are not inference, and those that wait for their turn behind them
        one.write_batch.flush()
        responses = re.findall(rb"(?m)^HTTP/1\.1 (\d{3}) .*\r$", one.client_wire.take())
        assert b"500" not in responses
        return [(noted.endpoint, noted.status, noted.code) for noted in one.context.records if noted.endpoint in ENDPOINTS]


# URLs of media

_HOSTS = [MediaHosts(), MediaHosts(["a.org", "*.b.org", "10.0.0.7", "c:81"]), MediaHosts(["*"])]


def media(data: bytes) -> None:
    """A URL that passes has one host, and Python's parser sees the same host."""
    if not data:
        return
    hosts, url = _HOSTS[data[0] % len(_HOSTS)], data[1:].decode(errors="replace")
    if not hosts.allows(url) or url[:5].lower() == "data:":
        return
    parts = urlsplit(url)
    assert hosts is not _HOSTS[0] and parts.scheme in ("http", "https") and parts.username is None and parts.password is None
    assert parts.hostname is not None and parts.netloc.lower() in (parts.hostname, f"{parts.hostname}:{parts.port}")
    if hosts is _HOSTS[1]:
        assert parts.hostname in ("a.org", "10.0.0.7", "c") or parts.hostname.endswith(".b.org")


# Keys

_TOKEN = keys.mint("fuzz")
_RING = Keyring([Key("one", (hashlib.sha256(_TOKEN.encode()).digest(),)), Key("two", (hashlib.sha256(b"any string").digest(),))])


def key(data: bytes) -> None:
    """No bytes but a key open the door; what looks like one of ours is known by its checksum."""
    text = data.decode("latin-1")
    assert keys.has_valid_checksum(text) <= keys.has_key_format(text)
    for authorization, shown in ((data, None), (b"Bearer " + data, None), (None, data)):
        try:
            found = _RING.authenticate(authorization, shown)
        except Refusal as refusal:
            assert refusal.spec.status == 401
        else:
            assert {"one": _TOKEN.encode(), "two": b"any string"}[found.id] in data


# Tokens

_KEY_SET = verification_keys(
    b'{"keys": [{"x": "N6q3hedASHL7vjUxL9ZotQaU2jhiQ3cGkDs_i9Ud-9k", "kty": "OKP", "crv": "Ed25519", "kid": "fuzz", "use": "sig"}]}'
)
_ISSUER = Issuer("https://login.example.com/", ("vllm-gateway",), ("staff",), ("EdDSA", "RS256"), _KEY_SET)
_GOOD = (Path(__file__).resolve().parent / "corpus" / "token" / "good").read_bytes()


def token(data: bytes) -> None:
    """No bytes but the signed ones are a token: their header and claims as they are, and a signature that is theirs."""
    tokens = TokenVerifier(lambda _: None)
    tokens.apply_snapshot(Snapshot(1, (Key("staff"),), (), issuers=(_ISSUER,)))
    try:
        found = tokens.principal(data, hashlib.sha256(data).digest())
    except Refusal as refusal:
        assert refusal.spec.status == 401
    else:
        assert found is None or data.rpartition(b".")[0] == _GOOD.rpartition(b".")[0]


# A server's errors


_SENT = b"\n--- sent\n"
_CLASS_NAMES = re.compile(r"(?:\A|\.)[A-Z]\w*(Param|ValidatorIterator|Request)(?:\.|\Z)")


def _object(text: bytes) -> dict[str, Any] | None:
    """A request's body, if this is one."""
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return document if isinstance(document, dict) else None


def response(data: bytes) -> None:
    """Whatever a server says becomes a row of the table, whatever the request was; a parameter has no names of classes."""
    if len(data) < 2:
        return
    body, _, sent = data[2:].partition(_SENT)
    refusal = from_server(100 + int.from_bytes(data[:2]) % 500, body, "m", "messages", data[2:5], _object(sent))
    assert refusal.code in ERRORS and len(refusal.message) <= 2300
    named = _CLASS_NAMES.search(refusal.param or "")
    assert len(refusal.param or "") <= 5000 and (named is None or named[1].encode() in sent)
    assert orjson.loads(render(refusal)) and orjson.loads(render(refusal, anthropic=True))


TARGETS: Mapping[str, Target] = MappingProxyType(
    {each.__name__: each for each in (config, payload, encoded, form, sse, scan, echo, stream, connection, media, key, token, response)}
)
CORPUS = Path(__file__).resolve().parent / "corpus"
"""The initial and retained inputs: a folder for each target."""
