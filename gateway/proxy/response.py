"""An answer on its way from the server to the client: its bytes as they are, observed as they pass.

The rules: a 2xx answer's bytes are the server's, with three exceptions: the usage event that the client did not
ask for is left out, an error is put into the contract's shape, and an error is added when the server breaks
off. (A model with ``rewrite_model`` has a fourth: its name.) The 200 is committed with the first bytes; an error as
the first event becomes a real status. Nothing is buffered but the event that is not whole yet.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, TypeVar

import orjson

from gateway.api.errors import Refusal, from_failure, render, render_event
from gateway.api.model_name import Renaming, renamed
from gateway.api.response_fields import MARKS, Fields, Marks, Observer, of_body, of_document, of_event
from gateway.api.routes import Dialect, Route
from gateway.api.translation import Translation
from gateway.api.usage import Usage, merged
from gateway.api.vllm_errors import event_status, fault, from_event
from gateway.client.request import ClientRequest
from gateway.limits.estimate import Outcome
from gateway.proxy.fast_path import lane
from gateway.telemetry.metrics import ReadGaps
from upstream.balancing.attempt import Answer
from upstream.http.errors import Aborted, BadAnswer, Disconnected, UpstreamError
from upstream.http.sse import EventTooLongError, Splitter, data_of, is_error, split

T = TypeVar("T")

EVENT_LIMIT = 1024 * 1024
"""Bytes that an unfinished event may have, beside twice the request that it may echo."""

TRANSLATED_LIMIT = 64 * 1024 * 1024
"""Bytes of an answer that is translated as a whole."""

_READ_ON = 64 * 1024 * 1024  # bytes of an answer that is read to its end though its client has left
_HURRY = 5.0  # seconds that may take
_PAUSE = 0.03  # seconds in which more of it comes, or it has got stuck

EVENT_STREAM, _JSON = b"text/event-stream", b"application/json"
_LONGEST_TYPE = 1024  # bytes of a content type, parameters included
_BYTES, _METADATA = b"application/octet-stream", b"metadata"

_LAST_EVENT: Mapping[Dialect, tuple[bytes, ...]] = MappingProxyType(
    {
        Dialect.CHAT: (b"data: [DONE]",),
        Dialect.COMPLETIONS: (b"data: [DONE]",),
        Dialect.RESPONSES: (b"event: response.completed", b"event: response.incomplete", b"event: response.failed", b"event: error"),
        Dialect.MESSAGES: (b"event: message_stop", b"event: error"),
        Dialect.COHERE: (),  # which is not streamed
        Dialect.PLAIN: (b"data: [DONE]",),  # of audio, which alone is streamed there
    }
)
"""How a stream's last event begins: a stream that ends without it was broken off."""


class Passing:
    """What the relay saw pass: the base of both relays. Times are the loop's."""

    usage: Usage | None = None
    first_byte: float | None = None
    first_token: float | None = None
    gaps: ReadGaps | None = None
    failure: Refusal | None = None
    """An error that the server put into the answer itself."""
    aborted = False
    """The engine was stopped: vLLM ends such answers as if they were whole."""
    uncounted = False
    """The answer has no place for a count."""
    _call: ClientRequest
    _answer: Answer

    @property
    def events(self) -> int:
        """How many events of a stream passed."""
        return 0 if self.gaps is None else self.gaps.events

    @property
    def uncounted_events(self) -> int:
        """As ``events``; 0 where the server's usage covers all of them."""
        return 0 if self.gaps is None or self.gaps.are_counted else self.gaps.events

    def _settle(self) -> None:
        """The end of the answer is about to go out: whoever has it may ask again at once, and is to find its limits as they are."""
        if (permit := self._call.permit) is not None:
            incomplete = "upstream" if self.aborted or self.failure is not None else None
            permit.settle(Outcome(True, self._answer.status, self.usage, self.uncounted_events, incomplete, self.uncounted))

    @property
    def delivered(self) -> bool:
        """The client has been given the whole of it, though the server has not ended its body yet."""
        return False

    def _note_stopped(self) -> None:
        """The server's engine stopped the request."""
        self.aborted = True
        self._answer.fault = Aborted(self._answer.server.name, "its engine stopped the request")


