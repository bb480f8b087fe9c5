"""Temporary raises in whole gateways: in force at once in every worker, on every gateway, over restarts, and ended by themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.auth.keys import hash_of
from gateway.control.raises import Raises
from gateway.key_management.raises import Raise, encode
from tests.support.key_store import ANY, KEYS, SERVER, TEAMS, create, running, send, settings
from tests.support.postgres import Postgres
from tests.support.process import Gateway, wait_for
from tests.support.running import KEY

OF_FILE = {"id": "team-a", "hash": hash_of(KEY), "team": "lab", "limits": {"tokens_per_day": 1000, "concurrent": 2}}
LAB = {"id": "lab", "limits": {"tokens_per_month": 50}}
YAML: dict[str, Any] = {"keys": [OF_FILE], "teams": [LAB]}


def amounts(one: Gateway, token: str = KEY, connections: int = 6) -> dict[str, Any]:
    """Return the amount of each limit in the form ``key tokens_per_day``, as every worker shows them."""
    seen = []
    for _ in range(connections):
        reply = httpx2.get(f"{one.url}/v1/limits", headers={"authorization": f"Bearer {token}"}, timeout=60, verify=False)
        seen.append({f"{each['holder'].partition(' ')[0]} {each['limit']}": each["amount"] for each in reply.json()["limits"]})
    assert all(each == seen[0] for each in seen), seen
    return seen[0]


def is_amount(one: Gateway, limit: str, amount: int) -> bool:
    """Return whether every worker shows this amount. They learn of the end of a raise one after the other."""
    return all(amounts(one, connections=1)[limit] == amount for _ in range(6))


def raised(one: Gateway, path: str, limit: str, to: Any, until: str = "1h") -> httpx2.Response:
    return send(one, "POST", f"{path}/raises", json={"limit": limit, "to": to, "until": until})


@pytest.fixture(scope="module", params=["file", "store"])
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway whose raises are in a file, and one whose raises are in the store."""
    audit = {"secret": {"env": "ADMIN_TOKEN"}, "file": "audit.jsonl"}
    config = settings(None, SERVER, ledger="sqlite:///usage.db", audit=audit, **YAML)
    if request.param == "store":
        config["store"] = "ledger"
    else:
        del config["store"]
    with running(tmp_path_factory.mktemp("raises"), config) as made:
        yield made


def test_a_raise_is_in_force_when_it_is_acknowledged_and_ends_by_itself(one: Gateway) -> None:
    assert amounts(one) == {"key tokens_per_day": 1000, "key concurrent": 2, "team tokens_per_month": 50}
    done = raised(one, f"{KEYS}/team-a", "tokens_per_day", "2x")
    assert (done.status_code, [each["to"] for each in done.json()["raises"]]) == (201, ["2x"])
    assert amounts(one)["key tokens_per_day"] == 2000
    assert raised(one, f"{KEYS}/team-a", "concurrent", 5).status_code == 201
    assert raised(one, f"{TEAMS}/lab", "tokens_per_month", "1.5x").status_code == 201
    assert amounts(one) == {"key tokens_per_day": 2000, "key concurrent": 5, "team tokens_per_month": 75}
    shown = send(one, "GET", "/limits?key=team-a").json()["limits"]
    (of_day,) = (each for each in shown if each["limit"] == "tokens_per_day")
    assert of_day["configured"] == 1000
    assert datetime.fromisoformat(of_day["raised_until"]) > datetime.now(UTC)
    listed = send(one, "GET", f"{KEYS}/team-a/raises").json()["raises"]
    assert [(each["limit"], each["by"]) for each in listed] == [("tokens_per_day", "token"), ("concurrent", "token")]

    # One raise is replaced by a short one, and the others are ended early.
    assert raised(one, f"{KEYS}/team-a", "tokens_per_day", "3x", "1s").status_code == 201
    wait_for(lambda: is_amount(one, "key tokens_per_day", 1000), 60)
    assert amounts(one)["key concurrent"] == 5
    assert send(one, "DELETE", f"{KEYS}/team-a/raises?limit=concurrent").json() == {"raises": []}
    assert send(one, "DELETE", f"{TEAMS}/lab/raises").status_code == 200
    assert amounts(one) == {"key tokens_per_day": 1000, "key concurrent": 2, "team tokens_per_month": 50}
    assert send(one, "DELETE", f"{TEAMS}/lab/raises").status_code == 404

    entries = [json.loads(line) for line in (one.folder / "audit.jsonl").read_text().splitlines()]
    actions = [each["action"] for each in entries if "raise" in str(each.get("action"))]
    assert actions == ["key.raise", "key.raise", "team.raise", "key.raise", "key.end_raise", "team.end_raise"]


def test_requests_that_raise_nothing_are_refused(one: Gateway) -> None:
    assert raised(one, f"{KEYS}/other", "tokens_per_day", "2x").status_code == 404
    assert send(one, "GET", f"{TEAMS}/other/raises").status_code == 404
    for limit, to, until in (("tokens_per_week", "2x", "1h"), ("tokens_per_day", "1x", "1h"), ("tokens_per_day", "2x", "yesterday")):
        assert raised(one, f"{KEYS}/team-a", limit, to, until).status_code == 400
    assert send(one, "POST", f"{KEYS}/team-a/raises", content=b"[").status_code == 400
    assert amounts(one)["key tokens_per_day"] == 1000


