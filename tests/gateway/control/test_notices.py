"""Notices of whole gateways: each arrives, over restarts and with a receiver that fails, and a known ID is the same notice."""

from __future__ import annotations

import functools
import hmac
import json
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.auth import keys
from gateway.notices.receivers import SIGNATURE
from tests.support.postgres import Postgres
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.redis_server import redis_server
from tests.support.webhooks import Receiver, receiver

MODEL = launched("m", **{"sim-tokens": 4, "sim-tokens-per-second": 0})
SECRET = "a-secret-of-the-tests"
TOKENS = {name: f"sk-a-test-key-{name}" for name in ("alice", "bob", "carol")}
SOFT = {"budgets": [{"window": "day", "tokens": 10, "soft": True}]}
VARIABLES = {"NOTICE_SECRET": SECRET}


def settings(*rules: dict[str, Any], **more: Any) -> dict[str, Any]:
    soon = (datetime.now(UTC) + timedelta(days=3)).strftime("%Y-%m-%dT00:00:00Z")
    entries = [{"id": name, "hash": keys.hash_of(token), "team": "lab", "limits": SOFT} for name, token in TOKENS.items()]
    entries[0]["expires"] = soon
    return configuration(MODEL, workers=2) | {"keys": entries, "teams": [{"id": "lab", "limits": SOFT}], "notices": list(rules)} | more


def ops(where: Receiver, **more: Any) -> dict[str, Any]:
    return {"name": "ops", "webhook": where.url, "secret": {"env": "NOTICE_SECRET"}, "at": ["50%", "100%"], **more}


def use(one: Gateway, name: str) -> None:
    """Use tokens of a key until its budget is exceeded."""
    for _ in range(3):
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
        headers = {"authorization": f"Bearer {TOKENS[name]}"}
        httpx2.post(f"{one.url}/v1/chat/completions", json=body, headers=headers, timeout=60, trust_env=False).raise_for_status()


def listed(one: Gateway) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(one.command("notices", "list", "--format", "json").stdout)
    return found


def is_listed(one: Gateway, name: str) -> bool:
    return any(name in each["subject"] for each in listed(one))


def until_all_are_sent(pair: list[Gateway], where: Receiver, number: int) -> None:
    one, other = pair
    wait_for(lambda: len(where.known) == number, 200, why=lambda: f"{where.subjects()} {one.output}")
    wait_for(lambda: {each["state"] for each in listed(one)} == {"sent"}, 120)
    wait_for(lambda: other.metric('vllm_gateway_notices_waiting{notice="ops"}') == 0, 30)
    wait_for(lambda: one.get("/status").json()["notices"] == {"waiting": 0, "last_error": None}, 30)


def test_every_notice_of_two_gateways_arrives_over_restarts_and_failures(tmp_path: Path, server: Postgres) -> None:
    names = list(TOKENS)
    with receiver(0.5, seed=7) as where, redis_server() as redis:
        config = settings(ops(where), ledger=server.database(), limits_store=redis.url)
        folders = [tmp_path / "one", tmp_path / "two"]
        for folder in folders:
            folder.mkdir()
        for round_number, name in enumerate(names):
            with ExitStack() as stack:
                pair = [stack.enter_context(gateway(folder, config, variables=VARIABLES)) for folder in folders]
                use(pair[round_number % 2], name)
                # The last gateways stay until all is sent. Before them, one ends while it sends, and the other is killed.
                if name == names[-1]:
                    until_all_are_sent(pair, where, 9)
                else:
                    wait_for(functools.partial(is_listed, pair[0], name), 60)
                    pair[0].process.kill()
                    pair[0].process.wait()
        assert where.subjects() == sorted([*(f"key {name}" for name in names for _ in range(2)), "team lab", "team lab"])
        assert where.subjects("key.expires") == ["key alice"]
        assert len({json.dumps(each, sort_keys=True) for each in where.accepted}) == len(where.known) == 9
        assert len(where.attempts) > len(where.accepted)  # some were refused
        for headers, body in where.attempts:
            at, _, mac = headers[SIGNATURE].removeprefix("t=").partition(",v1=")
            assert hmac.compare_digest(mac, hmac.new(SECRET.encode(), f"{at}.".encode() + body, "sha256").hexdigest())


CHAT, HEADER = "sk-a-test-key-chat", "x-chat-user"


