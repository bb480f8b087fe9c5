"""Serve one inference request, step by step.

authenticate → admit → read the body → merge ``extra_body`` → resolve and authorize the model → apply its policy → choose a server, or
wait for one → send → relay the response → (count the prompt of a truncated one) → settle limits → record.

The rule: a resource is released by the ``with`` that acquired it, and every request ends in ``RequestContext``, which records it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from time import monotonic

from gateway.api.errors import Refusal, draining
from gateway.api.routes import Body, Dialect
from gateway.api.strict_json import Document, parse, parse_in_steps
from gateway.api.vllm.errors import from_server, server_failure
from gateway.auth.catalog import CatalogEntry, named_model
from gateway.auth.split import Split
from gateway.client.http.content_encoding import ENCODINGS, IDENTITY, decoded
from gateway.client.request import ClientRequest
from gateway.limits.reservation import reservation_of
from gateway.limits.sessions import session_of
from gateway.prompts.balancing_facts import balancing_facts
from gateway.prompts.token_keys import TokenRequest, add_token_keys, token_request
from gateway.proxy.body import merge, prepare, prepare_in_steps, with_running_usage
from gateway.proxy.context import Fallbacks, RequestContext
from gateway.proxy.form import Form
from gateway.proxy.mirror import mirrored
from gateway.proxy.prompt_count import count_prompt
from gateway.proxy.request_services import RequestServices
from gateway.proxy.response import BodyRelay, EmbeddingsRelay, EventRelay, TranslatedRelay, is_binary, is_stream
from gateway.proxy.upstream_request import FormBody, UpstreamRequest
from gateway.snapshot.snapshot import Key
from gateway.system.steps import Pace, finished, is_small
from gateway.telemetry.body_shape import shape
from upstream.balancing.attempt import Attempt, UpstreamResponse
from upstream.balancing.policies.policy import NO_FACTS
from upstream.balancing.pool import NoServerError
from upstream.http.errors import BadResponse, ConnectFailed, UpstreamError

_ERROR_BODY_LIMIT = 64 * 1024
_ERROR_BODY_TIMEOUT = 5.0  # seconds
_SERIALIZED_EARLY = 8 * 1024  # bytes of a body from which only its bytes are stored: its document takes up to thirty times as much memory


async def handle_request(request: ClientRequest, worker: RequestServices) -> None:
    """Serve one request, from its headers to the last byte of its response."""
    active = worker.active
    if active.sampler is not None:
        request.trace = active.sampler.start_trace(request.head.headers.get(b"traceparent"))
    with RequestContext(request, worker) as context:
        if worker.draining:
            raise draining()
        # Authenticate before any of the body is read.
        context.key = key = worker.authenticate(request)
        if not request.body.complete:
            request.body.owner = key.id
        # Admit the request: by the concurrency limit of the worker, then by the limits of its key.
        inflight = worker.inflight.slot(key)
        if active.concurrency_limit is not None:
            active.concurrency_limit.admit(request.requests_in_flight, inflight.in_flight, monotonic())
        with inflight:
            if key.allowances:
                request.reservation = reservation_of(worker.limiter, key, request.id, request.head.headers)
                if (pending := request.reservation.reserve_request()) is not None:
                    await pending
            # Read the body, resolve its model and apply the model's policy.
            encoding = _check_media_type(request)
            if request.target.route.takes_form:
                upstream = await _prepare_form(context, key)
            else:
                body = request.body.take() if encoding is None and request.body.complete else await _read_body(context, key, encoding)
                if is_small(body):
                    upstream = await _prepare_json(body, context, key)
                else:
                    async with worker.steps.admit(len(body)) as pace:
                        upstream = await _prepare_json(body, context, key, pace)
                del body  # the response may take long
            # Send it and relay the response; again for each fallback.
            while True:
                if request.reservation is not None and (pending := request.reservation.reserve_tokens()) is not None:
                    await pending
                try:
                    return await _forward(upstream, context, key)
                except (NoServerError, ConnectFailed, Refusal) as error:
                    upstream = await _next_fallback(error, context)
                except (asyncio.CancelledError, UpstreamError):
                    if context.needs_prompt_count:
                        await _count_prompt(upstream, context)
                    raise


# Before the body


_MEDIA_TYPES = {Body.JSON: (b"application/json", b""), Body.FORM: (b"multipart/form-data",)}


def _check_media_type(request: ClientRequest) -> str | None:
    """Return the body's content encoding; None without one.

    Raises Refusal unsupported_media_type for a content type or encoding that the route does not accept.
    """
    headers, route = request.head.headers, request.target.route
    allowed, given = _MEDIA_TYPES[route.body], headers.get(b"content-type", b"")
    if given not in allowed and given.partition(b";")[0].strip().lower() not in allowed:
        raise Refusal("unsupported_media_type", f"The content type must be {allowed[0].decode()}.")
    if b"content-encoding" not in headers:
        return None
    encoding = headers[b"content-encoding"].decode("latin-1").lower()
    if encoding == IDENTITY:
        return None
    if encoding not in ENCODINGS:
        raise Refusal("unsupported_media_type", f"The content encoding must be one of {', '.join(ENCODINGS)}.")
    if route.takes_form:
        raise Refusal("unsupported_media_type", "A form is accepted without a content encoding only.")
    return encoding


# JSON bodies


async def _read_body(context: RequestContext, key: Key, encoding: str | None) -> bytes | bytearray:
    """Read the whole body of a JSON route, and decode it."""
    request_body, since = context.request.body, monotonic()
    body = await request_body.read()
    context.waited += monotonic() - since
    if encoding is None:
        return body
    request_body.owner = key.id
    async with context.worker.steps.admit(len(body)) as pace:
        return await pace.run(decoded(body, encoding, request_body.limit, request_body.reserve))


async def _prepare_json(body: bytes | bytearray, context: RequestContext, key: Key, pace: Pace | None = None) -> UpstreamRequest:
    """Parse a body, resolve its model, and make the request for the model's servers. ``pace``: of a large body, processed in steps."""
    request, worker = context.request, context.worker
    active, target = worker.active, request.target
    most_values = active.snapshot.body_values
    document = merge(parse(body, most_values) if pace is None else await pace.run(parse_in_steps(body, most_values)))
    context.user = document.get("user")
    if (sample := active.shape_sample) is not None and sample.includes(request.id):
        context.shape = shape(document)
    name, catalog = named_model(document), active.catalog
    named = catalog.resolve_unnamed(key, target.mounted) if name is None else catalog.resolve(name, key, target.mounted)
    name = name or named.model.id
    context.model = model = named if named.split is None else _choose_from_split(named, named.split, context, key, document)
    upstream = await _apply_policy(document, body, context, key, name, model, pace)
    if model.mirror is not None:
        upstream = mirrored(upstream, model, model.mirror, worker, document)
    if (ledger := worker.ledger) is not None:
        ledger.start_request(
            request.id, context.started_at, target.route.endpoint, key, model.model, context.stream, document, request.head.headers
        )
    if model.model.fallbacks and target.mounted is None:
        context.fallbacks = Fallbacks(model, catalog.fallbacks(model, key, named), partial(_prepare_json_again, body, context, key, name))
    return upstream


