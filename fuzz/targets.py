"""What must hold of each parser, for any bytes. Needs nothing but the project, so that the suite can replay what was found.

The rule: a target returns for what is handled, however it is handled, and raises for everything else.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import msgspec
import orjson

from gateway import keys, plan, preflight
from gateway.auth import Keyring
from gateway.beginning import hint
from gateway.config import ConfigurationError, drafted, load
from gateway.errors import ROWS, Refusal, from_server, render
from gateway.form import Form
from gateway.key_set import usable
from gateway.media import MediaHosts
from gateway.payload import Prepared, merge, parse, prepare
from gateway.policy import FORBIDDEN, IN_TEMPLATE, Policy
from gateway.routes import ROUTES, Body
from gateway.state import BodyRules, Issuer, Key, State
from gateway.tokens import Tokens
from upstream import vllm_names
from upstream.sse import EventTooLongError, Splitter, data_of, split

Target = Callable[[bytes], None]


def _pieces(data: bytes) -> Iterator[bytes]:
    """The bytes behind the first, cut where the first says."""
    step = data[0] % 16 + 1 if data else 1
    for start in range(1, len(data), step):
        yield data[start : start + step]


# The configuration

_SPLIT = b"\n--- keys\n"
_MACHINE = preflight.Machine(lambda _: vllm_names.built_in(), 2, Path("/nonexistent"))


def config(data: bytes) -> None:
    """Any two files are a configuration, of which a State can be made and sent, or problems with words and places."""
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
        state = plan.state(loaded, plan.Knowledge({}, {}, {}), 1, 0)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=State) == state
        plan.launches(loaded)


# Request bodies

_ROUTES = [route for route in ROUTES.values() if route.body is Body.JSON]
_POLICIES = [
    Policy(BodyRules(), {}, {}),
    Policy(
        BodyRules(allow=("priority", "n"), refuse=("user", "tools"), max_n=3, max_tokens=9, media_hosts=("*.a.org",)),
        {"temperature": 1},
        {"seed": 1},
    ),
]


def payload(data: bytes) -> None:
    """What is sent is what was checked: an object without forbidden fields, or else a refusal."""
    if len(data) < 2:
        return
    route, number = _ROUTES[data[0] % len(_ROUTES)], data[1] % len(_POLICIES)
    try:
        prepared = _prepared(data[2:], route, _POLICIES[number])
    except Refusal as refusal:
        assert refusal.row.status == 400 and orjson.loads(render(refusal))
        return
    sent = orjson.loads(prepared.encode("inside"))
    hint(prepared.document)
    assert sent["model"] == "inside" and "extra_body" not in sent and sent == prepared.document
    kwargs = sent.get("chat_template_kwargs")
    nested = kwargs.keys() if isinstance(kwargs, dict) else set()
    forbidden = FORBIDDEN - {"priority"} if number else FORBIDDEN
    assert (
        not (forbidden & sent.keys()) - ({"cache_salt"} if sent.get("cache_salt") == "salt" else set())
        and not (forbidden | IN_TEMPLATE) & nested
    )


def _prepared(body: bytes, route: Any, policy: Policy) -> Prepared:
    return prepare(merge(parse(body)), policy, route, len(body), {"cache_salt": "salt"} if route.takes and b"user" in body else {})


# Forms


def form(data: bytes) -> None:
    """A form is read alike however it is cut."""
    assert _read(list(_pieces(data))) == _read([data[1:]])


def _read(pieces: list[bytes]) -> tuple[str | None, bytes] | str:
    async def story() -> tuple[str | None, bytes] | str:
        parts = iter(pieces)

        async def more() -> bytes:
            return next((part for part in parts if part), b"")

        one = Form(b"b")
        try:
            name = await one.read_model(more)
            one.obey(_POLICIES[1])
            rest = bytearray()
            await one.upload(more, chunked=False)(lambda piece, _: rest.extend(piece), _always)
        except Refusal as refusal:
            return refusal.code
        return name, one.opening("inside") + bytes(rest)

    return _done(story())


def _done(story: Coroutine[Any, Any, tuple[str | None, bytes] | str]) -> tuple[str | None, bytes] | str:
    """What a story gives that waits for nothing."""
    try:
        story.send(None)
    except StopIteration as end:
        value: tuple[str | None, bytes] | str = end.value
        return value
    raise AssertionError("it waits")


async def _always() -> bool:
    return True


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


# URLs of media

_HOSTS = [MediaHosts(), MediaHosts(["a.org", "*.b.org", "10.0.0.7", "c:81"]), MediaHosts(["*"])]


def media(data: bytes) -> None:
    """What passes has one host, and Python's own parser sees the same one."""
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
    assert keys.well_formed(text) <= keys.in_our_form(text)
    for authorization, shown in ((data, None), (b"Bearer " + data, None), (None, data)):
        try:
            found = _RING.authenticate(authorization, shown)
        except Refusal as refusal:
            assert refusal.row.status == 401
        else:
            assert {"one": _TOKEN.encode(), "two": b"any string"}[found.id] in data


# Tokens

_KEY_SET = usable(
    b'{"keys": [{"x": "N6q3hedASHL7vjUxL9ZotQaU2jhiQ3cGkDs_i9Ud-9k", "kty": "OKP", "crv": "Ed25519", "kid": "fuzz", "use": "sig"}]}'
)
_ISSUER = Issuer("https://login.example.com/", ("vllm-gateway",), ("staff",), ("EdDSA", "RS256"), _KEY_SET)
_GOOD = (Path(__file__).resolve().parent / "corpus" / "token" / "good").read_bytes()


def token(data: bytes) -> None:
    """No bytes but the signed ones are a token: their header and claims as they are, and a signature that is theirs."""
    tokens = Tokens(lambda _: None)
    tokens.take(State(1, (Key("staff"),), (), issuers=(_ISSUER,)))
    try:
        found = tokens.key(data, hashlib.sha256(data).digest())
    except Refusal as refusal:
        assert refusal.row.status == 401
    else:
        assert found is None or data.rpartition(b".")[0] == _GOOD.rpartition(b".")[0]


# A server's errors


def answer(data: bytes) -> None:
    """Whatever a server says becomes a row of the table."""
    if len(data) < 2:
        return
    refusal = from_server(100 + int.from_bytes(data[:2]) % 500, data[2:], "m", "messages", data[2:5])
    assert refusal.code in ROWS and len(refusal.message) <= 2300
    assert orjson.loads(render(refusal)) and orjson.loads(render(refusal, anthropic=True))


TARGETS: Mapping[str, Target] = MappingProxyType(
    {"config": config, "payload": payload, "form": form, "sse": sse, "media": media, "key": key, "token": token, "answer": answer}
)
CORPUS = Path(__file__).resolve().parent / "corpus"
"""What is worth beginning with, and worth keeping: a folder for each target."""
