"""The story of one request, in the order in which it happens.

accept → authenticate → admit → read the body → merge ``extra_body`` → resolve and authorise the model → apply
policy → choose a server, or wait for one → send → relay → settle usage → metrics and log.

The rules: everything taken is given back by the ``with`` that took it; every way out passes ``Account``, so a
request is settled once; errors are told to the client in one place.
"""

from __future__ import annotations

import asyncio
import logging
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic, time
from types import TracebackType
from typing import Protocol
from urllib.parse import quote

import msgspec
from msgspec import field

from gateway.admission import House
from gateway.auth import Keyring
from gateway.beginning import hint
from gateway.call import Call
from gateway.catalog import Catalog, Entry, named_model
from gateway.errors import CLIENT_CLOSED_REQUEST, Refusal, fault, from_failure, from_server, render
from gateway.form import Form
from gateway.keepalive import Keepalive
from gateway.ledger.books import Books
from gateway.limits import Admission, Limiter
from gateway.metrics import OTHER, RelayMetrics
from gateway.outbound import Outbound
from gateway.payload import Document, merge, parse, prepare
from gateway.record import Record
from gateway.relay import BodyRelay, EventRelay, Passing, TranslatedRelay, break_off, is_stream
from gateway.routes import Body
from gateway.state import Key, State
from gateway.tracing import Sampler
from gateway.waiting import Lobby
from upstream.attempt import Answer, Attempt
from upstream.deadlines import Deadlines
from upstream.errors import BadAnswer, ConnectFailed, UpstreamError
from upstream.pool import NoServerError

_ERROR_BODY_LIMIT = 64 * 1024
_ERROR_PATIENCE = 5.0  # seconds for the body of an error
_USER_LIMIT = 256  # characters of `user` that are logged
_VISIBLE = string.punctuation.replace("%", "")  # what a header's value takes as it is, beside letters and digits
_log = logging.getLogger("vllm_gateway.exchange")


class Gate(Protocol):
    """What the story needs of its relay."""

    keyring: Keyring
    catalog: Catalog
    admission: Admission
    limits: Limiter
    deadlines: Deadlines
    lobby: Lobby
    metrics: RelayMetrics
    books: Books | None
    sampler: Sampler | None
    """Decides which requests are traced; None where none is."""
    draining: bool
    house: House | None
    """None: any number of requests may be under way at once."""

    @property
    def state(self) -> State:
        """The generation of the configuration that is served by."""

    def settled(self, record: Record) -> None:
        """Take a finished request to the books."""


async def exchange(call: Call, gate: Gate) -> None:
    """Serve one request, from its head to the last byte of its answer."""
    if gate.sampler is not None:
        call.trace = gate.sampler.begin(call.headers.get(b"traceparent"))
    with Account(call, gate) as account:
        if gate.draining:
            raise Refusal("draining", "The gateway is shutting down.")
        account.key = key = authenticate(call, gate.keyring)
        if gate.house is not None:
            gate.house.admit(call.under_way, gate.admission.ticket(key).in_flight, monotonic())
        with gate.admission.ticket(key):
            if key.allowances:
                call.permit = gate.limits.permit(key, call.id)
                await call.permit.arrive()
            _check_media_type(call)
            if call.target.route.body is Body.FORM:
                outbound = await _form(call, gate, account, key)
            else:
                body = await _body(call, account) if call.more_body else call.whole_body()
                outbound = _json(body, call, gate.catalog, account, key)
            while True:  # once, and once more for each fallback
                if call.permit is not None:
                    await call.permit.claim()
                try:
                    return await _sent(outbound, key, account)
                except (NoServerError, ConnectFailed, Refusal) as error:
                    outbound = _elsewhere(error, account)


async def _sent(outbound: Outbound, key: Key, account: Account) -> None:
    """Choose a server, or wait for one; send; relay. Raises what ``Attempt.answer`` and ``_relay`` raise."""
    gate, model = account.gate, outbound.entry.model
    account.outbound = outbound
    with gate.metrics.in_flight(model.id), Attempt(outbound.entry.pool, model.timeouts, gate.deadlines, outbound.hint) as attempt:
        account.attempt = attempt
        if model.keepalive is not None and account.stream:
            account.keep_alive(model.keepalive)
        try:
            answer = await attempt.answer(outbound.compose, outbound.upload)
        except NoServerError as error:
            answer = await _in_turn(error, key, attempt, outbound, account)
        account.answered(answer)
        await _relay(outbound.call, answer, account, outbound)


# The steps


def authenticate(call: Call, keyring: Keyring) -> Key:
    """Whose key a request shows. Raises Refusal."""
    headers = call.headers
    return keyring.authenticate(headers.get(b"authorization"), headers.get(b"x-api-key") if call.target.route.anthropic else None)


