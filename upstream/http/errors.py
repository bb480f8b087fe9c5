"""What can go wrong with a server, and the one fact a retry depends on: can the request have run?

Every failure of the upstream side is one of these classes. ``untouched`` is True only where no byte of the
request can have been acted upon, so that sending it again, elsewhere or here, cannot run it twice. A client
that leaves is not in this list: its going is a cancellation, never a failure of a server.
"""

from __future__ import annotations


class UpstreamError(Exception):
    """A server did not give a whole answer. ``server`` is the name it has in the configuration.

    ``reason`` is a short constant for metric labels and logs; the text is for operators and never for
    clients, since it may name addresses.
    """

    reason = "error"
    untouched = False

    def __init__(self, server: str, text: str) -> None:
        super().__init__(f"{server}: {text}")
        self.server = server


class ConnectFailed(UpstreamError):
    """No connection could be made (refused, no route, TLS refused, no such socket): nothing was sent."""

    reason = "connect"
    untouched = True


class ConnectTimeout(ConnectFailed):
    """The server did not accept the connection in time: nothing was sent."""

    reason = "connect_timeout"


class StaleConnection(UpstreamError):
    """A reused connection was closed before the first byte of an answer: the server's idle limit won the race.

    The server closes idle connections without reading on, so the request was not acted upon (the same
    judgment as RFC 9112, section 9.3.1, allows for connections that close between requests).
    """

    reason = "stale"
    untouched = True


class Disconnected(UpstreamError):
    """The server closed or reset the connection before the end of its answer."""

    reason = "disconnected"


class FirstByteTimeout(UpstreamError):
    """The request was sent and no byte of an answer came within the first-byte deadline."""

    reason = "first_byte_timeout"


class IdleTimeout(UpstreamError):
    """An answer began and then fell silent for longer than the idle deadline."""

    reason = "idle_timeout"


class TotalTimeout(UpstreamError):
    """The whole exchange outlasted the total deadline."""

    reason = "total_timeout"


class BadAnswer(UpstreamError):
    """What the server sent is no HTTP/1.1 answer, or is larger than the bounds for heads and events."""

    reason = "bad_answer"


class EngineDead(UpstreamError):
    """The server answered that its engine is dead: whatever it is asked, it can only fail."""

    reason = "engine_dead"


class ServerError(UpstreamError):
    """The server answered with a status of 500 or more, or with such an error in its stream."""

    reason = "server_error"


class Aborted(UpstreamError):
    """The server's engine stopped the request: its answer ends as if it were whole, with ``abort`` as the reason."""

    reason = "aborted"


class LocalLimit(UpstreamError):
    """No connection could be made because the gateway itself has no file descriptor, port or memory left for one.

    Nothing was sent, and another server would not help. It is nothing that the server did.
    """

    reason = "local_limit"
    untouched = True
