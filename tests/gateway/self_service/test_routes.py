"""Self-service of a whole gateway: own keys, teams of an owner, and what people must not reach."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.auth.keys import hash_of
from gateway.self_service import openapi
from tests.gateway.self_service.stage import (
    CEILINGS,
    POLICY,
    PORTAL,
    TOKEN,
    Browser,
    accepts,
    admin,
    browser,
    models,
    person,
    running,
    settings,
)
from tests.support.postgres import Postgres
from tests.support.process import Gateway, gateway, wait_for
from tests.support.running import KEY

KEYS = f"{PORTAL}/keys"
NO_KEY = {
    "error": {"message": "There is no such key, or it is not yours.", "type": "invalid_request_error", "param": None, "code": "not_found"}
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("portal")
    with running(folder, settings(folder, ledger="sqlite:///usage.db")) as made:
        yield made


def code(response: httpx2.Response) -> tuple[int, str]:
    """Return the status and the code of an error, which has the form of the data port's errors."""
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}, response.text
    return response.status_code, error["code"]


def audited(one: Gateway, target: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (one.folder / "audit.jsonl").read_text().splitlines())
    return [line for line in lines if line["target"] == target]


def test_a_person_creates_names_rotates_revokes_and_deletes_a_key(one: Gateway) -> None:
    alice = browser(one, person("alice", "lab", "closed"))
    me = alice.get("/me").json()
    assert (me["issuer"], me["subject"], me["role"]) == ("https://login.example.com", "alice", None)
    assert {team["id"]: team["self_service"] for team in me["teams"]} == {
        "lab": POLICY, "closed": None
    }  # fmt: skip
    made = alice.created("lab", name="Laptop", limits={"requests_per_minute": 5})
    assert re.fullmatch(r"key-[0-9a-f]{12}", made["id"]) and made["name"] == "Laptop" and made["state"] == "valid"
    assert made["limits"] == CEILINGS | {"requests_per_minute": 5} and made["models"] == ["sim/*"]
    left = datetime.fromisoformat(made["expires"]) - datetime.now(UTC)
    assert timedelta(days=29) < left <= timedelta(days=30)
    assert accepts(one, made["secret"], 8), "the response comes after every worker knows the key"
    key = f"{KEYS}/{made['id']}"
    assert alice.send("PATCH", key, json={"name": "Desktop"}).json()["name"] == "Desktop"
    rotated = alice.send("POST", f"{key}/rotate", json={"overlap": "1h"}).json()
    assert accepts(one, made["secret"], 4) and accepts(one, rotated["secret"], 4) and len(rotated["hashes_end"]) == 1
    last = alice.send("POST", f"{key}/rotate", json={"overlap": "0s"}).json()["secret"]
    assert [models(one, each) for each in (made["secret"], rotated["secret"], last)] == [401, 401, 200]
    assert alice.send("POST", f"{key}/revoke").json()["state"] == "revoked"
    assert models(one, last) == 401
    listed = alice.get("/keys")
    assert [(each["id"], each["name"], each["state"]) for each in listed.json()["keys"]] == [(made["id"], "Desktop", "revoked")]
    assert not any(each in listed.text or hash_of(each)[7:] in listed.text for each in (made["secret"], last))
    assert alice.send("DELETE", key).status_code == 204
    assert alice.get("/keys").json()["keys"] == [] and alice.get(f"/keys/{made['id']}").json() == NO_KEY
    entries = audited(one, made["id"])
    assert [each["action"] for each in entries] == [f"key.{each}" for each in ("create", "change", "rotate", "rotate", "revoke", "delete")]
    assert {(each["actor"]["kind"], each["actor"]["name"], each["origin"]) for each in entries} == {("person", "one:alice", "127.0.0.1")}
    assert entries[0]["after"]["made_by"] == {"issuer": "https://login.example.com", "subject": "alice"}
    assert made["secret"] not in (one.folder / "audit.jsonl").read_text() + one.output + one.log


