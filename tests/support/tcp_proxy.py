"""A TCP proxy between a gateway and its database, whose network can be cut and healed."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_POLL = 0.05  # seconds after which a cut is noticed
_BLOCK = 65536


class TcpProxy:
    """Forwards each connection to ``target``. While it is cut, connections are accepted and no byte passes, in either direction."""

    def __init__(self, target: int) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._passing, self._stopping = threading.Event(), threading.Event()
        self._passing.set()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        """Stop forwarding. Connections stay open, as after a broken cable."""
        self._passing.clear()

    def heal(self) -> None:
        """Forward again, also what arrived meanwhile."""
        self._passing.set()

    def close(self) -> None:
        """Close everything."""
        self._stopping.set()
        self._passing.set()
        for each in self._threads:
            each.join()
        self._listener.close()

    def _accept(self) -> None:
        self._listener.settimeout(_POLL)
        while not self._stopping.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            self._threads.append(threading.Thread(target=self._serve, args=(client,)))
            self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            client.setblocking(True)
            self._passing.wait()
            try:
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                return  # the client sees a closed connection
            with server, selectors.DefaultSelector() as ready:
                for one, other in ((client, server), (server, client)):
                    ready.register(one, selectors.EVENT_READ, other)
                try:
                    self._forward(ready)
                except OSError:
                    pass  # either side has closed

    def _forward(self, ready: selectors.BaseSelector) -> None:
        while not self._stopping.is_set():
            for key, _ in ready.select(_POLL):
                assert isinstance(key.fileobj, socket.socket)
                self._passing.wait()
                data = key.fileobj.recv(_BLOCK)
                if not data:
                    return
                key.data.sendall(data)


@contextmanager
def tcp_proxy(target: int) -> Iterator[TcpProxy]:
    """Run a proxy to a local port for the block."""
    made = TcpProxy(target)
    try:
        yield made
    finally:
        made.close()
