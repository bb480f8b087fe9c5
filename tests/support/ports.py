"""Ports without a server: a port that refuses, a port that accepts nothing, and a port that is reserved for a later server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def refusing() -> Iterator[int]:
    """Yield a port that refuses connections and that no other process gets meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@contextmanager
def reserved(host: str = "127.0.0.1") -> Iterator[int]:
    """Yield a reserved port for a server that binds with SO_REUSEADDR, as most servers do. No other process gets the port meanwhile."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
        yield held.getsockname()[1]


@contextmanager
def silent() -> Iterator[int]:
    """Yield a port whose accept queue is full: connecting to it hangs."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]
