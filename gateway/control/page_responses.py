"""Respond to the requests that workers pass on, with an ASGI application that runs in control.

The rules: a worker never waits for a database, so control runs these routes. The number of requests that run at once is limited, and beyond
the limit a client gets an error and nothing runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Scope

from gateway.api.errors import Refusal, internal_error, render
from gateway.self_service.paths import PREFIX
from gateway.snapshot.link import PageRequested, PageResponded
from gateway.system.tasks import cancel, start_task

_MAX_RUNNING = 64  # requests
_BUSY = Refusal("overloaded", "Too many people are using the gateway's pages. Try again in a moment.")
_log = logging.getLogger("vllm_gateway.control")

Reply = Callable[[PageResponded], None]


class PageResponses:
    """Runs the requests. Without an ``application`` workers send none."""

    def __init__(self) -> None:
        self.application: ASGIApp | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def request(self, message: PageRequested, reply: Reply) -> None:
        """Run a request, and reply to its worker when it has finished."""
        if self.application is None or len(self._tasks) >= _MAX_RUNNING:
            reply(_failed(message, _BUSY))
        else:
            start_task(self._run(self.application, message, reply), self._tasks, "page")

    async def _run(self, application: ASGIApp, message: PageRequested, reply: Reply) -> None:
        response = _failed(message, internal_error())
        try:
            response = await run(application, message)
        except Exception:  # noqa: BLE001  the outer edge: the client must get a response
            _log.exception("a page could not be made")
        reply(response)

    async def aclose(self) -> None:
        """End all requests."""
        await cancel(*self._tasks)


def _failed(message: PageRequested, error: Refusal) -> PageResponded:
    """Return an error: JSON for programs, text for people."""
    body, kind = (render(error), "application/json") if message.path.startswith(PREFIX) else (f"{error}\n".encode(), "text/plain")
    headers = {"content-type": kind, "cache-control": "no-store", **error.headers}
    sent = tuple((name.encode(), value.encode()) for name, value in headers.items())
    return PageResponded(message.number, error.spec.status, sent, body)


async def run(application: ASGIApp, message: PageRequested) -> PageResponded:
    """Run one request with an ASGI application (ASGI 3.0), and return the response."""
    sent: list[Message] = []
    received = [{"type": "http.request", "body": message.body, "more_body": False}]

    async def receive() -> Message:
        return received.pop() if received else {"type": "http.disconnect"}

    async def send(part: Message) -> None:
        sent.append(part)

    await application(_scope(message), receive, send)
    start, *parts = sent
    body = b"".join(part.get("body", b"") for part in parts)
    return PageResponded(message.number, start["status"], tuple((name, value) for name, value in start["headers"]), body)


def _scope(message: PageRequested) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "server": None,
        "client": None if message.client is None else (message.client, 0),
        "scheme": "http",
        "method": message.method,
        "root_path": "",
        "path": message.path,
        "raw_path": message.path.encode(),
        "query_string": message.query,
        "headers": list(message.headers),
        "state": {},
    }
