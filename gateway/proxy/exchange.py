"""The story of one request, in the order in which it happens.

accept → authenticate → admit → read the body → merge ``extra_body`` → resolve and authorize the model → apply
policy → choose a server, or wait for one → send → relay → settle usage → metrics and log.

The rule: everything taken is given back by the ``with`` that took it. Every way out passes ``Account``, which settles the request.
"""

from __future__ import annotations

from contextlib import suppress
from time import monotonic

from gateway.api.errors import Refusal, draining
from gateway.api.routes import Body, Dialect
from gateway.api.vllm_errors import fault, from_server
from gateway.auth.catalog import Catalog, CatalogEntry, named_model
from gateway.auth.keyring import Keyring
from gateway.client.content_encoding import ENCODINGS, IDENTITY, decoded
from gateway.client.request import ClientRequest
from gateway.proxy.balancing_facts import balancing_facts
from gateway.proxy.body import Document, merge, parse, parse_in_steps, prepare, prepare_in_steps
from gateway.proxy.context import Account, Elsewhere
from gateway.proxy.form import Form
from gateway.proxy.gate import Gate
from gateway.proxy.response import BodyRelay, BytesRelay, EventRelay, TranslatedRelay, is_bytes, is_stream
from gateway.proxy.upstream_request import Outbound
from gateway.snapshot.snapshot import Key
from gateway.system.steps import SMALL, Pace, finished
from gateway.telemetry.body_shape import shape
from upstream.balancing.attempt import Answer, Attempt
from upstream.balancing.pool import NoServerError
from upstream.http.errors import BadAnswer, ConnectFailed

_ERROR_BODY_LIMIT = 64 * 1024
_ERROR_PATIENCE = 5.0  # seconds for the body of an error
_WRITTEN_AT_ONCE = 8 * 1024  # bytes of a body from which its document, which takes up to thirty times as much memory, is not kept


async def exchange(call: ClientRequest, gate: Gate) -> None:
    """Serve one request, from its head to the last byte of its answer."""
    if gate.sampler is not None:
        call.trace = gate.sampler.start_trace(call.head.headers.get(b"traceparent"))
    with Account(call, gate) as account:
        if gate.draining:
            raise draining()
        account.key = key = authenticate(call, gate.keyring)
        if not call.body.complete:
            call.body.owner = key.id
        if gate.house is not None:
            gate.house.admit(call.requests_in_flight, gate.admission.slot(key).in_flight, monotonic())
        with gate.admission.slot(key):
            if key.allowances:
                call.permit = gate.limits.reservation(key, call.id)
                await call.permit.reserve_request()
            encoding = _check_media_type(call)
            if call.target.route.takes_form:
                outbound = await _form(call, gate, account, key)
            else:
                body = call.body.take() if encoding is None and call.body.complete else await _body(call, account, key, encoding)
                if len(body) <= SMALL:
                    outbound = await _json(body, call, gate.catalog, account, key)
                else:
                    async with gate.steps.turn(len(body)) as pace:
                        outbound = await _json(body, call, gate.catalog, account, key, pace)
                del body  # it is not needed any more, and the request may take long
            while True:  # once, and once more for each fallback
                if call.permit is not None:
                    await call.permit.reserve_tokens()
                try:
                    return await _sent(outbound, key, account)
                except (NoServerError, ConnectFailed, Refusal) as error:
                    outbound = await _elsewhere(error, account)


async def _sent(outbound: Outbound, key: Key, account: Account) -> None:
    """Choose a server, or wait for one; send; relay. Raises what ``Attempt.answer`` and ``_relay`` raise."""
    gate, model = account.gate, outbound.entry.model
    account.outbound = outbound
    with gate.metrics.in_flight(model.id), Attempt(outbound.entry.pool, model.timeouts, gate.deadlines, outbound.facts) as attempt:
        account.attempt = attempt
        if model.keepalive is not None and account.stream and outbound.call.target.route.streams:
            account.keep_alive(model.keepalive)
        try:
            answer = await attempt.answer(outbound.compose, outbound.upload)
        except NoServerError as error:
            answer = await _in_turn(error, key, attempt, outbound, account)
        account.answered(answer)
        await _relay(outbound.call, answer, account, outbound)


# The steps


def authenticate(call: ClientRequest, keyring: Keyring) -> Key:
    """Whose key a request shows. Raises Refusal."""
    headers = call.head.headers
    authorization = headers.get(b"authorization")
    if authorization is not None:
        return keyring.authenticate(authorization)
    return keyring.authenticate(None, headers.get(b"x-api-key") if call.target.route.anthropic else None, headers)


