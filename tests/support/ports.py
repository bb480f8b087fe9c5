"""Ports that no server serves: one that refuses, one that lets everybody wait, and one that is kept for a server to come."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def refusing() -> Iterator[int]:
    """A port that refuses connections, and that nobody else is given meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@contextmanager
def reserved(host: str = "127.0.0.1") -> Iterator[int]:
    """A port for a server that binds it as most do, with SO_REUSEADDR: both may have it bound, and nobody else is given it meanwhile."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
        yield held.getsockname()[1]


@contextmanager
def silent() -> Iterator[int]:
    """A port whose queue of connections is full: connecting to it hangs."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]
