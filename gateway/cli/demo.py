"""The demo: a gateway with two simulated models that it launches, teams with budgets, light traffic, and addresses to open.

Owns a temporary folder with the configuration, the ledger and the token of the admin port, which is removed at the end. The gateway itself
does not know about the demo.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, TextIO

import httpx2
import yaml

from gateway.auth import keys
from gateway.control.serve import serve
from gateway.control.startup_messages import Announcer
from upstream.launcher.ports import free_port

CHAT, EMBEDDING = "demo/qwen3", "demo/embedding"
_PORTS = (8000, 9090)
_PREFACE = "This text is made up by a simulator."
_TOKEN, _AUDIT = "admin.token", "audit.secret"
_BURST = 24
"""Requests of the traffic at the start, so that the pages have something to show."""
_PAUSE = 12.0
"""Seconds between the later ones."""
_STORED = {
    "id": "trial",
    "name": "To try: revoke, rotate or raise it",
    "team": "support",
    "limits": {"requests_per_minute": 5, "tokens_per_day": 20_000},
}
"""The key that is in the store, so that the console can change it."""
_QUESTIONS = ("What is a queue?", "Write a title for a page about tea.", "How many days has a leap year?", "Name three rivers.")


def run(*, traffic: bool) -> int:
    """Serve the demo until SIGTERM or Ctrl-C, and return the exit code. ``traffic``: whether it sends requests itself."""
    secrets_of = {name: keys.mint(name) for name in ("demo", "notebook", "assistant")}
    token = secrets.token_urlsafe(24)
    with tempfile.TemporaryDirectory(prefix="vllm-gateway-demo-") as folder:
        file = Path(folder) / "gateway.yaml"
        data, admin = map(_free, _PORTS)
        for name, text in ((_TOKEN, token), (_AUDIT, secrets.token_urlsafe(32))):
            (Path(folder) / name).write_text(text)
            (Path(folder) / name).chmod(0o600)
        file.write_text(yaml.safe_dump(configuration(secrets_of, data, admin), sort_keys=False))
        os.environ["XDG_STATE_HOME"] = folder  # so that the launched servers' logs are removed with the folder
        shown = _SHOWN.format(data=data, admin=admin, key=secrets_of["demo"], token=token, model=CHAT)
        client = _Client(data, admin, token, [*secrets_of.values()], traffic)
        with client.running() as start, _access_log_in(Path(folder) / "access.log") as terminal:
            return serve(file, _DemoAnnouncer(shown, terminal, start))


def configuration(secrets_of: Mapping[str, str], data: int, admin: int) -> dict[str, Any]:
    """Return the configuration of the demo. ``secrets_of`` has the keys by ID."""
    limits: Mapping[str, Any] = {
        "demo": {"requests_per_minute": 60, "tokens_per_day": 200_000, "cost_per_month": 5},
        "notebook": {"tokens_per_day": 4_000},
        "assistant": {"requests_per_minute": 6, "concurrent": 4},
    }
    teams = {"demo": "research", "notebook": "research", "assistant": "support"}
    parsers = {"reasoning-parser": "qwen3", "enable-auto-tool-choice": True, "tool-call-parser": "qwen3_coder"}
    return {
        "server": {"host": "127.0.0.1", "port": data, "portal": True, "admin": {"port": admin, "token": {"file": _TOKEN}}},
        "ledger": "sqlite:///usage.db",
        "store": "ledger",
        "audit": {"secret": {"file": _AUDIT}},
        "log": {"level": "warning"},  # other lines would scroll the addresses away
        "models": [
            _model(CHAT, "demo", {"prompt": 0.5, "completion": 2, "cached": 0.05}, parsers | {"max-model-len": 32768}),
            _model(EMBEDDING, "embedding", {"prompt": 0.02}, {"max-model-len": 8192}) | {"task": "embedding", "capabilities": []},
        ],
        "teams": [
            {"id": "research", "limits": {"cost_per_month": 20, "tokens_per_day": 1_000_000}},
            {"id": "support", "limits": {"cost_per_day": 2}},
        ],
        "keys": [
            {"id": name, "team": teams[name], "hash": keys.hash_of(secret), "limits": limits[name]} for name, secret in secrets_of.items()
        ],
    }


def _model(identity: str, alias: str, price: Mapping[str, float], args: Mapping[str, Any]) -> dict[str, Any]:
    simulator = {"command": [sys.executable, "-P", "-m", "upstream.simulator"], "args": {**args, "sim-preface": _PREFACE}}
    return {"id": identity, "aliases": [alias], "price": dict(price), "launch": simulator}


class _DemoAnnouncer(Announcer):
    """Prints where to go when the models are up, and starts the traffic."""

    def __init__(self, text: str, terminal: TextIO, start: Event) -> None:
        super().__init__()
        self._text = text
        self._terminal = terminal
        self._start = start

    def serving(self, up: int, total: int) -> None:
        super().serving(up, total)
        if up:
            print(self._text, file=self._terminal, flush=True)
            self._start.set()


_SHOWN = """
The models are simulated: the text of their responses is made up. Press Ctrl-C to stop.

