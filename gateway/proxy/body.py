"""Convert a client's JSON body to the body for the server. Pure functions, in the order in which a request calls them.

The rule: every check runs on the merged document, and the gateway sends that document, serialized again. The client's own bytes are never
sent. So the server gets exactly the authorized content, whatever the text contains (duplicate keys, escapes, byte order marks).

``parse`` and ``prepare`` process a small body in one call. ``parse_in_steps`` and ``prepare_in_steps`` do the same for a large one, as
generators (see ``steps``): both call the same checks, and the tests compare their results.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
import orjson
from msgspec.structs import replace

from gateway.api.errors import Refusal
from gateway.api.media_urls import CONTAINERS
from gateway.api.routes import OUTPUTS, Dialect, Route
from gateway.api.translation import Translated, Translation, translate, translate_in_steps
from gateway.api.vllm.choices import choices_and_prompts
from gateway.api.vllm.validation import dotted
from gateway.auth.body_policy import BodyPolicy
from gateway.system.garbage_collector import collector_paused
from gateway.system.steps import finished

MAX_DEPTH = 64
"""Levels of nesting that a body may have."""
_SHORT = 2048  # bytes up to which counting is as fast as searching; less than the minimum of `server.body_values`
_DIGITS = bytes(0x30 if chr(byte).isdigit() and byte < 0x80 else 0x20 for byte in range(256))
_MARKS = b",:[{"  # a body has about one value for each of these
_NO_MARKS = bytes(byte for byte in range(256) if byte not in _MARKS + b'"')
_RARE = 1024  # marks of a kind that are searched for; more are counted, which is slower if there are few
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_CHANGES = tuple((byte in b"[{") - (byte in b"]}") for byte in range(256))
"""How each character changes the depth."""
_PIECE = 256 * 1024  # bytes of marks that are counted in one step
_BRACKETS = 64 * 1024  # brackets and quotes that are checked in one step
_LONG_NUMBER = b"0" * 19  # 2**63 has so many digits
_HUGE = 2.0**63
_BYTES_PER_CHECK = 256  # checking one value takes as long as searching so many bytes
_NOTHING: Mapping[str, Any] = MappingProxyType({})

Document = dict[str, Any]


class JsonBody(msgspec.Struct, frozen=True):
    """A JSON body that may be sent; only the model's name at the server is still to be set.

    ``hides_usage``: the usage event of the stream is for the gateway alone. ``choices`` and ``prompts``: of a stream with running usage,
    the number of choices for each prompt and of prompts, otherwise 0; ``hides_running_usage``: that usage is for the gateway alone.
    ``path``: the path at the server. ``input_field``: the field that holds the text. ``translation``: translates the response to a request
    in an older form. ``headers``: header lines of this request.
    """

    document: Document
    """Empty once the body is serialized."""
    stream: bool
    hides_usage: bool
    path: str
    input_field: str
    translation: Translation | None = None
    headers: bytes = b""
    choices: int = 0
    prompts: int = 0
    hides_running_usage: bool = False
    content: bytes = b""
    """The serialized body of a large request, with ``model`` as its first field."""
    content_model: str = ""
    """The model's name in ``content``."""
    content_type: ClassVar[bytes] = b"application/json"
    upload: ClassVar[None] = None

    def encode(self, served_model: str) -> bytes:
        """Return the bytes for a server that knows the model by this name."""
        if not self.content:
            self.document["model"] = served_model
            return orjson.dumps(self.document)
        if served_model == self.content_model:
            return self.content
        old, new = (orjson.dumps({"model": name})[:-1] for name in (self.content_model, served_model))
        return b"".join((new, memoryview(self.content)[len(old) :]))

    def serialized(self, served_model: str) -> JsonBody:
        """Return the same body with its bytes in place of the document, which takes many times as much memory."""
        rest = {name: value for name, value in self.document.items() if name != "model"}
        return replace(self, document={}, content=orjson.dumps({"model": served_model, **rest}), content_model=served_model)

    def sent_document(self) -> Document:
        """Return the document of the request. Parses a serialized body again."""
        return orjson.loads(self.content) if self.content else self.document


