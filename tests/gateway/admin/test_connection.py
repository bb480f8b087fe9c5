"""Connections of the admin port: a client that does not read keeps nothing open."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import AsyncGenerator
from pathlib import Path

import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gateway.admin.connection import AdminConnections, AdminProtocol
from gateway.snapshot.snapshot import Clients
from tests.support.process import configuration, gateway, wait_for
from tests.support.running import until


def test_a_client_that_does_not_read_its_responses_is_disconnected(tmp_path: Path) -> None:
    far = {"id": "far", "servers": [{"url": "http://127.0.0.1:1"}]}
    with gateway(tmp_path, configuration(far, write_timeout="1s")) as one, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", one.admin))

        def is_open() -> bool:
            peers = psutil.Process(one.process.pid).net_connections("tcp4")
            return client.getsockname() in [each.raddr for each in peers]

        client.sendall(b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 500)  # more than the sockets hold
        wait_for(is_open)
        wait_for(lambda: not is_open())
        assert one.get("/livez").status_code == 200


async def test_a_client_that_never_reads_its_events_keeps_no_stream() -> None:
    """The events fit into the buffers of the sockets, so the gateway has written all of them. The test has the clock."""
    sent, ended, clients = 0, asyncio.Event(), Clients()

    async def small_events() -> AsyncGenerator[bytes]:
        nonlocal sent
        try:
            while sent < 40:
                sent += 1
                yield b"data: " + bytes(1000) + b"\n\n"
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def events(_: Request) -> Response:
        return StreamingResponse(small_events(), media_type="text/event-stream")

    config = uvicorn.Config(Starlette(routes=[Route("/", events)]), log_config=None, lifespan="off")
    config.load()
    connections, state, loop = AdminConnections(), uvicorn.Server(config).server_state, asyncio.get_running_loop()
    server = await loop.create_server(functools.partial(AdminProtocol, config, state, {}, connections=connections), "127.0.0.1", 0)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.sockets[0].getsockname())
        client.sendall(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        await until(lambda: sent == 40)
        for now in (0.0, clients.write_timeout - 1):
            connections.check(now, clients)
            assert not ended.is_set()
        connections.check(clients.write_timeout + 1, clients)
        await asyncio.wait_for(ended.wait(), 60)
    server.close()
