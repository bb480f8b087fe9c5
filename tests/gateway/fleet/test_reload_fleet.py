"""Reloads for models that the gateway launches: a changed model restarts, an unchanged model keeps running, and no stream is cut."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from pydantic import SecretStr

from gateway.admin.app import application
from gateway.admin.guard import Guard
from gateway.audit.entry import NoAudit
from gateway.config.models import Admin
from gateway.control.live_overview import LiveOverview
from gateway.control.stored_raises import StoredRaises
from tests.gateway.fleet.test_fleet import whole
from tests.support.controlled import Controlled, controlled, held, on_demand
from tests.support.ports import reserved
from tests.support.process import launched
from tests.support.running import until

A, B = "sim/a", "sim/b"
CHANGED = {"max-model-len": 4096}
SECONDS = 6.0
"""The length of a stream: long enough that it is still open when a busy machine checks it."""


def eager(identity: str, *, replicas: int = 1, gpus: list[list[int]] | None = None, args: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a model on a simulator that is always up."""
    model = launched(identity, **{"sim-tokens": 4, "sim-tokens-per-second": 0, **(args or {})})
    model["launch"] |= {"replicas": replicas} | ({"gpus": gpus} if gpus else {})
    return model


async def test_an_added_model_starts_and_a_removed_model_drains(tmp_path: Path) -> None:
    async with controlled(tmp_path, eager(A), workers=2, drain="500ms") as one:
        [pid] = one.pids(A)
        streams = await one.streams(A, 4, seconds=SECONDS)
        await one.reload(eager(B), workers=2, drain="500ms")
        assert one.report.engines()[f"{A}#0"].model == A, "its own metrics are to be had to its end"
        refused = await one.request(A)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        await held(
            lambda: psutil.pid_exists(pid), 0.7, *streams
        )  # its requests are still open, and are not cut when the drain's time has passed
        await one.reaches(B, "ready")
        assert (await one.request(B)).status_code == 200
        assert all(map(whole, await asyncio.gather(*streams)))
        await until(lambda: not psutil.pid_exists(pid), 60.0)
        await until(lambda: [snapshot.name for snapshot in one.control.launcher.statuses()] == [f"{B}#0"])
        assert one.value("requests_total", A, "/v1/chat/completions", "200", "") == 4, "what was counted stays"
        await until(lambda: one.value("server_inflight", A, f"{A}#0") == 0)


async def test_stopping_a_model_that_is_removed_meanwhile_reports_the_removal(tmp_path: Path) -> None:
    async with controlled(tmp_path, eager(A), eager(B)) as one:
        [pid] = one.pids(A)
        streams = await one.streams(A, seconds=SECONDS)
        stopping = asyncio.create_task(_operate(one, f"/models/{A}/stop"))
        await one.reaches(A, "draining")
        await one.reload(eager(B))
        response = await stopping
        assert (response.status_code, response.json()) == (404, {"error": f"{A} was removed from the configuration meanwhile"})
        assert all(map(whole, await asyncio.gather(*streams)))
        assert not psutil.pid_exists(pid)


async def _operate(one: Controlled, path: str) -> httpx2.Response:
    """Return the response of the admin port to a POST."""
    admin = Admin().model_copy(update={"token": SecretStr("token")})
    raises, live = StoredRaises(one.control, Path(os.devnull)), LiveOverview(one.control, one.report, None, None)
    shown = application(one.report, one.operations, NoAudit(), raises=raises, live=live, files=one.reloader)
    app = Guard(shown, lambda: admin, "127.0.0.1", NoAudit())
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers={"authorization": "Bearer token"}) as client:
        return await client.post(path, timeout=60)


async def test_a_model_that_starts_slowly_does_not_delay_the_others(tmp_path: Path) -> None:
    async with controlled(tmp_path, eager(A)) as one:
        await one.reload(eager(A, args=CHANGED), eager(B, args={"sim-healthy-after": 60}))
        await one.reaches(B, "starting")
        await until(lambda: one.pids(A) != [] and one.state(A) != "ready")
        await held(lambda: one.control.readiness.not_ready() is None, 0.5)
        await one.reaches(A, "ready")
        assert one.control.readiness.not_ready() is None and one.state(B) == "starting"
        refused = await one.request(B)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")


