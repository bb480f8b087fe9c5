"""Compare JSON bodies as the gateway checks and sends them with vLLM's parsers: Python's ``json`` and pydantic's.

The client's text is read by ``json``, as a server without the gateway would read it. The gateway may refuse it. Otherwise the server must
read the same document from the gateway's bytes, apart from the fields that the gateway sets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import from_json

from gateway.api.errors import Refusal
from gateway.api.routes import ROUTES, Route
from gateway.api.strict_json import parse
from gateway.auth.body_policy import BodyPolicy
from gateway.proxy.json_body import JsonBody
from gateway.proxy.payload import merge, prepare, with_running_usage
from gateway.snapshot.snapshot import BodyRules
from gateway.system.steps import finished
from tests.fuzz.differential.cases import Case, check, choose, mutated

_MAX_TOKENS, _MAX_N, _MAX_DEPTH = 9, 3, 64
_SERVED = "inside"
_POLICIES = (BodyPolicy(BodyRules(), {}, {}), BodyPolicy(BodyRules(max_n=_MAX_N, max_tokens=_MAX_TOKENS), {}, {}))
_ROUTES = [
    ROUTES[path] for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/v1/responses", "/v1/messages")
]
_LIMITS: Mapping[str, tuple[str, ...]] = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
_SET = ("model", "stream_options", "store", "max_tokens", "max_completion_tokens", "max_output_tokens", "priority", "cache_salt")
"""The fields that the gateway sets, each with a separate check, and those that it removes (docs/security.md)."""


def _reference(text: bytes) -> dict[str, Any] | None:
    """Return the document that a server would read, with its ``extra_body`` merged into it; None if it is not a JSON object."""
    try:
        document = json.loads(text.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    extra = document.pop("extra_body", None)
    extra = {} if extra is None else extra
    return None if not isinstance(extra, dict) else {name: value for name, value in {**document, **extra}.items() if name != "extra_body"}


def _refuse(name: str) -> Any:
    raise ValueError(name)


def compare(text: bytes, route: Route, policy: BodyPolicy, *, counted: bool) -> None:
    """Compare one body on one route. ``counted``: the gateway requests the running usage of its stream."""
    try:
        document = merge(finished(parse(text)))
        named = document.get("model") or None
        checked = dict(document)
        prepared = finished(prepare(document, policy, route, len(text)))
        if counted and prepared.stream:
            prepared = with_running_usage(prepared)
    except Refusal as refusal:
        check(refusal.spec.status in (400, 413), "a refusal is the client's mistake", text, refusal)
        return
    expected = _reference(text)
    check(expected is not None, "a body that json does not read", text)
    expected = expected or {}
    check(_same(checked, expected), "json reads another document than was checked", text, checked, expected)
    check(named == (expected.get("model") or None), "json reads another model than was checked", text, named, expected)
    _check_sent(prepared, expected, route, policy, text)


def _check_sent(prepared: JsonBody, expected: dict[str, Any], route: Route, policy: BodyPolicy, text: bytes) -> None:
    bodies = prepared.encode(_SERVED), prepared.serialized("other").encode(_SERVED)
    read = [*(json.loads(body) for body in bodies), from_json(bodies[0])]
    check(all(_same(each, read[0]) for each in read), "two parsers read two documents from the sent bytes", text, bodies)
    pairs = json.loads(bodies[0], object_pairs_hook=list)
    check(_unique(pairs), "a sent object has a name twice", text, bodies[0])
    sent = read[0]
    if expected.get("stream") is not None:
        expected = {**expected, "stream": TypeAdapter(bool).validate_python(expected["stream"])}  # as vLLM reads it
    check(sent["model"] == _SERVED, "the sent model is the resolved one", text, bodies[0])
    translated = prepared.path != route.upstream  # a translation omits fields without a value
    same = _without_set(sent, nulls=not translated) == _without_set(expected, nulls=not translated)
    check(same, "another document is sent", text, sent, expected)
    check(not {"priority", "cache_salt"} & sent.keys(), "a field is sent that only the gateway sets", text, sent)
    check((sent.get("stream") is True) == prepared.stream, "the stream is what was checked", text, sent)
    _check_limits(sent, expected, prepared.path, policy, text)
    if route.injects and prepared.stream:
        check(sent["stream_options"]["include_usage"] is True, "the usage of a stream is requested", text, sent)
        before = expected.get("stream_options") or {}
        check(prepared.hides_usage is (before.get("include_usage") is not True), "usage is hidden unless requested", text, sent)


def _check_limits(sent: dict[str, Any], expected: dict[str, Any], path: str, policy: BodyPolicy, text: bytes) -> None:
    """Check that the sent limits are those that were checked, and that a response has a limit if the policy sets one.

    A chat with a raw prompt is sent to /v1/completions, where its limit has the name ``max_tokens``.
    """
    names = _LIMITS.get(path, ())
    given = {name: expected[name] for name in names if expected.get(name) is not None}
    if path == "/v1/completions" and expected.get("max_completion_tokens") is not None and "max_completion_tokens" not in sent:
        given["max_tokens"] = expected["max_completion_tokens"]
    if given or policy.max_tokens is None:
        check(all(sent.get(name) == value for name, value in given.items()), "another limit is sent", text, sent)
    if policy.max_tokens is not None and names:
        values = [sent[name] for name in names if sent.get(name) is not None]
        check(values and all(value <= _MAX_TOKENS for value in values), "a response without the limit of its model", text, sent)
        check((sent.get("n") or 1) <= _MAX_N, "more choices than the model allows", text, sent)


def _without_set(document: dict[str, Any], *, nulls: bool) -> str:
    left = {name: value for name, value in document.items() if name not in _SET and (nulls or value is not None)}
    return json.dumps(left, sort_keys=True)


def _same(one: Any, other: Any) -> bool:
    """Return whether two documents are equal, also in the types of their numbers."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _unique(node: Any) -> bool:
    """Return whether no object has a name twice. ``object_pairs_hook=list`` makes lists of pairs of the objects."""
    if not isinstance(node, list):
        return True
    names = [pair[0] for pair in node if isinstance(pair, tuple)]
    return len(set(names)) == len(names) and all(_unique(pair[1] if isinstance(pair, tuple) else pair) for pair in node)