def test_pages_of_keys(one: Gateway) -> None:
    paula = browser(one, person("paula", "open"))
    ids = sorted(paula.created("open")["id"] for _ in range(3))
    first = paula.get("/keys", limit="2").json()
    second = paula.get("/keys", limit="2", cursor=first["next_cursor"]).json()
    assert [each["id"] for each in (*first["keys"], *second["keys"])] == ids and second["next_cursor"] is None
    for query in ({"limit": "0"}, {"limit": "x"}, {"cursor": "!"}, {"cursor": "AA"}):
        assert code(paula.get("/keys", **query)) == (400, "invalid_value")


# Keys of others


@pytest.fixture(scope="module")
def key_of_bob(one: Gateway) -> str:
    identity: str = browser(one, person("bob", "open")).created("open", name="Bob's")["id"]
    return identity


OTHERS = {
    "another person": person("carol", "open"),
    "the same subject of another issuer": person("bob", "open", issuer=""),
    "the owner of another team": person("olga", "open", owned=("lab",)),
    "an admin without a team": person("root"),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("GET", "", None), ("PATCH", "", {"name": "Mine"}), ("DELETE", "", None), ("POST", "/rotate", {}), ("POST", "/revoke", None)],
)
def test_the_key_of_another_person_does_not_exist(
    one: Gateway, key_of_bob: str, other: str, method: str, path: str, body: dict[str, Any] | None
) -> None:
    visitor = browser(one, OTHERS[other])
    more = {} if body is None else {"json": body}
    others, missing = (visitor.send(method, f"{KEYS}/{each}{path}", **more) for each in (key_of_bob, "key-000000000000"))
    assert others.status_code == missing.status_code == 404 and others.json() == missing.json() == NO_KEY
    bob = browser(one, person("bob", "open"))
    assert bob.get(f"/keys/{key_of_bob}").json()["name"] == "Bob's" and bob.get(f"/keys/{key_of_bob}").json()["state"] == "valid"


def test_the_usage_and_limits_of_anothers_key_do_not_exist(one: Gateway, key_of_bob: str) -> None:
    carol = browser(one, person("carol", "open"))
    for path in ("/usage", "/limits"):
        assert carol.get(path, key=key_of_bob).json() == carol.get(path, key="none").json() == NO_KEY
        assert key_of_bob not in carol.get(path).text


@pytest.mark.parametrize("path", ["keys", "members", "usage", "limits"])
@pytest.mark.parametrize("team", ["lab", "closed", "no-such-team", "lab%00"])
def test_a_team_that_one_does_not_own_does_not_exist(one: Gateway, path: str, team: str) -> None:
    tom = browser(one, person("carol", "lab", "open"))
    assert code(tom.get(f"/teams/{team}/{path}")) == (404, "not_found")


@pytest.mark.parametrize(
    "identity", ["a%00b", "..%2F..%2Fme", "%3Cscript%3E", "a%0d%0aset-cookie:%20x=y", "key-%e2%80%ae", "%ff", "x" * 2000, "'--", "%25"]
)
def test_an_id_with_markup_or_control_characters_is_no_key(one: Gateway, identity: str) -> None:
    alice = browser(one, person("alice", "lab"))
    for method, path in (("GET", ""), ("POST", "/revoke"), ("DELETE", "")):
        response = alice.send(method, f"{KEYS}/{identity}{path}")
        assert code(response)[0] in (400, 404) and "script" not in response.text and "x=y" not in str(response.headers)


