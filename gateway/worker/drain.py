"""Drain a worker: it accepts no new connections, lets requests finish, and exits.

The rule: a connection that the kernel has accepted is served once, and a request is cancelled only when the drain timeout has expired.
"""

from __future__ import annotations

import asyncio
import socket

from gateway.system.acceptor import Acceptor
from gateway.system.listener_drain import HANDSHAKE, has_backlog
from gateway.system.tasks import wait_at_most, wait_until
from gateway.worker.worker import Worker

AnyAcceptor = asyncio.Server | Acceptor
"""Accepts connections until it is closed."""
_FIRST_REQUEST = 1.0  # seconds for the request of a client that has just connected
_CANCEL_TIMEOUT = 2.0  # seconds in which cancelled requests may count their prompt and send their error at the end of a drain
_CLOSE_TIMEOUT = 1.0  # seconds in which clients may close their connections after that
_PAUSE = 0.02  # seconds between two checks, because nothing reports the end of a connection or a request


async def drain(worker: Worker, acceptor: AnyAcceptor | None, listener: socket.socket, seconds: float) -> None:
    """Accept no new connections, let requests finish within ``seconds``, and cancel the others."""
    requests = worker.requests
    requests.mirrors.close()
    requests.queues.close()
    requests.limiter.stop_leases()
    await _stop_accepting(worker, acceptor, listener)
    connections, handlers = worker.connections.connections, worker.connections.handlers
    await wait_at_most(seconds, wait_until(lambda: not handlers, _PAUSE))
    requests.draining = True
    for handler in tuple(handlers):
        handler.cancel()
    await wait_at_most(_CANCEL_TIMEOUT, wait_until(lambda: not handlers, _PAUSE))
    await wait_at_most(_CLOSE_TIMEOUT, wait_until(lambda: not connections, _PAUSE))


async def _stop_accepting(worker: Worker, acceptor: AnyAcceptor | None, listener: socket.socket) -> None:
    """Serve one request on each accepted connection that has sent no request yet; close the idle connections."""
    connections, is_tls = worker.connections.connections, worker.certificate is not None
    worker.connections.keep_alive = False
    await asyncio.sleep(HANDSHAKE)
    await wait_at_most(_FIRST_REQUEST, wait_until(lambda: not has_backlog(listener), _PAUSE))
    if acceptor is not None:
        acceptor.close()
    # With TLS, a connection in its handshake is not among the connections yet.
    has_sent = wait_until(lambda: not is_tls and not any(each.is_awaited for each in connections), _PAUSE)
    await wait_at_most(_FIRST_REQUEST, has_sent)
    for connection in tuple(connections):
        connection.shutdown()
