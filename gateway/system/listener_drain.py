"""How a listening socket is taken out of service without cutting off who has connected already.

A client's connection is made by the kernel, before the gateway accepts it, and closing the socket resets those that still
wait to be accepted, with the requests that were sent on them; a load balancer may not send those again. The rule: first
nobody new is let in, then everybody who was is accepted, and only then the socket is closed.
"""

from __future__ import annotations

import ctypes
import select
import socket
import struct
from contextlib import suppress

HANDSHAKE = 0.1
"""Seconds after which those whose connections were being made are in the queue, or far away."""
_SO_ATTACH_FILTER = 26  # of asm-generic/socket.h, for which the socket module has no name
_INSTRUCTION = struct.Struct("HBBI")  # struct sock_filter of linux/filter.h
_PROGRAM = struct.Struct("HP")  # struct sock_fprog
_WITHOUT_SYN = b"".join(
    _INSTRUCTION.pack(*each)
    for each in (
        (0x30, 0, 0, 13),  # load the flags, byte 13 of a TCP header
        (0x54, 0, 0, 0x12),  # SYN and ACK alone
        (0x15, 0, 1, 0x02),  # a SYN that answers none:
        (0x06, 0, 0, 0),  # dropped
        (0x06, 0, 0, 0xFFFFFFFF),  # anything else: taken whole
    )
)
"""A classic BPF program that drops the packets that ask for a new connection. Who sent one sends it again after a second, and
is refused then, since nobody listens any more."""


def let_nobody_in(listener: socket.socket) -> None:
    """New connections are not made from now on, for whichever process listens; those that are, may still be accepted."""
    code = ctypes.create_string_buffer(_WITHOUT_SYN, len(_WITHOUT_SYN))
    count = len(_WITHOUT_SYN) // _INSTRUCTION.size
    with suppress(OSError):  # a sandbox without filters: closing is as abrupt there as it is
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM.pack(count, ctypes.addressof(code)))


def is_awaited(listener: socket.socket) -> bool:
    """Whether somebody waits to be accepted."""
    looking = select.poll()
    looking.register(listener, select.POLLIN)
    return bool(looking.poll(0))
