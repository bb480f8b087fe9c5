"""The console's page of teams: the list, one team, and each action on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.console.stage import HOSTILE, Console, console, use
from tests.support.process import wait_for

TEAMS = "/admin/v1/teams"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    empty = {"id": "without-keys", "limits": {"concurrent": 9}, "self_service": {"max_keys": 2}}
    with console(tmp_path_factory.mktemp("console"), teams=[{"id": "lab", "limits": {"cost_per_month": 100}}, empty]) as made:
        made.create(TEAMS, id=HOSTILE, limits={"tokens_per_day": 1000})
        made.create("/admin/v1/keys", id="of-hostile", team=HOSTILE)
        assert use(made.gateway) == 200
        wait_for(lambda: made.send("GET", "/usage").json()["requests"] == 1)
        yield made


@pytest.fixture(autouse=True)
def no_complaint(shown: Console) -> Iterator[None]:
    yield
    shown.check()


def test_teams_of_both_sources_with_their_closest_budget(shown: Console) -> None:
    shown.open("/console/teams")
    shown.browser.wait("document.querySelectorAll('#teams tbody tr').length > 1")
    rows = shown.browser.evaluate("[...document.querySelectorAll('#teams tbody tr')].map((one) => one.innerText)")
    assert any("lab" in row and "gateway.yaml" in row and "of 100 per month" in row for row in rows)
    assert any(HOSTILE in row and "1,000 tokens per day" in row for row in rows)
    assert any("without-keys" in row and "gateway.yaml" in row and "9 requests at once" in row and "up to 2 keys" in row for row in rows)
    counts = (
        "Object.fromEntries([...document.querySelectorAll('#teams tbody tr')].map((one) => [...one.cells].map((cell) => cell.innerText))"
    )
    found = shown.browser.evaluate(f"{counts}.filter((cells) => cells[2]).map((cells) => [cells[0], cells[2]]))")
    assert found == {HOSTILE: "1", "lab": "1", "without-keys": "0"}
    assert [each["keys"] for each in shown.send("GET", "/teams").json()["teams"]] == [1, 0]
    shown.open("/console/teams?id=without-keys")
    shown.shows("The team has no keys yet. Its limits: 9 requests at once.")


def test_a_team_is_created_changed_raised_and_deleted(shown: Console) -> None:
    shown.open("/console/teams")
    shown.click("Create a team")
    shown.fill("ID", "made-here")
    shown.fill("Tokens per day", "1000")
    shown.submit()
    shown.browser.wait("location.search === '?id=made-here' && document.body.innerText.includes('Self-service\\noff')")
    shown.click("Edit")
    shown.browser.evaluate("document.querySelector('dialog[open] [type=checkbox]').click()")
    shown.fill("Longest lifetime", "30d")
    shown.fill("Weight in queues", "2.5")
    assert "teams set made-here --weight 2.5" in shown.browser.text()
    shown.submit()
    shown.shows("up to 5 keys for each person, for at most 30d")
    shown.shows("weight 2.5, 2.5 times the default")
    policy = shown.send("GET", f"{TEAMS}/made-here").json()
    assert (policy["limits"], policy["weight"]) == ({"tokens_per_day": 1000}, 2.5) and policy["self_service"]["max_lifetime"] == "30d"
    shown.create("/admin/v1/keys", id="member", team="made-here")
    shown.open("/console/teams?id=made-here")
    shown.click("Raise a limit")
    shown.submit()
    shown.shows("Tokens per day to 2x until")
    shown.click("Delete")
    shown.submit()
    shown.shows("the key member belongs to made-here")
    assert shown.send("DELETE", "/admin/v1/keys/member").status_code == 204
    shown.submit()
    shown.browser.wait("location.search === '' && location.pathname === '/console/teams'")
    assert shown.send("GET", f"{TEAMS}/made-here").status_code == 404


def test_the_keys_that_use_the_budget_of_a_team(shown: Console) -> None:
    shown.browser.complaints.clear()
    shown.open("/console/teams?id=lab")
    assert "edit it there" in shown.browser.text() and shown.buttons() == ["Raise a limit"]
    assert "team-a" in shown.browser.evaluate("document.getElementById('who').innerText")
    assert [each for each in shown.browser.complaints if "404" in each] == []


def test_a_viewer_has_no_buttons(shown: Console) -> None:
    for path in ("/console/teams", "/console/teams?id=lab", f"/console/teams?id={HOSTILE}"):
        shown.open(path, "viewer")
        assert shown.buttons() == []


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("path", ["/console/teams", f"/console/teams?id={HOSTILE}"])
def test_a_page_fits_into_its_window(shown: Console, path: str, width: int) -> None:
    shown.check_width(path, width)


def test_axe_finds_nothing(shown: Console) -> None:
    for path in ("/console/teams", "/console/teams?id=lab", f"/console/teams?id={HOSTILE}"):
        shown.open(path)
        assert shown.browser.axe() == []
    shown.click("Edit")
    assert shown.browser.axe() == []
