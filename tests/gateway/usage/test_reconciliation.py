"""The ledger, the gateway's metrics and the servers' own counters of one run agree, to the token."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.wire import client, request
from tests.upstream.simulator.test_process import Simulated, running

MODEL, ANY = "tiny", "sim/one"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
FAST = {"tokens_per_second": 0}
SLOW = {"tokens": 100_000, "tokens_per_second": 50}
KINDS = ("prompt", "completion")
CLOSED_WITHOUT_RESPONSE = 6  # its number in `fail`


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Simulated]]:
    with running("--sim-tokens-per-second", "0") as one, running("--sim-tokens-per-second", "0") as other:
        yield [one, other]


@pytest.fixture(scope="module")
def one(servers: list[Simulated], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Run a gateway with two workers, and a model on two servers beside a launched one."""
    found = {"id": MODEL, "servers": [{"url": server.url} for server in servers], "price": {"prompt": 1, "completion": 3}}
    config = configuration(found, launched(ANY), workers=2) | {"ledger": "sqlite:///usage.db"}
    with gateway(tmp_path_factory.mktemp("ledger"), config) as running:
        yield running


def body(path: str, number: int, more: int = 1) -> dict[str, Any]:
    text = f"Request {number} " + "and more " * (number % 7) * more
    shape: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text},
        "/v1/messages": {"messages": [{"role": "user", "content": text}], "max_tokens": 50},
        "/v1/embeddings": {"input": text},
    }
    return {"model": MODEL, **shape.get(path, {"messages": [{"role": "user", "content": text}]})}


async def request_completely(port: int, number: int) -> None:
    path = ENDPOINTS[number % len(ENDPOINTS)]
    stream = {"stream": number % 2 == 0} if path != "/v1/embeddings" else {}
    async with client(port) as connection:
        reply = await connection.request(request({**body(path, number), **stream, "simulate": FAST}, path))
        assert reply.status == 200 and reply.whole, reply.body


async def disconnect_early(port: int, number: int) -> None:
    """Request a stream, and disconnect after some events."""
    async with client(port) as connection:
        connection.send(request({**body("/v1/chat/completions", number), "stream": True, "simulate": SLOW}))
        await connection.events(2 + number % 5)


async def fail(port: int, number: int) -> None:
    """Send a request that the gateway or the server refuses, or whose server fails before or during the response."""
    kinds: list[dict[str, Any]] = [
        {"model": "nobody"},
        {"temperature": "hot"},
        {"simulate": {"status": 503}},
        {"stream": True, "simulate": {"error_first": True}},
        {"stream": True, "simulate": {"cut_after": 4}},
        {"stream": True, "simulate": {"error_after": 5}},
        {"simulate": {"cut_before_headers": True}},
    ]
    async with client(port) as connection:
        await connection.request(request({**body("/v1/chat/completions", number), **kinds[number % len(kinds)]}))


async def run_mixed(port: int, count: int) -> None:
    order = random.Random(7)  # the same run each time
    work = [order.choice((request_completely, request_completely, disconnect_early, fail)) for _ in range(count)]
    slots = asyncio.Semaphore(8)

    async def one_of(number: int) -> None:
        async with slots:
            await work[number](port, number)

    async with asyncio.timeout(100), asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(one_of(number))


def rows(one: Gateway) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(one.folder / "usage.db")) as connection:
        connection.row_factory = sqlite3.Row
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'gateway_usage'").fetchone() is None:
            return []  # the gateway creates its table later
        return [dict(each) for each in connection.execute("SELECT * FROM gateway_usage")]


def total(found: list[dict[str, Any]], kind: str) -> int:
    return sum(each[f"{kind}_tokens"] or 0 for each in found)


def cost(row: dict[str, Any]) -> int:
    return ((row["prompt_tokens"] or 0) + 3 * (row["completion_tokens"] or 0)) * 1000


def counted(one: Gateway, kind: str) -> float:
    return one.metric(f'vllm_gateway_tokens_total{{key="team-a",model="{MODEL}",type="{kind}"}}')


def of_servers(servers: list[Simulated]) -> tuple[float, float]:
    """Return the prompt and completion tokens, by the servers' counters."""
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    prompt, completion = (sum(server.metric(name) for server in servers) for name in names)
    return prompt, completion


def check_server_counters(found: list[dict[str, Any]], servers: list[Simulated], used: tuple[float, ...]) -> None:
    """Compare rows with the servers: each row of a complete response has the server's count.

    ``used`` is the change of the servers' counters. It is the sum of these rows and of what the servers spent on truncated responses.
    """
    whole = {each["request_id"]: each for each in found if (each["status"], each["incomplete"]) == (200, None)}
    entries = [(dict(entry["headers"]).get("x-request-id"), entry) for server in servers for entry in server.requests()]
    served = {name: entry for name, entry in entries if name in whole and entry["outcome"] == "finished" and entry["prompt_tokens"]}
    assert {row["endpoint"] for name, row in whole.items() if name not in served} <= {"/v1/embeddings"} and served
    for name, entry in served.items():
        for kind in KINDS:
            assert entry[f"{kind}_tokens"] == whole[name][f"{kind}_tokens"]
    broken = [entry for name, entry in entries if name not in whole or entry["outcome"] != "finished"]
    assert used == tuple(total([*whole.values()], kind) + sum(entry[f"{kind}_tokens"] for entry in broken) for kind in KINDS)