async def _body(call: ClientRequest, account: Account, key: Key, encoding: str | None) -> bytes | bytearray:
    """The whole body of a JSON route, of which something is still to come or to be decoded."""
    asked, gate = monotonic(), account.gate
    body = await call.body.read()
    account.waited += monotonic() - asked
    if encoding is None:
        return body
    call.body.owner = key.id
    async with gate.steps.turn(len(body)) as pace:
        return await pace.run(decoded(body, encoding, call.body.limit, call.body.reserve))


async def _json(
    body: bytes | bytearray, call: ClientRequest, catalog: Catalog, account: Account, key: Key, pace: Pace | None = None
) -> Outbound:
    """The body of a JSON route: merged, authorized, made fit to send. ``pace``: of a large body, which is processed in steps."""
    if pace is None:
        document = merge(parse(body, account.gate.snapshot.body_values))
    else:
        document = merge(await pace.run(parse_in_steps(body, account.gate.snapshot.body_values)))
    account.user = document.get("user")
    if (sample := account.gate.sample) is not None and sample.includes(call.id):
        account.shape = shape(document)
    name, mounted = named_model(document), call.target.mounted
    entry = account.entry = catalog.resolve_unnamed(key, mounted) if name is None else catalog.resolve(name, key, mounted)
    name = name or entry.model.id
    outbound = await _prepared(document, body, call, entry, name, account, key, pace)
    if (books := account.gate.books) is not None:
        books.start_request(call.id, account.started, call.target.route.endpoint, key, entry.model, account.stream, document)
    if entry.model.fallbacks and mounted is None:
        account.elsewhere = Elsewhere(catalog.fallbacks(entry, key), lambda other: _again(body, call, other, name, account, key))
    return outbound


async def _prepared(
    document: Document,
    body: bytes | bytearray,
    call: ClientRequest,
    entry: CatalogEntry,
    name: str,
    account: Account,
    key: Key,
    pace: Pace | None,
) -> Outbound:
    """A merged body by the policy of the model that it goes to, and the limits of its key. ``body``: as it came."""
    permit, size = call.permit, len(body)
    if pace is None:
        prepared = prepare(document, entry.policy, call.target.route, size, key.fields)
        if permit is not None:
            permit.estimate_usage(prepared.document, prepared.upstream, body, entry.model)
    else:
        prepared = await pace.run(prepare_in_steps(document, entry.policy, call.target.route, size, key.fields))
        if permit is not None:
            await pace.run(permit.estimate_usage_in_steps(prepared.document, prepared.upstream, body, entry.model))
    account.stream = prepared.stream
    outbound = Outbound.of_json(call, entry, name, prepared)
    if required := entry.pool.required_facts:
        work = balancing_facts(required, prepared.document, prepared.upstream, body, call.head.headers.get(b"x-session-id"))
        outbound.facts = finished(work) if pace is None else await pace.run(work)
    if size > _WRITTEN_AT_ONCE:
        if pace is not None:
            await pace.rest()
        written = outbound.encode_at_once(prepared)
        call.body.reserve(written + size if entry.model.fallbacks else written)
        if pace is not None:
            await pace.rest()
    return outbound


async def _again(body: bytes | bytearray, call: ClientRequest, entry: CatalogEntry, name: str, account: Account, key: Key) -> Outbound:
    """A body that was prepared for another model."""
    if len(body) <= SMALL:
        return await _prepared(merge(parse(body)), body, call, entry, name, account, key, None)
    async with account.gate.steps.turn(len(body)) as pace:
        document = merge(await pace.run(parse_in_steps(body)))
        return await _prepared(document, body, call, entry, name, account, key, pace)


async def _form(call: ClientRequest, gate: Gate, account: Account, key: Key) -> Outbound:
    """The body of a form route: read up to its model, authorized; the rest is streamed on.

    The catalog is that of the moment in which the model is known: a body may be long on its way, and the configuration change.
    """
    form = Form.of(call.head.headers[b"content-type"])
    asked = monotonic()
    name = await form.read_model(call.body.read_piece)
    account.waited += monotonic() - asked
    if call.body.consumed:
        form.check_end()
    catalog, mounted = gate.catalog, call.target.mounted
    entry = account.entry = catalog.resolve(name, key, mounted) if name else catalog.resolve_unnamed(key, mounted)
    name = name or entry.model.id
    form.obey(entry.policy, None if call.permit is None else call.permit.estimate_form(entry.model))
    if (books := gate.books) is not None:
        books.start_request(call.id, account.started, call.target.route.endpoint, key, entry.model, False, {})
    call.body.stream_on()
    if entry.model.fallbacks and mounted is None:
        account.elsewhere = Elsewhere(catalog.fallbacks(entry, key), lambda other: _form_for(other, call, name, form))
    return Outbound.of_form(call, entry, name, form)


