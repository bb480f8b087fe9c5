"""Prepare a JSON body for the servers of its model, downward: parse, resolve the model, apply the policy, reserve, serialize.

``prepare_request`` is one generator. A small body exhausts it in one call; for a large one, it is run in steps (see ``steps``). The rule:
every check runs on the merged document, and that document is sent.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Set
from functools import partial
from typing import Any

from msgspec.structs import replace

from gateway.api.errors import invalid_value
from gateway.api.routes import OUTPUTS, Dialect, Route
from gateway.api.strict_json import Document, parse
from gateway.api.translation import translate
from gateway.api.vllm.choices import choices_and_prompts
from gateway.auth.body_policy import BodyPolicy
from gateway.auth.catalog import CatalogEntry
from gateway.continuation.plan import Path, Plan, plan_of, runs_tools
from gateway.limits.expected_use import estimate_request
from gateway.prompts.balancing_facts import balancing_facts
from gateway.prompts.token_keys import TokenRequest, token_request
from gateway.proxy.context import Fallbacks, RequestContext
from gateway.proxy.json_body import JsonBody
from gateway.proxy.mirror import mirrored
from gateway.proxy.recorded import start_recording
from gateway.proxy.upstream_request import UpstreamRequest
from gateway.snapshot.snapshot import Key
from gateway.system.steps import MEDIUM, finished
from gateway.telemetry.body_shape import shape
from upstream.balancing.policies.policy import NO_FACTS, Fact, RequestFacts

_NOTHING: Mapping[str, Any] = {}
_SERIALIZED_EARLY = 8 * 1024  # bytes of a body from which only its bytes are stored: its document takes up to thirty times as much memory


def prepare_request(
    body: bytes | bytearray, context: RequestContext, key: Key, *, large: bool = False
) -> Generator[None, None, UpstreamRequest]:
    """Parse a body, resolve its model, and make the request for its servers. ``large``: the body is processed in steps."""
    request = context.request
    worker = context.worker
    active = worker.active
    document = merge((yield from parse(body, active.snapshot.body_values)))
    context.user = document.get("user")
    if active.shape_sample is not None and active.shape_sample.includes(request.id):
        context.shape = shape(document)
    name = document.get("model")
    named = active.catalog.resolve(name, key, request.target.mounted)
    name = name or named.model.id
    context.model = model = named if named.split is None else context.choose_from_split(named, named.split, key, document)
    upstream = yield from _for_model(document, body, context, key, name, model, large)
    if model.is_observed:
        upstream = _observed(upstream, context, key, model, body, document)
    if worker.ledger is not None:
        worker.ledger.start_request(
            request.id, context.started_at, request.target.route.endpoint, key, model.model, context.stream, document, request.head.headers
        )
    if model.model.fallbacks and request.target.mounted is None:
        again = partial(_prepare_again, body, context, key, name, large)
        context.fallbacks = Fallbacks(model, active.catalog.fallbacks(model, key, named), again)
    return upstream


def _observed(
    upstream: UpstreamRequest, context: RequestContext, key: Key, model: CatalogEntry, body: bytes | bytearray, document: Document
) -> UpstreamRequest:
    """Record and mirror a request if it is selected. Returns the request to send."""
    if model.is_recorded:
        start_recording(context, key, body, upstream)
    return upstream if model.mirror is None else mirrored(upstream, model, model.mirror, context.worker, document)


async def _prepare_again(
    body: bytes | bytearray, context: RequestContext, key: Key, name: str, large: bool, model: CatalogEntry
) -> UpstreamRequest:
    """Make the request for a fallback. The body was parsed and checked before."""
    work = _parse_again(body, context, key, name, model, large)
    return await context.worker.steps.run(work, len(body)) if large else finished(work)


def _parse_again(
    body: bytes | bytearray, context: RequestContext, key: Key, name: str, model: CatalogEntry, large: bool
) -> Generator[None, None, UpstreamRequest]:
    document = merge((yield from parse(body)))
    upstream = yield from _for_model(document, body, context, key, name, model, large)
    if context.capture is not None:
        context.capture.sent = upstream.body
    return upstream


def _for_model(
    document: Document, body: bytes | bytearray, context: RequestContext, key: Key, name: str, model: CatalogEntry, large: bool
) -> Generator[None, None, UpstreamRequest]:
    """Apply a model's policy and the key's limits to a merged document, and make the request. ``body`` and ``name`` are the client's."""
    request = context.request
    size = len(body)
    reservation = request.reservation
    prepared = yield from prepare(document, model.policy, request.target.route, size, key.fields, large=large)
    if reservation is not None:
        estimate_request(reservation, prepared.document, prepared.path, size, prepared.media, model.model, context.user)
    plan = None
    if prepared.stream:
        context.stream = True
        plan = _plan(prepared, context, key, model, size) if model.pool.may_continue else None
        counts_tokens = context.worker.ledger is not None or (reservation is not None and reservation.counts_tokens)
        if counts_tokens and model.model.running_usage:
            prepared = with_running_usage(prepared)
    facts, tokens, has_tools = NO_FACTS, None, not request.target.route.repeatable and runs_tools(prepared.document)
    if required := model.pool.required_facts:
        facts, tokens = yield from _facts(required, prepared, size, context, model, large)
    if size > _SERIALIZED_EARLY:
        if large:
            yield
        servers = model.pool.servers
        prepared = prepared.serialized(model.model.served or (servers[0].spec.model if servers else model.model.id))
        written = len(prepared.content)
        request.body.reserve(written + size if model.model.fallbacks else written)
        if large:
            yield
    return UpstreamRequest(request, model, name, prepared, facts, tokens, plan, has_tools)


