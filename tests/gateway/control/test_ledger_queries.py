"""A key reads its own use: what the ledger has of it, nothing of others, within bounds."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import aclosing, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from gateway import config as conf
from gateway.auth import keys
from gateway.control.ledger_queries import KeyUsage, QueryRate
from gateway.ledger.spool import spool
from gateway.ledger.store import UsageStore, database_url
from gateway.ledger.writer import running
from gateway.snapshot.link import UsageReported, UsageRequested
from gateway.usage.reader import UsageReader
from tests.gateway.ledger.rows import row
from tests.support.described import response_problems
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.running import KEY, until

OTHER = "sk-another-test-key"
MODEL = {"price": {"prompt": 0.5, "completion": 1.5}}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    config = configuration(launched("sim/one", **{"sim-tokens-per-second": 0}) | MODEL, workers=2) | {"ledger": "sqlite:///usage.db"}
    config["keys"].append({"id": "team-b", "hash": keys.hash_of(OTHER)})
    with gateway(tmp_path_factory.mktemp("usage"), config) as running:
        yield running


def usage(one: Gateway, token: str | None = KEY, **query: str) -> httpx2.Response:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return httpx2.get(f"{one.url}/v1/usage", params=query, headers=headers, timeout=60, verify=False)


def chat(one: Gateway, token: str) -> dict[str, int]:
    document = {"model": "sim/one", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
    headers = {"authorization": f"Bearer {token}"}
    reply = httpx2.post(f"{one.url}/v1/chat/completions", json=document, headers=headers, timeout=60, verify=False).json()
    return {kind: reply["usage"][f"{kind}_tokens"] for kind in ("prompt", "completion")}


def test_a_key_reads_its_own_use_and_nothing_of_others(one: Gateway) -> None:
    sent = [chat(one, KEY) for _ in range(6)]
    chat(one, OTHER)
    wait_for(lambda: [each["requests"] for each in one.get("/usage?by=key&key=team-a").json()["usage"]] == [6])
    reply = usage(one, by="model,day", since="today")
    assert reply.status_code == 200, reply.text
    assert response_problems("/v1/usage", 200, "application/json", reply.text, "get") == []
    known = reply.json()
    (line,) = known["usage"]
    assert known["key"] == "team-a" and line["model"] == "sim/one" and line["requests"] == 6
    assert {kind: line[f"{kind}_tokens"] for kind in ("prompt", "completion")} == {
        kind: sum(each[kind] for each in sent) for kind in ("prompt", "completion")
    }
    nano = sum(each["prompt"] * 500 + each["completion"] * 1500 for each in sent)
    assert f'"cost":{nano / 10**9:.9f}'.rstrip("0") in reply.text
    (line,) = usage(one, by="endpoint,code").json()["usage"]
    assert (line["endpoint"], line["code"], line["requests"]) == ("/v1/chat/completions", None, 6)
    wait_for(lambda: [each["requests"] for each in usage(one, OTHER).json().get("usage", ())] == [1])


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ({"by": "key"}, "your usage is not shown by key"),
        ({"by": "server"}, "your usage is not shown by server"),
        ({"key": "team-b"}, "there is no parameter key"),
        ({"team": "lab"}, "there is no parameter team"),
        ({"since": "tomorrow"}, "tomorrow is not a time"),
    ],
)
def test_an_invalid_query_is_an_error(one: Gateway, query: dict[str, str], text: str) -> None:
    reply = usage(one, OTHER, **query)
    while reply.status_code == 429:
        reply = usage(one, OTHER, **query)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_value")
    assert text in reply.json()["error"]["message"]


def test_a_key_is_required(one: Gateway) -> None:
    assert (usage(one, None).status_code, usage(one, "sk-wrong").status_code) == (401, 401)
    post = httpx2.post(f"{one.url}/v1/usage", headers={"authorization": f"Bearer {KEY}"}, verify=False)
    assert (post.status_code, post.headers["allow"]) == (405, "GET")


def test_a_key_has_a_rate_across_workers(one: Gateway) -> None:
    replies = [usage(one) for _ in range(30)]
    refused = next(each for each in replies if each.status_code != 200)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert refused.headers["retry-after"] == "1"


def test_without_a_ledger_there_is_no_usage(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched())) as one:
        reply = usage(one)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
        assert "no ledger is configured" in reply.json()["error"]["message"]


def test_an_unavailable_database_is_an_error_to_retry(tmp_path: Path) -> None:
    config: dict[str, Any] = configuration(launched()) | {"ledger": "sqlite:///missing/usage.db"}
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(config))
    with gateway(tmp_path, config) as one:
        reply = usage(one)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "overloaded")
        assert reply.headers["retry-after"] == "1"


@contextmanager
def reader(folder: Path) -> Iterator[UsageReader]:
    """Read a ledger that has no rows yet."""
    settings = conf.Ledger.model_validate({"url": SecretStr("sqlite:///usage.db")})
    with running(settings, folder, spool(folder / "spool"), 1) as ledger:
        yield UsageReader(ledger.engine)


async def test_more_queries_than_the_bound_are_refused_at_once_and_the_others_are_run(tmp_path: Path) -> None:
    replies: list[UsageReported] = []
    with reader(tmp_path) as ledger:
        async with aclosing(KeyUsage(ledger)) as queries:
            for number in range(66):
                queries.request(UsageRequested(number, f"key-{number}", {}), replies.append)
            assert [(each.number, each.error) for each in replies] == [(64, "overloaded"), (65, "overloaded")]
            await until(lambda: len(replies) == 66)
    assert {(each.number, each.error) for each in replies[2:]} == {(number, None) for number in range(64)}
    assert all(b'"usage":[]' in each.body for each in replies[2:])


async def test_a_row_that_no_gateway_wrote_is_an_error_for_its_key_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    replies: list[UsageReported] = []
    with closing(UsageStore(database_url("sqlite:///usage.db", tmp_path))) as store:
        store.write([row(1, key="team-a"), row(2, key="team-b")])
    with closing(sqlite3.connect(tmp_path / "usage.db")) as connection, connection:
        connection.execute("UPDATE gateway_usage SET day = 'unknown' WHERE key = 'team-a'")
    with reader(tmp_path) as ledger:
        async with aclosing(KeyUsage(ledger)) as queries:
            for number, key in enumerate(("team-a", "team-b")):
                queries.request(UsageRequested(number, key, {"by": "day", "since": "2027-01-01", "until": "2027-02-01"}), replies.append)
            await until(lambda: len(replies) == 2)
    assert {each.number: each.error for each in replies} == {0: "overloaded", 1: None}
    assert "a key's usage could not be read" in caplog.messages


async def test_queries_end_with_the_gateway(tmp_path: Path) -> None:
    replies: list[UsageReported] = []
    with reader(tmp_path) as ledger:
        async with aclosing(KeyUsage(ledger)) as queries:
            for number in range(3):
                queries.request(UsageRequested(number, f"key-{number}", {}), replies.append)
        assert replies == []


@given(st.lists(st.floats(0, 3), max_size=60))
def test_the_rate_of_a_key_is_bounded(pauses: list[float]) -> None:
    rate, now, allowed = QueryRate(), 1000.0, []
    for pause in pauses:
        now += pause
        if not rate.wait("a", now):
            allowed.append(now)
    assert all(sum(start <= each <= start + 20 for each in allowed) <= 30 for start in allowed)
    assert len(allowed) >= min(len(pauses), 10)


def test_the_rate_remembers_a_bounded_number_of_keys() -> None:
    rate = QueryRate()
    for number in range(20_000):
        assert rate.wait(f"key-{number}", 1000.0) == 0
    assert len(rate._full_at) <= 10_000
