"""The audit log of a running gateway: who changed what, and what happens when control is killed at any moment."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from gateway.auth.keys import hash_of
from tests.support.process import PROGRAM, Gateway, configuration, gateway, launched, wait_for, write

SECRET = "a-secret-of-the-audit-log"
SHOWN = {"authorization": "Bearer token-of-ci"}
KILLS = 4


def config(folder: Path, **audit: Any) -> dict[str, Any]:
    (folder / "secret").write_text(SECRET + "\n")
    tokens = [
        {"name": "ci", "hash": hash_of("token-of-ci"), "role": "operator"},
        {"name": "prometheus", "hash": hash_of("token-of-prometheus"), "role": "viewer"},
    ]
    own = configuration(launched(), admin={"port": 0, "tokens": tokens})
    return own | {"audit": {"secret": {"file": "secret"}, "file": "audit.jsonl", **audit}}


def started(folder: Path, own: dict[str, Any]) -> Any:
    return gateway(folder, own, ready=False)


def call(one: Gateway, path: str, method: str = "POST", **headers: str) -> httpx2.Response:
    return httpx2.request(method, f"http://127.0.0.1:{one.admin}{path}", headers=headers, timeout=60)


def entries(folder: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in (folder / "audit.jsonl").read_bytes().splitlines()]


def audit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "XDG_STATE_HOME": str(folder)}
    line = [str(PROGRAM), "audit", *arguments, "--config", str(folder / "gateway.yaml")]
    return subprocess.run(line, env=environ, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("audited")
    with started(folder, config(folder, stdout=True)) as running:
        wait_for(lambda: running.request().status_code == 200, why=lambda: running.output)
        yield running


def test_an_operation_has_its_actor_its_origin_and_both_states(one: Gateway) -> None:
    assert call(one, "/models/sim%2Fone/stop", **SHOWN).status_code == 200
    last = entries(one.folder)[-1]
    assert (last["action"], last["target"], last["origin"]) == ("model.stop", "sim/one", "127.0.0.1")
    assert last["actor"] == {"kind": "token", "name": "ci", "role": "operator", "teams": []}
    assert (last["before"], last["after"]) == ({"state": "ready"}, {"state": "stopped"})
    assert one.command("start", "sim/one").returncode == 0
    last = entries(one.folder)[-1]
    assert (last["action"], last["actor"]["kind"], last["actor"]["name"]) == ("model.start", "socket", f"uid {os.geteuid()}")
    wait_for(lambda: one.request().status_code == 200)
    assert call(one, "/servers/sim%2Fone%230/cordon", **SHOWN).status_code == 200
    assert call(one, "/servers/sim%2Fone%230/uncordon", **SHOWN).status_code == 200
    assert [(each["action"], each["before"], each["after"]) for each in entries(one.folder)[-2:]] == [
        ("server.cordon", {"cordoned": False}, {"cordoned": True}),
        ("server.uncordon", {"cordoned": True}, {"cordoned": False}),
    ]


def test_refused_attempts_are_recorded_and_plain_reading_is_not(one: Gateway) -> None:
    before = len(entries(one.folder))
    for path, method, headers in (
        ("/reload", "POST", {}),
        ("/reload", "POST", {"authorization": "Bearer wrong"}),
        ("/drain", "POST", {"authorization": "Bearer token-of-prometheus"}),
        ("/reload", "POST", SHOWN | {"origin": "https://evil.example.com"}),
        ("/status", "GET", {"authorization": "Bearer wrong"}),
    ):
        assert call(one, path, method, **headers).status_code in (401, 403)
    for headers in ({}, SHOWN):
        call(one, "/status", "GET", **headers)
    found = entries(one.folder)[before:]
    assert [(each["action"], each["target"], each["actor"]["kind"], each["actor"]["name"]) for each in found] == [
        ("request.refused", "POST /reload", "unauthenticated", ""),
        ("request.refused", "POST /reload", "unauthenticated", ""),
        ("request.refused", "POST /drain", "token", "prometheus"),
        ("request.refused", "POST /reload", "token", "ci"),
        ("request.refused", "GET /status", "unauthenticated", ""),
    ]
    assert "requires the role operator" in found[2]["after"]["reason"]


def test_a_reload_has_the_difference_and_no_secret(one: Gateway) -> None:
    own = config(one.folder, stdout=True)
    own["keys"].append({"id": "new", "hash": hash_of("key-of-new")})
    own["models"][0] |= {"aliases": ["alias"]}
    write(one.folder / "gateway.yaml", own)
    wait_for(lambda: entries(one.folder)[-1]["action"] == "config.reload")
    last = entries(one.folder)[-1]
    assert (last["actor"]["kind"], last["origin"]) == ("gateway", "changed files")
    assert last["before"] == {"models[sim/one].aliases": []}
    assert set(last["after"]) == {"models[sim/one].aliases", "keys[new]"}
    write(one.folder / "gateway.yaml", own | {"modles": []})
    wait_for(lambda: entries(one.folder)[-1]["action"] == "config.reload.refused")
    assert "did you mean `models`" in entries(one.folder)[-1]["after"]["problems"][0]
    write(one.folder / "gateway.yaml", own)
    assert call(one, "/reload", **SHOWN).json()["successful"]
    wait_for(lambda: entries(one.folder)[-1]["actor"]["name"] == "ci")
    text = (one.folder / "audit.jsonl").read_text() + one.output + one.log
    assert SECRET not in text and "token-of-ci" not in text and hash_of("key-of-new") not in text


def test_the_commands_list_and_verify(one: Gateway) -> None:
    folder = one.folder
    verified = audit(folder, "verify")
    assert verified.returncode == 0 and verified.stdout.splitlines()[-1].startswith("verified: "), verified.stdout + verified.stderr
    shown = audit(folder, "list", "--actor", "token ci", "--action", "model.*").stdout
    assert "model.stop  sim/one  token ci (127.0.0.1)  {\"state\":\"ready\"} -> {\"state\":\"stopped\"}" in shown  # fmt: skip
    lines = audit(folder, "list", "--format", "json", "--limit", "2").stdout.splitlines()
    assert [line.encode() for line in lines] == (folder / "audit.jsonl").read_bytes().splitlines()[-2:]
    wait_for(lambda: all(line in one.log for line in lines), why=lambda: one.log)
    call(one, "/reload\x1b[2J".replace("\x1b", "%1B"), **SHOWN)
    call(one, "/%1B%5B2J%0A", authorization="Bearer wrong")
    assert "\x1b" not in audit(folder, "list").stdout


def test_the_command_finds_tampering_and_exits_with_1(one: Gateway, tmp_path: Path) -> None:
    file, checkpoint = one.folder / "audit.jsonl", tmp_path / "checkpoints.log"
    lines = file.read_bytes().splitlines(keepends=True)
    write(tmp_path / "gateway.yaml", config(tmp_path))
    checkpoint.write_text(next((one.folder / "vllm-gateway" / "audit").glob("*/checkpoint")).read_text())
    cases = {
        "is missing before it": lines[:2] + lines[3:],
        "its HMAC is wrong": [*lines[:2], lines[2].replace(b"127.0.0.1", b"127.0.0.2").replace(b"uid ", b"uid 9"), *lines[3:]],
        "is missing: a checkpoint names entry": lines[:-1],
        "is not an entry": [*lines, b"x\n"],
    }
    for expected, changed in cases.items():
        (tmp_path / "audit.jsonl").write_bytes(b"".join(changed))
        result = audit(tmp_path, "verify", "--checkpoints", str(checkpoint))
        assert (result.returncode, expected in result.stdout) == (1, True), (expected, result.stdout, result.stderr)
    (tmp_path / "audit.jsonl").write_bytes(b"".join(lines))
    assert audit(tmp_path, "verify", "--checkpoints", str(checkpoint)).returncode == 0
    (tmp_path / "secret").write_text("another-secret-of-16")
    assert audit(tmp_path, "verify").returncode == 1
    (tmp_path / "old").write_text(SECRET)
    assert audit(tmp_path, "verify", "--secret-file", str(tmp_path / "old")).returncode == 0


def test_the_log_shows_its_state(one: Gateway) -> None:
    text = call(one, "/metrics", "GET", authorization="Bearer token-of-prometheus").text
    assert 'vllm_gateway_audit_entries_total{outcome="recorded"} ' in text
    assert 'vllm_gateway_dependency_up{dependency="audit_log"} 1.0' in text


def test_without_the_setting_nothing_is_recorded(tmp_path: Path) -> None:
    own = config(tmp_path)
    del own["audit"]
    with started(tmp_path, own) as running:
        assert call(running, "/reload", **SHOWN).status_code == 200
        assert not re.search("^vllm_gateway_audit|audit_log", call(running, "/metrics", "GET", **SHOWN).text, re.MULTILINE)
    assert not (tmp_path / "vllm-gateway" / "audit").exists()
    assert audit(tmp_path, "verify").returncode == 1


def test_changes_are_refused_while_the_log_cannot_be_written(tmp_path: Path) -> None:
    with started(tmp_path, config(tmp_path)) as running:
        [checkpoint] = (tmp_path / "vllm-gateway" / "audit").glob("*/checkpoint")
        checkpoint.unlink()
        checkpoint.mkdir()
        for expected in ("performed, but", "nothing was changed"):
            response = call(running, "/servers/sim%2Fone%230/cordon", **SHOWN)
            assert response.status_code == 503 and expected in response.json()["error"]
        own = config(tmp_path) | {"log": {"level": "debug"}}
        write(tmp_path / "gateway.yaml", own)
        wait_for(lambda: "the audit log cannot be written, so nothing was applied" in running.output)
        wait_for(lambda: running.request().status_code == 503)  # requests are answered: the only server is out of rotation
        checkpoint.rmdir()
        assert call(running, "/servers/sim%2Fone%230/uncordon", **SHOWN).status_code == 200
    assert audit(tmp_path, "verify").returncode == 0


@pytest.mark.parametrize("seed", range(KILLS))
@pytest.mark.parametrize("where", ["file", "database"])
def test_no_acknowledged_change_is_without_its_entry_when_control_is_killed(tmp_path: Path, where: str, seed: int) -> None:
    """Two clients change the state of a server while control is killed at a random moment. The chain continues afterwards."""
    choose, acknowledged = random.Random(seed), [0, 0]
    own = config(tmp_path)
    if where == "database":
        del own["audit"]["file"]
        own["ledger"] = "sqlite:///usage.db"
    with started(tmp_path, own) as running:

        def change(number: int) -> None:
            while True:
                try:
                    response = call(running, "/servers/sim%2Fone%230/cordon", **SHOWN)
                except httpx2.HTTPError:
                    return
                acknowledged[number] += response.status_code == 200

        threads = [threading.Thread(target=change, args=(number,)) for number in range(2)]
        for each in threads:
            each.start()
        wait_for(lambda: sum(acknowledged) > 0)
        time.sleep(choose.random())
        running.process.send_signal(signal.SIGKILL)
        for each in threads:
            each.join()
        running.process.wait()
    recorded = audit(tmp_path, "list", "--action", "server.cordon", "--limit", "100000").stdout.splitlines()
    assert len(recorded) >= sum(acknowledged)
    result = audit(tmp_path, "verify")
    assert result.returncode == 0, result.stdout
    with started(tmp_path, own) as running:
        assert call(running, "/reload", **SHOWN).status_code == 200
    assert audit(tmp_path, "verify").returncode == 0