class BodyRelay(Passing):
    """An answer that is not a stream of events: JSON, text, audio. ``name``: what it is to call its model."""

    def __init__(self, call: ClientRequest, answer: Answer, name: str | None = None) -> None:
        self._call = call
        self._answer = answer
        kind = answer.content_type
        self._is_json = kind == _JSON or kind.lower().startswith(_JSON)  # else it may be text that contains the words of a document
        self._name = name if self._is_json else None

    async def run(self) -> None:
        """Relay to the end. Raises UpstreamError when the server breaks off."""
        call, answer = self._call, self._answer
        self.first_byte = answer.last_byte
        if answer.complete:
            body = answer.pending[0] if len(answer.pending) == 1 else b"".join(answer.pending)
            if self._is_json:
                fields = of_body(body, call.target.route.dialect)
                self.usage = fields.usage
                if fields.stopped:
                    self._note_stopped()
            if self._name is not None:
                body = renamed(body, self._name)
            self._settle()
            call.respond(answer.status, content_type(answer), body)
        else:
            self._observer = Observer(call.target.route.dialect)
            if self._name is None:
                await self._flow(content_type(answer), _length(answer), self._pass)
            else:
                await self._flow(content_type(answer), None, self._renaming(self._name))

    async def _flow(self, lines: bytes, length: int | None, sink: Callable[[bytes], None]) -> None:
        """Relay as it comes, behind a head with these lines. Raises UpstreamError."""
        self._call.start_response(self._answer.status, lines, length)
        _couple(self._call, self._answer, sink)
        try:
            await self._ended()
        finally:
            self._note_observed()
        self._settle()
        self._call.finish_response()

    async def _ended(self) -> None:
        """Wait for the end. Raises UpstreamError.

        A server has generated all of an answer whose length it tells, and its usage stands at the end: when the client leaves before
        that, the rest is read for it.
        """
        try:
            await self._answer.ended()
        except asyncio.CancelledError:
            length = _length(self._answer)
            if self._call.disconnected and length is not None and length <= _READ_ON:
                self._answer.hurry(_PAUSE, _HURRY)
                with suppress(UpstreamError):
                    await self._answer.ended()
            raise

    def _pass(self, data: bytes) -> None:
        self._observe(data)
        self._call.write(data)

    def _renaming(self, name: str) -> Callable[[bytes], None]:
        renaming = Renaming(name)

        def passed(data: bytes) -> None:
            self._observe(data)
            self._call.write(renaming.feed(data))

        return passed

    def _observe(self, data: bytes) -> None:
        if self._is_json:
            self._observer.feed(data)
        if self._answer.complete:
            self._note_observed()
            self._settle()

    def _note_observed(self) -> None:
        self._note(self._observer.fields)

    def _note(self, fields: Fields) -> None:
        self.usage = fields.usage
        if fields.stopped:
            self._note_stopped()


class BytesRelay(BodyRelay):
    """Vectors in bytes (``encoding_format: bytes``): what the server tells of them, its count too, is in a header, unless the client
    wants none of that (``bytes_only``). It is there that they have a model's ``name``."""

    def __init__(self, call: ClientRequest, answer: Answer, name: str | None = None) -> None:
        super().__init__(call, answer)
        self._told_name = name

    async def run(self) -> None:
        """Relay to the end. Raises UpstreamError when the server breaks off."""
        answer = self._answer
        self.first_byte = answer.last_byte
        told, lines = answer.headers.get(_METADATA), content_type(answer)
        if told is not None:
            self.usage = of_body(told, Dialect.PLAIN).usage
            lines += b"%b: %b\r\n" % (_METADATA, told if self._told_name is None else renamed(told, self._told_name))
        self.uncounted = self.usage is None
        await self._flow(lines, _length(answer), self._pass)

    def _pass(self, data: bytes) -> None:
        if self._answer.complete:
            self._settle()
        self._call.write(data)

    def _note_observed(self) -> None:
        """Its fields are in the header."""


class TranslatedRelay(BodyRelay):
    """A JSON answer that is put into other words, for which the whole of it is needed."""

    def __init__(self, call: ClientRequest, answer: Answer, translation: Translation, name: str | None = None) -> None:
        super().__init__(call, answer, name)
        self._translation = translation

    async def run(self) -> None:
        """Give the client the translated answer. Raises UpstreamError when the server breaks off or gives no JSON."""
        call, answer = self._call, self._answer
        self.first_byte = answer.last_byte
        body = await answer.collect(TRANSLATED_LIMIT)
        document = _json(body)
        if not document:
            raise BadAnswer(answer.server.name, "its answer is not the JSON that was expected")
        self._note(of_document(document, call.target.route.dialect))
        if self._name is not None:
            document["model"] = self._name
        translated = _translated(self._translation.answer, document, answer)
        self._settle()
        call.respond(answer.status, content_type(answer), orjson.dumps(translated))


