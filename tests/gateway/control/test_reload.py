"""Reloads of the configuration: what is read, what is applied, and that an invalid file changes nothing."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.auth import keys
from gateway.config import Config, load
from gateway.control.reload import RECENT, Reloader, ReloadHistory
from gateway.fleet.operations import ReloadResult
from tests.support.certificates import certificate
from tests.support.controlled import controlled
from tests.support.process import Gateway, configuration, gateway, launched, wait_for, write
from tests.support.running import KEY, until
from tests.support.scripted import Conversation, scripted

OTHER = "sk-another-key"
FAILED = 'vllm_gateway_config_reloads_total{outcome="failure"}'
TAKEN = 'vllm_gateway_config_reloads_total{outcome="success"}'
LAST = "vllm_gateway_config_last_reload_successful"


def with_keys(config: dict[str, Any], **tokens: str) -> dict[str, Any]:
    """Return the configuration with only these keys, by id."""
    return config | {"keys": [{"id": name, "hash": keys.hash_of(token)} for name, token in tokens.items()]}


def status_of(one: Gateway, token: str) -> int:
    """Return the status of the list of models for a key."""
    return httpx2.get(one.url + "/v1/models", headers={"authorization": f"Bearer {token}"}, timeout=60).status_code


def wait_for_status(one: Gateway, token: str, status: int) -> None:
    """Wait until requests with a key get this status."""
    wait_for(lambda: status_of(one, token) == status)


def last(one: Gateway) -> dict[str, Any]:
    return dict(one.get("/status").json()["configuration"])


def version_count(status: dict[str, Any]) -> int:
    """Return the number of different snapshot versions in the workers and in control."""
    return len({status["snapshot_version"], *(worker["snapshot_version"] for worker in status["workers"])})


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("gateway"), configuration(launched(), workers=2)) as one:
        yield one


@pytest.fixture
def config(running: Gateway) -> Iterator[dict[str, Any]]:
    """Yield the configuration of ``running``, and restore it after the test."""
    original = configuration(launched(), workers=2)
    yield original
    write(running.folder / "gateway.yaml", original)
    wait_for(lambda: running.command("reload").returncode == 0)


def test_a_changed_file_is_served_by_every_worker(running: Gateway, config: dict[str, Any]) -> None:
    file, before, taken = running.folder / "gateway.yaml", running.get("/status").json(), running.metric(TAKEN)
    assert status_of(running, OTHER) == 401
    write(file, with_keys(config, **{"team-a": KEY, "team-b": OTHER}))
    wait_for(lambda: running.metric(TAKEN) > taken)
    wait_for(lambda: {status_of(running, OTHER) for _ in range(10)} == {200})
    wait_for(lambda: version_count(running.get("/status").json()) == 1)
    after = running.get("/status").json()
    assert after["snapshot_version"] != before["snapshot_version"]
    assert [worker["pid"] for worker in after["workers"]] == [worker["pid"] for worker in before["workers"]]
    assert [server["pid"] for server in after["models"][0]["servers"]] == [server["pid"] for server in before["models"][0]["servers"]]
    assert after["configuration"]["changes"] == ["key team-b added"]
    assert OTHER not in running.output and keys.hash_of(OTHER) not in running.output


def test_an_invalid_file_changes_nothing_and_is_reported_everywhere(running: Gateway, config: dict[str, Any]) -> None:
    file, failed = running.folder / "gateway.yaml", running.metric(FAILED)
    write(file, config | {"modles": []})
    wait_for(lambda: running.metric(FAILED) > failed)
    assert running.metric(LAST) == 0
    [problem] = last(running)["problems"]
    line = file.read_text().splitlines().index("modles: []") + 1
    assert problem == f"{file}:{line}: modles: unknown key; did you mean `models`?"
    assert problem in running.output
    assert time.time() - last(running)["when"] < 60
    assert problem in running.command("status").stdout
    refused = running.command("reload")
    stays = "nothing was applied; the previous configuration stays in use"
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", f"{problem}\n{stays}\n")
    assert running.request().status_code == 200
    write(file, config)
    wait_for(lambda: running.metric(LAST) == 1)


def test_settings_that_need_a_restart_are_reported_and_the_rest_is_applied(running: Gateway, config: dict[str, Any]) -> None:
    cert, key = map(str, certificate(running.folder))
    server = config["server"] | {"workers": 3, "tls": {"cert": cert, "key": key}, "admin": {"port": 1}, "body_limit": "1kB"}
    write(running.folder / "gateway.yaml", config | {"server": server, "ledger": "sqlite:///usage.db"})
    wait_for(lambda: last(running)["needs_restart"])
    parts = (
        "server.workers needs a restart (3 in the file, 2 in use)",
        "server.tls",
        "server.admin.port needs a restart (1 in the file, 0 in use)",
        "ledger",
    )
    waiting = [part if " " in part else f"{part} needs a restart" for part in parts]
    assert last(running)["needs_restart"] == waiting
    done = running.command("reload")
    assert done.returncode == 0 and done.stdout.splitlines()[-len(waiting) :] == waiting
    wait_for(lambda: running.request(messages=[{"role": "user", "content": "x" * 2000}]).status_code == 413)
    assert len(running.workers()) == 2
    assert waiting[0] in running.output


def test_workers_that_a_restart_will_remove_serve_until_then(running: Gateway, config: dict[str, Any]) -> None:
    file, taken = running.folder / "gateway.yaml", running.metric(TAKEN)
    model = config["models"][0] | {"max_inflight": 1, "queue": {"wait": "20s"}, "aliases": ["bounded"]}
    write(file, config | {"models": [model], "server": config["server"] | {"workers": 1}})
    wait_for(lambda: running.metric(TAKEN) > taken)
    wait_for(lambda: version_count(running.get("/status").json()) == 1)
    assert last(running)["needs_restart"] == ["server.workers needs a restart (1 in the file, 2 in use)"]
    assert {running.request(model="bounded").status_code for _ in range(20)} == {200}


def test_the_command_reports_the_changes(running: Gateway, config: dict[str, Any]) -> None:
    model = config["models"][0] | {"aliases": ["uno"], "timeouts": {"idle": "9s"}}
    write(running.folder / "gateway.yaml", config | {"models": [model]})
    wait_for(lambda: running.request(model="uno").status_code == 200)
    write(running.folder / "gateway.yaml", with_keys(config, **{"team-a": KEY, "b": OTHER}) | {"log": {"level": "debug"}})
    done = running.command("reload")
    assert (done.returncode, done.stderr) == (0, "")
    changes = ["model sim/one changed: aliases, timeouts", "key b added", "log changed: level"]
    lines = done.stdout.splitlines()
    if len(lines) > len(changes):  # the watcher has read the file before the command
        assert re.fullmatch(r"already applied \d+\.\d s ago:", lines.pop(0))
    assert sorted(lines) == sorted(changes)
    wait_for(lambda: running.request(model="uno").status_code == 404)
    first, *others = running.command("reload").stdout.splitlines()
    assert first.startswith("already applied ") and sorted(others) == sorted(changes)


def test_only_recent_changes_are_named_again() -> None:
    history = ReloadHistory()
    history.add(changed := ReloadResult(100.0, changes=("key b added",)))
    assert history.recent_changes(101.0) == changed and history.recent_changes(100.0 + RECENT) is None
    history.add(ReloadResult(110.0, earlier=changed))
    assert history.recent_changes(111.0) == changed
    history.add(ReloadResult(120.0, problems=("x",)))
    assert history.recent_changes(121.0) is None


def test_a_hangup_without_a_terminal_is_a_reload(running: Gateway, config: dict[str, Any]) -> None:
    taken = running.metric(TAKEN)
    os.kill(running.process.pid, signal.SIGHUP)
    wait_for(lambda: running.metric(TAKEN) > taken)
    assert last(running)["changes"] == []
    assert running.request().status_code == 200


def test_a_half_written_file_is_read_again_when_it_is_complete(running: Gateway, config: dict[str, Any]) -> None:
    file, failed = running.folder / "gateway.yaml", running.metric(FAILED)
    text = file.read_text()
    with file.open("w") as writing:
        writing.write(text[: text.index("models:") + 9])
        writing.flush()
        wait_for(lambda: running.metric(FAILED) > failed)
        assert running.request().status_code == 200
        writing.write(text[text.index("models:") + 9 :])
    wait_for(lambda: running.metric(LAST) == 1)
    assert running.request().status_code == 200


def mounted(volume: Path, number: int, **files: str) -> None:
    """Publish files as the kubelet does (AtomicWriter): a folder named for the time, and a link for each file through `..data`.

    `..data` is a link to that folder. A new link is renamed over the previous one."""
    fresh = volume / f"..2026_01_01_00_00_{number:02}.1"
    fresh.mkdir()
    for name, text in files.items():
        (fresh / name).write_text(text)
        if not (volume / name).is_symlink():
            (volume / name).symlink_to(f"..data/{name}")
    (volume / "..data_tmp").symlink_to(fresh.name)
    former = (volume / "..data").resolve() if (volume / "..data").is_symlink() else None
    (volume / "..data_tmp").rename(volume / "..data")
    if former is not None:
        shutil.rmtree(former)


def stanza(name: str, token: str) -> str:
    return f"keys:\n  - {{id: {name}, hash: '{keys.hash_of(token)}'}}\n"


def test_changes_of_a_mounted_kubernetes_secret_are_applied(tmp_path: Path) -> None:
    volume = tmp_path / "secret"
    volume.mkdir()
    mounted(volume, 0, keys=stanza("team-c", "sk-c-1"), upstream="first")
    with socket.create_server(("127.0.0.1", 0)) as server:
        servers = [{"url": f"http://127.0.0.1:{server.getsockname()[1]}", "api_key": {"file": "secret/upstream"}}]
        config = configuration({"id": "far", "servers": servers}) | {"keys_file": "secret/keys"}
        with gateway(tmp_path, config, ready=False) as one:
            wait_for(lambda: one.get("/metrics").status_code == 200 and status_of(one, "sk-c-1") == 200)
            for number in range(1, 4):
                mounted(volume, number, keys=stanza("team-c", f"sk-c-{number + 1}"), upstream="first")
                wait_for_status(one, f"sk-c-{number + 1}", 200)
                wait_for_status(one, f"sk-c-{number}", 401)
            wait_for(lambda: last(one)["changes"] == ["key team-c changed"])
            mounted(volume, 9, keys=stanza("team-c", "sk-c-4"), upstream="second")
            wait_for(lambda: last(one)["changes"] == ["model far changed: servers"])
            assert "second" not in one.output
            assert one.metric(FAILED) == 0


def test_a_missing_secret_file_is_read_when_it_appears(tmp_path: Path) -> None:
    config = configuration(launched())
    with gateway(tmp_path, config) as one:
        write(tmp_path / "gateway.yaml", config | {"keys_file": "more.yaml"})
        wait_for(lambda: one.metric(FAILED) > 0)
        assert "more.yaml cannot be read: No such file or directory" in last(one)["problems"][0]
        (tmp_path / "more.yaml").write_text(stanza("late", OTHER))
        wait_for(lambda: one.metric(LAST) == 1)
        wait_for(lambda: status_of(one, OTHER) == 200)


def test_a_stopping_gateway_reads_no_configuration(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched(), linger="1h")) as one:
        one.process.send_signal(signal.SIGTERM)
        wait_for(lambda: one.get("/readyz").status_code == 503)
        assert one.get("/readyz").json() == {"status": "not_ready", "reasons": ["draining"]}
        assert one.request().status_code == 200, "it serves on while others hear of it"
        refused: subprocess.CompletedProcess[str] = one.command("reload")
        assert (refused.returncode, refused.stderr) == (1, "vllm-gateway: the gateway is stopping\n")
        for operation in ("start", "restart", "wake"):
            assert one.command(operation, "sim/one").stderr == "vllm-gateway: the gateway is stopping\n"
        assert one.stop() == 0, "a second signal ends the drain"


async def test_a_servers_key_is_replaced_without_a_failed_request_and_a_refused_key_takes_it_down(tmp_path: Path) -> None:
    """Follow docs/kubernetes-changes.md: the server accepts both keys, the gateway uses the new key, the server drops the old one."""
    accepted = {"Bearer first", "Bearer second"}

    async def script(talk: Conversation) -> None:
        guarded = talk.request.head.split()[1].startswith(b"/v1")
        refused = guarded and talk.request.header("authorization") not in accepted
        await talk.respond(b'{"object":"list","data":[]}', "401 Unauthorized" if refused else "200 OK")

    key = tmp_path / "key"
    key.write_text("first")
    async with scripted(script) as server:
        far = {"id": "far", "servers": [{"url": f"http://127.0.0.1:{server.port}", "api_key": {"file": str(key)}}]}
        async with controlled(tmp_path, far) as one:
            assert (await one.request("far")).status_code == 200
            key.write_text("second")
            assert (await one.reloader.reload()).changes == ("model far changed: servers",)
            assert (await one.request("far")).status_code == 200
            accepted.remove("Bearer first")
            assert (await one.request("far")).status_code == 200
            key.write_text("first")
            await one.reloader.reload()
            await until(lambda: one.status("far")["servers"][0]["condition"] == "down", 60.0)
            await one.wait_for_workers()
            response = await one.request("far")
            assert (response.status_code, response.json()["error"]["code"]) == (503, "no_healthy_server")
            assert one.status("far")["servers"][0]["reason"].startswith("the server rejected the gateway's key")
            key.write_text("second")
            await one.reloader.reload()
            await until(lambda: one.status("far")["servers"][0]["condition"] == "up", 60.0)
            await one.wait_for_workers()
            assert (await one.request("far")).status_code == 200


class FailingOnce:
    """Applies configurations, but fails on the first."""

    def __init__(self) -> None:
        self.history = ReloadHistory()
        self.taken_ones: list[Config] = []

    @contextmanager
    def reading(self) -> Iterator[None]:
        yield

    async def check_added(self, config: Config) -> None:
        pass

    def apply_config(self, config: Config) -> int:
        self.taken_ones.append(config)
        if len(self.taken_ones) == 1:
            raise RuntimeError("a mistake")
        return 1

    async def wait_applied(self, number: int) -> None:
        pass

    def reloaded(self, result: ReloadResult) -> None:
        self.history.add(result)


async def test_a_file_that_is_written_all_the_time_is_still_read(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    write(file, configuration({"id": "m", "servers": [{"url": "http://127.0.0.1:1"}]}))
    reloader = Reloader(file, load(file), FailingOnce())

    async def keep_writing() -> None:
        for second in itertools.count():
            os.utime(file, (second, second))
            await asyncio.sleep(0)

    writing = asyncio.create_task(keep_writing())
    result = await reloader.reload()
    assert not writing.done()
    writing.cancel()
    assert (result.successful, result.changes) == (True, ())


@pytest.mark.parametrize(("port", "changes"), [(2, ["model m changed: servers"]), (1, [])])
async def test_a_change_that_could_not_be_applied_is_a_failure_and_is_tried_with_the_next_reload(
    tmp_path: Path, port: int, changes: list[str]
) -> None:
    def written(port: int) -> Config:
        write(tmp_path / "gateway.yaml", configuration({"id": "m", "servers": [{"url": f"http://127.0.0.1:{port}"}]}))
        return load(tmp_path / "gateway.yaml")

    taker = FailingOnce()
    reloader = Reloader(tmp_path / "gateway.yaml", written(1), taker)
    written(2)
    failed = await reloader.reload()
    assert (failed.successful, taker.history.last, taker.history.counts) == (False, failed, {"success": 0, "failure": 1})
    assert failed.problems == ("the gateway failed while reading it (RuntimeError); see the log",)
    wanted = written(port)
    taken = await reloader.reload()
    assert (taken.successful, list(taken.changes)) == (True, changes)
    assert [config.models for config in taker.taken_ones[1:]] == [wanted.models], "also where it is as it was before"
    assert (await reloader.reload()).changes == ()
    assert len(taker.taken_ones) == 2
    assert taker.history.counts == {"success": 2, "failure": 1}


async def test_a_preview_names_what_would_be_restarted_and_applies_nothing(tmp_path: Path) -> None:
    async with controlled(tmp_path, launched("sim/a"), launched("sim/b")) as one:
        assert (await one.reloader.preview()).changes == ()
        served = configuration(launched("sim/a", **{"max-model-len": 512}), launched("sim/c"), workers=3)
        served["models"][0]["launch"]["env"] = {"MY_TOKEN": "a-secret"}
        write(one.file, served)
        preview = await one.reloader.preview()
        assert (preview.problems, preview.restarts, preview.starts, preview.stops) == ((), {"sim/a": 1}, {"sim/c": 1}, {"sim/b": 1})
        assert preview.changes == ("model sim/c added", "model sim/b removed", "model sim/a changed: launch")
        assert preview.needs_restart == ("server.workers needs a restart (3 in the file, 1 in use)",)
        assert preview.read["server.workers"] == 3 and "a-secret" not in str(preview)
        assert await one.reloader.preview() is preview  # of unchanged files
        assert {model.id for model in one.control.config.models} == {"sim/a", "sim/b"} and preview.by is None
        one.file.write_text("models: 3\n")
        assert (1, "models") in [(problem.line, problem.path) for problem in (await one.reloader.preview()).problems]
        write(one.file, served)
        await one.reloader.reload()
        after = await one.reloader.preview()
        assert (after.changes, after.needs_restart) == ((), preview.needs_restart) and after.by is not None
