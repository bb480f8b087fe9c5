"""Reads a server's own metrics: once for each request, within limits of time and size.

The rule: the text is not parsed here, so it cannot do harm. ``engine_counters`` parses it.
"""

from __future__ import annotations

from contextlib import suppress

from upstream.http.errors import UpstreamError
from upstream.vllm.bounded_request import fetch_within
from upstream.vllm.health import ProbeTarget

SIZE_LIMIT = 16 * 1024 * 1024
"""Bytes. A vLLM with many adapters sends some hundred thousand."""


class MetricsUnavailableError(Exception):
    """The metrics could not be read. The text explains the reason in one line."""


async def read(target: ProbeTarget, deadline: float) -> bytes:
    """Send GET /metrics, and return the body within ``deadline`` seconds. Raises MetricsUnavailableError."""
    try:
        status, body = await fetch_within(target.address, "/metrics", api_key=target.api_key, deadline=deadline, limit=SIZE_LIMIT)
    except TimeoutError:
        raise MetricsUnavailableError(f"{target.name} did not respond within {deadline:g} s") from None
    except UpstreamError as error:
        raise MetricsUnavailableError(f"{target.name}: {str(error).removeprefix(f'{error.server}: ')}") from error
    if status != 200:
        raise MetricsUnavailableError(f"{target.name}: GET /metrics: status {status}")
    if len(body) == SIZE_LIMIT:
        raise MetricsUnavailableError(f"{target.name}: its metrics are longer than {SIZE_LIMIT} bytes")
    return body


async def read_if_available(target: ProbeTarget, deadline: float) -> bytes | None:
    """Do the same. Return None if the metrics could not be read: the server's health checks report what is wrong with it."""
    with suppress(MetricsUnavailableError):
        return await read(target, deadline)
    return None