@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>", "a\x1b[31m", "a\r\nset-cookie: x=y", "\u202egnp", "a\0", "x" * 101, ""])
def test_a_name_is_shown_as_text_or_refused(one: Gateway, name: str) -> None:
    nora = browser(one, person("nora", "open"))
    response = nora.create("open", name=name)
    if name.startswith("<"):
        assert response.status_code == 201 and response.headers["content-type"] == "application/json" and response.json()["name"] == name
    else:
        assert code(response) == (400, "invalid_value") and response.json()["error"]["param"] == "name"


# The policy of the team


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"team": "closed"}, (403, "permission_denied")),
        ({"team": "open"}, (403, "permission_denied")),
        ({"team": "no-such-team"}, (403, "permission_denied")),
        ({}, (400, "invalid_value")),
        ({"team": "lab", "expires": "2099-01-01"}, (400, "invalid_value")),
        ({"team": "lab", "models": ["other"]}, (400, "invalid_value")),
        ({"team": "lab", "models": ["*"]}, (400, "invalid_value")),
        ({"team": "lab", "limits": {"requests_per_minute": 61}}, (400, "invalid_value")),
        ({"team": "lab", "limits": {"cost_per_day": 5.01}}, (400, "invalid_value")),
        ({"team": "lab", "limits": {"budgets": [{"window": "7d", "tokens": 1001}]}}, (400, "invalid_value")),
        ({"team": "lab", "id": "team-a"}, (400, "invalid_value")),
        ({"team": "lab", "priority": -1}, (400, "invalid_value")),
        ({"team": "lab", "labels": {"a": "b"}}, (400, "invalid_value")),
        ({"team": "lab", "made_by": {"issuer": "", "subject": "bob"}}, (400, "invalid_value")),
    ],
)
def test_a_key_beyond_the_policy_is_refused_and_recorded(one: Gateway, fields: dict[str, Any], error: tuple[int, str]) -> None:
    mallory = browser(one, person("mallory", "lab", "closed"))
    before = len(audited(one, f"POST {KEYS}"))
    assert code(mallory.send("POST", KEYS, json=fields)) == error
    assert mallory.get("/keys").json()["keys"] == []
    refused = audited(one, f"POST {KEYS}")[before:]
    assert [(each["action"], each["actor"]["name"]) for each in refused] == [("request.refused", "one:mallory")]


def test_a_person_without_a_team_creates_no_key(one: Gateway) -> None:
    assert code(browser(one, person("root")).create("lab")) == (403, "permission_denied")


@pytest.mark.parametrize(
    "patch", [{"limits": {"requests_per_minute": 1}}, {"expires": None}, {"models": ["*"]}, {"team": "open"}, {"revoked": False}]
)
def test_a_person_changes_only_the_name(one: Gateway, patch: dict[str, Any]) -> None:
    paul = browser(one, person("paul", "lab", "open"))
    made = next(iter(paul.get("/keys").json()["keys"]), None) or paul.created("lab")
    assert code(paul.send("PATCH", f"{KEYS}/{made['id']}", json=patch | {"name": "x"})) == (400, "invalid_value")
    assert paul.get(f"/keys/{made['id']}").json() == {each: value for each, value in made.items() if each != "secret"}


def test_a_key_is_not_rotated_after_its_maker_has_left_the_team(one: Gateway) -> None:
    made = browser(one, person("leo", "open")).created("open")
    left = browser(one, person("leo", "lab"))
    assert code(left.send("POST", f"{KEYS}/{made['id']}/rotate", json={})) == (403, "permission_denied")
    assert left.send("POST", f"{KEYS}/{made['id']}/revoke").json()["state"] == "revoked"


def test_a_person_restores_no_key(one: Gateway) -> None:
    rita = browser(one, person("rita", "open"))
    made = rita.created("open")
    admin(one, "POST", f"/admin/v1/keys/{made['id']}/revoke")
    for path, body in (("/restore", None), ("/rotate", {})):
        response = rita.send("POST", f"{KEYS}/{made['id']}{path}", **({} if body is None else {"json": body}))
        assert response.status_code in (404, 409)
    assert models(one, made["secret"]) == 401


def test_two_creations_at_the_ceiling(one: Gateway) -> None:
    rosa = browser(one, person("rosa", "lab"))
    rosa.created("lab")
    with ThreadPoolExecutor(8) as threads:
        statuses = sorted(threads.map(lambda _: rosa.create("lab").status_code, range(8)))
    assert statuses == [201] + [409] * 7
    assert len(rosa.get("/keys").json()["keys"]) == 2
    assert code(rosa.create("lab")) == (409, "conflict")
    rosa.send("POST", f"{KEYS}/{rosa.get('/keys').json()['keys'][0]['id']}/revoke")
    assert rosa.create("lab").status_code == 201, "a revoked key does not count"


