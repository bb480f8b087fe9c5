"""Which connections are closed when descriptors run out, and that no others are."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from gateway.client.eviction import Unauthenticated
from tests.faults.test_clients import connected, faults
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.running import KEY
from tests.support.wire import chat, request

MODEL = "sim/one"
LIMIT = 256
IDLE = 400
STREAM = request(chat(model=MODEL, stream=True, simulate={"tokens": 20, "tokens_per_second": 4}))


class Connection:
    def __init__(self, *, has_valid_key: bool = False, is_idle: bool = True) -> None:
        self.has_valid_key = has_valid_key
        self.is_idle = is_idle
        self.is_evicted = False

    def evict(self) -> None:
        self.is_evicted = True


@pytest.fixture
def limit() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, before[1]))
    yield LIMIT
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("descriptor", "evicted"), [(100, 0), (223, 0), (224, 1), (230, 7), (255, 32)])
def test_as_many_as_are_missing_from_the_reserve(limit: int, descriptor: int, evicted: int) -> None:
    unauthenticated, connections = Unauthenticated(), [Connection() for _ in range(40)]
    for each in connections:
        unauthenticated.add(each)
    unauthenticated.relieve(descriptor)
    assert [each.is_evicted for each in connections] == [True] * evicted + [False] * (40 - evicted), "the oldest first"


def test_what_serves_and_what_a_key_has_stays(limit: int) -> None:
    unauthenticated = Unauthenticated()
    key, serves, gone, idle = Connection(has_valid_key=True), Connection(is_idle=False), Connection(), Connection()
    for each in (key, serves, gone, idle):
        unauthenticated.add(each)
    unauthenticated.remove(gone)
    unauthenticated.relieve(limit - 1)
    assert [each.is_evicted for each in (key, serves, gone, idle)] == [False, False, False, True]
    serves.is_idle = True
    key.has_valid_key = False
    unauthenticated.relieve(limit - 1)
    assert serves.is_evicted and not key.is_evicted, "once a key has been seen it stays"
    assert not len(unauthenticated)


def test_with_free_descriptors_no_connection_is_evicted(limit: int) -> None:
    unauthenticated, one = Unauthenticated(), Connection()
    unauthenticated.add(one)
    unauthenticated.relieve()
    assert not one.is_evicted


def test_without_a_free_descriptor_the_whole_reserve_is_evicted(limit: int) -> None:
    unauthenticated, connections = Unauthenticated(), [Connection() for _ in range(40)]
    for each in connections:
        unauthenticated.add(each)
    with ExitStack() as stack:
        with suppress(OSError):  # no free descriptor
            while True:
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        unauthenticated.relieve()
    assert [each.is_evicted for each in connections] == [True] * 32 + [False] * 8


def _worker(running: Gateway) -> psutil.Process:
    return psutil.Process(running.workers()[0])


def _status(one: socket.socket) -> bytes:
    one.settimeout(30)
    return one.recv(12)


@pytest.mark.parametrize("workers", [1, 2])
def test_new_clients_are_served_beside_idle_connections_without_number(tmp_path: Path, workers: int) -> None:
    config = configuration(launched(MODEL), headers_timeout="600s", workers=workers)
    with gateway(tmp_path, config) as running, ExitStack() as stack:
        for pid in running.workers().values():
            psutil.Process(pid).rlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        (key,), (stream,) = connected(stack, running, 1), connected(stack, running, 1)
        key.sendall(request(chat(model=MODEL)))
        assert _status(key) == b"HTTP/1.1 200"
        for number in range(workers * IDLE):
            (one,) = connected(stack, running, 1)
            if number % 3:
                one.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n" if number % 3 == 1 else request()[:50])
            if number == 100:
                stream.sendall(STREAM)
            if number % 20 == 0:
                assert running.request().status_code == 200, "a new client is served at once"
        assert faults(running, "evicted") >= workers * (IDLE - LIMIT)
        assert _status(stream) == b"HTTP/1.1 200"
        wait_for(lambda: b"[DONE]" in stream.recv(65536))
        assert key.recv(65536)
        key.sendall(request(chat(model=MODEL), token=KEY))
        assert _status(key) == b"HTTP/1.1 200", "a key's connection stays, idle or not"
        assert "connections cannot be accepted" not in running.output
        wait_for(lambda: f"the process may have only {LIMIT} file descriptors" in running.output)
