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
from gateway.routes import Dialect, Route
from gateway.state import Model
from gateway.translate import Translation, translate

MAX_DEPTH = 64
"""Levels of nesting that a body may have."""

_SHORT = 2048  # bytes in which counting is as fast

Document = dict[str, Any]


class Prepared(msgspec.Struct, frozen=True):
    """A body that may be sent: ``document`` lacks only the model's name at the server.

    ``hides_usage`` says that the usage event is there for the gateway and not for the client; ``upstream`` is the
    path at the server; ``input_field`` the member that holds the text; ``translation`` is the way back for a request
    in words that vLLM does not know.
    """

    document: Document
    stream: bool
    hides_usage: bool
    upstream: str
    input_field: str
    translation: Translation | None = None

    def encode(self, served_model: str) -> bytes:
        """The bytes for a server that knows the model by this name."""
        self.document["model"] = served_model
        return orjson.dumps(self.document)


def parse(body: bytes) -> Document:
    """Strict UTF-8 JSON, an object, at most MAX_DEPTH deep. Raises Refusal invalid_json."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refusal("invalid_json", f"The body is not valid JSON: {error.msg} at character {error.pos}.") from None
    if not isinstance(document, dict):
        raise Refusal("invalid_json", "The body must be a JSON object.")
    if _may_be_deep(body) and _too_deep(document):
        raise Refusal("invalid_json", f"The body is nested more than {MAX_DEPTH} levels deep.")
    return document


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


def _too_deep(document: Document) -> bool:
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        children = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return False
    return True


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


def prepare(document: Document, model: Model, route: Route) -> Prepared:
    """Apply the policy of a model to a merged body, which is taken over. Raises Refusal for what may not be sent."""
    _refuse_or_strip(document)
    if model.defaults or model.overrides:
        document = {**model.defaults, **document, **model.overrides}  # the operator may set what clients may not
    if route.guided:
        _translate_guided(document)
    upstream, input_field, translation = route.upstream, route.input_field, None
    if route.dialect is Dialect.CHAT:
        document, other, translation = translate(document)
        if other is not None:
            upstream, input_field = other, "prompt"
    elif route.dialect is Dialect.RESPONSES:
        _refuse_state(document)
    stream = _flag(document, "stream")
    hides_usage = stream and route.injects and _inject_usage(document)
    return Prepared(document, stream, hides_usage, upstream, input_field, translation)


# Fields that clients may not set

_STRIPPED = frozenset(
    {
        "kv_transfer_params",  # its prompt_token_ids would replace the checked messages
        "ec_transfer_params",
        "vllm_xargs",
        "priority",
        "request_id",
        "session_id",
        "cache_salt",
        "return_prompt_text",
    }
)
_REFUSED = frozenset({"chat_template", "mm_processor_kwargs", "media_io_kwargs", "prompt_logprobs", "use_beam_search"})
FORBIDDEN = _STRIPPED | _REFUSED


def _refuse_or_strip(document: Document) -> None:
    """Strip what is the gateway's to say; refuse, by name, what would change the answer if it went missing."""
    if not FORBIDDEN.isdisjoint(document):
        for name in FORBIDDEN & document.keys():
            if name in _REFUSED and document[name] is not None and document[name] is not False:
                raise Refusal("invalid_value", f"The field '{name}' is not allowed here.", param=name)
            del document[name]
    kwargs = document.get("chat_template_kwargs")
    if isinstance(kwargs, dict) and "chat_template" in kwargs:
        raise Refusal("invalid_value", "The field 'chat_template' is not allowed here.", param="chat_template_kwargs.chat_template")


_STATE = ("previous_response_id", "conversation", "store", "background")


def _refuse_state(document: Document) -> None:
    """Responses are not kept: a server would give one to whoever knows its id."""
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