def test_a_repeated_request_creates_one_key(one: Gateway) -> None:
    irma, other = browser(one, person("irma", "open")), browser(one, person("ivan", "open"))
    again = {"idempotency-key": "once"}
    first, second, foreign = (each.send("POST", KEYS, json={"team": "open"}, headers=again) for each in (irma, irma, other))
    assert first.json()["id"] == second.json()["id"] and second.json()["secret"] is None
    assert second.headers["idempotency-replayed"] == "true"
    assert foreign.json()["id"] != first.json()["id"] and foreign.json()["secret"], "each person has separate keys"
    assert code(irma.send("POST", KEYS, json={"team": "open", "name": "x"}, headers=again)) == (409, "conflict")


# Sessions and pages

CHANGES = [(route.method, route.path) for route in openapi.ROUTES if route.method != "GET"]
FOREIGN: dict[str, dict[str, str]] = {
    "a foreign origin": {"origin": "https://evil.example.com"},
    "no origin": {"origin": "", "sec-fetch-site": ""},
    "a null origin": {"origin": "null"},
    "another site": {"sec-fetch-site": "cross-site"},
    "a neighboring host": {"sec-fetch-site": "same-site"},
    "a navigation": {"origin": "", "sec-fetch-site": "none"},
    "another scheme": {"origin": "https://127.0.0.1"},
}


@pytest.mark.parametrize("attack", FOREIGN)
@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_another_page_changes_nothing(one: Gateway, key_of_bob: str, method: str, path: str, attack: str) -> None:
    bob = browser(one, person("bob", "open"))
    target = path.replace("{id:path}", key_of_bob).replace("{operation}", "revoke")
    headers = {name: value for name, value in {"origin": bob.origin, "sec-fetch-site": "same-origin", **FOREIGN[attack]}.items() if value}
    before = bob.get("/keys").json()
    response = bob.send_as_is(method, target, headers, json={"team": "open"} if path == KEYS else {})
    assert code(response) == (403, "permission_denied") and "access-control-allow-origin" not in response.headers
    assert bob.get("/keys").json() == before


def test_a_form_changes_nothing(one: Gateway) -> None:
    bob = browser(one, person("bob", "open"))
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"):
        response = bob.send("POST", KEYS, content=b'{"team": "open"}', headers={"content-type": kind})
        assert code(response) == (415, "unsupported_media_type")


def test_another_host_name_is_refused(one: Gateway) -> None:
    bob = browser(one, person("bob", "open"))
    for method in ("GET", "POST"):
        assert code(bob.send(method, KEYS, headers={"host": "evil.example.com"})) == (403, "permission_denied")


@pytest.mark.parametrize(("method", "path"), [(route.method, route.path) for route in openapi.ROUTES])
def test_without_a_valid_session_nothing_is_served(one: Gateway, method: str, path: str) -> None:
    target = re.sub(r"\{\w+(:path)?\}", "x", path)
    alice = person("alice", "lab", owned=("x",))
    visitors = {
        "none": Browser(one.url, {}),
        "idle": browser(one, alice, seen=28_801),
        "expired": browser(one, alice, created=86_401, seen=1),
        "future": browser(one, alice, seen=-600),
        "forged": Browser(one.url, {"vllm-gateway-session": "e30.AAAA"}),
        "of the admin port": Browser(one.url, browser(one, alice, "admin").cookies),
        "renamed": Browser(one.url, {"vllm-gateway-session": next(iter(browser(one, alice, "admin").cookies.values()))}),
        "untrusted issuer": browser(one, person("alice", "lab", issuer="https://evil.example.com")),
    }
    for name, visitor in visitors.items():
        assert code(visitor.send(method, target)) == (401, "missing_api_key"), name


