"""The facts about a finished request: one value for metrics, log, ledger and traces.

The rule: every report of a request is made from its record, and nothing changes a record that is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from gateway.api.errors import Refusal
from gateway.api.settlement import Method
from gateway.api.usage import Usage
from gateway.snapshot.snapshot import Key
from gateway.telemetry.body_shape import field_path
from gateway.telemetry.trace import Trace

USER_LIMIT = 256
"""Characters of a client's ``user`` field that are logged and stored."""
_NAME_LIMIT = 64  # characters of a client's name of a model


class ReadGapCounts(Protocol):
    """Times between the reads of a stream: ``counts`` by bucket, their ``total``, and the number of events."""

    counts: list[int]

    @property
    def events(self) -> int:
        """Number of events, including the first."""

    @property
    def total(self) -> float:
        """In seconds."""


RESENT = "resent"
"""The path of a request whose first response was aborted before the client got any of it."""


class Continuation(msgspec.Struct, frozen=True, gc=False):
    """A response that lost its server, and was to be continued on another one.

    ``server`` is the lost one, and ``cause`` the reason of its failure. ``path`` is ``token_ids``, ``regeneration`` or ``resent``.
    ``outcome`` is ``continued``, ``failed`` (no server could continue it) or ``different`` (a regenerated response was not equal to what
    was sent). ``gap``: seconds from the loss to the next event of a stream; None unless it was continued. ``lost_tokens`` were made again,
    and ``prompt_tokens`` are those of the second prefill. ``sampled``: the rest of the response is another draw. ``at``: seconds from the
    request to the loss.
    """

    server: str
    cause: str
    path: str
    outcome: str
    gap: float | None = None
    lost_tokens: int = 0
    prompt_tokens: int = 0
    sampled: bool = False
    at: float = 0.0

    def __str__(self) -> str:
        return f"{self.server} {self.cause} {self.path} {self.outcome}" + (" sampled" if self.sampled else "")


class RequestRecord(msgspec.Struct, eq=False, gc=False):
    """One finished request. Times are in seconds; ``started`` is since the epoch.

    ``status`` is the HTTP status sent, or 499 if the client disconnected before the end of the response; ``code`` is the code of
    the error, if any. ``model`` is the configured ID, None if the request named none; ``requested_model`` is the ID of the requested model
    if a fallback served the request, and ``split`` the ID of the requested split. ``incomplete`` says what truncated the response: client,
    upstream or drain. ``usage`` and ``estimated_by`` are the settlement's. ``user`` is the request's ``user`` field, None unless it is
    logged. ``failures`` are failures of servers: the model that has the server, the server, the reason. ``detail`` is for the operator
    only. ``trace`` is None if the request is not traced. ``client`` is the client's address. ``shape`` is the shape of the body, None
    unless it is logged (see ``body_shape``). ``explanation`` says why ``server`` was chosen, None unless that is logged. ``method`` and
    ``path`` are set only for a path that is not served. ``param`` is the path of the invalid field, with names of the tables in
    ``body_shape`` only. ``unknown_model`` is the name in the request if no model was found: a client's text, and never a label.
    ``reason`` is the name of the exceeded limit, or the reason of a server's failure, and ``limit_holder`` has the exceeded limit.
    ``nearest_limit`` names the budget that was used the most, if it was nearly used. ``continuations`` are in the order of the failures.

    Every request has the first eight fields. The others are set as far as they are known.

    A Struct without garbage collection, because a dataclass of this size takes three times as long to create. It refers to nothing that
    refers to it.
    """

    id: str
    started: float
    endpoint: str
    status: int
    key: Key | None = None
    stream: bool = False
    request_bytes: int = 0
    response_bytes: int = 0
    code: str | None = None
    model: str | None = None
    requested_model: str | None = None
    split: str | None = None
    server: str | None = None
    usage: Usage | None = None
    estimated_by: Method | None = None
    incomplete: str | None = None
    retries: int = 0
    duration: float = 0.0
    overhead: float = 0.0
    queued: float = 0.0
    queue_reason: str | None = None
    first_byte: float | None = None
    first_token: float | None = None
    gaps: ReadGapCounts | None = None
    user: str | None = None
    failures: tuple[tuple[str, str, str], ...] = ()
    detail: str | None = None
    trace: Trace | None = None
    client: str | None = None
    shape: Mapping[str, Any] | None = None
    explanation: Mapping[str, Any] | None = None
    method: str | None = None
    path: str | None = None
    param: str | None = None
    unknown_model: str | None = None
    reason: str | None = None
    limit_holder: str | None = None
    nearest_limit: str | None = None
    continuations: tuple[Continuation, ...] = ()


def requested_model(record: RequestRecord) -> str | None:
    """Return the requested model if it is not the model that served the request: its ID, or the client's name of an unknown model."""
    return record.requested_model or record.unknown_model


def explained(refusal: Refusal) -> tuple[str | None, str | None]:
    """Return the path of the invalid field of an error, and the name of its unknown model, as they are logged."""
    param, name = refusal.param, refusal.model
    return None if param is None else field_path(param), None if name is None else _shown(name)


def _shown(name: str) -> str:
    """Return a client's name of a model: printable characters, and nothing of what may be a key in the wrong field."""
    return "..." if name.startswith("sk-") else "".join(letter if letter.isprintable() else "?" for letter in name[:_NAME_LIMIT])
