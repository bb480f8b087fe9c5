"""Who a client is: the address of its connection, or what a trusted proxy says of it. And how many connections it has. And which
addresses other machines cannot reach.

The rule: X-Forwarded-For is believed only of a trusted proxy, and only from its right end: what stands there was written by
the nearest proxy, what stands left of the first address that is not trusted may have been written by anybody. A connection
of a trusted proxy carries many clients, so those are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

_MAX_HOPS = 32  # addresses of X-Forwarded-For that are read, from its right end
_IPV6_CLIENT = 64  # bits of an IPv6 address that one client cannot choose (RFC 6177)


def is_loopback(host: str) -> bool:
    """Whether an address that a port listens on is reached from this machine only."""
    address = _parsed(host)
    return host == "localhost" if address is None else address.is_loopback


class Proxies:
    """The networks whose X-Forwarded-For is believed."""

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks = tuple(map(ip_network, networks))

    def trusts(self, address: str) -> bool:
        """Whether a connection from there is a proxy's."""
        parsed = _parsed(address) if self._networks else None
        return parsed is not None and self._has(parsed)

    def client(self, address: str, forwarded: bytes) -> str:
        """The client of a request that a trusted proxy sent from ``address`` with this X-Forwarded-For."""
        client = address
        for hop in reversed(forwarded.decode("latin-1").rsplit(",", _MAX_HOPS)[-_MAX_HOPS:]):
            parsed = _parsed(_without_port(hop.strip()))
            if parsed is None:
                break
            client = str(parsed)
            if not self._has(parsed):
                break
        return client

    def _has(self, address: IPv4Address | IPv6Address) -> bool:
        return any(address in network for network in self._networks if network.version == address.version)


class Connections:
    """How many each client has, of those that are counted."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._count.total()

    def enter(self, client: str, most: int) -> bool:
        """Count one more; False, and it is not counted, where there are as many as may be."""
        if self._count[client] >= most:
            return False
        self._count[client] += 1
        return True

    def leave(self, client: str) -> None:
        """One that was counted has ended."""
        self._count[client] -= 1
        if not self._count[client]:
            del self._count[client]


def counted_as(address: str) -> str:
    """What connections of one client have in common: the address, or the network of an IPv6 one."""
    parsed = _parsed(address)
    if isinstance(parsed, IPv6Address):
        return str(ip_network((int(parsed), _IPV6_CLIENT), strict=False))
    return address


def shown(address: str) -> str:
    """An address as it is written in the log: an IPv4 one as such, also on a socket for both kinds."""
    return str(_parsed(address) or address)


def _parsed(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def _without_port(hop: str) -> str:
    """Some proxies write a port behind it: ``192.0.2.1:80``, ``[2001:db8::1]:80``."""
    if hop.startswith("["):
        return hop[1:].partition("]")[0]
    return hop.partition(":")[0] if hop.count(":") == 1 else hop
