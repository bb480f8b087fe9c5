"""DNS: a name that resolves to the addresses of all its servers, looked up again and again.

The rule: a look-up that fails, for whatever reason, leaves what was found before. A name that has gone cannot be told from one
whose name server has lost it, and servers that are gone fail their probes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from upstream.discovery.endpoints import Endpoint, Observation

Resolve: TypeAlias = Callable[[str], Awaitable[list[str]]]
"""From a name to its addresses of both families, in any order. Raises OSError, and UnicodeError for what is no name."""
RETRY = 2.0
"""Seconds until a look-up that failed is tried again, where that is sooner than the next one."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DnsName:
    """A name, the port of its servers, and the seconds between two look-ups."""

    name: str
    port: int
    interval: float

    def __str__(self) -> str:
        return f"dns {self.name}:{self.port}"


async def watch(source: DnsName, resolve: Resolve, on_seen: Callable[[Observation], None], on_trouble: Callable[[str], None]) -> None:
    """Tell what is found, and what goes wrong, until cancelled."""
    while True:
        try:
            addresses = await resolve(source.name)
        except (OSError, UnicodeError) as error:
            on_trouble(f"{source.name}: {getattr(error, 'strerror', None) or error}")
            await asyncio.sleep(min(RETRY, source.interval))
            continue
        on_seen(Observation(tuple(sorted({Endpoint(address, source.port) for address in addresses}))))
        await asyncio.sleep(source.interval)


async def system_resolver(name: str) -> list[str]:
    """By the system's resolver, with all that it is configured for (``/etc/hosts``, search domains). Raises OSError and UnicodeError.

    In a thread that nobody waits for: a resolver whose name servers are silent takes half a minute, for which neither other
    look-ups nor the end of the process should have to wait.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[str]] = loop.create_future()

    def conclude(result: list[str] | Exception) -> None:
        if found.done():
            return
        if isinstance(result, Exception):
            found.set_exception(result)
        else:
            found.set_result(result)

    def look_up() -> None:
        result: list[str] | Exception
        try:
            result = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError) as error:
            result = error
        try:
            loop.call_soon_threadsafe(conclude, result)
        except RuntimeError:
            _log.debug("%s was resolved when nobody wanted it any more", name)  # the loop has been closed

    threading.Thread(target=look_up, name=f"resolve {name}", daemon=True).start()
    return await found
