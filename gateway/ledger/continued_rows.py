"""The rows that explain the counts of the servers of a continued stream. Pure.

The row of the request names its last server only, and has the tokens that the client was sent. Each lost server has counted the prompt
that it computed, and the tokens that it made. The last server has counted a longer prompt and fewer tokens of the response.

The rule: for each server, the additional rows are what it has counted beyond the row of the request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gateway.ledger.row import CONTINUED, UsageRow
from gateway.telemetry.request_record import RESENT, Continuation


def rows_of_servers(row: UsageRow, continuations: Sequence[Continuation]) -> Iterator[UsageRow]:
    """Yield the additional rows of a request with exact counts. ``row``: its own."""
    prompt, number = row.prompt, 0
    for number, each in enumerate((each for each in continuations if each.path == RESENT), 1):
        yield _row(row, number, each.server, "upstream", each.at, each.prompt_tokens, each.lost_tokens)
    if prompt is None or row.estimated_by is not None:
        return
    computed, made = prompt, 0
    for each in continuations:
        if each.outcome == "failed" or each.path == RESENT:
            continue
        number += 1
        sent = each.prompt_tokens - prompt
        yield _row(row, number, each.server, "upstream", each.at, computed, sent - made + each.lost_tokens)
        computed, made = each.prompt_tokens, sent
    if row.server is not None and (computed > prompt or made):
        yield _row(row, number + 1, row.server, row.incomplete, row.duration or 0.0, computed - prompt, -made)


def _row(row: UsageRow, number: int, server: str, incomplete: str | None, duration: float, prompt: int, completion: int) -> UsageRow:
    return UsageRow(
        f"{row.id}.{number}",
        row.started,
        row.endpoint,
        CONTINUED,
        model=row.model,
        server=server,
        stream=row.stream,
        status=row.status,
        incomplete=incomplete,
        duration=duration,
        prompt=prompt,
        completion=completion,
        choices=row.choices,
    )
