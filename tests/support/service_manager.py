"""A substitute for a service manager: a socket that receives the gateway's notifications and their senders.

The rule: a thread reads the socket all the time, as a service manager does. The kernel holds ten notifications of a socket, and the
gateway does not wait until there is space for another.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.process import wait_for

_CREDENTIALS = struct.Struct("3i")
Notification = dict[str, str]


class Inbox:
    """The received notifications in order. ``senders``: the process IDs of their senders."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._notifications: list[Notification] = []
        self._lock = threading.Lock()
        self.senders: set[int] = set()

    @property
    def address(self) -> str:
        """The value for NOTIFY_SOCKET."""
        name = self._line.getsockname()
        return "@" + name[1:].decode() if isinstance(name, bytes) else str(name)

    @property
    def notifications(self) -> list[Notification]:
        """All notifications that were sent until now."""
        with self._lock:
            self._receive()
            return list(self._notifications)

    def forget(self) -> None:
        """Delete the notifications that were sent until now."""
        with self._lock:
            self._receive()
            self._notifications.clear()

    def receive_until(self, stop: int) -> None:
        """Receive notifications until the descriptor ``stop`` is readable."""
        while stop not in select.select([self._line.fileno(), stop], [], [])[0]:
            with self._lock:
                self._receive()

    def _receive(self) -> None:
        while True:
            try:
                data, ancillary, _, _ = self._line.recvmsg(65_536, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return
            self.senders.add(_CREDENTIALS.unpack(ancillary[0][2])[0])
            self._notifications.append(dict(line.split("=", 1) for line in data.decode().splitlines()))

    def has(self, name: str, value: str | None = None) -> bool:
        """Return whether this notification was received."""
        return any(name in each and value in (None, each[name]) for each in self.notifications)

    def wait_for(self, name: str, value: str | None = None, seconds: float = 60.0) -> None:
        wait_for(lambda: self.has(name, value), seconds, why=lambda: str(self.notifications))

    def order(self, *names: str) -> list[str]:
        """Return the order in which these fields were received, without immediate repetitions."""
        found = [name for each in self.notifications for name in names if name in each]
        return [name for number, name in enumerate(found) if not number or found[number - 1] != name]


@contextmanager
def service_manager(address: str) -> Iterator[Inbox]:
    """Listen on a path or on an abstract name that starts with ``@``. For ``@`` alone the kernel chooses the name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        line.bind("" if address == "@" else address)
        line.setblocking(False)
        inbox, stop = Inbox(line), os.eventfd(0)
        receiver = threading.Thread(target=inbox.receive_until, args=(stop,))
        receiver.start()
        try:
            yield inbox
        finally:
            os.eventfd_write(stop, 1)
            receiver.join()
            os.close(stop)
