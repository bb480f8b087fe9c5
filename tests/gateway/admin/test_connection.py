"""Connections of the admin port: a client that does not read keeps nothing open."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil

from tests.support.process import configuration, gateway, wait_for


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
