"""The console's page of people: a sign-in link, the person who used it, and the end of the sessions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.console.stage import HOSTILE, Console, console

PEOPLE = "/admin/v1/people"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with console(tmp_path_factory.mktemp("console")) as made:
        yield made


@pytest.fixture(autouse=True)
def no_complaint(shown: Console) -> Iterator[None]:
    yield
    shown.check()


def test_a_person_signs_in_with_a_link_and_is_signed_out(shown: Console) -> None:
    shown.open("/console/people")
    shown.shows("No person has signed in yet")
    shown.click("Create a sign-in link")
    shown.fill("Name of the person", HOSTILE)
    shown.fill("Role in this console", "viewer")
    shown.fill("Teams that", "lab")
    assert "login-link --user '<img" in shown.browser.text() and "--role viewer --owned-team lab" in shown.browser.text()
    shown.submit()
    shown.shows("It is not shown again.")
    links = shown.browser.evaluate("[...document.querySelectorAll('dialog[open] pre')].map((one) => one.textContent)")
    shown.browser.open(next(each for each in links if each.startswith(shown.url)))
    shown.browser.wait("document.querySelector('form button')")
    shown.browser.evaluate("document.querySelector('form button').click()")
    shown.browser.wait("location.pathname === '/console'")
    assert shown.send("GET", PEOPLE).json()["people"][0]["sessions"] == 1

    shown.open("/console/people")
    row = shown.browser.evaluate("document.querySelector('#people tbody tr:not([aria-hidden])').innerText")
    assert HOSTILE in row and "a link" in row and "viewer" in row and "lab (owner)" in row
    shown.browser.resize(390, 800)
    shown.check()
    assert shown.browser.axe() == []
    shown.browser.resize(1440, 900)
    shown.click("End all")
    shown.shows("1 session ends on both ports")
    shown.submit()
    shown.shows("1 session of ")
    assert shown.send("GET", PEOPLE).json()["people"][0]["sessions"] == 0
    assert shown.buttons() == ["Create a sign-in link"]


def test_a_refused_link_is_explained(shown: Console) -> None:
    shown.open("/console/people")
    shown.click("Create a sign-in link")
    shown.fill("Name of the person", "carol")
    shown.submit()
    shown.shows("a link needs a role or a team")


def test_only_admins_see_people(shown: Console) -> None:
    shown.open("/console/people", "operator")
    assert "People are shown to admins only" in shown.browser.text() and shown.buttons() == []
