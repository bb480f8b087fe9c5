"""The context of one request while it is served, and its end.

The rules: every request ends in ``RequestContext.__exit__``, so it is recorded once. An error is sent to the client in one place,
``_send_error``.
"""

from __future__ import annotations

import asyncio
import logging
import string
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from time import monotonic, time
from types import TracebackType
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import field

from gateway.admission.queue import QueueSlot
from gateway.admission.reserved_slots import Progress
from gateway.admission.weighted_tokens import NO_TOKENS, Tokens
from gateway.api.errors import CLIENT_CLOSED_REQUEST, Refusal, draining, from_failure, internal_error, none_healthy, render
from gateway.api.settlement import NOTHING, Settlement
from gateway.api.usage import Usage
from gateway.auth.catalog import CatalogEntry
from gateway.auth.split import Split
from gateway.client.keepalive import Keepalive
from gateway.client.request import ClientRequest
from gateway.limits import Reservation
from gateway.limits.sessions import session_of
from gateway.proxy.request_services import RequestServices
from gateway.proxy.response import NoResponse, ResponseRelay, end_truncated
from gateway.proxy.upstream_request import UpstreamRequest
from gateway.recording.capture import Capture
from gateway.recording.recorder import HEADER as RECORDED
from gateway.snapshot.link import ChoiceExplained
from gateway.snapshot.snapshot import Key
from gateway.telemetry.metrics import OTHER
from gateway.telemetry.request_record import RESENT, USER_LIMIT, Continuation, RequestRecord, explained
from upstream.balancing.attempt import Attempt
from upstream.balancing.cost_model import Placement
from upstream.balancing.pool import NoServerError
from upstream.http.errors import ConnectFailed, UpstreamError

_VISIBLE = string.punctuation.replace("%", "")  # what a header's value may contain unquoted, beside letters and digits
_NO_RESPONSE = NoResponse()
_log = logging.getLogger("vllm_gateway.exchange")


@dataclass(slots=True)
class Fallbacks:
    """The models that a request may still be sent to, and what happened on the models before.

    ``prepare`` makes the request for a candidate; ``requested`` is the model that the client requested.
    """

    requested: CatalogEntry
    candidates: list[CatalogEntry]
    prepare: Callable[[CatalogEntry], Awaitable[UpstreamRequest]]
    first_error: NoServerError | ConnectFailed | Refusal | None = None
    """Why the requested model could not serve the request."""
    failures: tuple[tuple[str, str, str], ...] = ()
    """Failures of servers: the model, the server, the reason."""
    retries: int = 0
    composed_at: float | None = None