async def _body(call: Call, account: Account) -> bytes:
    """The whole body of a JSON route, of which something is still to come."""
    asked = monotonic()
    body = await call.body()
    account.waited += monotonic() - asked
    return body


def _json(body: bytes, call: Call, catalog: Catalog, account: Account, key: Key) -> Outbound:
    """The body of a JSON route: merged, authorised, made fit to send."""
    document = merge(parse(body))
    account.user = document.get("user")
    name = named_model(document, call.target.mounted)
    entry = account.entry = catalog.resolve(name, key, call.target.mounted)
    outbound = _prepared(document, body, call, entry, name, account, key)
    if (books := account.gate.books) is not None:
        books.begin(call.id, account.started, call.target.route.endpoint, key, entry.model, account.stream, document)
    if entry.model.fallbacks and call.target.mounted is None:
        account.elsewhere = Elsewhere(
            catalog.fallbacks(entry, key), lambda other: _prepared(merge(parse(body)), body, call, other, name, account, key)
        )
    return outbound


def _prepared(document: Document, body: bytes, call: Call, entry: Entry, name: str, account: Account, key: Key) -> Outbound:
    """A merged body by the policy of the model that it goes to, and the limits of its key. ``body``: as it came."""
    prepared = prepare(document, entry.policy, call.target.route, len(body), key.fields)
    if call.permit is not None:
        call.permit.weigh(prepared.document, prepared.upstream, body, entry.model)
    account.stream = prepared.stream
    outbound = Outbound.of_json(call, entry, name, prepared)
    if entry.pool.wants_hint:
        outbound.hint = hint(prepared.document, call.headers.get(b"x-session-id"))
    return outbound


async def _form(call: Call, gate: Gate, account: Account, key: Key) -> Outbound:
    """The body of a form route: read up to its model, authorised; the rest is streamed on.

    The catalog is that of the moment in which the model is known: a body may be long on its way, and the configuration change.
    """
    form = Form.of(call.headers[b"content-type"])
    asked = monotonic()
    name = await form.read_model(call.next_bytes)
    account.waited += monotonic() - asked
    name = name or named_model({}, call.target.mounted)
    entry = account.entry = gate.catalog.resolve(name, key, call.target.mounted)
    form.obey(entry.policy)
    if call.permit is not None:
        call.permit.weigh_form(entry.model)
    if (books := gate.books) is not None:
        books.begin(call.id, account.started, call.target.route.endpoint, key, entry.model, False, {})
    call.pass_on()
    if entry.model.fallbacks and call.target.mounted is None:
        account.elsewhere = Elsewhere(gate.catalog.fallbacks(entry, key), lambda other: _form_for(other, call, name, form))
    return Outbound.of_form(call, entry, name, form)


def _form_for(entry: Entry, call: Call, name: str, form: Form) -> Outbound:
    """A form whose beginning was checked for another model."""
    form.obey(entry.policy)
    if call.permit is not None:
        call.permit.weigh_form(entry.model)
    return Outbound.of_form(call, entry, name, form)


_MEDIA_TYPES = {Body.JSON: (b"application/json", b""), Body.FORM: (b"multipart/form-data",)}


def _check_media_type(call: Call) -> None:
    """Raises Refusal unsupported_media_type for another type than the route's, or an encoding."""
    allowed, given = _MEDIA_TYPES[call.target.route.body], call.headers.get(b"content-type", b"")
    if given not in allowed and given.partition(b";")[0].strip().lower() not in allowed:
        raise Refusal("unsupported_media_type", f"The content type must be {allowed[0].decode()}.")
    if b"content-encoding" in call.headers and call.headers[b"content-encoding"].lower() != b"identity":
        raise Refusal("unsupported_media_type", "A compressed body is not accepted.")


async def _in_turn(error: NoServerError, key: Key, attempt: Attempt, outbound: Outbound, account: Account) -> Answer:
    """An answer of a model of which no server is up, or all are full, once one can take it. Raises Refusal and UpstreamError.

    The servers are those of the newest generation then: they may have been started while the request waited.
    """
    gate, model, since, before = account.gate, outbound.entry.model.base, monotonic(), account.queued
    if not (error.full or gate.lobby.is_expected(model)):
        raise error
    outbound.call.read_ahead()
    while True:
        try:
            with gate.lobby.place(model, key, since) as place:
                await place.called()
        finally:
            account.queued = before + monotonic() - since
        attempt.turn_to(gate.catalog.pool(model) or outbound.entry.pool)
        try:
            return await attempt.answer(outbound.compose, outbound.upload)
        except NoServerError:
            continue


