"""What a client's JSON body becomes before a server sees it. Pure functions, in the order of the story.

The rule: every check runs on the merged object, and that object, serialized anew, is what is sent; the
client's own bytes never are. So what was authorized is what is dispatched, whatever tricks the text held
(duplicate keys, escapes, byte order marks).
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any

import msgspec
import orjson

from gateway.api.errors import Refusal
from gateway.api.media_urls import CONTAINERS
from gateway.api.routes import OUTPUTS, Dialect, Route
from gateway.api.translation import Translated, Translation, translate, translate_in_steps
from gateway.auth.body_policy import BodyPolicy
from gateway.system.garbage_collector import collector_paused
from gateway.system.steps import finished

MAX_DEPTH = 64
"""Levels of nesting that a body may have."""
_SHORT = 2048  # bytes in which counting is as fast as searching; fewer than the least `server.body_values`
_DIGITS = bytes(0x30 if chr(byte).isdigit() and byte < 0x80 else 0x20 for byte in range(256))
_MARKS = b",:[{"
_NO_MARKS = bytes(byte for byte in range(256) if byte not in _MARKS + b'"')
_RARE = 1024  # marks of a kind that are searched for; more are counted, which is slower where there are few
_NODES_PER_STEP = 20_000  # objects and lists whose members are looked at
_TOGETHER = 256  # of them, followed together
_PIECE = 256 * 1024  # bytes of marks that are counted in one step
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

    def encoded(self, served_model: str) -> Encoded:
        """The same at once, for a large body: the document, which takes many times its bytes, need not be kept."""
        rest = {name: value for name, value in self.document.items() if name != "model"}
        return Encoded(served_model, orjson.dumps({"model": served_model, **rest}))


class Encoded(msgspec.Struct, frozen=True):
    """A large body in the bytes for servers that know the model by ``served_model``, with the model as its first member."""

    served_model: str
    body: bytes

    def encode(self, served_model: str) -> bytes:
        """As ``Prepared.encode``."""
        if served_model == self.served_model:
            return self.body
        old, new = (orjson.dumps({"model": name})[:-1] for name in (self.served_model, served_model))
        return b"".join((new, memoryview(self.body)[len(old) :]))


def parse(body: bytes | bytearray, most_values: int = sys.maxsize) -> Document:
    """Strict UTF-8 JSON, an object, at most MAX_DEPTH deep, with about ``most_values`` values at most (see ``_check_values``).

    Raises Refusal invalid_json, and request_too_large for too many values.
    """
    if len(body) >= _SHORT:
        return finished(parse_in_steps(body, most_values))
    document = _loaded(body)
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH:
        finished(_check_depth(document))
    if body[::6].translate(_DIGITS).find(b"000") >= 0 and _has_long_numbers(body):
        finished(_check_integers(body))
    return document


def parse_in_steps(body: bytes | bytearray, most_values: int = sys.maxsize) -> Generator[None, None, Document]:
    """The same for a large body, in steps."""
    if len(body) > most_values:
        yield from _check_values(body, most_values)
    with collector_paused():
        document = _loaded(body)
    yield
    if _may_be_deep(body):
        yield from _check_depth(document)
    if _may_have_huge_numbers(document, len(body) // _BYTES_PER_LOOK):
        yield
        if _has_long_numbers(body):
            yield
            yield from _check_integers(body)
    return document


def _loaded(body: bytes | bytearray) -> Document:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refusal("invalid_json", f"The body is not valid JSON: {error.msg} at character {error.pos}.") from None
    if type(document) is not dict:
        raise Refusal("invalid_json", "The body must be a JSON object.")
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


def _has_long_numbers(body: bytes | bytearray) -> bool:
    """Whether there are 19 digits in a row, in a text perhaps. They cover three of every sixth byte."""
    # ``find``, because ``in`` makes and drops an exception
    return body[::6].translate(_DIGITS).find(b"000") >= 0 and body.translate(_DIGITS).find(_LONG_NUMBER) >= 0


def _check_integers(body: bytes | bytearray) -> Generator[None, None, None]:
    """orjson makes floats of integers beyond 64 bits: another number than the client's would be sent. Raises Refusal.

    msgspec keeps them, and orjson writes none of them: both take a fraction of the time of a parser that calls back for each.
    """
    try:
        with collector_paused():
            document = msgspec.json.decode(body)
        yield
        orjson.dumps(document)
    except (TypeError, msgspec.DecodeError):
        raise Refusal("invalid_json", "The body has an integer of more than 64 bits.") from None


def _may_be_deep(body: bytes | bytearray) -> bool:
    """Whether it has that many brackets at all. They are few in most bodies, and searching a long one is much faster than counting."""
    return _found(body, b"{", MAX_DEPTH + 1)[0] + _found(body, b"[", MAX_DEPTH + 1)[0] > MAX_DEPTH


def _found(body: bytes | bytearray, mark: bytes, most: int) -> tuple[int, int]:
    """How often a mark was found, at most ``most`` times, and where the search ended; -1 for the end of the body."""
    count, at = 0, body.find(mark)
    while at >= 0:
        count += 1
        if count == most:
            return count, at + 1
        at = body.find(mark, at + 1)
    return count, -1


def _check_values(body: bytes | bytearray, most: int) -> Generator[None, None, None]:
    """Check how many values a body has before they are made, by its commas, colons and opening brackets. Raises Refusal.

    Marks inside strings are first counted too, since that is fast, and are left out only where there are too many.
    """
    marks = 0
    for number in _MARKS:
        mark = bytes((number,))
        count, rest = _found(body, mark, _RARE)
        marks += count if rest < 0 else count + body.count(mark, rest)
        yield
    if marks > most and (yield from _marks_outside_strings(body)) > most:
        raise Refusal("request_too_large", f"The body has more than {most} JSON values.")


def _marks_outside_strings(body: bytes | bytearray) -> Generator[None, None, int]:
    """Count the marks that stand outside of quotes; exact for what is JSON."""
    body = body.replace(b"\\\\", b"")
    yield
    body = body.replace(b'\\"', b"")
    yield
    body = body.translate(None, _NO_MARKS)
    yield
    count = inside = 0
    for start in range(0, len(body), _PIECE):
        texts = body[start : start + _PIECE].split(b'"')
        count += sum(map(len, texts[inside::2]))
        inside ^= len(texts) & 1 ^ 1
        yield
    return count


def _check_depth(document: Document) -> Generator[None, None, None]:
    """Raises Refusal for a document that is more than MAX_DEPTH deep.

    Some objects and lists of one level are followed to the bottom before the next ones: what was parsed together is together in memory.
    """
    pending: list[tuple[int, list[Any]]] = [(1, [document])]
    looked_at = 0
    while pending:
        depth, nodes = pending.pop()
        below = _below(nodes)
        if below and depth == MAX_DEPTH:
            raise Refusal("invalid_json", f"The body is nested more than {MAX_DEPTH} levels deep.")
        below = list(filter(None, below))
        pending += [(depth + 1, below[start : start + _TOGETHER]) for start in range(0, len(below), _TOGETHER)]
        looked_at += len(nodes)
        if looked_at > _NODES_PER_STEP:
            looked_at = 0
            yield


def _below(level: list[Any]) -> list[Any]:
    """The objects and lists that are members of these."""
    lists = [node for node in level if type(node) is list]
    below = [value for value in chain.from_iterable(lists) if type(value) in CONTAINERS]
    if len(lists) < len(level):
        values = chain.from_iterable([node.values() for node in level if type(node) is dict])
        below += [value for value in values if type(value) in CONTAINERS]
    return below


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


def prepare(document: Document, policy: BodyPolicy, route: Route, size: int, own: Mapping[str, Any] = _NOTHING) -> Prepared:
    """Apply a model's policy to a merged body, which is taken over. Raises Refusal for what may not be sent.

    ``size``: bytes of the body as it came; ``own``: the fields that the request's key brings.
    """
    policy.apply(document, size)
    document = _with_the_operators(document, policy, route)
    return _prepared(document, translate(document) if route.translated else None, policy, route, own)


def prepare_in_steps(
    document: Document, policy: BodyPolicy, route: Route, size: int, own: Mapping[str, Any] = _NOTHING
) -> Generator[None, None, Prepared]:
    """The same for a large body, in steps."""
    yield from policy.apply_in_steps(document, size)
    yield
    document = _with_the_operators(document, policy, route)
    yield
    translated = (yield from translate_in_steps(document)) if route.translated else None
    yield
    return _prepared(document, translated, policy, route, own)


def _with_the_operators(document: Document, policy: BodyPolicy, route: Route) -> Document:
    """The body with the operator's own fields, and today's names for older ones."""
    if route.dialect is Dialect.RESPONSES:
        document.pop("store", None)  # true is OpenAI's default value: no client relies on it by sending it
    if policy.defaults or policy.overrides:
        document = {**policy.defaults, **document, **policy.overrides}  # the operator may set what clients may not
    if route.guided and not _GUIDED_ALL.isdisjoint(document):
        _translate_guided(document)
    return document


def _prepared(document: Document, translated: Translated | None, policy: BodyPolicy, route: Route, own: Mapping[str, Any]) -> Prepared:
    upstream, input_field, translation = route.upstream, route.input_field, None
    if translated is not None:
        document, other, translation = translated
        if other is not None:
            upstream, input_field = other, "prompt"
    elif route.dialect is Dialect.RESPONSES:
        _refuse_state(document)
        document.setdefault("store", False)
    elif route.dialect is Dialect.COHERE:
        policy.check_images(document.get("images"))
    if policy.max_tokens is not None:
        _bound(document, policy.max_tokens, upstream)
    stream = "stream" in document and _flag(document, "stream")
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
