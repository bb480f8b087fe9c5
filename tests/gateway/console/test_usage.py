"""The console's page of usage: sums, the reconciliation in words, and closed months."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.gateway.console.stage import MARKUP, Console, console, use
from tests.support.process import wait_for


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    folder = tmp_path_factory.mktemp("console")
    with console(folder) as made:
        assert [use(made.gateway) for _ in range(3)] == [200] * 3
        wait_for(lambda: made.send("GET", "/usage").json()["requests"] == 3)
        with closing(sqlite3.connect(folder / "usage.db")) as ledger:  # one of the requests was in a month that has ended
            ledger.execute("update gateway_usage set day = '2025-03-05', time = '2025-03-05 12:00:00' where rowid = 1")
            ledger.commit()
        yield made


@pytest.fixture(autouse=True)
def no_complaint(shown: Console) -> Iterator[None]:
    yield
    shown.check()


def test_a_cost_has_its_unit_in_words(shown: Console) -> None:
    shown.open("/console/usage")
    text = shown.browser.evaluate("document.querySelector('.figures-row').innerText")
    assert "in the operator's currency" in text
    titles = "[...document.querySelectorAll('#usage thead th')].filter((one) => one.title).map((one) => [one.textContent, one.title])"
    assert shown.browser.evaluate(titles) == [["Share", "Of the tokens of all rows"], ["Cost", "In the operator's currency"]]
    shown.open("/console/keys?id=team-a")
    assert "left in the operator's currency" in shown.browser.text()
    shown.open("/console")
    shown.shows("Cost today (UTC)")
    shown.shows("in the operator's currency")


@pytest.mark.parametrize(
    ("by", "row"), [("team", "lab"), ("key", "team-a"), ("model", "sim/one"), ("user", MARKUP), ("label:cost_center", MARKUP)]
)
def test_usage_and_cost_by_each_dimension(shown: Console, by: str, row: str) -> None:
    shown.open(f"/console/usage?by={by}")
    first = shown.browser.evaluate("document.querySelector('#usage tbody tr:not([aria-hidden])').innerText.split('\\t')")
    assert row in first[0] and first[2] == "2"
    assert shown.browser.evaluate("document.querySelectorAll('.chart rect').length") == 60


def test_filters_are_in_the_address(shown: Console) -> None:
    shown.open("/console/usage?by=key&days=7")
    shown.browser.evaluate("(() => { const one = document.getElementById('team'); one.value = 'no-such-team'; "
                           "one.dispatchEvent(new Event('input', {bubbles: true})); })()")  # fmt: skip
    shown.shows("No requests in this period")
    assert "team=no-such-team" in shown.browser.evaluate("location.search")


def test_the_csv_has_the_numbers_of_the_table(shown: Console) -> None:
    shown.open("/console/usage?by=user")
    shown.browser.evaluate(
        "(() => { URL.createObjectURL = (blob) => { blob.text().then((text) => { window.saved = text; }); return '#'; }; })()"
    )
    shown.click("Download CSV")
    shown.browser.wait("window.saved")
    head, line = shown.browser.evaluate("window.saved").split("\r\n")
    assert head == "User,Requests,Prompt tokens,Cached tokens,Completion tokens,Cost"
    assert line.startswith(f"{MARKUP},2,")


def test_the_reconciliation_is_a_sentence_and_a_table(shown: Console) -> None:
    wait_for(lambda: shown.send("GET", "/usage?reconcile=true&since=today").json()["servers"], 60)
    shown.open("/console/usage?part=reconciliation&days=1")
    shown.browser.wait("document.querySelector('.verdict')")
    verdict = shown.browser.evaluate("document.querySelector('.verdict').innerText")
    assert "The engines " in verdict
    for title in ("The engines counted", "The ledger has", "Difference", "By server"):
        assert title in shown.browser.text()


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"engine": 10, "ledger": 10, "difference": 0}, ["up", "The engines and the ledger have the same tokens."]),
        ({"engine": 10, "ledger": 8, "difference": 0},
         ["up", "The engines have counted 2 tokens more than the ledger (20%). All of them are explained below."]),
        ({"engine": 10, "ledger": 13, "difference": -3},
         ["failed", ("The engines have counted 3 tokens fewer than the ledger (30%). "
                     "3 of them are not explained: a server has lost counts, or clocks differ.")]),
    ],
)  # fmt: skip
def test_the_difference_in_words(shown: Console, row: dict[str, int], texts: list[str]) -> None:
    shown.open("/console/usage")
    assert shown.browser.evaluate(f"verdict([{row}])") == texts


def test_a_month_is_closed_once_and_its_report_is_opened(shown: Console) -> None:
    shown.open("/console/usage?part=months", "viewer")
    assert shown.buttons() == []
    shown.shows("No month is closed yet")
    shown.open("/console/usage?part=months")
    shown.click("Close a month")
    shown.fill("Month", "2025-03")
    assert "cannot be undone" in shown.browser.text() and "vllm-gateway usage close 2025-03" in shown.browser.text()
    shown.submit()
    shown.shows("2025-03 is closed, with 1 line.")
    shown.click("2025-03")
    shown.shows("The report has not changed since it was closed")
    month = shown.send("GET", "/admin/v1/months/2025-03").json()
    assert month["hash"] in shown.browser.text() and MARKUP in shown.browser.text()
    shown.browser.resize(390, 800)
    shown.open("/console/usage?part=months&month=2025-03", "viewer")
    shown.shows("The report has not changed since it was closed")
    shown.check()
    shown.browser.resize(1440, 900)


def test_a_month_that_has_not_ended_is_refused_in_the_dialog(shown: Console) -> None:
    shown.open("/console/usage?part=months")
    shown.click("Close a month")
    shown.fill("Month", "2099-01")
    shown.submit()
    shown.shows("2099-01 has not ended")


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("path", ["/console/usage", "/console/usage?part=reconciliation&days=1", "/console/usage?part=months"])
def test_a_page_fits_into_its_window(shown: Console, path: str, width: int) -> None:
    shown.check_width(path, width)


def test_axe_finds_nothing(shown: Console) -> None:
    for path in ("/console/usage", "/console/usage?part=reconciliation&days=1", "/console/usage?part=months"):
        shown.open(path)
        assert shown.browser.axe() == []
