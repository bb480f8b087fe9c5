"""Hostile bytes for the admin port and its Unix socket: nothing is accepted without the token, and the gateway still serves afterwards."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from gateway.admin.unix_socket import socket_path
from tests.proxies import secrets
from tests.proxies.run import until_quiet
from tests.proxies.traffic import KINDS, Client, hostile
from tests.support.process import configuration, gateway, launched, wait_for

CONNECTIONS = 150
PROBES = 3
"""Descriptors that control may hold for a moment, for a probe of its server."""
PATHS = (b"/status", b"/reload", b"/models/m/stop", b"/keys", b"/metrics")


@pytest.mark.parametrize("unix", [False, True])
def test_hostile_bytes(unix: bool, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("admin-token-of-this-test-0123456789")
    config = configuration(launched(), admin={"port": 0, "token": {"file": str(token)}})
    with gateway(tmp_path, config) as one:
        process = psutil.Process(one.process.pid)
        assert one.command("status").returncode == 0
        descriptors = process.num_fds()
        path = socket_path(one.folder / "gateway.yaml", {"XDG_RUNTIME_DIR": str(one.runtime)})
        control = path if unix else one.admin
        statuses = asyncio.run(_attacked(control))
        assert statuses, "nothing was answered"
        if not unix:  # the socket's file permissions are its authentication
            assert not {status for status in statuses if status.startswith(b"2")}
        assert one.request().status_code == 200
        assert one.command("status").returncode == 0
        wait_for(lambda: process.num_fds() <= descriptors + PROBES)


async def _attacked(control: Path | int) -> set[bytes]:
    """Send hostile requests to protected paths. Return the statuses of all responses."""
    dice, statuses = random.Random(1), set[bytes]()
    credentials = [b"Bearer wrong-%d" % number for number in range(secrets.KEYS)]
    for number in range(CONNECTIONS):
        _, plan = hostile(Client(dice, number, credentials), tuple(KINDS))
        path = dice.choice(PATHS)
        opened = asyncio.open_unix_connection(control) if isinstance(control, Path) else asyncio.open_connection("127.0.0.1", control)
        reader, writer = await opened
        with suppress(ConnectionError):
            for piece in plan.pieces:
                writer.write(piece.replace(b"/v1/chat/completions", path))
                await asyncio.sleep(0)
            if not plan.disconnects:
                statuses |= {part[:3] for part in (await until_quiet(reader)).split(b"HTTP/1.1 ")[1:]}
        writer.transport.abort()
    return statuses