def _choose_from_split(
    named: CatalogEntry, split: Split[CatalogEntry], context: RequestContext, key: Key, document: Document
) -> CatalogEntry:
    """Choose the model that serves a request for a split. ``document``: empty for a form.

    The ID of a request is random: it draws the model if the split is not sticky, or if the request belongs to no session.
    """
    request = context.request
    text = request.id
    if split.sticky == "key":
        text = key.id
    elif split.sticky == "session":
        text = session_of(request.head.headers, document) or text
    context.split, model = named.model.id, split.choose(text)
    context.use_model(model, model)
    return model


async def _prepare_json_again(
    body: bytes | bytearray, context: RequestContext, key: Key, name: str, model: CatalogEntry
) -> UpstreamRequest:
    """Make the request for a fallback. The body was parsed and checked before."""
    if is_small(body):
        return await _apply_policy(merge(parse(body)), body, context, key, name, model, None)
    async with context.worker.steps.admit(len(body)) as pace:
        return await _apply_policy(merge(await pace.run(parse_in_steps(body))), body, context, key, name, model, pace)


async def _apply_policy(
    document: Document, body: bytes | bytearray, context: RequestContext, key: Key, name: str, model: CatalogEntry, pace: Pace | None
) -> UpstreamRequest:
    """Apply a model's policy and the key's limits to a merged document, and make the request of it. ``body``: as received."""
    request, size = context.request, len(body)
    route, reservation = request.target.route, request.reservation
    if pace is None:
        prepared = prepare(document, model.policy, route, size, key.fields)
        if reservation is not None:
            reservation.estimate_usage(prepared.document, prepared.path, body, model.model)
    else:
        prepared = await pace.run(prepare_in_steps(document, model.policy, route, size, key.fields))
        if reservation is not None:
            await pace.run(reservation.estimate_usage_in_steps(prepared.document, prepared.path, body, model.model))
    if prepared.stream:
        context.stream = True
        counts_tokens = context.worker.ledger is not None or (reservation is not None and reservation.counts_tokens)
        if counts_tokens and model.model.running_usage:
            prepared = with_running_usage(prepared)
    facts, tokens = NO_FACTS, None
    if required := model.pool.required_facts:
        session, adapter = request.head.headers.get(b"x-session-id"), model.model.id if model.model.parent is not None else None
        work = balancing_facts(required, prepared.document, session, adapter)
        facts = finished(work) if pace is None else await pace.run(work)
        if facts.prompt is not None:
            tokens = token_request(context.worker.engine_caches.get(model.model.base), prepared.document, prepared.path, size, model)
    if size > _SERIALIZED_EARLY:
        if pace is not None:
            await pace.rest()
        servers = model.pool.servers
        prepared = prepared.serialized(model.model.served or (servers[0].spec.model if servers else model.model.id))
        written = len(prepared.content)
        request.body.reserve(written + size if model.model.fallbacks else written)
        if pace is not None:
            await pace.rest()
    return UpstreamRequest(request, model, name, prepared, facts, tokens)


