"""The console's page of keys: search, one key, and each action on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.console.stage import HOSTILE, MARKUP, Console, console, use
from tests.support.process import wait_for

KEYS = "/admin/v1/keys"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with console(tmp_path_factory.mktemp("console")) as made:
        made.create("/admin/v1/teams", id="ops", limits={"tokens_per_day": 100_000})
        made.create(KEYS, id=HOSTILE, name=MARKUP, team="ops")
        yield made


@pytest.fixture(autouse=True)
def no_complaint(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "shown" in request.fixturenames:
        shown: Console = request.getfixturevalue("shown")
        shown.check()


def secret(shown: Console) -> str:
    """Return the secret that the dialog shows."""
    shown.shows("Copy it now.")
    found: str = shown.browser.evaluate("document.querySelector('dialog[open] pre').textContent")
    assert re.fullmatch(r"sk-\S{20,}", found)
    return found


def test_both_sources_are_listed_and_hostile_names_are_text(shown: Console) -> None:
    shown.open("/console/keys")
    rows = shown.browser.evaluate("[...document.querySelectorAll('#keys tbody tr')].map((one) => one.innerText)")
    assert any("team-a" in row and "gateway.yaml" in row for row in rows)
    assert any(HOSTILE in row and MARKUP in row and "store" in row for row in rows)
    assert shown.browser.evaluate("document.querySelectorAll('#page img, #page script').length") == 0


def test_the_labels_of_a_key_of_the_file(shown: Console) -> None:
    shown.open("/console/keys?id=team-a")
    shown.shows(f"cost_center: {MARKUP}")


@pytest.mark.parametrize(("text", "count"), [("مفتاح", 1), ("IMG/SRC", 1), ("ops", 1), ("no such key", 0), ("team-", 1)])
def test_a_search_finds_names_ids_and_teams(shown: Console, text: str, count: int) -> None:
    shown.open(f"/console/keys?search={text}")
    found = "document.querySelectorAll('#keys tbody tr:not([aria-hidden])').length"
    shown.browser.wait(f"{found} === {count}")
    if not count:
        shown.shows("No key matches")


def test_a_key_is_created_and_its_secret_is_shown_once(shown: Console) -> None:
    shown.open("/console/keys")
    shown.click("Create a key")
    shown.fill("ID", "created-here")
    shown.fill("Team", "ops")
    shown.fill("Tokens per day", "5,000")
    assert "keys new --id created-here --team ops --tokens-per-day 5000" in shown.browser.text()
    shown.submit()
    assert use(shown.gateway, secret(shown)) == 200
    stored = shown.send("GET", f"{KEYS}/created-here").json()
    assert (stored["team"], stored["limits"]) == ("ops", {"tokens_per_day": 5000})
    shown.open("/console/keys?id=created-here")
    assert "sk-" not in shown.browser.evaluate("document.getElementById('page').textContent")


def test_the_gateway_s_refusal_is_shown_in_the_dialog(shown: Console) -> None:
    shown.open("/console/keys")
    shown.click("Create a key")
    shown.fill("ID", "team-a")
    shown.submit()
    shown.shows("team-a is a key of the configuration")


def test_the_effect_of_a_lower_limit_is_shown_before_it_is_saved(shown: Console) -> None:
    made = shown.create(KEYS, id="limited", limits={"tokens_per_day": 10_000})
    assert use(shown.gateway, made["secret"]) == 200
    wait_for(lambda: shown.send("GET", "/limits?key=limited").json()["limits"][0]["used"] > 60)
    shown.open("/console/keys?id=limited")
    shown.shows("of 10,000 used")
    shown.click("Edit")
    shown.fill("Tokens per day", "9000")
    shown.shows("With 9,000, 8,")
    shown.fill("Tokens per day", "50")
    shown.shows("With 50, new requests are refused at once, for")
    shown.submit()
    shown.shows("limited is saved")
    assert shown.send("GET", f"{KEYS}/limited").json()["limits"] == {"tokens_per_day": 50}
    wait_for(lambda: use(shown.gateway, made["secret"]) == 429)
    shown.open("/console/keys")
    shown.shows("Full: ")


def test_a_change_that_was_made_meanwhile_is_not_overwritten(shown: Console) -> None:
    shown.create(KEYS, id="shared")
    shown.open("/console/keys?id=shared")
    shown.click("Edit")
    assert shown.send("PATCH", f"{KEYS}/shared", json={"name": "Changed meanwhile"}).status_code == 200
    shown.fill("Name", "Mine")
    shown.submit()
    shown.shows("It was changed meanwhile")
    assert "Changed meanwhile" in shown.browser.text()
    assert shown.send("GET", f"{KEYS}/shared").json()["name"] == "Changed meanwhile"


def test_a_limit_is_raised_for_a_time_and_the_raise_is_ended(shown: Console) -> None:
    shown.create(KEYS, id="raised", limits={"concurrent": 4})
    shown.open("/console/keys?id=raised", "operator")
    assert shown.buttons() == ["Raise a limit"]
    shown.click("Raise a limit")
    shown.fill("To", "2.5x")
    shown.shows("10 instead of 4")
    shown.submit()
    shown.shows("Requests at once to 2.5x until")
    assert shown.send("GET", "/limits?key=raised").json()["limits"][0]["amount"] == 10
    shown.click("End")
    shown.submit()
    shown.shows("No limit is raised at the moment.")


def test_a_key_is_rotated_revoked_restored_and_deleted(shown: Console) -> None:
    former = shown.create(KEYS, id="short-lived")["secret"]
    shown.open("/console/keys?id=short-lived")
    shown.click("Rotate")
    shown.submit()
    rotated = secret(shown)
    assert (use(shown.gateway, former), use(shown.gateway, rotated)) == (200, 200)
    shown.click("Close", "dialog[open]")
    shown.click("Revoke")
    shown.shows("vllm-gateway keys revoke short-lived")
    shown.submit()
    shown.shows("short-lived is revoked.")
    assert use(shown.gateway, rotated) == 401
    shown.click("Restore")
    shown.submit()
    shown.shows("short-lived is restored.")
    assert use(shown.gateway, rotated) == 200
    shown.click("Revoke")
    shown.submit()
    shown.browser.wait("!document.querySelector('dialog[open]')")
    shown.click("Delete")
    shown.submit()
    shown.browser.wait("location.pathname + location.search === '/console/keys'")
    assert shown.send("GET", f"{KEYS}/short-lived").status_code == 404


def test_a_key_that_burns_its_budget_is_revoked_from_the_list(shown: Console) -> None:
    made = shown.create(KEYS, id="burning", limits={"tokens_per_day": 100})
    while use(shown.gateway, made["secret"]) == 200:
        pass
    shown.open("/console/keys")
    shown.browser.wait("document.querySelector('#closest [aria-label=\"Revoke burning\"]')")
    shown.browser.evaluate("document.querySelector('#closest [aria-label=\"Revoke burning\"]').click()")
    shown.shows("Revoke burning")
    shown.browser.wait("document.querySelector('dialog[open]')")
    shown.submit()
    shown.shows("burning is revoked.")
    assert use(shown.gateway, made["secret"]) == 401


def test_limits_per_minute_are_among_the_closest(shown: Console) -> None:
    made = shown.create(KEYS, id="hasty", limits={"requests_per_minute": 2, "concurrent": 50})
    for _ in range(3):
        use(shown.gateway, made["secret"])
    shown.open("/console/keys")
    rows = shown.browser.evaluate("[...document.querySelectorAll('#closest tbody tr')].map((one) => one.innerText)")
    assert any("hasty" in row and "Requests per minute" in row and "of 2" in row for row in rows)


def test_a_key_of_the_file_is_edited_in_the_file(shown: Console) -> None:
    shown.open("/console/keys?id=team-a")
    assert "vllm-gateway keys revoke team-a" in shown.browser.text() and shown.buttons() == ["Raise a limit"]


def test_an_owner_manages_the_keys_of_the_own_team(shown: Console) -> None:
    shown.create("/admin/v1/teams", id="owned", self_service={"max_keys": 3})
    shown.create(KEYS, id="of-owned", team="owned", limits={"concurrent": 3})
    links = shown.send("POST", "/admin/v1/sign-in-links?user=olga&owned_team=owned").json()["urls"]
    shown.browser.evaluate("sessionStorage.clear()")
    shown.browser.open(next(each for each in links if each.startswith(shown.url)))
    shown.browser.wait("document.querySelector('form button')")
    shown.browser.evaluate("document.querySelector('form button').click()")
    shown.browser.wait("location.pathname === '/console'")
    shown.browser.open(f"{shown.url}/console/keys")
    shown.shows("1 key")
    assert "of-owned" in shown.browser.text() and "team-a" not in shown.browser.text()
    shown.click("Create a key")
    shown.fill("Name", "Robot")
    shown.submit()
    assert use(shown.gateway, secret(shown)) == 200
    shown.browser.open(f"{shown.url}/console/keys?id=of-owned")
    shown.browser.wait("document.getElementById('actions')?.childElementCount === 3")
    assert shown.buttons()[:3] == ["Edit", "Rotate", "Revoke"]
    shown.click("Revoke")
    shown.submit()
    shown.shows("of-owned is revoked.")


def test_a_viewer_has_no_buttons(shown: Console) -> None:
    for path in ("/console/keys", "/console/keys?id=shared", "/console/keys?id=team-a"):
        shown.open(path, "viewer")
        assert shown.buttons() == []


def test_a_missing_key_is_named(shown: Console) -> None:
    shown.open("/console/keys?id=never-made")
    assert "There is no such key" in shown.browser.text()


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("path", ["/console/keys", f"/console/keys?id={HOSTILE}", "/console/keys?id=team-a"])
def test_a_page_fits_into_its_window(shown: Console, path: str, width: int) -> None:
    shown.check_width(path, width)


def test_axe_finds_nothing(shown: Console) -> None:
    for path in ("/console/keys", f"/console/keys?id={HOSTILE}", "/console/keys?id=team-a"):
        shown.open(path)
        assert shown.browser.axe() == []
    shown.click("Raise a limit")
    assert shown.browser.axe() == []


def test_ten_thousand_rows_are_a_few_elements(shown: Console) -> None:
    shown.open("/console/keys")
    script = """(() => {
        const rows = Array.from({length: 10000}, (_, at) => ({ id: `key-${at}`, name: null, state: "valid", models: ["*"], limits: {} }));
        const table = longTable("Many", COLUMNS, WIDE);
        document.getElementById("keys").replaceChildren(table.node);
        table.add(rows);
        const seen = [];
        for (const share of [0, 0.5, 1]) {
            table.node.scrollTop = share * table.node.scrollHeight;
            table.node.dispatchEvent(new Event("scroll"));
            const middle = table.node.getBoundingClientRect();
            seen.push(document.elementFromPoint(middle.left + 60, Math.min(middle.top + 200, innerHeight - 5))?.textContent);
        }
        return [table.node.querySelectorAll("tr").length, table.node.querySelector("tbody tr:nth-last-child(2)").innerText, seen.length];
    })()"""
    count, last, _ = shown.browser.evaluate(script)
    assert count < 80 and "key-9999" in last


def test_without_store_ledger_and_sign_in_the_pages_say_how_to_configure_them(tmp_path: Path) -> None:
    with console(tmp_path, store=None, ledger=None, sign_in=None) as bare:
        for page, text in {
            "keys": "store: ledger", "teams": "store: ledger", "people": "sign_in:", "usage": "add ledger: sqlite:///usage.db",
            "usage?part=months": "add ledger: sqlite:///usage.db", "usage?part=reconciliation": "add ledger: sqlite:///usage.db",
        }.items():  # fmt: skip
            bare.open(f"/console/{page}")
            bare.shows(text)
            bare.check()
            assert set(bare.buttons()) <= {"Copy"}
        bare.open("/console/keys?id=team-a")
        assert bare.buttons() == ["Raise a limit"]
