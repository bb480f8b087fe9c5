"""The messages between control and a worker, and their framing on the socket pair.

The rule: every message is a whole frame (a u32 length, little-endian, then MessagePack), of a bounded size and of one of the types below.
Any other input closes the link, and so does a peer that leaves too much unread. Both processes run the same version of the program, so a
frame carries no version number.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from gateway.snapshot.snapshot import Key, Snapshot
from upstream.balancing.server import Condition, Progress

MAX_FRAME = 256 * 1024 * 1024
READ_AHEAD = 1024 * 1024
"""Bytes that each end reads before a message is requested."""
_LENGTH = struct.Struct("<I")


class Health(msgspec.Struct, tag=True, frozen=True):
    """control → worker: the condition of each server by name, and the context length and task of each model by ID.

    ``expected`` gives, by model ID, when a model that is down may be up, in seconds of the monotonic clock. Requests do not wait for a
    model that is neither up nor in it. ``number`` grows with each message. ``max_inflight``: of each server whose limit follows its load.
    ``scale_out``: the servers that have vLLM's scale-out routes. ``loaded``: the models that servers have loaded, as they report them.
    """

    conditions: Mapping[str, Condition]
    max_model_len: Mapping[str, int]
    expected: Mapping[str, float] = {}
    number: int = 0
    tasks: Mapping[str, str] = {}
    max_inflight: Mapping[str, int] = {}
    scale_out: frozenset[str] = frozenset()
    loaded: Mapping[str, str] = {}


class ApplySnapshot(msgspec.Struct, tag=True, frozen=True):
    """control → worker: serve by this snapshot. ``health`` is in the same message, so that no request meets an unknown server."""

    snapshot: Snapshot
    health: Health


class StoredKeys(msgspec.Struct, tag=True, frozen=True):
    """control → worker: what has changed among the store's keys. A worker gets all of them before its first snapshot.

    ``removed`` are IDs. ``changed`` are keys to add or replace. ``is_reset``: all keys that were known before are removed first.
    ``is_unknown``: the store's keys are not known, so an unknown key may be a key of the store.
    """

    changed: tuple[Key, ...] = ()
    removed: tuple[str, ...] = ()
    is_reset: bool = False
    is_unknown: bool = False


class StopKeepAlive(msgspec.Struct, tag=True, frozen=True):
    """control → worker: continue to serve, but close each connection after its response, so that clients reconnect elsewhere."""


class Drain(msgspec.Struct, tag=True, frozen=True):
    """control → worker: accept no connections, finish open requests within ``seconds``, then exit."""

    seconds: float


class Ping(msgspec.Struct, tag=True, frozen=True):
    """control → worker: a liveness check. worker → control: the reply."""


class SnapshotApplied(msgspec.Struct, tag=True, frozen=True):
    """worker → control: the snapshot of this version is in use. No request starts with an older version."""

    version: int


class HealthApplied(msgspec.Struct, tag=True, frozen=True):
    """worker → control: the ``Health`` with this number is in use. No request is sent with an older state."""

    number: int


class ModelRequested(msgspec.Struct, tag=True, frozen=True):
    """worker → control: the time since which requests wait for a model, in seconds of the monotonic clock.

    None: no request waits any longer.
    """

    model: str
    since: float | None


class UnknownSigningKey(msgspec.Struct, tag=True, frozen=True):
    """worker → control: a token of this issuer is signed with a key that its known JWKS does not contain."""

    issuer: str


class StoreStatus(msgspec.Struct, tag=True, frozen=True):
    """worker → control: why the limits store is unreachable. None: it responds."""

    error: str | None


class ServerProgress(msgspec.Struct, tag=True, frozen=True):
    """worker → control: the progress of the servers whose responses are awaited, once a second; the times are of the monotonic clock."""

    servers: Mapping[str, Progress]


class UsageRequested(msgspec.Struct, tag=True, frozen=True):
    """worker → control: a key's request for its own usage. ``number`` identifies it in this worker; ``parameters`` are its query."""

    number: int
    key: str
    parameters: dict[str, str]