# Forms


async def _prepare_form(context: RequestContext, key: Key) -> UpstreamRequest:
    """Read a form up to its model, resolve the model, and make the request. The rest of the form is uploaded as it arrives."""
    request, worker = context.request, context.worker
    target, form = request.target, Form.of(request.head.headers[b"content-type"])
    since = monotonic()
    name = await form.read_model(request.body.read_piece)
    context.waited += monotonic() - since
    if request.body.consumed:
        form.check_end()
    catalog = worker.active.catalog  # the newest: the configuration may have changed while the form was received
    named = catalog.resolve(name, key, target.mounted) if name else catalog.resolve_unnamed(key, target.mounted)
    name = name or named.model.id
    context.model = model = named if named.split is None else _choose_from_split(named, named.split, context, key, {})
    upstream = await _prepare_form_for(form, request, name, model)
    if (ledger := worker.ledger) is not None:
        ledger.start_request(request.id, context.started_at, target.route.endpoint, key, model.model, False, {}, request.head.headers)
    request.body.stream_on()
    if model.model.fallbacks and target.mounted is None:
        context.fallbacks = Fallbacks(model, catalog.fallbacks(model, key, named), partial(_prepare_form_for, form, request, name))
    return upstream


async def _prepare_form_for(form: Form, request: ClientRequest, name: str, model: CatalogEntry) -> UpstreamRequest:
    """Apply a model's policy and the key's limits to the part of a form that has been read, and make the request."""
    form.apply_policy(model.policy, None if request.reservation is None else request.reservation.estimate_form(model.model))
    return UpstreamRequest(request, model, name, FormBody.of(form, request))


# Sending


async def _forward(upstream: UpstreamRequest, context: RequestContext, key: Key) -> None:
    """Send the request to a server of its model, and relay the response. Raises NoServerError, UpstreamError and Refusal."""
    worker, pool, model = context.worker, upstream.model.pool, upstream.model.model
    if upstream.tokens is not None:
        await _add_token_keys(upstream, upstream.tokens, context)
    attempt = Attempt(pool, model.timeouts, worker.deadlines, upstream.facts, streams=context.stream)
    with worker.metrics.in_flight(model.id), attempt:
        context.attempt = attempt
        if model.keepalive is not None and context.stream and upstream.request.target.route.streams:
            context.keep_alive(model.keepalive)
        try:
            response = await attempt.send(upstream.compose, upstream.body.upload)
        except NoServerError as error:
            response = await _send_from_queue(error, attempt, upstream, context, key)
        context.note_response(response)
        await _relay_response(response, upstream, context)


async def _add_token_keys(upstream: UpstreamRequest, tokens: TokenRequest, context: RequestContext) -> None:
    """Wait for the token IDs of the prompt, up to a timeout."""
    since = monotonic()
    if (prompt := upstream.facts.prompt) is not None:
        await add_token_keys(prompt, tokens, upstream.model, context.worker.tokenization)
    context.waited += monotonic() - since


