"""LoRA adapters on the real vLLM: a model and two adapters, each with a different response."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.process import configuration, gateway
from tests.vllm import adapter
from tests.vllm.dialogues import user
from tests.vllm.server import NOT_INSTALLED, START_WITHIN, installed, launch, model_path

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(START_WITHIN + 120),
    pytest.mark.skipif(installed() is None, reason=NOT_INSTALLED),
]


def test_a_model_and_its_two_adapters_respond_differently(tmp_path: Path) -> None:
    made = {name: adapter.make(tmp_path / name, model_path("llama"), seed) for name, seed in (("one", 1), ("two", 2))}
    loras = [{"id": f"tests/{name}", "path": str(path)} for name, path in made.items()]
    config = configuration({"id": "tests/base", "launch": launch("llama"), "loras": loras})
    with gateway(tmp_path, config, seconds=START_WITHIN) as one:
        texts = {}
        for name in ("tests/base", "tests/one", "tests/two"):
            responses = [one.request(model=name, messages=[user("Say hello.")], temperature=0, max_tokens=16).json() for _ in range(2)]
            assert responses[0]["model"] == name
            texts[name], again = (response["choices"][0]["message"]["content"] for response in responses)
            assert texts[name] == again
        assert len(set(texts.values())) == 3, texts
        assert one.metric('vllm_gateway_tokens_total{key="team-a",model="tests/two",type="completion"}') > 0