def test_a_session_that_was_ended_holds_no_longer(one: Gateway) -> None:
    link = one.command("login-link", "--user", "eve", "--team", "open").stdout.split()[0]
    origin, _, token = link.partition("/sign-in/link?token=")
    with httpx2.Client(trust_env=False, timeout=60, headers={"origin": origin}) as client:
        assert client.post(f"{origin}/sign-in/link", data={"token": token}).status_code == 303
        cookies = dict(client.cookies)
        made = client.post(f"{origin}{KEYS}", json={"team": "open"})
        assert made.status_code == 201, made.text
        assert client.post(f"{origin}/sign-out", data={}).status_code == 200
    assert code(Browser(origin, cookies).get("/keys")) == (401, "missing_api_key")
    assert accepts(one, made.json()["secret"]), "a key lives longer than the session"


def test_methods_and_paths_that_do_not_exist(one: Gateway) -> None:
    alice = browser(one, person("alice", "lab"))
    assert code(alice.send("PUT", KEYS)) == (405, "method_not_allowed")
    assert alice.send("HEAD", KEYS).status_code == 405
    assert alice.send("OPTIONS", KEYS, headers={"access-control-request-method": "POST"}).status_code == 405
    assert code(alice.get("/nothing")) == (404, "not_found")
    assert code(alice.send("POST", f"{KEYS}/x/explode")) == (404, "not_found")


@pytest.mark.parametrize("body", [b"{", b"[]", b"1", b'"a"', b"\xff", b"[" * 5000, b'{"team": NaN}'])
def test_a_body_that_is_no_object_is_refused(one: Gateway, body: bytes) -> None:
    alice = browser(one, person("alice", "lab"))
    assert code(alice.send("POST", KEYS, content=body, headers={"content-type": "application/json"})) == (400, "invalid_json")


def test_a_large_body_is_refused(one: Gateway) -> None:
    alice = browser(one, person("alice", "lab"))
    assert code(alice.send("POST", KEYS, json={"team": "lab", "name": "x" * 40_000})) == (413, "request_too_large")


def test_too_many_requests_of_a_person_wait(one: Gateway) -> None:
    fast = replace(browser(one, person("flood", "open")), waits=False)
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda _: fast.get("/me"), range(300)))
    refused = [each for each in replies if each.status_code == 429]
    assert refused and code(refused[0]) == (429, "rate_limit_exceeded") and int(refused[0].headers["retry-after"]) >= 1
    assert browser(one, person("calm", "open")).get("/me").status_code == 200


def test_use_renews_a_session(one: Gateway) -> None:
    assert "set-cookie" not in browser(one, person("sue", "lab"), seen=60).get("/me").headers
    assert "vllm-gateway-session=" in browser(one, person("sue", "lab"), seen=3600).get("/me").headers["set-cookie"]


def test_every_response_is_private(one: Gateway) -> None:
    alice = browser(one, person("alice", "lab"))
    for path in ("/me", "/keys", "/usage", "/limits", "/openapi.json", "/keys/none"):
        assert alice.get(path).headers["cache-control"] == "no-store"


# Usage, limits, and the teams of an owner


def test_a_person_reads_usage_and_limits(one: Gateway) -> None:
    ursula = browser(one, person("ursula", "lab"))
    made = ursula.created("lab")
    response = httpx2.post(
        f"{one.url}/v1/chat/completions",
        json={"model": "sim/one", "messages": []},
        headers={"authorization": f"Bearer {made['secret']}"},
        timeout=60,
    )
    assert response.status_code >= 400, "the model has no server, but the request counts"
    wait_for(lambda: ursula.get("/usage").json()["requests"] == 1, 60)
    usage = ursula.get("/usage", by="key,model").json()
    assert [(row["key"], row["model"]) for row in usage["usage"]] == [(made["id"], "sim/one")]
    assert ursula.get("/usage", key=made["id"]).json()["requests"] == 1
    (limits,) = ursula.get("/limits").json()["keys"]
    assert limits["key"] == made["id"]
    assert {each["holder"] for each in limits["limits"]} == {f"key {made['id']}", "team lab"}
    assert {each["limit"] for each in limits["limits"]} >= {"requests_per_minute", "cost_per_day", "tokens_per_7d", "tokens_per_day"}
    for query in ({"by": "team"}, {"by": "server"}, {"team": "lab"}, {"since": "never"}):
        assert code(ursula.get("/usage", **query)) == (400, "invalid_value")