def _plan(prepared: JsonBody, context: RequestContext, key: Key, model: CatalogEntry, size: int) -> Plan | None:
    """Return how the stream of a request would be continued on another server, and request what that needs.

    The document of a larger body is not read again for its token IDs: that would delay other clients.
    """
    request = context.request
    if prepared.translation is not None:
        return None
    plan = plan_of(prepared.document, request.target.route.dialect, model.model.resume, model.pool.has_scale_out)
    if plan is not None and plan.path is Path.TOKEN_IDS and size > MEDIUM:
        plan = None if plan.sampled else Plan(Path.REGENERATION)
    if plan is not None:
        request.body.owner = key.id
        if plan.path is Path.TOKEN_IDS:
            prepared.document["return_token_ids"] = True
    return plan


def _facts(
    required: Set[Fact], prepared: JsonBody, size: int, context: RequestContext, model: CatalogEntry, large: bool
) -> Generator[None, None, tuple[RequestFacts, TokenRequest | None]]:
    """Return the facts that the model's balance policy requires, and how to get the token IDs of the prompt."""
    if large:
        yield
    session, adapter = context.request.head.headers.get(b"x-session-id"), model.model.id if model.model.parent is not None else None
    facts = yield from balancing_facts(required, prepared.document, session, adapter)
    if facts.prompt is None:
        return facts, None
    caches = context.worker.engine_caches.get(model.model.base)
    return facts, token_request(caches, prepared.document, prepared.path, size, model)


# The document. These functions are pure.


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
        raise invalid_value("The field 'extra_body' must be an object.", param="extra_body")
    merged = {**document, **extra}
    del merged["extra_body"]  # a nested one has no meaning, and a server would ignore it
    return merged


def prepare(
    document: Document, policy: BodyPolicy, route: Route, size: int, key_fields: Mapping[str, Any] = _NOTHING, *, large: bool = False
) -> Generator[None, None, JsonBody]:
    """Apply a model's policy to a merged document, which may be modified. Raises Refusal for a document that may not be sent.

    ``size``: bytes of the body as received. ``key_fields``: the fields that the request's key sets. ``large``: see ``BodyPolicy.apply``.
    """
    media = yield from policy.apply(document, size, large=large)
    if route.dialect is Dialect.RESPONSES:
        document.pop("store", None)  # true is OpenAI's default value: a client that sends it need not rely on it
    if policy.sets_fields:
        document = {**policy.defaults, **document, **policy.overrides}  # the operator may set what clients may not
    if route.guided and not _GUIDED_ALL.isdisjoint(document):
        _translate_guided(document)
    path, input_field, translation = route.upstream, route.input_field, None
    if route.translated:
        document, other, translation = yield from translate(document, large=large)
        if other is not None:
            path, input_field = other, "prompt"
    elif route.dialect is Dialect.RESPONSES:
        _refuse_state(document)
        document.setdefault("store", False)
    elif route.dialect is Dialect.COHERE:
        policy.check_images(document.get("images"))
    if policy.max_tokens is not None:
        _set_max_tokens(document, policy.max_tokens, path)
    stream = hides_usage = False
    if "stream" in document and document["stream"] is not None:
        stream = document["stream"] = _flag(document, "stream")  # the server gets what was understood here
        hides_usage = stream and route.injects and _inject_usage(document)
    headers = _set_key_fields(document, key_fields, route) if key_fields else b""
    return JsonBody(document, stream, hides_usage, path, input_field, translation, headers, media=media)


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
            raise invalid_value(f"Responses are not stored here, so '{name}' can't be used.", param=name)


# Guided decoding by its former field names, which vLLM has removed and ignores

_GUIDED: Mapping[str, str] = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_GUIDED_OPTIONS: Mapping[str, str] = {"guided_whitespace_pattern": "whitespace_pattern"}
_GUIDED_ALL = frozenset((*_GUIDED, *_GUIDED_OPTIONS, "guided_decoding_backend"))


def _translate_guided(document: Document) -> None:
    """Translate ``guided_*`` to ``structured_outputs``. Raises Refusal if two constraints are given."""
    values = {name: document.pop(name) for name in _GUIDED_ALL & document.keys()}
    constraints = {name: value for name, value in values.items() if name in _GUIDED and value is not None}
    if not constraints:
        return
    names = sorted(constraints) + [name for name in ("structured_outputs", "response_format") if _constrains(document.get(name))]
    if len(names) > 1:
        raise invalid_value(f"Only one constraint can be given, not {' and '.join(names)}.", param=names[0])
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
        raise invalid_value("The field 'stream_options' must be an object.", param="stream_options")
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


_BOOLEANS: Mapping[str | float, bool] = {
    1: True,
    0: False,
    **dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
}
"""The texts and numbers that pydantic accepts as booleans, in lowercase."""


def _flag(document: Mapping[str, Any], name: str, path: str | None = None) -> bool:
    """Return a boolean field, as vLLM reads it; a missing field and null count as False. Raises Refusal for other values."""
    value = document.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, str | int | float) and (found := _BOOLEANS.get(value.lower() if isinstance(value, str) else value)) is not None:
        return found
    raise invalid_value(f"The field '{path or name}' must be true or false.", param=path or name)
