"""A row of the ledger on its way from a worker to the database, and the frames of rows in memory and on disk.

The rules: a row contains everything that the database stores, so its reader needs no configuration. A field declares its columns. Schema,
insertion, dimensions and documents are derived from that. Fields are only ever added at the end, with a default, because an older version
may have written the spool. A frame has a checksum, so torn and incomplete frames are detected.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
from msgspec.structs import replace

from gateway.api.settlement import Method
from gateway.api.usage import Usage, decode_usage_tail
from gateway.ledger.column import Column, Kind
from gateway.snapshot.money import Price, cost_of

HEAD = struct.Struct("<II")
"""Before each row: its length in bytes and its CRC-32."""

LOST = "lost"
"""``incomplete`` of a request whose worker died while it was open."""


MIRRORED = "mirrored requests"
"""``key`` of the copy of a request that was sent to another model. No key has an ID with a space."""

CONTINUED = "continued streams"
"""``key`` of the tokens of a stream that were made by servers that it has lost, and of the difference that they make to its last server."""

UNBILLED_KEYS = (MIRRORED, CONTINUED)
"""The keys of rows that explain the counts of engines, and belong to no client."""


class UsageRow(msgspec.Struct, array_like=True, gc=False):
    """One request of a known key, with the columns that store it. None: not known.

    Durations are in seconds, ``started`` is since the epoch. The tokens are the numbers that were settled. ``price`` is the model's price
    when the model was chosen. ``chunks`` is always 0, and keeps the position of the fields after it.
    """

    id: Annotated[str, Column("request_id", "the request's ID, as in the response's `x-request-id`; the primary key")]
    started: Annotated[
        float,
        Column("time", "the time of arrival, UTC", Kind.TIME),
        Column("day", "the day of arrival, UTC", Kind.DAY, dimension="day"),
    ]
    endpoint: Annotated[str, Column("endpoint", "the route, for example `/v1/chat/completions`", dimension="endpoint")]
    key: Annotated[str, Column("key", "the ID of the key", dimension="key")]
    team: Annotated[str | None, Column("team", "the key's team at that time", dimension="team")] = None
    model: Annotated[
        str | None,
        Column(
            "model",
            "the model that served the request: the requested one, a fallback, or a model of the requested "
            "[split](split-and-mirror.md); empty if the request named no model that the key may use",
            dimension="model",
        ),
    ] = None
    server: Annotated[str | None, Column("server", "the server that was used last, for example `qwen#0`", dimension="server")] = None
    stream: Annotated[bool, Column("stream", "whether the client requested a stream", Kind.FLAG)] = False
    status: Annotated[int | None, Column("status", "the HTTP status; 499 if the client disconnected", Kind.NUMBER)] = None
    code: Annotated[str | None, Column("code", "the code of the [error](errors.md)", dimension="code")] = None
    incomplete: Annotated[
        str | None,
        Column(
            "incomplete",
            "empty for a complete response or a rejection; otherwise the side that ended it: `client`, `upstream`, `drain`, or `lost` "
            "([below](#outages))",
        ),
    ] = None
    prompt: Annotated[int | None, Column("prompt_tokens", "the server's count for the prompt; empty if it reported none", Kind.COUNT)] = (
        None
    )
    completion: Annotated[int | None, Column("completion_tokens", "the server's count for the response", Kind.COUNT)] = None
    cached: Annotated[
        int | None,
        Column("cached_tokens", "part of the prompt, also where the response reports it separately, as Anthropic's does", Kind.COUNT),
    ] = None
    reasoning: Annotated[int | None, Column("reasoning_tokens", "part of the completion", Kind.COUNT)] = None
    chunks: int = 0
    duration: Annotated[
        float | None, Column("total_ms", "from the request's headers to the last byte of the response", Kind.MILLISECONDS)
    ] = None
    first_token: Annotated[
        float | None, Column("first_token_ms", "from the request's headers to the first event of a stream", Kind.MILLISECONDS)
    ] = None
    queued: Annotated[float | None, Column("queued_ms", "the time in the model's queue", Kind.MILLISECONDS)] = None
    price: Annotated[
        Price | None,
        Column(
            "cost_nano",
            "the cost in billionths of the currency, so that sums are exact; empty if the model has no price or the request was `lost`",
            Kind.COST,
        ),
    ] = None
    labels: Annotated[dict[str, str], Column("labels", "the key's labels at that time", Kind.JSON)] = {}
    user: Annotated[
        str | None,
        Column("end_user", "the [end user](#end-users), with `ledger.user` or the key's `user_header`", dimension="user"),
    ] = None
    metadata: Annotated[dict[str, Any] | None, Column("metadata", "the request's `metadata`, with `ledger.metadata`", Kind.JSON)] = None
    estimated_by: Annotated[
        str | None,
        Column("estimated", "whether tokens are estimated", Kind.IS_GIVEN),
        Column(
            "estimated_by",
            "the method: `events`, `bytes`, `tokenize` or `journal` ([accounting](accounting.md)); empty in rows of commit 3c1fad8",
        ),
    ] = None
    choices: Annotated[int | None, Column("choices", "the request's `n`; empty for one", Kind.NUMBER)] = None
    param: Annotated[
        str | None,
        Column("param", "for an error: the path of the invalid field, [as in the access log](operators/troubleshooting.md)"),
    ] = None
    requested_model: Annotated[str | None, Column("requested_model", "for an error: the name of a model that was not found")] = None
    reason: Annotated[
        str | None,
        Column(
            "reason",
            "why a request failed, beyond its code: the exceeded limit (`tokens_per_day`), the failure of a server (`connect`, "
            "`idle_timeout`), or the side that ended it, as in `incomplete`",
        ),
    ] = None
    limit_holder: Annotated[str | None, Column("limit_holder", "the key, team or session that has the exceeded limit")] = None
    detail: Annotated[str | None, Column("detail", "for an error: details for operators, as in the access log")] = None
    retries: Annotated[int | None, Column("retries", "attempts after the first one; empty for none", Kind.NUMBER)] = None
    failures: Annotated[
        str | None, Column("failures", "the servers that failed before the last attempt or in it, each with the reason; empty for none")
    ] = None
    late: Annotated[
        float | None,
        Column(
            "late",
            "the time at which the row was stored, if its [month was closed](closing-months.md) before; empty otherwise",
            Kind.LATER_TIME,
        ),
    ] = None
    nearest_limit: Annotated[
        str | None,
        Column(
            "nearest_limit",
            "the budget with the largest used share when the response began, if that was at least `limits.warn_at`, for example "
            "`93% of tokens_per_day of key team-a`; otherwise empty",
        ),
    ] = None
    trace_id: Annotated[str | None, Column("trace_id", "the ID of the request's [trace](monitoring.md#traces), if it is exported")] = None

    continuations: Annotated[
        str | None,
        Column(
            "continuations",
            "the servers that were lost during the stream, each with the cause, and the path and outcome of the "
            "[continuation](continuation.md), for example `qwen#0 disconnected token_ids continued`; empty for none",
        ),
    ] = None

    @property
    def cost(self) -> int | None:
        """Cost in nano-units; None if the model has no price."""
        if self.price is None:
            return None
        return cost_of(Usage(self.prompt or 0, self.completion or 0, self.cached or 0, self.reasoning or 0), self.price)


_DECLARED = get_type_hints(UsageRow, include_extras=True)

COLUMNS: Mapping[Column, str] = {column: field for field, declared in _DECLARED.items() for column in getattr(declared, "__metadata__", ())}
"""The columns of the table, and the field of each."""

NULLABLE = frozenset(
    column.name
    for column, field in COLUMNS.items()
    if type(None) in get_args(get_args(_DECLARED[field])[0]) and column.kind is not Kind.IS_GIVEN
)
"""The names of the columns that may be empty."""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(UsageRow).decode
"""Return the row in a payload. Raises msgspec.DecodeError."""


# Payloads


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