async def _send_from_queue(
    error: NoServerError, attempt: Attempt, upstream: UpstreamRequest, context: RequestContext, key: Key
) -> UpstreamResponse:
    """Queue the request until a server of its model can take it, and send it. Raises Refusal and UpstreamError.

    The servers are then those of the newest snapshot: they may have been started while the request was queued.
    """
    worker, model, since, queued_before = context.worker, upstream.model.model.base, monotonic(), context.queued
    if not (error.full or worker.queues.is_expected(model)):
        raise error
    upstream.request.body.read_ahead()
    while True:
        try:
            with worker.queues.slot(model, key, since) as slot:
                await slot.wait()
        finally:
            context.queued = queued_before + monotonic() - since
        attempt.use_pool(worker.active.catalog.pool(model) or upstream.model.pool)
        try:
            return await attempt.send(upstream.compose, upstream.body.upload)
        except NoServerError:
            continue


_NO_CAPACITY = frozenset({"model_loading", "overloaded", "no_healthy_server"})
"""The gateway's own errors for a model whose servers cannot take a request now."""


async def _next_fallback(error: NoServerError | ConnectFailed | Refusal, context: RequestContext) -> UpstreamRequest:
    """Make the request for the next fallback, provided that no server has seen any of it. Raises the error without a fallback."""
    fallbacks = context.fallbacks
    if fallbacks is None or context.handover is not None or (isinstance(error, Refusal) and error.code not in _NO_CAPACITY):
        raise error
    fallbacks.first_error = fallbacks.first_error or error
    context.end_attempt(fallbacks)
    while fallbacks.candidates:
        model = fallbacks.candidates.pop(0)
        context.use_model(model, fallbacks.requested)
        with suppress(Refusal):  # what the policy or the limits of one fallback refuse, the next one may accept
            return await fallbacks.prepare(model)
    context.use_model(fallbacks.requested, fallbacks.requested)
    raise fallbacks.first_error


# The end of a truncated response


async def _count_prompt(upstream: UpstreamRequest, context: RequestContext) -> None:
    """Let the last server count the prompt. The response has ended, so the row of the request ends now."""
    context.ended_at = monotonic()
    context.request.on_pause = context.request.on_resume = None  # nothing flows from the server any more
    assert context.attempt is not None
    context.counted_prompt = await count_prompt(upstream, context.attempt.tried[-1], context.worker)


# The response


async def _relay_response(response: UpstreamResponse, upstream: UpstreamRequest, context: RequestContext) -> None:
    """Relay the response, or raise the error that the client gets for the server's. Raises Refusal and UpstreamError."""
    request, body = upstream.request, upstream.body
    if not 200 <= response.status < 300:
        content = await response.read_body(_ERROR_BODY_LIMIT, _ERROR_BODY_TIMEOUT)
        response.fault = server_failure(response.server.name, response.status, content.decode("latin-1"))
        retry_after, document = response.headers.get(b"retry-after"), await _sent_document(upstream, context)
        raise from_server(response.status, content, upstream.name, body.input_field, retry_after, document)
    if b"content-encoding" in response.headers and response.headers[b"content-encoding"].lower() != b"identity":
        raise BadResponse(response.server.name, "its response has a content encoding that the gateway did not request")
    response_relay: BodyRelay | EventRelay
    if is_stream(response):
        if isinstance(body, FormBody):
            context.stream = True  # a form says so somewhere behind its model
        response_relay = EventRelay(response, upstream)
        if (ledger := context.worker.ledger) is not None:
            ledger.watch(request.id, response_relay)
    elif request.response_started:
        raise BadResponse(response.server.name, "its response is not a stream, and a stream has been started")
    elif body.translation is not None:
        response_relay = TranslatedRelay(response, upstream, body.translation)
    elif request.target.route.dialect is Dialect.PLAIN and is_binary(response):
        response_relay = EmbeddingsRelay(response, upstream)
    else:
        response_relay = BodyRelay(response, upstream)
    context.response_relay = response_relay
    await response_relay.run()


async def _sent_document(upstream: UpstreamRequest, context: RequestContext) -> Document | None:
    """Return the JSON body that the server got, by which its error is explained; None for a form."""
    body = upstream.body
    if is_small(body.content):
        return body.sent_document()
    async with context.worker.steps.admit(len(body.content)):
        return body.sent_document()
