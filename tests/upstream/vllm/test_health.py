"""Probes: the hysteresis as a pure function, and the prober against small test servers."""

import asyncio
import hashlib
import json
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.ports import refusing
from tests.support.rows import each_row
from tests.support.running import until
from tests.support.scripted import Conversation, scripted
from upstream.http.address import Address
from upstream.vllm.capabilities import SCALE_OUT_ROUTE, TASK_ROUTES
from upstream.vllm.health import (
    BODY_LIMIT,
    FAILURES_UNTIL_LOST,
    HealthCheck,
    ModelCard,
    ProbeHistory,
    Prober,
    ProbeResult,
    ProbeTarget,
    ServerHealth,
    apply_result,
    needs_new_process,
    read_models,
)


def root(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()


CARDS = (ModelCard("m", 2048, root("/secret/path")),)
LISTED = {"object": "list", "data": [{"id": "m", "max_model_len": 2048, "root": "/secret/path", "owned_by": "vllm"}]}
UP = ProbeHistory(ServerHealth("s", True, "", CARDS))
FAILED = ProbeResult(False, "GET /health: status 503")
REFUSED = ProbeResult(False, "refused", conclusive=True)


@each_row(
    ("before", "seen", "after"),
    [
        (None, ProbeResult(True), ProbeHistory(ServerHealth("s", True))),
        (None, ProbeResult(True, models=CARDS), UP),
        (None, FAILED, ProbeHistory(ServerHealth("s", False, FAILED.reason), 1)),
        (UP, ProbeResult(True), UP),
        (UP, FAILED, ProbeHistory(UP.health, 1)),
        (ProbeHistory(UP.health, 1), ProbeResult(True), UP),
        (ProbeHistory(UP.health, 1), FAILED, ProbeHistory(ServerHealth("s", False, FAILED.reason, CARDS), 2)),
        (UP, REFUSED, ProbeHistory(ServerHealth("s", False, "refused", CARDS), 1)),
        (ProbeHistory(ServerHealth("s", False, "x"), 7), FAILED, ProbeHistory(ServerHealth("s", False, FAILED.reason), 8)),
        (ProbeHistory(ServerHealth("s", False, "x", CARDS), 7), ProbeResult(True), UP),
        (UP, ProbeResult(True, models=()), ProbeHistory(ServerHealth("s", True))),
        (UP, ProbeResult(True, "GET /v1/models: status 500"), ProbeHistory(ServerHealth("s", True, "GET /v1/models: status 500", CARDS))),
        (UP, ProbeResult(False, "refused", refused=True), ProbeHistory(ServerHealth("s", False, "refused", CARDS), 1)),
    ],
)
def test_the_hysteresis(before: ProbeHistory | None, seen: ProbeResult, after: ProbeHistory) -> None:
    assert apply_result(before, "s", seen) == after


BROKEN = ProbeResult(False, "GET /health: status 503", broken=True)


@pytest.mark.parametrize(
    ("failures", "seen", "expected"),
    [
        (1, BROKEN, False),
        (2, BROKEN, True),
        (3, BROKEN, True),
        (2, REFUSED, False),
        (4, FAILED, False),
        (5, FAILED, True),
        (6, REFUSED, True),
    ],
)
def test_when_it_will_not_come_back_by_itself(failures: int, seen: ProbeResult, expected: bool) -> None:
    assert needs_new_process(ProbeHistory(ServerHealth("s", False, "x"), failures), seen) is expected
    assert not needs_new_process(UP, ProbeResult(True))


def test_only_a_models_id_and_length_and_a_digest_of_its_root_are_stored() -> None:
    assert read_models(b'{"data": [{"id": "x", "root": "/m"}, {"id": "y", "root": 1}]}') == (
        ModelCard("x", root=root("/m")),
        ModelCard("y"),
    )
    assert read_models(json.dumps(LISTED).encode()) == CARDS
    assert read_models(b'{"data": [{"id": "x"}, {"id": "y", "max_model_len": "long"}]}') == (ModelCard("x"), ModelCard("y"))


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"data": 3}', b'{"data": [3]}', b'{"data": [{}]}', b"\xff", b"[" * 100_000])
def test_what_is_no_list_of_models_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever the words
        read_models(body)


