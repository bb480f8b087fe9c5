"""Models that are started and stopped, with real processes: by requests, when idle, by other models and by the operator."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from gateway.fleet.operations import RefusedOperation
from tests.support.controlled import controlled, held, on_demand
from tests.support.process import launched
from tests.support.running import until

A, B, C = "sim/a", "sim/b", "sim/c"
SHARED: dict[str, Any] = {"gpus": [[0]]}


def whole(reply: httpx2.Response) -> bool:
    return reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n") and '"error"' not in reply.text


async def test_the_first_request_starts_the_server_and_one_start_serves_all(tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    sick.touch()  # until all requests are queued
    async with controlled(tmp_path, on_demand(A, args={"sim-sick-while": str(sick)}), workers=2) as one:
        assert one.state(A) == "stopped" and one.control.launcher.statuses() == ()
        assert one.value("server_up", A, f"{A}#0") == one.value("server_inflight", A, f"{A}#0") == 0
        requests = [asyncio.create_task(one.request(A)) for _ in range(30)]
        await until(lambda: one.status(A)["queued"] == 30)
        await one.reaches(A, "starting")
        assert one.status(A)["waiting_s"] > 0 and time.time() - one.status(A)["since"] < 30
        sick.unlink()
        assert [reply.status_code for reply in await asyncio.gather(*requests)] == [200] * 30
        assert one.launches(A) == 1
        assert one.state(A) == "ready"
        await until(lambda: one.value("queued_requests", A) == one.value("inflight_requests", A) == 0)
        assert one.status(A)["waiting_s"] is None


async def test_three_on_one_gpu_take_turns_and_no_request_fails(tmp_path: Path) -> None:
    async with controlled(tmp_path, *(on_demand(name, **SHARED) for name in (A, B, C)), workers=2) as one:
        end = time.monotonic() + 240.0

        def starts() -> dict[str, int]:
            return {name: one.output.getvalue().count(f"{name} starts (") for name in (A, B, C)}

        async def client(name: str) -> None:
            sent = 0
            while min(starts().values()) < 2 and time.monotonic() < end:
                sent += 1
                reply = await one.request(name, stream=bool(sent % 2))
                assert reply.status_code == 200, reply.text

        await asyncio.gather(*(client(name) for name in (A, B, C) for _ in range(3)))
        assert min(starts().values()) >= 2, one.output.getvalue()
        for name, count in starts().items():
            assert one.launches(name) + (one.state(name) == "starting") == count, "one launch per wake"
            assert one.value("launches_total", name, "failed") == 0


async def test_a_rejected_request_gets_retry_after_and_a_retry_succeeds(tmp_path: Path) -> None:
    sick, queue = tmp_path / "sick", {"size": 2, "wait": "100s"}
    args = {"sim-listen-after": 2, "sim-sick-while": str(sick)}
    async with controlled(tmp_path, on_demand(A, queue=queue, args=args, idle_stop="3s")) as one:
        assert (await one.request(A)).status_code == 200  # measures the start
        await one.reaches(A, "stopped")
        sick.touch()  # until all the requests are sent
        replies = [asyncio.create_task(one.request(A)) for _ in range(6)]
        await until(lambda: sum(reply.done() for reply in replies) == 4)
        sick.unlink()
        refused = [reply for reply in await asyncio.gather(*replies) if reply.status_code != 200]
        assert [(reply.status_code, reply.json()["error"]["code"]) for reply in refused] == [(503, "model_loading")] * 4
        assert one.launches(A) == 2
        await one.reaches(A, "stopped")
        await one.reload(on_demand(A, queue=queue, args=args, idle_stop="1h"))  # a client that waits too long still finds the server up
        sick.touch()
        waiting = [asyncio.create_task(one.request(A)) for _ in range(2)]
        await until(lambda: one.status(A)["queued"] == 2)
        response = await one.request(A)
        assert response.status_code == 503 and 2 <= int(response.headers["retry-after"]) < 30
        sick.unlink()
        for _ in range(4):  # on a busy machine a start takes longer than the previous start, and the client gets another Retry-After
            await asyncio.sleep(int(response.headers["retry-after"]))
            if (response := await one.request(A)).status_code == 200:
                break
        assert response.status_code == 200
        assert [reply.status_code for reply in await asyncio.gather(*waiting)] == [200, 200]
        assert one.launches(A) == 3


async def test_an_idle_server_is_stopped_and_a_busy_server_is_not(tmp_path: Path) -> None:
    async with controlled(tmp_path, on_demand(A, idle_stop="800ms")) as one:
        stream, *_ = await one.streams(A, seconds=2.5)
        [pid] = one.pids(A)
        await held(lambda: one.state(A) == "ready", 1.5, stream)
        assert whole(await stream)
        await one.reaches(A, "stopped")
        assert not psutil.pid_exists(pid)
        assert (await one.request(A)).status_code == 200
        assert one.launches(A) == 2


async def test_a_stopping_gateway_responds_to_queued_requests(tmp_path: Path) -> None:
    async with controlled(tmp_path, on_demand(A, args={"sim-listen-after": 60}), drain="60s") as one:
        waiting = asyncio.create_task(one.request(A))
        await one.reaches(A, "starting")
        await until(lambda: one.status(A)["queued"] == 1)
        async with asyncio.timeout(30.0):
            await one.control.stop()
        assert ((await waiting).status_code, waiting.result().json()["error"]["code"]) == (503, "draining")


# Sleeping


def server_itself(pid: int) -> httpx2.Client:
    """Return a client of the launched server, on its private socket and with its internal key."""
    process = psutil.Process(pid)
    arguments = process.cmdline()
    transport = httpx2.HTTPTransport(uds=arguments[arguments.index("--uds") + 1])
    headers = {"authorization": f"Bearer {process.environ()['VLLM_API_KEY']}"}
    return httpx2.Client(transport=transport, base_url="http://vllm", headers=headers, timeout=30, trust_env=False)


@pytest.mark.parametrize("level", [1, 2])
async def test_an_idle_server_sleeps_and_a_request_wakes_it(tmp_path: Path, level: int) -> None:
    async with controlled(tmp_path, on_demand(A, idle_sleep="500ms", sleep_level=level)) as one:
        assert (await one.request(A)).status_code == 200
        await one.reaches(A, "sleeping")
        [pid], asleep = one.pids(A), one.status(A)
        assert [each["since"] for each in asleep["servers"]] == [asleep["since"]]
        with server_itself(pid) as server:
            assert server.get("/is_sleeping").json() == {"is_sleeping": True}
            for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping"), ("POST", "/collective_rpc")):
                assert (await one.client.request(method, path)).status_code == 404, "clients do not reach the routes for that"
            assert (await one.request(A)).status_code == 200
            paths = [f"{each['path']}?{each['query']}".rstrip("?") for each in server.get("/sim/requests").json()]
        assert one.launches(A) == 1 and one.pids(A) == [pid]
        waking = ["/wake_up"] if level == 1 else ["/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"]
        paths = [path for path in paths if path.startswith(("/sleep", "/wake_up", "/coll"))]
        assert paths[: len(waking) + 1] == [f"/sleep?level={level}", *waking], "and perhaps it sleeps again by now"


async def test_a_server_that_can_sleep_frees_its_group_by_sleeping(tmp_path: Path) -> None:
    async with controlled(tmp_path, *(on_demand(name, idle_sleep="1h", group="g") for name in (A, B))) as one:
        for name in (A, B, A, B):
            assert (await one.request(name)).status_code == 200
        assert (one.state(A), one.state(B)) == ("sleeping", "ready")
        assert (one.launches(A), one.launches(B)) == (1, 1)


async def test_a_sleeping_server_that_dies_is_not_restarted_before_a_request(tmp_path: Path) -> None:
    async with controlled(tmp_path, on_demand(A, idle_sleep="300ms")) as one:
        assert (await one.request(A)).status_code == 200
        await one.reaches(A, "sleeping")
        psutil.Process(one.pids(A)[0]).kill()
        await one.reaches(A, "stopped")
        assert (await one.request(A)).status_code == 200
        assert one.launches(A) == 2


async def test_a_server_that_cannot_sleep_is_stopped(tmp_path: Path) -> None:
    model = on_demand(A, idle_sleep="300ms", env={"VLLM_SERVER_DEV_MODE": "0"})
    async with controlled(tmp_path, model) as one:
        assert (await one.request(A)).status_code == 200
        await one.reaches(A, "stopped")


# Freeing GPUs and groups


async def test_a_busy_server_is_drained_and_no_stream_is_cut(tmp_path: Path) -> None:
    async with controlled(tmp_path, on_demand(A, **SHARED), on_demand(B, **SHARED), drain="100ms") as one:
        assert (await one.request(A)).status_code == 200
        with one.frozen(A):
            stream, *_ = await one.streams(A, seconds=2.0)
            other = asyncio.create_task(one.request(B))
            await one.reaches(A, "draining")
            late = asyncio.create_task(one.request(A))
            await until(lambda: one.status(A)["queued"] == 1)
            assert not other.done() and one.state(B) == "stopped"
        assert whole(await stream), "it takes longer than server.drain"
        assert ((await other).status_code, (await late).status_code) == (200, 200)
        assert (one.launches(A), one.launches(B)) == (2, 1)


async def test_a_server_that_starts_eagerly_frees_its_gpu_and_comes_back(tmp_path: Path) -> None:
    eager = launched(A, **{"sim-tokens": 4})
    eager["launch"] |= SHARED
    async with controlled(tmp_path, eager, on_demand(B, **SHARED, idle_stop="2s")) as one:
        assert one.state(A) == "ready"
        assert (await one.request(B)).status_code == 200
        assert one.state(A) == "stopped" and one.control.readiness.not_ready() is None
        await one.reaches(B, "stopped")
        await one.reaches(A, "ready")


async def test_a_group_runs_as_many_as_it_may(tmp_path: Path) -> None:
    models = [on_demand(name, group="g") for name in (A, B, C)]
    async with controlled(tmp_path, *models, groups=[{"id": "g", "max_running": 2}]) as one:
        for name in (A, B, C):
            assert (await one.request(name)).status_code == 200
        assert [one.state(name) for name in (A, B, C)] == ["stopped", "ready", "ready"]


async def test_a_server_that_cannot_start_is_reported_and_the_others_run(tmp_path: Path) -> None:
    bad = on_demand(A, args={"reasoning-parser": "no_such_parser"}, **SHARED)
    async with controlled(tmp_path, bad, on_demand(B, **SHARED)) as one:
        refused = await one.request(A)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_healthy_server")
        assert "no_such_parser" in one.output.getvalue()
        assert (await one.request(B)).status_code == 200
        await one.reaches(A, "stopped")


# The operator


async def test_a_stopped_model_stays_stopped_until_start(tmp_path: Path) -> None:
    async with controlled(tmp_path, on_demand(A), drain="60s") as one:
        assert (await one.request(A)).status_code == 200
        with one.frozen(A):
            streams = await one.streams(A, 3, seconds=1.5)
            stopping = asyncio.create_task(one.operations.stop(A))
            await one.reaches(A, "draining")
        refused = await one.request(A)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_healthy_server")
        assert all(map(whole, await asyncio.gather(*streams))), "they are let finish"
        await stopping
        assert (one.state(A), one.pids(A)) == ("stopped", [])
        assert (await one.request(A)).json()["error"]["code"] == "no_healthy_server" and one.launches(A) == 1
        await one.operations.start(A)
        await one.reaches(A, "ready")
        assert (await one.request(A)).status_code == 200
        await one.operations.stop(A)
        await one.operations.wake(A)
        assert (await one.request(A)).status_code == 200, "it waits for the start that was asked for"
        assert one.launches(A) == 3


async def test_stop_while_it_starts_and_while_requests_wait(tmp_path: Path) -> None:
    async with controlled(tmp_path, on_demand(A, args={"sim-listen-after": 60})) as one:
        waiting = asyncio.create_task(one.request(A))
        await one.reaches(A, "starting")
        await one.operations.stop(A)
        assert ((await waiting).status_code, one.state(A)) == (503, "stopped")


async def test_an_operator_stop_cuts_streams_after_the_drain(tmp_path: Path) -> None:
    async with controlled(tmp_path, on_demand(A), drain="500ms") as one:
        stream, *_ = await one.streams(A, seconds=60.0)
        await one.operations.stop(A)
        assert one.state(A) == "stopped"
        assert '"finish_reason":"abort"' in (await stream).text
        await until(lambda: one.value("inflight_requests", A) == 0 and one.value("incomplete_total", A, "upstream") == 1)


async def test_a_rolling_restart_drops_no_stream(tmp_path: Path) -> None:
    model = launched(A)
    model["launch"]["replicas"] = 2
    async with controlled(tmp_path, model, drain="60s") as one:
        before = one.pids(A)
        first = await one.streams(A, 100, seconds=3.0)
        fewest = 2

        async def watch() -> None:
            nonlocal fewest
            while True:
                fewest = min(fewest, sum(each["condition"] == "up" for each in one.status(A)["servers"]))
                await asyncio.sleep(0.01)

        watching = asyncio.create_task(watch())
        await one.operations.restart(A)
        assert sorted(each["condition"] for each in one.status(A)["servers"]) == ["out_of_rotation", "up"] and one.state(A) == "ready"
        with pytest.raises(RefusedOperation, match="in a transition"):
            await one.operations.restart(A)
        more = [asyncio.create_task(one.request(A, stream=True, simulate={"tokens": 20, "tokens_per_second": 10})) for _ in range(100)]
        replies = await asyncio.gather(*first, *more)
        assert len(replies) == 200 and all(map(whole, replies))
        await until(lambda: one.launches(A) == 4 and one.state(A) == "ready", 60.0)
        watching.cancel()
        assert fewest == 1 and not set(one.pids(A)) & set(before) and len(one.pids(A)) == 2
        assert one.value("incomplete_total", A, "upstream") == 0


async def test_a_restart_has_begun_when_the_operation_returns(tmp_path: Path) -> None:
    """The old server gets no more requests: the next request is served by the new server."""
    async with controlled(tmp_path, on_demand(A), drain="60s", workers=2) as one:
        stream, *_ = await one.streams(A)
        await one.operations.restart(A)
        assert one.state(A) == "draining" and not stream.done()
        assert (await one.request(A)).status_code == 200 and one.launches(A) == 2
        assert whole(await stream)


async def test_a_restart_canceled_before_it_begins_leaves_the_model_usable(tmp_path: Path) -> None:
    async with controlled(tmp_path, on_demand(A)) as one:
        await one.operations.start(A)
        await one.reaches(A, "ready")
        async with asyncio.timeout(60):
            await asyncio.gather(one.operations.restart(A), one.operations.stop(A))
        assert one.state(A) == "stopped"
        await one.operations.start(A)
        await one.reaches(A, "ready")
        assert (await one.request(A)).status_code == 200


async def test_a_server_is_shown_with_the_time_of_its_state(tmp_path: Path) -> None:
    found = {"id": B, "servers": [{"url": "http://127.0.0.1:9"}]}
    async with controlled(tmp_path, on_demand(A), found, drain="60s") as one:

        def since(model: str) -> float:
            [server] = one.status(model)["servers"]
            return float(server["since"])

        assert since(A) <= time.time()
        await one.reaches(B, "failed")
        failed = since(B)
        stream, *_ = await one.streams(A)
        ready, requested = since(A), time.time()
        stopping = asyncio.create_task(one.operations.stop(A))
        await one.reaches(A, "draining")
        draining = since(A)
        assert ready < requested <= draining
        assert whole(await stream)
        ended = time.time()
        await stopping
        assert draining < ended <= since(A) <= time.time() and one.status(A)["servers"][0]["condition"] == "out_of_rotation"
        await one.wait_for_workers()
        assert since(B) == failed


async def test_the_restart_of_a_single_server_queues_requests(tmp_path: Path) -> None:
    async with controlled(tmp_path, on_demand(A)) as one:
        assert (await one.request(A)).status_code == 200
        await one.operations.restart(A)
        assert [reply.status_code for reply in await asyncio.gather(*(one.request(A) for _ in range(5)))] == [200] * 5
        await until(lambda: one.launches(A) == 2)


async def test_operations_that_are_refused(tmp_path: Path) -> None:
    found = {"id": B, "servers": [{"url": "http://127.0.0.1:9"}]}
    async with controlled(tmp_path, on_demand(A), found) as one:
        await one.reaches(B, "failed")
        for operation in (one.operations.start, one.operations.stop, one.operations.restart, one.operations.wake):
            with pytest.raises(RefusedOperation, match="there is no model sim/z"):
                await operation("sim/z")
            with pytest.raises(RefusedOperation, match="sim/b is not launched by the gateway"):
                await operation(B)
        with pytest.raises(RefusedOperation, match="sim/a is stopped; only a running model can be restarted"):
            await one.operations.restart(A)