async def _form_for(entry: CatalogEntry, call: ClientRequest, name: str, form: Form) -> Outbound:
    """A form whose beginning was checked for another model."""
    form.obey(entry.policy, None if call.permit is None else call.permit.estimate_form(entry.model))
    return Outbound.of_form(call, entry, name, form)


_MEDIA_TYPES = {Body.JSON: (b"application/json", b""), Body.FORM: (b"multipart/form-data",)}


def _check_media_type(call: ClientRequest) -> str | None:
    """The encoding of a body that has one. Raises Refusal unsupported_media_type for another type than the route's, or another encoding."""
    headers = call.head.headers
    allowed, given = _MEDIA_TYPES[call.target.route.body], headers.get(b"content-type", b"")
    if given not in allowed and given.partition(b";")[0].strip().lower() not in allowed:
        raise Refusal("unsupported_media_type", f"The content type must be {allowed[0].decode()}.")
    if b"content-encoding" not in headers:
        return None
    encoding = headers[b"content-encoding"].decode("latin-1").lower()
    if encoding == IDENTITY:
        return None
    if encoding not in ENCODINGS:
        raise Refusal("unsupported_media_type", f"The content encoding must be one of {', '.join(ENCODINGS)}.")
    if call.target.route.takes_form:
        raise Refusal("unsupported_media_type", "A form is accepted without a content encoding only.")
    return encoding


async def _in_turn(error: NoServerError, key: Key, attempt: Attempt, outbound: Outbound, account: Account) -> Answer:
    """An answer of a model of which no server is up, or all are full, once one can take it. Raises Refusal and UpstreamError.

    The servers are those of the newest snapshot then: they may have been started while the request waited.
    """
    gate, model, since, before = account.gate, outbound.entry.model.base, monotonic(), account.queued
    if not (error.full or gate.lobby.is_expected(model)):
        raise error
    outbound.call.body.read_ahead()
    while True:
        try:
            with gate.lobby.slot(model, key, since) as place:
                await place.wait()
        finally:
            account.queued = before + monotonic() - since
        attempt.turn_to(gate.catalog.pool(model) or outbound.entry.pool)
        try:
            return await attempt.answer(outbound.compose, outbound.upload)
        except NoServerError:
            continue


_CANNOT_TAKE = frozenset({"model_loading", "overloaded", "no_healthy_server"})
"""What the gateway itself says of a model whose servers cannot take a request now."""


async def _elsewhere(error: NoServerError | ConnectFailed | Refusal, account: Account) -> Outbound:
    """The request for the next fallback, where no server has seen anything of it. Raises the error where there is none."""
    elsewhere = account.elsewhere
    if elsewhere is None or account.answer_at or (isinstance(error, Refusal) and error.code not in _CANNOT_TAKE):
        raise error
    first = elsewhere.first = elsewhere.first or error
    account.set_attempt_aside()
    while elsewhere.entries:
        entry = elsewhere.entries.pop(0)
        account.go_on(entry)
        with suppress(Refusal):  # what its own policy or limits do not let through, the next one's may
            return await elsewhere.prepare(entry)
    account.stay()
    raise first


async def _relay(call: ClientRequest, answer: Answer, account: Account, outbound: Outbound) -> None:
    """Give the client the answer, or the contract's error for the server's."""
    if not 200 <= answer.status < 300:
        body = await answer.collect(_ERROR_BODY_LIMIT, _ERROR_PATIENCE)
        answer.fault = fault(answer.server.name, answer.status, body.decode("latin-1"))
        raise from_server(answer.status, body, outbound.name, outbound.input_field, answer.headers.get(b"retry-after"), outbound.document)
    if b"content-encoding" in answer.headers and answer.headers[b"content-encoding"].lower() != b"identity":
        raise BadAnswer(answer.server.name, "its answer is encoded, and nobody asked for that")
    if is_stream(answer):
        if outbound.form is not None:
            account.stream, outbound.hides_usage = True, outbound.form.hides_usage
        relay: BodyRelay | EventRelay = EventRelay(
            call,
            answer,
            model=outbound.name,
            input_field=outbound.input_field,
            hides_usage=outbound.hides_usage,
            translation=outbound.translation,
            name=outbound.entry.name,
            document=outbound.document,
        )
    elif call.response_started:
        raise BadAnswer(answer.server.name, "its answer is no stream, and a stream has been begun")
    elif outbound.translation is not None:
        relay = TranslatedRelay(call, answer, outbound.translation, outbound.entry.name)
    elif call.target.route.dialect is Dialect.PLAIN and is_bytes(answer):
        relay = BytesRelay(call, answer, outbound.entry.name)
    else:
        relay = BodyRelay(call, answer, outbound.entry.name)
    account.passing = relay
    await relay.run()