@dataclass
class FakeServer:
    """Answers by a table that the test changes. ``None`` as status: it takes the request and says nothing."""

    routes: dict[str, tuple[int | None, bytes]] = field(
        default_factory=lambda: {"/health": (200, b""), "/v1/models": (200, json.dumps(LISTED).encode())}
    )
    requests: list[str] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    address: Address = field(default_factory=Address)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            headers = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = headers.split()[1]
            self.requests.append(path)
            self.keys.update(line.split(": ", 1)[1] for line in headers.split("\r\n") if line.lower().startswith("authorization"))
            status, body = self.routes.get(path, (404, b'{"detail":"Not Found"}'))
            if status is None:
                await reader.read()
            else:
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def listening(server: FakeServer, uds: Path | None = None, port: int = 0) -> AsyncIterator[FakeServer]:
    if uds:
        listener = await asyncio.start_unix_server(server.serve, uds)
        server.address = Address(host="localhost", uds=str(uds))
    else:
        listener = await asyncio.start_server(server.serve, "127.0.0.1", port)
        server.address = Address(port=listener.sockets[0].getsockname()[1])
    try:
        yield server
    finally:
        listener.close()
        await listener.wait_closed()


class Reported(list[ServerHealth]):
    async def up(self, up: bool) -> ServerHealth:
        await until(lambda: bool(self) and self[-1].up is up)
        return self[-1]


@asynccontextmanager
async def probing(
    reported: Reported, *targets: ProbeTarget, interval: float = 0.02, deadline: float = 30.0, every: float = 60.0
) -> AsyncIterator[Prober]:
    async with Prober(on_change=reported.append, interval=interval, deadline=deadline, models_every=every) as prober:
        prober.set_targets(targets)
        await until(lambda: {probe.name for probe in prober.servers()} == {target.name for target in targets})
        yield prober


async def test_a_server_that_responds_is_up_with_its_models() -> None:
    async with listening(FakeServer()) as server:
        reported = Reported()
        async with probing(reported, ProbeTarget("s", server.address, "the-key")) as prober:
            assert reported == [ServerHealth("s", True, "", CARDS)]
            assert prober.servers() == tuple(reported)
        assert server.keys == {"Bearer the-key"}
    assert "the-key" not in repr(ProbeTarget("s", server.address, "the-key"))


async def test_a_unix_socket_is_probed_too(tmp_path: Path) -> None:
    reported = Reported()
    target = ProbeTarget("s", Address(host="localhost", uds=str(tmp_path / "s")))
    async with probing(reported, target):
        assert not (await reported.up(False)).up
        async with listening(FakeServer(), uds=tmp_path / "s"):
            assert (await reported.up(True)).models == CARDS
        os.unlink(tmp_path / "s")
        assert "No such file" in (await reported.up(False)).reason


async def test_only_changes_are_reported() -> None:
    async with listening(FakeServer()) as server:
        reported = Reported()
        async with probing(reported, ProbeTarget("s", server.address)):
            await until(lambda: len(server.requests) > 6)
        assert len(reported) == 1
        assert server.requests.count("/v1/models") == 1, "models are looked at now and then, health each time"


async def test_one_bad_response_is_tolerated_two_are_not() -> None:
    async with listening(FakeServer()) as server:
        reported = Reported()
        async with probing(reported, ProbeTarget("s", server.address)) as prober:
            before = len(server.requests)
            server.routes["/health"] = (503, b"")
            down = await reported.up(False)
            assert down == ServerHealth("s", False, "GET /health: status 503", CARDS)
            assert server.requests[before:].count("/health") >= 2
            server.routes["/health"] = (200, b"")
            await reported.up(True)
            assert prober.servers() == (ServerHealth("s", True, "", CARDS),)
        assert server.requests.count("/v1/models") >= 2, "a server that comes back may have other models"


