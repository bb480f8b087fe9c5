"""Continue the stream of a lost server on another one, as if nothing had happened.

The rules: a stream is continued by the plan of its request only, at most ``MOST`` times, and within the total timeout of its first
response. The events of the other server go through the same ``EventRelay`` as the first ones, so the client, the limits and the ledger see
one response. If no server can continue the stream, the failure of the first server ends it, as without a plan.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from time import monotonic

from gateway.api.errors import Refusal, none_healthy
from gateway.continuation.chat import CHAT, DERENDER, GENERATE, RENDER, ContinuedChat, InvalidReplyError
from gateway.continuation.completion import ContinuedCompletion
from gateway.continuation.events import closing, usage_of
from gateway.continuation.regeneration import DifferentError, Regeneration
from gateway.continuation.sent_text import SentText
from gateway.continuation.token_record import TokenRecord
from gateway.proxy.context import RequestContext
from gateway.proxy.response import EVENT_LIMIT, EventRelay, connect, is_stream, read_error
from gateway.proxy.upstream_request import UpstreamRequest
from gateway.telemetry.request_record import Continuation
from upstream.balancing.attempt import Attempt, Compose, UpstreamResponse
from upstream.balancing.pool import NoServerError, Pool
from upstream.balancing.server import Server
from upstream.http.deadlines import Timeouts
from upstream.http.errors import Aborted, BadResponse, Moved, ServerError, UpstreamError
from upstream.http.sse import EventTooLongError, Splitter

MOST = 2
"""Failures after which one stream is continued: its server may be lost, and the next one too. Drains of servers do not count."""
SIDE_TIMEOUT = 5.0
"""Seconds for a response of ``render`` or ``derender``."""
PACE = 2.0
"""The pause between two calls of ``derender`` is so many times as long as a call: each call decodes the whole response again."""

_log = logging.getLogger("vllm_gateway.exchange")

Send = Callable[[Attempt, Compose], Awaitable[UpstreamResponse]]
"""Sends a request to a server of its model, or queues it until a server can take it. Raises NoServerError, UpstreamError and Refusal."""


def may_continue(error: BaseException, context: RequestContext) -> bool:
    """Return whether the stream of a request ended because its server was lost, and can be continued."""
    stream = context.response_relay
    return (
        isinstance(error, UpstreamError)
        and isinstance(stream, EventRelay)
        and stream.record is not None
        and context.request.response_started
        and not stream.delivered
    )


async def continue_stream(error: BaseException, upstream: UpstreamRequest, context: RequestContext, send: Send) -> None:
    """Relay the rest of a stream from another server. ``error``: how its server was lost; it is raised if no server can continue."""
    stream = context.response_relay
    assert isinstance(stream, EventRelay) and isinstance(error, UpstreamError)
    lost = error
    failures = 0
    while stream.record and stream.record.is_usable:
        failures += not isinstance(lost, Moved)
        if failures > MOST or _timeouts(upstream, context).total <= 0.0:
            break
        rest = _REST[type(stream.record)](lost, stream, upstream, context, send)
        try:
            next_lost = await rest.run()
        except (NoServerError, Refusal, InvalidReplyError) as failed:
            _log.warning("the stream of request %s cannot be continued: %s", context.request.id, failed)
            rest.note("failed")
            break
        except DifferentError:
            rest.note("different")
            break
        rest.note("continued" if next_lost is None or rest.gap is not None else "failed")
        if next_lost is None:
            return
        if stream.delivered:  # the server was lost after its last event
            context.request.finish_response()
            return
        lost = next_lost
    stream.end_truncated()
    raise error


def _timeouts(upstream: UpstreamRequest, context: RequestContext) -> Timeouts:
    """Return the timeouts of the rest of a stream: the time since its request was sent first is part of the total."""
    timeouts, attempt = upstream.model.model.timeouts, context.attempt
    assert attempt is not None and attempt.composed_at is not None
    return replace(timeouts, total=timeouts.total - (monotonic() - attempt.composed_at))


class _Rest:
    """The rest of a stream, from one more server."""

    def __init__(self, lost: UpstreamError, stream: EventRelay, upstream: UpstreamRequest, context: RequestContext, send: Send) -> None:
        assert upstream.plan is not None
        self._lost = lost
        self._stream = stream
        self._upstream = upstream
        self._plan = upstream.plan
        self._context = context
        self._send = send
        self._since = monotonic()
        self.gap: float | None = None
        """Seconds from the loss to the first event of the other server."""

    def note(self, outcome: str) -> None:
        """Note the continuation in the record of the request."""
        made_again, prompt = self._costs()
        self._context.continuations += (
            Continuation(
                server=self._lost.server,
                cause=self._lost.reason,
                path=self._plan.path,
                outcome=outcome,
                gap=self.gap,
                lost_tokens=made_again,
                prompt_tokens=prompt,
                sampled=self._plan.sampled,
                at=self._since - self._context.request.received_at,
            ),
        )

    async def run(self) -> UpstreamError | None:
        """Relay the rest. Returns the failure of the other server, and None at the end.

        Raises NoServerError, Refusal, InvalidReplyError and DifferentError.
        """
        context = self._context
        attempt = Attempt(self._pool, _timeouts(self._upstream, context), context.worker.deadlines, streams=True)
        assert context.attempt is not None
        attempt.replace(context.attempt)
        attempt.avoided = (*attempt.avoided, *(server for server in self._pool.servers if not self._can_serve(server)))
        try:
            with attempt:
                await self._serve(attempt)
        except UpstreamError as error:
            return error
        finally:
            if attempt.tried:
                context.attempt = attempt
        return None

    async def _serve(self, attempt: Attempt) -> None:
        raise NotImplementedError

    def _costs(self) -> tuple[int, int]:
        """Return the tokens that were made again, and those of the second prefill."""
        raise NotImplementedError

    @property
    def _pool(self) -> Pool:
        """The servers of the model, which may be others than when the request began."""
        model = self._upstream.model
        return self._context.worker.active.catalog.pool(model.model.base) or model.pool

    def _can_serve(self, server: Server) -> bool:
        """Return whether a server has the model of the stream, as far as that is known."""
        assert self._context.attempt is not None
        return server.serves_like(self._context.attempt.tried[-1])

    def _served(self, server: Server) -> str:
        return self._upstream.model.model.served or server.spec.model

    def _compose_for(self, compose: Compose, server: Server) -> tuple[bytes, bytes]:
        if not self._can_serve(server):
            raise none_healthy()
        return compose(server)

    @property
    def _limit(self) -> int:
        return EVENT_LIMIT + 2 * self._upstream.request.body.size

    async def _started(self, attempt: Attempt, compose: Compose) -> UpstreamResponse:
        """Send the request, and return its stream. Raises NoServerError, UpstreamError and Refusal."""
        response = await self._send(attempt, partial(self._compose_for, compose))
        if not 200 <= response.status < 300:
            await read_error(response)
            raise response.fault or ServerError(response.server.name, f"status {response.status} for a continued stream")
        if not is_stream(response):
            raise BadResponse(response.server.name, "its response to a continued stream is not a stream")
        response.keep_close()
        return response

    async def _continue_with(self, response: UpstreamResponse, feed: Callable[[bytes], bytes]) -> None:
        """Relay the other server's stream. ``feed`` returns what the client lacks of it. Raises UpstreamError and DifferentError."""
        different: list[DifferentError] = []
        try:
            await self._stream.continue_with(response, partial(self._pass_on, feed, response, different))
        except UpstreamError:
            if different:  # the connection was closed for it
                raise different[0] from None
            raise

    def _pass_on(self, feed: Callable[[bytes], bytes], response: UpstreamResponse, different: list[DifferentError], data: bytes) -> None:
        try:
            self._show(feed(data))
        except EventTooLongError as error:
            response.fail(BadResponse(response.server.name, str(error)))
        except DifferentError as error:
            different.append(error)
            response.truncate()

    def _show(self, events: bytes) -> None:
        if events:
            if self.gap is None:
                self.gap = monotonic() - self._since
            self._stream.receive(events)