_CANNOT_TAKE = frozenset({"model_loading", "overloaded", "no_healthy_server"})
"""What the gateway itself says of a model whose servers cannot take a request now."""


def _elsewhere(error: NoServerError | ConnectFailed | Refusal, account: Account) -> Outbound:
    """The request for the next fallback, where no server has seen anything of it. Raises the error where there is none."""
    elsewhere = account.elsewhere
    if elsewhere is None or account.answer_at or (isinstance(error, Refusal) and error.code not in _CANNOT_TAKE):
        raise error
    first = elsewhere.first = elsewhere.first or error
    account.set_attempt_aside()
    if not elsewhere.entries:
        account.stay()
        raise first
    entry = elsewhere.entries.pop(0)
    account.go_on(entry)
    return elsewhere.prepare(entry)


async def _relay(call: Call, answer: Answer, account: Account, outbound: Outbound) -> None:
    """Give the client the answer, or the contract's error for the server's."""
    if not 200 <= answer.status < 300:
        body = await answer.collect(_ERROR_BODY_LIMIT, _ERROR_PATIENCE)
        answer.fault = fault(answer.server.name, answer.status, body.decode("latin-1"))
        raise from_server(answer.status, body, outbound.name, outbound.input_field, answer.headers.get(b"retry-after"))
    if b"content-encoding" in answer.headers and answer.headers[b"content-encoding"].lower() != b"identity":
        raise BadAnswer(answer.server.name, "its answer is encoded, and nobody asked for that")
    if is_stream(answer):
        relay: BodyRelay | EventRelay = EventRelay(
            call,
            answer,
            model=outbound.name,
            input_field=outbound.input_field,
            hides_usage=outbound.hides_usage,
            translation=outbound.translation,
            name=outbound.entry.name,
        )
    elif call.started:
        raise BadAnswer(answer.server.name, "its answer is no stream, and a stream has been begun")
    elif outbound.translation is not None:
        relay = TranslatedRelay(call, answer, outbound.translation, outbound.entry.name)
    else:
        relay = BodyRelay(call, answer, outbound.entry.name)
    account.passing = relay
    await relay.run()


@dataclass(slots=True)
class Elsewhere:
    """The models that a request may still go to, how it is prepared for one, and why it did not stay where it was sent."""

    entries: list[Entry]
    prepare: Callable[[Entry], Outbound]
    first: NoServerError | ConnectFailed | Refusal | None = None


# The end