portal:  open http://127.0.0.1:{data}/portal#key={key}
console: open http://127.0.0.1:{admin}/console#key={token}
curl -sN http://127.0.0.1:{data}/v1/chat/completions -H "Authorization: Bearer {key}" -H "Content-Type: application/json" \
-d '{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'"""


@contextmanager
def _access_log_in(file: Path) -> Iterator[TextIO]:
    """Send standard output, which is the access log's, to a file: it would scroll the addresses away. Yield the former one."""
    output = sys.stdout.fileno()
    with open(os.dup(output), "w") as terminal, open(file, "wb") as log:
        os.dup2(log.fileno(), output)
        try:
            yield terminal
        finally:
            os.dup2(terminal.fileno(), output)


@dataclass(frozen=True, slots=True)
class _Client:
    """Creates the key of the store, and sends requests if ``sends`` is true. ``secrets`` are the keys of the file."""

    data: int
    admin: int
    token: str
    secrets: Sequence[str]
    sends: bool

    @contextmanager
    def running(self) -> Iterator[Event]:
        """Run from the moment at which the event is set, until the end of the context."""
        start, ended = Event(), Event()
        thread = Thread(target=self._run, args=(start, ended), name="demo traffic")
        thread.start()
        try:
            yield start
        finally:
            ended.set()
            start.set()
            thread.join()

    def _run(self, start: Event, ended: Event) -> None:
        start.wait()
        with httpx2.Client(trust_env=False, timeout=10) as client, suppress(httpx2.HTTPError):  # the gateway may stop at any time
            if not ended.is_set():
                self._send(client, self._create_key(client), ended)

    def _create_key(self, client: httpx2.Client) -> str:
        headers = {"authorization": f"Bearer {self.token}"}
        made = client.post(f"http://127.0.0.1:{self.admin}/admin/v1/keys", json=_STORED, headers=headers)
        secret: str = made.raise_for_status().json()["secret"]
        return secret

    def _send(self, client: httpx2.Client, stored: str, ended: Event) -> None:
        senders = [*self.secrets, *self.secrets, stored]
        for number in itertools.count():
            if not self.sends or ended.wait(0.05 if number < _BURST else _PAUSE):
                return
            path, body = _request(number)
            headers = {"authorization": f"Bearer {senders[number % len(senders)]}", "user-agent": "demo-traffic"}
            with suppress(httpx2.HTTPError):
                client.post(f"http://127.0.0.1:{self.data}{path}", json=body, headers=headers)


def _request(number: int) -> tuple[str, dict[str, Any]]:
    question = _QUESTIONS[number % len(_QUESTIONS)]
    if number % 4 == 3:
        return "/v1/embeddings", {"model": EMBEDDING, "input": question}
    return "/v1/chat/completions", {"model": CHAT, "stream": number % 2 == 0, "messages": [{"role": "user", "content": question}]}


def _free(port: int) -> int:
    """Return a port if it is free, else another free port."""
    with suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return port
    return free_port()
