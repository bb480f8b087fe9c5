"""Operations over the admin port: they need the token, are refused for web pages, and are logged with their client. Also: listed keys."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.auth.keys import hash_of
from tests.support.http_server import threaded
from tests.support.process import Gateway, configuration, gateway, launched, wait_for

TOKEN = "an-admin-token"
SHOWN = {"authorization": f"Bearer {TOKEN}"}
STOP = "/models/sim%2Fone/stop"
ACTS = [STOP, "/models/sim/one/restart", "/models/sim/one/nonsense", "/reload", "/drain", "/livez", "/status", "/nothing"]


def call(one: Gateway, path: str, headers: dict[str, str] | None = None, method: str = "POST") -> httpx2.Response:
    return httpx2.request(method, f"http://127.0.0.1:{one.admin}{path}", headers=headers, timeout=60, verify=False)


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command without access to the configuration and the socket."""
    command = str(Path(sys.executable).with_name("vllm-gateway"))
    return subprocess.run([command, *arguments], capture_output=True, text=True, cwd="/")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operated")


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[Gateway]:
    (folder / "token").write_text(TOKEN + "\n")
    soon = (datetime.now(UTC) + timedelta(days=3)).strftime("%Y-%m-%dT%H:%M:%SZ")
    config = configuration(launched(), admin={"port": 0, "token": {"file": "token"}}) | {"ledger": "sqlite:///usage.db"}
    config["keys"].append({"id": "unused", "hash": hash_of("b"), "expires": soon, "models": ["sim/*"]})
    with gateway(folder, config) as running:
        yield running


def state(one: Gateway) -> str:
    return str(call(one, "/status", SHOWN, "GET").json()["models"][0]["state"])


def responds(one: Gateway) -> bool:
    return one.request().status_code == 200


def recorded(one: Gateway) -> bool:
    """Return whether the ledger has every request so far; every request had a key."""
    line = re.compile(r'^vllm_gateway_requests_total\{.*endpoint="/v1/chat/completions".*\} (\S+)$', re.MULTILINE)
    text = call(one, "/metrics", SHOWN, "GET").text
    written = re.search(r'^vllm_gateway_ledger_rows_total\{outcome="written"\} (\S+)$', text, re.MULTILINE)
    return written is not None and float(written[1]) == sum(map(float, line.findall(text)))


def test_operations_need_a_configured_token(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched())) as open_one:
        for path in ACTS:
            for headers in ({}, SHOWN, {"authorization": "Bearer"}):
                response = call(open_one, path, headers)
                assert response.status_code == 403 and "server.admin.token" in response.json()["error"]
        result = run_command("stop", "sim/one", "--admin", f"http://127.0.0.1:{open_one.admin}")
        assert (result.returncode, result.stderr.count("\n")) == (1, 1)
        assert "operations over the admin port require server.admin.token" in result.stderr
        assert open_one.request().status_code == 200


@pytest.mark.parametrize("path", ACTS)
def test_operations_are_refused_without_the_token(one: Gateway, path: str) -> None:
    for headers in (
        {},
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": TOKEN},
        {"x-api-key": TOKEN},
        {"cookie": f"token={TOKEN}"},
    ):
        assert call(one, f"{path}?token={TOKEN}", headers).status_code == 401
    assert call(one, path, {"authorization": f"Basic {TOKEN}"}).headers["www-authenticate"] == "Bearer"
    assert one.request().status_code == 200


@pytest.mark.parametrize(
    "page", [{"origin": "https://evil.example.com"}, {"origin": "null"}, {"origin": "http://127.0.0.1"}, {"sec-fetch-site": "same-site"}]
)
def test_operations_are_refused_for_web_pages(one: Gateway, page: dict[str, str]) -> None:
    for path in (STOP, "/reload", "/drain"):
        response = call(one, path, SHOWN | page)
        assert (response.status_code, response.json()["error"]) == (403, "operations are refused for web pages")
    preflight = call(one, STOP, page | {"access-control-request-method": "POST"}, "OPTIONS")
    assert preflight.status_code == 403 and not any(name.startswith("access-control") for name in preflight.headers)
    assert one.request().status_code == 200


def test_operations_with_the_token_are_done_and_logged(one: Gateway) -> None:
    response = call(one, STOP, SHOWN)
    assert (response.status_code, response.json()["state"]) == (200, "stopped")
    assert "stop of sim/one requested by the token, from 127.0.0.1" in one.output
    assert call(one, "/models/sim%2Fone/start", SHOWN | {"host": "gateway.internal:9090"}).status_code == 200
    wait_for(lambda: state(one) == "ready", why=lambda: one.output)
    wait_for(lambda: responds(one))  # after the workers received the snapshot, too
    assert call(one, "/reload", SHOWN).json()["successful"]
    assert call(one, "/models/none/stop", SHOWN).status_code == 404
    assert call(one, "/models/sim%2Fone/drain", SHOWN).status_code == 404
    assert call(one, STOP, SHOWN, "GET").status_code == call(one, "/status", SHOWN).status_code == 405
    assert one.command("reload").returncode == 0
    assert "reload requested by uid " in one.output and "(pid " in one.output
    assert TOKEN not in one.output + one.log