class EventRelay(Passing):
    """A stream of server-sent events. ``model`` is the client's word for the model; ``name``: what the answer is to call it;
    ``document``: the body that the server got, by which its errors are explained."""

    def __init__(
        self,
        call: ClientRequest,
        answer: Answer,
        *,
        model: str,
        input_field: str,
        hides_usage: bool,
        translation: Translation | None = None,
        name: str | None = None,
        document: Mapping[str, Any] | None = None,
    ) -> None:
        self._call = call
        self._answer = answer
        self._document = document
        self._route: Route = call.target.route
        self._marks = MARKS[self._route.dialect]
        self._counts_others = False  # usages that are of one choice among several have come
        self._model = model
        self._input_field = input_field
        self._hides_usage = hides_usage
        self._translation = translation
        self._name = name
        self._splitter = Splitter(EVENT_LIMIT + 2 * call.body.size)
        self._last = b""
        self._refusal: Refusal | None = None  # an error as the first event, which is still to be told

    async def run(self) -> None:
        """Relay to the end.

        Raises UpstreamError when the server breaks off, and the Refusal of an error that is the first event,
        while nothing has been sent yet.
        """
        call, answer = self._call, self._answer
        self.first_byte = answer.last_byte
        answer.keep_close()
        _couple(call, answer, self._pass)
        await answer.ended()
        if self._refusal is not None:
            raise self._refusal
        self._finish()

    def _pass(self, data: bytes) -> None:
        if self._refusal is not None:
            return  # only that is still to be told: by a status, or as an event where a comment has gone out meanwhile
        try:
            whole = self._splitter.feed(data)
            if whole:
                self._relay(whole)
        except EventTooLongError as error:
            self._answer.fail(BadAnswer(self._answer.server.name, str(error)))
        except BadAnswer as error:
            self._answer.fail(error)

    def _relay(self, whole: bytes) -> None:
        """Give the client a run of whole events. Raises BadAnswer for what cannot be translated, of which nothing has gone out."""
        now = self._answer.last_byte
        if self.gaps is None:
            self.first_token = now
            self.gaps = ReadGaps(now)
        else:
            self.gaps.mark(now)
        count = whole.count(b"\n\n") or whole.count(b"\n\r\n")
        if count > 1:
            self.gaps.more += count - 1
        came = whole
        if self._translation is not None or _has_any(whole, self._marks):
            events = split(whole)
            first = self._seen(events[0], len(events))
            if self.failure is not None and not self._call.response_started:
                self._refusal, self.gaps, self.first_token = self.failure, None, None
                return
            whole = first + b"".join(self._seen(event, len(events) - place) for place, event in enumerate(events[1:], 1))
        if not came.isspace():  # blank lines behind the last event are none
            self._last = came
        if self._name is not None:
            whole = b"".join(renamed(event, self._name) for event in split(whole))
        if self._call.permit is not None and self._has_ended():
            self._settle()
        if not self._call.response_started:
            self._call.start_response(
                self._answer.status, content_type(self._answer) + b"cache-control: no-cache\r\n", None, whole, event_stream=True
            )
            if self._translation is None and self._name is None:
                self._open_lane(self.gaps)
        else:
            self._call.write(whole)

    def _open_lane(self, gaps: ReadGaps) -> None:
        """From here on ordinary chunks go the short way."""
        write = self._call.chunk_writer()
        if write is not None:
            self._answer.divert(functools.partial(lane, self._answer, self._call, gaps, self._splitter.held, write, self._marks))

    def _seen(self, event: bytes, left: int) -> bytes:
        """An event that may have fields that the gateway acts on: what the client gets of it. ``left``: how many of the run are still to
        be seen, this one included."""
        data = data_of(event)
        document = _json(data) if data.startswith(b"{") else {}
        error = _error_in(document)
        if error is not None:
            return self._error(error, self.events - left)
        if data and is_error(event):
            return self._unreadable_error(self.events - left)
        fields = of_event(document, self._route.dialect)
        if fields.usage is not None:
            self._count(fields, self.events - left + 1)
        if fields.stopped:
            self._note_stopped()
        if fields.usage is not None and self._hides_usage and document.get("choices") == []:
            return event[: len(event) - len(event.lstrip(b"\n"))]  # an LF before it is the rest of the CRLF that ended the one before
        if self._translation is not None and document:
            chunks = _translated(self._translation.chunk, document, self._answer)
            return b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks)
        return event

    def _count(self, fields: Fields, events: int) -> None:
        """Note a usage, and how many events it covers: the later ones have no tokens where it is final."""
        self.usage = merged(self.usage, fields.usage)
        self._counts_others = self._counts_others or not (fields.is_sole or fields.is_final)
        if self.gaps is not None and (fields.is_final or not self._counts_others):
            self.gaps.counted = math.inf if fields.is_final else events

    def _error(self, error: Mapping[str, Any], number: int) -> bytes:
        fault_of_server = fault(self._answer.server.name, event_status(error), str(error.get("message")))
        return self._failed(from_event(error, self._model, self._input_field, self._document), fault_of_server, number)

    def _unreadable_error(self, number: int) -> bytes:
        """An error whose data is not of any known shape: it may be long, and say what no client is to know."""
        bad = BadAnswer(self._answer.server.name, "an error event without a JSON error")
        return self._failed(from_failure(bad), bad, number)

    def _failed(self, refusal: Refusal, fault_of_server: UpstreamError | None, number: int) -> bytes:
        """The contract's event for an error of the server's."""
        self.failure = refusal
        self._answer.fault = fault_of_server
        if self._route.dialect in (Dialect.RESPONSES, Dialect.MESSAGES):
            return render_event(refusal, dialect=self._route.dialect, number=number)
        return b"data: " + render(refusal) + b"\n\n"

    @property
    def delivered(self) -> bool:
        """The stream's own end has gone out: many clients leave there and do not wait for that of the body."""
        return self._call.response_started and self._has_ended()

    def _has_ended(self) -> bool:
        last = _LAST_EVENT[self._route.dialect]
        return any(self._last.find(mark) >= 0 for mark in last) and _is_last(last, self._last, b"")

    def _finish(self) -> None:
        """The server ended its stream. Raises Disconnected if it did so before the stream's own end."""
        rest = self._splitter.take()
        if not _is_last(_LAST_EVENT[self._route.dialect], self._last, rest):
            raise Disconnected(self._answer.server.name, "ended its stream before its last event")
        self._settle()
        self._call.write(rest)
        self._call.finish_response()


