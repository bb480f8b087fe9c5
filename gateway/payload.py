"""What a client's JSON body becomes before a server sees it. Pure functions, in the order of the story.

The rule: every check runs on the merged object, and that object, serialised anew, is what is sent; the
client's own bytes never are. So what was authorised is what is dispatched, whatever tricks the text held
(duplicate keys, escapes, byte order marks).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import orjson

from gateway.errors import Refusal
from gateway.media import CONTAINERS, SCALARS
from gateway.policy import Policy
from gateway.routes import OUTPUTS, Dialect, Route
from gateway.translate import Translation, translate

MAX_DEPTH = 64
"""Levels of nesting that a body may have."""
MAX_CONTAINERS = 131_072
"""Objects and lists in a body: what looks through it stays within the time of one request."""

_SHORT = 2048  # bytes in which counting is as fast
_MANY = 32  # members from which on it is quicker to ask for all their types at once
_DIGITS = bytes(0x30 if chr(byte).isdigit() and byte < 0x80 else 0x20 for byte in range(256))
_NO_MARKS = bytes(byte for byte in range(256) if byte not in b'{["')
_LONG_NUMBER = b"0" * 19  # 2**63 has so many digits
_HUGE = 2.0**63
_BYTES_PER_LOOK = 256  # a look at a member takes as long as one at so many bytes
_NOTHING: Mapping[str, Any] = MappingProxyType({})

Document = dict[str, Any]


class Prepared(msgspec.Struct, frozen=True):
    """A body that may be sent: ``document`` lacks only the model's name at the server.

    ``hides_usage`` says that the usage event is there for the gateway and not for the client; ``upstream`` is the
    path at the server; ``input_field`` the member that holds the text; ``translation`` is the way back for a request
    in words that vLLM does not know; ``more_head`` are lines for the head.
    """

    document: Document
    stream: bool
    hides_usage: bool
    upstream: str
    input_field: str
    translation: Translation | None = None
    more_head: bytes = b""

    def encode(self, served_model: str) -> bytes:
        """The bytes for a server that knows the model by this name."""
        self.document["model"] = served_model
        return orjson.dumps(self.document)


def parse(body: bytes) -> Document:
    """Strict UTF-8 JSON, an object, at most MAX_DEPTH deep. Raises Refusal invalid_json."""
    may_be_deep = _may_be_deep(body)
    if may_be_deep:
        _check_containers(body)
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refusal("invalid_json", f"The body is not valid JSON: {error.msg} at character {error.pos}.") from None
    if not isinstance(document, dict):
        raise Refusal("invalid_json", "The body must be a JSON object.")
    if may_be_deep and _too_deep(document):
        raise Refusal("invalid_json", f"The body is nested more than {MAX_DEPTH} levels deep.")
    if (len(body) < _SHORT or _may_have_huge_numbers(document, len(body) // _BYTES_PER_LOOK)) and _has_long_numbers(body):
        _refuse_long_integers(body)
    return document


def _may_have_huge_numbers(document: Document, looks: int) -> bool:
    """Whether some number is as large as the floats that orjson makes of integers beyond 64 bits. True, too, where more members would have
    to be looked at than so many: then it is quicker to look at the bytes."""
    level: list[Any] = [document]
    while level:
        below: list[Any] = []
        for node in level:
            looks -= len(node)
            if looks < 0:
                return True
            for value in node.values() if type(node) is dict else node:
                kind = type(value)
                if kind in CONTAINERS:
                    below.append(value)
                elif kind is float and abs(value) >= _HUGE:
                    return True
        level = below
    return False


def _has_long_numbers(body: bytes) -> bool:
    """Whether there are 19 digits in a row, in a text perhaps. They cover three of every sixth byte."""
    # ``find``, because ``in`` makes and drops an exception
    return body[::6].translate(_DIGITS).find(b"000") >= 0 and body.translate(_DIGITS).find(_LONG_NUMBER) >= 0


def _refuse_long_integers(body: bytes) -> None:
    """orjson makes floats of integers beyond 64 bits: another number than the client's would be sent. Raises Refusal.

    msgspec keeps them, and orjson writes none of them: both take a fraction of the time of a parser that calls back for each.
    """
    try:
        orjson.dumps(msgspec.json.decode(body))
    except (TypeError, msgspec.DecodeError):
        raise Refusal("invalid_json", "The body has an integer of more than 64 bits.") from None


def _may_be_deep(body: bytes) -> bool:
    """Whether it has that many brackets at all. They are few in most bodies, and searching a long one is much faster than counting."""
    if len(body) < _SHORT:
        return body.count(b"{") + body.count(b"[") > MAX_DEPTH
    found = 0
    for bracket in b"{", b"[":
        at = body.find(bracket)
        while at >= 0:
            found += 1
            if found > MAX_DEPTH:
                return True
            at = body.find(bracket, at + 1)
    return False


def _check_containers(body: bytes) -> None:
    """Raises Refusal for too many objects and lists, before they are made. Brackets in a text are no such thing."""
    if _brackets(body) > MAX_CONTAINERS and _brackets(_without_texts(body)) > MAX_CONTAINERS:
        raise Refusal("invalid_json", f"The body has more than {MAX_CONTAINERS} objects and lists.")


def _without_texts(body: bytes) -> bytes:
    """The brackets that stand outside of quotes; exact for what is JSON.

    Two quotes beside each other have nothing between them that counts: they go, or splitting would make an object for each text.
    """
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
    return b"".join(marks.replace(b'""', b"").split(b'"')[::2])


def _brackets(body: bytes) -> int:
    return body.count(b"{") + body.count(b"[")


def _too_deep(document: Document) -> bool:
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        level = _below(level)
        if not level:
            return False
    return True


def _below(level: list[Any]) -> list[Any]:
    """The objects and lists that are members of these."""
    found: list[Any] = []
    for node in level:
        values = node.values() if type(node) is dict else node
        if len(values) > _MANY and SCALARS.issuperset(map(type, values)):
            continue  # a prompt of tokens, a batch of texts
        found += [value for value in values if type(value) in CONTAINERS]
    return found


def merge(document: Document) -> Document:
    """Set the members of ``extra_body`` on the body, where they win. Raises Refusal if it is not an object."""
    if "extra_body" not in document:
        return document
    extra = document["extra_body"]
    if not isinstance(extra, dict):
        raise Refusal("invalid_value", "The field 'extra_body' must be an object.", param="extra_body")
    merged = {**document, **extra}
    del merged["extra_body"]  # one inside the other has no meaning, and a server would ignore it
    return merged


def prepare(document: Document, policy: Policy, route: Route, size: int, own: Mapping[str, Any] = _NOTHING) -> Prepared:
    """Apply a model's policy to a merged body, which is taken over. Raises Refusal for what may not be sent.

    ``size``: bytes of the body as it came; ``own``: the fields that the request's key brings.
    """
    policy.apply(document, size)
    if route.dialect is Dialect.RESPONSES:
        document.pop("store", None)  # true is OpenAI's default value: no client relies on it by sending it
    if policy.defaults or policy.overrides:
        document = {**policy.defaults, **document, **policy.overrides}  # the operator may set what clients may not
    if route.guided:
        _translate_guided(document)
    upstream, input_field, translation = route.upstream, route.input_field, None
    if route.translated:
        document, other, translation = translate(document)
        if other is not None:
            upstream, input_field = other, "prompt"
    elif route.dialect is Dialect.RESPONSES:
        _refuse_state(document)
        document.setdefault("store", False)
    elif route.dialect is Dialect.COHERE:
        policy.check_images(document.get("images"))
    if policy.max_tokens is not None:
        _bound(document, policy.max_tokens, upstream)
    stream = _flag(document, "stream")
    hides_usage = stream and route.injects and _inject_usage(document)
    more_head = _set_own(document, own, route) if own else b""
    return Prepared(document, stream, hides_usage, upstream, input_field, translation, more_head)


# What the operator sets


def _bound(document: Document, most: int, path: str) -> None:
    """A request that names no limit of its own gets the operator's, or it would have the whole context.

    ``path`` is that at the server: what is another route's name for the limit is none there, and the server ignores it.
    """
    output = OUTPUTS.get(path)
    if output is None or any(document.get(name) is not None for name in output.names):
        return
    document[output.names[-1]] = most if output.default is None else min(most, output.default)


def _set_own(document: Document, own: Mapping[str, Any], route: Route) -> bytes:
    """Set a key's fields where vLLM knows them; returns what goes into the head instead.

    /v1/messages has no ``priority``, but vLLM reads the header there (``PRIORITY_HEADER`` in generate/base/serving.py).
    """
    for name in own.keys() & route.takes:
        document[name] = own[name]
    if route.dialect is Dialect.MESSAGES and "priority" in own:
        return b"x-vllm-priority: %d\r\n" % own["priority"]
    return b""


_STATE = ("previous_response_id", "conversation", "background")


def _refuse_state(document: Document) -> None:
    """Refuse what needs a stored response. Servers store none: one would return it to any client that knows its ID."""
    for name in _STATE:
        if document.get(name) not in (None, False):
            raise Refusal("invalid_value", f"Responses are not stored here, so '{name}' can't be used.", param=name)


# Guided decoding under its old names, which vLLM ignores since they were removed

_GUIDED: Mapping[str, str] = MappingProxyType(
    {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
)
_GUIDED_OPTIONS: Mapping[str, str] = MappingProxyType({"guided_whitespace_pattern": "whitespace_pattern"})
_GUIDED_ALL = frozenset((*_GUIDED, *_GUIDED_OPTIONS, "guided_decoding_backend"))


def _translate_guided(document: Document) -> None:
    """``guided_*`` → ``structured_outputs``. Raises Refusal when two constraints are given."""
    if _GUIDED_ALL.isdisjoint(document):
        return
    values = {name: document.pop(name) for name in _GUIDED_ALL & document.keys()}
    constraints = {name: value for name, value in values.items() if name in _GUIDED and value is not None}
    if not constraints:
        return
    names = sorted(constraints) + [name for name in ("structured_outputs", "response_format") if _constrains(document.get(name))]
    if len(names) > 1:
        raise Refusal("invalid_value", f"Only one constraint can be given, not {' and '.join(names)}.", param=names[0])
    options = {_GUIDED_OPTIONS[name]: value for name, value in values.items() if name in _GUIDED_OPTIONS and value is not None}
    document["structured_outputs"] = {_GUIDED[name]: value for name, value in constraints.items()} | options


def _constrains(value: Any) -> bool:
    """Whether today's ``structured_outputs`` or ``response_format`` asks for anything."""
    return bool(value) and value != {"type": "text"}


# Usage


def _inject_usage(document: Document) -> bool:
    """Ask for the usage event where the client did not; returns whether it is to be hidden from the client."""
    options = document.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise Refusal("invalid_value", "The field 'stream_options' must be an object.", param="stream_options")
    options = options or {}
    if _flag(options, "include_usage", "stream_options.include_usage"):
        return False
    document["stream_options"] = {**options, "include_usage": True, "continuous_usage_stats": False}
    return True


def _flag(document: Mapping[str, Any], name: str, path: str | None = None) -> bool:
    """A boolean member; missing and null count as False. Raises Refusal for anything else."""
    value = document.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise Refusal("invalid_value", f"The field '{path or name}' must be true or false.", param=path or name)
