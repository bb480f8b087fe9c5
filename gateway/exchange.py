"""The story of one request, in the order in which it happens.

accept → authenticate → admit → read the body → merge ``extra_body`` → resolve and authorise the model → apply
policy → choose a server → send → relay → settle usage → metrics and log.

The rules: everything taken is given back by the ``with`` that took it; every way out passes ``_Ending``, so a
request is settled once; errors are told to the client in one place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from types import TracebackType
from typing import Protocol

from gateway.auth import Keyring
from gateway.call import Call
from gateway.catalog import Catalog, Entry, named_model
from gateway.errors import CLIENT_CLOSED_REQUEST, Refusal, from_failure, from_server, render
from gateway.form import Form
from gateway.limits import Admission
from gateway.metrics import RelayMetrics
from gateway.outbound import Outbound
from gateway.payload import merge, parse, prepare
from gateway.record import Record
from gateway.relay import BodyRelay, EventRelay, Passing, TranslatedRelay, break_off, is_stream
from gateway.routes import Body
from gateway.state import Key, Model, State
from upstream.attempt import Answer, Attempt
from upstream.deadlines import Deadlines
from upstream.errors import UpstreamError
from upstream.pool import NoServerError

_ERROR_BODY_LIMIT = 64 * 1024
_USER_LIMIT = 256  # characters of `user` that are logged
_log = logging.getLogger("vllm_gateway.exchange")


class Gate(Protocol):
    """What the story needs of its relay."""

    keyring: Keyring
    catalog: Catalog
    admission: Admission
    deadlines: Deadlines
    metrics: RelayMetrics
    draining: bool

    @property
    def state(self) -> State:
        """The generation of the configuration that is served by."""

    def settled(self, record: Record) -> None:
        """Take a finished request to the books."""


async def exchange(call: Call, gate: Gate) -> None:
    """Serve one request, from its head to the last byte of its answer."""
    account = Account(call)
    with _Ending(account, gate):
        account.key = key = _authenticate(call, gate)
        catalog = gate.catalog  # one generation for the whole request
        with gate.admission.ticket(key):
            outbound = await (_form if call.target.route.body is Body.FORM else _json)(call, catalog, account, key)
            with (
                _Counted(gate, outbound.entry.model),
                Attempt(outbound.entry.pool, outbound.entry.model.timeouts, gate.deadlines) as attempt,
            ):
                account.attempt = attempt
                answer = await attempt.answer(outbound.compose, outbound.upload)
                account.answered(answer, outbound)
                await _relay(call, answer, account, outbound)


# The steps


def _authenticate(call: Call, gate: Gate) -> Key:
    if gate.draining:
        raise Refusal("draining", "The gateway is shutting down.")
    headers = call.headers
    return gate.keyring.authenticate(headers.get(b"authorization"), headers.get(b"x-api-key") if call.target.route.anthropic else None)


async def _json(call: Call, catalog: Catalog, account: Account, key: Key) -> Outbound:
    """The body of a JSON route: read, merged, authorised, made fit to send."""
    _check_media_type(call, b"application/json", b"")
    asked = account.now()
    body = await call.body()
    account.waited_since(asked)
    document = merge(parse(body))
    account.user = document.get("user")
    name = named_model(document, call.target.mounted)
    entry = account.entry = catalog.resolve(name, key, call.target.mounted)
    prepared = prepare(document, entry.model, call.target.route)
    account.stream = prepared.stream
    return Outbound.of_json(call, entry, name, prepared)


async def _form(call: Call, catalog: Catalog, account: Account, key: Key) -> Outbound:
    """The body of a form route: read up to its model, authorised; the rest is streamed on."""
    _check_media_type(call, b"multipart/form-data")
    form = Form.of(call.headers[b"content-type"])
    asked = account.now()
    name = await form.read_model(call.next_bytes)
    account.waited_since(asked)
    name = name or named_model({}, call.target.mounted)
    entry = account.entry = catalog.resolve(name, key, call.target.mounted)
    return Outbound.of_form(call, entry, name, form)


def _check_media_type(call: Call, *allowed: bytes) -> None:
    """Raises Refusal unsupported_media_type for another type or an encoding."""
    kind = call.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind not in allowed:
        raise Refusal("unsupported_media_type", f"The content type must be {allowed[0].decode()}.")
    if call.headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise Refusal("unsupported_media_type", "A compressed body is not accepted.")


async def _relay(call: Call, answer: Answer, account: Account, outbound: Outbound) -> None:
    """Give the client the answer, or the contract's error for the server's."""
    if not 200 <= answer.status < 300:
        body = await answer.collect(_ERROR_BODY_LIMIT)
        raise from_server(answer.status, body, outbound.name, outbound.input_field, answer.header(b"retry-after"))
    if is_stream(answer):
        relay: BodyRelay | EventRelay = EventRelay(
            call,
            answer,
            model=outbound.name,
            input_field=outbound.input_field,
            hides_usage=outbound.hides_usage,
            translation=outbound.translation,
        )
    elif outbound.translation is not None:
        relay = TranslatedRelay(call, answer, outbound.translation)
    else:
        relay = BodyRelay(call, answer)
    account.passing = relay
    await relay.run()


class _Counted:
    """The gauge of requests in flight, for the length of a ``with``."""

    __slots__ = ("_cells",)

    def __init__(self, gate: Gate, model: Model) -> None:
        self._cells = gate.metrics.in_flight(model.id)

    def __enter__(self) -> None:
        self._cells[0] += 1

    def __exit__(self, *_: object) -> None:
        self._cells[0] -= 1


# The end


class _Ending:
    """Tells the client what went wrong, whatever it was, and settles the request once: on every way out of the ``with``."""

    __slots__ = ("_account", "_gate")

    def __init__(self, account: Account, gate: Gate) -> None:
        self._account = account
        self._gate = gate

    def __enter__(self) -> None:
        """The request begins with its account."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        account = self._account
        try:
            refusal = _refusal_for(error, account) if error is not None else None
            if refusal is not None:
                _refuse(account, refusal)
        finally:
            self._gate.settled(account.settle(with_user=self._gate.state.log_user))
        return isinstance(error, Exception | asyncio.CancelledError)


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
    _log.error("request %s failed inside the gateway", account.call.id, exc_info=error)
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


