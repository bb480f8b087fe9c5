"""The demo, as a newcomer sees it."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import psutil

from gateway.cli.demo import CHAT, EMBEDDING
from tests.support.process import PROGRAM, wait_for


@contextmanager
def demo(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run the demo. Yield what it has printed up to the curl line, and its process."""
    line = [str(PROGRAM), "demo", *options]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        try:
            assert running.stdout is not None
            printed = []
            for each in running.stdout:
                printed.append(each)
                if each.startswith("curl "):
                    break
            yield "".join(printed), running
        finally:
            running.send_signal(signal.SIGINT)


def addresses(text: str) -> tuple[str, str, str, str]:
    """Return the addresses of the data and the admin port, the key and the token."""
    portal, console, curl = text.splitlines()[-3:]
    found = re.fullmatch(r"portal:  open (http://127\.0\.0\.1:\d+)/portal#key=(\S+)", portal)
    other = re.fullmatch(r"console: open (http://127\.0\.0\.1:\d+)/console#key=(\S+)", console)
    assert found is not None and other is not None and curl.startswith(f"curl -sN {found[1]}/v1/chat/completions")
    return found[1], other[1], found[2], other[2]


def rows(admin: str, token: str, *by: str) -> dict[tuple[str | None, ...], int]:
    """Return the number of requests in each group."""
    report = httpx2.get(f"{admin}/usage?by={','.join(by)}", headers={"authorization": f"Bearer {token}"}, timeout=60).json()
    return {tuple(row[name] for name in by): row["requests"] for row in report["usage"]}


def test_the_demo_ends_with_three_lines_that_work_and_has_something_to_show() -> None:
    with demo() as (text, running):
        assert "the text of their responses is made up" in text
        data, admin, key, token = addresses(text)
        reply = subprocess.run(shlex.split(text.splitlines()[-1]), capture_output=True, text=True, timeout=60)
        text_of_reply = "".join(re.findall(r'"content":"([^"]*)"', reply.stdout))
        assert text_of_reply.startswith("This text is made up by a simulator.") and '"reasoning"' in reply.stdout
        mine, of_operator = {"authorization": f"Bearer {key}"}, {"authorization": f"Bearer {token}"}
        shown = httpx2.get(f"{data}/v1/models", headers=mine, timeout=60).json()["data"]
        assert {CHAT: "loaded", EMBEDDING: "loaded"}.items() <= {one["id"]: one["status"]["value"] for one in shown}.items()
        assert all("pricing" in one for one in shown)
        limits = httpx2.get(f"{data}/v1/limits", headers=mine, timeout=60).json()["limits"]
        assert {one["holder"] for one in limits} == {"key demo", "team research"}
        wait_for(lambda: {("demo", CHAT), ("notebook", CHAT), ("assistant", EMBEDDING)} <= rows(admin, token, "key", "model").keys())
        assert rows(admin, token, "code").keys() <= {(None,), ("rate_limit_exceeded",)}
        stored = httpx2.get(f"{admin}/admin/v1/keys", headers=of_operator, timeout=60).json()["keys"]
        assert [(each["id"], each["team"]) for each in stored] == [("trial", "support")]
        wait_for(lambda: ("trial",) in rows(admin, token, "key"))
        revoke = f"{admin}/admin/v1/keys/trial/revoke"
        assert httpx2.post(revoke, headers=of_operator | {"if-match": "*"}, timeout=60).json()["state"] == "revoked"
        for route in ("/admin/v1/keys", "/admin/v1/teams", "/admin/v1/requests", "/status", "/limits"):
            assert httpx2.get(f"{admin}{route}", headers=of_operator, timeout=60).status_code == 200, route
        assert httpx2.get(f"{admin}/usage", timeout=60).status_code == 401
        children = psutil.Process(running.pid).children(recursive=True)
    assert running.returncode == 0
    wait_for(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))


def test_without_traffic_nothing_is_sent() -> None:
    with demo("--no-traffic") as (text, _):
        _, admin, _, token = addresses(text)
        subprocess.run(shlex.split(text.splitlines()[-1]), capture_output=True, timeout=60)
        assert wait_for(lambda: rows(admin, token, "key")) == {("demo",): 1}
