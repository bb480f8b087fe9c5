"""Puts a launched vLLM to sleep and wakes it, by the routes that VLLM_SERVER_DEV_MODE opens on its private address.

Level 1 moves the weights to the machine's memory and drops the KV cache. Level 2 drops both, and the weights are read
again on waking (vLLM's ``entrypoints/serve/dev/sleep`` and ``.../rpc``). The rule: no request may be in flight, because
vLLM aborts it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from upstream.vllm.health import ProbeTarget

if TYPE_CHECKING:
    import httpx2

Level = Literal[1, 2]
DEADLINE = 300.0
"""Seconds for one step: tens of gigabytes are moved."""


class SleepError(Exception):
    """A server could not be put to sleep or woken. The text explains the reason to operators."""


async def fall_asleep(target: ProbeTarget, level: Level) -> None:
    """Put a server to sleep. Raises SleepError."""
    async with target.client(DEADLINE) as client:
        await _post(client, "/sleep", params={"level": level})


async def wake_up(target: ProbeTarget, level: Level) -> None:
    """Wake a server that sleeps at this level. Raises SleepError."""
    async with target.client(DEADLINE) as client:
        if level == 1:
            await _post(client, "/wake_up")
            return
        await _post(client, "/wake_up", params={"tags": "weights"})
        await _post(client, "/collective_rpc", json={"method": "reload_weights"})
        await _post(client, "/wake_up", params={"tags": "kv_cache"})


async def _post(client: httpx2.AsyncClient, path: str, **more: Any) -> None:
    import httpx2  # loaded only where a model sleeps

    try:
        response = await client.post(path, **more)
    except httpx2.HTTPError as error:
        raise SleepError(f"POST {path}: {str(error) or type(error).__name__}") from error
    if response.status_code != 200:
        raise SleepError(f"POST {path}: status {response.status_code}")
