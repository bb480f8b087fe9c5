"""Secrets and prompts do not leak: each contains a canary, and every output is searched for it."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from gateway.auth import keys
from gateway.auth.catalog import Catalog, CatalogEntry
from gateway.snapshot.snapshot import Key
from gateway.system import logs
from tests.faults.invariants import unharmed
from tests.support.ports import refusing
from tests.support.process import Gateway, command_line, configuration, gateway, launched, wait_for
from tests.support.running import KEY, key, model
from tests.support.wire import request, request_once

CANARY = "canary4d71"
SECRETS = {name: f"{CANARY}-{name}" for name in ("admin", "server", "salt", "launched", "failing")}
GOOD, BAD, EXPIRED = f"sk-{CANARY}-good", f"sk-{CANARY}-bad", f"sk-{CANARY}-expired"
PROMPT = f"{CANARY}-prompt"


def _config(port: int) -> dict[str, Any]:
    secret = {name: {"env": f"TEST_{name.upper()}"} for name in SECRETS}
    tokens: dict[str, Any] = {"sim-tokens": 3}
    good = launched("sim/one", **tokens)
    good["launch"]["env"] = {"ITS_SECRET": secret["launched"]}
    failing = {
        "id": "failing",
        "launch": {"command": [sys.executable, "-c", "raise SystemExit('no')"], "env": {"ITS_SECRET": secret["failing"]}},
    }
    dead = {"id": "dead", "servers": [{"url": f"http://127.0.0.1:{port}", "api_key": secret["server"]}]}
    config = configuration(good, failing, dead, admin={"port": 0, "token": secret["admin"]})
    config["keys"] = [{"id": "a", "hash": keys.hash_of(GOOD)}, {"id": "b", "hash": keys.hash_of(EXPIRED), "expires": "2020-01-01"}]
    return config | {"log": {"level": "debug", "sample": 1.0}, "isolate_prefix_cache": {"secret": secret["salt"]}}


def _bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield requests that succeed, and requests that fail in every possible way."""
    message = {"role": "user", "content": PROMPT}
    good = {"model": "sim/one", "messages": [message]}
    yield from (("/v1/chat/completions", good | more) for more in _MORE)
    yield "/v1/completions", {"model": "sim/one", "prompt": PROMPT, "user": PROMPT}
    yield "/v1/messages", good | {"max_tokens": 3}
    yield "/v1/messages", good | {"max_tokens": "x"}
    yield "/v1/responses", {"model": "sim/one", "input": PROMPT, "store": True}
    yield "/v1/embeddings", {"model": "sim/one", "input": [PROMPT]}
    yield f"/{GOOD}", good
    yield f"/v1/chat/completions?key={GOOD}", good


