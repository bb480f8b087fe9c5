"""The load of an engine and its cache size, as vLLM 0.32 reports them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from upstream.vllm.engine_load import EngineMetrics, parse_load

TEXT = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000",num_gpu_blocks_override="None"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="500",num_gpu_blocks_override="7"} 1.0
"""


def test_engines_are_summed() -> None:
    assert parse_load(TEXT) == EngineMetrics(running=4, waiting=2, cache_tokens=24_000, kv_usage=0.5)


def test_a_server_without_the_size_of_its_cache() -> None:
    assert parse_load(b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n") == EngineMetrics(1, 0, 0)


def test_other_texts_have_no_load() -> None:
    assert parse_load(b"") is None
    assert parse_load(TEXT.replace(b"0.25", b"7")) is None
    assert parse_load(b"vllm:num_requests_running nan\nvllm:num_requests_waiting 0\n") is None


@given(st.binary(max_size=300))
def test_any_bytes_are_parsed_without_an_error(text: bytes) -> None:
    parse_load(b"vllm:num_requests_running 1\nvllm:num_requests_waiting inf\n" + text)
    parse_load(text)