def test_a_key_reads_its_own_usage_and_limits_and_nothing_else(one: Gateway) -> None:
    made = browser(one, person("kim", "open")).created("open")
    key = Browser(one.url, {}, {"authorization": f"Bearer {made['secret']}"})
    assert key.get("/usage").json()["key"] == key.get("/limits").json()["key"] == made["id"]
    assert Browser(one.url, {}, {"x-api-key": made["secret"]}).get("/limits").json()["key"] == made["id"]
    assert code(Browser(one.url, {}, {"authorization": "Bearer wrong"}).get("/usage")) == (401, "invalid_api_key")
    for method, path in (("GET", "/keys"), ("POST", "/keys"), ("GET", "/me"), ("GET", f"/keys/{made['id']}"), ("GET", "/teams/open/usage")):
        assert code(key.send(method, PORTAL + path)) == (401, "missing_api_key")
    assert code(key.send("POST", f"{PORTAL}/usage")) == (405, "method_not_allowed")


def test_an_owner_sees_keys_members_usage_and_limits_of_the_team(one: Gateway) -> None:
    tom, olga = browser(one, person("tom", "lab")), browser(one, person("olga", owned=("lab",)))
    made = tom.created("lab", name="Tom's")
    shown = {each["id"]: each for each in olga.get("/teams/lab/keys").json()["keys"]}[made["id"]]
    assert shown["made_by"] == {"issuer": "https://login.example.com", "subject": "tom"} and shown["name"] == "Tom's"
    assert olga.get(f"/keys/{made['id']}").json()["id"] == made["id"]
    assert olga.get("/teams/lab/usage", by="key").status_code == 200
    limits = olga.get("/teams/lab/limits").json()
    assert [(each["holder"], each["limit"], each["amount"]) for each in limits["limits"]] == [("team lab", "tokens_per_day", 1_000_000)]
    assert olga.get("/keys").json()["keys"] == []
    for method, path, body in (("PATCH", "", {"name": "Hers"}), ("POST", "/rotate", {}), ("DELETE", "", None)):
        more = {} if body is None else {"json": body}
        assert olga.send(method, f"{KEYS}/{made['id']}{path}", **more).json() == NO_KEY, "a rotation would be a secret in Tom's name"
    assert olga.send("POST", f"{KEYS}/{made['id']}/revoke").json()["state"] == "revoked"
    assert models(one, made["secret"]) == 401
    assert audited(one, made["id"])[-1]["actor"]["name"] == "one:olga"


def test_members_are_those_of_the_last_sign_in(one: Gateway) -> None:
    for user, team in (("ann", "open"), ("ben", "open"), ("cem", "lab")):
        origin, _, token = one.command("login-link", "--user", user, "--team", team).stdout.split()[0].partition("/sign-in/link?token=")
        assert httpx2.post(f"{origin}/sign-in/link", data={"token": token}, headers={"origin": origin}, timeout=60).status_code == 303
    owner = browser(one, person("olga", owned=("open",)))
    first = owner.get("/teams/open/members", limit="1").json()
    rest = owner.get("/teams/open/members", cursor=first["next_cursor"]).json()
    people = [*first["people"], *rest["people"]]
    assert {"ann", "ben"} <= {each["subject"] for each in people} and "cem" not in {each["subject"] for each in people}
    assert people[0].keys() == {"issuer", "subject", "name", "owned", "last_sign_in"}
    assert code(owner.get("/teams/open/members", cursor="W10")) == (400, "invalid_value")