class UsageReported(msgspec.Struct, tag=True, frozen=True):
    """control → worker: the JSON for the request with this number; or the code of an error, its text, and the seconds to wait."""

    number: int
    body: bytes = b""
    error: str | None = None
    text: str = ""
    wait: float = 0.0


class PageRequested(msgspec.Struct, tag=True, frozen=True):
    """worker → control: a client's request for a route that control serves. ``number`` identifies it in this worker.

    ``headers`` are those that such a route reads. ``client`` is the client's address, as far as it is known.
    """

    number: int
    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    client: str | None


class PageResponded(msgspec.Struct, tag=True, frozen=True):
    """control → worker: the response to the request with this number."""

    number: int
    status: int
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""


class RevokedSessions(msgspec.Struct, tag=True, frozen=True):
    """control → worker: the IDs of all sessions that were revoked before they expired."""

    ids: tuple[str, ...]


class RejectedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request without a valid key. ``started`` is in seconds since the epoch; ``client`` is its address, as far as it is known."""

    id: str
    started: float
    endpoint: str
    status: int
    code: str
    detail: str | None
    client: str | None


class RejectedRequests(msgspec.Struct, tag=True, frozen=True):
    """worker → control: some of the requests without a valid key since the last such message. ``omitted`` is the number of the others."""

    requests: tuple[RejectedRequest, ...]
    omitted: int


class BlockChanges(msgspec.Struct, frozen=True, array_like=True):
    """Changes of the blocks that a server has cached. Keys are 64-bit numbers in the machine's byte order.

    ``cleared``: everything that was known before is forgotten first. ``block_size``: tokens of a block; 0 if nothing is known of the server
    any longer. ``complete``: every cached block is known.
    """

    server: str
    block_size: int
    complete: bool
    cleared: bool
    removed: bytes
    inserted: bytes


class CachedBlocks(msgspec.Struct, tag=True, frozen=True):
    """control → worker: what the KV cache events of servers have changed, in order."""

    changes: tuple[BlockChanges, ...]


class ChoiceExplained(msgspec.Struct, tag=True, frozen=True):
    """worker → control: why the policy ``cost`` chose the server of a request, at most once a second for each model.

    ``time`` is seconds since the epoch. ``explanation`` is the field ``balance`` of the access log.
    """

    model: str
    request_id: str
    server: str
    time: float
    explanation: Mapping[str, Any]


_FromControl = (
    ApplySnapshot | StoredKeys | Health | CachedBlocks | StopKeepAlive | Drain | Ping | UsageReported | PageResponded | RevokedSessions
)
_FromWorker = (
    ServerProgress
    | Ping
    | SnapshotApplied
    | HealthApplied
    | ModelRequested
    | UnknownSigningKey
    | StoreStatus
    | UsageRequested
    | PageRequested
    | ChoiceExplained
    | RejectedRequests
)
Message = _FromControl | _FromWorker
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class LinkBrokenError(Exception):
    """The received bytes are not a valid frame."""


def encode(message: Message) -> bytes:
    """Encode a message as a frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Link:
    """One end of the socket pair.

    ``max_unread`` is the number of sent bytes that the peer may leave unread. The next message then closes the link.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_unread: int = MAX_FRAME) -> None:
        self._reader = reader
        self._writer = writer
        self._max_unread = max_unread

    @property
    def ended(self) -> bool:
        """Whether the peer closed its end, and every message has been read."""
        return self._reader.at_eof() or self._reader.exception() is not None

    def send(self, message: Message) -> None:
        """Send a message in order, without waiting.

        A message to a closed link is dropped. A link whose peer does not read is closed.
        """
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > self._max_unread:
            self._writer.transport.abort()
        else:
            self._writer.write(encode(message))

    async def messages(self) -> AsyncIterator[Message]:
        """Yield every message until the peer closes its end. Raises LinkBrokenError for bytes that are not a frame."""
        while True:
            try:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                if length > MAX_FRAME:
                    raise LinkBrokenError(f"a frame of {length} bytes")
                body = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            try:
                yield _decoder.decode(body)
            except msgspec.MsgspecError as error:
                raise LinkBrokenError(str(error)) from error

    def close(self) -> None:
        """Close this end."""
        self._writer.close()
