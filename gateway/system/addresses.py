"""IP addresses as values: parsed once, with the IPv4 address of a mapped IPv6 address. Pure."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

_IPV6_CLIENT = 64  # bits of an IPv6 address that one client cannot choose (RFC 6177)


def parsed_address(text: str) -> IPv4Address | IPv6Address | None:
    """Return an address, None for other text."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def counted_client(address: str) -> str:
    """Return the key under which one client is counted: its address, or the network of an IPv6 address."""
    parsed = parsed_address(address)
    return str(ip_network((int(parsed), _IPV6_CLIENT), strict=False)) if isinstance(parsed, IPv6Address) else address


def is_loopback(host: str) -> bool:
    """Return whether a port that listens on this address is reachable from this machine only."""
    address = parsed_address(host)
    return host == "localhost" if address is None else address.is_loopback
