"""The commands for keys and teams of the store: one syntax for files and the store."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from gateway.auth.keys import has_valid_checksum
from tests.support.process import PROGRAM, Gateway, configuration, gateway, wait_for
from tests.support.running import KEY

TOKEN = "an-admin-token-of-the-tests"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    model = {"id": "sim/one", "servers": [{"url": "http://127.0.0.1:9"}]}
    config = configuration(model, admin={"port": 0, "token": {"env": "ADMIN_TOKEN"}}) | {"store": "sqlite:///keys.db"}
    folder = tmp_path_factory.mktemp("commands")
    (folder / "token").write_text(TOKEN)
    with gateway(folder, config, variables={"ADMIN_TOKEN": TOKEN}, ready=False) as made:
        wait_for(lambda: status_of(made, KEY) == 200, 60, why=lambda: made.output)
        yield made


def status_of(one: Gateway, token: str) -> int:
    try:
        return httpx2.get(f"{one.url}/v1/models", headers={"authorization": f"Bearer {token}"}, timeout=60, verify=False).status_code
    except httpx2.HTTPError:
        return 0


def run(one: Gateway, *arguments: str) -> str:
    done = one.command(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(one: Gateway, *arguments: str) -> str:
    done = one.command(*arguments)
    assert done.returncode in (1, 2), done.stdout
    assert done.stderr.count("\n") == 1
    return done.stderr


def shown(one: Gateway, identity: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(one, "keys", "show", identity))
    return found


def entry_of(file: Path, identity: str) -> dict[str, Any]:
    """Return an entry of a file. It is not loaded, because its secrets are in the gateway's environment only."""
    (found,) = (each for each in yaml.safe_load(file.read_text())["keys"] if each["id"] == identity)
    return dict(found)


def test_a_key_of_the_store_lives(one: Gateway) -> None:
    run(one, "teams", "new", "--id", "lab", "--concurrent", "3")
    done = one.command("keys", "new", "--id", "alice", "--name", "Alice's laptop", "--team", "lab", "--label", "a=1", "--concurrent", "2")
    token = done.stdout.strip()
    assert has_valid_checksum(token) and "alice is in the store" in done.stderr and token not in done.stderr
    assert status_of(one, token) == 200
    found = shown(one, "alice")
    assert (found["name"], found["team"], found["labels"], found["limits"]) == ("Alice's laptop", "lab", {"a": "1"}, {"concurrent": 2})
    run(one, "keys", "set", "alice", "--models", "sim/*", "--tokens-per-day", "9", "--unset", "concurrent", "--unset", "team")
    found = shown(one, "alice")
    assert (found["models"], found["team"], found["limits"]) == (["sim/*"], None, {"tokens_per_day": 9})
    assert run(one, "keys", "revoke", "alice") == "alice is revoked in the store\n"
    assert status_of(one, token) == 401
    run(one, "keys", "restore", "alice")
    other = run(one, "keys", "rotate", "alice", "--overlap", "0s").strip()
    assert (status_of(one, token), status_of(one, other)) == (401, 200)
    listed = {each["id"]: each["state"] for each in json.loads(run(one, "keys", "list", "--json"))}
    assert listed == {"team-a": "valid", "alice": "valid"}
    run(one, "keys", "delete", "alice")
    assert status_of(one, other) == 401
    assert "there is no key alice in the store" in refused(one, "keys", "show", "alice")


def test_teams(one: Gateway) -> None:
    run(one, "teams", "new", "--id", "ops", "--concurrent", "3")
    run(one, "teams", "set", "ops", "--tokens-per-day", "5", "--unset", "concurrent")
    assert json.loads(run(one, "teams", "show", "ops"))["limits"] == {"tokens_per_day": 5}
    assert "ops" in [each["id"] for each in json.loads(run(one, "teams", "list"))]
    run(one, "teams", "set", "ops", "--weight", "3")
    assert json.loads(run(one, "teams", "show", "ops"))["weight"] == 3
    assert "weight" in refused(one, "teams", "set", "ops", "--weight", "0")
    run(one, "teams", "set", "ops", "--unset", "weight")
    assert json.loads(run(one, "teams", "show", "ops"))["weight"] == 1
    assert "nothing to change" in refused(one, "teams", "set", "ops")
    assert run(one, "teams", "delete", "ops") == "ops is deleted from the store\n"
    assert "there is no team ops" in refused(one, "teams", "delete", "ops")