class Account(msgspec.Struct, eq=False):
    """What is known of a request so far, and its end: on every way out of the ``with`` the client is told what went wrong,
    whatever it was, and the request is settled, once.

    ``started`` is since the epoch, every other time ``time.monotonic``; ``waited`` are the seconds in which the gateway
    waited for its client, ``queued`` those in which the request waited for a server.
    """

    call: Call
    gate: Gate
    started: float = field(default_factory=time)
    key: Key | None = None
    entry: Entry | None = None
    attempt: Attempt | None = None
    passing: Passing | None = None
    stream: bool = False
    user: object = None
    code: str | None = None
    incomplete: str | None = None
    detail: str | None = None
    waited: float = 0.0
    queued: float = 0.0
    keepalive: Keepalive | None = None
    outbound: Outbound | None = None
    asked: Entry | None = None
    """The model that was asked for, while another one is tried in its place."""
    elsewhere: Elsewhere | None = None
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    """Of the attempts that were set aside: the model, the server, the reason."""
    retries: int = 0
    answer_at: float = 0.0
    upstream_first: float = 0.0

    def __enter__(self) -> Account:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if self.keepalive is not None:
            self.keepalive.end()
        try:
            if error is not None:
                self._failed(error)
        finally:
            record = self._record()
            if self.call.permit is not None:
                self.call.permit.settle(record)
            self.gate.settled(record)
            self.call.settled()
        return isinstance(error, Exception | asyncio.CancelledError)

    def _failed(self, error: BaseException) -> None:
        refusal = _refusal_for(error, self)
        if refusal is not None:
            _refuse(self, refusal)

    def answered(self, answer: Answer) -> None:
        """The first bytes of an answer are here."""
        self.upstream_first = answer.last_byte
        self.answer_at = monotonic()

    def keep_alive(self, every: float) -> None:
        """Send comments on a silent stream from now on."""
        if self.keepalive is None:
            self.keepalive = Keepalive(self.call, every, self.gate.deadlines)

    def set_attempt_aside(self) -> None:
        """Note what the attempt has met: another one follows."""
        if self.attempt is not None:
            self.failures += self._failures_of(self.attempt)
            self.retries += self.attempt.retries
            self.attempt = None

    def go_on(self, entry: Entry) -> None:
        """The request goes to this fallback; the client is told."""
        self.asked = self.asked or self.entry
        self.entry = entry
        self.call.told = b"x-vllm-gateway-fallback: %b\r\n" % quote(entry.model.id, safe=_VISIBLE).encode()

    def stay(self) -> None:
        """No fallback could take it: it counts for the model that was asked for."""
        self.entry, self.asked, self.call.told = self.asked or self.entry, None, b""

    def _failures_of(self, attempt: Attempt) -> Iterator[tuple[str, str, str]]:
        owner = self.entry.model.base if self.entry is not None else OTHER
        return ((owner, error.server, error.reason) for error in attempt.failures)

    @property
    def delivered(self) -> bool:
        """The client has the whole answer."""
        return self.passing is not None and self.passing.delivered

    def cancelled(self) -> None:
        """The client has left, or the drain's time is over."""
        if not self.delivered:
            self.incomplete = "client" if self.call.disconnected else "drain"

    def upstream_failed(self, error: UpstreamError) -> None:
        """The server gave no whole answer; the words are for the log."""
        self.detail = str(error)

    def _record(self) -> Record:
        now = monotonic()
        call, passing, attempt = self.call, self.passing or _NOTHING, self.attempt
        if passing.aborted:
            self.incomplete = "upstream"
        if call.events and passing.failure is not None:
            self.code, self.incomplete = passing.failure.code, "upstream"
        if attempt is not None and attempt.failures:
            self.failures += self._failures_of(attempt)
        edge, tried = call.edge, attempt.tried if attempt is not None else ()
        began, first_byte, first_token = call.began, passing.first_byte, passing.first_token
        # The gateway's own share: before the request went out, and between the answer's first byte and its relay.
        composed_at = self.outbound.composed_at if self.outbound is not None else None
        overhead = (composed_at or now) - began - self.waited - self.queued + self.answer_at - self.upstream_first
        return Record(
            id=call.id,
            started=self.started,
            endpoint=call.target.route.endpoint,
            client=edge.client_of(call.headers) if edge.proxied else edge.address,
            status=CLIENT_CLOSED_REQUEST if call.disconnected and not self.delivered else call.status,
            code=self.code,
            key=self.key.id if self.key else None,
            model=self.entry.model.id if self.entry else None,
            asked=self.asked.model.id if self.asked else None,
            server=tried[-1].spec.name if tried else None,
            stream=self.stream,
            request_bytes=call.bytes_in,
            answer_bytes=call.bytes_out,
            usage=passing.usage,
            incomplete=self.incomplete,
            retries=self.retries + len(tried) - 1 if tried else self.retries,
            duration=now - began,
            overhead=overhead if overhead > 0.0 else 0.0,
            queued=self.queued,
            first_byte=None if first_byte is None else first_byte - began,
            first_token=None if first_token is None else first_token - began,
            gaps=passing.gaps,
            user=self.user[:_USER_LIMIT] if self.gate.state.log_user and isinstance(self.user, str) else None,
            failures=tuple(self.failures) if self.failures else (),
            detail=self.detail,
            trace=call.trace,
        )


_NOTHING = Passing()
"""What passed where nothing did."""


def _refusal_for(error: BaseException, account: Account) -> Refusal | None:
    """What the client is told of an error; None for a client that has left."""
    match error:
        case asyncio.CancelledError():
            account.cancelled()
            return None if account.call.disconnected else Refusal("draining", "The gateway is shutting down.")
        case Refusal():
            return error
        case NoServerError():
            return _NO_SERVER[error.loading]()
        case UpstreamError():
            account.upstream_failed(error)
            return from_failure(error)
    # the outer edge: the client gets an answer, the operator the trace
    _log.error("request %s failed inside the gateway", account.call.id, exc_info=error, extra={"request_id": account.call.id})
    account.detail = type(error).__name__
    return Refusal("internal_error", "The gateway failed. The request id tells the operator where to look.")


_NO_SERVER = {
    True: lambda: Refusal("model_loading", "The model is being loaded. Try again in a moment."),
    False: lambda: Refusal("no_healthy_server", "No server of this model is healthy at the moment."),
}


def _refuse(account: Account, refusal: Refusal) -> None:
    """The one place where an error is told to a client."""
    call = account.call
    account.code = refusal.code
    if call.disconnected or call.response_complete:
        return
    if call.started:
        account.incomplete = account.incomplete or "upstream"
        break_off(call, refusal)
        return
    headers = b"content-type: application/json\r\n" + b"".join(
        b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in refusal.headers.items()
    )
    call.respond(refusal.row.status, headers, render(refusal, anthropic=call.target.route.anthropic))
