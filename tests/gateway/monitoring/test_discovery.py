"""Discovered servers that are added and removed: what the gateway serves and shows, and the effect of a reload."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.admin.status_view import status_view
from gateway.telemetry.metrics import Series
from tests.gateway.fleet import test_moved_streams as moved_streams
from tests.support.controlled import Controlled, controlled
from tests.support.kubernetes_api import Api, endpoint, kubernetes_api, slice_of
from tests.support.process import configuration as whole
from tests.support.process import gateway
from tests.support.running import MODEL, until
from tests.support.scripted import Conversation, Scripted, scripted
from tests.support.wire import COMPLETION

HOSTS = ("127.0.0.1", "127.0.9.2", "127.0.9.3")


def found(**more: Any) -> dict[str, Any]:
    return {"id": MODEL, "discover": {"kubernetes": {"service": "vllm", "port": "http"}}, **more}


def named(*names: str, interval: str = "50ms", port: int = 1, **more: Any) -> dict[str, Any]:
    return {"id": MODEL, "discover": {"dns": {"name": names[0], "port": port, "interval": interval}}, **more}


async def respond_ok(talk: Conversation) -> None:
    if talk.request.head.startswith(b"GET /v1/models"):
        await talk.respond(b'{"object":"list","data":[]}')
    elif talk.request.head.startswith(b"GET"):
        await talk.respond(b"{}")
    else:
        await talk.respond(COMPLETION)


class Farm:
    """Servers on several addresses. Records which of them got requests."""

    def __init__(self) -> None:
        self.requested_hosts: list[str] = []
        self.keys: set[str | None] = set()

    async def __call__(self, talk: Conversation) -> None:
        if talk.request.head.startswith(b"POST"):
            self.requested_hosts.append(talk.host)
            self.keys.add(talk.request.header("authorization"))
        await respond_ok(talk)

    async def used(self, one: Controlled, count: int = 6) -> set[str]:
        """Send this number of requests; return the hosts that got them."""
        before = len(self.requested_hosts)
        for _ in range(count):
            reply = await one.request(MODEL)
            assert reply.status_code == 200, reply.text
        return set(self.requested_hosts[before:])


class Stage:
    """An API server, servers, and the gateway between them."""

    def __init__(self, api: Api, farm: Farm, server: Scripted, one: Controlled) -> None:
        self.api = api
        self.farm = farm
        self.port = server.port
        self.one = one

    async def put(self, *endpoints: dict[str, Any], name: str = "a") -> None:
        await self.api.put(slice_of(name, endpoints, ("http", self.port)))

    def urls(self, *hosts: str) -> list[str]:
        return [f"http://{host}:{self.port}" for host in hosts]

    def conditions(self) -> dict[str, str]:
        return {each["name"]: each["condition"] for each in self.one.status(MODEL)["servers"]}

    async def shows(self, *conditions: str, hosts: Sequence[str] = HOSTS) -> None:
        """Wait until the servers of these hosts are in these conditions and every worker has the snapshot."""
        wanted = dict(zip(self.urls(*hosts), conditions, strict=False))
        await until(lambda: self.conditions() == wanted, 30.0)
        await self.one.wait_for_workers()


class Staged:
    def __init__(self, folder: Path, *endpoints: dict[str, Any], model: dict[str, Any] | None = None) -> None:
        self._folder = folder
        self._endpoints = endpoints
        self._model = model or found()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Stage:
        farm = Farm()
        (self._folder / "pod").mkdir()
        api = await self._stack.enter_async_context(kubernetes_api(self._folder / "pod"))
        server = await self._stack.enter_async_context(scripted(farm, *HOSTS[1:]))
        await api.put(slice_of("a", self._endpoints, ("http", server.port)))
        one = await self._stack.enter_async_context(controlled(self._folder, self._model, cluster=api.cluster))
        return Stage(api, farm, server, one)

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


async def test_endpoints_become_servers_and_removed_endpoints_stop_being_servers(tmp_path: Path) -> None:
    async with Staged(tmp_path, endpoint(HOSTS[0])) as stage:
        one = stage.one
        assert await stage.farm.used(one) == {HOSTS[0]}, "ready means that what was found first can be used"
        await stage.put(*map(endpoint, HOSTS))
        await stage.shows("up", "up", "up")
        assert await stage.farm.used(one, 9) == set(HOSTS)
        version = one.control.publisher.version
        await stage.put(endpoint(HOSTS[0], ready=False), endpoint(HOSTS[1], ready=False, terminating=True), endpoint(HOSTS[2]))
        await stage.shows("loading", "out_of_rotation", "up")
        assert one.control.publisher.version == version, "the servers are the same"
        assert await stage.farm.used(one) == {HOSTS[2]}
        assert one.control.readiness.not_ready() is None, "servers come and go, and the gateway is ready"
        shown = {each["name"]: each["endpoint"] for each in one.status(MODEL)["servers"]}
        assert list(shown.values()) == ["unready", "leaving", "ready"]
        states = {server.name: server.state for server in status_view(one.report.status()).models[0].servers}
        assert list(states.values()) == ["starting", "draining", "ready"]
        await stage.put()
        await stage.shows()
        refused = await one.request(MODEL)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_healthy_server")
        assert one.state(MODEL) == "failed"
        await stage.put(endpoint(HOSTS[1]))
        await stage.shows("up", hosts=HOSTS[1:2])
        assert await stage.farm.used(one) == {HOSTS[1]}
        assert f"{MODEL}: discovered servers changed: 2 added, 3 in total" in one.output.getvalue()
        assert f"{MODEL}: discovered servers changed: 3 removed, 0 in total" in one.output.getvalue()


async def test_requests_wait_for_the_first_servers(tmp_path: Path) -> None:
    async with Staged(tmp_path, model=found(queue={"size": 2, "wait": "60s"})) as stage:
        one = stage.one
        assert one.control.readiness.not_ready() is None and one.state(MODEL) == "failed"
        waiting = [asyncio.create_task(one.request(MODEL)) for _ in range(2)]
        await until(lambda: one.status(MODEL)["queued"] == 2, 30.0)
        refused = await one.request(MODEL)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        await stage.put(endpoint(HOSTS[0], ready=False))
        await until(lambda: list(stage.conditions().values()) == ["loading"], 30.0)
        assert one.status(MODEL)["queued"] == 2, "it is on its way"
        await stage.put(endpoint(HOSTS[0]))
        assert [reply.status_code for reply in await asyncio.gather(*waiting)] == [200, 200]
        await stage.put(endpoint(HOSTS[0], ready=False, terminating=True))
        await stage.shows("out_of_rotation")
        again = asyncio.create_task(one.request(MODEL))
        await until(lambda: one.status(MODEL)["queued"] == 1, 30.0)
        await stage.put(endpoint(HOSTS[1]))
        assert (await again).status_code == 200, "and so do those for servers that are all leaving"


async def test_no_request_waits_for_servers_that_are_down(tmp_path: Path) -> None:
    async with Staged(tmp_path, model=found(queue={"size": 2, "wait": "60s"})) as stage:
        await stage.api.put(slice_of("a", [endpoint(HOSTS[0])], ("http", 1)))
        url = f"http://{HOSTS[0]}:1"
        await until(lambda: stage.conditions() == {url: "down"} and stage.one.state(MODEL) == "failed", 30.0)
        await stage.one.wait_for_workers()
        refused = await stage.one.request(MODEL)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_healthy_server")


async def test_only_present_servers_have_metrics_and_a_status(tmp_path: Path) -> None:
    async with Staged(tmp_path, *map(endpoint, HOSTS)) as stage:
        series = stage.one.report.series()
        for url in stage.urls(*HOSTS):
            assert series[Series("server_up", (MODEL, url))] == (1.0,)
            assert Series("server_inflight", (MODEL, url)) in series
        await stage.put(endpoint(HOSTS[0]))
        await stage.shows("up")
        series = stage.one.report.series()
        assert {one.labels[1] for one in series if one.family.startswith("server_")} == set(stage.urls(HOSTS[0]))
        assert [group.target.name for group in stage.one.report.engines().values()] == stage.urls(HOSTS[0])
        assert stage.one.value("discovery_up", MODEL) == 1.0
        discovery = stage.one.status(MODEL)["discovery"]
        assert (discovery["source"], discovery["endpoints"], discovery["problem"]) == ("kubernetes vllm:http", 1, "")


async def test_ready_servers_are_counted_for_a_model_without_endpoints_too(tmp_path: Path) -> None:
    async with Staged(tmp_path) as stage:
        assert stage.one.report.series()[Series("ready_servers", (MODEL,))] == (0,)
        await stage.put(*map(endpoint, HOSTS))
        await stage.shows(*["up"] * len(HOSTS))
        assert stage.one.report.series()[Series("ready_servers", (MODEL,))] == (len(HOSTS),)


async def test_a_stream_continues_when_its_server_is_removed(tmp_path: Path) -> None:
    enough = asyncio.Event()

    async def script(talk: Conversation) -> None:
        if not talk.request.head.startswith(b"POST"):
            await respond_ok(talk)
            return
        await talk.begin_stream()
        await talk.chunk(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
        await enough.wait()
        await talk.chunk(b"data: [DONE]\n\n")
        await talk.end_stream()

    (tmp_path / "pod").mkdir()
    async with kubernetes_api(tmp_path / "pod") as api, scripted(script, HOSTS[1]) as server:
        await api.put(slice_of("a", [endpoint(HOSTS[0])], ("http", server.port)))
        async with controlled(tmp_path, found(), cluster=api.cluster) as one:
            stream = asyncio.create_task(one.request(MODEL, stream=True))
            await until(lambda: one.in_flight(MODEL) == 1)
            await api.put(slice_of("a", [endpoint(HOSTS[0], terminating=True), endpoint(HOSTS[1])], ("http", server.port)))
            await until(lambda: [each["condition"] for each in one.status(MODEL)["servers"]] == ["out_of_rotation", "up"], 30.0)
            assert one.in_flight(MODEL) == 1, "a server that leaves is shown with what it has to finish"
            await api.put(slice_of("a", [endpoint(HOSTS[1])], ("http", server.port)))
            await until(lambda: len(one.status(MODEL)["servers"]) == 1, 30.0)
            gone = f"http://{HOSTS[0]}:{server.port}"
            assert one.value("server_inflight", MODEL, gone) == 1, "and is counted until the end"
            enough.set()
            reply = await stream
            assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n")
            await until(lambda: Series("server_inflight", (MODEL, gone)) not in one.report.series())


@pytest.mark.parametrize("sleep", [True, False], ids=["preStop sleep", "stopped at once"])
async def test_the_streams_of_a_terminating_pod_move_to_other_pods(tmp_path: Path, sleep: bool) -> None:
    """A pod that sleeps before its stop signal has no streams then. Otherwise vLLM aborts them, and they continue elsewhere too."""
    (tmp_path / "pod").mkdir()
    with moved_streams.simulated(200, 10, 10) as servers:
        async with kubernetes_api(tmp_path / "pod") as api:
            for name, server in zip("ab", servers, strict=True):
                await api.put(slice_of(name, [endpoint(HOSTS[0])], ("http", server.port)))
            model = found(id=moved_streams.A, move_after="200ms", balance="round_robin")
            async with controlled(tmp_path, model, cluster=api.cluster) as one:
                tasks = await moved_streams.streams(one, 6)
                terminating = endpoint(HOSTS[0], ready=False, terminating=True)
                await api.put(slice_of("a", [terminating], ("http", servers[0].port)))
                if sleep:
                    await until(lambda: moved_streams.in_flight(one, servers[0]) == 0, moved_streams.LONG)
                servers[0].process.terminate()
                await api.remove("a")
                replies = await asyncio.gather(*tasks)
                assert [moved_streams.text_of(reply) for reply in replies] == moved_streams.undisturbed(200, 6)
                causes = {cause: moved_streams.continued(one, cause) for cause in ("moved", "aborted", "disconnected")}
                sent_again = one.value("retries_total", moved_streams.A)  # they had no event yet
                assert 0 < sum(causes.values()) + sent_again <= 3 and (not sleep or causes["moved"] == sum(causes.values())), causes


async def test_a_refusal_is_reported_and_the_gateway_is_ready_for_its_other_models(tmp_path: Path) -> None:
    (tmp_path / "pod").mkdir()
    async with kubernetes_api(tmp_path / "pod") as api, scripted(respond_ok) as server:
        api.refuse = lambda _: (403, "endpointslices is forbidden")
        other = {"id": "other", "servers": [{"url": f"http://127.0.0.1:{server.port}"}]}
        async with controlled(tmp_path, found(), other, cluster=api.cluster) as one:
            assert "403: endpointslices is forbidden" in one.status(MODEL)["discovery"]["problem"]
            assert one.value("discovery_up", MODEL) == 0.0
            assert Series("discovery_up", ("other",)) not in one.report.series()
            (warning,) = status_view(one.report.status()).warnings
            assert warning.startswith(f"discovery ({MODEL}) is down for ") and ": the API server says 403" in warning
            assert (await one.request("other")).status_code == 200
            assert (await one.request(MODEL)).json()["error"]["code"] == "no_healthy_server"


async def test_readiness_waits_for_the_first_response(tmp_path: Path) -> None:
    may_respond, names = asyncio.Event(), Names()

    async def slow(name: str) -> list[str]:
        await may_respond.wait()
        return await names(name)

    async with scripted(respond_ok) as server:
        names.table = {"vllm": ["127.0.0.1"]}
        starting = asyncio.create_task(_ready(tmp_path, named("vllm", port=server.port), slow))
        done, _ = await asyncio.wait({starting}, timeout=1.0)
        assert not done
        may_respond.set()
        assert await starting == 200


async def _ready(folder: Path, model: dict[str, Any], resolve: Any) -> int:
    async with controlled(folder, model, resolve=resolve) as one:
        return (await one.request(MODEL)).status_code


class Names:
    """A resolver with a table."""

    def __init__(self) -> None:
        self.table: dict[str, list[str]] = {}

    async def __call__(self, name: str) -> list[str]:
        if name not in self.table:
            raise OSError(-2, "Name or service not known")
        return self.table[name]


async def test_names_and_reloads(tmp_path: Path) -> None:
    (tmp_path / "inner").write_text("inner-key")
    names, farm = Names(), Farm()
    names.table = {"one": [HOSTS[0], HOSTS[1]], "two": [HOSTS[2]]}
    async with scripted(farm, *HOSTS[1:]) as server:
        model = named("one", port=server.port)
        model["discover"] |= {"model": "inner", "api_key": {"file": "inner"}}
        async with controlled(tmp_path, model, resolve=names) as one:
            one.control.observer.added_timeout = 30.0  # for a machine that pauses meanwhile
            assert await farm.used(one) == {HOSTS[0], HOSTS[1]}
            assert farm.keys == {"Bearer inner-key"}
            names.table["one"] = [HOSTS[1]]
            await until(lambda: len(one.status(MODEL)["servers"]) == 1, 30.0)
            del names.table["one"]
            await until(lambda: "Name or service not known" in one.status(MODEL)["discovery"]["problem"], 30.0)
            await one.wait_for_workers()
            assert await farm.used(one) == {HOSTS[1]}, "what was found stays"
            reading = await one.reload(named("two", port=server.port))
            assert reading.changes == (f"model {MODEL} changed: discover",)
            assert await farm.used(one) == {HOSTS[2]}, "the new servers had been found and probed before"
            assert farm.keys == {"Bearer inner-key", None}
            reading = await one.reload(named("two", port=server.port), named("two", port=server.port) | {"id": "second"})
            await until(lambda: one.state("second") == "ready", 30.0)
            assert len({each["name"] for model in (MODEL, "second") for each in one.status(model)["servers"]}) == 2
            await one.reload({"id": MODEL, "servers": [{"url": f"http://{HOSTS[0]}:{server.port}"}]})
            assert await farm.used(one) == {HOSTS[0]}
            assert one.status(MODEL)["discovery"] is None


def test_the_whole_gateway_discovers_servers_and_reports_them(tmp_path: Path) -> None:
    models = [found(), {"id": "named", "discover": {"dns": {"name": "localhost", "port": 1}}}]
    with gateway(tmp_path, whole(*models)) as one:
        assert "discovered by kubernetes vllm:http" in one.output and "discovered by dns localhost:1" in one.output
        shown = {each["id"]: each for each in one.get("/status").json()["models"]}
        assert "KUBERNETES_SERVICE_HOST is not set" in shown[MODEL]["discovery"]["problem"]
        assert "http://127.0.0.1:1" in [each["name"] for each in shown["named"]["servers"]]
        assert f"discovery ({MODEL}) is down for" in one.command("status").stdout
        assert "KUBERNETES_SERVICE_HOST" in one.get("/status").text