async def test_a_model_that_is_removed_and_added_again_while_it_drains_keeps_its_server(tmp_path: Path) -> None:
    async with controlled(tmp_path, eager(A), eager(B)) as one:
        [pid] = one.pids(A)
        streams = await one.streams(A, 2, seconds=SECONDS)
        await one.reload(eager(B))
        await until(lambda: "is draining" in one.output.getvalue())
        await one.reload(eager(A), eager(B))
        await one.reaches(A, "ready")
        assert (await one.request(A)).status_code == 200
        assert all(map(whole, await asyncio.gather(*streams)))
        assert one.pids(A) == [pid]


VLLM = f"#!{sys.executable}\nfrom upstream.simulator import main\nimport sys\nmain(sys.argv[2:])\n"
"""A program named vllm: the simulator with the options of vLLM."""
UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "a program that is not there": ({"command": ["no-such-vllm", "serve"]}, "models[0].launch.command: no-such-vllm is not found in PATH"),
    "an option that vLLM does not have": ({"args": {"no-such-flag": 1}}, "models[0].launch.args.no-such-flag: vLLM 0.32 has no option"),
    "a parser that vLLM does not have": ({"args": {"reasoning-parser": "x"}}, "launch.args.reasoning-parser: vLLM 0.32 has no"),
    "a template that is missing": ({"args": {"chat-template": "./none.jinja"}}, "args.chat-template: there is no such file or folder"),
    "weights that are missing": ({"model": "./none"}, "models[0].launch.model: there is no such file or folder"),
}


@pytest.mark.parametrize("case", UNUSABLE)
async def test_a_launch_that_cannot_start_is_rejected_and_the_healthy_server_stays(tmp_path: Path, case: str) -> None:
    (tmp_path / "vllm").write_text(VLLM)
    (tmp_path / "vllm").chmod(0o755)
    good = {"id": A, "launch": {"command": ["./vllm", "serve"], "args": {"sim-tokens": 4}}}
    # The simulator's options are not vLLM's, and a launch that does not change is not checked.
    change, why = UNUSABLE[case]
    bad = {"id": A, "launch": {"command": [str(tmp_path / "vllm"), "serve"], **change}}
    async with controlled(tmp_path, good) as one:
        [pid] = one.pids(A)
        rejected = await one.reload(bad)
        assert not rejected.successful
        [problem] = rejected.problems
        assert re.match(r".*gateway\.yaml:\d+: ", problem) and why in problem
        assert one.control.history.counts == {"success": 0, "failure": 1}
        assert one.pids(A) == [pid] and (await one.request(A)).status_code == 200
        assert (await one.reload(good, eager(B))).successful, "the rest of the file can be changed"
        await one.reaches(B, "ready")
        assert one.pids(A) == [pid]


async def test_a_template_beside_the_configuration_is_found_from_everywhere(tmp_path: Path) -> None:
    (tmp_path / "vllm").write_text(VLLM)
    (tmp_path / "vllm").chmod(0o755)
    template = tmp_path / "t.jinja"
    model = {"id": A, "launch": {"command": ["./vllm", "serve"], "args": {"chat-template": "./t.jinja"}}}
    async with controlled(tmp_path, eager(B)) as one:
        assert not (await one.reload(model, eager(B))).successful
        assert template in one.reloader._files, "its arrival has the configuration read again"
        template.write_text("{{ messages }}")
        assert (await one.reload(model, eager(B))).successful
        await one.reaches(A, "ready")
        arguments = psutil.Process(one.pids(A)[0]).cmdline()
        assert arguments[arguments.index("--chat-template") + 1] == str(template)


@pytest.mark.parametrize("way", ["it leaves the file and comes back", "it is stopped and started"])
async def test_an_interrupted_change_is_still_applied(tmp_path: Path, way: str) -> None:
    async with controlled(tmp_path, eager(A), eager(B)) as one:
        streams = await one.streams(A, seconds=SECONDS)
        await one.reload(eager(A, args=CHANGED), eager(B))
        await until(lambda: one.status(A)["servers"][0]["condition"] == "out_of_rotation")  # replaced after its request
        if way == "it is stopped and started":
            stopping = asyncio.create_task(one.operations.stop(A))
            await one.reaches(A, "draining")
            await one.operations.start(A)
            await stopping
        else:
            await one.reload(eager(B))
            await until(lambda: "is draining" in one.output.getvalue())
            await one.reload(eager(A, args=CHANGED), eager(B))
        assert all(map(whole, await asyncio.gather(*streams)))
        await until(lambda: one.state(A) == "ready" and all("4096" in psutil.Process(pid).cmdline() for pid in one.pids(A)), 60.0)


