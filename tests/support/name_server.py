"""A name server that answers address queries (RFC 1035, RFC 3596) from a table, over UDP."""

from __future__ import annotations

import asyncio
import ipaddress
import struct
from typing import cast

_A, _AAAA = 1, 28
_NO_SUCH_NAME, _FAILURE = 3, 2


class NameServer(asyncio.DatagramProtocol):
    """A name server. ``table``: addresses by name. ``fails``: it responds with SERVFAIL; ``silent``: it does not respond."""

    def __init__(self) -> None:
        self.table: dict[str, list[str]] = {}
        self.fails = self.silent = False
        self.queries = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.queries += 1
        if not self.silent:
            self._transport.sendto(self._respond(data), addr)

    def _respond(self, question: bytes) -> bytes:
        name, end = _name(question, 12)
        (kind,) = struct.unpack_from("!H", question, end)
        found = [ipaddress.ip_address(text) for text in self.table.get(name, ())]
        records = [each.packed for each in found if {4: _A, 6: _AAAA}[each.version] == kind]
        status = _FAILURE if self.fails else 0 if name in self.table else _NO_SUCH_NAME
        header = question[:2] + struct.pack("!HHHHH", 0x8580 | status, 1, 0 if status else len(records), 0, 0)
        records_section = b"".join(struct.pack("!HHHIH", 0xC00C, kind, 1, 1, len(packed)) + packed for packed in records)
        return header + question[12 : end + 4] + (b"" if status else records_section)


def _name(message: bytes, at: int) -> tuple[str, int]:
    """Return the name that starts at this offset, and the offset of its end."""
    labels = []
    while length := message[at]:
        labels.append(message[at + 1 : at + 1 + length].decode().lower())
        at += 1 + length
    return ".".join(labels), at + 1
