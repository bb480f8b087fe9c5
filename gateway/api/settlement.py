"""The settlement of a request: the tokens that it is charged for. Pure.

Limits, ledger, metrics, access log and traces all use the settlement of a request, so they show the same numbers. The rule: a settlement
is made once for each request and never changes. docs/accounting.md has a table of the ways in which a request can end.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from gateway.api.errors import CLIENT_CLOSED_REQUEST
from gateway.api.usage import Usage


class Method(StrEnum):
    """The method by which the tokens of a settlement were estimated, because the server reported none."""

    EVENTS = "events"
    """The completion is the number of events of the stream. vLLM sends one or more tokens with an event, so this is a lower bound."""
    JOURNAL = "journal"
    """The worker died. The counts are from the last update of the journal, at most 250 ms earlier."""
    BYTES = "bytes"
    """The response is not a stream. The prompt and the completion are estimated from the bytes of their bodies."""
    TOKENIZE = "tokenize"
    """The request was cancelled before its first event. The server has counted its prompt, and may not have computed it."""


class Settlement(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one request. ``usage`` is None if it is charged for nothing; ``estimated_by`` is None if all counts are exact."""

    usage: Usage | None = None
    estimated_by: Method | None = None


NOTHING = Settlement()
BYTES_PER_TOKEN = 4
"""Bytes of a body per token. English text has slightly more, most other languages fewer."""


class Delivery(NamedTuple):
    """The part of a response that a client received.

    ``status``: the HTTP status sent, 499 if the client disconnected. ``usage``: the server's count for all of it. ``running``: the server's
    count for the events so far. ``prompt``: the server's count for the prompt alone. ``events``: the events with tokens. ``estimated``:
    the tokens of a response that is not a stream and has no count, estimated by the bytes that the client was sent.
    """

    status: int
    usage: Usage | None = None
    running: Usage | None = None
    prompt: Usage | None = None
    events: int = 0
    estimated: int | None = None


def is_charged(status: int) -> bool:
    """Check whether a response with this status may have delivered tokens."""
    return status < 400 or status == CLIENT_CLOSED_REQUEST


def settle(delivery: Delivery, estimated_prompt: int | None, counted_prompt: int | None = None) -> Settlement:
    """Settle a request that reached a server.

    ``estimated_prompt`` is None if nothing needs an estimate. ``counted_prompt`` is the server's count after the end of the request; it is
    None if none was requested, or the server cannot count the prompt.

    Nothing is charged for an error, and nothing if no part of the response was sent. A part of a stream is charged by its running usage;
    without one, by its events. A request that ended before its first event with tokens is charged for its prompt only if that was counted.
    """
    status, usage, running, prompt, events, estimated = delivery
    if not is_charged(status):
        return NOTHING
    if usage is not None or running is not None:
        return Settlement(usage or running)
    if estimated_prompt is None:
        return NOTHING
    if estimated is not None:
        return Settlement(Usage(estimated_prompt, estimated), Method.BYTES)
    if prompt is not None:
        return Settlement(replace(prompt, completion=events), Method.EVENTS if events else None)
    if counted_prompt is not None:
        return Settlement(Usage(counted_prompt, events), Method.EVENTS if events else Method.TOKENIZE)
    return Settlement(Usage(estimated_prompt, events), Method.EVENTS) if events else NOTHING