async def test_only_the_changed_model_is_restarted_one_replica_after_the_other(tmp_path: Path) -> None:
    async with controlled(tmp_path, eager(A, replicas=2), eager(B)) as one:
        before, untouched = one.pids(A), one.pids(B)
        streams = await one.streams(B, 3, seconds=SECONDS)
        stop = asyncio.Event()

        async def client() -> int:
            count = 0
            while not stop.is_set():
                reply = await one.request(A)
                assert reply.status_code == 200, reply.text
                count += 1
            return count

        clients = [asyncio.create_task(client()) for _ in range(2)]
        await one.reload(eager(A, replicas=2, args=CHANGED), eager(B))
        await until(lambda: len(set(one.pids(A)) - set(before)) == 2 and one.state(A) == "ready", 60.0)
        stop.set()
        assert min(await asyncio.gather(*clients)) > 0, "somebody was served all the time"
        assert one.pids(B) == untouched and all(map(whole, await asyncio.gather(*streams)))
        assert all("4096" in psutil.Process(pid).cmdline() for pid in one.pids(A))
        after = one.pids(A)
        await one.reload(eager(A, replicas=2, args=CHANGED) | {"timeouts": {"idle": "7s"}}, eager(B), drain="9s")
        await held(lambda: one.pids(A) == after, 0.7)


async def test_replicas_are_added_and_removed(tmp_path: Path) -> None:
    async with controlled(tmp_path, eager(A)) as one:
        [first] = one.pids(A)
        await one.reload(eager(A, replicas=3))
        await until(lambda: sum(each["condition"] == "up" for each in one.status(A)["servers"]) == 3, 60.0)
        assert one.pids(A)[0] == first
        last = one.pids(A)[2]
        streams = await one.streams(A, 6, seconds=SECONDS)
        await one.reload(eager(A))
        assert len(one.status(A)["servers"]) == 1 and psutil.pid_exists(last)
        assert all(map(whole, await asyncio.gather(*streams)))
        await until(lambda: [snapshot.name for snapshot in one.control.launcher.statuses()] == [f"{A}#0"], 60.0)
        assert one.pids(A) == [first]
        await one.reaches(A, "ready")


async def test_a_removed_replica_finishes_its_requests_while_the_other_is_not_up(tmp_path: Path) -> None:
    alone = {"resume": False}  # otherwise a request whose server dies before the first byte is sent to the other server
    async with controlled(tmp_path, eager(A, replicas=2) | alone, drain="500ms") as one:
        first, last = one.pids(A)
        streams = await one.streams(A, 2, seconds=SECONDS)
        os.kill(first, signal.SIGKILL)
        await until(lambda: one.status(A)["servers"][0]["state"] == "starting" and len(one.pids(A)) == 2, 60.0)
        starting = one.pids(A)[0]
        os.kill(starting, signal.SIGSTOP)  # so that its start takes as long as the test needs
        try:
            await one.reload(eager(A) | alone, drain="500ms")
            reasons = [re.findall(r'"finish_reason":"(\w+)"', reply.text) for reply in await asyncio.gather(*streams)]
            assert sorted(reasons) == [[], ["stop"]], "that of the replica that goes has come to its end"
        finally:
            os.kill(starting, signal.SIGCONT)
        await until(lambda: not psutil.pid_exists(last), 60.0)
        await one.reaches(A, "ready")
        assert one.pids(A) == [starting]


async def test_a_change_that_cannot_start_spares_the_other_replicas_and_can_be_reverted(tmp_path: Path) -> None:
    async with controlled(tmp_path, eager(A, replicas=2)) as one:
        before = one.pids(A)
        await one.reload(eager(A, replicas=2, args={"reasoning-parser": "no_such_parser"}))
        await until(lambda: any(each["state"] in ("failed", "backing_off") for each in one.status(A)["servers"]), 30.0)
        await held(lambda: one.pids(A)[-1] == before[-1], 1.0)
        assert (await one.request(A)).status_code == 200
        await one.reload(eager(A, replicas=2))
        await until(lambda: sum(each["condition"] == "up" for each in one.status(A)["servers"]) == 2, 60.0)
        assert one.pids(A)[1] == before[1]


async def test_a_model_with_too_short_a_startup_timeout_starts_when_it_is_raised(tmp_path: Path) -> None:
    slow = eager(A, args={"sim-healthy-after": 2})
    hurried, lenient = ({**slow, "launch": {**slow["launch"], "startup_timeout": each}} for each in ("1s", "2m"))
    async with controlled(tmp_path, hurried) as one:
        await one.reaches(A, "failed")  # the gateway may be about to try again
        await one.reload(lenient)
        await one.reaches(A, "ready")
        [pid] = one.pids(A)
        await one.reload(hurried)
        await held(lambda: one.pids(A) == [pid], 0.7)


