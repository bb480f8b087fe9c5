"""Hints about a server whose probe failed."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import pytest

from upstream.http.address import Address
from upstream.vllm.health import HealthCheck, ProbeTarget
from upstream.vllm.probe_hints import probe_hint


def reason_of(url: str) -> str:
    """Return the reason of a real probe that fails."""
    seen = asyncio.run(HealthCheck(ProbeTarget("m#0", Address.parse(url)), 5.0).run(models=True))
    assert seen is not None
    return seen.reason


def test_a_server_that_does_not_run() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as closed:
        port = closed.getsockname()[1]
    assert probe_hint(reason_of(f"http://127.0.0.1:{port}")).startswith("Nothing listens at this address. Start the server")
    assert probe_hint(reason_of("unix:/no/such.sock")).startswith("The unix socket does not exist")
    assert probe_hint(reason_of("http://no-such-host.invalid:8000")).startswith("The host name cannot be resolved")


@pytest.mark.parametrize(
    ("reason", "begins"),
    [
        ("GET /health: status 401", "The server rejects the gateway's key"),
        ("the server rejected the gateway's key", "The server rejects the gateway's key"),
        ("GET /health: status 404", "This is no vLLM server"),
        ("GET /health: TimeoutError", "The server does not respond"),
        ("GET /health: status 500", ""),
    ],
)
def test_what_to_do_about_a_reason(reason: str, begins: str) -> None:
    assert probe_hint(reason).startswith(begins) and bool(probe_hint(reason)) == bool(begins)
