"""The routes of the console's first page: the state with the last hour, the changes of the last day, and the state as events.

The rule: a response may last for hours, so its client is identified again before each event. A client whose token was revoked or whose
session has ended gets no further one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gateway.access.permissions import PERMISSIONS, is_permitted
from gateway.admin.audited import Handler, error_response, json_response

OVERVIEW = "/admin/v1/overview"
EVENTS, CHANGES = f"{OVERVIEW}/events", f"{OVERVIEW}/changes"
_NO_STORE = {"cache-control": "no-store"}


class Live(Protocol):
    """The state of the gateway, computed once for all readers."""

    def document(self) -> bytes:
        """Return the JSON of the state with the last hour."""

    async def changes(self) -> dict[str, Any]:
        """Return the changes of the last day, the newest first, or why they are unknown."""

    @property
    def is_full(self) -> bool:
        """Whether no more readers of the events are admitted."""

    def events(self, is_permitted: Callable[[], bool]) -> AsyncGenerator[bytes]:
        """Yield the state now and after each tick, as long as the reader is permitted to read it."""


def handlers(live: Live) -> dict[str, Handler]:
    """Return the handlers by path."""

    async def overview(_: Request) -> Response:
        return Response(live.document(), headers=_NO_STORE, media_type="application/json")

    async def changes(_: Request) -> Response:
        return json_response(await live.changes())

    async def events(request: Request) -> Response:
        if live.is_full:
            return error_response("too many pages follow this gateway; close one, or reload this page to see its present state", 503)
        identify = getattr(request.state, "identify", None)  # the admin socket has none: the kernel identifies its clients

        def may_read() -> bool:
            return identify is None or is_permitted(identify(), PERMISSIONS["GET", EVENTS])

        return StreamingResponse(live.events(may_read), headers=_NO_STORE, media_type="text/event-stream")

    return {OVERVIEW: overview, EVENTS: events, CHANGES: changes}
