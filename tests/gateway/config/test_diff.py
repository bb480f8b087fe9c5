"""The differences between two configurations as text, and their effect on running servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import Config, diff, load
from gateway.fleet.launch_diff import LaunchDiff, can_replace_one_at_a_time, launch_diff
from tests.support.certificates import certificate
from upstream.launcher.lifecycle import LaunchSpec
from upstream.vllm.command_line import LaunchSettings

SECRET = "hunter2-canary"
MODEL: dict[str, Any] = {"id": "m", "servers": [{"url": "http://10.0.0.1", "api_key": {"env": "KEY"}}]}
KEY = {"id": "team-a", "hash": "sha256:" + "a" * 64}


def read(folder: Path, environ: dict[str, str] | None = None, **parts: Any) -> Config:
    file = folder / "gateway.yaml"
    file.write_text(yaml.safe_dump({"models": [MODEL], "keys": [KEY], **parts}))
    return load(file, {"KEY": SECRET} | (environ or {}))


def many(*names: str) -> list[dict[str, str]]:
    return [KEY, *({"id": name, "hash": f"sha256:{ord(name[-1]):064x}"} for name in names)]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, []),
        ({"models": [MODEL | {"id": "n"}]}, ["model n added", "model m removed"]),
        ({"models": [MODEL, MODEL | {"id": "n"}]}, ["model n added"]),
        ({"models": [MODEL | {"aliases": ["x"], "queue": {"size": 3}}]}, ["model m changed: aliases, queue"]),
        ({"models": [MODEL, {"id": "chat", "split": {"m": 1}}]}, ["model chat added"]),
        ({"keys": [KEY | {"models": ["m"]}]}, ["key team-a changed"]),
        ({"keys": many("k1", "k2", "k3")}, ["keys k1, k2, k3 added"]),
        ({"keys": many(*(f"k{n}" for n in range(7)))}, ["keys k0, k1, k2, k3, k4 and 2 more added"]),
        ({"server": {"drain": "1s", "body_limit": "1kB"}}, ["server changed: body_limit, drain"]),
        ({"groups": [{"id": "g"}], "log": {"level": "debug"}}, ["group g added", "log changed: level"]),
    ],
)
def test_a_change_is_described_as_text(tmp_path: Path, parts: dict[str, Any], expected: list[str]) -> None:
    before, after = read(tmp_path), read(tmp_path, **parts)
    assert list(diff.changes(before, after)) == expected
    assert diff.are_equal(before, after) is (not expected)


def test_a_secrets_change_is_seen_and_the_secret_is_not(tmp_path: Path) -> None:
    before, after = read(tmp_path), read(tmp_path, {"KEY": SECRET + "-2"})
    assert diff.changes(before, after) == ("model m changed: servers",)


def test_changed_weights_are_described(tmp_path: Path) -> None:
    before, after = (read(tmp_path, models=[MODEL, {"id": "chat", "split": {"m": weight}}]) for weight in (1, 2))
    assert diff.changes(before, after) == ("model chat changed: split",)


def test_another_order_is_a_change(tmp_path: Path) -> None:
    models = [MODEL, MODEL | {"id": "n"}]
    before, after = read(tmp_path, models=models), read(tmp_path, models=models[::-1])
    assert not diff.are_equal(before, after)


def test_what_needs_a_restart_stays_and_all_else_is_taken(tmp_path: Path) -> None:
    running = read(tmp_path)
    admin = {"port": 1, "token": {"env": "KEY"}}
    fresh = read(
        tmp_path,
        server={"port": 1234, "workers": 3, "drain": "1s", "admin": admin},
        ledger="sqlite:///x.db",
        store="ledger",
        log={"level": "error"},
    )
    waiting = diff.needs_restart(running, fresh)
    assert waiting == (
        "server.port needs a restart (1234 in the file, 8000 in use)",
        "server.workers needs a restart (3 in the file, 1 in use)",
        "server.admin.port needs a restart (1 in the file, 9090 in use)",
        "ledger needs a restart",
        "store needs a restart",
    )
    assert SECRET not in str(waiting)
    served = diff.without_restart(running, fresh)
    assert (served.server.port, served.server.workers, served.server.admin.port, served.ledger) == (8000, 1, 9090, None)
    assert served.server.admin.token == fresh.server.admin.token
    assert (served.server.drain, served.log.level, served.files) == (1.0, "error", fresh.files)
    assert diff.needs_restart(served, fresh) == waiting, "it is told until the file says otherwise"
    assert diff.needs_restart(served, running) == ()


def test_tls_is_switched_by_a_restart_and_other_certificates_are_not(tmp_path: Path) -> None:
    tls = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        cert, key = certificate(tmp_path / name)
        tls.append({"cert": str(cert), "key": str(key)})
    plain, one, other = (read(tmp_path, server=server) for server in ({}, {"tls": tls[0]}, {"tls": tls[1]}))
    assert diff.needs_restart(plain, one) == diff.needs_restart(one, plain) == ("server.tls needs a restart",)
    assert (diff.without_restart(plain, one).server.tls, diff.without_restart(one, plain).server.tls) == (None, one.server.tls)
    assert diff.needs_restart(one, other) == () and diff.without_restart(one, other).server.tls == other.server.tls


def spec(number: int, *gpus: int, drain: float = 30.0, timeout: float = 60.0, **args: Any) -> LaunchSpec:
    return LaunchSpec(f"m#{number}", LaunchSettings("m", ("m",), args=args, gpus=gpus, drain=drain), timeout)


@pytest.mark.parametrize(
    ("running", "wanted", "removed", "renew", "add", "rolls"),
    [
        ([spec(0)], [spec(0)], [], [], [], True),
        ([spec(0)], [spec(0, drain=1.0, timeout=5.0)], [], [], [], True),  # no effect on a running server
        ([spec(0), spec(1)], [spec(0, x=1), spec(1, x=1)], [], [0, 1], [], True),
        ([spec(0), spec(1)], [spec(0)], [1], [], [], True),
        ([spec(0, 0)], [spec(0, 0), spec(1, 1)], [], [], [1], True),
        ([spec(0, 0), spec(1, 1)], [spec(0, 0, 1)], [1], [0], [], True),  # onto the GPU of a removed server
        ([spec(0, 0, 1)], [spec(0, 0), spec(1, 1)], [], [0], [1], False),
        ([spec(0, 0), spec(1, 1)], [spec(0, 1), spec(1, 0)], [], [0, 1], [], False),
        ([spec(0, 0), spec(1, 0)], [spec(0, 0, x=1), spec(1, 0, x=1)], [], [0, 1], [], True),  # they shared it before
        ([spec(0, 0)], [spec(0, 2)], [], [0], [], True),
    ],
)
def test_servers_are_replaced_only_where_they_must_be(
    running: list[LaunchSpec], wanted: list[LaunchSpec], removed: list[int], renew: list[int], add: list[int], rolls: bool
) -> None:
    found = launch_diff(running, wanted)
    expected = LaunchDiff(tuple(f"m#{n}" for n in removed), tuple(wanted[n] for n in renew), tuple(wanted[n] for n in add))
    assert found == expected
    assert bool(found) is bool(removed or renew or add)
    assert can_replace_one_at_a_time(running, found) is rolls
