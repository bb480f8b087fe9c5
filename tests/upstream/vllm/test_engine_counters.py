"""The counters and the load that a server's metrics have, and texts that have none."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from upstream.vllm.engine_counters import EngineCounters, EngineMetrics, parse_counters, parse_load

TEXT = b"""\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.76385e+09
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_running{engine="1",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 4.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 100.0
vllm:prompt_tokens_total{engine="1",model_name="tiny"} 10.0
vllm:prompt_tokens_created{engine="0",model_name="tiny"} 1.76e+09
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 7.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 1.234567e+06
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf",model_name="tiny"} 3.0
vllm:request_prompt_tokens_sum{engine="0",model_name="tiny"} 90.0
vllm:request_generation_tokens_sum{engine="0",model_name="tiny"} 1.2e+06
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.25
# TYPE http_requests_total counter
http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 5.0
http_requests_total{handler="/v1/chat/completions",method="POST",status="4xx"} 1.0
http_requests_total{handler="/tokenize",method="POST",status="2xx"} 9.0
http_requests_total{handler="/v1/models",method="GET",status="2xx"} 30.0
"""


def test_the_counters_of_all_engines_are_summed() -> None:
    assert parse_counters(TEXT) == EngineCounters(1_763_850_000_000, 110, 1_234_567, 90, 1_200_000, 6, 7, 0.5)


def test_a_server_with_several_processes_reports_no_start() -> None:
    text = b"\n".join(line for line in TEXT.splitlines() if b"process_start" not in line)
    counters = parse_counters(text)
    assert counters is not None and counters.started == 0


def test_responses_are_unknown_where_the_server_does_not_count_them() -> None:
    lines = [line for line in TEXT.splitlines() if not line.startswith(b"http_")]
    no_response_yet, uncounted = (
        parse_counters(b"\n".join(lines)),
        parse_counters(b"\n".join(line for line in lines if b"http_" not in line)),
    )
    assert no_response_yet is not None and no_response_yet.responses == 0
    assert uncounted is not None and uncounted.responses is None


def test_texts_without_counters_have_none() -> None:
    assert parse_counters(b"") is None
    assert parse_counters(TEXT.replace(b" 90.0", b" ninety")) is None
    assert parse_counters(TEXT.replace(b" 90.0", b" +Inf")) is None
    assert parse_counters(TEXT.replace(b"vllm:request_generation_tokens_sum", b"other")) is None


@given(st.binary(max_size=200), st.integers(0, len(TEXT)))
def test_any_text_is_parsed_or_has_none(noise: bytes, at: int) -> None:
    parse_counters(TEXT[:at] + noise + TEXT[at:])


LOAD = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000",num_gpu_blocks_override="None"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="500",num_gpu_blocks_override="7"} 1.0
"""


LOADED = EngineMetrics(running=4, waiting=2, cache_tokens=24_000, kv_usage=0.5)


def test_the_load_of_all_engines_is_summed() -> None:
    assert parse_load(LOAD) == LOADED


SPEED = (
    LOAD
    + b"""vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.76e+09
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.1",model_name="m"} 5.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 10.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 0.5
vllm:inter_token_latency_seconds_count{engine="1",model_name="m"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5",model_name="a}\\"le=\\"1"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="1",model_name="m",le="0.5"} 2.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 4.0
"""
)


def test_the_speed_of_all_engines_is_summed() -> None:
    speed: dict[str, Any] = {"preempted": 3.0, "token_seconds": 0.5, "token_gaps": 11.0, "first_tokens": ((0.5, 3.0), (math.inf, 4.0))}
    assert parse_load(SPEED) == replace(LOADED, **speed)
    assert parse_load(SPEED.replace(b" 4.0\n", b" nan\n")) is None


def test_a_server_without_the_size_of_its_cache() -> None:
    assert parse_load(b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n") == EngineMetrics(1, 0, 0)


def test_other_texts_have_no_load() -> None:
    assert parse_load(b"") is None
    assert parse_load(LOAD.replace(b"0.25", b"7")) is None
    assert parse_load(b"vllm:num_requests_running nan\nvllm:num_requests_waiting 0\n") is None


@given(st.binary(max_size=300))
def test_any_bytes_have_a_load_or_none(text: bytes) -> None:
    parse_load(b"vllm:num_requests_running 1\nvllm:num_requests_waiting inf\n" + text)
    parse_load(text)
