"""Which client connections are closed when the process runs short of file descriptors.

The rule: only a connection that is idle and on which no request had a valid key is evicted, the oldest first, so unauthenticated clients
cannot keep others out. A connection that serves a request, or has served a request with a valid key, is never evicted. Some descriptors
stay in reserve, because a new client needs two: its own connection and perhaps one to a server.
"""

from __future__ import annotations

import logging
import os
import resource
from collections import OrderedDict
from contextlib import suppress
from typing import Protocol

_LEAST_IN_RESERVE, _MOST_IN_RESERVE = 32, 512  # connections that may be accepted before the first eviction has closed its descriptor
_SHARE_IN_RESERVE = 8  # between these bounds, an eighth of the descriptors that the process may have
_log = logging.getLogger("vllm_gateway.worker")


class Evictable(Protocol):
    """A client connection."""

    @property
    def has_valid_key(self) -> bool:
        """Whether the last inference request had a valid key."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is being served."""

    def evict(self) -> None:
        """Close the connection immediately."""


class Unauthenticated:
    """The connections on which no request with a valid key has been seen yet, the oldest first."""

    def __init__(self) -> None:
        self._connections: OrderedDict[Evictable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: Evictable) -> None:
        """Add a connection that has been accepted."""
        self._connections[connection] = None

    def remove(self, connection: Evictable) -> None:
        """Remove a connection that has ended."""
        self._connections.pop(connection, None)

    def relieve(self, descriptor: int | None = None) -> None:
        """Evict as many connections as there are descriptors missing from the reserve.

        ``descriptor``: a descriptor that was just opened. It has the lowest free number, which shows how many are in use. By default a
        descriptor is opened to find out.
        """
        for _ in range(_missing(_next_descriptor() if descriptor is None else descriptor)):
            if not self._evict_one():
                return
            _log.warning(
                "idle connections without a valid key are closed, because the process may have only %d file descriptors (ulimit -Hn)",
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )

    def _evict_one(self) -> bool:
        for _ in range(len(self._connections)):
            connection, _ = self._connections.popitem(last=False)
            if connection.has_valid_key:
                continue  # it is not a candidate any more
            if connection.is_idle:
                connection.evict()
                return True
            self._connections[connection] = None
        return False


def _missing(descriptor: int) -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 0
    reserve = min(max(limit // _SHARE_IN_RESERVE, _LEAST_IN_RESERVE), _MOST_IN_RESERVE, limit // 2)
    return descriptor + 1 + reserve - limit


def _next_descriptor() -> int:
    """Return the lowest free number, the highest number if none is free."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError):
        descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.close(descriptor)
        return descriptor
    return limit - 1
