"""A running gateway samples its servers' counters, and its ledger, reconciled with them, leaves no difference."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic import SecretStr

from gateway import config as conf
from gateway.admin.engine_metrics import Engine
from gateway.ledger import writer
from gateway.ledger.spool import spool
from gateway.monitoring.engine_sampler import EngineSampler
from gateway.usage.reader import UsageReader
from gateway.usage.reconciliation import UNBILLED
from tests.support.process import Gateway, configuration, gateway, launched, wait_for, write
from tests.support.running import KEY, until
from tests.support.wire import client, request
from tests.upstream.simulator.test_process import Simulated, running

MODEL, ANY, TWICE = "tiny", "sim/one", "twice"
FAST = {"tokens": 12, "tokens_per_second": 0}
SLOW = {"tokens": 100_000, "tokens_per_second": 100}
HELLO = [{"role": "user", "content": "Hello, how are you?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Simulated]:
    with running() as one:
        yield one


@pytest.fixture(scope="module")
def one(server: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    models = ({"id": MODEL, "servers": [{"url": server.url}]}, launched(ANY))
    config = configuration(*models, workers=2) | {"ledger": {"url": "sqlite:///usage.db", "sample_interval": "100ms"}}
    with gateway(tmp_path_factory.mktemp("ledger"), config) as started:
        yield started


def send(one: Gateway, **body: Any) -> dict[str, Any]:
    """Return the usage of a complete response."""
    usage: dict[str, Any] = one.request(**{"model": MODEL, "messages": HELLO, "simulate": FAST, **body}).json()["usage"]
    return usage


def disconnect_after(one: Gateway, events: int, **body: Any) -> None:
    """Read some events of a stream, and disconnect."""
    document = {"model": MODEL, "messages": HELLO, "stream": True, "simulate": SLOW, **body}
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx2.stream("POST", f"{one.url}/v1/chat/completions", json=document, headers=headers, timeout=60) as response:
        lines = response.iter_lines()
        for _ in range(events):
            next(line for line in lines if line.startswith("data:"))


def reconciled(one: Gateway, since: datetime, model: str = MODEL) -> dict[str, Any]:
    """Return the result for the server of a model; without one, classes that are empty."""
    query = {"reconcile": "true", "since": since.isoformat(), "model": model}
    found = httpx2.get(f"http://127.0.0.1:{one.admin}/usage", params=query, timeout=30).json()["servers"]
    empty: dict[str, Any] = {"prompt": {"engine": 0}, "completion": {"engine": 0}, "engines": 0}
    return dict(found[0]) if found else empty


def settled(one: Gateway, since: datetime, engine: tuple[float, float], rows: int, model: str = MODEL) -> dict[str, Any]:
    """Return the result once its counters are those of the engine, and the ledger has all rows."""

    def complete() -> dict[str, Any] | None:
        found = reconciled(one, since, model)
        usage = one.get(f"/usage?by=model&model={model}&since={since.isoformat().replace('+00:00', 'Z')}").json()["usage"]
        counted = (found["prompt"]["engine"], found["completion"]["engine"]) == engine
        return found if counted and sum(each["requests"] for each in usage) == rows else None

    found: dict[str, Any] = wait_for(complete, 60.0, why=lambda: f"{reconciled(one, since, model)}, not {engine}")
    return found


def counters(server: Simulated) -> tuple[float, float]:
    return server.metric("vllm:prompt_tokens_total"), server.metric("vllm:generation_tokens_total")


def test_the_classes_explain_all_that_the_server_has_counted(one: Gateway, server: Simulated) -> None:
    since = datetime.fromtimestamp(0, UTC)
    usages = [send(one), send(one, n=3, temperature=1), send(one, n=2, temperature=1, stream=False)]
    direct = server.chat(simulate=FAST).json()["usage"]
    for events in (1, 4, 9):
        disconnect_after(one, events)
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0)
    found = settled(one, since, counters(server), 6)
    prompt, completion = found["prompt"], found["completion"]
    assert (found["server"], found["engines"]) == (server.url, 1)
    assert prompt["choices"] == 3 * usages[0]["prompt_tokens"]
    # On a busy machine, the server may be silent for so long that the gateway sends it a canary: one token of each, for no client.
    canaries = prompt["direct_use"] - direct["prompt_tokens"]
    assert canaries in range(5) and completion["direct_use"] == direct["completion_tokens"] + canaries
    assert prompt["ledger"] + prompt["cancelled_prefill"] == 6 * usages[0]["prompt_tokens"]
    assert completion["ledger"] + completion["not_delivered"] == completion["engine"] - completion["direct_use"]
    assert completion["ledger"] >= sum(usage["completion_tokens"] for usage in usages)
    assert prompt["difference"] == completion["difference"] == prompt["lost"] == completion["lost"] == 0
    assert found["prompt_in_progress"] == found["completion_in_progress"] == 0


def test_tokens_from_before_a_server_was_added_are_no_direct_use(tmp_path: Path) -> None:
    config = configuration(launched(ANY)) | {"ledger": {"url": "sqlite:///usage.db", "sample_interval": "100ms"}}
    with gateway(tmp_path, config) as one, running() as late:
        wait_for(lambda: sampled(tmp_path))
        usage = late.chat(simulate=FAST).json()["usage"]
        config["models"].append({"id": MODEL, "servers": [{"url": late.url}]})
        write(tmp_path / "gateway.yaml", config)
        assert one.command("reload").returncode == 0
        since = datetime.fromtimestamp(0, UTC)
        wait_for(lambda: sampled(tmp_path, late.url))
        own = send(one)
        found = settled(one, since, (own["prompt_tokens"], own["completion_tokens"]), 1)
    assert usage["prompt_tokens"] > 0 and found["prompt"]["direct_use"] == found["completion"]["direct_use"] == 0


def test_copies_of_requests_are_explained(server: Simulated, tmp_path: Path) -> None:
    models = (launched(ANY) | {"mirror": {"to": MODEL, "share": "100%"}}, {"id": MODEL, "servers": [{"url": server.url}]})
    before = counters(server)
    config = configuration(*models, workers=2) | {"ledger": {"url": "sqlite:///usage.db", "sample_interval": "100ms"}}
    with gateway(tmp_path, config) as one:
        wait_for(lambda: sampled(tmp_path))
        usages = [send(one, model=ANY), send(one, model=ANY, n=2, temperature=1), send(one)]
        one.request(model=ANY, messages=HELLO, stream=True, simulate=FAST)
        completed = f'vllm_gateway_mirrored_requests_total{{model="{ANY}",result="completed",to="{MODEL}"}}'
        wait_for(lambda: one.metric(completed) == 3)
        prompt, completion = (after - earlier for after, earlier in zip(counters(server), before, strict=True))
        found = settled(one, datetime.fromtimestamp(0, UTC), (prompt, completion), 1)
        report = one.get("/usage?by=key,model").json()["usage"]
    for kind, engine in (("prompt", prompt), ("completion", completion)):
        classes, own = found[kind], usages[2][f"{kind}_tokens"]
        assert (classes["ledger"], classes["direct_use"], classes["difference"]) == (own, 0, 0)
        assert classes["mirrored"] > 0 and classes["mirrored"] + classes["choices"] == engine - own
    assert (found["prompt"]["mirrored"], found["prompt"]["choices"]) == (3 * usages[0]["prompt_tokens"], usages[0]["prompt_tokens"])
    assert {(each["key"], each["model"], each["requests"]) for each in report} == {("team-a", ANY, 3), ("team-a", MODEL, 1)}


async def test_disconnects_at_any_event_leave_no_difference(server: Simulated, tmp_path: Path) -> None:
    """Mix complete responses with streams of one to three choices that clients truncate anywhere, some after the engine has finished."""
    order, count, slots = random.Random(7), 150, asyncio.Semaphore(8)

    async def truncate(port: int, number: int, tokens: int, choices: int, events: int) -> None:
        simulate = {"tokens": tokens, "tokens_per_second": 200}
        body = {"model": MODEL, "messages": HELLO, "stream": True, "n": choices, "temperature": 1, "seed": number, "simulate": simulate}
        async with slots, client(port) as sender:
            sender.send(request(body))
            await sender.events(events)

    async def complete(port: int) -> None:
        async with slots, client(port) as sender:
            response = await sender.request(request({"model": MODEL, "messages": HELLO, "simulate": FAST}))
            assert response.status == 200

    before = counters(server)
    config = configuration({"id": MODEL, "servers": [{"url": server.url}]}, workers=2)
    with gateway(tmp_path, config | {"ledger": {"url": "sqlite:///usage.db", "sample_interval": "100ms"}}) as one:
        await asyncio.to_thread(wait_for, lambda: sampled(tmp_path))
        async with asyncio.timeout(100), asyncio.TaskGroup() as group:
            for number in range(count):
                tokens = order.randint(3, 40)
                truncated = number % 3 == 0
                work = (
                    truncate(one.data, number, tokens, order.randint(1, 3), order.randint(1, tokens)) if truncated else complete(one.data)
                )
                group.create_task(work)
        await asyncio.to_thread(wait_for, lambda: server.metric("vllm:num_requests_running") == 0)
        prompt, completion = (after - earlier for after, earlier in zip(counters(server), before, strict=True))
        found = await asyncio.to_thread(settled, one, datetime.fromtimestamp(0, UTC), (prompt, completion), count)
        used = one.get("/usage?by=model").json()["usage"][0]
    for kind, engine in (("prompt", prompt), ("completion", completion)):
        classes = found[kind]
        assert (classes["ledger"], classes["difference"], classes["direct_use"]) == (used[f"{kind}_tokens"], 0, 0)
        assert classes["engine"] == engine == sum(value for name, value in classes.items() if name != "engine")
    assert used["incomplete"] > count / 4


def sampled(folder: Path, server: str = "%") -> bool:
    """Return whether the first sample is stored, of a server or of any."""
    with closing(sqlite3.connect(folder / "usage.db")) as connection:
        exists = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'gateway_engine_samples'").fetchone()
        found = "SELECT count(*) FROM gateway_engine_samples WHERE server LIKE ?"
        return exists is not None and bool(connection.execute(found, (server,)).fetchone()[0])


def test_the_command_prints_them(one: Gateway, server: Simulated) -> None:
    send(one)
    result = wait_for(lambda: done if (done := one.command("usage", "--reconcile", "--since", "1h")).stdout.count(server.url) else None)
    assert result.returncode == 0 and "direct use" in result.stdout and "completion" in result.stdout
    document = json.loads(one.command("usage", "--reconcile", "--format", "json", "--model", MODEL).stdout)
    assert [each["server"] for each in document["servers"]] == [server.url]
    assert one.command("usage", "--reconcile", "--format", "csv").stdout.startswith("model,server,tokens,")
    remote = one.command("usage", "--reconcile", "--admin", f"http://127.0.0.1:{one.admin}")
    assert remote.returncode == 0 and server.url in remote.stdout
    refused = one.command("usage", "--reconcile", "--by", "team")
    assert refused.returncode == 2 and "takes no by" in refused.stderr
    assert one.get("/usage?reconcile=true&key=team-a").status_code == 400


def test_unbilled_tokens_are_counted(one: Gateway, server: Simulated) -> None:
    name = f'vllm_gateway_unbilled_tokens_total{{model="{MODEL}",reason="direct_use"}}'
    before = one.metric(name)
    shown = [line for line in one.get("/metrics").text.splitlines() if line.startswith("vllm_gateway_unbilled_tokens_total{")]
    assert {reason for reason in UNBILLED if any(f'reason="{reason}"' in line for line in shown)} == set(UNBILLED)
    usage = server.chat(simulate=FAST).json()["usage"]
    expected = usage["prompt_tokens"] + usage["completion_tokens"]
    wait_for(lambda: one.metric(name) >= before + expected, 60.0)


def test_a_killed_server_leaves_only_rows_that_no_counter_confirms(one: Gateway) -> None:
    since = datetime.now(UTC)
    usage = send(one, model=ANY)
    found = settled(one, since, (usage["prompt_tokens"], usage["completion_tokens"]), 1, ANY)
    assert (found["engines"], found["prompt"]["difference"], found["completion"]["difference"]) == (1, 0, 0)
    pid = next(model for model in one.get("/status").json()["models"] if model["id"] == ANY)["servers"][0]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: one.metric(f'vllm_gateway_server_restarts_total{{model="{ANY}",server="{ANY}#0"}}') == 1)
    wait_for(lambda: one.metric(f'vllm_gateway_server_up{{model="{ANY}",server="{ANY}#0"}}') == 1)
    again = send(one, model=ANY)
    both = usage["prompt_tokens"] + again["prompt_tokens"], usage["completion_tokens"] + again["completion_tokens"]
    found = settled(one, since, both, 2, ANY)
    assert found["engines"] == 2
    for kind in ("prompt", "completion"):
        assert found[kind]["ledger"] + found[f"{kind}_unsampled"] == found[kind]["engine"]
        assert (found[kind]["difference"], found[f"{kind}_unsampled"]) == (0, 0)


def test_a_gateway_that_stops_samples_its_servers_for_the_last_time(tmp_path: Path) -> None:
    config = configuration(launched(ANY)) | {"ledger": {"url": "sqlite:///usage.db", "sample_interval": "1h"}}
    with gateway(tmp_path, config) as one:
        usage = send(one, model=ANY)
        assert one.stop() == 0
        document = json.loads(one.command("usage", "--reconcile", "--format", "json").stdout)
    [found] = document["servers"]
    for kind in ("prompt", "completion"):
        expected = usage[f"{kind}_tokens"]
        assert (found[kind]["engine"], found[kind]["ledger"], found[f"{kind}_unsampled"]) == (expected, expected, 0)


async def test_a_sample_that_fails_is_followed_by_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "gateway.yaml", configuration({"id": MODEL, "servers": [{"url": "http://127.0.0.1:1"}]}))
    config, failures, samples = conf.load(tmp_path / "gateway.yaml"), [KeyError(MODEL)], 0

    def engines() -> dict[str, Engine]:
        nonlocal samples
        samples += 1
        if failures:
            raise failures.pop()
        return {}

    settings = conf.Ledger.model_validate({"url": SecretStr("sqlite:///usage.db")})
    with writer.running(settings, tmp_path, spool(tmp_path / "spool"), 1) as ledger:
        sampling = asyncio.create_task(EngineSampler(engines, lambda: config, (), ledger, UsageReader(ledger.engine), 0.01).run())
        await until(lambda: samples > 1)
        sampling.cancel()
    assert caplog.messages.count("the servers' token counters could not be sampled") == 1


def test_a_server_of_two_models_is_not_sampled(server: Simulated, tmp_path: Path) -> None:
    models = [{"id": name, "servers": [{"url": server.url, "model": "tiny"}]} for name in (MODEL, TWICE)]
    config = configuration(*models) | {"ledger": {"url": "sqlite:///usage.db", "sample_interval": "100ms"}}
    with gateway(tmp_path, config) as one:
        send(one)
        wait_for(lambda: one.get("/usage?by=model").json()["usage"])
        assert reconciled(one, datetime.fromtimestamp(0, UTC))["engines"] == 0