_MORE: list[dict[str, Any]] = [
    {},
    {"stream": True},
    {"model": "dead"},
    {"model": "failing"},
    {"temperature": PROMPT},
    {"stream": PROMPT},
    {"n": PROMPT},
    {"chat_template": PROMPT},
    {"extra_body": PROMPT},
    {"tools": [{"type": "function", "function": {"name": PROMPT}}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://{CANARY}/"}}]}]},
    {"max_tokens": 10**9},
    {"prompt": PROMPT},
    {PROMPT: 1, "metadata": {PROMPT: PROMPT}, "response_format": {"type": PROMPT, "json_schema": {"schema": {PROMPT: {}}}}},
]


def _errors(one: Gateway) -> list[bytes]:
    """Send all requests and return the bodies of all error responses."""
    with httpx2.Client(base_url=one.url, timeout=60, verify=False) as client:
        shown = [{"authorization": f"Bearer {token}"} for token in (GOOD, BAD, EXPIRED, GOOD[:-1], f"{GOOD} {BAD}", "x" * 600)]
        responses = [client.post(path, json=body, headers=headers) for path, body in _bodies() for headers in shown]
        responses += [client.post("/v1/messages", json={}, headers={"x-api-key": token}) for token in (GOOD, BAD)]
        raw = f'{{"model": "sim/one", "a": {PROMPT}'.encode()
        responses.append(client.post("/v1/chat/completions", content=raw, headers=shown[0] | {"content-type": "application/json"}))
        responses.append(
            client.post(
                "/v1/audio/transcriptions", data={"model": "sim/one", "vllm_xargs": PROMPT}, files={"file": (PROMPT, b"")}, headers=shown[0]
            )
        )
        responses.append(client.get(f"/v1/models/{PROMPT}", headers={"authorization": f"Bearer {PROMPT}"}))
    assert {response.status_code for response in responses} >= {200, 400, 401, 404, 503}
    return [response.content for response in responses if response.status_code >= 400]


def _command_lines(one: Gateway) -> str:
    return "\n".join(" ".join(command_line(each)) for each in [psutil.Process(one.process.pid), *one.tree()])


def _check_that_servers_have_only_their_own_secrets(one: Gateway) -> None:
    environ = one.named("upstream.simulator")[-1].environ()
    assert environ["ITS_SECRET"] == SECRETS["launched"]
    assert not {SECRETS[name] for name in ("admin", "server", "salt")} & set(environ.values())


@pytest.mark.row(20)
def test_no_canary_is_in_any_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Callable[[str], None]) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(f"TEST_{name.upper()}", value)
    admin = {"authorization": f"Bearer {SECRETS['admin']}"}
    with refusing() as port, gateway(tmp_path, _config(port)) as one:
        errors = _errors(one)
        wait_for(lambda: len(one.log.splitlines()) > 50)
        _check_that_servers_have_only_their_own_secrets(one)
        os.kill(one.workers()[0], signal.SIGKILL)
        one.named("upstream.simulator")[-1].kill()
        wait_for(lambda: httpx2.get(one.url + "/health", timeout=10, verify=False).status_code == 200)
        outputs = {f"an error's body: {body[:60]!r}": body for body in errors}
        outputs |= {
            path: httpx2.get(f"http://127.0.0.1:{one.admin}{path}", headers=admin, timeout=10, verify=False).content
            for path in ("/metrics", "/status", "/console", *(f"/admin/v1/{each}" for each in ("models", "overview", "configuration")))
        }
        shown = one.command("status")
        command = one.command("command", "failing")
        outputs |= {"status": shown.stdout.encode(), "command": (command.stdout + command.stderr).encode()}
        outputs["ps"] = _command_lines(one).encode()
        assert (
            shown.returncode == command.returncode == 0
            and b"sim/one" in outputs["/admin/v1/models"]
            and b"vllm_gateway" in outputs["/metrics"]
        )
    outputs |= {str(file.relative_to(tmp_path)): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert len([name for name in outputs if name.endswith(".log")]) == 2, sorted(outputs)
    found = [name for name, text in outputs.items() if CANARY.encode() in text]
    assert found == []
    lines = len(outputs["stdout"].splitlines())
    assert b'"request":{' in outputs["stdout"], "and the shapes of bodies are there"
    measured(f"{len(outputs)} outputs searched after {lines} requests at log level debug: 0 hits")
    assert KEY.encode() not in outputs["stdout"]


class _Broken(Catalog):
    """A catalog that fails with an error whose message contains secrets."""

    def resolve(self, name: object, key: Key, mounted: CatalogEntry | None = None) -> CatalogEntry:
        try:
            raise KeyError(name, GOOD)
        except KeyError:
            raise ValueError(f"{PROMPT}, {name} and {GOOD}: {key!r}") from None


@pytest.mark.row(20)
@pytest.mark.parametrize("formatter", [logs.TextFormatter, logs.JsonFormatter])
async def test_no_canary_in_a_trace(formatter: Callable[[str], logging.Formatter], measured: Callable[[str], None]) -> None:
    written = io.StringIO()
    handler = logs.Handler(written)
    handler.setFormatter(formatter("worker 0"))
    logger = logging.getLogger("vllm_gateway")
    logger.addHandler(handler)
    try:
        async with unharmed([model(1)], [key(token=GOOD)]) as served:
            served.context.active = replace(served.context.active, catalog=_Broken((), {}))
            for path, body in _bodies():
                reply = await request_once(served.port, request(body | {"model": f"{CANARY}-model"}, path, token=GOOD))
                assert reply.status in (400, 404, 500) and CANARY.encode() not in reply.body
    finally:
        logger.removeHandler(handler)
    text = written.getvalue()
    assert "ValueError" in text and "test_secrets.py" in text, "the trace is there"
    assert CANARY not in text
    measured(f"{text.count('ValueError')} forced tracebacks: types and positions only, 0 hits")
