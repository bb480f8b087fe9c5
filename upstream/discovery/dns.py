"""DNS: a name that resolves to the addresses of all its servers, resolved periodically.

The rule: a failed lookup, for any reason, leaves the last endpoints. A removed name cannot be distinguished from a name that the name
server has lost, and removed servers fail their probes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from upstream.daemon_thread import run_in_daemon_thread
from upstream.discovery.endpoints import Endpoint, Observation

Resolve: TypeAlias = Callable[[str], Awaitable[list[str]]]
"""Returns the addresses of a name, of both families, in any order. Raises OSError, and UnicodeError for an invalid name."""
RETRY = 2.0
"""Seconds until a failed lookup is repeated, if that is earlier than the next one."""


@dataclass(frozen=True, slots=True)
class DnsName:
    """A name, the port of its servers, and the seconds between two lookups."""

    name: str
    port: int
    interval: float

    def __str__(self) -> str:
        return f"dns {self.name}:{self.port}"


async def watch(source: DnsName, resolve: Resolve, on_endpoints: Callable[[Observation], None], on_failure: Callable[[str], None]) -> None:
    """Report endpoints and failures until cancelled."""
    while True:
        try:
            addresses = await resolve(source.name)
        except (OSError, UnicodeError) as error:
            on_failure(f"{source.name}: {getattr(error, 'strerror', None) or error}")
            await asyncio.sleep(min(RETRY, source.interval))
            continue
        on_endpoints(Observation(tuple(sorted({Endpoint(address, source.port) for address in addresses}))))
        await asyncio.sleep(source.interval)


async def system_resolver(name: str) -> list[str]:
    """Resolve a name with the system's resolver (``/etc/hosts``, search domains). Raises OSError and UnicodeError.

    If the name servers do not respond, the resolver waits half a minute; other lookups and the exit of the process do not wait for it.
    """
    entries = await run_in_daemon_thread(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), f"resolve {name}")
    return [str(entry[4][0]) for entry in entries]
