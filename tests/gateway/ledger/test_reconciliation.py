"""Three books of one run: the ledger, the gateway's metrics and the servers' own counters agree, to the token."""

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
CUT = 6  # of be_refused: nothing at all is answered


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Simulated]]:
    with running("--sim-tokens-per-second", "0") as one, running("--sim-tokens-per-second", "0") as other:
        yield [one, other]


@pytest.fixture(scope="module")
def one(servers: list[Simulated], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Two servers behind one model, and a launched one; two workers."""
    found = {"id": MODEL, "servers": [{"url": server.url} for server in servers], "price": {"prompt": 1, "completion": 3}}
    config = configuration(found, launched(ANY), workers=2) | {"ledger": "sqlite:///usage.db"}
    with gateway(tmp_path_factory.mktemp("ledger"), config) as running:
        yield running


def body(path: str, number: int, more: int = 1) -> dict[str, Any]:
    words = f"Request {number} " + "and more " * (number % 7) * more
    shape: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": words},
        "/v1/responses": {"input": words},
        "/v1/messages": {"messages": [{"role": "user", "content": words}], "max_tokens": 50},
        "/v1/embeddings": {"input": words},
    }
    return {"model": MODEL, **shape.get(path, {"messages": [{"role": "user", "content": words}]})}


async def ask_wholly(port: int, number: int) -> None:
    path = ENDPOINTS[number % len(ENDPOINTS)]
    stream = {"stream": number % 2 == 0} if path != "/v1/embeddings" else {}
    async with client(port) as asking:
        reply = await asking.request(request({**body(path, number), **stream, "simulate": FAST}, path))
        assert reply.status == 200 and reply.whole, reply.body


async def leave_early(port: int, number: int) -> None:
    """A stream that its client leaves after some events."""
    async with client(port) as asking:
        asking.send(request({**body("/v1/chat/completions", number), "stream": True, "simulate": SLOW}))
        await asking.events(2 + number % 5)


async def be_refused(port: int, number: int) -> None:
    """By the gateway, by the server, or by a server that fails before its answer or in the middle of it."""
    kinds: list[dict[str, Any]] = [
        {"model": "nobody"},
        {"temperature": "hot"},
        {"simulate": {"status": 503}},
        {"stream": True, "simulate": {"error_first": True}},
        {"stream": True, "simulate": {"cut_after": 4}},
        {"stream": True, "simulate": {"error_after": 5}},
        {"simulate": {"cut_before_headers": True}},
    ]
    async with client(port) as asking:
        await asking.request(request({**body("/v1/chat/completions", number), **kinds[number % len(kinds)]}))


async def run_mixed(port: int, count: int) -> None:
    order = random.Random(7)  # the same run each time
    work = [order.choice((ask_wholly, ask_wholly, leave_early, be_refused)) for _ in range(count)]
    gate = asyncio.Semaphore(8)

    async def one_of(number: int) -> None:
        async with gate:
            await work[number](port, number)

    async with asyncio.timeout(100), asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(one_of(number))


def rows(one: Gateway) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(one.folder / "usage.db")) as connection:
        connection.row_factory = sqlite3.Row
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'gateway_usage'").fetchone() is None:
            return []  # the gateway makes its table in its own time
        return [dict(each) for each in connection.execute("SELECT * FROM gateway_usage")]


def total(found: list[dict[str, Any]], kind: str) -> int:
    return sum(each[f"{kind}_tokens"] or 0 for each in found)


def cost(row: dict[str, Any]) -> int:
    return ((row["prompt_tokens"] or 0) + 3 * (row["completion_tokens"] or 0)) * 1000


def counted(one: Gateway, kind: str) -> float:
    return one.metric(f'vllm_gateway_tokens_total{{key="team-a",model="{MODEL}",type="{kind}"}}')


def of_servers(servers: list[Simulated]) -> tuple[float, float]:
    """(prompt, completion), by their counters."""
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    prompt, completion = (sum(server.metric(name) for server in servers) for name in names)
    return prompt, completion


def check_the_servers_books(found: list[dict[str, Any]], servers: list[Simulated], used: tuple[float, ...]) -> None:
    """``used``, by the servers' counters, is what the ledger has of whole answers and what the servers spent on those that broke off; of
    each whole answer of which a server has noted the tokens, the row has the same."""
    whole = {each["request_id"]: each for each in found if (each["status"], each["incomplete"]) == (200, None)}
    entries = [(dict(entry["headers"]).get("x-request-id"), entry) for server in servers for entry in server.requests()]
    served = {name: entry for name, entry in entries if name in whole and entry["outcome"] == "finished" and entry["prompt_tokens"]}
    assert {row["endpoint"] for name, row in whole.items() if name not in served} <= {"/v1/embeddings"} and served
    for name, entry in served.items():
        for kind in KINDS:
            assert entry[f"{kind}_tokens"] == whole[name][f"{kind}_tokens"]
    broken = [entry for name, entry in entries if name not in whole or entry["outcome"] != "finished"]
    assert used == tuple(total([*whole.values()], kind) + sum(entry[f"{kind}_tokens"] for entry in broken) for kind in KINDS)


async def test_a_mixed_run_is_the_same_in_all_books(one: Gateway, servers: list[Simulated]) -> None:
    count, before = 120, of_servers(servers)
    await run_mixed(one.data, count - 2)
    for _ in range(2):  # connections are kept by now, and one that closes without a byte means a second attempt
        await be_refused(one.data, CUT)
    assert (await asyncio.to_thread(wait_for, lambda: len(rows(one)) >= count)) is True
    found = rows(one)
    assert len(found) == count == len({each["request_id"] for each in found})
    assert one.metric(f'vllm_gateway_retries_total{{model="{MODEL}"}}') > 0
    await asyncio.to_thread(wait_for, lambda: not any(server.metric("vllm:num_requests_running") for server in servers))
    check_the_servers_books(found, servers, tuple(after - earlier for after, earlier in zip(of_servers(servers), before, strict=True)))
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


async def test_whole_answers_are_the_servers_own_count(one: Gateway, servers: list[Simulated]) -> None:
    """Without those that broke off, whose tokens the servers know and tell nobody."""

    def of_ledger() -> tuple[int, int]:
        found = rows(one)
        return total(found, "prompt"), total(found, "completion")

    before, ours, number = of_servers(servers), of_ledger(), len(rows(one))
    async with asyncio.timeout(100), asyncio.TaskGroup() as group:
        for each in range(60):
            group.create_task(ask_wholly(one.data, each))
    await asyncio.to_thread(wait_for, lambda: len(rows(one)) == number + 60)
    used = tuple(after - earlier for after, earlier in zip(of_servers(servers), before, strict=True))
    assert tuple(after - earlier for after, earlier in zip(of_ledger(), ours, strict=True)) == used


@pytest.mark.parametrize("path", ENDPOINTS[:-1])
def test_what_a_server_had_in_its_cache_is_part_of_the_prompt(tmp_path: Path, path: str) -> None:
    """In whatever words its answer tells it: Anthropic's leave it out of ``input_tokens``."""
    asked = body(path, 6, more=10)
    with running("--sim-tokens-per-second", "0", "--enable-prompt-tokens-details") as server:
        config = configuration({"id": MODEL, "servers": [{"url": server.url}]}) | {"ledger": "sqlite:///usage.db"}
        with gateway(tmp_path, config) as one:
            for stream in (False, True, False):
                assert one.request(path, **asked, stream=stream).status_code == 200
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
