"""Serve one inference request, step by step.

authenticate → admit → read the body → merge ``extra_body`` → resolve and authorize the model → apply its policy → choose a server, or
wait for one → send → relay the response → (count the prompt of a truncated one) → settle limits → record.

The rule: a resource is released by the ``with`` that acquired it, and every request ends in ``RequestContext``, which records it.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from time import monotonic

from gateway.admission.deadlines import ttft_of
from gateway.admission.queue import QueuedRequest
from gateway.api.errors import Refusal, draining
from gateway.api.routes import Body
from gateway.api.vllm.errors import from_server
from gateway.auth.catalog import CatalogEntry
from gateway.client.http.content_encoding import ENCODINGS, IDENTITY, decoded
from gateway.client.keepalive import Keepalive
from gateway.client.request import ClientRequest
from gateway.limits.end_users import header_text, named_by_body, on_arrival
from gateway.limits.expected_use import estimate_form
from gateway.limits.reservation import reservation_of
from gateway.prompts.token_keys import add_token_keys
from gateway.proxy.context import Fallbacks, RequestContext
from gateway.proxy.continued import continue_stream, may_continue
from gateway.proxy.form import Form
from gateway.proxy.payload import prepare_request
from gateway.proxy.prompt_count import count_prompt
from gateway.proxy.request_services import RequestServices
from gateway.proxy.response import BodyRelay, EventRelay, choose_relay, is_stream, read_error
from gateway.proxy.upstream_request import FormBody, UpstreamRequest
from gateway.snapshot.snapshot import Key, Resume
from gateway.system.steps import finished, is_small
from upstream.balancing.attempt import Attempt, Compose, UpstreamResponse
from upstream.balancing.pool import NoServerError
from upstream.http.errors import Aborted, ConnectFailed, Preempted, UpstreamError


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
                    upstream = finished(prepare_request(body, context, key))
                else:
                    upstream = await worker.steps.run(prepare_request(body, context, key, large=True), len(body))
                del body  # the response may take long
            # Send it and relay the response; again for each fallback.
            while True:
                if request.reservation is not None and (pending := request.reservation.reserve_tokens()) is not None:
                    await pending
                try:
                    return await _forward(upstream, context, key)
                except (NoServerError, ConnectFailed, Refusal) as error:
                    upstream = await _next_fallback(error, context)
                except (asyncio.CancelledError, UpstreamError) as error:
                    if may_continue(error, context):
                        return await _continue(error, upstream, context, key)
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


async def _read_body(context: RequestContext, key: Key, encoding: str | None) -> bytes | bytearray:
    """Read the whole body of a JSON route, and decode it."""
    request_body, since = context.request.body, monotonic()
    body = await request_body.read()
    context.waited += monotonic() - since
    if encoding is None:
        return body
    request_body.owner = key.id
    return await context.worker.steps.run(decoded(body, encoding, request_body.limit, request_body.reserve), len(body))


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
    named = catalog.resolve(name, key, target.mounted)
    name = name or named.model.id
    context.model = model = named if named.split is None else context.choose_from_split(named, named.split, key, {})
    upstream = await _prepare_form_for(form, request, name, model)
    if (ledger := worker.ledger) is not None:
        ledger.start_request(request.id, context.started_at, target.route.endpoint, key, model.model, False, {}, request.head.headers)
    request.body.stream_on()
    if model.model.fallbacks and target.mounted is None:
        context.fallbacks = Fallbacks(model, catalog.fallbacks(model, key, named), partial(_prepare_form_for, form, request, name))
    return upstream


async def _prepare_form_for(form: Form, request: ClientRequest, name: str, model: CatalogEntry) -> UpstreamRequest:
    """Apply a model's policy and the key's limits to the part of a form that has been read, and make the request."""
    form.apply_policy(model.policy, None if request.reservation is None else estimate_form(request.reservation, model.model))
    return UpstreamRequest(request, model, name, FormBody.of(form, request))


# Sending


async def _forward(upstream: UpstreamRequest, context: RequestContext, key: Key) -> None:
    """Send the request to a server of its model, and relay the response. Raises NoServerError, UpstreamError and Refusal."""
    worker, pool, model = context.worker, upstream.model.pool, upstream.model.model
    if upstream.tokens is not None and (prompt := upstream.facts.prompt) is not None:
        since = monotonic()
        await add_token_keys(prompt, upstream.tokens, upstream.model, worker.tokenization)
        context.waited += monotonic() - since
    resends = pool.may_continue and model.resume is not Resume.OFF and not upstream.runs_tools
    attempt = Attempt(pool, model.timeouts, worker.deadlines, upstream.facts, streams=context.stream, resends=resends)
    gauge: AbstractContextManager[None] = worker.metrics.in_flight(model.id)
    if pool.tiers:
        of_class, tier = worker.queues.class_of(key, _lowered_to(upstream))
        attempt.facts = attempt.facts._replace(tier=tier)
        if context.stream:
            received_at, progress = context.request.received_at, context.stream_progress
            gauge = worker.queues.reserved.measured(model.base, of_class, gauge, received_at, progress)
    if worker.queues.preempts and upstream.request.target.route.repeatable:
        gauge = worker.queues.preemptible(model.base, key, _lowered_to(upstream), attempt, gauge)
    with gauge, attempt:
        context.attempt = attempt
        if model.keepalive is not None and context.stream and upstream.request.target.route.streams:
            context.keepalive = context.keepalive or Keepalive(upstream.request, model.keepalive, worker.deadlines)
        while True:
            try:
                response = await attempt.send(upstream.compose, upstream.body.upload)
            except (NoServerError, Preempted) as error:
                response = await _send_from_queue(error, attempt, upstream.compose, upstream, context, key)
            context.handover = monotonic() - response.last_byte_at
            if context.keepalive is not None and not is_stream(response):
                context.keepalive.end()
            try:
                return await _forward_response(response, upstream, context)
            except (Refusal, UpstreamError) as error:
                # A server that was lost before the client got anything: another one gets the request, once.
                lost = response.fault if isinstance(error, Refusal) else error
                if lost is None or not context.may_forget_response:
                    raise
                if attempt.may_resend(lost, streamed=upstream.body.upload is not None):
                    context.forget_response(lost)
                elif isinstance(lost, Aborted) and isinstance(context.response_relay, BodyRelay):
                    return await context.response_relay.run()  # no other server: the client gets what there is
                else:
                    raise


async def _forward_response(response: UpstreamResponse, upstream: UpstreamRequest, context: RequestContext) -> None:
    """Relay the response to the client. Raises UpstreamError, and Refusal for an error of the server."""
    if not 200 <= response.status < 300:
        raise await _server_error(response, upstream, context)
    context.response_relay = response_relay = choose_relay(response, upstream)
    if isinstance(response_relay, EventRelay):
        if isinstance(upstream.body, FormBody):
            context.stream = True  # the form says so after its model
        if (ledger := context.worker.ledger) is not None:
            ledger.watch(upstream.request.id, response_relay)
    await response_relay.run()


async def _continue(error: BaseException, upstream: UpstreamRequest, context: RequestContext, key: Key) -> None:
    """Relay the rest of a stream from other servers, after its server was lost. Raises the error if no server can continue it."""
    try:
        with context.worker.metrics.in_flight(upstream.model.model.id):
            await continue_stream(error, upstream, context, partial(_send_rest, upstream, context, key))
    except (asyncio.CancelledError, UpstreamError):
        if context.needs_prompt_count:
            await _count_prompt(upstream, context)
        raise


async def _send_rest(upstream: UpstreamRequest, context: RequestContext, key: Key, attempt: Attempt, compose: Compose) -> UpstreamResponse:
    """Send the request for the rest of a stream, or queue it until a server can take it. Raises Refusal and UpstreamError."""
    try:
        return await attempt.send(compose)
    except NoServerError as error:
        context.settle_slot(None)
        return await _send_from_queue(error, attempt, compose, upstream, context, key)


async def _send_from_queue(
    error: NoServerError | Preempted, attempt: Attempt, compose: Compose, upstream: UpstreamRequest, context: RequestContext, key: Key
) -> UpstreamResponse:
    """Queue the request until a server of its model can take it, and send it. Raises Refusal and UpstreamError.

    The servers then come from the newest snapshot: they may have been started while the request was queued. A request that was preempted
    is queued again; its time on the server counts as queued.
    """
    worker, model, since, queued_before = context.worker, upstream.model.model.base, monotonic(), context.queued
    if isinstance(error, Preempted):
        since = attempt.composed_at or since
    elif not (error.full or worker.queues.is_expected(model)):
        raise error
    upstream.request.body.read_ahead()
    queued = _queued_request(upstream, context, key, since)
    if isinstance(error, Preempted):
        queued = _preempted(queued, attempt, context)
    while True:
        try:
            with worker.queues.slot(model, queued) as slot:
                context.queue_reason = context.queue_reason or slot.reason
                await slot.wait()
        finally:
            context.queued = queued_before + monotonic() - since
        context.slot = slot
        slot.output = context.tokens_so_far
        attempt.use_pool(worker.active.catalog.pool(model) or upstream.model.pool)
        try:
            return await attempt.send(compose, upstream.body.upload)
        except NoServerError:
            slot.finish()
        except Preempted:
            slot.finish()
            queued = _preempted(queued, attempt, context)


def _preempted(queued: QueuedRequest, attempt: Attempt, context: RequestContext) -> QueuedRequest:
    """Return a request that was preempted, to be queued again."""
    attempt.composed_at, context.queue_reason = None, "preempted"
    return replace(queued, preempted_at=monotonic())


_CLASS, _TTFT = b"x-vllm-gateway-class", b"x-vllm-gateway-ttft"


def _queued_request(upstream: UpstreamRequest, context: RequestContext, key: Key, since: float) -> QueuedRequest:
    """Return what the queue of a model knows about a request."""
    request = upstream.request
    headers = request.head.headers
    end_user = on_arrival(key, headers)
    if end_user.is_awaited:
        end_user = named_by_body(key, context.user)
    fallbacks = context.fallbacks
    return QueuedRequest(
        key,
        since,
        request.body.size,
        upstream.most_output,
        end_user.name,
        _lowered_to(upstream),
        arrived=request.received_at + context.waited,
        ttft=ttft_of(headers.get(_TTFT, b"")),
        returns=fallbacks is None or not fallbacks.candidates,
        prompt=upstream.facts.prompt,
        fingerprint=upstream.fingerprint,
    )


def _lowered_to(upstream: UpstreamRequest) -> str | None:
    """Return the class that the client wants."""
    name = upstream.request.head.headers.get(_CLASS)
    return None if name is None else header_text(name)


_NO_CAPACITY = frozenset({"model_loading", "overloaded", "no_healthy_server"})
"""The gateway's own errors for a model whose servers cannot take a request now."""


async def _next_fallback(error: NoServerError | ConnectFailed | Refusal, context: RequestContext) -> UpstreamRequest:
    """Make the request for the next fallback, provided that no server has seen any of it. Raises the error without a fallback."""
    fallbacks, attempt = context.fallbacks, context.attempt
    if fallbacks is None or context.handover is not None or (isinstance(error, Refusal) and error.code not in _NO_CAPACITY):
        raise error
    if attempt is not None and attempt.may_have_run:
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


async def _server_error(response: UpstreamResponse, upstream: UpstreamRequest, context: RequestContext) -> Refusal:
    """Return the error that the client gets for a server's error response."""
    content = await read_error(response)
    retry_after, body = response.headers.get(b"retry-after"), upstream.body
    if is_small(body.content):
        document = body.sent_document()
    else:
        async with context.worker.steps.admit(len(body.content)):
            document = body.sent_document()
    return from_server(response.status, content, upstream.name, body.input_field, retry_after, document)