async def test_ledger_metrics_and_server_counters_agree(one: Gateway, servers: list[Simulated]) -> None:
    count, before = 120, of_servers(servers)
    await run_mixed(one.data, count - 2)
    for _ in range(2):  # connections are idle by now, and the close of such a connection without a byte causes a second attempt
        await fail(one.data, CLOSED_WITHOUT_RESPONSE)
    assert (await asyncio.to_thread(wait_for, lambda: len(rows(one)) >= count)) is True
    found = rows(one)
    assert len(found) == count == len({each["request_id"] for each in found})
    assert one.metric(f'vllm_gateway_retries_total{{model="{MODEL}"}}') > 0
    await asyncio.to_thread(wait_for, lambda: not any(server.metric("vllm:num_requests_running") for server in servers))
    check_server_counters(found, servers, tuple(after - earlier for after, earlier in zip(of_servers(servers), before, strict=True)))
    metrics = [line for line in one.get("/metrics").text.splitlines() if line.startswith("vllm_gateway_requests_total{")]
    by_status = {status: sum(1 for each in found if each["status"] == status) for status in {each["status"] for each in found}}
    for status, number in by_status.items():
        shown = [line for line in metrics if f'code="{status}"' in line and 'endpoint="/v1/' in line and "/v1/models" not in line]
        assert sum(float(line.rsplit(" ", 1)[1]) for line in shown) == number, status

    for kind in ("prompt", "completion", "cached", "reasoning"):
        assert total(found, kind) == counted(one, kind), kind
    broken = [each for each in found if each["incomplete"] is not None]
    assert {each["incomplete"] for each in broken} == {"client", "upstream"}
    left = [each for each in found if each["status"] == 499]
    assert left and total(left, "completion") > 0
    entries = {dict(entry["headers"]).get("x-request-id"): entry for server in servers for entry in server.requests()}
    streamed = [each for each in broken if each["first_token_ms"] is not None]
    assert len(streamed) > len(left) / 2
    for each in streamed:
        entry = entries[each["request_id"]]
        assert not each["estimated"] and each["prompt_tokens"] == entry["prompt_tokens"]
        assert each["completion_tokens"] <= entry["completion_tokens"]
    assert all(each["cost_nano"] == cost(each) for each in found if each["model"])


async def test_complete_responses_have_the_servers_count(one: Gateway, servers: list[Simulated]) -> None:
    """Compare the sums of complete responses only. Servers do not report the usage of truncated ones."""

    def of_ledger() -> tuple[int, int]:
        found = rows(one)
        return total(found, "prompt"), total(found, "completion")

    before, ours, number = of_servers(servers), of_ledger(), len(rows(one))
    async with asyncio.timeout(100), asyncio.TaskGroup() as group:
        for each in range(60):
            group.create_task(request_completely(one.data, each))
    await asyncio.to_thread(wait_for, lambda: len(rows(one)) == number + 60)
    used = tuple(after - earlier for after, earlier in zip(of_servers(servers), before, strict=True))
    assert tuple(after - earlier for after, earlier in zip(of_ledger(), ours, strict=True)) == used


@pytest.mark.parametrize("path", ENDPOINTS[:-1])
def test_cached_tokens_are_part_of_the_prompt(tmp_path: Path, path: str) -> None:
    """Count them on all routes. Anthropic's ``input_tokens`` exclude them."""
    content = body(path, 6, more=10)
    with running("--sim-tokens-per-second", "0", "--enable-prompt-tokens-details") as server:
        config = configuration({"id": MODEL, "servers": [{"url": server.url}]}) | {"ledger": "sqlite:///usage.db"}
        with gateway(tmp_path, config) as one:
            for stream in (False, True, False):
                assert one.request(path, **content, stream=stream).status_code == 200
            wait_for(lambda: len(rows(one)) == 3)
            found = sorted(rows(one), key=lambda row: row["time"])
        entries = [entry for entry in server.requests() if (entry["method"], entry["path"]) == ("POST", path)]
    assert [row["prompt_tokens"] for row in found] == [entry["prompt_tokens"] for entry in entries]
    assert found[0]["cached_tokens"] == 0 < found[1]["cached_tokens"] == found[2]["cached_tokens"] < found[2]["prompt_tokens"]


def test_the_admin_port_and_the_command_say_the_same(one: Gateway) -> None:
    one.request(model=ANY)
    wait_for(lambda: any(each["model"] == ANY for each in rows(one)))
    shown = one.get(f"/usage?by=key,model&model={ANY}")
    assert (shown.status_code, shown.headers["cache-control"]) == (200, "no-store")
    (line,) = shown.json()["usage"]
    printed = one.command("usage", "--by", "key,model", "--model", ANY, "--format", "csv")
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.splitlines()[1].split(",")[:3] == [line["key"], line["model"], str(line["requests"])]
    assert (one.get("/usage?by=color").status_code, one.get("/usage?sinse=1d").status_code) == (400, 400)
