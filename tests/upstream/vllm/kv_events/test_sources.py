"""Endpoints as an engine binds them, and as the gateway connects to them."""

from __future__ import annotations

import json

import pytest

from tests.support.rows import each_row
from upstream.http.address import Address
from upstream.vllm.kv_events.sources import EventSource, event_sources

SERVER = Address(host="10.1.2.3", port=8000)
ENDPOINTS = [
    ("tcp://*:5557", SERVER, "tcp://10.1.2.3:5557"),
    ("tcp://0.0.0.0:5557", SERVER, "tcp://10.1.2.3:5557"),
    ("tcp://[::]:5557", Address(host="fd00::1", port=8000), "tcp://[fd00::1]:5557"),
    ("tcp://*:5557", Address(host="localhost", uds="/run/vllm.sock"), "tcp://127.0.0.1:5557"),
    ("tcp://10.9.9.9:40001", SERVER, "tcp://10.9.9.9:40001"),
    ("ipc:///run/kv", SERVER, "ipc:///run/kv"),
]


def body(endpoint: str, **more: object) -> bytes:
    entry = {"publisher": "zmq", "endpoint": endpoint, "replay_endpoint": None, "buffer_steps": 10_000, "topic": "kv"}
    return json.dumps({"0": entry | more}).encode()


@each_row(("bound", "server", "reached"), ENDPOINTS)
def test_an_endpoint_is_reached_where_the_server_is(bound: str, server: Address, reached: str) -> None:
    assert event_sources(body(bound, replay_endpoint=bound), server) == (EventSource(0, reached, reached, "kv"),)


def test_every_rank_has_a_source() -> None:
    two = {str(rank): json.loads(body(f"tcp://*:{5557 + rank}"))["0"] for rank in (1, 0)}
    assert [(each.rank, each.endpoint) for each in event_sources(json.dumps(two).encode(), SERVER)] == [
        (0, "tcp://10.1.2.3:5557"),
        (1, "tcp://10.1.2.3:5558"),
    ]


def test_a_server_may_publish_nothing() -> None:
    assert event_sources(b"{}", SERVER) == event_sources(body("tcp://*:5557", publisher="null"), SERVER) == ()


@pytest.mark.parametrize("text", [b"", b"[]", b'{"a": {}}', b'{"0": 1}', body("inproc://kv"), body("tcp://*"), body("tcp://*:http")])
def test_another_response_is_an_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        event_sources(text, SERVER)