def test_the_commands_reach_the_gateway_from_elsewhere(one: Gateway, folder: Path) -> None:
    there = ("--admin", f"http://localhost:{one.admin}", "--token-file", str(folder / "token"))
    known: list[tuple[tuple[str, ...], str]] = [
        (("restart", "sim/one"), "sim/one: "),
        (("wake", "sim/one"), "sim/one: "),
        (("reload",), "nothing has changed"),
        (("status",), "sim/one"),
    ]
    for arguments, expected in known:
        done = run_command(*arguments, *there)
        assert (done.returncode, done.stderr) == (0, "") and expected in done.stdout
    wrong, two_lines = folder / "other", folder / "two-lines"
    wrong.write_text("wrong")
    two_lines.write_text("wrong\nwrong")
    failing: list[tuple[tuple[str, ...], str]] = [
        ((*there[:2], "--token-file", str(wrong)), "the admin port requires its token"),
        (there[:2], "the admin port requires its token"),
        ((*there[:2], "--token-file", str(two_lines)), "two-lines cannot be read: it holds no token"),
        ((*there[:2], "--token-file", str(folder / "none")), "none cannot be read: No such file or directory"),
        (("--admin", one.url, *there[2:]), "this is not the admin port of a gateway"),
        (("--admin", "http://localhost:1", *there[2:]), "http://localhost:1: "),
        (("--admin", "nonsense", *there[2:]), "nonsense: "),
        (("--admin", "http://[::1", *there[2:]), "http://[::1: "),
    ]
    for arguments, why in failing:
        done = run_command("status", *arguments)
        assert "wrong" not in done.stderr.replace(str(folder), "")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done
        assert why in done.stderr
    assert run_command("status", *there[2:]).returncode == 2


def test_a_server_that_sends_no_json_is_no_gateway() -> None:
    with threaded(HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)) as other:
        done = run_command("status", "--admin", f"http://127.0.0.1:{other.server_port}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith(f"http://127.0.0.1:{other.server_port}: this is not the admin port of a gateway\n")


def test_usage_and_keys_are_the_same_elsewhere_as_on_the_machine_itself(one: Gateway, folder: Path) -> None:
    there = ("--admin", f"http://localhost:{one.admin}", "--token-file", str(folder / "token"))
    here = ("--config", str(folder / "gateway.yaml"))
    wait_for(lambda: responds(one))  # after its restart
    until = (datetime.now(UTC) + timedelta(days=1)).strftime("%Y-%m-%d")  # so that both commands have the same period

    def usage(*arguments: str) -> str:
        done = run_command("usage", "--by", "key,day", "--since", "2026-01-01", "--until", until, "--key", "team-a", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    wait_for(lambda: recorded(one))  # otherwise a row could be added between two commands
    assert usage("--format", "csv", *there).count("\nteam-a,")
    for form in ("table", "csv", "json"):
        assert usage("--format", form, *there) == usage("--format", form, *here)
    assert "no requests" in usage("--team", "nobody", *there)
    for arguments in (("keys", "list"), ("keys", "list", "--json")):
        shown, local = run_command(*arguments, *there), run_command(*arguments, *here)
        assert (shown.returncode, shown.stdout, shown.stderr) == (0, local.stdout, "") and "unused" in shown.stdout
    for command in (["keys", "list"], ["usage"]):
        assert run_command(*command, *there[2:]).returncode == 2, "a token for nobody"
        assert "the admin port requires its token" in run_command(*command, *there[:2]).stderr
    assert run_command("usage", "--by", "color", *there).returncode == 2


def test_keys_are_shown_without_their_hashes(one: Gateway) -> None:
    before = datetime.now(UTC) - timedelta(seconds=2)
    wait_for(lambda: responds(one))
    wait_for(lambda: recorded(one))

    def used() -> Any:
        listed = {key["id"]: key for key in call(one, "/keys", SHOWN, "GET").json()["keys"]}
        last = listed["team-a"]["last_used"]
        return last is not None and datetime.fromisoformat(last) >= before and listed

    listed = wait_for(used)
    assert listed["unused"] | {"expires": 0} == {
        "id": "unused", "state": "ends soon", "team": None, "labels": {}, "models": ["sim/*"], "expires": 0, "hashes": 1, "hashes_end": [],
        "tokens": False, "limits": {}, "last_used": None,
    }  # fmt: skip
    assert "sha256" not in call(one, "/keys", SHOWN, "GET").text
    assert call(one, "/keys", method="GET").status_code == 401
    shown = one.command("keys", "list").stdout
    assert listed["team-a"]["last_used"][:16] in shown and "ends soon" in shown


def test_a_gateway_is_drained(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with gateway(tmp_path, configuration(launched(), admin={"port": 0, "token": {"file": "token"}}, linger="1h")) as draining:
        response = call(draining, "/drain", SHOWN)
        assert (response.status_code, response.json()) == (202, {"draining": True})
        assert draining.get("/readyz").status_code == 503
        again = call(draining, "/drain", SHOWN)
        assert (again.status_code, again.json()["error"]) == (409, "the gateway is stopping")
        assert draining.request().status_code == 200, "it lingers"
        assert draining.command("drain").returncode == 1
        assert draining.stop() == 0


def test_a_gateway_is_drained_by_a_command(tmp_path: Path) -> None:
    with gateway(tmp_path, configuration(launched())) as draining:
        assert draining.command("drain").stdout == "the gateway is stopping; open requests finish first\n"
        assert draining.process.wait(60) == 0
        assert "drain requested by uid " in draining.output