def test_the_files_are_changed_by_the_same_commands(one: Gateway) -> None:
    file = one.folder / "gateway.yaml"
    before = file.read_text()
    try:
        run(one, "keys", "new", "--id", "in-file", "--no-store", "--write")
        run(one, "keys", "set", "in-file", "--models", "sim/*", "--concurrent", "2", "--expires", "2999-01-01")
        entry = entry_of(file, "in-file")
        assert (entry["models"], entry["limits"]) == (["sim/*"], {"concurrent": 2})
        run(one, "keys", "set", "in-file", "--unset", "concurrent", "--tokens-per-day", "7", "--unset", "models")
        entry = entry_of(file, "in-file")
        assert (entry["models"], entry["limits"]) == (["*"], {"tokens_per_day": 7})
        unchanged = file.read_bytes()
        assert "].team: " in refused(one, "keys", "set", "in-file", "--models", "s*", "--team", "absent")
        assert file.read_bytes() == unchanged, "all fields are changed, or none"
        assert "in-file is revoked in " in run(one, "keys", "revoke", "in-file")
        assert "by hand" in refused(one, "keys", "delete", "in-file")
        assert "for keys of the store" in refused(one, "keys", "set", "in-file", "--name", "a")
    finally:
        file.write_text(before)


def test_keys_of_another_gateway_are_imported(one: Gateway, tmp_path: Path) -> None:
    listed = tmp_path / "litellm.json"
    listed.write_text(json.dumps({"keys": [{"token": "a" * 64, "key_alias": "one"}, {"token": "b" * 64, "team_id": "nobody"}]}))
    done = one.command("keys", "import", str(listed))
    assert (done.returncode, done.stdout) == (0, "2 keys added to the store\n")
    assert "left out: team_id" in done.stderr
    assert run(one, "keys", "import", str(listed)) == "0 keys added to the store; 2 were already known\n"
    assert (one.folder / "gateway.yaml").read_text().count("id:") == 2


def test_mistakes_are_one_line(one: Gateway) -> None:
    assert "expected NAME=VALUE" in refused(one, "keys", "new", "--id", "x", "--label", "a")
    assert "there is no team nobody" in refused(one, "keys", "new", "--id", "x", "--team", "nobody")
    assert "team-a is a key of the configuration" in refused(one, "keys", "new", "--id", "team-a")
    assert "there is no key nobody in the store" in refused(one, "keys", "rotate", "nobody")
    assert "nothing to change" in refused(one, "keys", "set", "nobody")


def test_a_gateway_elsewhere(one: Gateway, tmp_path: Path) -> None:
    elsewhere: list[str | Path] = ["--admin", f"http://127.0.0.1:{one.admin}", "--token-file", one.folder / "token"]
    line: list[str | Path] = [one.program, "keys", "new", "--id", "remote", *elsewhere]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, status_of(one, done.stdout.strip())) == (0, 200), done.stderr
    assert shown(one, "remote")["state"] == "valid"


def test_without_its_gateway_the_store_is_not_changed(tmp_path: Path) -> None:
    model = {"id": "sim/one", "servers": [{"url": "http://127.0.0.1:9"}]}
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(configuration(model) | {"store": "sqlite:///keys.db"}))
    line: list[str | Path] = [PROGRAM, "keys", "new", "--id", "alice", "--config", tmp_path / "gateway.yaml"]
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode == 1 and "no gateway of this user runs with" in done.stderr and done.stdout == ""
