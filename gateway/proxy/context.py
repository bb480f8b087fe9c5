"""What is known of a request while it is served, and its end.

The rules: every way out passes ``Account``, so a request is settled once; errors are told to the client in one place.
"""

from __future__ import annotations

import asyncio
import logging
import string
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic, time
from types import TracebackType
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import field

from gateway.api.errors import CLIENT_CLOSED_REQUEST, Refusal, draining, from_failure, internal_error, none_healthy, render
from gateway.auth.catalog import CatalogEntry
from gateway.client.keepalive import Keepalive
from gateway.client.request import ClientRequest
from gateway.limits.estimate import Outcome
from gateway.proxy.gate import Gate
from gateway.proxy.response import Passing, break_off, is_stream
from gateway.proxy.upstream_request import Outbound
from gateway.snapshot.snapshot import Key
from gateway.telemetry.metrics import OTHER
from gateway.telemetry.request_record import USER_LIMIT, RequestRecord
from upstream.balancing.attempt import Answer, Attempt
from upstream.balancing.pool import NoServerError
from upstream.http.errors import ConnectFailed, UpstreamError

_VISIBLE = string.punctuation.replace("%", "")  # what a header's value takes as it is, beside letters and digits
_log = logging.getLogger("vllm_gateway.exchange")


@dataclass(slots=True)
class Elsewhere:
    """The models that a request may still go to, how it is prepared for one, and why it did not stay where it was sent."""

    entries: list[CatalogEntry]
    prepare: Callable[[CatalogEntry], Awaitable[Outbound]]
    first: NoServerError | ConnectFailed | Refusal | None = None


class Account(msgspec.Struct, eq=False):
    """What is known of a request so far, and its end: on every way out of the ``with`` the client is told what went wrong,
    whatever it was, and the request is settled, once.

    ``started`` is since the epoch, every other time ``time.monotonic``; ``waited`` are the seconds in which the gateway
    waited for its client, ``queued`` those in which the request waited for a server.
    """

    call: ClientRequest
    gate: Gate
    started: float = field(default_factory=time)
    key: Key | None = None
    entry: CatalogEntry | None = None
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
    asked: CatalogEntry | None = None
    """The model that was asked for, while another one is tried in its place."""
    elsewhere: Elsewhere | None = None
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    """Of the attempts that were set aside: the model, the server, the reason."""
    retries: int = 0
    answer_at: float = 0.0
    upstream_first: float = 0.0
    shape: Mapping[str, Any] | None = None
    """What its body looked like, where it is one of those that are shown."""

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
            self.settle_limits(record.status)
            self.gate.settled(record)
            self.call.release()
        return isinstance(error, Exception | asyncio.CancelledError)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, UpstreamError) and self.delivered:
            # The server closed the connection between its stream's last event and the end of its body: the client misses nothing.
            self.call.finish_response()
            return
        refusal = _refusal_for(error, self)
        if refusal is not None:
            _refuse(self, refusal)

    def answered(self, answer: Answer) -> None:
        """The first bytes of an answer are here. One that is no stream is told as it is, so nothing is to come before it any more."""
        self.upstream_first = answer.last_byte
        self.answer_at = monotonic()
        if self.keepalive is not None and not is_stream(answer):
            self.keepalive.end()

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

    def go_on(self, entry: CatalogEntry) -> None:
        """The request goes to this fallback; the client is told."""
        self.asked = self.asked or self.entry
        self.entry = entry
        self.call.extra_headers = b"x-vllm-gateway-fallback: %b\r\n" % quote(entry.model.id, safe=_VISIBLE).encode()

    def stay(self) -> None:
        """No fallback could take it: it counts for the model that was asked for."""
        self.entry, self.asked, self.call.extra_headers = self.asked or self.entry, None, b""

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

    def settle_limits(self, status: int) -> None:
        """What the request has used of its key's limits is known, unless it was before the end of its answer went out."""
        if (permit := self.call.permit) is not None and permit.is_unsettled:
            asked, passing = self.attempt is not None and bool(self.attempt.tried), self.passing or _NOTHING
            permit.settle(Outcome(asked, status, passing.usage, passing.uncounted_events, self.incomplete))

    def _record(self) -> RequestRecord:
        now = monotonic()
        call, passing, attempt = self.call, self.passing or _NOTHING, self.attempt
        if passing.aborted:
            self.incomplete = "upstream"
        if call.is_event_stream and passing.failure is not None:
            self.code, self.incomplete = passing.failure.code, "upstream"
        if attempt is not None and attempt.failures:
            self.failures += self._failures_of(attempt)
        connection, tried = call.connection, attempt.tried if attempt is not None else ()
        began, first_byte, first_token = call.received_at, passing.first_byte, passing.first_token
        # The gateway's own share: before the request went out, and between the answer's first byte and its relay.
        composed_at = self.outbound.composed_at if self.outbound is not None else None
        overhead = (composed_at or now) - began - self.waited - self.queued + self.answer_at - self.upstream_first
        return RequestRecord(
            id=call.id,
            started=self.started,
            endpoint=call.target.route.endpoint,
            client=connection.client_of(call.head.headers) if connection.proxied else connection.address,
            status=CLIENT_CLOSED_REQUEST if call.disconnected and not self.delivered else call.status,
            code=self.code,
            key=self.key,
            model=self.entry.model.id if self.entry else None,
            asked=self.asked.model.id if self.asked else None,
            server=tried[-1].spec.name if tried else None,
            stream=self.stream,
            request_bytes=call.body.size,
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
            user=self.user[:USER_LIMIT] if self.gate.snapshot.log_user and isinstance(self.user, str) else None,
            failures=tuple(self.failures) if self.failures else (),
            detail=self.detail,
            trace=call.trace,
            shape=self.shape,
        )


_NOTHING = Passing()
"""What passed where nothing did."""


def _refusal_for(error: BaseException, account: Account) -> Refusal | None:
    """What the client is told of an error; None for a client that has left."""
    match error:
        case asyncio.CancelledError():
            account.cancelled()
            return None if account.call.disconnected else draining()
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
    return internal_error()


_NO_SERVER = {
    True: lambda: Refusal("model_loading", "The model is being loaded. Try again in a moment."),
    False: none_healthy,
}


def _refuse(account: Account, refusal: Refusal) -> None:
    """The one place where an error is told to a client."""
    call = account.call
    account.code = refusal.code
    if call.disconnected or call.response_complete:
        return
    if call.response_started:
        account.incomplete = account.incomplete or "upstream"
        account.settle_limits(call.status)
        break_off(call, refusal, (account.passing or _NOTHING).events)
        return
    account.settle_limits(refusal.spec.status)
    headers = b"content-type: application/json\r\n" + b"".join(
        b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in refusal.headers.items()
    )
    call.respond(refusal.spec.status, headers, render(refusal, anthropic=call.target.route.anthropic))
