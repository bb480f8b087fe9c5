"""Families of models and their parsers: which one a name belongs to, and what is added to what the operator has written."""

from __future__ import annotations

from tests.support.rows import each_row
from upstream.vllm import known_names
from upstream.vllm.presets import PRESETS, preset_for, with_preset


@each_row(
    ("model", "preset"),
    [
        ("Qwen/Qwen3-0.6B", "qwen3"),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507-FP8", "qwen3"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-instruct"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3-instruct"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-coder"),
        ("Qwen/Qwen3-Embedding-0.6B", None),
        ("Qwen/Qwen3-Reranker-4B", None),
        ("Qwen/Qwen3-8B-Base", None),
        ("Qwen/Qwen3.5-27B", "qwen3.5"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5"),
        ("Qwen/Qwen2.5-7B", None),
        ("Qwen/QwQ-32B", "qwq"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3"),
        ("meta-llama/Llama-3.1-8B", None),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-r1"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "deepseek-r1-distill"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V3.1-Terminus", "deepseek-v3.1"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", None),
        ("zai-org/GLM-4.5-Air", "glm-4.5"),
        ("zai-org/GLM-4.7-Flash", "glm-4.7"),
        ("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2"),
        ("moonshotai/Kimi-K2-Thinking", "kimi-k2-thinking"),
        ("openai/gpt-oss-120b", "gpt-oss"),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral"),
        ("mistralai/Magistral-Small-2509", "magistral"),
        ("mistralai/Devstral-Small-2507", "mistral"),
        ("google/gemma-4-31B-it", "gemma4"),
        ("google/gemma-3-12b-it", None),
        ("google/functiongemma-270m-it", "functiongemma"),
        ("ibm-granite/granite-4.0-h-small", "granite4"),
        ("ibm-granite/granite-3.1-8b-instruct", "granite3"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "hermes"),
        ("MiniMaxAI/MiniMax-M2", "minimax-m2"),
        ("microsoft/Phi-4-mini-instruct", "phi4-mini"),
        ("allenai/Olmo-3-32B-Think", "olmo3-think"),
        ("allenai/Olmo-3-7B-Instruct", "olmo3"),
        ("/srv/models/Qwen3-8B/", "qwen3"),
        ("org/unknown", None),
        ("", None),
    ],
)
def test_the_family_of_a_model(model: str, preset: str | None) -> None:
    assert preset_for(model) == preset


def test_every_parser_is_one_of_vllms() -> None:
    names = known_names.built_in()
    for name, preset in PRESETS.items():
        assert preset.tools or preset.reasoning, name
        assert preset.tools in {"", *names.tool_parsers} and preset.reasoning in {"", *names.reasoning_parsers}, name
        assert preset.args.keys() <= names.flags


def test_what_the_operator_has_written_wins() -> None:
    everything = {"reasoning-parser": "qwen3", "enable-auto-tool-choice": True, "tool-call-parser": "hermes"}
    assert with_preset("qwen3", {}) == everything
    assert with_preset("qwen3", {"tool_call_parser": "own", "seed": 1}) == {
        "reasoning-parser": "qwen3", "enable-auto-tool-choice": True, "tool_call_parser": "own", "seed": 1,
    }  # fmt: skip
    assert with_preset("qwen3", {"enable-auto-tool-choice": False})["enable-auto-tool-choice"] is False
    assert with_preset(None, {"seed": 1}) == {"seed": 1}