def test_the_policy_of_a_team_of_the_store(one: Gateway) -> None:
    stella = browser(one, person("stella", "made"))
    assert code(stella.create("made")) == (403, "permission_denied")
    admin(one, "POST", "/admin/v1/teams", json={"id": "made"})
    assert code(stella.create("made")) == (403, "permission_denied"), "off by default"
    wait_for(lambda: one.command("login-link", "--user", "sam", "--team", "made").returncode == 0)
    policy: dict[str, Any] = {"max_keys": 1, "max_lifetime": "12h", "limits": {"concurrent": 1}}
    shown = admin(one, "PATCH", "/admin/v1/teams/made", json={"self_service": policy})
    assert shown.json()["self_service"] == policy, shown.text
    made = stella.created("made")
    assert made["limits"] == {"concurrent": 1} and made["team"] == "made"
    assert code(stella.create("made")) == (409, "conflict")
    assert admin(one, "PATCH", "/admin/v1/teams/made", json={"self_service": None}).json()["self_service"] is None
    assert code(stella.create("made")) == (403, "permission_denied")
    assert accepts(one, made["secret"]), "existing keys stay"
    wrong: list[dict[str, Any]] = [
        {"max_keys": 0},
        {"models": ["sim/one"]},
        {"max_keys": 1, "models": ["nothing"]},
        {"max_keys": 1, "max_lifetime": 5},
    ]
    for policy in wrong:
        assert admin(one, "PATCH", "/admin/v1/teams/made", json={"self_service": policy}).status_code == 400


def test_the_commands_for_the_policy(one: Gateway) -> None:
    made = one.command("teams", "new", "--id", "cli", "--self-service", '{"max_keys": 3, "max_lifetime": "90d"}')
    assert (made.returncode, made.stdout) == (0, "cli is in the store\n"), made.stderr
    assert json.loads(one.command("teams", "show", "cli").stdout)["self_service"] == {"max_keys": 3, "max_lifetime": "90d"}
    assert one.command("teams", "set", "cli", "--unset", "self-service", "--tokens-per-day", "5").returncode == 0
    shown = json.loads(one.command("teams", "show", "cli").stdout)
    assert (shown["self_service"], shown["limits"]) == (None, {"tokens_per_day": 5})
    assert one.command("teams", "set", "cli", "--self-service", "{").returncode == 2


def test_the_secrets_of_the_tests_are_in_no_log(one: Gateway) -> None:
    assert TOKEN not in one.output + one.log and "sk-" not in one.output + one.log + (one.folder / "audit.jsonl").read_text()
    assert accepts(one, KEY)


def test_without_a_store_there_is_no_self_service(tmp_path: Path) -> None:
    config = settings(tmp_path, ledger="sqlite:///usage.db", store=None)
    with gateway(tmp_path, config, variables={"ADMIN_TOKEN": TOKEN}, ready=False) as plain:
        wait_for(lambda: accepts(plain, KEY), 90, why=lambda: plain.output)
        assert code(browser(plain, person("alice", "lab")).get("/me")) == (404, "not_found")


def test_a_race_at_the_ceiling_of_two_gateways(server: Postgres, tmp_path: Path) -> None:
    url = server.database()
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    with running(folders[0], settings(folders[0], store=url)) as first, running(folders[1], settings(folders[1], store=url)) as second:
        browsers = [browser(each, person("rosa", "lab")) for each in (first, second)]
        browsers[0].created("lab")
        with ThreadPoolExecutor(6) as threads:
            replies = list(threads.map(lambda number: browsers[number % 2].create("lab"), range(6)))
        assert sorted(each.status_code for each in replies) == [201] + [409] * 5
        made = next(each.json() for each in replies if each.status_code == 201)
        for each in (first, second):
            wait_for(partial(accepts, each, made["secret"], 4))
        assert browsers[1].send("POST", f"{KEYS}/{made['id']}/revoke").status_code == 200
        assert models(second, made["secret"]) == 401
        wait_for(lambda: models(first, made["secret"]) == 401)
