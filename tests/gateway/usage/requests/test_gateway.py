"""Ten requests fail in ten ways, and one command finds the cause of each, with real processes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.auth import keys
from tests.support.ports import refusing
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.running import KEY
from tests.support.wire import client, request

LIMITED, POOR, NARROW, WARNED = "sk-limited", "sk-poor", "sk-narrow", "sk-warned"
UNKNOWN = "sk-unknown"


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that fails: what is sent, and what the command prints about the cause."""

    body: dict[str, Any]
    expected: tuple[str, ...]
    key: str = KEY
    before: int = 0
    """Requests of the same kind that succeed before."""


FAILURES = {
    "wrong model": Failure({"model": "sim/onne"}, ("model_not_found (404)", "requested model: sim/onne", "field: model")),
    "wrong field": Failure({"temperature": -1}, ("invalid_value (400)", "field: temperature")),
    "limit": Failure({}, ("rate_limit_exceeded (429)", "limit: requests_per_minute of key limited"), LIMITED, before=1),
    "budget": Failure({}, ("insufficient_quota (429)", "limit: tokens_per_day of team poor"), POOR, before=1),
    "timeout": Failure(
        {"model": "sim/slow", "simulate": {"hang_before_headers": True}},
        ("upstream_timeout (504)", "reason: first_byte_timeout", "sim/slow#0"),
    ),
    "dead server": Failure({"model": "sim/down"}, ("no_healthy_server (503)", "No server of the model was up", "model: sim/down")),
    "too long": Failure(
        {"messages": [{"role": "user", "content": "word " * 6000}]}, ("context_length_exceeded (400)", "longer than the context")
    ),
    "not allowed": Failure({}, ("model_not_found (404)", "the key may not use it", "requested model: sim/one", "key narrow"), NARROW),
    "bad key": Failure({}, ("invalid_api_key (401)", "without a valid key, from 127.0.0.1", "The API key is not valid."), UNKNOWN),
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with refusing() as port:
        down = {"id": "sim/down", "servers": [{"url": f"http://127.0.0.1:{port}"}]}
        slow = launched("sim/slow") | {"timeouts": {"first_byte": "0.3s"}}
        config = configuration(launched("sim/one", **{"max-model-len": 4096}), slow, down, workers=2) | {"ledger": "sqlite:///usage.db"}
        config["teams"] = [{"id": "poor", "limits": {"tokens_per_day": 10}}]
        config["keys"] += [
            {"id": "limited", "hash": keys.hash_of(LIMITED), "limits": {"requests_per_minute": 1}},
            {"id": "poor", "hash": keys.hash_of(POOR), "team": "poor", "labels": {"cost_center": "17"}},
            {"id": "warned", "hash": keys.hash_of(WARNED), "limits": {"budgets": [{"window": "day", "tokens": 5, "soft": True}]}},
            {"id": "narrow", "hash": keys.hash_of(NARROW), "models": ["sim/slow"]},
        ]
        with gateway(tmp_path_factory.mktemp("gateway"), config) as one:
            yield one


def sent(one: Gateway, failure: Failure) -> httpx2.Response:
    document = {"model": "sim/one", "messages": [{"role": "user", "content": "Hello"}], **failure.body}
    return httpx2.post(f"{one.url}/v1/chat/completions", json=document, headers={"authorization": f"Bearer {failure.key}"}, timeout=60)


async def disconnected(port: int) -> None:
    """Request a stream, and disconnect after its first events."""
    async with client(port) as connection:
        messages = [{"role": "user", "content": "Hello"}]
        slow = {"tokens": 100_000, "tokens_per_second": 50}
        connection.send(request({"model": "sim/one", "messages": messages, "stream": True, "simulate": slow}))
        await connection.events(3)


def explained(one: Gateway, identity: str, *, until: Callable[[str], bool] = bool) -> str:
    """Return what the command prints about a request, as soon as its row is stored."""

    def shown() -> str | None:
        result = one.command("requests", identity)
        return result.stdout if result.returncode == 0 and until(result.stdout) else None

    return str(wait_for(shown, 60, lambda: one.output))


@pytest.mark.parametrize("kind", FAILURES)
def test_one_command_explains_a_failed_request(running: Gateway, kind: str) -> None:
    failure = FAILURES[kind]
    for _ in range(failure.before):
        assert sent(running, failure).status_code == 200
    reply = sent(running, failure)
    assert reply.status_code >= 400
    found = explained(running, reply.headers["x-request-id"])
    missing = [each for each in failure.expected if each not in found]
    assert not missing, found
    assert "received on /v1/chat/completions" in found
    assert failure.key not in found


def test_an_admitted_request_names_its_nearest_limit(running: Gateway) -> None:
    reply = sent(running, Failure({}, (), WARNED))
    assert reply.status_code == 200
    found = explained(running, reply.headers["x-request-id"])
    assert "succeeded (200)" in found
    assert re.search(r"nearest limit: [1-9]\d{2,}% of tokens_per_day of key warned\n", found), found


def test_one_command_explains_a_disconnect(running: Gateway) -> None:
    asyncio.run(disconnected(running.data))

    def left() -> str | None:
        page = json.loads(running.command("requests", "--reason", "client", "--format", "json").stdout)
        return page["requests"][0]["id"] if page["requests"] else None

    found = explained(running, str(wait_for(left, 60)))
    for each in ("ended early (499)", "The client disconnected before the end of the response.", "first event after", "sent to sim/one#0"):
        assert each in found, found


def test_all_failures_are_in_one_list(running: Gateway) -> None:
    """A page has rows and requests without a valid key, in one order, and the pages have each of them once."""
    wanted = {
        sent(running, failure).headers["x-request-id"] for failure in (FAILURES["wrong model"], FAILURES["bad key"]) for _ in range(2)
    }

    def listed() -> list[dict[str, Any]] | None:
        found: list[dict[str, Any]] = []
        cursor = None
        while True:
            more = "" if cursor is None else f"&cursor={cursor}"
            page = running.get(f"/admin/v1/requests?status=failed&limit=3{more}").json()
            found += page["requests"]
            cursor = page["next_cursor"]
            if cursor is None:
                return found if wanted <= {each["id"] for each in found} else None

    found = wait_for(listed)
    assert len({each["id"] for each in found}) == len(found)
    assert [each["time"] for each in found] == sorted((each["time"] for each in found), reverse=True)
    assert {each["key"] for each in found if each["id"] in wanted} == {"team-a", None}


def test_an_unknown_id_is_an_error(running: Gateway) -> None:
    result = running.command("requests", "req_unknown")
    assert (result.returncode, result.stderr) == (1, "vllm-gateway: no request has the ID req_unknown\n")


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("status=9xx", "status: expected a status such as 429, a class such as 5xx, or one of errors, rejected, failed"),
        ("limit=0", "limit: expected a number from 1 to 1000"),
        ("cursor=%21", "cursor: expected the next_cursor of an earlier page"),
        ("cursor=YQ", "cursor: expected the next_cursor of an earlier page"),
        ("since=tomorrow", "tomorrow is not a time"),
        ("since=2027-01&until=2026-12", "the time ends before it starts"),
        ("keys=a", "there is no parameter keys"),
    ],
)
def test_an_invalid_query_is_refused(running: Gateway, query: str, error: str) -> None:
    reply = running.get(f"/admin/v1/requests?{query}")
    assert reply.status_code == 400 and error in reply.json()["error"]


def test_without_a_gateway_the_database_is_read(tmp_path: Path) -> None:
    config = configuration(launched()) | {"ledger": "sqlite:///usage.db"}
    with gateway(tmp_path, config) as one:
        identity = one.request().headers["x-request-id"]
        bad = sent(one, FAILURES["bad key"]).headers["x-request-id"]
        explained(one, identity)
    result = one.command("requests", identity)
    assert result.returncode == 0 and "succeeded (200)" in result.stdout
    assert "the gateway does not run, so requests without a valid key are not known" in result.stderr
    assert one.command("requests", bad).returncode == 1


def test_without_a_ledger_there_are_no_requests(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched())) as one:
        assert one.get("/admin/v1/requests").status_code == one.get("/admin/v1/months").status_code == 404
        assert "no ledger is configured" in one.command("requests").stderr
        assert "no ledger is configured" in one.command("usage", "close", "2026-10").stderr
    assert "has no ledger" in one.command("requests").stderr
