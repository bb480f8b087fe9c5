"""The metrics of the simulator, and their text on /metrics.

Owns the counters. The rules are vLLM's. A prompt is counted when its first token is due, once for each of its choices. A generated token is
counted when it is generated. The histograms have only requests that the engine has finished, without aborted ones. Names and labels are
vLLM's (v1/metrics/loggers.py).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

CONTENT_TYPE: Final = "text/plain; version=1.0.0; charset=utf-8"

_SECONDS: Final = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)
_TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


_CACHE_CONFIG: Final[Mapping[str, object]] = MappingProxyType(
    {
        "_block_size_resolved": True,
        "cache_dtype": "auto",
        "cache_hit_alignment_tokens": None,
        "enable_mamba_shared_prefix_checkpoint": False,
        "enable_prefix_caching": True,
        "engine": 0,
        "gpu_memory_utilization": 0.92,
        "hash_block_size": None,
        "is_attention_free": False,
        "kv_cache_dtype_skip_layers": [],
        "kv_cache_layout": None,
        "kv_cache_max_concurrency": None,
        "kv_cache_memory_bytes": None,
        "kv_offloading_backend": "native",
        "kv_offloading_size": None,
        "kv_sharing_fast_prefill": False,
        "mamba_block_size": None,
        "mamba_cache_dtype": "auto",
        "mamba_cache_mode": "none",
        "mamba_page_size_padded": None,
        "mamba_ssm_cache_dtype": "auto",
        "num_cpu_blocks": None,
        "num_gpu_blocks_override": None,
        "prefix_cache_retention_interval": 0,
        "prefix_caching_hash_algo": "sha256",
        "prefix_match_unit": None,
        "replayssm_buffer_len": 16,
        "skip_page_size_padded": None,
        "sliding_window": None,
        "swa_bounded_replay": True,
        "use_kda_recoverssm": False,
        "use_replayssm": False,
        "user_specified_block_size": False,
    }
)
"""The labels of ``vllm:cache_config_info`` that do not depend on the server, with vLLM's defaults."""


class Histogram:
    """Counts by upper bound, cumulative when shown."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(frozen=True, slots=True)
class EngineState:
    """The values of the gauges: requests in the batch and in the queue, the used share of the KV cache, and its block size and blocks."""

    running: int
    waiting: int
    kv_cache_usage: float
    block_size: int
    num_gpu_blocks: int


class ServerMetrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.cache_queries = 0
        self.cache_hits = 0
        self.finished: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0))
        self.first_token = Histogram(_SECONDS)
        self.between_tokens = Histogram(_SECONDS)
        self.whole = Histogram(_SECONDS)
        self.queue = Histogram(_SECONDS)
        self.prompt_lengths = Histogram(_TOKENS)
        self.generation_lengths = Histogram(_TOKENS)
        self.started = time.time()
        self.responses: Counter[tuple[str, str, str]] = Counter()
        """HTTP responses by path, method and class of the status, as vLLM's API server counts them."""

    def observe_finished(self, finish: str, prompt: int, made: int) -> None:
        """Count a request that the engine has finished: its ``prompt`` tokens, and the tokens that it has ``made``."""
        self.finished[finish] += 1
        self.prompt_lengths.observe(prompt)
        self.generation_lengths.observe(made)

    def text(self, model: str, state: EngineState) -> str:
        """Return the Prometheus text format 1.0.0. ``model``: the first served name."""
        return "\n".join(self._lines('engine="0",model_name="' + _escaped(model) + '"', state)) + "\n"

    def _lines(self, labels: str, state: EngineState) -> Iterator[str]:
        for name, kind, meaning, value in self._singles(state):
            shown = f"vllm:{name}_total" if kind == "counter" else f"vllm:{name}"
            yield from _headed(shown, kind, meaning)
            yield f"{shown}{{{labels}}} {float(value)}"
        yield from _headed("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
        yield f"vllm:cache_config_info{{{_cache_config(state)}}} 1.0"
        yield from _headed("vllm:request_success_total", "counter", "Count of successfully processed requests.")
        for reason, count in self.finished.items():
            yield f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {float(count)}'
        for name, meaning, histogram in self._histograms():
            yield from _headed(f"vllm:{name}", "histogram", meaning)
            yield from _histogram(f"vllm:{name}", labels, histogram)
        yield from _headed("http_requests_total", "counter", "Total number of requests by method, status and handler.")
        for (handler, method, status), count in self.responses.items():
            yield f'http_requests_total{{handler="{_escaped(handler)}",method="{method}",status="{status}"}} {float(count)}'
        yield from _headed("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.")
        yield f"process_start_time_seconds {self.started}"

    def _singles(self, state: EngineState) -> tuple[tuple[str, str, str, float], ...]:
        return (
            ("num_requests_running", "gauge", "Number of requests in model execution batches.", state.running),
            ("num_requests_waiting", "gauge", "Number of requests waiting to be processed.", state.waiting),
            ("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", state.kv_cache_usage),
            ("prefix_cache_queries", "counter", "Prefix cache queries, in terms of number of queried tokens.", self.cache_queries),
            ("prefix_cache_hits", "counter", "Prefix cache hits, in terms of number of cached tokens.", self.cache_hits),
            ("num_preemptions", "counter", "Cumulative number of preemption from the engine.", 0),
            ("prompt_tokens", "counter", "Number of prefill tokens processed.", self.prompt_tokens),
            ("generation_tokens", "counter", "Number of generation tokens processed.", self.generation_tokens),
        )

    def _histograms(self) -> tuple[tuple[str, str, Histogram], ...]:
        return (
            ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", self.first_token),
            ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", self.between_tokens),
            ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", self.whole),
            ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", self.queue),
            ("request_prompt_tokens", "Number of prefill tokens processed.", self.prompt_lengths),
            ("request_generation_tokens", "Number of generation tokens processed.", self.generation_lengths),
        )


def _cache_config(state: EngineState) -> str:
    """Return the labels that describe the KV cache: all fields of vLLM's CacheConfig."""
    fields = {
        **_CACHE_CONFIG,
        "block_size": state.block_size,
        "effective_attention_block_size": state.block_size,
        "kv_cache_size_tokens": state.block_size * state.num_gpu_blocks,
        "num_gpu_blocks": state.num_gpu_blocks,
    }
    return ",".join(f'{name}="{value}"' for name, value in sorted(fields.items()))


def _headed(name: str, kind: str, meaning: str) -> tuple[str, str]:
    return f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"


def _histogram(name: str, labels: str, histogram: Histogram) -> Iterator[str]:
    cumulative = 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        cumulative += count
        shown = "+Inf" if bound == float("inf") else str(float(bound))
        yield f'{name}_bucket{{{labels},le="{shown}"}} {float(cumulative)}'
    yield f"{name}_count{{{labels}}} {float(cumulative)}"
    yield f"{name}_sum{{{labels}}} {histogram.total}"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