class RequestContext(msgspec.Struct, eq=False):
    """Everything that is known about one request so far.

    On leaving the ``with``, the client gets the error if there was one, and the request is recorded. ``started_at`` is seconds since the
    epoch, each other time is ``time.monotonic``. ``waited`` is the seconds spent waiting for the client, ``queued`` for a server.
    """

    request: ClientRequest
    worker: RequestServices
    started_at: float = field(default_factory=time)
    key: Key | None = None
    model: CatalogEntry | None = None
    """The model that serves the request: the requested one, one of the requested split, or a fallback."""
    split: str | None = None
    """The ID of the split that the client requested."""
    fallbacks: Fallbacks | None = None
    stream: bool = False
    user: object = None
    shape: Mapping[str, Any] | None = None
    """The shape of the body, if it is logged."""
    attempt: Attempt | None = None
    response_relay: ResponseRelay = _NO_RESPONSE
    keepalive: Keepalive | None = None
    waited: float = 0.0
    queued: float = 0.0
    queue_reason: str | None = None
    """Why the request was queued first."""
    slot: QueueSlot | None = None
    """The slot from which the request was dispatched, until its charge is settled."""
    ended_at: float | None = None
    """When the response ended, if its prompt was counted afterwards."""
    counted_prompt: int | None = None
    """The tokens of the prompt as the server counted them after the end of the response."""
    handover: float | None = None
    """Seconds from the first byte of the response to its handling; None before."""
    code: str | None = None
    incomplete: str | None = None
    detail: str | None = None
    refusal: Refusal | None = None
    """The error that the client got."""
    capture: Capture | None = None
    """The record of the request with its bodies, if it is recorded."""
    continuations: tuple[Continuation, ...] = ()
    """How the stream was continued on other servers."""
    reason: str | None = None
    """The reason of the failure of a server, if the client got an error for it."""

    def __enter__(self) -> RequestContext:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if self.keepalive is not None:
            self.keepalive.end()
        try:
            if error is not None:
                self._fail(error)
        finally:
            record = self._record()
            if self.queue_reason is not None:
                self._end_queue(record)
            self.worker.record_request(record)
            if self.capture is not None:
                self._finish_capture(self.capture, record)
            self.request.release()
        return error is not None and isinstance(error, Exception | asyncio.CancelledError)

    # While it is served

    def end_attempt(self, fallbacks: Fallbacks) -> None:
        """Note what the attempt has met, before the request is sent to a fallback."""
        if (attempt := self.attempt) is not None:
            fallbacks.failures += self._failures(attempt)
            fallbacks.retries += attempt.retries
            fallbacks.composed_at = attempt.composed_at
            if (prompt := attempt.facts.prompt) is not None and prompt.placement is not None:
                prompt.placement.finished()
            self.settle_slot(None)
            self.attempt = None

    @property
    def may_forget_response(self) -> bool:
        """Whether the client has nothing of a response yet, except comments (``Keepalive``)."""
        return not self.request.response_started or (self.request.is_event_stream and self.response_relay.events == 0)

    def forget_response(self, lost: UpstreamError) -> None:
        """Forget the response of a lost server: another one gets the request. The tokens that the server has counted for it are noted."""
        if (usage := self.response_relay.usage) is not None:
            at = monotonic() - self.request.received_at
            costs = usage.completion, usage.prompt
            self.continuations += (Continuation(lost.server, lost.reason, RESENT, "continued", None, *costs, at=at),)
        self.response_relay = _NO_RESPONSE

    def choose_from_split(self, named: CatalogEntry, split: Split[CatalogEntry], key: Key, document: Mapping[str, Any]) -> CatalogEntry:
        """Choose the model that serves a request for a split, and use it. ``document``: empty for a form.

        The ID of a request is random: it draws the model if the split is not sticky, or if the request belongs to no session.
        """
        text = self.request.id
        if split.sticky == "key":
            text = key.id
        elif split.sticky == "session":
            text = session_of(self.request.head.headers, document) or text
        self.split, model = named.model.id, split.choose(text)
        self.use_model(model, model)
        return model

    def use_model(self, model: CatalogEntry, requested: CatalogEntry) -> None:
        """Serve the request by this model. ``requested``: the model that a fallback replaces.

        The response names the model if the client requested another model or a split.
        """
        self.model = model
        name = quote(model.model.id, safe=_VISIBLE).encode()
        of_split = b"" if self.split is None else b"x-vllm-gateway-model: %b\r\n" % name
        recorded = b"" if self.capture is None else RECORDED
        self.request.extra_headers = recorded + of_split + (b"" if model is requested else b"x-vllm-gateway-fallback: %b\r\n" % name)

    # Its end

    @property
    def needs_prompt_count(self) -> bool:
        """Whether the settlement of a request that was truncated depends on a count of its prompt.

        A prompt that was certainly computed is counted, and with ``bill_cancelled_prefill`` also the prompt of a client that disconnected
        before. Nothing is counted for a request that nothing charges.
        """
        reservation, relayed = self.request.reservation, self.response_relay
        if self.worker.ledger is None and (reservation is None or not reservation.counts_tokens):
            return False
        if self.attempt is None or self.attempt.composed_at is None or relayed.delivered or relayed.settlement is not None:
            return False
        if relayed.lacks_prompt:
            return True
        return self.request.disconnected and relayed.is_empty and self.worker.active.snapshot.bill_cancelled_prefill

    def _settle(self, status: int) -> Settlement:
        """Settle the request, unless that was done before the end of its response was sent. ``status``: the status sent."""
        reservation = self.request.reservation
        if self.attempt is None or not self.attempt.tried:
            settlement = NOTHING
        else:
            settlement = self.response_relay.settle(status, self._estimated_prompt(reservation), self.counted_prompt)
        if reservation is not None and reservation.is_unsettled:
            reservation.settle(settlement, status)
        return settlement

    def _estimated_prompt(self, reservation: Reservation | None) -> int | None:
        """Return the estimated tokens of the prompt; None if neither a limit nor the ledger needs them."""
        if self.counted_prompt is not None:
            return self.counted_prompt
        if reservation is not None and reservation.counts_tokens:
            return reservation.estimated_prompt
        return None if self.worker.ledger is None else self.response_relay.estimate_prompt()

    def _failures(self, attempt: Attempt) -> tuple[tuple[str, str, str], ...]:
        owner = self.model.model.base if self.model is not None else OTHER
        return tuple((owner, error.server, error.reason) for error in attempt.failures)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, UpstreamError) and self.response_relay.delivered:
            # The server closed the connection between its stream's last event and the end of its body: the client misses nothing.
            self.request.finish_response()
            return
        if (refusal := self._refusal_for(error)) is not None:
            self._send_error(refusal)

    def _refusal_for(self, error: BaseException) -> Refusal | None:
        """Return the error that the client gets; None for a client that has disconnected."""
        match error:
            case asyncio.CancelledError():
                if not self.response_relay.delivered:
                    self.incomplete = "client" if self.request.disconnected else "drain"
                return None if self.request.disconnected else draining()
            case Refusal():
                return error
            case NoServerError():
                return Refusal("model_loading", "The model is being loaded. Try again in a moment.") if error.loading else none_healthy()
            case UpstreamError():
                self.detail, self.reason = str(error), error.reason
                return from_failure(error)
        # The outer edge: the client gets an error, the operator the trace.
        identity = self.request.id
        _log.error("request %s failed inside the gateway", identity, exc_info=error, extra={"request_id": identity})
        self.detail = type(error).__name__
        return internal_error()

    def _send_error(self, refusal: Refusal) -> None:
        """Send an error to the client. The only place that does, once a request is being served."""
        request = self.request
        self.refusal, self.code, self.detail = refusal, refusal.code, self.detail or refusal.detail
        if request.disconnected or request.response_complete:
            return
        if request.response_started:
            self.incomplete = self.incomplete or "upstream"
            self._settle(request.status)
            end_truncated(request, refusal, self.response_relay.events)
            return
        self._settle(refusal.spec.status)
        headers = {"content-type": "application/json", **refusal.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
        request.respond(refusal.spec.status, lines, render(refusal, anthropic=request.target.route.anthropic))

    def _record(self) -> RequestRecord:
        now = self.ended_at or monotonic()
        request, passed, attempt, fallbacks, model = self.request, self.response_relay, self.attempt, self.fallbacks, self.model
        if passed.aborted:
            self.incomplete = "upstream"
        if request.is_event_stream and passed.failure is not None:
            self.refusal, self.code, self.incomplete = passed.failure, passed.failure.code, "upstream"
        connection, received_at = request.connection, request.received_at
        status = CLIENT_CLOSED_REQUEST if request.disconnected and not passed.delivered else request.status
        record: RequestRecord
        record = RequestRecord(
            request.id, self.started_at, request.target.route.endpoint, status, self.key, self.stream, request.body.size, request.bytes_out
        )
        if model is not None:
            record.model = model.model.id
        record.split = self.split
        composed_at = None
        if attempt is not None:
            composed_at = attempt.composed_at
            if attempt.tried:
                record.server = attempt.tried[-1].spec.name
                record.retries = len(attempt.tried) - 1
            if attempt.failures:
                record.failures = self._failures(attempt)
        if fallbacks is not None:
            record.failures = fallbacks.failures + record.failures
            record.retries += fallbacks.retries
            composed_at = fallbacks.composed_at if attempt is None else composed_at
            record.requested_model = None if model is fallbacks.requested else fallbacks.requested.model.id
        usage = passed.usage
        if usage is None or request.reservation is not None or status >= 400:  # otherwise the settlement is the server's usage
            settlement = passed.settlement or self._settle(status)
            usage, record.estimated_by = settlement.usage, settlement.estimated_by
            record.nearest_limit = None if request.reservation is None else request.reservation.nearest_limit
        record.usage = usage
        if attempt is not None and attempt.facts.prompt is not None and (placement := attempt.facts.prompt.placement) is not None:
            record.explanation = self._finish_placement(placement, usage if status < 400 and self.incomplete is None else None)
        record.duration = now - received_at
        # The gateway's own share: before the request was sent, and between the first byte of the response and its handling.
        overhead = (composed_at or now) - received_at - self.waited - self.queued + (self.handover or 0.0)
        record.overhead = overhead if overhead > 0.0 else 0.0
        if passed.first_byte is not None:
            record.first_byte = passed.first_byte - received_at
        if passed.first_token is not None:
            record.first_token = passed.first_token - received_at
            record.gaps = passed.gaps
        if self.user is not None and isinstance(self.user, str) and self.worker.active.snapshot.log_user:
            record.user = self.user[:USER_LIMIT]
        record.shape = self.shape
        record.trace = request.trace
        record.client = connection.client_of(request.head.headers) if connection.proxied else connection.address
        record.incomplete = self.incomplete
        record.continuations = self.continuations
        if self.code is not None:
            record.code, record.detail = self.code, self.detail
        if self.refusal is not None:
            record.param, record.unknown_model = explained(self.refusal)
            record.reason, record.limit_holder = self.refusal.limit or self.reason, self.refusal.limit_holder
        return record

    def tokens_so_far(self) -> int:
        """Return the events with tokens that were relayed, a lower bound of the tokens of the output."""
        return self.response_relay.events

    def stream_progress(self) -> Progress:
        """Return the progress of the response, if it is a stream."""
        first, gaps = self.response_relay.first_token, self.response_relay.gaps
        return Progress(first, 0.0, 0) if gaps is None else Progress(first, gaps.last, gaps.events)

    def _end_queue(self, record: RequestRecord) -> None:
        """Settle what a queue has charged for the request, and note how long and why it waited."""
        record.queued, record.queue_reason = self.queued, self.queue_reason
        self.settle_slot(record.usage)

    def settle_slot(self, usage: Usage | None) -> None:
        """Settle the charge of the request's slot. Without a usage, the charge is what the server has probably computed."""
        slot, self.slot = self.slot, None
        if slot is None:
            return
        computed = NO_TOKENS
        if self.attempt is not None and self.attempt.composed_at is not None:
            computed = Tokens(slot.estimate.prompt, self.response_relay.events)
        slot.finish(usage, computed, self.response_relay.first_token)

    def _finish_capture(self, capture: Capture, record: RequestRecord) -> None:
        """Complete the record with the bodies of the request."""
        served = None
        if self.attempt is not None and self.attempt.tried and self.model is not None:
            served = self.model.model.served or self.attempt.tried[-1].spec.model
        capture.finish(record, served, is_event_stream=self.request.is_event_stream)

    def _finish_placement(self, placement: Placement, usage: Usage | None) -> Mapping[str, Any] | None:
        """End the placement of the request. Return the reason for the choice of its server if that is to be logged.

        ``usage``: None unless the response is complete and successful.
        """
        assert self.model is not None  # a request without a model has no placement
        if usage is None:
            placement.finished()
        else:
            placement.finished(usage.prompt, usage.cached, usage.completion)
            self.worker.metrics.count_prediction(self.model.model.base, placement.predicted, usage.cached)
        if not placement.candidates:
            return None
        candidates = {
            name: {"cost_ms": round(cost * 1000, 3), "cached_tokens": round(cached)} for name, cost, cached in placement.candidates
        }
        explanation = {"predicted_cached_tokens": round(placement.predicted), "candidates": candidates}
        self.worker.report_choice(ChoiceExplained(self.model.model.base, self.request.id, placement.server, self.started_at, explanation))
        return explanation
