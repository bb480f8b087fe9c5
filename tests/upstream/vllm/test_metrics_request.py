"""A server's own metrics are read within bounds of time and size, whatever it does."""

from __future__ import annotations

import pytest

from tests.support.ports import refusing
from tests.support.scripted import Conversation, scripted
from upstream.http.address import Address
from upstream.vllm import metrics_request
from upstream.vllm.health import ProbeTarget
from upstream.vllm.metrics_request import SIZE_LIMIT, MetricsUnavailableError


async def test_they_are_read_as_they_are() -> None:
    async def script(talk: Conversation) -> None:
        await talk.respond(b'vllm:num_requests_running{engine="0"} 1.0\n', kind="text/plain")

    async with scripted(script) as server:
        target = ProbeTarget("s", Address(port=server.port, prefix="/below"), "a-key")
        assert await metrics_request.read(target, 30) == b'vllm:num_requests_running{engine="0"} 1.0\n'
    (sent,) = server.requests
    assert sent.head.startswith(b"GET /below/metrics HTTP/1.1\r\n") and sent.header("authorization") == "Bearer a-key"


async def test_endless_ones_are_not_read_to_their_end() -> None:
    async def script(talk: Conversation) -> None:
        await talk.begin_stream()
        while True:
            await talk.chunk(b"x" * (1 << 20))

    async with scripted(script) as server:
        with pytest.raises(MetricsUnavailableError, match=f"s: its metrics are longer than {SIZE_LIMIT} bytes"):
            await metrics_request.read(ProbeTarget("s", Address(port=server.port)), 60)


async def test_slow_ones_are_not_waited_for() -> None:
    async def script(talk: Conversation) -> None:
        await talk.closed_by_peer()

    async with scripted(script) as server:
        with pytest.raises(MetricsUnavailableError, match=r"s did not respond within 0\.2 s"):
            await metrics_request.read(ProbeTarget("s", Address(port=server.port)), 0.2)


async def test_a_server_without_metrics_is_reported() -> None:
    async def script(talk: Conversation) -> None:
        await talk.respond(b"{}", "404 Not Found")

    async with scripted(script) as server:
        with pytest.raises(MetricsUnavailableError, match="s: GET /metrics: status 404"):
            await metrics_request.read(ProbeTarget("s", Address(port=server.port)), 30)


async def test_an_unreachable_server_is_reported() -> None:
    with refusing() as port, pytest.raises(MetricsUnavailableError, match=r"^s: "):
        await metrics_request.read(ProbeTarget("s", Address(port=port)), 30)
