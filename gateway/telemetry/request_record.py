"""What is known of a request when it is over: one frozen value for metrics, log and ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from gateway.api.usage import Usage
from gateway.snapshot.snapshot import Key
from gateway.telemetry.tracing import Trace

USER_LIMIT = 256
"""Characters of a client's word for its end user that are logged and kept."""


class ReadGapCounts(Protocol):
    """Times between the reads of a stream: ``counts`` by bucket and their ``total`` in seconds; and how many events it had."""

    counts: list[int]

    @property
    def events(self) -> int:
        """All that passed, the first one too."""

    @property
    def are_counted(self) -> bool:
        """Whether the server's usage covers all of them."""

    @property
    def total(self) -> float:
        """In seconds."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times are in seconds; ``started`` is since the epoch.

    ``status`` is the HTTP status sent, or 499 when the client left before it had the whole answer; ``code`` the
    error's code, if it ended with one; ``model`` the configured ID, None when the request named none; ``asked`` the ID of the
    model that was asked for, where a fallback answered in its place; ``incomplete``
    says who broke off an answer: client, upstream or drain; ``usage`` is what was seen, for an incomplete answer
    perhaps None; ``user`` is the client's word for its end user, None unless it is to be logged; ``failures`` are what went
    wrong with servers on the way: the model that has them, the server, the reason; ``detail`` is for the operator alone;
    ``trace`` where the request stands in its trace, None where nothing is traced; ``client`` is the client's address; ``shape`` what
    its body looked like, None unless it is one of those that are shown (see ``body_shape``); ``method`` and ``path`` only for a path
    that is not served.

    A Struct, because a frozen dataclass of this size takes three times as long to make.
    """

    id: str
    started: float
    endpoint: str
    status: int
    code: str | None
    key: Key | None
    model: str | None
    asked: str | None = None
    server: str | None
    stream: bool
    request_bytes: int
    answer_bytes: int
    usage: Usage | None
    incomplete: str | None
    retries: int
    duration: float
    overhead: float
    queued: float
    first_byte: float | None
    first_token: float | None
    gaps: ReadGapCounts | None
    user: str | None
    failures: tuple[tuple[str, str, str], ...]
    detail: str | None
    trace: Trace | None = None
    client: str | None = None
    shape: Mapping[str, Any] | None = None
    method: str | None = None
    path: str | None = None
