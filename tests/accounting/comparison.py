"""Compare the ledger's row of each request with the tokens that were delivered. Pure.

The rules: a row without ``estimated_by`` is exact. A truncated stream of responses or messages may be estimated by its events: at most the
tokens that were delivered, and two events that close an item. The row of a request whose worker was killed is as old as its journal: also
at most what was delivered. If the worker was killed between the settlement of a response and its write to the socket, the row has what the
client would have received.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.accounting.evidence import NO_TOKENS, Disagreement, Exchange, References, Tokens, delivered
from tests.accounting.workload import MESSAGES, RESPONSES

LOST, COMPLETE, REJECTED, MISSING = "lost", "complete", "rejected", "missing"
"""How a request ended: a value of the row's ``incomplete``, such as LOST, or one of these. MISSING: it broke, and has no row."""

_CLOSING_EVENTS = 2
"""The events without tokens before the last event that closes an item. They are counted if the stream is truncated between them."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one request. ``row`` is None without a row; ``problem`` is empty if the row is as it must be."""

    exchange: Exchange
    end: str
    tokens: Tokens
    row: Tokens | None
    server: str | None = None
    estimated_by: str | None = None
    problem: str = ""

    @property
    def error(self) -> Tokens:
        """The tokens of the row beyond the delivered ones."""
        row = self.row or NO_TOKENS
        return Tokens(row.prompt - self.tokens.prompt, row.completion - self.tokens.completion)


def compare(exchange: Exchange, row: Mapping[str, Any] | None, known: References) -> Verdict:
    """Compare the row of a request with what its client received."""
    try:
        tokens, problem = delivered(exchange, known), ""
    except Disagreement as error:
        tokens, problem = NO_TOKENS, str(error)
    if row is None:
        missing = "" if exchange.status is None else "the client has a response, and the ledger has no row"
        return Verdict(exchange, MISSING, tokens, None, problem=problem or missing)
    end = row["incomplete"] or (COMPLETE if row["status"] == 200 else REJECTED)
    stored = Tokens(row["prompt_tokens"] or 0, row["completion_tokens"] or 0)
    verdict = Verdict(exchange, end, tokens, stored, row["server"], row["estimated_by"], problem)
    return verdict if problem else _checked(verdict)


def _checked(verdict: Verdict) -> Verdict:
    error, method, path = verdict.error, verdict.estimated_by, verdict.exchange.planned.path
    if verdict.end == LOST:
        is_right = -verdict.tokens.prompt <= error.prompt <= 0 and error.completion <= _allowed_excess(path)
    elif method is None:
        is_right = error == NO_TOKENS or (verdict.exchange.broken and min(error) >= 0)
    else:
        is_right = method == "events" and path in (RESPONSES, MESSAGES) and error.completion <= _allowed_excess(path)
        is_right &= error.prompt == 0 or path == RESPONSES
    return verdict if is_right else replace(verdict, problem=f"the row has {verdict.row} by {method}; delivered: {verdict.tokens}")


def _allowed_excess(path: str) -> int:
    return _CLOSING_EVENTS if path in (RESPONSES, MESSAGES) else 0


def journal_age(verdict: Verdict, partial: Sequence[tuple[float, bytes]], known: References) -> float:
    """Return the seconds by which the row of a lost request is older than the client's last event. ``partial``: the bodies over time."""
    stored = (verdict.row or NO_TOKENS).completion
    bodies = ((time, replace(verdict.exchange, body=body, whole=False)) for time, body in partial)
    newer = (time for time, exchange in bodies if delivered(exchange, known).completion > stored)
    first = next(newer, None)
    return 0.0 if first is None else partial[-1][0] - first
