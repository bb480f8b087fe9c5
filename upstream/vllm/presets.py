"""The parsers of vLLM for families of models, so that tool calls and reasoning work without knowing vLLM's names for them.

Owns the table. Pure. The rule: a preset only adds options that the operator has not written. A family is listed only if vLLM's
documentation or source (docs/features/tool_calling.md, docs/features/reasoning_outputs.md, vllm/tool_parsers, vllm/reasoning) names its
parsers. A model that does not reason has no reasoning parser, because several parsers treat all text before an end of reasoning as
reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from upstream.vllm.command_line import ArgumentValue, flag_of


@dataclass(frozen=True, slots=True)
class Preset:
    """The parsers of a family.

    ``names``: a pattern for the last part of a model's name, in lower case. ``template``: the chat template among vLLM's examples that
    its documentation recommends for the family's tool calls; empty if the model's own template is enough.
    """

    names: str
    tools: str = ""
    reasoning: str = ""
    template: str = ""

    @property
    def args(self) -> dict[str, ArgumentValue]:
        """Return the options of ``vllm serve``, without dashes."""
        reasoning: dict[str, ArgumentValue] = {"reasoning-parser": self.reasoning} if self.reasoning else {}
        tools: dict[str, ArgumentValue] = {"enable-auto-tool-choice": True, "tool-call-parser": self.tools} if self.tools else {}
        return reasoning | tools


PRESETS: Mapping[str, Preset] = {
    # The first family whose pattern matches a model's name is used, so narrow patterns come first.
    "qwen3-coder": Preset(r"qwen3-coder", tools="qwen3_coder"),
    "qwen3.5": Preset(r"qwen3\.[5-9]", tools="qwen3_coder", reasoning="qwen3"),
    "qwen3-instruct": Preset(r"qwen3-(?:next|vl|\d).*instruct", tools="hermes"),
    "qwen3": Preset(r"qwen3-(?:next|vl|\d)(?!.*(?:embedding|reranker|base))", tools="hermes", reasoning="qwen3"),
    "qwen2.5": Preset(r"qwen2\.5-(?:coder-)?\d.*instruct", tools="hermes"),
    "qwq": Preset(r"qwq-", tools="hermes", reasoning="deepseek_r1"),
    "llama3": Preset(r"llama-3\.[123]-.*instruct", tools="llama3_json", template="tool_chat_template_llama3.1_json.jinja"),
    "llama4": Preset(r"llama-4-.*instruct", tools="llama4_pythonic", template="tool_chat_template_llama4_pythonic.jinja"),
    "deepseek-r1-distill": Preset(r"deepseek-r1-distill|deepseek-r1-0528-qwen3", reasoning="deepseek_r1"),
    "deepseek-r1": Preset(r"deepseek-r1", tools="deepseek_v3", reasoning="deepseek_r1", template="tool_chat_template_deepseekr1.jinja"),
    "deepseek-v3.1": Preset(
        r"deepseek-v3\.1", tools="deepseek_v31", reasoning="deepseek_v3", template="tool_chat_template_deepseekv31.jinja"
    ),
    "deepseek-v3": Preset(r"deepseek-v3(?!\.)", tools="deepseek_v3", template="tool_chat_template_deepseekv3.jinja"),
    "glm-4.5": Preset(r"glm-4\.[56](?!.*base)", tools="glm45", reasoning="glm45"),
    "glm-4.7": Preset(r"glm-4\.7", tools="glm47", reasoning="glm47"),
    "kimi-k2-thinking": Preset(r"kimi-k2-thinking", tools="kimi_k2", reasoning="kimi_k2"),
    "kimi-k2": Preset(r"kimi-k2-instruct", tools="kimi_k2"),
    "gpt-oss": Preset(r"gpt-oss", tools="openai", reasoning="openai_gptoss"),
    "magistral": Preset(r"magistral", tools="mistral", reasoning="mistral"),
    "mistral": Preset(r"(?:mistral|mixtral|devstral|ministral).*instruct|devstral", tools="mistral"),
    "gemma4": Preset(r"gemma-4-.*it\b", tools="gemma4", reasoning="gemma4"),
    "functiongemma": Preset(r"functiongemma", tools="functiongemma", template="tool_chat_template_functiongemma.jinja"),
    "granite4": Preset(r"granite-4\.[01](?!.*base)", tools="granite4"),
    "granite3": Preset(r"granite-3\.[123].*instruct", tools="granite"),
    "hermes": Preset(r"hermes-(?:2-pro|2-theta|3)", tools="hermes"),
    "minimax-m2": Preset(r"minimax-m2", tools="minimax_m2", reasoning="minimax_m2_append_think"),
    "phi4-mini": Preset(r"phi-4-mini-instruct", tools="phi4_mini_json", template="tool_chat_template_phi4_mini.jinja"),
    "seed-oss": Preset(r"seed-oss.*instruct", tools="seed_oss", reasoning="seed_oss"),
    "olmo3-think": Preset(r"olmo-3.*think", tools="olmo3", reasoning="olmo3"),
    "olmo3": Preset(r"olmo-3.*instruct", tools="olmo3"),
    "hunyuan-a13b": Preset(r"hunyuan-a13b-instruct", tools="hunyuan_a13b", reasoning="hunyuan_a13b"),
    "ernie4.5-thinking": Preset(r"ernie-4\.5.*thinking", tools="ernie45", reasoning="ernie45"),
    "longcat": Preset(r"longcat-flash-chat", tools="longcat"),
    "internlm2.5": Preset(r"internlm2_5-.*chat", tools="internlm", template="tool_chat_template_internlm2_tool.jinja"),
    "jamba": Preset(r"jamba-1\.[5-9]", tools="jamba"),
    "gigachat3": Preset(r"gigachat3", tools="gigachat3"),
}
"""By name, for ``launch.preset``."""


def preset_for(model: str) -> str | None:
    """Return the preset for a model, by its name on the hub or its folder's name; None if no family matches."""
    last = model.rstrip("/").rpartition("/")[2].lower()
    return next((name for name, preset in PRESETS.items() if re.search(preset.names, last)), None)


def with_preset(preset: str | None, args: Mapping[str, ArgumentValue]) -> dict[str, ArgumentValue]:
    """Return the options, with the options of a preset that the operator has not set."""
    written = {flag_of(key) for key in args}
    more = {} if preset is None else {flag: value for flag, value in PRESETS[preset].args.items() if flag not in written}
    return more | dict(args)
