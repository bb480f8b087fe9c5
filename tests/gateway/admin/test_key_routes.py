"""Owners of teams on the admin port: the keys of the own team, within its policy, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from gateway.access.actor import Role
from tests.gateway.self_service.stage import Browser, accepts, admin, browser, models, person, running
from tests.support.process import Gateway

KEYS, TEAMS = "/admin/v1/keys", "/admin/v1/teams"
ANY = {"if-match": "*"}
OLGA = person("olga", owned=("lab", "closed"))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running(tmp_path_factory.mktemp("owners")) as made:
        yield made


@pytest.fixture(scope="module")
def keys(one: Gateway) -> dict[str, str]:
    """Return a key of an admin in the owner's team, in another team, and without one: by its ID."""
    teams = {"of-lab": {"team": "lab"}, "of-open": {"team": "open"}, "of-none": {}, "of-closed": {"team": "closed"}}
    return {identity: admin(one, "POST", KEYS, json={"id": identity, **team}).json()["secret"] for identity, team in teams.items()}


@pytest.fixture
def olga(one: Gateway) -> Browser:
    return browser(one, OLGA, "admin")


def error(response: httpx2.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]


def test_an_owner_sees_the_keys_of_the_own_teams_only(olga: Browser, keys: dict[str, str]) -> None:
    listed = olga.send("GET", KEYS).json()["keys"]
    assert {"of-lab", "of-closed"} <= {each["id"] for each in listed} and {each["team"] for each in listed} == {"lab", "closed"}
    assert {each["id"] for each in olga.send("GET", f"{KEYS}?team=closed").json()["keys"]} == {"of-closed"}
    for team in ("open", "no-such-team"):
        assert olga.send("GET", f"{KEYS}?team={team}").json()["keys"] == []
    assert olga.send("GET", f"{KEYS}/of-lab").json()["team"] == "lab"


@pytest.mark.parametrize("identity", ["of-open", "of-none"])
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("GET", "", None), ("PATCH", "", {"name": "x"}), ("DELETE", "", None), ("POST", "/rotate", {}), ("POST", "/revoke", {}),
     ("POST", "/restore", {})],
)  # fmt: skip
def test_a_key_of_another_team_does_not_exist(
    one: Gateway, olga: Browser, keys: dict[str, str], identity: str, method: str, path: str, body: dict[str, Any] | None
) -> None:
    more: dict[str, Any] = {"headers": ANY} | ({} if body is None else {"json": body})
    others, missing = (olga.send(method, f"{KEYS}/{each}{path}", **more) for each in (identity, "missing"))
    assert error(others) == (404, f"there is no key {identity} in the store")
    assert error(missing) == (404, "there is no key missing in the store")
    assert accepts(one, keys[identity])


def test_an_owner_manages_a_key_within_the_policy(one: Gateway, olga: Browser) -> None:
    made = olga.send("POST", KEYS, json={"team": "lab", "name": "Robot"})
    assert made.status_code == 201, made.text
    key = made.json()
    assert key["made_by"] == {"issuer": OLGA.issuer, "subject": "olga"} and key["limits"]["requests_per_minute"] == 60
    assert accepts(one, key["secret"], 4)
    path = f"{KEYS}/{key['id']}"
    lowered = olga.send("PATCH", path, headers=ANY, json={"limits": {"requests_per_minute": 5}}).json()
    assert (lowered["limits"]["requests_per_minute"], lowered["limits"]["cost_per_day"]) == (5, 5)
    for patch in (
        {"limits": {"requests_per_minute": 61}}, {"limits": {"cost_per_day": 6.0}}, {"expires": "2099-01-01"}, {"models": ["*"]},
        {"team": "open"}, {"team": None}, {"priority": -1}, {"labels": {"a": "b"}}, {"user_header": "X-User"},
    ):  # fmt: skip
        assert olga.send("PATCH", path, headers=ANY, json=patch).status_code == 400, patch
    assert olga.send("POST", f"{path}/rotate", headers=ANY, json={"overlap": "0s"}).status_code == 200
    assert models(one, key["secret"]) == 401
    assert olga.send("POST", f"{path}/revoke", headers=ANY, json={}).json()["state"] == "revoked"
    assert error(olga.send("POST", f"{path}/restore", headers=ANY, json={})) == (403, "only an administrator restores keys")
    assert olga.send("DELETE", path, headers=ANY).status_code == 204
    entries = [json.loads(line) for line in (one.folder / "audit.jsonl").read_text().splitlines()]
    assert {each["actor"]["name"] for each in entries if each["target"] == key["id"]} == {"one:olga"}
    assert entries[-2]["action"] == "request.refused" and entries[-2]["after"] == {"reason": "only an administrator restores keys"}


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"team": "open"}, 403), ({"team": "closed"}, 403), ({"team": "no-such-team"}, 403), ({}, 400),
     ({"team": "lab", "id": "of-open"}, 400),
     ({"team": "lab", "limits": {"requests_per_minute": 61}}, 400), ({"team": "lab", "expires": "2099-01-01"}, 400)],
)  # fmt: skip
def test_an_owner_creates_nothing_beyond_the_policy(olga: Browser, keys: dict[str, str], fields: dict[str, Any], status: int) -> None:
    before = olga.send("GET", KEYS).json()
    assert olga.send("POST", KEYS, json=fields).status_code == status
    assert olga.send("GET", KEYS).json() == before