async def test_a_server_that_goes_and_comes_back() -> None:
    reported = Reported()
    async with AsyncExitStack() as listener:
        server = await listener.enter_async_context(listening(FakeServer()))
        async with probing(reported, ProbeTarget("s", server.address)):
            await listener.aclose()
            assert (await reported.up(False)).reason
            async with listening(server, port=server.address.port):
                await reported.up(True)


async def test_one_probe_is_conclusive_only_if_nothing_listens(tmp_path: Path) -> None:
    with refusing() as port:
        closed = (Address(port=port), Address(host="localhost", port=port), Address(host="localhost", uds=str(tmp_path / "s")))
        unknown = Address(host="no-such-host.invalid", port=80)
        async with listening(FakeServer({"/health": (503, b"")})) as server:
            expected = dict.fromkeys(closed, True) | {unknown: False, server.address: False}
            for address, conclusive in expected.items():
                seen = await HealthCheck(ProbeTarget("s", address), 30).run()
                assert seen is not None
                assert (seen.up, seen.conclusive) == (False, conclusive), address


async def test_a_probe_without_a_file_descriptor_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    reported, gone, limit = Reported(), Reported(), ExitStack()

    def report(probe: ServerHealth) -> None:
        """Take the descriptors away between two probes. In a probe, its server could not accept, and the probe would never end."""
        if not reported:
            limit.enter_context(no_descriptors())
        reported.append(probe)

    async with (
        listening(FakeServer()) as server,
        Prober(on_change=report, on_lost=gone.append, interval=0.02, deadline=30.0) as prober,
    ):
        with limit:
            prober.set_targets([ProbeTarget("s", server.address)])
            await until(lambda: caplog.text.count("cannot be probed") > 2 * FAILURES_UNTIL_LOST)
            assert prober.servers() == (ServerHealth("s", True, "", CARDS),)
        server.routes["/health"] = (503, b"")
        await reported.up(False)
    assert [probe.up for probe in reported] == [True, False]
    assert not gone or gone[0].reason == "GET /health: status 503", "what was never looked at is not counted"


@contextmanager
def no_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


TASKS: dict[str, tuple[dict[str, int], str | None]] = {
    "a chat model": ({"/v1/chat/completions": 405, "/v1/audio/transcriptions": 405}, "chat"),
    "an embedding model, which has the routes for ranks too": ({"/v1/embeddings": 405, "/v1/rerank": 405}, "embedding"),
    "a cross-encoder": ({"/v1/rerank": 405, "/classify": 405}, "rerank"),
    "a classifier": ({"/classify": 405}, "classify"),
    "a speech model": ({"/v1/audio/transcriptions": 405}, "transcription"),
    "none of them": ({}, None),
    "a proxy that refuses": ({"/v1/chat/completions": 403, "/v1/embeddings": 405}, None),
}


@pytest.mark.parametrize("name", TASKS)
async def test_the_routes_of_a_server_say_what_it_is_for(name: str) -> None:
    statuses, task = TASKS[name]
    fake = FakeServer()
    fake.routes |= {path: (status, b"") for path, status in statuses.items()}
    last = next((path for path in TASK_ROUTES if path in statuses), "/classify")  # the route that decides
    async with listening(fake) as server:
        reported = Reported()
        async with probing(reported, ProbeTarget("s", server.address)):
            await until(lambda: last in fake.requests and reported[-1].task == task)
            assert reported[-1] == ServerHealth("s", True, "", CARDS, task)


@pytest.mark.parametrize(("status", "scale_out"), [(400, True), (403, False), (404, False), (200, False)])
async def test_a_chat_server_shows_whether_it_has_the_scale_out_routes(status: int, scale_out: bool) -> None:
    fake = FakeServer()
    fake.routes |= {"/v1/chat/completions": (405, b""), SCALE_OUT_ROUTE: (status, b"")}
    async with listening(fake) as server:
        reported = Reported()
        async with probing(reported, ProbeTarget("s", server.address)):
            await until(lambda: reported[-1].task == "chat")
            assert reported[-1] == ServerHealth("s", True, "", CARDS, "chat", scale_out)
            await until(lambda: server.requests.count("/health") > 4)
    assert server.requests.count(SCALE_OUT_ROUTE) == 1, "it is probed once for each start"


