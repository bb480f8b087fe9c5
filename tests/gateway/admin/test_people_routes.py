"""The people who have signed in, over the admin port and with commands: listed in pages, and signed out everywhere."""

from __future__ import annotations

import json
import sqlite3
import stat
from collections.abc import Iterator

import httpx2
import pytest

from gateway.access.actor import Role
from tests.gateway.self_service.stage import Browser, admin, browser, person, running
from tests.support.process import Gateway

PEOPLE = "/admin/v1/people"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running(tmp_path_factory.mktemp("people")) as made:
        yield made


def signed_in(one: Gateway, user: str, *arguments: str) -> Browser:
    """Sign a person in with a link on the data port, and return the browser."""
    origin, _, token = one.command("login-link", "--user", user, *arguments).stdout.split()[0].partition("/sign-in/link?token=")
    with httpx2.Client(trust_env=False, timeout=60, headers={"origin": origin}) as client:
        assert client.post(f"{origin}/sign-in/link", data={"token": token}).status_code == 303
        return Browser(origin, dict(client.cookies))


def test_people_are_listed_in_pages(one: Gateway) -> None:
    for user in ("ann", "ben", "cem"):
        signed_in(one, user, "--team", "lab", "--owned-team", "open")
    first = admin(one, "GET", f"{PEOPLE}?limit=2").json()
    rest = admin(one, "GET", f"{PEOPLE}?limit=2&cursor={first['next_cursor']}").json()
    assert [each["subject"] for each in (*first["people"], *rest["people"])] == ["ann", "ben", "cem"] and rest["next_cursor"] is None
    ann = first["people"][0]
    assert {name: ann[name] for name in ("issuer", "role", "teams", "owned_teams", "sessions")} == {
        "issuer": "", "role": None, "teams": ["lab", "open"], "owned_teams": ["open"], "sessions": 1
    }  # fmt: skip
    assert ann["last_sign_in"] >= ann["created"] and [
        each["subject"] for each in admin(one, "GET", f"{PEOPLE}?subject=ben").json()["people"]
    ] == ["ben"]
    for query in ("limit=0", "cursor=!", "cursor=W10", "cursor=AA", "subject=%00"):
        assert admin(one, "GET", f"{PEOPLE}?{query}").status_code == 400


def test_all_sessions_of_a_person_end(one: Gateway) -> None:
    browsers = [signed_in(one, "dora", "--team", "lab") for _ in range(2)]
    other = signed_in(one, "emil", "--team", "lab")
    (dora,) = admin(one, "GET", f"{PEOPLE}?subject=dora").json()["people"]
    assert dora["sessions"] == 2
    assert admin(one, "DELETE", f"{PEOPLE}/{dora['id']}/sessions").json() == {"ended": 2}
    assert [each.get("/me").status_code for each in (*browsers, other)] == [401, 401, 200]
    assert admin(one, "DELETE", f"{PEOPLE}/{dora['id']}/sessions").json() == {"ended": 0}
    assert admin(one, "DELETE", f"{PEOPLE}/none/sessions").status_code == 404
    entries = [json.loads(line) for line in (one.folder / "audit.jsonl").read_text().splitlines()]
    ended = [each for each in entries if each["action"] == "person.sessions.end"]
    assert [(each["target"], each["before"], each["actor"]["kind"]) for each in ended] == [
        ("dora", {"sessions": 2}, "token"), ("dora", {"sessions": 0}, "token")
    ]  # fmt: skip


def test_the_commands(one: Gateway) -> None:
    visitor = signed_in(one, "fred", "--role", "viewer")
    listed = one.command("people", "list")
    assert listed.returncode == 0 and "fred" in listed.stdout and "viewer" in listed.stdout, listed.stderr
    assert "fred" in {each["subject"] for each in json.loads(one.command("people", "list", "--json").stdout)}
    done = one.command("people", "sign-out", "fred")
    assert (done.returncode, done.stdout) == (0, "1 session of fred ended\n"), done.stderr
    assert visitor.get("/me").status_code == 401
    assert one.command("people", "sign-out", "fred", "--issuer", "https://login.example.com").returncode == 1
    missing = one.command("people", "sign-out", "nobody")
    assert missing.returncode == 1 and "no person nobody has signed in" in missing.stderr


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR])
def test_only_an_admin_sees_people(one: Gateway, role: Role) -> None:
    someone = browser(one, person(str(role), role=role), "admin")
    assert someone.send("GET", PEOPLE).status_code == 403
    assert someone.send("DELETE", f"{PEOPLE}/x/sessions").status_code == 403


def test_the_database_of_a_store_alone_is_private(one: Gateway) -> None:
    """People and keys are in one file, whichever part of the gateway opens it first."""
    assert stat.S_IMODE((one.folder / "keys.db").stat().st_mode) == 0o600
    with sqlite3.connect(one.folder / "keys.db") as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    assert {"gateway_people", "gateway_keys"} <= tables and not (one.folder / "usage.db").exists()


def test_an_admin_ends_sessions_from_a_page_of_this_origin_only(one: Gateway) -> None:
    boss = browser(one, person("boss", role=Role.ADMIN), "admin")
    assert boss.send("DELETE", f"{PEOPLE}/none/sessions", headers={"origin": "https://evil.example.com"}).status_code == 403
    assert boss.send("DELETE", f"{PEOPLE}/none/sessions").status_code == 404