def test_an_owner_rotates_nothing_in_a_team_without_a_policy(one: Gateway, olga: Browser, keys: dict[str, str]) -> None:
    assert olga.send("POST", f"{KEYS}/of-closed/rotate", headers=ANY, json={}).status_code == 403
    assert olga.send("POST", f"{KEYS}/of-closed/revoke", headers=ANY, json={}).json()["state"] == "revoked"
    assert models(one, keys["of-closed"]) == 401


def test_an_owner_changes_no_team_and_imports_nothing(olga: Browser) -> None:
    policy = {"self_service": {"max_keys": 1000}}
    for method, path, body in (
        ("POST", TEAMS, {"id": "mine", **policy}), ("PATCH", f"{TEAMS}/lab", policy), ("DELETE", f"{TEAMS}/lab", None),
        ("POST", f"{KEYS}/import", None), ("GET", "/admin/v1/people", None), ("DELETE", "/admin/v1/people/x/sessions", None),
        ("POST", "/reload", None), ("GET", "/usage", None), ("GET", "/keys", None),
    ):  # fmt: skip
        response = olga.send(method, path, headers=ANY, **({} if body is None else {"json": body}))
        assert response.status_code == 403 and "has no role" in response.json()["error"], (method, path)


def test_an_owner_sees_the_own_teams_of_the_store(one: Gateway) -> None:
    for team in ("mine", "theirs"):
        admin(one, "POST", TEAMS, json={"id": team})
    owner = browser(one, person("otto", owned=("mine",)), "admin")
    assert [each["id"] for each in owner.send("GET", TEAMS).json()["teams"]] == ["mine"]
    assert owner.send("GET", f"{TEAMS}/mine").status_code == 200
    assert error(owner.send("GET", f"{TEAMS}/theirs")) == (404, "there is no team theirs in the store")


def test_the_page_of_another_site_changes_nothing(olga: Browser) -> None:
    for headers in ({"origin": "https://evil.example.com"}, {"sec-fetch-site": "cross-site"}):
        assert olga.send("POST", KEYS, headers=headers, json={"team": "lab"}).status_code == 403


@pytest.mark.parametrize(("role", "reads", "changes"), [(Role.VIEWER, 200, 403), (Role.OPERATOR, 200, 403), (Role.ADMIN, 200, 200)])
def test_a_role_covers_all_teams(one: Gateway, keys: dict[str, str], role: Role, reads: int, changes: int) -> None:
    someone = browser(one, person(str(role), role=role), "admin")
    assert someone.send("GET", f"{KEYS}/of-open").status_code == reads
    assert someone.send("PATCH", f"{KEYS}/of-open", headers=ANY, json={"labels": {"a": "b"}}).status_code == changes


def test_a_person_without_an_own_team_has_no_access(one: Gateway, keys: dict[str, str]) -> None:
    tom = browser(one, person("tom", "lab"), "admin")
    for method, path in (("GET", KEYS), ("GET", f"{KEYS}/of-lab"), ("POST", KEYS), ("POST", f"{KEYS}/of-lab/revoke")):
        assert tom.send(method, path, headers=ANY).status_code == 403
