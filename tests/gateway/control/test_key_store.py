"""Keys made at run time, in whole gateways: in force at once, on every worker and gateway, also while the database is away."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx2
import pytest
import yaml

from gateway.auth.keys import hash_of
from tests.support.key_store import ANY, KEYS, TEAMS, TOKEN, create, running, send, settings, status_of
from tests.support.postgres import Postgres
from tests.support.process import Gateway, gateway, launched, wait_for
from tests.support.running import KEY


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    config = settings("ledger", ledger="sqlite:///usage.db", teams=[{"id": "lab"}])
    with running(tmp_path_factory.mktemp("store"), config) as made:
        yield made


def test_a_change_is_in_force_in_every_worker_when_it_is_acknowledged(one: Gateway) -> None:
    token = create(one, "alice", team="lab", models=["sim/*"])
    assert status_of(one, token, 8) == 200
    assert send(one, "POST", f"{KEYS}/alice/revoke", headers=ANY).json()["state"] == "revoked"
    assert status_of(one, token, 8) == 401
    assert send(one, "POST", f"{KEYS}/alice/restore", headers=ANY).json()["state"] == "valid"
    assert status_of(one, token, 8) == 200
    rotated = send(one, "POST", f"{KEYS}/alice/rotate", headers=ANY, json={"overlap": "1h"}).json()
    assert (status_of(one, token, 4), status_of(one, rotated["secret"], 4)) == (200, 200)
    last = send(one, "POST", f"{KEYS}/alice/rotate", headers=ANY, json={"overlap": "0s"}).json()
    assert [status_of(one, each, 4) for each in (token, rotated["secret"], last["secret"])] == [401, 401, 200]
    assert send(one, "PATCH", f"{KEYS}/alice", headers=ANY, json={"expires": "2020-01-01"}).json()["state"] == "expired"
    assert status_of(one, last["secret"], 8) == 401
    assert send(one, "DELETE", f"{KEYS}/alice", headers=ANY).status_code == 204
    assert status_of(one, last["secret"], 8) == 401
    assert send(one, "GET", f"{KEYS}/alice").status_code == 404


def test_the_key_of_an_entry_is_shown_once(one: Gateway) -> None:
    token = create(one, "once")
    shown = [send(one, "GET", path).text for path in (f"{KEYS}/once", KEYS, "/status", "/keys")]
    assert not any(token in text or hash_of(token)[7:] in text for text in (*shown, one.output, one.log))
    with sqlite3.connect(one.folder / "usage.db") as database:
        assert token not in str(database.execute("SELECT * FROM gateway_keys").fetchall())


def test_two_people_do_not_overwrite_each_others_changes(one: Gateway) -> None:
    create(one, "shared")
    first, second = (send(one, "GET", f"{KEYS}/shared").headers["etag"] for _ in range(2))
    assert first == second
    done = send(one, "PATCH", f"{KEYS}/shared", headers={"if-match": first}, json={"labels": {"a": "1"}})
    assert (done.status_code, done.json()["labels"]) == (200, {"a": "1"})
    changes = [
        ("PATCH", f"{KEYS}/shared", {"labels": {"b": "2"}}),
        ("POST", f"{KEYS}/shared/revoke", {}),
        ("POST", f"{KEYS}/shared/rotate", {}),
        ("DELETE", f"{KEYS}/shared", {}),
    ]
    for method, path, body in changes:
        for headers, status in (({"if-match": second}, 412), ({"if-match": f"W/{done.headers['etag']}"}, 412), ({}, 428)):
            assert send(one, method, path, headers=headers, json=body).status_code == status
    assert send(one, "GET", f"{KEYS}/shared").headers["etag"] == done.headers["etag"]


def test_a_request_that_is_sent_again_creates_nothing(one: Gateway) -> None:
    once = {"idempotency-key": "0b6ff4a2"}
    first, again = (send(one, "POST", KEYS, headers=once, json={"id": "again"}) for _ in range(2))
    assert (first.status_code, again.status_code, again.json()["secret"]) == (201, 201, None)
    assert (again.headers["idempotency-replayed"], again.headers["etag"]) == ("true", first.headers["etag"])
    assert send(one, "POST", KEYS, headers=once, json={"id": "other"}).status_code == 422
    assert send(one, "POST", KEYS, headers={"idempotency-key": "a b"}, json={"id": "other"}).status_code == 400
    assert send(one, "POST", KEYS, json={"id": "again"}).status_code == 409


def test_pages(one: Gateway) -> None:
    send(one, "POST", TEAMS, json={"id": "pages", "limits": {"concurrent": 3}})
    for number in range(5):
        create(one, f"page/{number}", team="pages")
    found: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = send(one, "GET", f"{KEYS}?team=pages&limit=2&cursor={cursor}").json()
        found += [each["id"] for each in page["keys"]]
        cursor = page["next_cursor"]
    assert found == [f"page/{number}" for number in range(5)]
    wrong = ("limit=0", "limit=x", "limit=1001", "cursor=%FF", "search=%00", f"search={'x' * 201}")
    assert [send(one, "GET", f"{KEYS}?{query}").status_code for query in wrong] == [400] * 6
    assert send(one, "GET", f"{KEYS}/page/3").json()["team"] == "pages"
    assert send(one, "DELETE", f"{TEAMS}/pages", headers=ANY).status_code == 409
    changed = send(one, "PATCH", f"{TEAMS}/pages", headers=ANY, json={"limits": {"tokens_per_day": 5}})
    assert changed.json()["limits"] == {"concurrent": 3, "tokens_per_day": 5}
    assert [each["id"] for each in send(one, "GET", TEAMS).json()["teams"]] == ["pages"]
    limits = send(one, "GET", "/limits?key=page/3").json()["limits"]
    assert {each["holder"] for each in limits} == {"team pages"}


def test_what_the_yaml_names_is_not_in_the_store(one: Gateway) -> None:
    assert send(one, "POST", KEYS, json={"id": "team-a"}).status_code == 409
    assert send(one, "POST", TEAMS, json={"id": "lab"}).status_code == 409
    assert send(one, "POST", f"{KEYS}/import", content=f"id,key\nstolen,{hash_of(KEY)}").json()["known"] == 1
    assert send(one, "GET", f"{KEYS}/team-a").status_code == 404
    create(one, "mine")
    file = one.folder / "gateway.yaml"
    before = file.read_text()
    config = yaml.safe_load(before)
    config["keys"].append({"id": "mine", "hash": "sha256:" + "0" * 64})
    try:
        file.write_text(yaml.safe_dump(config))
        result = send(one, "POST", "/reload").json()
        assert "the key mine is in the store as well" in json.dumps(result)
        assert status_of(one, KEY) == 200
    finally:
        file.write_text(before)
        send(one, "POST", "/reload")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", KEYS, b"{", 400),
        ("POST", KEYS, b"[]", 400),
        ("POST", KEYS, b'{"id": "a\\u0000b"}', 400),
        ("POST", KEYS, b'{"id": "a\\ud800"}', 400),
        ("POST", KEYS, b'{"id": "x", "team": "\\ud800"}', 400),
        ("POST", KEYS, b'{"id": "x", "\\ud800": 1}', 400),
        ("POST", KEYS, b'{"id": "x", "priority": NaN}', 400),
        ("POST", TEAMS, b'{"id": "x\\u202e"}', 400),
        ("POST", KEYS, b'{"id": "<script>alert(1)</script> "}', 400),
        ("POST", KEYS, b'{"id": "x", "team": "nobody"}', 400),
        ("POST", KEYS, b'{"id": "' + b"x" * 300 + b'"}', 400),
        ("POST", KEYS, b" " * (1024 * 1024 + 1), 413),
        ("POST", f"{KEYS}/nobody/rotate", b"{}", 404),
        ("POST", f"{KEYS}/nobody/explode", b"{}", 404),
        ("PATCH", f"{KEYS}/nobody", b"{}", 404),
        ("DELETE", f"{TEAMS}/nobody", b"", 404),
        ("PUT", KEYS, b"{}", 405),
        ("POST", f"{KEYS}/import", b"\xff", 400),
    ],
)
def test_an_invalid_request_changes_nothing(one: Gateway, method: str, path: str, body: bytes, status: int) -> None:
    before = send(one, "GET", KEYS).json()
    reply = send(one, method, path, headers=ANY, content=body)
    assert reply.status_code == status, reply.text
    assert send(one, "GET", KEYS).json() == before


def test_a_worker_that_is_replaced_knows_the_keys(one: Gateway) -> None:
    token = create(one, "durable")
    before = one.workers()
    os.kill(before[0], signal.SIGKILL)
    wait_for(lambda: one.workers().get(0) not in (None, before[0]))
    assert status_of(one, token, 16) == 200


def test_without_a_store_there_are_no_such_routes(tmp_path: Path) -> None:
    config = settings(None)
    del config["store"]
    with running(tmp_path, config) as one:
        reply = send(one, "POST", KEYS, json={"id": "alice"})
        assert (reply.status_code, reply.json()["error"][:22]) == (404, "no store is configured")


def test_a_limit_is_in_force_for_the_next_request(tmp_path: Path) -> None:
    config = settings("sqlite:///keys.db", launched("sim/one", **{"sim-tokens-per-second": 0}), workers=1)
    with running(tmp_path, config) as one:
        wait_for(lambda: one.get("/readyz").status_code == 200)
        token = create(one, "alice", limits={"requests_per_minute": 100})

        def chat() -> int:
            body = {"model": "sim/one", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
            headers = {"authorization": f"Bearer {token}"}
            return httpx2.post(f"{one.url}/v1/chat/completions", json=body, headers=headers, timeout=60, verify=False).status_code

        assert [chat(), chat()] == [200, 200]
        send(one, "PATCH", f"{KEYS}/alice", headers=ANY, json={"limits": {"requests_per_minute": 1}})
        assert 429 in [chat(), chat()]
        send(one, "POST", TEAMS, json={"id": "ops", "limits": {"requests_per_minute": 1}})
        send(one, "PATCH", f"{KEYS}/alice", headers=ANY, json={"limits": None, "team": "ops"})
        assert [chat(), chat()] == [200, 429]
        send(one, "PATCH", f"{TEAMS}/ops", headers=ANY, json={"limits": None})
        assert chat() == 200


def test_keys_of_the_store_have_the_metrics_of_keys_in_files(tmp_path: Path) -> None:
    config = settings("sqlite:///keys.db", launched("sim/one", **{"sim-tokens-per-second": 0}), workers=1)
    config["teams"] = [{"id": "lab", "limits": {"tokens_per_month": 1000}}]
    with running(tmp_path, config) as one:
        wait_for(lambda: one.get("/readyz").status_code == 200)
        token = create(one, "alice", expires="2090-01-01", team="lab", limits={"tokens_per_day": 100, "requests_per_minute": 60})
        create(one, "unused", limits={"tokens_per_day": 100})

        def metric(text: str) -> float | None:
            lines = [line for line in send(one, "GET", "/metrics").text.splitlines() if line.startswith(f"vllm_gateway_{text} ")]
            return float(lines[0].rpartition(" ")[2]) if lines else None

        assert metric('key_expires_timestamp_seconds{key="alice"}') == 3786912000
        assert metric('key_expires_timestamp_seconds{key="unused"}') is None
        budget = 'budget_used_ratio{{budget="{}",holder="{}",soft="false"}}'.format
        assert metric(budget("tokens_per_day", "key alice")) is None, "it has no counts yet"
        body = {"model": "sim/one", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        reply = httpx2.post(f"{one.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {token}"}, timeout=60)
        used = reply.json()["usage"]["total_tokens"]
        wait_for(lambda: metric(budget("tokens_per_day", "key alice")) == used / 100)
        assert metric(budget("tokens_per_month", "team lab")) == used / 1000
        assert metric(budget("tokens_per_day", "key unused")) is None
        send(one, "POST", f"{KEYS}/alice/revoke", headers=ANY)
        assert metric('key_expires_timestamp_seconds{key="alice"}') is None
        age = metric("key_store_copy_age_seconds")
        assert age is not None and age >= 0


def test_nothing_is_changed_without_an_entry_in_the_audit_log(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a-secret-of-the-audit-log")
    config = settings("sqlite:///keys.db", audit={"secret": {"file": "secret"}, "file": "audit.jsonl"})
    with running(tmp_path, config) as one:
        [checkpoint] = (tmp_path / "vllm-gateway" / "audit").glob("*/checkpoint")
        moved = checkpoint.rename(tmp_path / "checkpoint")
        checkpoint.mkdir()
        for _ in range(2):
            reply = send(one, "POST", KEYS, json={"id": "alice"})
            assert (reply.status_code, "so nothing was changed" in reply.json()["error"]) == (503, True)
        assert send(one, "GET", f"{KEYS}/alice").status_code == 404
        checkpoint.rmdir()
        moved.rename(checkpoint)
        version = send(one, "POST", KEYS, json={"id": "alice"}).headers["etag"]
        last = json.loads((tmp_path / "audit.jsonl").read_bytes().splitlines()[-1])
        assert (last["action"], last["target"], f'"{last["after"]["version"]}"') == ("key.create", "alice", version)


def test_a_configuration_with_an_id_of_the_store_does_not_start(tmp_path: Path) -> None:
    config = settings("sqlite:///keys.db")
    with running(tmp_path, config) as one:
        create(one, "alice")
    config["keys"].append({"id": "alice", "hash": "sha256:" + "0" * 64})
    with running(tmp_path, config) as one:
        assert one.process.wait(60) != 0
        assert "the key alice is in the store as well" in one.output


def test_a_gateway_needs_no_key_in_its_yaml(tmp_path: Path) -> None:
    config = settings("sqlite:///keys.db") | {"keys": []}
    with gateway(tmp_path, config, variables={"ADMIN_TOKEN": TOKEN}, ready=False) as one:
        wait_for(lambda: send(one, "GET", KEYS).status_code == 200)
        token = create(one, "alice")
        wait_for(lambda: status_of(one, token) == 200)


# The database is away


def test_known_keys_are_served_while_the_database_is_away_also_after_a_restart(tmp_path: Path, server: Postgres) -> None:
    config = settings(server.database())
    with running(tmp_path, config) as one:
        token, revoked = create(one, "alice"), create(one, "bob")
        send(one, "POST", f"{KEYS}/bob/revoke", headers=ANY)
        server.stop()
        try:
            assert (status_of(one, token, 4), status_of(one, revoked, 4), status_of(one, "sk-unknown")) == (200, 401, 401)
            reply = send(one, "POST", KEYS, json={"id": "carol"})
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
            assert send(one, "GET", KEYS).status_code == 503
            wait_for(lambda: "key_store" in str(send(one, "GET", "/readyz").json()["reasons"]))
            one.stop()
            with running(tmp_path, None) as again:
                assert (status_of(again, token, 4), status_of(again, revoked, 4)) == (200, 401)
                metrics = send(again, "GET", "/metrics").text
                assert "vllm_gateway_key_store_keys 2.0" in metrics and "vllm_gateway_key_store_age_seconds" in metrics
                server.start()
                wait_for(lambda: send(again, "POST", KEYS, json={"id": "carol"}).status_code in (201, 409))
                assert status_of(again, token) == 200
        finally:
            server.stop()
            server.start()
    (copy,) = (tmp_path / "vllm-gateway" / "store").glob("*.db")
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert token not in copy.read_bytes().decode("latin-1")


def test_known_keys_are_refused_after_the_maximum_age(tmp_path: Path, server: Postgres) -> None:
    config = settings({"url": server.database(), "max_age": "2s"})
    with running(tmp_path, config) as one:
        token = create(one, "alice", expires="2090-01-01", limits={"tokens_per_day": 100})
        body = {"model": "sim/one", "messages": [{"role": "user", "content": "Hello"}]}
        httpx2.post(f"{one.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {token}"}, timeout=60)
        series = ('key_expires_timestamp_seconds{key="alice"}', 'holder="key alice"')
        assert all(each in send(one, "GET", "/metrics").text for each in series)
        server.stop()
        try:
            wait_for(lambda: status_of(one, token) == 503)
            assert status_of(one, KEY) == 200
            assert not any(each in send(one, "GET", "/metrics").text for each in series)
            one.stop()
            with running(tmp_path, None) as again:
                assert (status_of(again, token), status_of(again, KEY)) == (503, 200)
                server.start()
                wait_for(lambda: status_of(again, token) == 200)
                assert status_of(again, "sk-unknown") == 401
        finally:
            server.stop()
            server.start()


def test_changes_are_in_force_on_another_gateway(tmp_path: Path, server: Postgres) -> None:
    config = settings(server.database())
    with running(tmp_path / "a", config) as a, running(tmp_path / "b", config) as b:
        for number in range(10):
            token = create(a, f"key-{number}")
            wait_for(lambda token=token: status_of(b, token, 4) == 200)  # type: ignore[misc]
            send(b, "POST", f"{KEYS}/key-{number}/revoke", headers=ANY)
            assert status_of(b, token, 4) == 401
            wait_for(lambda token=token: status_of(a, token, 4) == 401)  # type: ignore[misc]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_no_acknowledged_change_is_lost_when_control_is_killed(tmp_path: Path, server: Postgres, kind: str) -> None:
    config = settings("sqlite:///keys.db" if kind == "sqlite" else server.database(), workers=1)
    chance, acknowledged = random.Random(28), dict[str, str]()
    for round_ in range(3):
        with running(tmp_path, config) as one:
            for number in range(chance.randrange(1, 6)):
                identity = f"{round_}-{number}"
                acknowledged[identity] = create(one, identity)
            os.kill(one.process.pid, signal.SIGKILL)
            one.process.wait(60)
    with running(tmp_path, config) as one:
        assert {status_of(one, token) for token in acknowledged.values()} == {200}
        found = {each["id"] for each in send(one, "GET", f"{KEYS}?limit=1000").json()["keys"]}
        assert found == set(acknowledged)


def test_a_copy_that_lacks_a_change_is_written_again(tmp_path: Path, server: Postgres) -> None:
    """A change that could not be copied must not be missing in the copy after the next one."""
    config = settings(server.database(), workers=1)
    with running(tmp_path, config) as one:
        token = create(one, "alice")
        folder = tmp_path / "vllm-gateway" / "store"
        (copy,) = wait_for(lambda: list(folder.glob("*.db")))
        with sqlite3.connect(copy) as held:
            held.execute("BEGIN EXCLUSIVE")
            send(one, "POST", f"{KEYS}/alice/revoke", headers=ANY)
            wait_for(lambda: "the local copy of the store cannot be written" in one.output)
        create(one, "bob")
        assert status_of(one, token) == 401

        def copied() -> list[str]:
            with closing(sqlite3.connect(copy)) as reading:
                return [entry for (entry,) in reading.execute("SELECT entry FROM entries WHERE kind = 'key' ORDER BY id")]

        wait_for(lambda: len(copied()) == 2)
        assert '"revoked": true' in copied()[0]
        server.stop()
        try:
            one.stop()
            with running(tmp_path, None) as again:
                assert status_of(again, token) == 401
        finally:
            server.stop()
            server.start()
