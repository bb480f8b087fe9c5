"""The token counters of a vLLM server, its load, its speed and the size of its KV cache, from the text of its metrics.

vLLM counts tokens twice. The totals count each token when it is made. The histograms count the tokens of a request when the engine has
finished it, so a request that its client aborted is never in them (``OutputProcessor`` in vllm/v1/engine/output_processor.py). Both count
the prompt once for each of ``n`` choices. The rule: the counters, requests and cache sizes of all engines of a server (data parallel) are
summed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_VALUE = re.compile(
    rb"^(vllm:prompt_tokens_total|vllm:generation_tokens_total|vllm:request_prompt_tokens_sum|vllm:request_generation_tokens_sum"
    rb"|vllm:num_requests_running|vllm:num_requests_waiting|vllm:kv_cache_usage_perc|process_start_time_seconds)(?:\{.*\})? (\S+)$",
    re.MULTILINE,
)
_TOKENS = (b"prompt_tokens_total", b"generation_tokens_total", b"request_prompt_tokens_sum", b"request_generation_tokens_sum")
_RESPONSES = re.compile(rb'^http_requests_total\{([^}]*method="POST"[^}]*)\} (\S+)$', re.MULTILINE)
_RESPONSES_DECLARED = b"# TYPE http_requests_total counter"
_HANDLER = re.compile(rb'handler="([^"]*)"')
_WITHOUT_ENGINE = frozenset(
    {
        b"none",
        b"/tokenize",
        b"/detokenize",
        b"/v1/messages/count_tokens",
        b"/v1/chat/completions/render",
        b"/v1/chat/completions/derender",
        b"/v1/completions/render",
        b"/v1/responses/render",
        b"/sleep",
        b"/wake_up",
        b"/collective_rpc",
        b"/v1/load_lora_adapter",
        b"/v1/unload_lora_adapter",
    }
)
"""Handlers of POST requests that never reach the engine."""
_LOAD = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|num_preemptions_total"
    rb"|inter_token_latency_seconds_sum|inter_token_latency_seconds_count)(?:\{.*\})? (\S+)$",
    re.MULTILINE,
)
_FIRST_TOKENS = re.compile(rb'^vllm:time_to_first_token_seconds_bucket\{.*\ble="([^"\\]+)".*\} (\S+)$', re.MULTILINE)
_CACHE_USAGE = re.compile(rb"^vllm:kv_cache_usage_perc(?:\{.*\})? (\S+)$", re.MULTILINE)
_CACHE = re.compile(rb"^vllm:cache_config_info\{(.*)\} 1(?:\.0)?$", re.MULTILINE)
_LABEL = re.compile(rb'(block_size|num_gpu_blocks)="(\d+)"')


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """The counters of one server at one time. All except ``started`` and the last two only grow while the server runs.

    ``started``: when its process started, in milliseconds since the epoch; 0 if it does not report it, as with several API server
    processes. ``prompt``, ``completion``: all tokens. ``finished_prompt``, ``finished_completion``: the tokens of finished requests.
    ``responses``: HTTP responses of routes that use the engine, None if the server does not count them. ``unfinished``: requests that run
    or wait in the engine. ``cache_usage``: the part of the KV cache that is in use. It changes with each step of a prefill, in which no
    token is counted (``Scheduler.make_stats`` in vllm/v1/core/sched/scheduler.py).
    """

    started: int
    prompt: int
    completion: int
    finished_prompt: int
    finished_completion: int
    responses: int | None
    unfinished: int
    cache_usage: float = 0.0


def parse_counters(text: bytes) -> EngineCounters | None:
    """Parse the text of GET /metrics. Returns None if it has no token counters, or an invalid number."""
    try:
        sums = _summed(_VALUE, text)
        started = round(sums.get(b"process_start_time_seconds", 0.0) * 1000)
        prompt, completion, finished_prompt, finished_completion = (int(sums[b"vllm:" + name]) for name in _TOKENS)
        unfinished = int(sums.get(b"vllm:num_requests_running", 0.0) + sums.get(b"vllm:num_requests_waiting", 0.0))
        usage = sums.get(b"vllm:kv_cache_usage_perc", 0.0)
        return EngineCounters(started, prompt, completion, finished_prompt, finished_completion, _responses(text), unfinished, usage)
    except (KeyError, ValueError, OverflowError):
        return None


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """``running``, ``waiting``: requests in the engine. ``kv_usage``: the used share of its KV cache, of the fullest engine.

    ``cache_tokens``: the size of the KV cache; 0 if it is not reported. The other values are counters: preempted requests, the seconds
    between tokens and their number, and the requests by the upper bound of their time to first token, cumulative.
    """

    running: int
    waiting: int
    cache_tokens: int
    kv_usage: float = 0.0
    preempted: float = 0.0
    token_seconds: float = 0.0
    token_gaps: float = 0.0
    first_tokens: tuple[tuple[float, float], ...] = ()


def parse_load(text: bytes) -> EngineMetrics | None:
    """Parse the text of GET /metrics. Returns None without the numbers of requests, or with an invalid number."""
    try:
        sums, first_tokens = _summed(_LOAD, text), _summed(_FIRST_TOKENS, text)
        caches = (dict(_LABEL.findall(labels)) for labels in _CACHE.findall(text))
        tokens = sum(int(each.get(b"block_size", 0)) * int(each.get(b"num_gpu_blocks", 0)) for each in caches)
        used = max((float(value) for value in _CACHE_USAGE.findall(text)), default=0.0)
        if not 0.0 <= used <= 1.0 or not all(map(math.isfinite, (*sums.values(), *first_tokens.values()))):
            return None
        return EngineMetrics(
            int(sums[b"num_requests_running"]),
            int(sums[b"num_requests_waiting"]),
            tokens,
            used,
            preempted=sums.get(b"num_preemptions_total", 0.0),
            token_seconds=sums.get(b"inter_token_latency_seconds_sum", 0.0),
            token_gaps=sums.get(b"inter_token_latency_seconds_count", 0.0),
            first_tokens=tuple(sorted((float(bound), count) for bound, count in first_tokens.items())),
        )
    except (KeyError, ValueError, OverflowError):
        return None


def _summed(samples: re.Pattern[bytes], text: bytes) -> dict[bytes, float]:
    """Return the sum of each metric over its samples: a pattern for the name and the value. Raises ValueError for an invalid number."""
    sums: dict[bytes, float] = {}
    for name, value in samples.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def _responses(text: bytes) -> int | None:
    found = _RESPONSES.findall(text)
    if not found and _RESPONSES_DECLARED not in text:
        return None
    counted = ((_HANDLER.search(labels), value) for labels, value in found)
    return sum(int(float(value)) for handler, value in counted if handler is not None and handler[1] not in _WITHOUT_ENGINE)
