"""A row of the ledger on its way from a worker to the database, and how rows are framed in memory and on disk.

The rules: a row says everything that the database will hold, so whoever has it needs no configuration; fields are only ever
added at the end, with a default, because a spool may have been written by an older version; a frame carries a checksum,
so whatever is torn or not yet whole is seen.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec

HEAD = struct.Struct("<II")
"""Before each row: its length in bytes and its CRC-32."""

_MOST = 2**63 - 1  # what a column of whole numbers holds

LOST = "lost"
"""``incomplete`` of a request whose worker died under it."""


class UsageRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request of a known key. Durations are in seconds, ``started`` since the epoch; None is what is not known.

    ``incomplete`` is as in ``Record``, or LOST. The tokens are the server's count; ``chunks`` is how many events of a stream came
    after its first, for one that broke off or told no count.
    ``price`` is per million prompt and completion tokens, as it was when its model was chosen.
    """

    id: str
    started: float
    endpoint: str
    key: str
    team: str | None = None
    model: str | None = None
    server: str | None = None
    stream: bool = False
    status: int | None = None
    code: str | None = None
    incomplete: str | None = None
    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None
    reasoning: int | None = None
    chunks: int = 0
    duration: float | None = None
    first_token: float | None = None
    queued: float | None = None
    price: tuple[float, float] | None = None
    labels: dict[str, str] = {}
    user: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def generated(self) -> tuple[int | None, bool]:
        """Completion tokens, and whether they are an estimate.

        The server tells its count in a stream's last event but one, which a stream that broke off never had. vLLM sends an event for
        each step of its engine, in general one token, and the events that passed are counted: so many there were at least. A client
        may have the count with each event; of several answers in one stream that is each one's own.
        """
        known = self.completion or 0
        if self.first_token is None or (self.incomplete is None and not self.chunks) or (known and known >= self.chunks):
            return self.completion, False
        return self.chunks, True

    @property
    def cost(self) -> int | None:
        """In billionths of the currency; None where the model has no price."""
        if self.price is None:
            return None
        prompt, completion = self.price
        return min(round(((self.prompt or 0) * prompt + (self.generated[0] or 0) * completion) * 1000), _MOST)


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(UsageRow).decode


def frame(payload: bytes) -> bytes:
    """A row's bytes with their head."""
    return HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def frames(data: bytes) -> Iterator[bytes]:
    """The payloads of the frames in ``data``, up to its end or to the first one that is not whole."""
    place = 0
    while place + HEAD.size <= len(data):
        length, checksum = HEAD.unpack_from(data, place)
        payload = data[place + HEAD.size : place + HEAD.size + length]
        if not length or len(payload) < length or zlib.crc32(payload) != checksum:  # no row is empty, and what is not written yet is zeros
            return
        yield payload
        place += HEAD.size + length