def _has_any(events: bytes, marks: Marks) -> bool:
    """Whether these events may have fields that the gateway acts on.

    ``find``, because ``in`` takes bytes for a number first, and makes and drops an exception for each that is none; written
    out, because a loop over the marks costs more than the searches.
    """
    usage, error, stopped, escaped = marks
    return events.find(usage) >= 0 or events.find(error) >= 0 or events.find(stopped) >= 0 or events.find(escaped) >= 0


def _is_last(last: tuple[bytes, ...], events: bytes, rest: bytes) -> bool:
    """Did the stream end as streams of its kind do? Behind its last event the blank line may be missing, its last CRLF's LF be late, and
    more blank lines follow."""
    rest = rest.strip()
    return rest in last if rest else any(event.lstrip(b"\r\n").startswith(last) for event in split(events.rstrip(b"\r\n"))[-1:])


def break_off(call: ClientRequest, refusal: Refusal, passed: int) -> None:
    """End an answer that has begun and can't be completed: with an error event in a stream, of which so many have ``passed``, by
    cutting it otherwise."""
    if call.is_event_stream:
        call.write(render_event(refusal, dialect=call.target.route.dialect, number=passed))
        call.finish_response()
    else:
        call.abort()


def content_type(answer: Answer) -> bytes:
    """The header line of the server's content type, without anything that could end the line early."""
    return b"content-type: %b\r\n" % answer.content_type


def is_stream(answer: Answer) -> bool:
    """Is the body a stream of events? Raises BadAnswer for a content type that is too long to be one."""
    kind = answer.content_type
    if kind == _JSON:
        return False
    if len(kind) > _LONGEST_TYPE:
        raise BadAnswer(answer.server.name, f"a content type of {len(kind)} bytes")
    return kind.lower().startswith(EVENT_STREAM)


def is_bytes(answer: Answer) -> bool:
    """Is the body no text?"""
    return answer.content_type.startswith(_BYTES)


def _length(answer: Answer) -> int | None:
    value = answer.headers.get(b"content-length")
    return int(value) if value is not None and value.isdigit() else None


def _couple(call: ClientRequest, answer: Answer, sink: Callable[[bytes], None]) -> None:
    """Let the answer flow; a client that reads slowly slows its server down, also one that had fallen behind before."""
    call.on_pause, call.on_resume = answer.pause, answer.resume
    answer.flow_to(sink)
    if call.write_paused:
        answer.pause()


def _translated(translate: Callable[[dict[str, Any]], T], document: dict[str, Any], answer: Answer) -> T:
    """Raises BadAnswer for a document that has not the shape of its kind."""
    try:
        return translate(document)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise BadAnswer(answer.server.name, f"its answer cannot be translated: {type(error).__name__}") from error


def _error_in(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The error that an event's data is; None for other data. OpenAI's responses have its fields at the top."""
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
        return {}  # not ours to judge: it passes as it is
    return document if isinstance(document, dict) else {}