def chat(user: str, one: Gateway) -> None:
    """Use tokens of an end user until its budget is exceeded."""
    for _ in range(3):
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
        headers = {b"authorization": f"Bearer {CHAT}".encode(), HEADER.encode(): user.encode()}
        httpx2.post(f"{one.url}/v1/chat/completions", json=body, headers=headers, timeout=60, trust_env=False).raise_for_status()


@pytest.mark.parametrize("is_shared", [False, True], ids=["memory", "store"])
def test_every_notice_about_an_end_user_arrives_over_kills_and_failures(tmp_path: Path, is_shared: bool) -> None:
    """A gateway is killed right after an end user has used its budget, and the end user does not come again."""
    users = ["jane", "J\u00fcrgen", "", "@here"]
    with receiver(0.5, seed=3) as where, redis_server() as redis:
        config = settings(ops(where, **{"for": "user"}), ledger=f"sqlite:///{tmp_path}/usage.db")
        of_each = {"per_user": SOFT}
        config["keys"] = [{"id": "chat", "hash": keys.hash_of(CHAT), "user_header": HEADER, "limits": of_each}]
        if is_shared:
            config["limits_store"] = redis.url
        for user in users[:-1]:
            before = rows(tmp_path)
            with gateway(tmp_path, config, variables=VARIABLES) as running:
                chat(user, running)
                wait_for(functools.partial(has_rows, tmp_path, before + 3))
                running.process.kill()
                running.process.wait()
        with gateway(tmp_path, config, variables=VARIABLES) as running:
            chat(users[-1], running)
            wait_for(lambda: len(where.known) == 8, 200, why=lambda: f"{where.subjects()} {running.output}")
        names = ["jane", "j%C3%BCrgen", "@here"]
        assert where.subjects() == sorted(2 * [*(f"key chat user {name}" for name in names), "key chat without user"])
        assert len({json.dumps(each, sort_keys=True) for each in where.accepted}) == len(where.known)


def has_rows(folder: Path, number: int) -> bool:
    return rows(folder) == number


def rows(folder: Path) -> int:
    if not (folder / "usage.db").exists():
        return 0
    with closing(sqlite3.connect(folder / "usage.db")) as connection:
        return int(connection.execute("SELECT count(*) FROM gateway_usage").fetchone()[0])


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Receiver]]:
    """A gateway without a database, and its receiver."""
    with receiver(path="/services/secret-part") as where, receiver(1.0) as broken:
        config = settings(ops(where, **{"for": "key"}), {"name": "broken", "webhook": broken.url, "for": "team"})
        with gateway(tmp_path_factory.mktemp("notices"), config, variables=VARIABLES) as running:
            yield running, where


def test_without_a_database_notices_are_in_a_file(one: tuple[Gateway, Receiver]) -> None:
    running, where = one
    use(running, "bob")
    wait_for(lambda: len(where.subjects()) == 2, 60, why=lambda: running.output)
    assert where.subjects() == ["key bob", "key bob"]
    files = [*(running.folder / "vllm-gateway" / "notices").iterdir()]
    assert files
    assert not any(file.stat().st_mode & 0o077 for file in files)
    shown = running.command("notices", "list").stdout
    assert "tokens_per_day" in shown
    assert "sent" in shown


def test_the_test_command_says_what_the_receiver_replied(one: tuple[Gateway, Receiver]) -> None:
    running, where = one
    done = running.command("notices", "test", "--name", "ops")
    assert (done.returncode, done.stdout) == (0, "ops: accepted, status 200: ok\n")
    assert [each["event"] for each in where.accepted].count("test") == 1
    both = running.command("notices", "test")
    assert both.returncode == 1
    assert "broken: not accepted" in both.stdout
    unknown = running.command("notices", "test", "--name", "other")
    assert (unknown.returncode, "there are no notices other" in unknown.stderr) == (1, True)


def test_no_secret_is_shown(one: tuple[Gateway, Receiver]) -> None:
    running, _ = one
    running.command("notices", "test")
    texts = (
        running.output,
        running.log,
        running.get("/status").text,
        running.get("/metrics").text,
        running.command("notices", "list").stdout,
    )
    assert not any(secret in text for text in texts for secret in (SECRET, "secret-part"))


def test_a_gateway_without_notices_says_so(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(MODEL), ready=False) as running:
        assert running.get("/admin/v1/notices").status_code == 404
        assert running.get("/status").json()["notices"] is None
        assert "no notices are configured" in running.command("notices", "list").stderr
