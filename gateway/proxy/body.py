"""Convert a client's JSON body to the body for the server. Pure functions, in the order in which a request calls them.

The rule: every check runs on the merged document, and the gateway sends that document, serialized again. The client's own bytes are never
sent. So the server gets exactly the authorized content, whatever the text contains (duplicate keys, escapes, byte order marks).

``prepare`` processes a small body in one call. ``prepare_in_steps`` does the same for a large one, as a generator (see ``steps``). Both
call the same checks, and the tests compare their results.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
import orjson
from msgspec.structs import replace

from gateway.api.errors import Refusal
from gateway.api.routes import OUTPUTS, Dialect, Route
from gateway.api.strict_json import Document
from gateway.api.translation import Translated, Translation, translate, translate_in_steps
from gateway.api.vllm.choices import choices_and_prompts
from gateway.auth.body_policy import BodyPolicy

_NOTHING: Mapping[str, Any] = MappingProxyType({})


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
