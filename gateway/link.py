"""What control and a worker say to each other, and how it is framed on their socket pair.

The rule: every message is a whole frame (a u32 length, little-endian, then MessagePack), of a bounded size and
of one of the kinds below; anything else ends the link, as does an end that leaves too much unread. The two processes are
one program of one version, so a frame carries no version.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping

import msgspec

from gateway.state import Snapshot
from upstream.server import Condition

MAX_FRAME = 256 * 1024 * 1024
AHEAD = 1024 * 1024
"""Bytes that each end reads ahead of what is asked of it."""
_LENGTH = struct.Struct("<I")


class Health(msgspec.Struct, tag=True, frozen=True):
    """control → worker: what is known of servers by name, and of models' context lengths and tasks by id.

    ``expected``: by id, when a model that is not up may be, in seconds of the monotonic clock; one that is neither up nor
    among these is not worth waiting for. ``number`` grows with each message.
    """

    conditions: Mapping[str, Condition]
    max_model_len: Mapping[str, int]
    expected: Mapping[str, float] = {}
    number: int = 0
    tasks: Mapping[str, str] = {}


class Configure(msgspec.Struct, tag=True, frozen=True):
    """control → worker: serve this snapshot from now on; ``health`` comes with it, so that no request finds its servers unknown."""

    snapshot: Snapshot
    health: Health


class Leave(msgspec.Struct, tag=True, frozen=True):
    """control → worker: serve on, and tell clients to come again on other connections."""


class Drain(msgspec.Struct, tag=True, frozen=True):
    """control → worker: take no new connections, let what runs finish within ``seconds``, then exit."""

    seconds: float


class Ping(msgspec.Struct, tag=True, frozen=True):
    """control → worker: say that you are there. worker → control: the same word back."""


class Taken(msgspec.Struct, tag=True, frozen=True):
    """worker → control: this version of the snapshot is served, and no request starts by an older one."""

    version: int


class Learned(msgspec.Struct, tag=True, frozen=True):
    """worker → control: the ``Health`` of this number holds, and no request is sent by an older one."""

    number: int


class Asked(msgspec.Struct, tag=True, frozen=True):
    """worker → control: since when requests wait for a model here, in seconds of the monotonic clock; None: none does any more."""

    model: str
    since: float | None


class Unknown(msgspec.Struct, tag=True, frozen=True):
    """worker → control: a token of this issuer came that is signed by a key that is not known here."""

    issuer: str


class StoreState(msgspec.Struct, tag=True, frozen=True):
    """worker → control: why the limits' store is away; None: it responds."""

    error: str | None


Message = Configure | Health | Leave | Drain | Ping | Taken | Learned | Asked | Unknown | StoreState
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class LinkBrokenError(Exception):
    """What came is no frame of this link."""


def encode(message: Message) -> bytes:
    """A message as a frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Link:
    """One end of the socket pair. ``most_unread``: bytes that may wait for the other one to read, when more is to be sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most_unread: int = MAX_FRAME) -> None:
        self._reader = reader
        self._writer = writer
        self._most_unread = most_unread

    @property
    def ended(self) -> bool:
        """The other end is gone, and has nothing more to say."""
        return self._reader.at_eof() or self._reader.exception() is not None

    def send(self, message: Message) -> None:
        """Send in order, without waiting; a link whose other end is gone swallows it, and one whose other end does not read is ended."""
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > self._most_unread:
            self._writer.transport.abort()
        else:
            self._writer.write(encode(message))

    async def messages(self) -> AsyncIterator[Message]:
        """Every message until the other end is gone. Raises LinkBrokenError for bytes that are no frame."""
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
        self._writer.close()
