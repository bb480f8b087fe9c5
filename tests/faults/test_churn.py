"""Hundreds of servers are added and removed under streams: no stream is dropped, and a draining server gets no request."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from tests.faults.conftest import FULL
from tests.faults.test_reloads import Source, sending, streaming
from tests.support.controlled import Controlled, controlled
from tests.support.kubernetes_api import Api, Document, endpoint, kubernetes_api, slice_of
from tests.support.running import KEY, MODEL, until
from tests.support.scripted import Conversation, Scripted, scripted

HOSTS = ("127.0.0.1", *(f"127.0.8.{number}" for number in range(1, 200)))
STREAMS = 500 if FULL else 40
ROUNDS = 300 if FULL else 40
FOUND = {"id": MODEL, "discover": {"kubernetes": {"service": "vllm"}}}


class Farm(Source):
    """Servers on every address. ``asked`` lists the address that received each request."""

    def __init__(self) -> None:
        super().__init__()
        self.requested_hosts: list[str] = []

    async def __call__(self, talk: Conversation) -> None:
        if talk.request.head.startswith(b"POST"):
            self.requested_hosts.append(talk.host)
        await super().__call__(talk)


def slices(entries: list[Document], port: int) -> list[Document]:
    """Return slices of at most 100 endpoints, as Kubernetes creates them. The last slice may be empty."""
    return [slice_of(f"vllm-{start}", entries[start : start + 100], ("http", port)) for start in (0, 100)]


def up(one: Controlled) -> set[str]:
    """Return the hosts of the servers that are up."""
    return {each["name"].split("/")[-1].split(":")[0] for each in one.status(MODEL)["servers"] if each["condition"] == "up"}


async def test_two_hundred_endpoints_come_and_go_under_streams(tmp_path: Path) -> None:
    farm, dice = Farm(), random.Random(7)
    (tmp_path / "pod").mkdir()
    async with kubernetes_api(tmp_path / "pod") as api, scripted(farm, *HOSTS[1:]) as server:
        await api.put(*slices([endpoint(host) for host in HOSTS[:100]], server.port))
        async with controlled(tmp_path, FOUND, cluster=api.cluster, workers=2) as one:
            async with streaming(one, farm, STREAMS) as streams:
                async with sending(one, [KEY]) as seen:
                    began, before = time.monotonic(), one.control.publisher.version
                    await churn(api, server, dice)
                    versions, seconds = one.control.publisher.version - before, time.monotonic() - began
                    assert versions <= 2 * seconds + 3, "generations are gathered"
                    assert not any(stream.done() for stream in streams), [stream.result() for stream in streams if stream.done()][:1]
                    staying = set(HOSTS[150:])
                    await api.put(*slices([endpoint(host, terminating=host not in staying) for host in HOSTS], server.port))
                    await until(lambda: up(one) == staying, 60.0)
                    await one.wait_for_workers()
                    assert up(one) == staying
                count = len(farm.requested_hosts)  # no request is on its way now: the clients have disconnected
                async with sending(one, [KEY]) as later:
                    await until(lambda: len(farm.requested_hosts) > count + 100, 60.0)
                assert set(farm.requested_hosts[count:]) <= staying, "a server that is leaving was asked"
                await api.put(*slices([endpoint(host) for host in HOSTS[150:]], server.port))
                await until(lambda: len(one.status(MODEL)["servers"]) == 50, 60.0)
            for number, stream in enumerate(streams):
                reply = stream.result()
                assert reply.status == 200 and reply.whole
                assert reply.body == farm.sent[f"s{number}"]
            assert set(seen[KEY].statuses) == set(later[KEY].statuses) == {200}
            await until(lambda: one.value("inflight_requests", MODEL) == 0)


async def churn(api: Api, server: Scripted, dice: random.Random) -> None:
    """Publish endpoints at random as ready, unready, terminating or absent. In between, cut or restart the watch.

    The first ten endpoints always stay ready, to serve requests.
    """
    for number in range(ROUNDS):
        entries = [endpoint(host) for host in HOSTS[:10]]
        for host in dice.sample(HOSTS[10:], 120):
            roll = dice.random()
            entries.append(endpoint(host, ready=roll < 0.7, terminating=roll > 0.85))
        await api.put(*slices(entries, server.port))
        if number % 10 == 5:
            api.cut()
        if number % 20 == 19:
            await api.forget()
            api.cut()
        await asyncio.sleep(0.05)


async def test_a_rolling_update_is_not_noticed(tmp_path: Path) -> None:
    """Follow a Deployment: a new pod starts unready. Then an old pod terminates, finishes its streams, and is removed."""
    farm, old, new = Farm(), list(HOSTS[:4]), list(HOSTS[4:8])
    (tmp_path / "pod").mkdir()
    async with kubernetes_api(tmp_path / "pod") as api, scripted(farm, *HOSTS[1:8]) as server:

        async def publish(ready: list[str], unready: list[str], terminating: list[str]) -> None:
            entries = [endpoint(host, ready=host in ready, terminating=host in terminating) for host in (*ready, *unready, *terminating)]
            await api.put(slice_of("a", entries, ("http", server.port)))

        await publish(old, [], [])
        async with controlled(tmp_path, FOUND, cluster=api.cluster) as one:
            async with sending(one, [KEY]) as seen, streaming(one, farm, 12) as streams:
                for number, (terminating, coming) in enumerate(zip(old, new, strict=True)):
                    staying = [*old[number + 1 :], *new[:number]]
                    await publish([*staying, terminating], [coming], [])
                    await publish([*staying, terminating, coming], [], [])
                    await until(lambda host=coming: _condition(one, host) == "up", 30.0)
                    await publish([*staying, coming], [], [terminating])
                    await until(lambda host=terminating: _condition(one, host) == "out_of_rotation", 30.0)
                    await publish([*staying, coming], [], [])
                    await until(lambda host=terminating: _condition(one, host) == "", 30.0)
                assert not any(stream.done() for stream in streams)
                assert up(one) == set(new)
            assert all(stream.result().whole for stream in streams)
            assert [stream.result().body for stream in streams] == [farm.sent[f"s{number}"] for number in range(12)]
            assert set(seen[KEY].statuses) == {200}


def _condition(one: Controlled, host: str) -> str:
    """Return the condition of a server, or an empty text if the server is unknown."""
    found = [each["condition"] for each in one.status(MODEL)["servers"] if each["name"].startswith(f"http://{host}:")]
    return str(found[0]) if found else ""
