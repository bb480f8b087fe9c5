"""The failures of a server, and whether the request can have run, on which a retry depends.

Every failure of the upstream side is one of these classes. ``untouched`` is True only if the server cannot have acted on any byte of the
request, so that a second attempt cannot run it twice. A client that disconnects is a cancellation, not a failure of a server.
"""

from __future__ import annotations


class UpstreamError(Exception):
    """A server did not send a complete response. ``server``: its name in the configuration.

    ``reason`` is a short constant for metric labels and logs. The text is for operators, not for clients, because it may contain addresses.
    """

    reason = "error"
    untouched = False

    def __init__(self, server: str, text: str) -> None:
        super().__init__(f"{server}: {text}")
        self.server = server


class ConnectFailed(UpstreamError):
    """No connection could be opened (refused, no route, TLS refused, no such socket): nothing was sent."""

    reason = "connect"
    untouched = True


class ConnectTimeout(ConnectFailed):
    """The server did not accept the connection in time: nothing was sent."""

    reason = "connect_timeout"


class StaleConnection(UpstreamError):
    """A reused connection was closed before the first byte of a response: the server's idle timeout came first.

    The server closes idle connections without reading further, so it did not act on the request (RFC 9112, section 9.3.1, allows the same
    conclusion for connections that close between requests).
    """

    reason = "stale"
    untouched = True


class Disconnected(UpstreamError):
    """The server closed or reset the connection before the end of its response."""

    reason = "disconnected"


class FirstByteTimeout(UpstreamError):
    """The request was sent, and no byte of a response arrived within the first-byte deadline."""

    reason = "first_byte_timeout"


class IdleTimeout(UpstreamError):
    """A response started and then paused for longer than the idle deadline."""

    reason = "idle_timeout"


class Unresponsive(UpstreamError):
    """A response was silent, and the server does not respond to its health checks or its engine hangs."""

    reason = "unresponsive"


class TotalTimeout(UpstreamError):
    """The whole exchange took longer than the total deadline."""

    reason = "total_timeout"


class BadResponse(UpstreamError):
    """The server sent an invalid HTTP/1.1 response, or one above the limits for headers and events."""

    reason = "bad_answer"


class EngineDead(UpstreamError):
    """The server reported that its engine is dead: every request to it would fail."""

    reason = "engine_dead"


class ServerError(UpstreamError):
    """The server responded with a status of 500 or more, or sent such an error in its stream."""

    reason = "server_error"


class Aborted(UpstreamError):
    """The server's engine aborted the request: the response is complete, with the finish reason ``abort``."""

    reason = "aborted"


class Moved(UpstreamError):
    """The gateway ended the response to continue it on another server. It does not count as a failure of the server."""

    reason = "moved"


class Preempted(UpstreamError):
    """The gateway closed the connection before the first byte of a response: a more urgent request needs the slot.

    The request is queued again. It does not count as a failure of the server.
    """

    reason = "preempted"


class LocalLimit(UpstreamError):
    """No connection could be opened because the gateway has no file descriptor, port or memory left.

    Nothing was sent, and another server would not help. It does not count as a failure of the server.
    """

    reason = "local_limit"
    untouched = True
