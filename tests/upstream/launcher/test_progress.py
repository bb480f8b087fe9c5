"""Which line of a log is shown while a server starts."""

from __future__ import annotations

from tests.support.rows import each_row
from upstream.launcher.progress import MAX_LENGTH, progress

LOADING = "\rLoading safetensors checkpoint shards:   0% Completed | 0/2 [00:00<?, ?it/s]\n"
WARNED = "(Worker pid=1197) WARNING 11-21 14:37:21 [utils.py:333] Attempted to load weight norm.weight with dtype torch.float32\n"
BAR = "\rLoading safetensors checkpoint shards:  50% Completed | 1/2 [00:03<00:03, 3.10s/it]"


@each_row(
    ("text", "shown"),
    [
        ("", ""),
        ("\n \n===\n", ""),
        ("loading org/m\n", "loading org/m"),
        ("(APIServer pid=1) INFO 11-21 14:37:06 [model.py:733] Using max model len 2048\n", "Using max model len 2048"),
        ("one\n(APIServer pid=1) INFO 11-21 14:37:06 [api_utils.py:347]   █▄█▀ █     █     █  model   /models/qwen3\r\n", "one"),
        (LOADING + WARNED, "Loading safetensors checkpoint shards:   0% Completed | 0/2 [00:00<?, ?it/s]"),
        (LOADING + WARNED + BAR, BAR[1:]),
        ("(EngineCore_DP0 pid=7) INFO 11-21 14:37:22 [kv_cache_utils.py:2327] GPU KV cache size: 2,097,152 tokens\n" + WARNED,
         "GPU KV cache size: 2,097,152 tokens"),
        ("two\n/lib/dispatcher.py:138: FutureWarning: `torch.distributed.reduce_op` is deprecated\n  if hasattr(value):\n", "two"),
        ("three\nW1121 14:37:20.8 1197 triton.py:53] Triton not available\n[W1121 14:37:21.8 utils.cpp:68] Warning: NUMA\n", "three"),
        ("(Worker pid=7) ERROR 11-21 14:37:22 [core.py:1510] EngineCore failed to start.\n", "EngineCore failed to start."),
        ("x" * 1000, "x" * MAX_LENGTH),
    ],
)  # fmt: skip
def test_the_last_line_that_says_something(text: str, shown: str) -> None:
    assert progress(text) == shown