class _FromTokens(_Rest):
    """The rest of a stream whose token IDs are known."""

    def __init__(self, lost: UpstreamError, stream: EventRelay, upstream: UpstreamRequest, context: RequestContext, send: Send) -> None:
        super().__init__(lost, stream, upstream, context, send)
        assert isinstance(stream.record, TokenRecord)
        self._record = stream.record
        self._document = upstream.body.sent_document() or {}
        self._made = self._resumed_after = len(self._record.ids)

    def _costs(self) -> tuple[int, int]:
        return self._made - self._resumed_after, self._record.prompt_size + self._resumed_after

    async def run(self) -> UpstreamError | None:
        if not self._record.has_begun:
            raise InvalidReplyError("no event was received, and the response was started without")
        if self._record.finish is not None:
            self._end()
            return None
        return await super().run()

    async def _serve(self, attempt: Attempt) -> None:
        if self._upstream.body.path == CHAT:
            await self._by_chat(attempt)
        else:
            await self._by_completion(attempt)

    def _end(self) -> None:
        """Send the end of a response that is complete: its server was lost before the usage or the last event."""
        record = self._record
        usage = None if record.usage_sent else usage_of(record.prompt_size, len(record.ids), self._reasoning)
        self._stream.take_over(self._stream.response)
        self._stream.receive(closing(record.head, usage))
        self._stream.finish()

    @property
    def _reasoning(self) -> int | None:
        return self._stream.reasoning_tokens if self._record.counts_reasoning else None

    # Completions

    async def _by_completion(self, attempt: Attempt) -> None:
        rest = ContinuedCompletion(self._record, self._document, self._limit, sampled=self._plan.sampled)
        self._resumed_after = self._record.shown
        response = await self._started(attempt, lambda server: self._upstream.compose(server, rest.body(self._served(server))))
        await self._continue_with(response, rest.feed)

    # Chats

    async def _by_chat(self, attempt: Attempt) -> None:
        running, flow = self._stream.has_running_usage, self._context.request.connection.flow
        reasoning, counted = self._reasoning, self._stream.completion_tokens
        rest = ContinuedChat(self._record, self._document, reasoning=reasoning, counted=counted, running=running, limit=self._limit)
        assert self._context.attempt is not None
        server = self._pool.other_server([*attempt.avoided])
        if server is None:
            raise NoServerError
        try:
            rendered = await self._post(server, RENDER, rest.render_body(self._served(server)))
        except UpstreamError:
            attempt.tried.append(server)  # the next continuation avoids it
            raise
        response = await self._started(
            attempt,
            lambda server: self._upstream.compose(server, rest.generate_body(rendered, self._served(server)), GENERATE),
        )
        assert attempt.server is not None
        stream, server = self._stream, attempt.server
        stream.take_over(response)
        connect(self._context.request, response)
        with response.movable():
            while True:
                await flow.drain()  # ``read_some`` would resume a server that waits for a slow client
                if rest.has_tokens:
                    called = monotonic()
                    self._show(rest.events(await self._post(server, DERENDER, rest.derender_body(self._served(server)))))
                    if rest.has_ended:
                        break
                    await asyncio.sleep(PACE * (monotonic() - called))
                elif not (data := await response.read_some()):
                    raise BadResponse(server.name, "ended its stream before the end of the response")
                else:
                    self._read(rest, data, server)
        stream.finish()

    def _read(self, rest: ContinuedChat, data: bytes, server: Server) -> None:
        """Read bytes of ``generate``. Raises UpstreamError."""
        try:
            rest.feed(data)
        except EventTooLongError as error:
            raise BadResponse(server.name, str(error)) from error
        if rest.failure is not None:
            raise ServerError(server.name, "an error in the stream of generate")
        if rest.finish == "abort":
            raise Aborted(server.name, "its engine stopped the request")

    async def _post(self, server: Server, path: str, body: bytes) -> bytes:
        """Send a side request. Raises UpstreamError, and InvalidReplyError for another status than 200."""
        status, content = await self._context.worker.continuations.post(server, path, body, SIDE_TIMEOUT)
        if status != 200:
            raise InvalidReplyError(f"{path}: status {status}")
        return content


class _Regenerated(_Rest):
    """The rest of a stream, from a second response to its request."""

    def __init__(self, lost: UpstreamError, stream: EventRelay, upstream: UpstreamRequest, context: RequestContext, send: Send) -> None:
        super().__init__(lost, stream, upstream, context, send)
        self._sent = context.tokens_so_far()

    def _costs(self) -> tuple[int, int]:
        return self._sent, self._stream.prompt_tokens

    async def _serve(self, attempt: Attempt) -> None:
        assert isinstance(self._stream.record, SentText)
        second = Regeneration(self._stream.record, self._upstream.request.target.route.dialect)
        splitter = Splitter(self._limit)
        response = await self._started(attempt, self._upstream.compose)
        await self._continue_with(response, lambda data: second.feed(splitter.feed(data)))


_REST: Mapping[type, type[_Rest]] = {TokenRecord: _FromTokens, SentText: _Regenerated}
"""How a stream is continued, by its record."""
