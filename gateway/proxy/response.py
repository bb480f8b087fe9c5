"""Relays a response from the server to the client, and reads the fields that the gateway acts on as they pass.

The rules: the bytes of a 2xx response are the server's, with the exceptions that docs/routes.md lists ("Bytes of a stream"). In a stream,
``EventRelay._process`` is the one place that makes them, and the fast path repeats it for ordinary events only. The status 200 is sent with
the first bytes of the body, so an error as the first event can still become a real status. Only an incomplete event is buffered, and the
last event of a choice until the server has sent the final usage.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import orjson
from msgspec.structs import replace

from gateway.api.errors import Refusal, from_failure, render, render_event
from gateway.api.response_fields import (
    EVENTS_BEFORE_TOKENS,
    ITEMIZED,
    WHOLE_SIZE,
    Fields,
    Observer,
    ends_choice,
    ends_stream,
    events_without_tokens,
    is_ordinary,
    of_body,
    of_document,
    of_event,
    opened_block,
)
from gateway.api.rewrite_model import ModelRenamer, renamed
from gateway.api.routes import Dialect
from gateway.api.settlement import BYTES_PER_TOKEN, NOTHING, Delivery, Settlement, settle
from gateway.api.translation import Translation
from gateway.api.usage import Usage, merged, usage_tail
from gateway.api.vllm.errors import event_status, from_event, server_failure
from gateway.client.request import ClientRequest
from gateway.continuation.plan import Path
from gateway.continuation.sent_text import SentText
from gateway.continuation.token_record import TokenRecord
from gateway.proxy.event_template import TemplateLearner
from gateway.proxy.fast_path import FastPath
from gateway.proxy.running_usage import RunningUsage
from gateway.proxy.token_chunks import TextRecorder, TokenRecorder
from gateway.proxy.upstream_request import UpstreamRequest
from gateway.system.steps import MEDIUM
from gateway.telemetry.metrics import ReadGaps
from upstream.balancing.attempt import UpstreamResponse
from upstream.http.errors import Aborted, BadResponse, Disconnected, UpstreamError
from upstream.http.sse import EventTooLongError, Splitter, data_of, is_error, split

T = TypeVar("T")

EVENT_LIMIT = 1024 * 1024
"""Bytes that an incomplete event may have, in addition to twice the size of the request, which it may repeat."""

TRANSLATED_LIMIT = 64 * 1024 * 1024
"""Bytes of a response that is translated as a whole."""

REST_LIMIT = 64 * 1024 * 1024
"""Bytes of a response that are read for its count after the client has disconnected."""

EVENT_STREAM, _JSON = b"text/event-stream", b"application/json"
_LONGEST_TYPE = 1024  # bytes of a content type, parameters included
_ERROR_BODY_LIMIT = 64 * 1024
_ERROR_BODY_TIMEOUT = 5.0  # seconds
_BINARY, _METADATA = b"application/octet-stream", b"metadata"


class ResponseRelay:
    """Relays one response. This base class holds what was read from it. Times are ``time.monotonic``."""

    usage: Usage | None = None
    first_byte: float | None = None
    first_token: float | None = None
    gaps: ReadGaps | None = None
    failure: Refusal | None = None
    """An error that the server put into the response itself."""
    aborted = False
    """The engine stopped the request. vLLM ends such a response like a complete one."""
    _request: ClientRequest
    _response: UpstreamResponse

    settlement: Settlement | None = None
    """The settlement, if it was made before the request ended."""

    @property
    def events(self) -> int:
        """The number of events of a stream that were relayed."""
        return 0 if self.gaps is None else self.gaps.events

    @property
    def delivered(self) -> bool:
        """Whether the client has the whole response although the server has not ended its body."""
        return False

    def estimate_prompt(self) -> int | None:
        """Estimate the tokens of the prompt; None if the settlement needs no estimate."""
        return None

    @property
    def lacks_prompt(self) -> bool:
        """Whether tokens were delivered, and the server has not reported the tokens of their prompt."""
        return False

    @property
    def is_empty(self) -> bool:
        """Whether the server has sent neither tokens nor a count of them."""
        return self.first_byte is None

    def settle(self, status: int, estimated_prompt: int | None, counted_prompt: int | None = None) -> Settlement:
        """Settle what has been relayed, unless that was done before. ``status``: the status sent, 499 if truncated.

        For the other arguments see ``gateway.api.settlement.settle``.
        """
        if self.settlement is None:
            self.settlement = settle(self._delivery(status), estimated_prompt, counted_prompt)
        return self.settlement

    def _delivery(self, status: int) -> Delivery:
        return Delivery(status, self.usage)

    def _settle_limits(self) -> None:
        """Settle the key's limits before the end of the response is sent: the client's next request must find them settled."""
        if (reservation := self._request.reservation) is not None:
            status = self._response.status
            if self.usage is not None:
                settlement = self.settlement = Settlement(self.usage)
            elif reservation.counts_tokens:
                settlement = self.settle(status, reservation.estimated_prompt)
            else:
                settlement = NOTHING  # for these limits; the ledger may need an estimate
            reservation.settle(settlement, status)

    def _note_aborted(self) -> None:
        self.aborted = True
        self._response.fault = Aborted(self._response.server.name, "its engine stopped the request")


class NoResponse(ResponseRelay):
    """Stands for the response of a request that has none yet. It has no state, because all such requests share it."""

    def settle(self, status: int, estimated_prompt: int | None, counted_prompt: int | None = None) -> Settlement:
        return settle(Delivery(status), estimated_prompt, counted_prompt)


class BodyRelay(ResponseRelay):
    """Relays a response that is not a stream of events: JSON, text, audio."""

    _renamer: ModelRenamer | None = None

    def __init__(self, response: UpstreamResponse, upstream: UpstreamRequest) -> None:
        self._request = upstream.request
        self._response = response
        self._sent = 0  # bytes of the body that had been received when the client disconnected: it was sent these
        self._upstream = upstream
        kind = response.content_type
        self._is_json = kind == _JSON or kind.lower().startswith(_JSON)  # other text may contain the same fields
        self._name = upstream.model.name if self._is_json else None  # the name to write in place of the model's

    async def run(self) -> None:
        """Relay to the end. Raises UpstreamError if the response is truncated.

        Raises Aborted, once, for a response that was aborted, if another server may get the request. A second call relays the response.
        """
        request, response = self._request, self._response
        self.first_byte = response.last_byte_at
        if not response.complete and response.resends and self._is_json and (_length(response) or math.inf) <= WHOLE_SIZE:
            await self._wait_unsent()
        if response.complete:
            body = response.pending[0] if len(response.pending) == 1 else b"".join(response.pending)
            if self._is_json:
                self._note_whole(of_body(body, request.target.route.dialect))
            if self._name is not None:
                body = renamed(body, self._name)
            if self.usage is None:
                self._sent = len(body)
            self._settle_limits()
            request.respond(response.status, content_type(response), body)
        else:
            self._observer = Observer(request.target.route.dialect)
            if self._name is not None:
                self._renamer = ModelRenamer(self._name)
            await self._stream(content_type(response), _length(response) if self._renamer is None else None)

    async def _wait_unsent(self) -> None:
        """Wait for the end of a response of which nothing is sent before: another server may get its request. Raises UpstreamError."""
        self._observer = Observer(self._request.target.route.dialect)
        try:
            await self._wait_complete()
        except asyncio.CancelledError:
            self._observer.feed(b"".join(self._response.pending))
            self._note_observed()
            raise

    async def _stream(self, lines: bytes, length: int | None) -> None:
        """Relay the body as it arrives, after these header lines. Raises UpstreamError."""
        self._received = 0  # bytes of the body
        self._request.start_response(self._response.status, lines, length)
        connect(self._request, self._response, self._write)
        try:
            await self._wait_complete()
        finally:
            self._note_observed()
        self._settle_limits()
        self._request.finish_response()

    async def _wait_complete(self) -> None:
        """Wait for the end of the response. Raises UpstreamError.

        The usage is at the end of a response. If the client disconnects before, the gateway reads the rest for it, as long as the model's
        timeouts allow. A drain ends this wait as it ends each request.
        """
        request, response = self._request, self._response
        try:
            await response.wait_complete()
        except asyncio.CancelledError:
            if request.disconnected and self._may_be_counted():
                request.on_pause = request.on_resume = None
                response.resume()  # the client may have been slow
                with suppress(UpstreamError):
                    await response.wait_complete()
            raise

    def _may_be_counted(self) -> bool:
        """Return whether the rest of the response may have its usage, and is short enough to be read for it."""
        length = _length(self._response)
        return self._is_json and self._observer.fields.usage is None and (length is None or length <= REST_LIMIT)

    def _write(self, data: bytes) -> None:
        self._received += len(data)
        if not self._request.disconnected:
            self._sent = self._received
        if self._is_json:
            self._observer.feed(data)
        if self._response.complete:
            self._note_observed()
            self._settle_limits()
        elif self._received - self._sent > REST_LIMIT:
            self._response.truncate()
        self._request.write(data if self._renamer is None else self._renamer.feed(data))

    def _note_observed(self) -> None:
        self._note(self._observer.fields)

    def _note(self, fields: Fields) -> None:
        self.usage = fields.usage
        if fields.stopped:
            self._note_aborted()

    def _note_whole(self, fields: Fields) -> None:
        """Note the fields of a response of which the client has nothing. Raises Aborted as ``run`` does."""
        was_aborted = self.aborted
        self._note(fields)
        if self.aborted and not was_aborted and self._response.resends:
            assert self._response.fault is not None
            raise self._response.fault

    # Its settlement

    @property
    def is_empty(self) -> bool:
        return self._sent == 0 and self.usage is None

    @property
    def _needs_estimate(self) -> bool:
        """Whether the client was sent a part of a response, and the server has not reported the tokens of it."""
        return self.usage is None and self._sent > 0 and self._request.target.route.counts_tokens

    def estimate_prompt(self) -> int | None:
        return self._upstream.estimate_prompt() if self._needs_estimate else None

    def _delivery(self, status: int) -> Delivery:
        if not self._needs_estimate:
            return Delivery(status, self.usage)
        generates = self._request.target.route.generates
        return Delivery(status, estimated=max(self._sent // BYTES_PER_TOKEN, 1) if generates else 0)


class EmbeddingsRelay(BodyRelay):
    """Relays binary embeddings (``encoding_format: bytes``).

    The server sends their shapes, the model's name and the usage in a header, unless the client requested ``bytes_only``.
    """

    async def run(self) -> None:
        """Relay to the end. Raises UpstreamError if the response is truncated."""
        response, name = self._response, self._upstream.model.name
        self.first_byte = response.last_byte_at
        metadata, lines = response.headers.get(_METADATA), content_type(response)
        if metadata is not None:
            self.usage = of_body(metadata, Dialect.PLAIN).usage
            lines += b"%b: %b\r\n" % (_METADATA, metadata if name is None else renamed(metadata, name))
        await self._stream(lines, _length(response))

    def _note_observed(self) -> None:
        """Do nothing: the fields are in the header."""


class TranslatedRelay(BodyRelay):
    """Relays a JSON response that is translated as a whole, to a request in an older form. A part of it reaches no client."""

    def __init__(self, response: UpstreamResponse, upstream: UpstreamRequest, translation: Translation) -> None:
        super().__init__(response, upstream)
        self._translation = translation
        self._document: dict[str, Any] = {}

    async def run(self) -> None:
        """Send the translated response. Raises UpstreamError if it is truncated or not JSON, and Aborted as ``BodyRelay`` does."""
        request, response = self._request, self._response
        self.first_byte = response.last_byte_at
        document = self._document = self._document or _json(await response.read_body(TRANSLATED_LIMIT))
        if not document:
            raise BadResponse(response.server.name, "its response is not the expected JSON")
        self._note_whole(of_document(document, request.target.route.dialect))
        if self._name is not None:
            document["model"] = self._name
        translated = orjson.dumps(_translated(self._translation.response, document, response))
        self._sent = len(translated)
        self._settle_limits()
        request.respond(response.status, content_type(response), translated)


class EventRelay(ResponseRelay):
    """Relays a stream of server-sent events."""

    def __init__(self, response: UpstreamResponse, upstream: UpstreamRequest) -> None:
        self._request = upstream.request
        self._response = response
        self._upstream = upstream
        self._dialect = upstream.request.target.route.dialect
        self._learner = TemplateLearner(self._dialect)
        self._hides_usage = upstream.body.hides_usage
        self._translation = upstream.body.translation
        self._name = upstream.model.name  # the name to write in place of the model's
        self._splitter = Splitter(EVENT_LIMIT + 2 * upstream.request.body.size)
        body = upstream.body
        self._running = RunningUsage(body.choices, body.prompts, hidden=body.hides_running_usage) if body.choices else None
        self._structure = 0  # the events of responses and messages without tokens
        self._block = ""  # the type of the last block of a message
        self._prompt: Usage | None = None  # the usage of the prompt in the first event of a stream of messages
        self._last = b""
        self._waiting: tuple[bytes, dict[str, Any]] | None = None  # the last event of a choice, until the next event has arrived
        self._leading = b""  # blank lines before the first event, which are sent with it
        self._lacks_line_feed = False  # the LF of the CRLF that ended a hidden event comes with the next read
        self._first_error: Refusal | None = None  # an error as the first event: it is sent with its status
        self.record = _record_of(upstream)
        """The record of the stream, if it may be continued on another server."""

    async def run(self) -> None:
        """Relay to the end.

        Raises UpstreamError if the stream is truncated, and Refusal for an error that is the first event, before anything is sent. If the
        stream is recorded, ``end_truncated`` must be called after an UpstreamError, unless the stream is continued.
        """
        response = self._response
        self.first_byte = response.last_byte_at
        response.keep_close()
        if self.record is None:
            try:
                await self._receive_all(response, self.receive)
            except UpstreamError:
                self.end_truncated()
                raise
        else:
            with response.movable():
                await self._receive_all(response, self.receive)
        self.finish()

    async def _receive_all(self, response: UpstreamResponse, sink: Callable[[bytes], None]) -> None:
        """Pass the response to a sink until it has ended. Raises UpstreamError if it is truncated."""
        connect(self._request, response, sink)
        await response.wait_complete()

    async def continue_with(self, response: UpstreamResponse, sink: Callable[[bytes], None]) -> None:
        """Relay the rest of the stream, which is in another response. ``sink`` passes its events to ``receive``. Raises UpstreamError."""
        self.take_over(response)
        with response.movable():
            await self._receive_all(response, sink)
        self.finish()

    @property
    def response(self) -> UpstreamResponse:
        """The response that is relayed now."""
        return self._response

    @property
    def reasoning_tokens(self) -> int | None:
        """The tokens of the reasoning that were sent; None if the server does not count them."""
        usage = None if self._running is None else self._running.usage
        return None if usage is None else usage.reasoning

    @property
    def completion_tokens(self) -> int:
        """The tokens of the events that were sent with the counts of ``reasoning_tokens``; 0 if the server has not reported them yet."""
        usage = None if self._running is None else self._running.usage
        return 0 if usage is None else usage.completion

    @property
    def has_running_usage(self) -> bool:
        """Whether each event has its usage: the gateway or the client has requested it."""
        return self._running is not None

    @property
    def prompt_tokens(self) -> int:
        """The tokens of the prompt; 0 if the server has not reported them yet."""
        usage = self._prompt if self._running is None else self._running.usage
        return 0 if usage is None else usage.prompt

    def take_over(self, response: UpstreamResponse) -> None:
        """Let another response continue the stream. The start of an event of the former response is left out."""
        self._response = response
        self._splitter.take()

    def end_truncated(self) -> None:
        """Send what was held back: the stream ends before its last event."""
        rest = self._splitter.take()
        is_line_feed = rest == b"\n" and not self._lacks_line_feed  # of the CRLF of the last event that was sent
        self._write(self._renamed(self._release({})) + (rest if is_line_feed else b""))

    def finish(self) -> None:
        """End the response after its last event. Raises Disconnected if the server has sent none, and Refusal as ``run`` does."""
        request, response = self._request, self._response
        if self._first_error is not None:
            raise self._first_error
        # The server has ended its body. The stream must have ended before.
        rest = self._splitter.take()
        if not ends_stream(self._last, rest, self._dialect):
            raise Disconnected(response.server.name, "ended its stream before its last event")
        rest = self._renamed(self._release({})) + rest
        self._settle_limits()
        request.write(rest)
        request.finish_response()

    def receive(self, data: bytes) -> None:
        """Receive the next bytes of the stream."""
        if self._first_error is not None:
            return  # only that error is sent: by its status, or as an event if a comment has been sent
        try:
            events = self._splitter.feed(data)
            if events:
                self._forward(events)
        except EventTooLongError as error:
            self._response.fail(BadResponse(self._response.server.name, str(error)))
        except UpstreamError as error:
            self._response.fail(error)

    def _forward(self, events: bytes) -> None:
        """Send a run of complete events to the client.

        Raises BadResponse for events that cannot be translated; none of them is sent. If the stream can be continued, raises UpstreamError
        for a failure of the server that it reports, after the events before it were sent.
        """
        received = events
        if self._lacks_line_feed:
            events, self._lacks_line_feed = events.removeprefix(b"\n"), False
        separate = split(events)
        left = sum(not event.isspace() for event in separate)  # blank lines after an event are not an event
        if not left:
            self._forward_blank(self._behind_waiting(events))
            return
        self._count_read(left)
        shown, first = [self._leading], left
        for event in separate:
            if event.isspace():
                shown.append(self._behind_waiting(event))
                continue
            try:
                shown.append(self._process(event, left))
            except UpstreamError:
                if self.record is not None:
                    assert self.gaps is not None
                    self.gaps.more -= left  # the client does not get these events
                    self._write(self._renamed(b"".join(shown)))
                raise
            if self.failure is not None and left == first and (self.events == first or not self._request.response_started):
                self._first_error, self.gaps, self.first_token = self.failure, None, None
                return
            left -= 1
        self._leading = b""
        self._last = received  # not before: a stream whose last events cannot be translated has not ended
        events = self._renamed(b"".join(shown))
        if self._request.reservation is not None and self._has_ended():
            self._settle_limits()
        self._write(events)

    def _forward_blank(self, lines: bytes) -> None:
        """Send blank lines. Before the first event they wait: it may be an error with its own status. Raises BadResponse."""
        if self._request.response_started:
            self._request.write(lines)
            return
        self._leading += lines
        if len(self._leading) > EVENT_LIMIT:
            raise BadResponse(self._response.server.name, "blank lines instead of an event")

    def _count_read(self, events: int) -> None:
        """Note the time of a read with these events. ``FastPath`` does the same for one (tests/gateway/proxy/test_fast_path.py)."""
        now = self._response.last_byte_at
        if self.gaps is None:
            self.first_token = now
            self.gaps = ReadGaps(now)
        else:
            self.gaps.mark(now)
        self.gaps.more += events - 1

    def _write(self, events: bytes) -> None:
        """Send events to the client. The first ones start the response."""
        request = self._request
        if request.response_started:
            request.write(events)
        elif events:
            assert self.gaps is not None
            lines = content_type(self._response) + b"cache-control: no-cache\r\n"
            request.start_response(self._response.status, lines, None, events, event_stream=True)
            write = request.chunk_writer()
            if write is not None and self._translation is None and self._name is None:
                held = self._splitter.held
                if isinstance(self.record, SentText):
                    write = TextRecorder(self.record, self._learner, write).write
                elif self.record is not None:
                    write = TokenRecorder(self.record, self._learner, request, self._running, write).write
                fast_path = FastPath(self._response, request, self.gaps, held, write, self._learner, self._running)
                self._response.divert(fast_path.reader)

    def _renamed(self, events: bytes) -> bytes:
        """Return events with the name of the model that the client knows."""
        return events if self._name is None else b"".join(renamed(event, self._name) for event in split(events))

    def _behind_waiting(self, blank: bytes) -> bytes:
        """Return blank lines that can be sent now. They stay after an event that waits."""
        if self._waiting is None:
            return blank
        self._waiting = self._waiting[0] + blank, self._waiting[1]
        return b""

    def _process(self, event: bytes, left: int) -> bytes:
        """Return what the client gets of the event that has waited, and of this event unless it waits.

        ``left``: how many events of the run are still to be processed, this one included.
        """
        data = data_of(event)
        document = _json(data) if data.startswith(b"{") else {}
        if not document and data.startswith(b"{"):
            document = _json(data.decode(errors="replace").encode())  # invalid characters in a text
        if self._waiting is None:
            return self._read(event, data, document, left)
        is_final = document.get("choices") == [] and isinstance(document.get("usage"), dict)
        return self._release(document if is_final else {}) + self._read(event, data, document, left)

    def _read(self, event: bytes, data: bytes, document: dict[str, Any], left: int) -> bytes:
        """Read the fields of an event that the gateway acts on, and return what the client gets of it. ``left``: as in ``_process``."""
        error = _error_in(document)
        if error is not None:
            self._check_lost(error)
            return self._server_error(error, self.events - left)
        if data and is_error(event):
            # The data has no known shape: it may be long, and may contain internals of the server.
            invalid = BadResponse(self._response.server.name, "an error event without a JSON error")
            return self._error_event(from_failure(invalid), invalid, self.events - left)
        fields = of_event(document, self._dialect)
        if fields.stopped:
            self._check_lost(None)
            self._note_aborted()
        received = event
        if self.record is not None and data not in (b"", b"[DONE]"):
            event = self.record.take(event, document)
            if not event:
                self._structure += 1
                return b""
        if fields.usage is not None and fields.is_final:
            self.usage = merged(self._prompt, fields.usage)
            if self._hides_usage and document.get("choices") == []:
                self._lacks_line_feed = event.endswith(b"\r")
                return event[: len(event) - len(event.lstrip(b"\n"))]  # an LF of the CRLF that ended the event before
        elif self._dialect in ITEMIZED:
            self._structure += events_without_tokens(document, self._block)
            self._block = opened_block(document) or self._block
            self._prompt = fields.usage or self._prompt
        elif self._hides_usage and ends_choice(document):
            self._waiting = event, document
            self._learner.forget()  # the next event must not overtake this one
            return b""
        return self._shown(event, document, received)

    def _check_lost(self, error: Mapping[str, Any] | None) -> None:
        """Raise UpstreamError for a failure that the server reports if the stream can be continued. ``error``: None if it was aborted."""
        if self.record is None or not self.record.has_begun:
            return
        server = self._response.server.name
        if error is None:
            raise Aborted(server, "its engine stopped the request")
        failure = server_failure(server, event_status(error), str(error.get("message")))
        if failure is not None:
            raise failure

    def _shown(self, event: bytes, document: dict[str, Any], received: bytes) -> bytes:
        """Return what the client gets of an event with a part of the response, and learn from it if it is ordinary.

        ``received``: the event as the server sent it.
        """
        if self._dialect not in ITEMIZED and (self._running is not None or document.get("usage") is not None):
            event = self._read_running(event, document)
        if is_ordinary(document, self._dialect) and (self._running is None or (self._running.is_simple and event != received)):
            if isinstance(self.record, TokenRecord):
                self._learner.learn_recorded(received, document, event)
            else:
                name = () if self.record is None else self.record.text_of(document)
                if name is not None:
                    self._learner.learn(received, document, event, name)
        if self._translation is not None and document:
            chunks = _translated(self._translation.chunk, document, self._response)
            return b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks)
        return event

    def _release(self, final: Mapping[str, Any]) -> bytes:
        """Return what the client gets of the event that has waited. ``final``: the final usage, if that is the next event.

        vLLM writes ``system_fingerprint`` on the last event of a choice; if usage is requested, only on the final usage, which the client
        does not get.
        """
        if self._waiting is None:
            return b""
        (event, document), self._waiting = self._waiting, None
        fingerprint, end, data = final.get("system_fingerprint"), event.rstrip(b"\r\n"), data_of(event)
        is_last_field = end.endswith(data) and data.endswith(b"}")  # no other line follows the data, which is one line
        if isinstance(fingerprint, str) and "system_fingerprint" not in document and is_last_field:
            document["system_fingerprint"] = fingerprint
            event = b'%b,"system_fingerprint":%b}%b' % (end[:-1], orjson.dumps(fingerprint), event[len(end) :])
        return self._shown(event, document, event)

    def _read_running(self, event: bytes, document: dict[str, Any]) -> bytes:
        """Read the running usage of an event. Returns what the client gets of the event."""
        if self._running is None:  # requested by the client, for a request that nothing charges
            self._running = RunningUsage(1, 1, hidden=False)
            self._learner.forget()  # from now on the counts of each event are read
        event = self._running.read(event, document)
        if self._running.hidden and document.get("choices"):
            document.pop("usage", None)  # a translation starts from the document
        return event

    def estimate_prompt(self) -> int | None:
        return self._upstream.estimate_prompt() if self.usage is None and self.gaps is not None else None

    @property
    def lacks_prompt(self) -> bool:
        return self._token_events > 0 and not self._has_count

    @property
    def is_empty(self) -> bool:
        return self._token_events == 0 and not self._has_count

    @property
    def _has_count(self) -> bool:
        """Whether the server has reported the tokens of the prompt."""
        return self.usage is not None or self._prompt is not None or (self._running is not None and self._running.usage is not None)

    def usage_tail(self) -> bytes:
        """Return the tokens that were sent so far as a usage tail; empty if they are not known."""
        if self._running is not None:
            return self._running.latest_tail()
        return b"" if self._prompt is None else usage_tail(replace(self._prompt, completion=self._token_events))

    @property
    def _token_events(self) -> int:
        return max(self.events - self._structure - EVENTS_BEFORE_TOKENS[self._dialect], 0)

    def _delivery(self, status: int) -> Delivery:
        events, running = self._token_events, None if self._running is None else self._running.usage
        if self._running is None or running is None:
            return Delivery(status, self.usage, None, self._prompt, events)
        if self._running.uncovered:
            return Delivery(status, self.usage, None, running, max(running.completion, events))
        return Delivery(status, self.usage, running)

    def _server_error(self, error: Mapping[str, Any], number: int) -> bytes:
        upstream, body = self._upstream, self._upstream.body
        document = body.sent_document() if len(body.content) <= MEDIUM else None  # parsing more would delay other clients
        failure = server_failure(self._response.server.name, event_status(error), str(error.get("message")))
        return self._error_event(from_event(error, upstream.name, body.input_field, document), failure, number)

    def _error_event(self, refusal: Refusal, failure: UpstreamError | None, number: int) -> bytes:
        """Note an error of the server, and return the event that the client gets for it. ``number``: of the event in its stream."""
        self.failure = refusal
        self._response.fault = failure
        if self._dialect in ITEMIZED:
            return render_event(refusal, dialect=self._dialect, number=number)
        return b"data: " + render(refusal) + b"\n\n"

    @property
    def delivered(self) -> bool:
        """Whether the stream's last event has been sent. Many clients disconnect then, before the end of the body."""
        return self._request.response_started and self._has_ended()

    def _has_ended(self) -> bool:
        return ends_stream(self._last, b"", self._dialect)


