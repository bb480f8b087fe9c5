"""A row of the ledger on its way from a worker to the database, and the frames of rows in memory and on disk.

The rules: a row contains everything that the database stores, so its reader needs no configuration. Fields are only ever added at
the end, with a default, because an older version may have written the spool. A frame has a checksum, so torn and incomplete frames
are detected.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from math import isfinite
from typing import Any

import msgspec
from msgspec.structs import replace

from gateway.api.settlement import Method
from gateway.api.usage import Usage, decode_usage_tail
from gateway.snapshot.money import Price, cost_of, rounded_nano_units

HEAD = struct.Struct("<II")
"""Before each row: its length in bytes and its CRC-32."""

LOST = "lost"
"""``incomplete`` of a request whose worker died while it was open."""


MIRRORED = "mirrored requests"
"""``key`` of the copy of a request that was sent to another model. No key has an ID with a space."""


class UsageRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request of a known key. Durations are in seconds, ``started`` is since the epoch; None: not known.

    ``incomplete`` is as in ``RequestRecord``, or LOST. The tokens are those of the settlement. ``estimated_by`` is the method of the
    estimate, or None. ``chunks`` is 0; in a row of an earlier version, the events of a truncated stream after its first one. ``price`` is
    the model's price when the model was chosen. ``choices`` is the request's ``n``, None for one. ``param`` and ``requested_model`` are
    those of the access log, for an error.
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
    price: Price | None = None
    labels: dict[str, str] = {}
    user: str | None = None
    metadata: dict[str, Any] | None = None
    estimated_by: str | None = None
    choices: int | None = None
    param: str | None = None
    requested_model: str | None = None

    @property
    def generated(self) -> tuple[int | None, bool]:
        """Completion tokens, and whether the row has an estimate.

        Version 0.1 wrote rows without an estimate, and with the number of events.
        """
        known = self.completion or 0
        if self.estimated_by is not None or not self.chunks or self.first_token is None or (known and known >= self.chunks):
            return self.completion, self.estimated_by is not None
        return self.chunks, True

    @property
    def cost(self) -> int | None:
        """Cost in nano-units; None if the model has no price."""
        if self.price is None:
            return None
        return cost_of(Usage(self.prompt or 0, self.generated[0] or 0, self.cached or 0, self.reasoning or 0), self.price)


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(UsageRow).decode
_PRICE = UsageRow.__struct_fields__.index("price")


def decode(payload: bytes) -> UsageRow:
    """Return the row in a payload of this or an earlier version. Raises msgspec.DecodeError."""
    try:
        return _decode(payload)
    except msgspec.ValidationError:
        fields = msgspec.msgpack.decode(payload)
        price = fields[_PRICE] if isinstance(fields, list) and len(fields) > _PRICE else None
        if not (isinstance(price, list) and len(price) == 2 and all(isinstance(each, float) and isfinite(each) for each in price)):
            raise
    # Earlier versions had one price of prompt tokens and one of completion tokens, in units of the currency.
    prompt, completion = map(rounded_nano_units, price)
    fields[_PRICE] = (prompt, completion, prompt, completion)
    return msgspec.convert(fields, UsageRow)


def with_usage_tail(payload: bytes, tail: bytes) -> bytes:
    """Return the bytes of an open request's row with the tokens of a usage tail, if that has any."""
    usage = decode_usage_tail(tail) if tail else None
    if usage is None:
        return payload
    row = decode(payload)
    counts = {"prompt": usage.prompt, "completion": usage.completion, "cached": usage.cached, "reasoning": usage.reasoning}
    return encode(replace(row, estimated_by=Method.JOURNAL, **counts))


def frame(payload: bytes) -> bytes:
    """Return a row's bytes with length and checksum."""
    return HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def frames(data: bytes) -> Iterator[bytes]:
    """Yield the payloads of the frames in ``data``, up to its end or to the first incomplete frame."""
    unpack, checksum_of, head, offset, last = HEAD.unpack_from, zlib.crc32, HEAD.size, 0, len(data) - HEAD.size
    while offset <= last:
        length, checksum = unpack(data, offset)
        start = offset + head
        offset = start + length
        payload = data[start:offset]
        if not length or len(payload) < length or checksum_of(payload) != checksum:  # no row is empty, and unwritten memory is zeros
            return
        yield payload
