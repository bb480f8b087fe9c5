"""Drain a worker: it accepts no new connections, lets requests finish, and exits.

The rule: a connection that the kernel has accepted is served once, and a request is cancelled only when the drain timeout has expired.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from gateway.system.listener_drain import HANDSHAKE, has_backlog
from gateway.worker.worker import Worker

_FIRST_REQUEST = 1.0  # seconds for the request of a client that has just connected
_CANCEL_TIMEOUT = 2.0  # seconds in which cancelled requests may count their prompt and send their error at the end of a drain
_CLOSE_TIMEOUT = 1.0  # seconds in which clients may close their connections after that


class Closable(Protocol):
    """Something that accepts connections until it is closed."""

    def close(self) -> None:
        """Accept no more connections."""


async def drain(worker: Worker, acceptor: Closable | None, listener: socket.socket, seconds: float) -> None:
    """Accept no new connections, let requests finish within ``seconds``, and cancel the others."""
    requests = worker.requests
    requests.mirrors.close()
    requests.queues.close()
    requests.limiter.stop_leases()
    await _stop_accepting(worker, acceptor, listener)
    connections, handlers = worker.connections.connections, worker.connections.handlers
    await _wait_until(lambda: not handlers, seconds)
    requests.draining = True
    for handler in tuple(handlers):
        handler.cancel()
    await _wait_until(lambda: not handlers, _CANCEL_TIMEOUT)
    await _wait_until(lambda: not connections, _CLOSE_TIMEOUT)


async def _stop_accepting(worker: Worker, acceptor: Closable | None, listener: socket.socket) -> None:
    """Serve one request on each accepted connection that has sent no request yet; close the idle connections."""
    connections, is_tls = worker.connections.connections, worker.certificate is not None
    worker.connections.keep_alive = False
    await asyncio.sleep(HANDSHAKE)
    await _wait_until(lambda: not has_backlog(listener), _FIRST_REQUEST)
    if acceptor is not None:
        acceptor.close()
    # With TLS, a connection in its handshake is not among the connections yet.
    await _wait_until(lambda: not is_tls and not any(each.is_awaited for each in connections), _FIRST_REQUEST)
    for connection in tuple(connections):
        connection.shutdown()


async def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until a condition holds, for ``seconds`` at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110  nothing reports the end of a connection or a request
                await asyncio.sleep(0.02)
