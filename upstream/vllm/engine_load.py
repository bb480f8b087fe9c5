"""The load of a vLLM server and the size of its KV cache, from the text of its metrics.

The rule: the requests and cache sizes of all engines of a server (data parallel) are summed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from upstream.vllm.engine_counters import summed

_VALUE = re.compile(rb"^vllm:(num_requests_running|num_requests_waiting)(?:\{.*\})? (\S+)$", re.MULTILINE)
_USAGE = re.compile(rb"^vllm:kv_cache_usage_perc(?:\{.*\})? (\S+)$", re.MULTILINE)
_CACHE = re.compile(rb"^vllm:cache_config_info\{(.*)\} 1(?:\.0)?$", re.MULTILINE)
_LABEL = re.compile(rb'(block_size|num_gpu_blocks)="(\d+)"')


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """``running``, ``waiting``: requests in the engine. ``kv_usage``: the used share of its KV cache, of the fullest engine.

    ``cache_tokens``: the size of the KV cache; 0 if it is not reported.
    """

    running: int
    waiting: int
    cache_tokens: int
    kv_usage: float = 0.0


def parse_load(text: bytes) -> EngineMetrics | None:
    """Parse the text of GET /metrics. Returns None without the numbers of requests, or with an invalid number."""
    try:
        sums = summed(_VALUE, text)
        caches = (dict(_LABEL.findall(labels)) for labels in _CACHE.findall(text))
        tokens = sum(int(each.get(b"block_size", 0)) * int(each.get(b"num_gpu_blocks", 0)) for each in caches)
        used = max((float(value) for value in _USAGE.findall(text)), default=0.0)
        if not 0.0 <= used <= 1.0:
            return None
        return EngineMetrics(int(sums[b"num_requests_running"]), int(sums[b"num_requests_waiting"]), tokens, used)
    except (KeyError, ValueError, OverflowError):
        return None
