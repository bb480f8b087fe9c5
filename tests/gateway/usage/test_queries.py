"""Queries of the ledger: sums, and how they are printed."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from sqlalchemy import update

from gateway.cli.main import run
from gateway.ledger.row import LOST, MIRRORED
from gateway.ledger.schema import USAGE
from gateway.ledger.store import UsageStore, database_url
from gateway.snapshot.identity import subject_id
from gateway.snapshot.link import UsageRequested
from gateway.snapshot.money import MAX_COST, MAX_PRICE
from gateway.snapshot.snapshot import Key
from gateway.usage.errors import QueryError
from gateway.usage.key_report import parse_own_query
from gateway.usage.output import FORMATS
from gateway.usage.queries import UsageReport, UsageSum, parse_query, parse_report, run_query
from tests.gateway.ledger.rows import STARTED, row
from tests.support.money import price
from tests.support.process import configuration

NOW = datetime.fromtimestamp(STARTED, UTC)
DAY = 86400.0
UNTOLD: dict[str, Any] = {"prompt": None, "completion": None, "cached": None, "reasoning": None}
ROWS = [
    row(1, price=price(1.0, 2.0)),
    row(2, team="t", price=price(1.0, 2.0), started=STARTED - DAY),
    row(3, team="t", model="big", server="big#0", prompt=1000, completion=0, cached=0, reasoning=0),
    row(
        4,
        key="team-b",
        model="big",
        server="big#1",
        incomplete="client",
        estimated_by="events",
        first_token=0.1,
        prompt=None,
        completion=7,
        cached=None,
        reasoning=None,
    ),
    row(5, key="team-b", model=None, server=None, status=404, prompt=None, completion=None, cached=None, reasoning=None),
    row(6, key="team-b", incomplete=LOST, status=None, prompt=None, completion=None, cached=None, reasoning=None),
    row(7, started=STARTED - 40 * DAY),
]


@pytest.fixture
def store(url: str, tmp_path: Path) -> Iterator[UsageStore]:
    with closing(UsageStore(database_url(url, tmp_path))) as made:
        made.write(ROWS)
        yield made


def report_of(store: UsageStore, **parameters: str) -> UsageReport:
    return run_query(store.engine, parse_query({"until": "2027-01-16", **parameters}, NOW))


def sums_of(report: UsageReport) -> dict[tuple[str | None, ...], tuple[Any, ...]]:
    return {
        each.group: (each.requests, each.incomplete, each.estimated, each.prompt_tokens, each.completion_tokens, each.cost)
        for each in report.sums
    }


def test_copies_of_requests_are_in_no_report(store: UsageStore) -> None:
    before = sums_of(report_of(store, by="model,day"))
    store.write([row(8, key=MIRRORED, model="copied"), row(9, key=MIRRORED)])
    assert sums_of(report_of(store, by="model,day")) == before


def test_sums_are_grouped_by_the_requested_dimensions(store: UsageStore) -> None:
    assert sums_of(report_of(store, by="key")) == {
        ("team-a",): (3, 0, 0, 1020, 10, 40_000),
        ("team-b",): (3, 2, 1, 0, 7, None),
    }
    assert sums_of(report_of(store, by="team")) == {("t",): (2, 0, 0, 1010, 5, 20_000), (None,): (4, 2, 1, 10, 12, 20_000)}
    assert set(sums_of(report_of(store, by="model,server"))) == {
        ("big", "big#0"), ("big", "big#1"), ("tiny", "tiny#0"), (None, None),
    }  # fmt: skip
    assert list(sums_of(report_of(store, by="day"))) == [("2027-01-14",), ("2027-01-15",)]
    assert sums_of(report_of(store, by="day,key"))["2027-01-14", "team-a"] == (1, 0, 0, 10, 5, 20_000)


def test_costs_of_any_size_are_added(url: str, tmp_path: Path) -> None:
    """The largest costs that a row can have, whose sum exceeds 64 bits."""
    with closing(UsageStore(database_url(url, tmp_path))) as store:
        store.write([row(number, price=price(MAX_PRICE, 0.0), prompt=2**40) for number in range(1, 5)] + [row(5, price=price(1.0, 2.0))])
        assert sums_of(report_of(store, by="key"))["team-a",][-1] == 4 * MAX_COST + 20_000


def test_usage_by_end_user_label_code_and_endpoint(url: str, tmp_path: Path) -> None:
    rows = [
        row(1, user="17", labels={"cost_center": "a", "x.y/z": "1"}, price=price(1.0, 1.0)),
        row(2, user="17", labels={"cost_center": "b"}, endpoint="/v1/completions"),
        row(3, user="Jürgen", labels={"cost_center": "a"}, code="insufficient_quota", status=429, prompt=None, completion=None),
        row(4),
    ]
    with closing(UsageStore(database_url(url, tmp_path))) as store:
        store.write(rows)

        def requests_by(by: str) -> dict[tuple[str | None, ...], int]:
            return {each.group: each.requests for each in report_of(store, by=by).sums}

        assert requests_by("user") == {("17",): 2, ("Jürgen",): 1, (None,): 1}
        assert requests_by("label:cost_center") == {("a",): 2, ("b",): 1, (None,): 1}
        assert requests_by("label:x.y/z") == {("1",): 1, (None,): 3}
        assert requests_by("label:unknown") == {(None,): 4}
        assert requests_by("code,endpoint") == {
            (None, "/v1/chat/completions"): 2, (None, "/v1/completions"): 1, ("insufficient_quota", "/v1/chat/completions"): 1,
        }  # fmt: skip
        assert requests_by("label:cost_center,user,day")["a", "17", "2027-01-15"] == 1
        assert requests_by("label:cost_center,label:x.y/z") == {("a", "1"): 1, ("a", None): 1, ("b", None): 1, (None, None): 1}
        report = report_of(store, by="user,label:cost_center")
        assert parse_report(json.loads(shown(report, "json"), parse_float=Decimal)).sums == report.sums
        assert shown(report, "csv").startswith("user,label:cost_center,requests,")


def test_the_number_of_groups_is_bounded(url: str, tmp_path: Path) -> None:
    """Clients choose the values of `user`. Those with the most tokens are shown."""
    with closing(UsageStore(database_url(url, tmp_path))) as store:
        store.write([row(number, user=f"user-{number}", prompt=number, started=STARTED - DAY * (number % 2)) for number in range(10)])
        query = parse_query({"by": "day,user", "until": "2027-01-16"}, NOW)
        report = run_query(store.engine, query, max_groups=3)
        assert [each.group for each in report.sums] == [("2027-01-14", "user-9"), ("2027-01-14", "user-7"), ("2027-01-15", "user-8")]
        document = json.loads(shown(report, "json"))
        assert report.truncated and document["truncated"] and parse_report(document).truncated
        assert not run_query(store.engine, query, max_groups=10).truncated


def test_the_largest_sums_come_first(store: UsageStore) -> None:
    assert list(sums_of(report_of(store, by="model"))) == [("big",), ("tiny",), (None,)]


def test_a_time_range_excludes_its_end(store: UsageStore) -> None:
    assert sums_of(report_of(store, by="key", since="2027-01-14", until="2027-01-15"))["team-a",][0] == 1
    assert sums_of(report_of(store, by="key", since="60d"))["team-a",][0] == 4
    exactly = (NOW).isoformat()
    assert sums_of(report_of(store, by="key", since="2027-01-15", until=exactly)) == {}
    assert sums_of(report_of(store, by="key", since=exactly))["team-a",][0] == 2
    assert sums_of(report_of(store, by="key", since="2027-01-15T09:00:00+01:00"))["team-a",][0] == 2, "which is 8 o'clock in UTC"


def test_usage_of_one_key_team_or_model(store: UsageStore) -> None:
    assert sums_of(report_of(store, by="model", key="team-b")) == {("big",): (1, 1, 1, 0, 7, None), (None,): (1, 0, 0, 0, 0, None),
                                                            ("tiny",): (1, 1, 0, 0, 0, None)}  # fmt: skip
    assert set(sums_of(report_of(store, by="key", model="big"))) == {("team-a",), ("team-b",)}
    assert sums_of(report_of(store, by="key", team="t")) == {("team-a",): (2, 0, 0, 1010, 5, 20_000)}


def test_subjects_of_tokens_belong_to_their_entry(store: UsageStore) -> None:
    store.write([row(11, key="s_aff/alice"), row(12, key="s_aff/bob", team="t"), row(13, key="sxaff/eve"), row(14, key="s_affx")])
    assert set(sums_of(report_of(store, by="key", key="s_aff"))) == {("s_aff/alice",), ("s_aff/bob",)}
    assert set(sums_of(report_of(store, by="key", key="s_aff", team="t"))) == {("s_aff/bob",)}
    assert set(sums_of(report_of(store, by="key", key="s_aff/alice"))) == {("s_aff/alice",)}


def test_rows_of_an_entry_with_a_slash_are_found(store: UsageStore) -> None:
    store.write([row(11, key="a%2Fb/c"), row(12, key="a/b/c"), row(13, key="a/c"), row(14, key="a%2Fb/d")])
    assert set(sums_of(report_of(store, by="key", key="a/b"))) == {("a%2Fb/c",), ("a%2Fb/d",)}
    own = Key(subject_id("a/b", "c"), entry="a/b")
    query = parse_own_query(UsageRequested(1, own.id, {"since": "2026-01"}), NOW + timedelta(days=1))
    assert run_query(store.engine, query).requests == 1


@pytest.mark.parametrize(
    ("text", "since"),
    [
        ("2026-11", "2026-11-01T00:00:00+00:00"),
        ("2026-11-03", "2026-11-03T00:00:00+00:00"),
        ("this-month", "2027-01-01T00:00:00+00:00"),
        ("today", "2027-01-15T00:00:00+00:00"),
        ("yesterday", "2027-01-14T00:00:00+00:00"),
        ("12h", "2027-01-14T20:00:00.500000+00:00"),
    ],
)
def test_times_as_operators_write_them(text: str, since: str) -> None:
    assert parse_query({"since": text}, NOW).since.isoformat() == since
    assert parse_query({"since": "2026-01", "until": text}, NOW).until.isoformat() == since
    elsewhere = NOW.astimezone(timezone(timedelta(hours=-11)))
    assert parse_query({"since": text}, elsewhere).since.isoformat() == since, "days and months are those of UTC"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"by": "color"}, "not shown by color: choose from code, day, endpoint, key, model, server, team, user, label:NAME"),
        ({"by": ""}, "by nothing"),
        ({"by": "label"}, "not shown by label; did you mean .*label:NAME|not shown by label: choose from"),
        ({"by": "label:"}, "not shown by label:"),
        ({"by": 'label:a"b'}, "not shown by label:a"),
        ({"since": "tomorrow"}, "tomorrow is not a time: use a date .* or today, yesterday, this-month"),
        ({"since": "2027-13"}, "2027-13 is not a time"),
        ({"since": "99999999999d"}, "99999999999d is not a time"),
        ({"since": "0001-01-01T00:00:00+14:00"}, "is not a time: use a date such as"),
        ({"since": "2027-01-02", "until": "2027-01-01"}, "ends before it starts"),
        ({"sinse": "1d"}, "did you mean `since`"),
        ({"key": "a\0b"}, "no key has a NUL"),
    ],
)
def test_an_invalid_query_is_refused_with_the_reason(parameters: dict[str, str], message: str) -> None:
    with pytest.raises(QueryError, match=message):
        parse_query(parameters, NOW)


def shown(report: UsageReport, form: str) -> str:
    out = io.StringIO()
    FORMATS[form](report, Console(file=out, width=160, highlight=False))
    return out.getvalue()


def test_a_table_has_bars_and_a_cost_where_there_are_prices(store: UsageStore) -> None:
    text = shown(report_of(store, by="key"), "table")
    _, head, first, second, total, currency, note = text.rstrip("\n").splitlines()
    assert head.split() == ["key", "requests", "incomplete", "estimated", "prompt", "cached", "completion", "reasoning", "cost", "tokens"]
    assert first.split()[:8] == ["team-a", "3", "0", "0", "1,020", "4", "10", "2"] and second.split()[:3] == ["team-b", "3", "2"]
    assert total.split()[:3] == ["total", "6", "2"] and total.split()[4:6] == ["1,020", "4"]
    assert currency == "cost: in the currency of models[].price"
    assert first.count("█") == 24 and second.count("█") == 0 and "~7" in second and "estimated" in note
    assert "cost" not in shown(report_of(store, by="key", model="big"), "table")
    assert "no requests" in shown(report_of(store, key="nobody"), "table")


def test_the_share_of_estimates_is_reported_by_method(url: str, tmp_path: Path) -> None:
    methods = [*["events"] * 3, *["tokenize"] * 1, *[None] * 96]
    with closing(UsageStore(database_url(url, tmp_path))) as store:
        store.write([row(number, estimated_by=method, key=f"key-{number % 3}") for number, method in enumerate(methods)])
        report = report_of(store, by="key")
        assert (report.requests, report.estimated_by) == (100, {"events": 3, "tokenize": 1})
        line = "~ tokens of 4.00% of the requests are estimated: events 3.00%, tokenize 1.00%"
        assert shown(report, "table").rstrip("\n").endswith(line)
        document = json.loads(shown(report, "json"))
        assert (document["requests"], document["estimated_by"]) == (100, {"events": 3, "tokenize": 1})
        assert parse_report(document).estimated_by == report.estimated_by
        nothing = report_of(store, by="key", key="nobody")
        assert (nothing.requests, nothing.estimated_by) == (0, {})
        with store.engine.begin() as connection:
            connection.execute(update(USAGE).where(USAGE.c.request_id == "req_2").values(estimated=True, estimated_by=None))
        assert report_of(store, by="key").estimated_by == {"events": 2, "tokenize": 1, "unknown": 1}


def test_times_are_printed_in_utc(store: UsageStore) -> None:
    here = report_of(store, since="2027-01-15T01:30:00+03:00", until="2027-01-15T20:00:00-08:00")
    assert shown(here, "table").startswith("usage from 2027-01-14 22:30 to 2027-01-16 04:00 UTC\n")
    assert here.document()["since"] == "2027-01-14T22:30:00+00:00"


def test_csv_and_json_have_the_same_sums(store: UsageStore) -> None:
    lines = list(csv.DictReader(io.StringIO(shown(report_of(store, by="key,model"), "csv"))))
    document = json.loads(shown(report_of(store, by="key,model"), "json"))
    assert [line["key"] for line in lines] == [each["key"] for each in document["usage"]]
    first = document["usage"][0]
    assert (first["key"], first["model"], first["prompt_tokens"], first["cost"]) == ("team-a", "big", 1000, None)
    assert {name: str(value) if value is not None else "" for name, value in first.items()} == lines[0]
    assert document["by"] == ["key", "model"] and document["until"] == "2027-01-16T00:00:00+00:00"


@pytest.mark.parametrize(
    ("costs", "table", "listed"),
    [
        ([34_000], ["0.000034"], ["0.000034"]),
        ([1_234_500_000_000, 40_000, 0], ["1,234.50000", "0.00004", "0.00000"], ["1234.5", "0.00004", "0"]),
        ([12_000_000_000, 250_000_000], ["12.00", "0.25"], ["12", "0.25"]),
        ([1], ["0.000000001"], ["0.000000001"]),
        ([1_234_567_123_456_789], ["1,234,567.123456789"], ["1234567.123456789"]),
        ([3 * 10**31], ["30,000,000,000,000,000,000,000.00"], ["30000000000000000000000"]),
        ([0], ["0.00"], ["0"]),
    ],
)
def test_costs_are_exact_decimals(costs: list[int], table: list[str], listed: list[str]) -> None:
    sums = [UsageSum((f"key-{number}",), 1, 0, 0, 1, 1, 0, 0, cost) for number, cost in enumerate(costs)]
    made = UsageReport(parse_query({"by": "key"}, NOW), sums)
    rows = [line.split() for line in shown(made, "table").splitlines()[2:]]
    assert [row[8] for row in rows if row[0].startswith("key-")] == table
    assert [line["cost"] for line in csv.DictReader(io.StringIO(shown(made, "csv")))] == listed
    text = shown(made, "json")
    assert [f"{Decimal(each['cost']):f}" for each in json.loads(text, parse_float=Decimal)["usage"]] == listed
    assert parse_report(json.loads(text, parse_float=Decimal)).sums == sums, "as another gateway's command reads it"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump(configuration({"id": "m", "launch": {}}) | {"ledger": "sqlite:///usage.db"}))
    return path


def test_the_command_works_without_a_gateway(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["usage", "--config", str(file)]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and f"there is no file {file.parent / 'usage.db'}; the gateway creates it with its first row" in printed.err
    assert not (file.parent / "usage.db").exists()
    with closing(UsageStore(database_url("sqlite:///usage.db", file.parent))) as made:
        made.write([row(1, started=datetime.now(UTC).timestamp() - 60)])
    assert run(["usage", "--config", str(file), "--by", "model,day", "--format", "json", "--since", "1h"]) == 0
    (only,) = json.loads(capsys.readouterr().out)["usage"]
    assert (only["model"], only["requests"]) == ("tiny", 1)
    assert only["day"] in {(datetime.now(UTC) - timedelta(minutes=2)).date().isoformat(), datetime.now(UTC).date().isoformat()}


@pytest.mark.parametrize(
    ("parameters", "code", "message"),
    [
        (["--by", "color"], 2, "not shown by color"),
        (["--format", "xml"], 2, "table, csv, json"),
        (["--since", "never"], 2, "never is not a time"),
    ],
)
def test_the_command_reports_a_mistake(
    file: Path, capsys: pytest.CaptureFixture[str], parameters: list[str], code: int, message: str
) -> None:
    assert run(["usage", "--config", str(file), *parameters]) == code
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_an_unknown_key_is_named_if_it_has_no_rows(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(UsageStore(database_url("sqlite:///usage.db", file.parent))) as made:
        made.write([row(1, key="removed", started=datetime.now(UTC).timestamp() - 60)])
    known = configuration({"id": "m", "launch": {}})["keys"][0]["id"]
    hints = {"removed": "", known: "", known[:-1]: f"has no key {known[:-1]}; did you mean `{known}`?"}
    for key, hint in hints.items():
        assert run(["usage", "--config", str(file), "--key", key]) == 0
        captured = capsys.readouterr()
        assert hint in captured.err and bool(hint) == bool(captured.err)
        assert ("no requests" in captured.out) == (key != "removed")


def test_without_a_ledger_the_command_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump(configuration({"id": "m", "launch": {}})))
    assert run(["usage", "--config", str(path)]) == 1 and "has no ledger" in capsys.readouterr().err
    path.write_text(yaml.safe_dump(configuration({"id": "m", "launch": {}}) | {"ledger": "postgresql://u@127.0.0.1:1/x"}))
    assert run(["usage", "--config", str(path)]) == 1 and "does not respond" in capsys.readouterr().err
