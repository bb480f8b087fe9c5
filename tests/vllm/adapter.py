"""Write a LoRA adapter for a tiny model: the two files that PEFT would write, without PEFT.

The weights are random and far from zero, so that the adapter's text differs from the model's memorized text.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

RANK = 8
_SCALE = 0.5


def make(folder: Path, model: Path, seed: int) -> Path:
    """Write an adapter of ``model``'s query and value projections to ``folder``. The same seed gives the same adapter."""
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    settings |= {"target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": str(model)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    shape = json.loads((model / "config.json").read_text())
    (folder / "adapter_model.safetensors").write_bytes(_safetensors(_weights(shape, random.Random(seed))))
    return folder


def _weights(shape: dict[str, int], dice: random.Random) -> dict[str, tuple[tuple[int, int], bytes]]:
    """Return shapes and little-endian float32 values by name."""
    head_counts = {"q_proj": shape["num_attention_heads"], "v_proj": shape["num_key_value_heads"]}
    made = {}
    for layer in range(shape["num_hidden_layers"]):
        for projection, count in head_counts.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            for part, size in (("lora_A", (RANK, shape["hidden_size"])), ("lora_B", (count * shape["head_dim"], RANK))):
                values = [dice.gauss(0, _SCALE) for _ in range(size[0] * size[1])]
                made[f"{name}.{part}.weight"] = (size, struct.pack(f"<{len(values)}f", *values))
    return made


def _safetensors(tensors: dict[str, tuple[tuple[int, int], bytes]]) -> bytes:
    """Write the safetensors format: the length of the JSON header as u64, the header, the data."""
    head, data = {}, b""
    for name, (size, raw) in tensors.items():
        head[name] = {"dtype": "F32", "shape": size, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + data