def parse(body: bytes | bytearray, most_values: int = sys.maxsize) -> Document:
    """Parse strict UTF-8 JSON: an object, at most MAX_DEPTH deep, with at most about ``most_values`` values (see ``_check_values``).

    Raises Refusal invalid_json, and request_too_large for too many values.
    """
    if len(body) >= _SHORT:
        return finished(parse_in_steps(body, most_values))
    document = _loaded(body)
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH:
        finished(_check_depth(body))
    if body[::6].translate(_DIGITS).find(b"000") >= 0 and _has_long_numbers(body):
        finished(_check_integers(body))
    return document


def parse_in_steps(body: bytes | bytearray, most_values: int = sys.maxsize) -> Generator[None, None, Document]:
    """Do the same as ``parse`` for a large body, in steps."""
    if len(body) > most_values:
        yield from _check_values(body, most_values)
    with collector_paused():
        document = _loaded(body)
    yield
    if _may_be_deep(body):
        yield from _check_depth(body)
    if _may_have_huge_numbers(document, len(body) // _BYTES_PER_CHECK):
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


def _may_have_huge_numbers(document: Document, most_checks: int) -> bool:
    """Return whether a number is as large as the floats that orjson makes of integers beyond 64 bits.

    Return True as well if more than ``most_checks`` values would have to be checked: then searching the bytes is faster.
    """
    level: list[Any] = [document]
    while level:
        below: list[Any] = []
        for node in level:
            most_checks -= len(node)
            if most_checks < 0:
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
    """Return whether the body has 19 digits in a row, perhaps in a string. They cover three of the bytes 0, 6, 12 and so on."""
    # ``find``, because ``in`` creates and drops an exception
    return body[::6].translate(_DIGITS).find(b"000") >= 0 and body.translate(_DIGITS).find(_LONG_NUMBER) >= 0


def _check_integers(body: bytes | bytearray) -> Generator[None, None, None]:
    """Check that no integer has more than 64 bits: orjson makes a float of it, so another number would be sent. Raises Refusal.

    msgspec parses these integers, and orjson refuses to serialize them. Both take a fraction of the time of a parser with callbacks.
    """
    name = ""
    try:
        with collector_paused():
            document = msgspec.json.decode(body)
        yield
        for name in document:
            orjson.dumps(document[name])
    except msgspec.DecodeError:
        raise Refusal("invalid_json", "The body has an integer of more than 64 bits.") from None
    except TypeError:
        field = dotted((name,))
        raise Refusal("invalid_value", f"The field '{field}' has an integer of more than 64 bits.", param=field) from None


def _may_be_deep(body: bytes | bytearray) -> bool:
    """Return whether the body has more than MAX_DEPTH brackets. Most bodies have few, and then searching is much faster than counting."""
    return _found(body, b"{", MAX_DEPTH + 1)[0] + _found(body, b"[", MAX_DEPTH + 1)[0] > MAX_DEPTH


def _found(body: bytes | bytearray, mark: bytes, most: int) -> tuple[int, int]:
    """Return how often a mark was found, at most ``most`` times, and where the search ended; -1 for the end of the body."""
    count, at = 0, body.find(mark)
    while at >= 0:
        count += 1
        if count == most:
            return count, at + 1
        at = body.find(mark, at + 1)
    return count, -1


def _check_values(body: bytes | bytearray, most: int) -> Generator[None, None, None]:
    """Check how many values a body has before it is parsed, by its commas, colons and opening brackets. Raises Refusal.

    The first count includes marks inside strings, since that is fast. If it is too high, only the marks outside strings are counted.
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
    """Count the marks outside strings. The count is exact for valid JSON."""
    marks, count, inside = (yield from _marks_and_quotes(body, _NO_MARKS)), 0, 0
    for start in range(0, len(marks), _PIECE):
        texts = marks[start : start + _PIECE].split(b'"')
        count += sum(map(len, texts[inside::2]))
        inside ^= len(texts) & 1 ^ 1
        yield
    return count


def _marks_and_quotes(body: bytes | bytearray, others: bytes) -> Generator[None, None, bytes | bytearray]:
    """Return the body without escapes and without the other characters: marks, inside and outside strings, and the quotes of strings."""
    body = body.replace(b"\\\\", b"")
    yield
    body = body.replace(b'\\"', b"")
    yield
    body = body.translate(None, others)
    yield
    return body


def _check_depth(body: bytes | bytearray) -> Generator[None, None, None]:
    """Check that valid JSON is at most MAX_DEPTH deep, by the brackets outside strings. Raises Refusal.

    Each character of the body takes the same time. Visiting the values of a document would take ten times as long if all are lists.
    """
    marks, depth, inside = (yield from _marks_and_quotes(body, _NO_BRACKETS)), 0, 0
    for start in range(0, len(marks), _BRACKETS):
        texts = marks[start : start + _BRACKETS].split(b'"')
        depths = list(accumulate(map(_CHANGES.__getitem__, b"".join(texts[inside::2])), initial=depth))
        if max(depths) > MAX_DEPTH:
            raise Refusal("invalid_json", f"The body is nested more than {MAX_DEPTH} levels deep.")
        depth = depths[-1]
        inside ^= len(texts) & 1 ^ 1
        yield


def merge(document: Document) -> Document:
    """Merge the fields of ``extra_body`` into the body, where they take precedence. Raises Refusal if ``extra_body`` is not an object.

    Null counts as absent.
    """
    if "extra_body" not in document:
        return document
    extra = document["extra_body"]
    if extra is None:
        extra = {}
    if not isinstance(extra, dict):
        raise Refusal("invalid_value", "The field 'extra_body' must be an object.", param="extra_body")
    merged = {**document, **extra}
    del merged["extra_body"]  # a nested one has no meaning, and a server would ignore it
    return merged


def prepare(document: Document, policy: BodyPolicy, route: Route, size: int, key_fields: Mapping[str, Any] = _NOTHING) -> JsonBody:
    """Apply a model's policy to a merged document, which may be modified. Raises Refusal for a document that may not be sent.

    ``size``: bytes of the body as received. ``key_fields``: the fields that the request's key sets.
    """
    policy.apply(document, size)
    document = _with_configured_fields(document, policy, route)
    return _prepared(document, translate(document) if route.translated else None, policy, route, key_fields)


def prepare_in_steps(
    document: Document, policy: BodyPolicy, route: Route, size: int, key_fields: Mapping[str, Any] = _NOTHING
) -> Generator[None, None, JsonBody]:
    """Do the same as ``prepare`` for a large body, in steps."""
    yield from policy.apply_in_steps(document, size)
    yield
    document = _with_configured_fields(document, policy, route)
    yield
    translated = (yield from translate_in_steps(document)) if route.translated else None
    yield
    return _prepared(document, translated, policy, route, key_fields)


def _with_configured_fields(document: Document, policy: BodyPolicy, route: Route) -> Document:
    """Return the document with the configured defaults and overrides, and with current names in place of older ones."""
    if route.dialect is Dialect.RESPONSES:
        document.pop("store", None)  # true is OpenAI's default value: a client that sends it need not rely on it
    if policy.defaults or policy.overrides:
        document = {**policy.defaults, **document, **policy.overrides}  # the operator may set what clients may not
    if route.guided and not _GUIDED_ALL.isdisjoint(document):
        _translate_guided(document)
    return document


def _prepared(
    document: Document, translated: Translated | None, policy: BodyPolicy, route: Route, key_fields: Mapping[str, Any]
) -> JsonBody:
    path, input_field, translation = route.upstream, route.input_field, None
    if translated is not None:
        document, other, translation = translated
        if other is not None:
            path, input_field = other, "prompt"
    elif route.dialect is Dialect.RESPONSES:
        _refuse_state(document)
        document.setdefault("store", False)
    elif route.dialect is Dialect.COHERE:
        policy.check_images(document.get("images"))
    if policy.max_tokens is not None:
        _set_max_tokens(document, policy.max_tokens, path)
    stream = False
    if "stream" in document and document["stream"] is not None:
        stream = document["stream"] = _flag(document, "stream")  # the server gets what was understood here
    hides_usage = stream and route.injects and _inject_usage(document)
    headers = _set_key_fields(document, key_fields, route) if key_fields else b""
    return JsonBody(document, stream, hides_usage, path, input_field, translation, headers)


# Configured fields


def _set_max_tokens(document: Document, most: int, path: str) -> None:
    """Set the configured limit on a request without a limit, which could otherwise fill the whole context.

    ``path`` is the path at the server, which ignores the name that another route has for the limit.
    """
    output = OUTPUTS.get(path)
    if output is None or any(document.get(name) is not None for name in output.names):
        return
    document[output.names[-1]] = most if output.default is None else min(most, output.default)


def _set_key_fields(document: Document, key_fields: Mapping[str, Any], route: Route) -> bytes:
    """Set a key's fields that the route accepts. Returns header lines for those that vLLM reads from a header.

    /v1/messages has no ``priority`` field, but vLLM reads the header there (``PRIORITY_HEADER`` in generate/base/serving.py).
    """
    for name in key_fields.keys() & route.takes:
        document[name] = key_fields[name]
    if route.dialect is Dialect.MESSAGES and "priority" in key_fields:
        return b"x-vllm-priority: %d\r\n" % key_fields["priority"]
    return b""


_STATE = ("previous_response_id", "conversation", "background")


def _refuse_state(document: Document) -> None:
    """Refuse fields that need a stored response. Servers store none, since a server would return it to any client that knows its ID."""
    for name in _STATE:
        if document.get(name) not in (None, False):
            raise Refusal("invalid_value", f"Responses are not stored here, so '{name}' can't be used.", param=name)


# Guided decoding by its former field names, which vLLM has removed and ignores

_GUIDED: Mapping[str, str] = MappingProxyType(
    {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
)
_GUIDED_OPTIONS: Mapping[str, str] = MappingProxyType({"guided_whitespace_pattern": "whitespace_pattern"})
_GUIDED_ALL = frozenset((*_GUIDED, *_GUIDED_OPTIONS, "guided_decoding_backend"))


def _translate_guided(document: Document) -> None:
    """Translate ``guided_*`` to ``structured_outputs``. Raises Refusal if two constraints are given."""
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
    """Return whether a ``structured_outputs`` or ``response_format`` sets a constraint."""
    return bool(value) and value != {"type": "text"}


# Usage


def _inject_usage(document: Document) -> bool:
    """Request the usage event if the client did not. Returns whether it must be hidden from the client."""
    options = document.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise Refusal("invalid_value", "The field 'stream_options' must be an object.", param="stream_options")
    options = options or {}
    if _flag(options, "include_usage", "stream_options.include_usage"):
        return False
    document["stream_options"] = {**options, "include_usage": True, "continuous_usage_stats": False}
    return True


def with_running_usage(body: JsonBody) -> JsonBody:
    """Request the tokens so far in every event of a stream, so that a truncated stream is charged exactly (see ``running_usage``).

    The client's own ``continuous_usage_stats`` counts only with its own ``include_usage``, as on the server. Raises Refusal.
    """
    options = body.document.get("stream_options")
    if not isinstance(options, dict) or not options.get("include_usage"):
        return body  # the route has no such field
    by_client = _flag(options, "continuous_usage_stats", "stream_options.continuous_usage_stats")
    if not by_client:
        body.document["stream_options"] = {**options, "continuous_usage_stats": True}
    choices, prompts = choices_and_prompts(body.document)
    return replace(body, choices=choices, prompts=prompts, hides_running_usage=not by_client)


_BOOLEANS: Mapping[str | float, bool] = MappingProxyType(
    {
        1: True,
        0: False,
        **dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True),
        **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
    }
)
"""The texts and numbers that pydantic accepts as booleans, in lowercase."""


def _flag(document: Mapping[str, Any], name: str, path: str | None = None) -> bool:
    """Return a boolean field, as vLLM reads it; a missing field and null count as False. Raises Refusal for other values."""
    value = document.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, str | int | float) and (found := _BOOLEANS.get(value.lower() if isinstance(value, str) else value)) is not None:
        return found
    raise Refusal("invalid_value", f"The field '{path or name}' must be true or false.", param=path or name)
