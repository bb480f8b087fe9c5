"""Ports of this machine: which are free, and which process has a port."""

from __future__ import annotations

import os
import socket
from contextlib import closing

import pytest

from upstream.launcher.ports import PortTaken, check_free, free_port


def test_a_port_on_which_a_process_listens_is_taken_by_it() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(PortTaken, match=rf"^port {port} of {host} is taken by process {os.getpid()} \(.+\)$"):
                check_free(host, port)
    check_free("127.0.0.1", port)


def test_a_port_that_is_only_bound_is_taken_by_no_visible_process() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"^port {port} of 127.0.0.1 is taken$"):
            check_free("127.0.0.1", port)


def test_an_address_of_another_machine_is_left_for_the_server_to_report() -> None:
    check_free("192.0.2.1", free_port())
