"""The addresses of clients, and the number of connections of each client.

A client's address is the address of its connection, or the address that a trusted proxy reports. The rule: X-Forwarded-For is believed only
if a trusted proxy sent it, and only from its right end, which the nearest proxy wrote. The entries left of the first untrusted address may
be forged. A connection of a trusted proxy carries many clients, so it is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_network

from gateway.system.addresses import parsed_address

_MAX_HOPS = 32  # addresses of X-Forwarded-For that are read, from its right end


class Proxies:
    """The networks whose X-Forwarded-For header is trusted."""

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks = tuple(map(ip_network, networks))

    def trusts(self, address: str) -> bool:
        """Return whether the address belongs to a trusted proxy."""
        parsed = parsed_address(address) if self._networks else None
        return parsed is not None and self._has(parsed)

    def client(self, address: str, forwarded: bytes) -> str:
        """Return the client of a request that a trusted proxy sent from ``address`` with this X-Forwarded-For."""
        client = address
        for hop in reversed(forwarded.decode("latin-1").rsplit(",", _MAX_HOPS)[-_MAX_HOPS:]):
            if (parsed := parsed_address(_without_port(hop.strip()))) is None:
                break
            client = str(parsed)
            if not self._has(parsed):
                break
        return client

    def _has(self, address: IPv4Address | IPv6Address) -> bool:
        return any(address in network for network in self._networks if network.version == address.version)


class ConnectionCounts:
    """The number of connections of each client."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._count.total()

    def add(self, client: str, most: int) -> bool:
        """Count a connection. Return False without counting it if the client already has ``most`` connections."""
        if self._count[client] >= most:
            return False
        self._count[client] += 1
        return True

    def remove(self, client: str) -> None:
        """Stop counting a connection."""
        self._count[client] -= 1
        if not self._count[client]:
            del self._count[client]


def shown_address(address: str) -> str:
    """Return an address in the form of the log. An IPv4 address that a dual-stack socket maps to IPv6 is shown as IPv4."""
    return str(parsed_address(address) or address)


def _without_port(hop: str) -> str:
    """Return the address of a hop. Some proxies append a port: ``192.0.2.1:80``, ``[2001:db8::1]:80``."""
    if hop.startswith("["):
        return hop[1:].partition("]")[0]
    return hop.partition(":")[0] if hop.count(":") == 1 else hop
