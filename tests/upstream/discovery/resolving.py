"""A program for ``test_dns``: in a separate network namespace, with a name server on port 53, it has a name watched by the system's
resolver.

Each line of its output is what was seen, or what went wrong, as JSON; each line of its input is what the name server is to do next.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from tests.support.name_server import NameServer
from upstream.discovery.dns import DnsName, system_resolver, watch
from upstream.discovery.endpoints import Observation


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


async def main(name: str) -> None:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 53))
    source = DnsName(name, 8000, 0.05)
    watching: asyncio.Task[None] | None = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        for attribute, value in json.loads(line).items():
            setattr(server, attribute, value)
        watching = watching or asyncio.create_task(watch(source, system_resolver, seen, lambda message: say(trouble=message)))
    if watching is not None:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    transport.close()


def seen(seen: Observation) -> None:
    say(seen=[each.url for each in seen.endpoints])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