# Generated bodies

_NAMES = (
    *['"prompt"'] * 3,
    '"model"',
    '"model"',
    '"\\u006dodel"',
    '"MODEL"',
    '"model "',
    '"stream"',
    '"stream_options"',
    '"max_tokens"',
    '"max_tokens"',
    '"max_toke\\u006es"',
    '"max_completion_tokens"',
    '"max_output_tokens"',
    '"n"',
    '"temperature"',
    '"extra_body"',
    '"extra\\u005fbody"',
    '"user"',
    '"input"',
    '"seed"',
    '"x"',
    '"\\ud83d\\ude00"',
    '"\\ud800"',
    '""',
    '"a\\u0000b"',
    '"priority"',
    '"cache_salt"',
)
_NUMBERS = (
    *["1", "2", "5", "9", "10", "0", "-1"] * 2,
    "1.0",
    "9.0",
    "1e1",
    "1E400",
    "-0",
    "-0.0",
    "01",
    "1.",
    ".5",
    "+1",
    "0x1",
    "NaN",
    "Infinity",
    "18446744073709551615",
    "18446744073709551616",
    "9223372036854775808",
    "-9223372036854775809",
    "1" * 40,
    "0.1000000000000000055511151231257827",
    "123456789012345678.5",
    "5e-324",
    "1_0",
)
_STRINGS = (
    '"a"',
    '"tiny"',
    '"other"',
    '"\\u0074iny"',
    '"\\ud800"',
    '"é"',
    '"\\/"',
    '"\\u0000"',
    '"\t"',
    '"\\x"',
    '"' + "0" * 30 + '"',
    '"\\""',
    '""',
    '"9"',
)
_SPACES = (*[""] * 12, " ", "\t", "\r\n", "\ufeff", "\v", "/**/")
_INSERTED = b'{}[]",:\\0u 1e\xc3\xff\x00'


def _value(random: Random, depth: int = 0) -> str:
    kind = random.random()
    if kind < 0.4:
        return choose(random, _NUMBERS)
    if kind < 0.65:
        return choose(random, _STRINGS)
    if kind < 0.8:
        return choose(random, ("true", "false", "null", "null", "True", "nul"))
    if depth > 2:
        return "[]"
    if kind < 0.9:
        return "[" + ",".join(_value(random, depth + 1) for _ in range(int(random.random() * 4))) + "]"
    return _object(random, depth + 1)


def _object(random: Random, depth: int = 0) -> str:
    fields = []
    for _ in range(int(random.random() * 6)):
        name = choose(random, _NAMES)
        fields.append(f"{choose(random, _SPACES)}{name}{choose(random, _SPACES)}:{_fitting(random, name, depth)}")
    return "{" + ",".join(fields) + choose(random, (*[""] * 30, ",")) + "}"


def _fitting(random: Random, name: str, depth: int) -> str:
    """Return a value that usually fits the name, so that many bodies are accepted."""
    if random.random() < 0.3:
        return _value(random, depth)
    if "odel" in name or name in ('"user"', '"input"', '"prompt"', '"x"'):
        return choose(random, _STRINGS[:5])
    if name == '"stream"':
        return choose(random, ("true", "false"))
    if name == '"stream_options"':
        return choose(
            random, ('{"include_usage":true}', '{"include_usage":false}', '{"include_usage":true,"include_usage":false}', "{}", "null")
        )
    if "body" in name:
        return _object(random, depth + 1) if depth < 3 else "{}"
    return choose(random, _NUMBERS[:14])


def _text(random: Random) -> bytes:
    text = _object(random).encode("utf-8", "surrogatepass")
    kind = random.random()
    if kind < 0.75:
        return text
    if kind < 0.9:
        return mutated(random, text, _INSERTED)
    if kind < 0.94:
        depth = _MAX_DEPTH - 3 + int(random.random() * 6)
        return b'{"x":' + b"[" * depth + b"]" * depth + b"}"
    if kind < 0.96:
        return b"\xef\xbb\xbf" + text
    return text.decode("utf-8", "ignore").encode(choose(random, ("utf-16", "utf-32", "utf-16-le", "latin-1")), "ignore")


def case(random: Random) -> None:
    """Compare one body."""
    compare(_text(random), choose(random, _ROUTES), choose(random, _POLICIES), counted=random.random() < 0.5)


@contextmanager
def opened() -> Iterator[Case]:
    """Provide ``case``."""
    yield case
