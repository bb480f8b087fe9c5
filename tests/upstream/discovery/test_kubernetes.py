"""List and watch, against an API server that loses versions, disconnects, rejects requests and sends invalid data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.support.kubernetes_api import Api, endpoint, kubernetes_api, slice_of
from tests.support.running import until
from upstream.discovery.kubernetes import LINE_LIMIT, Cluster, Service
from upstream.discovery.sources import DiscoveryStatus, Sources

HTTP = ("http", 8000)
VLLM = Service("vllm")
FORBIDDEN = 'endpointslices.discovery.k8s.io is forbidden: User "system:serviceaccount:models:default" cannot list resource'


class Watched:
    """A watched service, and the number of reported changes."""

    sources: Sources

    def __init__(self) -> None:
        self.changes = 0

    def count_change(self) -> None:
        self.changes += 1

    @property
    def finding(self) -> DiscoveryStatus:
        return self.sources.statuses()[VLLM]

    @property
    def hosts(self) -> list[str]:
        return [each.host for each in self.finding.endpoints]

    async def sees(self, *hosts: str) -> None:
        await until(lambda: self.hosts == list(hosts), 30.0)

    async def has_trouble(self, text: str) -> None:
        await until(lambda: text in self.finding.problem, 30.0)


@asynccontextmanager
async def watched(cluster: Cluster) -> AsyncIterator[Watched]:
    one = Watched()
    async with Sources(one.count_change, cluster) as one.sources:
        one.sources.set_sources([VLLM])
        yield one


@asynccontextmanager
async def serving(folder: Path, *hosts: str) -> AsyncIterator[tuple[Api, Watched]]:
    async with kubernetes_api(folder) as api:
        await api.put(slice_of("a", map(endpoint, hosts), HTTP))
        async with watched(api.cluster) as one:
            yield api, one


async def test_what_there_is_and_what_changes(tmp_path: Path) -> None:
    async with serving(tmp_path, "10.0.0.1") as (api, one):
        await one.sees("10.0.0.1")
        await until(lambda: api.watching == 1)
        await api.put(slice_of("b", [endpoint("10.0.0.2")], HTTP))
        await one.sees("10.0.0.1", "10.0.0.2")
        await api.put(slice_of("a", [endpoint("10.0.0.3")], HTTP))
        await one.sees("10.0.0.2", "10.0.0.3")
        api.slices["never"] = slice_of("never", [], HTTP)  # neither a list nor the watch has had it
        await api.remove("never")
        await api.remove("b")
        await one.sees("10.0.0.3")
        await api.put(slice_of("elsewhere", [endpoint("10.0.0.9")], HTTP, service="other"), slice_of("a", [], HTTP))
        listed, follows = api.requests
        assert listed.path == follows.path == "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
        assert listed.query == {"labelSelector": "kubernetes.io/service-name=vllm"}
        assert follows.query.items() >= {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": "1001"}.items()
        assert (listed.token, follows.token) == ("a-token", "a-token")


async def test_a_watch_that_ends_or_breaks_is_resumed_where_it_was(tmp_path: Path) -> None:
    async with serving(tmp_path, "10.0.0.1") as (api, one):
        await until(lambda: api.watching == 1)
        await api.bookmark()
        await api.bookmark()
        await api.put(slice_of("b", [endpoint("10.0.0.2")], HTTP))
        await one.sees("10.0.0.1", "10.0.0.2")
        await api.bookmark()
        before = len(api.requests)
        await until(lambda: api.watching == 1)
        await asyncio.sleep(0.05)  # the bookmark is on its way
        api.cut()
        await api.put(slice_of("a", [endpoint("10.0.0.4")], HTTP))
        await one.sees("10.0.0.2", "10.0.0.4")
        again = api.requests[before]
        assert again.watch and again.query["resourceVersion"] in ("1004", "1005")
        assert api.lists == 1
        assert one.finding.problem == ""


async def test_watches_that_end_in_order_are_followed_by_another(tmp_path: Path) -> None:
    async with kubernetes_api(tmp_path) as api:
        api.watch_seconds = 1.1
        async with watched(api.cluster) as one:
            await until(lambda: len(api.requests) >= 4, 30.0)
            await api.put(slice_of("a", [endpoint("10.0.0.1")], HTTP))
            await one.sees("10.0.0.1")
        assert api.lists == 1


async def test_watches_that_end_at_once_do_not_keep_the_server_busy(tmp_path: Path) -> None:
    async with kubernetes_api(tmp_path) as api:
        api.watch_seconds = 0.0
        async with watched(api.cluster):
            await until(lambda: len(api.requests) >= 2)
            await asyncio.sleep(1.0)
            assert len(api.requests) < 8


@pytest.mark.parametrize("how", ["status", "event"])
async def test_a_version_that_is_no_longer_known_means_a_new_list(tmp_path: Path, how: str) -> None:
    async with serving(tmp_path, "10.0.0.1", "10.0.0.2") as (api, one):
        await one.sees("10.0.0.1", "10.0.0.2")
        await until(lambda: api.watching == 1)
        await api.forget()
        api.slices["a"] = slice_of("a", [endpoint("10.0.0.7")], HTTP)
        if how == "status":
            api.cut()
        else:
            await api.say({"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}})
        await one.sees("10.0.0.7")
        assert api.lists == 2
        assert one.finding.problem == ""


@pytest.mark.parametrize(("status", "message", "advice"), [(403, FORBIDDEN, "needs a Role"), (401, "Unauthorized", "token good?")])
async def test_a_rejection_is_reported_until_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int, message: str, advice: str
) -> None:
    async with serving(tmp_path, "10.0.0.1") as (api, one):
        await one.sees("10.0.0.1")
        await until(lambda: api.watching == 1)
        api.refuse = lambda _: (status, message)
        api.cut()
        await one.has_trouble(f"the API server says {status}: {message}")
        assert advice in one.finding.problem
        assert one.hosts == ["10.0.0.1"], "what was found stays"
        assert message in caplog.text and "a-token" not in caplog.text
        api.refuse = lambda _: None
        await api.put(slice_of("a", [endpoint("10.0.0.2")], HTTP))
        await one.sees("10.0.0.2")
        await until(lambda: one.finding.problem == "")


async def test_a_token_is_read_again_when_it_was_replaced(tmp_path: Path) -> None:
    async with serving(tmp_path, "10.0.0.1") as (api, one):
        await one.sees("10.0.0.1")
        api.refuse = lambda request: None if request.token == "another-token" else (401, "Unauthorized")
        api.cut()
        await one.has_trouble("401")
        (tmp_path / "token").write_text("another-token\n")
        await until(lambda: one.finding.problem == "", 30.0)


async def test_a_slow_server_that_sends_byte_by_byte(tmp_path: Path) -> None:
    async with kubernetes_api(tmp_path) as api:
        api.piece = 7
        await api.put(slice_of("a", [endpoint("10.0.0.1")], HTTP))
        async with watched(api.cluster) as one:
            await one.sees("10.0.0.1")
            await until(lambda: api.watching == 1)
            await api.put(slice_of("a", [endpoint("10.0.0.2")], HTTP), slice_of("b", [endpoint("10.0.0.3")], HTTP))
            await one.sees("10.0.0.2", "10.0.0.3")


async def test_an_api_server_that_is_away(tmp_path: Path) -> None:
    async with kubernetes_api(tmp_path) as api:
        await api.put(slice_of("a", [endpoint("10.0.0.1")], HTTP))
        unreachable = Cluster(api.cluster.host, "1", tmp_path)
        async with watched(unreachable) as one:
            await one.has_trouble("the API server at https://localhost:1")
            assert one.finding.first_result and one.hosts == []


async def test_another_authority_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with kubernetes_api(tmp_path / "other") as other, kubernetes_api(tmp_path) as api:
        (tmp_path / "ca.crt").write_bytes((other.folder / "ca.crt").read_bytes())
        async with watched(api.cluster) as one:
            await one.has_trouble("certificate")
        assert api.requests == [], "it was not shown the token"


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        (Cluster("", ""), "not in a pod of a cluster: KUBERNETES_SERVICE_HOST is not set"),
        (Cluster("localhost", "1", Path("/nowhere")), "/nowhere/ca.crt: "),
    ],
)
async def test_outside_a_cluster(cluster: Cluster, text: str) -> None:
    async with watched(cluster) as one:
        await one.has_trouble(text)


async def test_an_invalid_response_is_reported_and_requested_again(tmp_path: Path) -> None:
    async with serving(tmp_path, "10.0.0.1") as (api, one):
        await one.sees("10.0.0.1")
        await until(lambda: api.watching == 1)
        await api.say({"type": "MODIFIED", "object": {"no": "metadata"}})
        await one.has_trouble("invalid response of the API server (KeyError")
        assert one.hosts == ["10.0.0.1"]
        await until(lambda: one.finding.problem == "", 30.0)
        assert api.lists == 2


async def test_a_missing_token_is_reported_until_it_is_there_again(tmp_path: Path) -> None:
    async with serving(tmp_path, "10.0.0.1") as (api, one):
        await one.sees("10.0.0.1")
        await until(lambda: api.watching == 1)
        (tmp_path / "token").rename(tmp_path / "aside")
        api.cut()
        await one.has_trouble(f"{tmp_path / 'token'}: No such file or directory")
        (tmp_path / "aside").rename(tmp_path / "token")
        await until(lambda: one.finding.problem == "", 30.0)


@pytest.mark.parametrize("body", [b"<html>Bad Gateway</html>", b"[]", b"{}"])
async def test_an_error_without_a_message_is_reported_by_its_reason(tmp_path: Path, body: bytes) -> None:
    async with kubernetes_api(tmp_path) as api:
        api.refuse, api.error_body = lambda _: (502, ""), body
        async with watched(api.cluster) as one:
            await one.has_trouble("the API server says 502: No")


async def test_an_error_that_ends_the_watch_is_reported_and_the_watch_resumed(tmp_path: Path) -> None:
    async with serving(tmp_path, "10.0.0.1") as (api, one):
        await one.sees("10.0.0.1")
        await until(lambda: api.watching == 1)
        await api.say({"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "etcdserver: request timed out"}})
        await one.has_trouble("the API server ended the watch: etcdserver: request timed out")
        await until(lambda: one.finding.problem == "", 30.0)
        assert api.lists == 1 and one.hosts == ["10.0.0.1"]


async def test_blank_lines_between_events_are_ignored(tmp_path: Path) -> None:
    async with serving(tmp_path, "10.0.0.1") as (api, one):
        await until(lambda: api.watching == 1)
        await api.write(b"\n \n")
        await api.put(slice_of("a", [endpoint("10.0.0.2")], HTTP))
        await one.sees("10.0.0.2")
        assert one.finding.problem == "" and len(api.requests) == 2


async def test_an_event_without_end_is_bounded(tmp_path: Path) -> None:
    async with serving(tmp_path, "10.0.0.1") as (api, one):
        await one.sees("10.0.0.1")
        await until(lambda: api.watching == 1)
        with suppress(ConnectionError):  # the reader disconnects
            await api.write(b"x" * (LINE_LIMIT + (1 << 20)))
        await one.has_trouble("the API server sends an event above the size limit")
        assert one.hosts == ["10.0.0.1"]


async def test_many_changes_are_reported_together(tmp_path: Path) -> None:
    async with serving(tmp_path, "10.0.0.0") as (api, one):
        await one.sees("10.0.0.0")
        await until(lambda: api.watching == 1)
        began, before = asyncio.get_running_loop().time(), one.changes
        for number in range(200):
            await api.put(slice_of("a", [endpoint(f"10.0.1.{number}")], HTTP))
            await asyncio.sleep(0.002)
        await one.sees("10.0.1.199")
        seconds = asyncio.get_running_loop().time() - began
        assert one.changes - before <= seconds / 0.5 + 2


def test_the_place_of_the_api_server() -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert Cluster.of(environ).base_url == "https://[fd00::1]:6443"
    assert Cluster.of({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}).base_url == "https://10.96.0.1:443"
    assert str(Cluster.of({}).folder) == "/var/run/secrets/kubernetes.io/serviceaccount"
    assert [str(Service("a")), str(Service("a", "b", "http"))] == ["kubernetes a", "kubernetes b/a:http"]
