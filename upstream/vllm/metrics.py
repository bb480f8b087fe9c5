"""A server's own metrics, as it writes them: read once for each that asks, within bounds of time and size.

The rule: nothing of what the server says is looked into, so nothing of it can do harm here.
"""

from __future__ import annotations

import asyncio
import ssl

from upstream.http.bounded_get import get
from upstream.http.errors import UpstreamError
from upstream.vllm.health import Target

SIZE_LIMIT = 16 * 1024 * 1024
"""Bytes; a vLLM with many adapters writes some hundred thousand."""


class MetricsUnavailableError(Exception):
    """There are no metrics to be had; the text says why, in one line."""


async def read(target: Target, deadline: float) -> bytes:
    """GET /metrics, in ``deadline`` seconds. Raises UnreadableError."""
    address = target.address
    tls = ssl.create_default_context() if address.tls else None
    try:
        async with asyncio.timeout(deadline):
            status, body = await get(address, "/metrics", api_key=target.api_key, timeout=2 * deadline, tls=tls, limit=SIZE_LIMIT)
    except TimeoutError:
        raise MetricsUnavailableError(f"{target.name} did not answer within {deadline:g} s") from None
    except UpstreamError as error:
        raise MetricsUnavailableError(f"{target.name}: {str(error).removeprefix(f'{error.server}: ')}") from error
    if status != 200:
        raise MetricsUnavailableError(f"{target.name}: GET /metrics: status {status}")
    if len(body) == SIZE_LIMIT:
        raise MetricsUnavailableError(f"{target.name}: its metrics are longer than {SIZE_LIMIT} bytes")
    return body