async def test_silence_is_a_failure_at_the_deadline() -> None:
    async with listening(FakeServer({"/health": (None, b"")})) as server:
        reported = Reported()
        async with probing(reported, ProbeTarget("s", server.address), deadline=0.1):
            assert reported == [ServerHealth("s", False, "no response within 0.1 s")]


async def test_a_name_that_does_not_resolve_is_a_failure_with_its_reason() -> None:
    reported = Reported()
    async with probing(reported, ProbeTarget("s", Address(host="no-such-host.invalid", port=80))):
        assert not reported[0].up and reported[0].reason


async def test_a_server_without_health_is_judged_by_its_models() -> None:
    routes: dict[str, tuple[int | None, bytes]] = {"/v1/models": (200, json.dumps(LISTED).encode())}
    async with listening(FakeServer(routes)) as server:
        reported = Reported()
        async with probing(reported, ProbeTarget("s", server.address)):
            assert reported == [ServerHealth("s", True, "", CARDS)]
            server.routes["/v1/models"] = (500, b"")
            assert (await reported.up(False)).reason == "GET /v1/models: status 500"


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ((403, b"not a path of this proxy"), "GET /v1/models: status 403"),
        ((500, b""), "GET /v1/models: status 500"),
        ((200, b"<html>"), "GET /v1/models: not a list of models"),
        ((200, b'{"data": [' + b" " * 2 * BODY_LIMIT + b"]}"), "GET /v1/models: not a list of models"),
    ],
)
async def test_models_that_cannot_be_learned_leave_it_up_and_say_why(response: tuple[int, bytes], reason: str) -> None:
    async with listening(FakeServer({"/health": (200, b""), "/v1/models": response})) as server:
        reported = Reported()
        async with probing(reported, ProbeTarget("s", server.address)):
            assert reported == [ServerHealth("s", True, reason)]


@pytest.mark.parametrize(
    ("key", "status", "reason"),
    [
        ("stale", 401, "the server rejected the gateway's key (GET /v1/models: status 401)"),
        ("stale", 403, "the server rejected the gateway's key (GET /v1/models: status 403)"),
        (None, 401, "the server requires a key, and the gateway has none for it (GET /v1/models: status 401)"),
    ],
)
@pytest.mark.parametrize("health", [(200, b""), (404, b"")], ids=["with /health", "without /health"])
async def test_a_server_that_refuses_the_gateways_key_is_down(
    key: str | None, status: int, reason: str, health: tuple[int | None, bytes]
) -> None:
    """Every request to it would be refused too."""
    routes = {"/health": health, "/v1/models": (status, b'{"error":"Unauthorized"}')}
    async with listening(FakeServer(routes)) as server:
        reported, gone = Reported(), Reported()
        async with Prober(on_change=reported.append, on_lost=gone.append, interval=0.02, deadline=30.0) as prober:
            prober.set_targets([ProbeTarget("s", server.address, key)])
            assert await reported.up(False) == ServerHealth("s", False, reason)
            before = server.requests.count("/v1/models")
            await until(lambda: server.requests.count("/v1/models") > before + FAILURES_UNTIL_LOST)
            assert gone == [], "another process would refuse the key as well"
            server.routes["/v1/models"] = (200, json.dumps(LISTED).encode())
            assert (await reported.up(True)).models == CARDS