def _record_of(upstream: UpstreamRequest) -> TokenRecord | SentText | None:
    """Return a record for the stream of a request if it may be continued."""
    if upstream.plan is None:
        return None
    dialect, hold = upstream.request.target.route.dialect, upstream.request.body.hold
    return TokenRecord(dialect, hold, upstream.plan.overlap) if upstream.plan.path is Path.TOKEN_IDS else SentText(dialect, hold)


def choose_relay(response: UpstreamResponse, upstream: UpstreamRequest) -> BodyRelay | EventRelay:
    """Return the object that relays a successful response. Raises BadResponse."""
    request, translation = upstream.request, upstream.body.translation
    if b"content-encoding" in response.headers and response.headers[b"content-encoding"].lower() != b"identity":
        raise BadResponse(response.server.name, "its response has a content encoding that the gateway did not request")
    if is_stream(response):
        return EventRelay(response, upstream)
    if request.response_started:
        raise BadResponse(response.server.name, "its response is not a stream, and a stream has been started")
    if translation is not None:
        return TranslatedRelay(response, upstream, translation)
    if request.target.route.dialect is Dialect.PLAIN and is_binary(response):
        return EmbeddingsRelay(response, upstream)
    return BodyRelay(response, upstream)


def end_truncated(request: ClientRequest, refusal: Refusal, events: int) -> None:
    """End a response that has started and cannot be completed, by an error event or by cutting the connection.

    ``events``: the number of events of the stream that have been sent.
    """
    if request.is_event_stream:
        request.write(render_event(refusal, dialect=request.target.route.dialect, number=events))
        request.finish_response()
    else:
        request.abort()


