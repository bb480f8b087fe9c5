"""Run the gateway for the third-party clients, and collect each client's report.

Owns the task that every client gets and the running of its script. Each client has its own key and texts, so that the gateway's
log and the servers' journals tell one client from another.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from gateway.auth import keys
from tests.clients.install import LOCKS, NODE, ROOT, environment, installed
from tests.clients.overloaded import Overloaded, overloaded
from tests.support.process import Gateway, command_line, configuration, gateway, launched, wait_for

MODEL, BUSY = "sim/one", "busy/one"
HELLO, WEATHER = "Say hello.", "What is the weather in Oslo?"
TOO_LONG = "word " * 3000
SLOW = {"simulate": {"tokens": 1500, "tokens_per_second": 100}}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SERVER = {"enable-auto-tool-choice": True, "tool-call-parser": "hermes", "max-model-len": 2048}


@dataclass(frozen=True, slots=True)
class Client:
    """A third-party client. ``environment``: of install.py; None for the project's. ``refusals``: the classes for a wrong key, an
    unknown model and a text that is too long. ``reports_code``: its errors have the gateway's code. ``waits``: it honors Retry-After,
    and would wait less without it."""

    name: str
    environment: str | None
    script: str
    refusals: tuple[str, str, str]
    reports_code: bool = False
    waits: bool = True


def key_of(client: str) -> str:
    return f"sk-of-{client}"


@dataclass
class Visit:
    """A running gateway with a simulator and an overloaded server."""

    gateway: Gateway
    overloaded: Overloaded
    home: Path
    _reports: dict[str, dict[str, Any]] = field(default_factory=dict)

    def task(self, client: str) -> dict[str, Any]:
        """Return the task of a client; scripts/report.py lists its fields."""
        return {
            "client": client,
            "url": self.gateway.url,
            "key": key_of(client),
            "wrong_key": "sk-nobody-has-this-one",
            "model": MODEL,
            "unknown_model": "nobody/knows",
            "busy_model": BUSY,
            "hello": HELLO,
            "weather": WEATHER,
            "too_long": TOO_LONG,
            "again": f"Again, {client}!",
            "cancel": f"Go on until {client} has heard enough.",
            "slow": SLOW,
            "tool": TOOL,
        }

    def report(self, client: Client) -> dict[str, Any]:
        """Return the output of a client's script, which is run once. Skip the test without its environment."""
        if client.name not in self._reports:
            self._reports[client.name] = self._run(client)
        return self._reports[client.name]

    def _run(self, client: Client) -> dict[str, Any]:
        own = {"TASK": json.dumps(self.task(client.name)), "HOME": str(self.home), "NO_PROXY": "*"}
        quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
        ended = subprocess.run(
            command(client), env={**os.environ, **own, **quiet}, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200
        )
        assert ended.returncode == 0, ended.stderr
        report: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return report

    def spoken(self, text: str = HELLO) -> str:
        """Return the model's response to a text."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
        headers = {"authorization": f"Bearer {key_of('curl')}"}
        response = httpx2.post(f"{self.gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        output: str = response.json()["choices"][0]["message"]["content"]
        return output

    def journal(self) -> list[dict[str, Any]]:
        """Return the requests that the simulator has received, from its private socket."""
        [socket] = {argument for each in self.gateway.tree() for argument in command_line(each) if re.search(r"/[^/]+\.sock$", argument)}
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=socket), base_url="http://simulator", timeout=60) as server:
            entries: list[dict[str, Any]] = server.get("/sim/requests").json()
        return entries

    def log(self, client: str) -> list[dict[str, Any]]:
        """Return the gateway's access-log lines of a client's requests."""
        return [line for line in map(orjson.loads, self.gateway.log.splitlines()) if line.get("key") == client]

    def ended_early(self, client: str) -> dict[str, Any]:
        """Return the simulator's entry of the response that a client did not read to the end. Wait until the simulator has detected it."""
        text = self.task(client)["cancel"]
        [entry] = wait_for(lambda: [each for each in self.journal() if each["outcome"] != "open" and text in json.dumps(each["body"])])
        return dict(entry)


def command(client: Client) -> list[str]:
    """Return the command line of a client's script. Skip the test if its environment is not installed."""
    if client.script.endswith(".mjs"):
        return [_node(), str(NODE / client.script)]
    if shutil.which("curl") is None and client.name == "curl":
        pytest.skip("curl is not installed")
    return [_python(client.environment), "-m", f"tests.clients.scripts.{client.script}"]


def _python(name: str | None) -> str:
    if name is None:
        return sys.executable
    target = environment(name)
    if not installed(target, LOCKS / f"{name}.lock"):
        pytest.skip(f"{target.name} is not installed (make clients)")
    return str(target / "bin" / "python")


def _node() -> str:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    if not installed(NODE / "node_modules", NODE / "package-lock.json"):
        pytest.skip("the packages for node are not installed (make clients)")
    return node


@contextmanager
def visiting(folder: Path, clients: tuple[str, ...], **server: Any) -> Iterator[Visit]:
    """Run the gateway with a key for each client."""
    with overloaded() as busy:
        there = {"id": BUSY, "servers": [{"url": f"http://127.0.0.1:{busy.port}"}]}
        document = configuration(launched(MODEL, **SERVER), there, **server)
        document["keys"] = [{"id": client, "hash": keys.hash_of(key_of(client))} for client in clients]
        with gateway(folder, document) as running:
            yield Visit(running, busy, folder)