class Account:
    """What is known of a request so far; ``settle`` makes it the record. Times are the loop's."""

    __slots__ = ("_clock", "_upstream_first", "_waited", "answer_at", "attempt", "call", "code", "composed_at", "detail", "entry",
                 "incomplete", "key", "passing", "started", "stream", "user")  # fmt: skip

    def __init__(self, call: Call) -> None:
        self.call = call
        self.started = time.time()
        self.key: Key | None = None
        self.entry: Entry | None = None
        self.attempt: Attempt | None = None
        self.passing: Passing | None = None
        self.stream = False
        self.user: object = None
        self.code: str | None = None
        self.incomplete: str | None = None
        self.detail: str | None = None
        self._clock = asyncio.get_running_loop().time
        self._waited = 0.0
        self.composed_at: float | None = None
        self.answer_at: float | None = None
        self._upstream_first: float | None = None

    def waited_since(self, moment: float) -> None:
        """The gateway has waited for its client since then."""
        self._waited += self._clock() - moment

    def now(self) -> float:
        """The loop's time."""
        return self._clock()

    def answered(self, answer: Answer, outbound: Outbound) -> None:
        """The first bytes of an answer are here."""
        self.composed_at = outbound.composed_at
        self._upstream_first = answer.last_byte
        self.answer_at = self._clock()

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
        if self.attempt is not None and error not in self.attempt.failures:
            self.attempt.failures.append(error)

    def settle(self, *, with_user: bool) -> Record:
        """The record of this request."""
        call, passing, attempt = self.call, self.passing or Passing(), self.attempt
        if passing.failure is not None and call.events:
            self.code, self.incomplete = passing.failure.code, "upstream"
        elif passing.aborted:
            self.incomplete = "upstream"
        return Record(
            id=call.id,
            started=self.started,
            endpoint=call.target.route.endpoint,
            status=CLIENT_CLOSED_REQUEST if call.disconnected and not self.delivered else call.status,
            code=self.code,
            key=self.key.id if self.key else None,
            model=self.entry.model.id if self.entry else None,
            server=attempt.last if attempt else None,
            stream=self.stream,
            request_bytes=call.bytes_in,
            answer_bytes=call.bytes_out,
            usage=passing.usage,
            incomplete=self.incomplete,
            retries=attempt.retries if attempt else 0,
            duration=self._clock() - call.began,
            overhead=self._overhead(),
            queued=0.0,
            first_byte=_since(call.began, passing.first_byte),
            first_token=_since(call.began, passing.first_token),
            gaps=passing.gaps,
            user=self.user[:_USER_LIMIT] if with_user and isinstance(self.user, str) else None,
            failures=tuple((error.server, error.reason) for error in attempt.failures) if attempt else (),
            detail=self.detail,
        )

    def _overhead(self) -> float:
        """Time in the gateway before the request went out and between the answer's first byte and its relay."""
        call = self.call
        before = (self.composed_at or self._clock()) - call.began - self._waited
        after = self.answer_at - self._upstream_first if self.answer_at and self._upstream_first else 0.0
        return max(before + after, 0.0)


def _since(start: float, moment: float | None) -> float | None:
    return None if moment is None else moment - start