def content_type(response: UpstreamResponse) -> bytes:
    """Return the header line of the server's content type."""
    return b"content-type: %b\r\n" % response.content_type


def is_stream(response: UpstreamResponse) -> bool:
    """Return whether the body is a stream of events. Raises BadResponse for a content type that is too long."""
    kind = response.content_type
    if kind == _JSON:
        return False
    if len(kind) > _LONGEST_TYPE:
        raise BadResponse(response.server.name, f"a content type of {len(kind)} bytes")
    return kind.lower().startswith(EVENT_STREAM)


async def read_error(response: UpstreamResponse) -> bytes:
    """Return the body of an error response, and note the failure of the server that it reports. Raises UpstreamError."""
    content = await response.read_body(_ERROR_BODY_LIMIT, _ERROR_BODY_TIMEOUT)
    response.fault = server_failure(response.server.name, response.status, content.decode("latin-1"))
    return content


def is_binary(response: UpstreamResponse) -> bool:
    """Return whether the body is binary."""
    return response.content_type.startswith(_BINARY)


def _length(response: UpstreamResponse) -> int | None:
    value = response.headers.get(b"content-length")
    return int(value) if value is not None and value.isdigit() else None


def connect(request: ClientRequest, response: UpstreamResponse, sink: Callable[[bytes], None] | None = None) -> None:
    """Let the response flow to the sink; without one, its reader takes the bytes.

    A client that reads slowly pauses its server, also if it fell behind earlier.
    """
    request.on_pause, request.on_resume = response.pause, response.resume
    if sink is not None:
        response.stream_to(sink)
    if request.write_paused:
        response.pause()


def _translated(translate: Callable[[dict[str, Any]], T], document: dict[str, Any], response: UpstreamResponse) -> T:
    """Translate a document. Raises BadResponse if it does not have the expected shape."""
    try:
        return translate(document)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise BadResponse(response.server.name, f"its response cannot be translated: {type(error).__name__}") from error


def _error_in(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the error in an event's data; None if the data is not an error. OpenAI's responses have its fields at the top level."""
    kind = document.get("type")
    error = document.get("error", document if kind == "error" else None)
    if kind not in (None, "error"):
        return None
    if isinstance(error, str) and error:
        return {"message": error}
    return error if isinstance(error, dict) else None


def _json(data: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}  # invalid JSON is relayed as it is
    return document if isinstance(document, dict) else {}
