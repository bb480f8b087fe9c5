"""The rows of all servers of a continued stream add up to what each server has counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.ledger.continued_rows import rows_of_servers
from gateway.ledger.row import CONTINUED
from gateway.telemetry.request_record import RESENT, Continuation
from tests.gateway.ledger.rows import row

PROMPT = 100


def lost(server: str, sent: int, path: str = "token_ids", outcome: str = "continued", **fields: Any) -> Continuation:
    """Return a continuation. ``sent``: the tokens before it that are not made again."""
    return Continuation(server, "disconnected", path, outcome, 0.5, prompt_tokens=PROMPT + sent, **fields)


def counted(completion: int, server: str, *continuations: Continuation) -> dict[str, tuple[int, int]]:
    """Return the tokens of all rows of a request by server. ``server``: its last one."""
    own = row(prompt=PROMPT, completion=completion, server=server)
    sums = {server: (PROMPT, completion)}
    for each in rows_of_servers(own, continuations):
        assert each.key == CONTINUED and each.price is None and each.server is not None
        before = sums.get(each.server, (0, 0))
        sums[each.server] = (before[0] + (each.prompt or 0), before[1] + (each.completion or 0))
    return sums


@pytest.mark.parametrize(
    ("continuations", "expected"),
    [
        ([lost("a", 30)], {"a": (100, 30), "b": (130, 50)}),
        ([lost("a", 28, lost_tokens=2)], {"a": (100, 30), "b": (128, 52)}),
        ([lost("a", 30), lost("c", 70)], {"a": (100, 30), "c": (130, 40), "b": (170, 10)}),
        ([lost("a", 0, "regeneration", lost_tokens=30)], {"a": (100, 30), "b": (100, 80)}),
        ([lost("a", 30), lost("b", 70), lost("a", 75)], {"a": (270, 35), "b": (305, 45)}),
        ([lost("a", 30, outcome="failed")], {"b": (100, 80)}),
        ([lost("c", 0, RESENT, lost_tokens=7), lost("a", 30)], {"c": (100, 7), "a": (100, 30), "b": (130, 50)}),
    ],
    ids=["token IDs", "tokens without a text", "two losses", "from the start", "back and forth", "not continued", "sent again"],
)
def test_each_server_has_what_it_has_computed(continuations: Sequence[Continuation], expected: dict[str, tuple[int, int]]) -> None:
    assert counted(80, "b", *continuations) == expected


def test_an_estimate_is_not_divided() -> None:
    assert list(rows_of_servers(row(prompt=PROMPT, completion=80, estimated_by="events"), [lost("a", 30)])) == []
    assert list(rows_of_servers(row(prompt=None, completion=None), [lost("a", 30)])) == []


def test_an_aborted_response_is_counted_if_the_second_one_failed_or_has_no_count() -> None:
    for own in (row(prompt=0, completion=0, status=502), row(prompt=None, completion=None), row(prompt=PROMPT, completion=9, choices=2)):
        [found] = rows_of_servers(own, [lost("a", 0, RESENT, lost_tokens=7)])
        assert (found.server, found.prompt, found.completion, found.choices) == ("a", PROMPT, 7, own.choices)


def test_a_row_ends_with_its_server() -> None:
    first, last = rows_of_servers(row(prompt=PROMPT, completion=80, duration=9.0), [lost("a", 30, at=2.5)])
    assert [(each.id, each.duration, each.incomplete) for each in (first, last)] == [("req_1.1", 2.5, "upstream"), ("req_1.2", 9.0, None)]