async def test_a_key_that_a_server_accepts_no_longer_takes_it_down_and_another_key_brings_it_back() -> None:
    async with (
        scripted(_requires_the_new_key) as server,
        Prober(on_change=(reported := Reported()).append, interval=0.02, deadline=30.0) as prober,
    ):
        address = Address(port=server.port)
        prober.set_targets([ProbeTarget("s", address, "old")])
        assert "rejected the gateway's key" in (await reported.up(False)).reason
        prober.set_targets([ProbeTarget("s", address, "new")])
        assert (await reported.up(True)).models == CARDS
        prober.set_targets([ProbeTarget("s", address, "old")])
        await reported.up(False)
        assert [probe.up for probe in reported] == [False, True, False], "one probe is enough to see it"


async def _requires_the_new_key(talk: Conversation) -> None:
    allowed = talk.request.head.split()[1] != b"/v1/models" or talk.request.header("authorization") == "Bearer new"
    await talk.respond(json.dumps(LISTED).encode(), "200 OK" if allowed else "401 Unauthorized")


async def test_models_are_looked_at_again_now_and_then() -> None:
    async with listening(FakeServer()) as server:
        reported = Reported()
        async with probing(reported, ProbeTarget("s", server.address), every=0.05):
            server.routes["/v1/models"] = (200, b'{"data": [{"id": "m"}, {"id": "lora"}]}')
            await until(lambda: reported[-1].models == (ModelCard("m"), ModelCard("lora")))
        assert len(reported) == 2


async def test_bytes_that_are_not_http_are_a_failure() -> None:
    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(rude, "127.0.0.1", 0) as listener:
        reported = Reported()
        async with probing(reported, ProbeTarget("s", Address(port=listener.sockets[0].getsockname()[1]))):
            assert not reported[0].up and reported[0].reason


async def test_targets_that_stay_keep_their_state_and_those_that_go_are_silent() -> None:
    async with listening(FakeServer()) as one, listening(FakeServer()) as two, listening(FakeServer()) as three:
        reported = Reported()
        first, second, third = (ProbeTarget(name, each.address) for name, each in (("one", one), ("two", two), ("three", three)))
        async with probing(reported, first, second) as prober:
            prober.set_targets([second, third])
            assert [probe.name for probe in prober.servers()] == ["two"]
            await until(lambda: len(prober.servers()) == 2)
            one.routes["/health"] = (503, b"")
            two_requests = len(two.requests)
            await until(lambda: len(two.requests) > two_requests + 4)
            assert [probe.name for probe in prober.servers()] == ["two", "three"]
        assert sorted(probe.name for probe in reported) == ["one", "three", "two"]


async def test_a_callback_that_fails_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    def broken(probe: ServerHealth) -> None:
        raise RuntimeError(probe.name)

    async with listening(FakeServer()) as server, Prober(on_change=broken, interval=0.02) as prober:
        prober.set_targets([ProbeTarget("s", server.address)])
        await until(lambda: len(server.requests) > 4)
    assert "probe of s" in caplog.text


async def test_the_environments_proxy_is_not_for_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{closed.getsockname()[1]}")
        async with listening(FakeServer()) as server:
            reported = Reported()
            async with probing(reported, ProbeTarget("s", server.address)):
                assert reported[0].up


async def test_a_server_with_another_key_keeps_its_health_until_it_is_probed() -> None:
    reported: list[ServerHealth] = []
    async with scripted(_healthy) as server, Prober(on_change=reported.append, interval=60.0, deadline=30.0) as prober:
        address = Address(port=server.port)
        prober.set_targets([ProbeTarget("a", address, "old")])
        await until(lambda: bool(reported))
        assert [(probe.name, probe.up) for probe in reported] == [("a", True)]
        prober.set_targets([ProbeTarget("a", address, "new"), ProbeTarget("b", Address(port=server.port, prefix="/other"))])
        assert [(probe.name, probe.up) for probe in prober.servers()] == [("a", True)], "and of another address nothing is known"
        assert len(reported) == 1, "that is no change"
        await until(lambda: {request.header("authorization") for request in server.requests} == {"Bearer old", "Bearer new", None})


async def _healthy(talk: Conversation) -> None:
    await talk.respond(b'{"object":"list","data":[]}')