async def test_a_model_gets_the_gpu_of_a_removed_model_when_its_server_has_exited(tmp_path: Path) -> None:
    async with controlled(tmp_path, eager(A, gpus=[[0]])) as one:
        [pid] = one.pids(A)
        streams = await one.streams(A, 1, seconds=SECONDS)
        await one.reload(eager(B, gpus=[[0]]))
        await held(lambda: one.state(B) == "stopped" and psutil.pid_exists(pid), 0.8, *streams)
        assert whole(await streams[0])
        await one.reaches(B, "ready")
        assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("flag", ["port", "uds"])
async def test_a_renamed_model_waits_for_the_address_on_which_it_listens(tmp_path: Path, flag: str) -> None:
    with reserved() as port:
        address = {flag: port if flag == "port" else str(tmp_path / "a.sock")}
        await _renamed(tmp_path, address)


async def _renamed(tmp_path: Path, servers: dict[str, Any]) -> None:
    async with controlled(tmp_path, eager(A, args=servers)) as one:
        [pid] = one.pids(A)
        streams = await one.streams(A, 1, seconds=SECONDS)
        await one.reload(eager(B, args=servers))
        await held(lambda: one.state(B) == "stopped" and psutil.pid_exists(pid), 1.0, *streams)
        assert whole(await streams[0])
        await one.reaches(B, "ready")
        assert not psutil.pid_exists(pid) and "could not start" not in one.output.getvalue()
        assert (await one.request(B)).status_code == 200


async def test_a_sleeping_or_stopped_model_wakes_with_the_new_settings(tmp_path: Path) -> None:
    async with controlled(tmp_path, on_demand(A, idle_sleep="300ms"), on_demand(B)) as one:
        assert (await one.request(A)).status_code == 200
        await one.reaches(A, "sleeping")
        await one.reload(on_demand(A, idle_sleep="1h", args=CHANGED), on_demand(B, args=CHANGED))
        await one.reaches(A, "stopped")
        assert one.state(B) == "stopped"
        for name in (A, B):
            assert (await one.request(name)).status_code == 200
            assert "4096" in psutil.Process(one.pids(name)[0]).cmdline()


async def test_a_model_that_the_operator_stopped_stays_stopped(tmp_path: Path) -> None:
    async with controlled(tmp_path, eager(A), eager(B)) as one:
        await one.operations.stop(A)
        await one.reload(eager(A, args=CHANGED), eager(B))
        await held(lambda: one.state(A) == "stopped", 0.8)
        await one.operations.start(A)
        await one.reaches(A, "ready")


async def test_requests_queued_for_a_removed_model_are_refused(tmp_path: Path) -> None:
    async with controlled(tmp_path, on_demand(A, args={"sim-listen-after": 60}), eager(B)) as one:
        waiting = asyncio.create_task(one.request(A))
        await until(lambda: one.status(A)["queued"] == 1)
        await one.reload(eager(B))
        reply = await waiting
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_healthy_server")
        await until(lambda: not [each for each in one.control.launcher.statuses() if each.name == f"{A}#0"], 60.0)


async def test_a_model_that_moves_to_other_servers_is_never_without_one(tmp_path: Path) -> None:
    """The servers belong to two launched simulators. The model reaches them by their private sockets."""
    both = [eager(each, args={"uds": str(tmp_path / f"{each[-1]}.sock")}) for each in (A, B)]
    async with controlled(tmp_path, *both) as one:

        def moved(server: str, **more: Any) -> dict[str, Any]:
            keys = {each: one.control.launcher.servers[f"{each}#0"].api_key for each in (A, B)}
            (tmp_path / "key").write_text(keys[A if server == "a" else B])
            servers = [{"url": f"unix:{tmp_path}/{server}.sock", "model": f"sim/{server}", "api_key": {"file": "key"}}]
            return {"id": "far", "servers": servers, **more}

        await one.reload(*both, moved("a"))
        await one.reaches("far", "ready")
        stop = asyncio.Event()

        async def client() -> None:
            while not stop.is_set():
                reply = await one.request("far")
                assert reply.status_code == 200, reply.text

        clients = [asyncio.create_task(client()) for _ in range(3)]
        for step in range(6):
            await one.reload(*both, moved("ba"[step % 2], aliases=[f"alias-{step}"]))
            assert (await one.request(f"alias-{step}")).json()["model"] == ("sim/b", "sim/a")[step % 2]
        stop.set()
        await asyncio.gather(*clients)
