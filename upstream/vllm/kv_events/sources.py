"""The sockets on which a server publishes KV cache events, from its ``GET /kv_event_sources``. Pure.

vLLM reports the endpoints of each data-parallel rank as it binds them, so ``tcp://*:5557`` stands for all interfaces of the engine's
machine. The rule: a socket is used only where the server itself is reached, or where its address names another host explicitly.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from upstream.http.address import Address

PATH = "/kv_event_sources"
_ANY_HOST = ("*", "0.0.0.0", "[::]", "::")  # noqa: S104  what the engine binds


@dataclass(frozen=True, slots=True)
class EventSource:
    """The sockets of one rank. ``replay_endpoint`` is None if the engine keeps no batches for a replay."""

    rank: int
    endpoint: str
    replay_endpoint: str | None
    topic: str


class _Entry(msgspec.Struct):
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""


def event_sources(body: bytes, address: Address) -> tuple[EventSource, ...]:
    """Return the sources of a server, one for each rank; none if it publishes no events.

    ``address``: where the server is reached. Raises ValueError for a response with another form, and for an endpoint that cannot be reached
    from another process.
    """
    try:
        entries = msgspec.json.decode(body, type=dict[int, _Entry], strict=False)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"GET {PATH}: {error}") from None
    return tuple(
        EventSource(rank, _reachable(each.endpoint, address), _optional(each.replay_endpoint, address), each.topic)
        for rank, each in sorted(entries.items())
        if each.publisher == "zmq" and each.endpoint
    )


def _optional(endpoint: str | None, address: Address) -> str | None:
    return _reachable(endpoint, address) if endpoint else None


def _reachable(endpoint: str, address: Address) -> str:
    """Return the endpoint to connect to for an endpoint that the engine has bound."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        return endpoint
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal():
        raise ValueError(f"its KV events are published on {endpoint}, which other processes cannot reach")
    if host not in _ANY_HOST:
        return endpoint
    own = "127.0.0.1" if address.uds else address.host
    return f"tcp://[{own}]:{port}" if ":" in own else f"tcp://{own}:{port}"
