"""Whole gateways with keys in a store, as an operator runs them and changes their keys."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from tests.support.constant_load import Counts, constant_load
from tests.support.process import Gateway, configuration, gateway, wait_for
from tests.support.running import KEY

TOKEN = "an-admin-token-of-the-tests"
SERVER = {"id": "sim/one", "servers": [{"url": "http://127.0.0.1:9"}]}  # authentication needs no server
KEYS, TEAMS = "/admin/v1/keys", "/admin/v1/teams"
ANY = {"if-match": "*"}


def settings(store: Any, *models: dict[str, Any], workers: int = 2, **more: Any) -> dict[str, Any]:
    admin = {"port": 0, "token": {"env": "ADMIN_TOKEN"}}
    return configuration(*(models or (SERVER,)), workers=workers, admin=admin) | {"store": store} | more


@contextmanager
def running(folder: Path, config: dict[str, Any] | None, **more: Any) -> Iterator[Gateway]:
    folder.mkdir(exist_ok=True)
    with gateway(folder, config, variables={"ADMIN_TOKEN": TOKEN}, ready=False, **more) as one:
        wait_for(lambda: one.process.poll() is not None or status_of(one, KEY) == 200, 60, why=lambda: one.output)
        yield one


def send(one: Gateway, method: str, path: str, *, headers: dict[str, str] | None = None, **more: Any) -> httpx2.Response:
    named = {"authorization": f"Bearer {TOKEN}", **(headers or {})}
    return httpx2.request(method, f"http://127.0.0.1:{one.admin}{path}", headers=named, timeout=60, verify=False, **more)


def create(one: Gateway, identity: str, **fields: Any) -> str:
    reply = send(one, "POST", KEYS, json={"id": identity, **fields})
    assert reply.status_code == 201, reply.text
    secret: str = reply.json()["secret"]
    return secret


def status_of(one: Gateway, token: str, count: int = 1) -> int:
    """Return the status that every one of some connections gets; -1 if it differs. They are accepted by all workers."""
    found: set[int] = set()
    for _ in range(count):
        try:
            found.add(
                httpx2.get(f"{one.url}/v1/models", headers={"authorization": f"Bearer {token}"}, timeout=60, verify=False).status_code
            )
        except httpx2.HTTPError:
            return 0
    return found.pop() if len(found) == 1 else -1


def seconds_until(port: int, token: str, status: int, deadline: float = 60.0) -> float:
    """Return after how many seconds requests with a token get this status."""
    began = time.perf_counter()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=deadline)) as connection:
        while True:
            connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {token}"})
            response = connection.getresponse()
            response.read()
            if response.status == status:
                return time.perf_counter() - began
            assert time.perf_counter() - began < deadline, f"status {response.status} instead of {status}"
            time.sleep(0.001)


@dataclass
class Propagation:
    """After how many seconds changes of one gateway were in force on another one, from the response on, under a load on both."""

    created: list[float]
    revoked: list[float]
    loads: list[Counts]


def propagation(one: Gateway, other: Gateway, changes: int, rate: float) -> Propagation:
    """Create and revoke keys on one gateway, while both together get ``rate`` requests per second with a key of the store."""
    token = create(one, "load")
    seconds_until(other.data, token, 200)
    found = Propagation([], [], [])
    with constant_load(one.data, rate / 2, token) as first, constant_load(other.data, rate / 2, token) as second:
        for number in range(changes):
            made = create(one, f"new-{number}")
            found.created.append(seconds_until(other.data, made, 200))
            assert send(one, "POST", f"{KEYS}/new-{number}/revoke", headers=ANY).status_code == 200
            found.revoked.append(seconds_until(other.data, made, 401))
    found.loads += first, second
    return found


def share(values: list[float], part: float) -> float:
    """Return the value below which this part of the values is."""
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]
