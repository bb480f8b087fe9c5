"""A closed month for finance: each format has the same sums, and no text of a key becomes a formula."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gateway.usage.month_sheet import FORMATS, HEADER, sheet

COUNTS = {
    "requests": 2,
    "incomplete": 1,
    "estimated": 0,
    "prompt_tokens": 20,
    "cached_tokens": 4,
    "completion_tokens": 10,
    "reasoning_tokens": 1,
}


def line(key: str = "a", **fields: Any) -> str:
    known = {"key": key, "team": "t", "model": "m", "labels": {"cost_center": "17"}, **COUNTS, "cost": "0.10"}
    return json.dumps(known | fields)


DOCUMENT: dict[str, Any] = {
    "month": "2026-10", "closed": "2026-11-02T08:00:00+00:00", "hash": "ab" * 32, "intact": True,
    "lines": [line(), line("b"), line("c", team=None, labels={}, cost=None), line("d", labels={"unit": "x"})],
    "corrections": [line(late="2026-11-03T00:00:00+00:00"), line("b", late="2026-11-03T00:00:00+00:00")],
}  # fmt: skip


def printed(form: str, document: dict[str, Any] = DOCUMENT, cost_center: str = "cost_center") -> str:
    out = io.StringIO()
    FORMATS[form](document, cost_center, Console(file=out, width=200))
    return out.getvalue()


def test_lines_are_summed_by_team_cost_center_and_model() -> None:
    found = [
        (each.group, each.counts[0], None if each.cost is None else str(each.cost), each.arrived) for each in sheet(DOCUMENT, "cost_center")
    ]
    assert found == [
        ((None, None, "m"), 2, None, None),
        (("t", None, "m"), 2, "0.10", None),
        (("t", "17", "m"), 4, "0.20", None),
        (("t", "17", "m"), 4, "0.20", "2026-11-03T00:00:00+00:00"),
    ]
    assert [each.group[1] for each in sheet(DOCUMENT, "unit")] == [None, None, "x", None]


def test_csv_has_a_line_for_each() -> None:
    header, *lines = csv.reader(io.StringIO(printed("csv")))
    assert header == [*HEADER]
    assert lines[2] == ["2026-10", "t", "17", "m", "4", "2", "0", "40", "8", "20", "2", "0.20", ""]
    assert lines[3][-1] == "2026-11-03T00:00:00+00:00"


def test_the_table_has_the_hash_and_the_total() -> None:
    shown = printed("table")
    assert "sha256 " + "ab" * 32 in shown and "arrived" in shown
    assert next(each for each in shown.splitlines() if each.startswith("total")).split()[1:] == [
        "12",
        "6",
        "0",
        "120",
        "24",
        "60",
        "6",
        "0.50",
    ]
    assert "arrived" not in printed("table", DOCUMENT | {"corrections": []})
    assert "no requests" in printed("table", DOCUMENT | {"lines": [], "corrections": []})


def test_the_lines_are_what_is_hashed() -> None:
    assert (
        hashlib.sha256(printed("lines").encode()).hexdigest()
        == hashlib.sha256("".join(f"{each}\n" for each in DOCUMENT["lines"]).encode()).hexdigest()
    )
    assert json.loads(printed("json")) == DOCUMENT


class Cells(HTMLParser):
    """The cells of a page, and the names of its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.elements: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.add(tag)
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data.strip("\n")


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20))
def test_any_team_is_a_text(team: str) -> None:
    document = DOCUMENT | {"lines": [line(team=team)], "corrections": []}
    cells = Cells()
    cells.feed(printed("html", document))
    expected = f"'{team}" if team[0] in "=+-@" else team
    assert cells.cells[1] == expected
    assert cells.elements == {"html", "head", "meta", "title", "body", "h1", "p", "table", "tr", "th", "td"}
    assert [*csv.reader(io.StringIO(printed("csv", document), newline=""))][1][1] == expected


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_prints_a_month_without_requests(form: str) -> None:
    assert printed(form, DOCUMENT | {"lines": [], "corrections": []}) or form == "lines"
