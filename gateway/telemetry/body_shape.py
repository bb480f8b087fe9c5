"""Describe the shape of a request body for an operator: names and sizes, never text that a client wrote.

The rule: everything shown comes from the tables here. An unknown name is counted, not shown. Text is shown as its length, unless it
is a keyword of the API; a number is shown only as the value of a setting. So no prompt, schema or secret can appear, from any part of a
body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gateway.api.media_urls import CONTAINERS

_MAX_VALUES = 48  # values of one shape: its log line stays below what a pipe takes at once
_MAX_ITEMS = 8  # of a list
_MAX_DEPTH = 6  # of a field's path
_SEPARATORS = re.compile(r"[.\[\]]+")
_LARGEST = 10_000_000  # a larger number is not a setting

SETTINGS = frozenset(
    """
    add_generation_prompt add_special_tokens allowed_token_ids background best_of continue_final_message detail dimensions echo
    effort enable_thinking encoding_format frequency_penalty ignore_eos include_reasoning include_stop_str_in_output include_usage
    length_penalty logprobs max_completion_tokens max_output_tokens max_tokens max_tool_calls min_p min_tokens n normalize
    parallel_tool_calls presence_penalty priority prompt_logprobs reasoning_effort repetition_penalty return_token_ids role
    service_tier skip_special_tokens spaces_between_special_tokens store stream strict summary temperature thinking_token_budget
    tool_choice top_k top_logprobs top_n top_p truncate_prompt_tokens truncation type use_beam_search verbosity
    """.split()  # noqa: SIM905
)
"""Fields whose numbers and keywords are shown."""

PARTS = frozenset(
    """
    annotations arguments audio bad_words cache_salt chat_template chat_template_kwargs content conversation data data_1
    data_2 documents ec_transfer_params extra_body file file_data file_id filename format function function_call functions
    guided_choice guided_grammar guided_json guided_regex id image_url images include input input_audio input_type inputs
    instructions items json json_object json_schema kv_transfer_params logit_bias logits_processors media_io_kwargs media_type
    messages metadata mm_processor_kwargs modalities model name output output_config parameters prediction
    previous_response_id prompt prompt_cache_key prompt_embeds queries query reasoning reasoning_content refusal regex
    request_id response_format return_prompt_text safety_identifier schema seed session_id source stop stop_sequences
    stop_token_ids stream_options structural_tag structured_outputs suffix system text text_1 text_2 texts thinking
    tool_call_id tool_calls tools url user video_url vllm_xargs web_search_options
    """.split()  # noqa: SIM905
)
"""Fields that are shown by their contents."""

KEYWORDS = frozenset(
    """
    any array assistant auto base64 boolean custom detailed developer disabled enabled ephemeral file flex float function
    function_call function_call_output grammar high image image_url input_audio input_file input_image input_text integer
    json_object json_schema low max medium message minimal none number object output_text priority reasoning refusal regex required
    string structural_tag system text thinking tool tool_result tool_use url user video_url xhigh
    """.split()  # noqa: SIM905
)
"""Texts that are shown, as values of a setting."""


def field_path(param: str) -> str:
    """Return the path of a field of the tables: ``messages.*.content``. A name that is not in them is ``other``, an index is ``*``."""
    names = _SEPARATORS.split(param, _MAX_DEPTH)[:_MAX_DEPTH]
    return ".".join("*" if name.isdigit() else name if name in SETTINGS or name in PARTS else "other" for name in names)


def shape(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shape of a body, as JSON: at most ``_MAX_VALUES`` values.

    An object is shown by its known fields, with the number of its other fields in ``other``. A list is shown by its first items and the
    number of further items. ``text(5)`` stands for five characters, ``list(3)`` for a list of three plain values.
    """
    return _Sketch(_MAX_VALUES).of_object(document)


class _Sketch:
    """A shape under construction: counts how many values it may still show."""

    def __init__(self, left: int) -> None:
        self._left = left

    def of_object(self, value: Mapping[str, Any]) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        for name, value_of in value.items():
            if self._left > 0 and (name in SETTINGS or name in PARTS):
                self._left -= 1
                shown[name] = self._of(value_of, setting=name in SETTINGS)
        others = len(value) - len(shown)
        return shown | {"other": others} if others else shown

    def _of(self, value: Any, *, setting: bool) -> Any:
        if isinstance(value, dict):
            return self.of_object(value)
        if isinstance(value, list):
            return self._of_list(value)
        if isinstance(value, str):
            return value if setting and value in KEYWORDS else f"text({len(value)})"
        if value is None or isinstance(value, bool):
            return value
        return value if setting and abs(value) < _LARGEST else "number"

    def _of_list(self, values: list[Any]) -> Any:
        if CONTAINERS.isdisjoint(map(type, values)):
            return f"list({len(values)})"
        shown: list[Any] = []
        for value in values[:_MAX_ITEMS]:
            if self._left <= 0:
                break
            self._left -= 1
            shown.append(self._of(value, setting=False))
        rest = len(values) - len(shown)
        return [*shown, f"and {rest} more"] if rest else shown
