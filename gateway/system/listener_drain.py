"""Taking a listening socket out of service without resetting clients that have already connected.

The kernel completes a client's connection before the gateway accepts it. Closing the socket resets the connections in its backlog, with the
requests that were sent on them, and a load balancer may not send those again. The rule: first the kernel stops new connections, then the
backlog is accepted, and only then the socket is closed.
"""

from __future__ import annotations

import ctypes
import select
import socket
import struct
from contextlib import suppress

HANDSHAKE = 0.1
"""Seconds after which handshakes that had begun are in the backlog, or the client is far away."""
_SO_ATTACH_FILTER = 26  # from asm-generic/socket.h; the socket module has no name for it
_INSTRUCTION = struct.Struct("HBBI")  # struct sock_filter of linux/filter.h
_PROGRAM = struct.Struct("HP")  # struct sock_fprog
_WITHOUT_SYN = b"".join(
    _INSTRUCTION.pack(*each)
    for each in (
        (0x30, 0, 0, 13),  # load the flags, byte 13 of a TCP header
        (0x54, 0, 0, 0x12),  # keep SYN and ACK
        (0x15, 0, 1, 0x02),  # a SYN without ACK:
        (0x06, 0, 0, 0),  # drop it
        (0x06, 0, 0, 0xFFFFFFFF),  # anything else: accept the whole packet
    )
)
"""A classic BPF program that drops packets which open a connection. Clients retry after a second, and are then refused because the socket
is closed."""


def refuse_new_connections(listener: socket.socket) -> None:
    """Drop new connection attempts, in all processes that share the socket. Completed ones can still be accepted."""
    code = ctypes.create_string_buffer(_WITHOUT_SYN, len(_WITHOUT_SYN))
    count = len(_WITHOUT_SYN) // _INSTRUCTION.size
    with suppress(OSError):  # in a sandbox without filters, closing the socket resets its backlog
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM.pack(count, ctypes.addressof(code)))


def has_backlog(listener: socket.socket) -> bool:
    """Return whether a connection waits to be accepted."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    return bool(poll.poll(0))
