"""Move the responses of servers that are drained, or that do not respond any more, to other servers of their model.

The rules: only responses that another server can continue (``Server.movable``) are ended, and only while another server of the same model
has a slot for them. All others stay and may finish. The responses of a drained server are moved over a few seconds, so that the other
servers do not get all of their prompts at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from upstream.balancing.server import Condition, Server
from upstream.http.errors import Moved, Unresponsive, UpstreamError

SPREAD = 4.0
"""Seconds over which the responses of a drained server are moved."""
SILENCE = 5.0
"""Seconds without a byte of any response after which the responses of a server that is down are moved."""


def move_responses(server: Server, others: Iterable[Server], now: float) -> None:
    """End the responses that are due to be continued on one of the other servers. Called about once a second."""
    error = _reason(server, now)
    if error is None or not server.movable:
        return
    usable = [other for other in others if other is not server and other.available and other.serves_like(server)]
    free = sum(other.limit - other.in_flight for other in usable)
    most, responses = len(server.movable), tuple(server.movable)
    if server.draining_since is not None:
        left = server.draining_since + server.move_after + SPREAD - now
        most = math.ceil(most / max(left, 1.0))
    for response in responses[: int(min(most, free))]:
        server.movable.discard(response)
        response.fail(error)


def _reason(server: Server, now: float) -> UpstreamError | None:
    if server.draining_since is not None:
        return Moved(server.name, "it is drained") if now - server.draining_since >= server.move_after else None
    silent = now - server.last_byte_at
    if server.condition is Condition.DOWN and silent >= SILENCE:
        return Unresponsive(server.name, f"it is down, and no byte has arrived for {silent:.0f} s")
    return None
