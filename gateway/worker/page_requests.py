"""Pass on the requests for the sign-in and for self-service to control, and check the sessions of people.

The rules: control gets only the headers that its routes read, and a body of bounded size. A session is checked here, without control.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from gateway.api.errors import Refusal
from gateway.sign_in.paths import MAX_FORM
from gateway.sign_in.sessions import Sessions
from gateway.snapshot.link import Message, PageRequested, PageResponded
from gateway.snapshot.snapshot import SessionRules
from gateway.worker.query_requests import ControlRequests

_PASSED_ON = frozenset({b"host", b"cookie", b"origin", b"sec-fetch-site", b"content-type", b"idempotency-key"})
_FULL = "Too many people are using the gateway's pages. Try again in a moment."
_UNAVAILABLE = "The gateway's pages are not available at the moment."


class PageRequests(ControlRequests[PageResponded]):
    """The requests that wait for control."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        super().__init__(send)
        self._revoked: tuple[str, ...] | None = None
        self._sessions: tuple[SessionRules, Sessions] | None = None

    async def respond(self, request: Request, client: str | None) -> Response:
        """Return control's response to a request. ``client`` is the address of the client. Raises Refusal."""
        body = await request.body()
        if len(body) > MAX_FORM:
            raise Refusal("request_too_large", f"The body is larger than {MAX_FORM} bytes.")
        scope = request.scope
        headers = tuple((name, value) for name, value in scope["headers"] if name in _PASSED_ON)

        def send(number: int) -> None:
            path, query = scope["path"], scope["query_string"]
            self._send(PageRequested(number, request.method, path, query, headers, body, client))

        responded = await self.request(send, full=_FULL, unavailable=_UNAVAILABLE)
        response = Response(responded.body, responded.status)
        response.raw_headers = list(responded.headers)
        return response

    def revoke(self, ids: tuple[str, ...]) -> None:
        """Refuse these sessions from now on, and no others."""
        self._revoked, self._sessions = ids, None

    def sessions(self, rules: SessionRules) -> Sessions:
        """Return the check of sessions by the rules of the snapshot."""
        if self._sessions is None or self._sessions[0] is not rules:
            self._sessions = rules, Sessions(rules, "data", self._revoked)
        return self._sessions[1]
