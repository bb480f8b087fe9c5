"""Write comments to a silent stream, so that proxies between the gateway and its client keep the connection open.

All readers of server-sent events skip comment lines (WHATWG HTML, section 9.2.6). The rules: a comment is written between complete
events only, and the gateway never pauses inside an event. The first comment starts the response with status 200, so a later error is sent
in the stream. One clock checks all streams, so sending an event needs no timer.
"""

from __future__ import annotations

from gateway.client.request import ClientRequest
from upstream.http.deadlines import Deadlines

COMMENT = b": keep-alive\n\n"
_HEAD = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"


class Keepalive:
    """Watches one stream until ``end``. ``every``: seconds of silence before a comment."""

    __slots__ = ("_call", "_deadlines", "_every", "_seen", "_since")

    def __init__(self, call: ClientRequest, every: float, deadlines: Deadlines) -> None:
        self._call = call
        self._every = every
        self._deadlines = deadlines
        self._seen = call.bytes_out
        self._since = call.received_at
        deadlines.watch(self)

    def end(self) -> None:
        self._deadlines.forget(self)

    def check(self, now: float) -> None:
        """Write a comment if nothing has been written for long enough."""
        call = self._call
        if call.bytes_out != self._seen:
            self._seen, self._since = call.bytes_out, now
        elif now - self._since >= self._every and not (call.response_complete or call.disconnected or call.write_paused):
            if not call.response_started:
                call.start_response(200, _HEAD, None, COMMENT, event_stream=True)
            elif call.is_event_stream:
                call.write(COMMENT)
            self._seen, self._since = call.bytes_out, now