def test_the_commands(one: Gateway) -> None:
    done = one.command("keys", "raise", "team-a", "tokens_per_day", "2x", "--until", "2h")
    assert done.stdout.startswith("team-a: tokens_per_day is raised to 2x until 20"), done.stderr
    assert ", by socket" in one.command("keys", "raises", "team-a").stdout
    assert one.command("keys", "end-raise", "team-a", "--limit", "tokens_per_day").stdout == "team-a: tokens_per_day as configured again\n"
    assert one.command("teams", "raise", "lab", "tokens_per_month", "99", "--until", "2h").returncode == 0
    assert amounts(one)["team tokens_per_month"] == 99
    assert one.command("teams", "end-raise", "lab").returncode == 0
    assert one.command("keys", "raise", "nobody", "tokens_per_day", "2x", "--until", "2h").stderr.endswith("there is no key nobody\n")


@pytest.mark.parametrize("store", [False, True])
def test_a_raise_survives_a_restart_and_ends_meanwhile(tmp_path: Path, store: bool) -> None:
    config = settings("ledger", SERVER, ledger="sqlite:///usage.db", **YAML)
    if not store:
        del config["store"]
    end = datetime.now(UTC) + timedelta(seconds=12)
    with running(tmp_path, config) as one:
        assert raised(one, f"{KEYS}/team-a", "tokens_per_day", 7000).status_code == 201
        assert raised(one, f"{KEYS}/team-a", "concurrent", 7, end.isoformat()).status_code in (201, 400)
        one.process.kill()
        one.process.wait()
    with running(tmp_path, None) as again:
        assert amounts(again)["key tokens_per_day"] == 7000
        wait_for(lambda: is_amount(again, "key concurrent", 2), 120)
        assert amounts(again)["key tokens_per_day"] == 7000


def test_raises_of_the_store_are_in_force_on_another_gateway(tmp_path: Path, server: Postgres) -> None:
    config = settings(server.database(), SERVER, **YAML)
    with running(tmp_path / "a", config) as one, running(tmp_path / "b", config) as other:
        token = create(one, "carol", team="lab", limits={"tokens_per_day": 10})
        send(one, "POST", TEAMS, json={"id": "ops", "limits": {"concurrent": 1}})
        second = create(one, "dave", team="ops")
        for path, limit in ((f"{KEYS}/carol", "tokens_per_day"), (f"{KEYS}/team-a", "tokens_per_day")):
            assert raised(one, path, limit, "2x").status_code == 201
        assert raised(other, f"{TEAMS}/ops", "concurrent", "4x").status_code == 201
        assert amounts(one, token)["key tokens_per_day"] == 20
        wait_for(lambda: amounts(other, token, 1)["key tokens_per_day"] == 20, 60)
        wait_for(lambda: amounts(other, KEY, 1)["key tokens_per_day"] == 2000, 60)
        wait_for(lambda: amounts(one, second, 1)["team concurrent"] == 4, 60)
        assert "raises" in send(one, "GET", f"{KEYS}/carol").json()
        assert "raises" in send(one, "GET", f"{TEAMS}/ops").json()

        # Other changes of the key leave its raise, and the database may be away when it ends.
        assert send(one, "PATCH", f"{KEYS}/carol", headers=ANY, json={"labels": {"a": "1"}}).status_code == 200
        assert amounts(one, token)["key tokens_per_day"] == 20
        assert raised(one, f"{KEYS}/carol", "tokens_per_day", "3x", "2s").status_code == 201
        wait_for(lambda: amounts(other, token, 1)["key tokens_per_day"] in (30, 10), 60)
        server.stop()
        try:
            wait_for(lambda: [amounts(each, token, 1)["key tokens_per_day"] for each in (one, other)] == [10, 10], 60)
            assert raised(one, f"{KEYS}/carol", "tokens_per_day", "2x").status_code == 503
            assert amounts(one, KEY)["key tokens_per_day"] == 2000
        finally:
            server.start()


def test_raises_that_have_ended_are_not_learned() -> None:
    now = [100.0]
    raises = Raises(lambda: now[0])
    stored = {("key", "a"): encode([Raise("concurrent", 110.0, 0.0, "x", "2"), Raise("max_tokens", 120.0, 0.0, "x", "2")])}
    assert raises.learn({**stored, ("key", "b"): encode([Raise("concurrent", 100.0, 0.0, "x", "2")]), ("team", "c"): "{"})  # type: ignore[dict-item]
    assert [each.limit for each in raises.of(("key", "a"))] == ["concurrent", "max_tokens"]
    assert (raises.of(("key", "b")), raises.of(("team", "c")), raises.end()) == ((), (), [])
    now[0] = 110.0
    assert list(raises.end()) == [("key", "a")]
    assert [each.limit for each in raises.of(("key", "a"))] == ["max_tokens"]
    assert not raises.learn(stored)  # type: ignore[arg-type]
    assert raises.learn({})
