"""One generation: headers, tokens, events and the end, or the failure that the behavior specifies.

The rule: a client's disconnect ends the work immediately, in any state. It is reported by the connection, not polled.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import orjson
from starlette.types import Receive, Scope, Send

from upstream.simulator import errors
from upstream.simulator.engine.engine import Engine, Slot
from upstream.simulator.engine.job import Job
from upstream.simulator.engine.wire import Cut, Wire
from upstream.simulator.errors import ApiError
from upstream.simulator.journal import JournalEntry

EVENT_STREAM = "text/event-stream; charset=utf-8"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(slots=True)
class Generation:
    """A response in progress: an ASGI application for one request, which Starlette treats as a response."""

    engine: Engine
    job: Job
    entry: JournalEntry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._run(Wire(scope, send, self.job.behavior, self.entry)))
        disconnecting = asyncio.ensure_future(_disconnected(receive))
        disconnecting.add_done_callback(lambda _: work.cancel())
        try:
            await work
        except asyncio.CancelledError:
            if not disconnecting.done():
                raise
            self.entry.end("disconnected")
        except Cut:
            self.entry.end("cut")
            await disconnecting
        finally:
            disconnecting.cancel()

    async def _run(self, wire: Wire) -> None:
        try:
            with self.engine.slot(self.job.priority) as slot:
                await self._respond(slot, wire)
        except ApiError as refusal:
            await self._refuse(refusal, wire)
        self.engine.count_response()

    async def _respond(self, slot: Slot, wire: Wire) -> None:
        if self.job.behavior.hang_before_headers:
            await slot.wait(None)
        if self.job.stream:
            await self._stream(slot, wire)
        else:
            await self._whole(slot, wire)

    async def _stream(self, slot: Slot, wire: Wire) -> None:
        response = self.job.response
        await wire.head(200, EVENT_STREAM)
        try:
            for event in response.opening():
                await wire.event(event)
            self._check()
            async for emissions in self.engine.steps(slot, self.job.transcript.plan, self.job.behavior):
                self.job.transcript.add(emissions, slot)
                self._count(slot)
                for event in response.step(emissions):
                    await wire.event(event)
            for event in response.closing():
                await wire.event(event)
        except ApiError as refusal:
            slot.finish = "error"
            await self._fail(refusal, wire)
        await wire.end()
        self.entry.end("finished")

    async def _fail(self, refusal: ApiError, wire: Wire) -> None:
        events = self.job.response.failure(refusal)
        if events is None:
            wire.break_off()
        for event in events or ():
            await wire.event(event)

    async def _whole(self, slot: Slot, wire: Wire) -> None:
        self._check()
        async for emissions in self.engine.steps(slot, self.job.transcript.plan, self.job.behavior):
            self.job.transcript.add(emissions, slot)
            self._count(slot)
        body = orjson.dumps(self.job.response.body())
        await self._send(200, body, wire)
        self.entry.end("finished")

    def _check(self) -> None:
        """Raise the engine's error for the request, once it has started."""
        if self.job.behavior.error_first:
            raise errors.engine_dead()
        if self.job.refusal is not None:
            raise self.job.refusal

    def _count(self, slot: Slot) -> None:
        self.entry.prompt_tokens, self.entry.completion_tokens = slot.prompt_tokens, slot.made

    async def _refuse(self, refusal: ApiError, wire: Wire) -> None:
        await self._send(refusal.status, orjson.dumps(self.job.response.error_body(refusal)), wire)
        self.entry.end("refused")

    async def _send(self, status: int, body: bytes, wire: Wire) -> None:
        await wire.head(status, "application/json", len(body))
        await wire.event(body)
        await wire.end()
