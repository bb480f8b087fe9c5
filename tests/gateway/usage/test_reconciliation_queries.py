"""The reconciliation of rows and samples in both databases, and its output."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sqlalchemy import create_engine

from gateway.ledger.continued_rows import rows_of_servers
from gateway.ledger.engine_samples import EngineSample, PendingSamples
from gateway.ledger.row import LOST, MIRRORED
from gateway.ledger.store import UsageStore, database_url
from gateway.telemetry.request_record import Continuation
from gateway.usage.errors import QueryError
from gateway.usage.queries import UsageQuery
from gateway.usage.reconciliation import Classes
from gateway.usage.reconciliation_output import FORMATS
from gateway.usage.reconciliation_queries import (
    Reconciliation,
    parse_reconciliation,
    parse_reconciliation_query,
    run_reconciliation,
)
from tests.gateway.ledger.rows import STARTED, row

BEGIN = EngineSample("tiny#0", "tiny", 1_000, STARTED, True, 0, 0, 0, 0, 0)
NOW = datetime.fromtimestamp(STARTED, UTC)


@pytest.fixture
def store(url: str, tmp_path: Path) -> Iterator[UsageStore]:
    with closing(UsageStore(database_url(url, tmp_path))) as made:
        yield made


def write(store: UsageStore, samples: Sequence[EngineSample], rows: Sequence[Any]) -> None:
    pending = PendingSamples(0.1)
    store.write_samples([pending.values(sample) for sample in samples])
    assert store.write(rows) == 0


def reconciled(store: UsageStore, seconds: float = 1000.0, model: str | None = None) -> Reconciliation:
    until = datetime.fromtimestamp(STARTED + seconds, UTC)
    return run_reconciliation(store.engine, UsageQuery((), NOW, until, model=model))


ROWS = (
    row(1, started=STARTED + 1, prompt=10, completion=20, choices=3),
    row(2, started=STARTED + 2, prompt=100, completion=7, status=499, incomplete="client"),
    row(3, started=STARTED + 3, prompt=None, completion=None, status=499, incomplete="client"),
    row(4, started=STARTED + 4, prompt=1000, completion=3, status=None, incomplete=LOST, server=None),
    row(5, started=STARTED + 5, endpoint="/tokenize", prompt=None, completion=None),
    row(6, started=STARTED + 6, code="upstream_unreachable", status=502, prompt=None, completion=None),
    row(7, started=STARTED + 7, server="other", prompt=9, completion=9),
)
END = replace(BEGIN, time=STARTED + 100, prompt=1935, completion=147, finished_prompt=830, finished_completion=120, responses=5)
"""Row 1 thrice, row 2, row 3, the lost one, and one direct request with 800 prompt and 100 completion tokens."""


def test_rows_and_counters_are_classified(store: UsageStore) -> None:
    write(store, [BEGIN, END], ROWS)
    [found] = reconciled(store).servers
    assert (found.model, found.server, found.since, found.until, found.engines) == ("tiny", "tiny#0", STARTED, STARTED + 100, 1)
    assert found.prompt == Classes(engine=1935, ledger=110, choices=20, cancelled_prefill=5, direct_use=800, lost=1000)
    assert found.completion == Classes(engine=147, ledger=27, not_delivered=17, direct_use=100, lost=3)
    assert (found.prompt_in_progress, found.completion_in_progress, found.prompt_unsampled, found.completion_unsampled) == (0, 0, 0, 0)
    assert reconciled(store, model="big").servers == []


def test_copies_of_requests_are_a_class_and_no_direct_use(store: UsageStore) -> None:
    copies = (
        row(8, started=STARTED + 8, key=MIRRORED, prompt=50, completion=9, choices=2),
        row(9, started=STARTED + 9, key=MIRRORED, prompt=5, completion=1, incomplete="drain"),
    )
    more = replace(END, prompt=END.prompt + 105, completion=END.completion + 10, finished_prompt=930, finished_completion=129, responses=7)
    write(store, [BEGIN, more], (*ROWS, *copies))
    [found] = reconciled(store).servers
    assert found.prompt == Classes(engine=2040, ledger=110, mirrored=55, choices=70, cancelled_prefill=5, direct_use=800, lost=1000)
    assert found.completion == Classes(engine=157, ledger=27, mirrored=10, not_delivered=17, direct_use=100, lost=3)


def test_a_continued_stream_is_explained_on_each_of_its_servers(store: UsageStore) -> None:
    own = row(1, started=STARTED + 1, server="tiny#1", prompt=100, completion=80, duration=20.0)
    others = rows_of_servers(own, [Continuation("tiny#0", "moved", "token_ids", "continued", 0.1, prompt_tokens=130, at=8.0)])
    lost = replace(BEGIN, time=STARTED + 10, prompt=100, completion=31, responses=1)
    last = replace(BEGIN, server="tiny#1")
    end = replace(last, time=STARTED + 100, prompt=130, completion=50, finished_prompt=130, finished_completion=50, responses=2)
    write(store, [BEGIN, lost, last, end], (own, *others))
    first, second = reconciled(store).servers
    assert (first.prompt, first.completion) == (Classes(engine=100, continued=100), Classes(engine=31, continued=30, not_delivered=1))
    assert second.prompt == Classes(engine=130, ledger=100, continued=30)
    assert second.completion == Classes(engine=50, ledger=80, continued=-30)
    assert first.prompt_unsampled == second.prompt_unsampled == 0


def test_the_row_of_a_lost_request_names_no_server(store: UsageStore) -> None:
    other = replace(BEGIN, server="tiny#1")
    write(store, [BEGIN, END, other, replace(other, time=STARTED + 100, prompt=1)], ROWS)
    found, _ = reconciled(store).servers
    assert (found.prompt.lost, found.completion.lost) == (0, 0)
    assert found.prompt.engine == found.prompt.ledger + found.prompt.choices + found.prompt.cancelled_prefill + found.prompt.direct_use


def test_estimates_are_not_treated_as_counts(store: UsageStore) -> None:
    rows = (
        row(1, started=STARTED + 1, endpoint="/v1/embeddings", prompt=8, completion=0, estimated_by="bytes"),
        row(2, started=STARTED + 2, prompt=100, completion=7, status=499, incomplete="client", estimated_by="events"),
    )
    end = replace(BEGIN, time=STARTED + 100, prompt=50, completion=9, finished_prompt=10, finished_completion=0, responses=2)
    write(store, [BEGIN, end], rows)
    [found] = reconciled(store).servers
    assert found.prompt == Classes(engine=50, ledger=108, uncounted=0, estimates=-58)
    assert found.completion == Classes(engine=9, ledger=7, not_delivered=2)


def test_a_row_belongs_to_the_window_in_which_its_response_ended(store: UsageStore) -> None:
    middle = replace(BEGIN, time=STARTED + 50, prompt=1, completion=1, finished_prompt=1, finished_completion=1, responses=1)
    end = replace(middle, time=STARTED + 100, prompt=111, completion=11, finished_prompt=111, finished_completion=11, responses=3)
    rows = (
        row(1, started=STARTED - 20, duration=19.0, prompt=1000, completion=1000),
        row(2, started=STARTED - 20, duration=21.0, prompt=1, completion=1),
        row(3, started=STARTED + 49, duration=5.0, prompt=10, completion=2),
        row(4, started=STARTED + 60, duration=40.0, prompt=100, completion=8),
        row(5, started=STARTED + 60, duration=45.0, prompt=3, completion=2),
    )
    write(store, [BEGIN, middle, end], rows)
    [first], [second] = reconciled(store, 50).servers, reconciled(store, 100).servers
    assert (first.prompt, first.completion) == (Classes(engine=1, ledger=1), Classes(engine=1, ledger=1))
    assert (second.prompt, second.completion) == (Classes(engine=111, ledger=111), Classes(engine=11, ledger=11))
    [third] = reconciled(store, 200).servers
    assert (third.prompt_unsampled, third.completion_unsampled) == (3, 2)


def test_requests_in_flight_at_an_end_are_stated(store: UsageStore) -> None:
    end = replace(BEGIN, time=STARTED + 100, quiet=False, prompt=10, completion=4)
    late = replace(end, time=STARTED + 4000, completion=9, finished_prompt=10, finished_completion=9, quiet=False)
    write(store, [replace(BEGIN, quiet=False), end, late], [row(1, started=STARTED + 99, duration=2.0, prompt=10, completion=9)])
    [found] = reconciled(store, 100).servers
    assert (found.prompt_in_progress, found.completion_in_progress) == (10, 9)
    assert (found.prompt.cancelled_prefill, found.completion.not_delivered) == (10, 4)
    assert "requests with 10 prompt and 9 completion tokens were in flight" in printed(reconciled(store, 100), "table")


def test_an_engine_that_was_killed_leaves_rows_that_no_counter_confirms(store: UsageStore) -> None:
    end = replace(BEGIN, time=STARTED + 10, prompt=10, completion=5, finished_prompt=10, finished_completion=5, responses=1)
    restarted = replace(end, started=round((STARTED + 30) * 1000), time=STARTED + 40)
    rows = [row(number, started=STARTED + at, prompt=10, completion=5) for number, at in ((1, 1), (2, 11), (3, 35))]
    write(store, [BEGIN, end, restarted.at_start(STARTED + 30), restarted], rows)
    [found] = reconciled(store).servers
    assert (found.engines, found.prompt_unsampled, found.completion_unsampled) == (2, 10, 5)
    assert (found.prompt, found.completion) == (Classes(engine=20, ledger=20), Classes(engine=10, ledger=10))


def test_a_database_without_samples_has_nothing(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/empty.db")
    assert run_reconciliation(engine, UsageQuery((), NOW, NOW)).servers == ()
    engine.dispose()


def test_a_reconciliation_takes_no_keys_and_no_groups() -> None:
    query = parse_reconciliation_query({"since": "7d", "model": "tiny", "reconcile": "true"}, NOW)
    assert (query.model, query.until) == ("tiny", NOW)
    for name in ("by", "key", "team", "color"):
        with pytest.raises(QueryError, match=f"takes no {name}"):
            parse_reconciliation_query({name: "key"}, NOW)


def printed(result: Reconciliation, form: str) -> str:
    text = io.StringIO()
    FORMATS[form](result, Console(file=text, width=250, highlight=False))
    return text.getvalue()


def test_the_output_has_each_class(store: UsageStore) -> None:
    write(store, [BEGIN, END], [*ROWS, row(8, started=STARTED + 150, prompt=4, completion=5)])
    result = reconciled(store)
    table = printed(result, "table")
    assert [line.split()[-7:] for line in table.splitlines()[1:3]] == [
        ["110", "20", "0", "5", "800", "1,000", "0"],
        ["27", "0", "17", "0", "100", "3", "0"],
    ]
    assert "4 prompt and 5 completion tokens of the ledger are outside" in table
    lines = printed(result, "csv").splitlines()
    assert lines[0].startswith(
        "model,server,tokens,since,until,engine,ledger,mirrored,continued,choices,not_delivered,cancelled_prefill,direct_use,lost"
    )
    assert lines[2].endswith(",147,27,0,0,0,17,0,100,3,0,0,0,0,5")
    document = json.loads(printed(result, "json"))
    assert parse_reconciliation(document) == result
    assert "nothing" in printed(Reconciliation(result.query, ()), "table")
