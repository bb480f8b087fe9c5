"""POST /v1/chat/completions/render: a chat request as token IDs and sampling parameters (entrypoints/scale_out/render in vLLM 0.32).

The rule: the response is the body of POST /inference/v1/generate, and generates what the chat request would. Two things differ from vLLM,
since the simulator has no model that reads the prompt. The calls of tools are always a structural tag, in vLLM only if ``tool_choice``
requires them. And a request's ``simulate`` is repeated.
"""

from __future__ import annotations

from typing import Any

from orjson import dumps

from upstream.simulator.endpoints import chat
from upstream.simulator.endpoints.chat import ChatRequest, Prepared
from upstream.simulator.endpoints.fields import StructuredOutputs
from upstream.simulator.engine.job import ApiRequest
from upstream.simulator.text import tokenizer
from upstream.simulator.text.plan import NAME_END, Tool

DEFAULT_TOKENS = 16
"""The default of ``max_tokens`` in vLLM's SamplingParams, which is omitted like every default."""


def chat_request(call: ApiRequest) -> dict[str, Any]:
    """Return the rendered request. Raises ApiError."""
    request = chat.read(call)
    prepared = chat.prepare(call, request)
    thinks = chat.thinks(call, request)
    parses = call.settings.reasoning_parser is not None
    return {
        "request_id": prepared.id,
        "token_ids": prepared.generation.prompts[0].ids,
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": _sampling_params(call, prepared),
        "model": request.model,
        "reasoning_ended": (not thinks or not request.include_reasoning) if parses else None,
        "reasoning_parser_kwargs": {"chat_template_kwargs": _template_kwargs(request, thinks)} if parses else None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": bool(request.stream),
        "stream_options": request.stream_options.model_dump() if request.stream and request.stream_options else None,
        "cache_salt": request.cache_salt,
        "priority": request.priority,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    } | ({"simulate": call.body["simulate"]} if "simulate" in call.body else {})


def _template_kwargs(request: ChatRequest, thinks: bool) -> dict[str, Any]:
    """Return the arguments of the chat template. Without thinking, they always say so here."""
    given = request.chat_template_kwargs or {}
    flags = {"add_generation_prompt": request.add_generation_prompt, "continue_final_message": request.continue_final_message}
    effort = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
    return {"cohere_format": "cmd4", **given, **flags, **effort} | ({} if thinks else {"enable_thinking": False})


def _sampling_params(call: ApiRequest, prepared: Prepared) -> dict[str, Any]:
    """Return the parameters as vLLM writes them: without most of those that have their default value."""
    request, generation = prepared.request, prepared.generation
    temperature = 1.0 if request.temperature is None else request.temperature
    floats = {"top_p": request.top_p or 1.0, "min_p": request.min_p or 0.0} if temperature else {}
    written = {
        "presence_penalty": request.presence_penalty or 0.0,
        "frequency_penalty": request.frequency_penalty or 0.0,
        "repetition_penalty": request.repetition_penalty or 1.0,
        "temperature": temperature,
        **floats,
        "stop": list(generation.stops),
        "stop_token_ids": [],
        "output_kind": 1 if request.stream else 2,
        "skip_clone": True,
        "bad_words": [],
        "skip_reading_prefix_cache": False,
    }
    parses = call.settings.reasoning_parser is not None or call.settings.tool_parser is not None
    unless_default: dict[str, tuple[Any, Any]] = {
        "n": (generation.n, 1),
        "top_k": (request.top_k or 0 if temperature else 0, 0),
        "seed": (request.seed, None),
        "ignore_eos": (request.ignore_eos, False),
        "max_tokens": (generation.limit, DEFAULT_TOKENS),
        "include_stop_str_in_output": (request.include_stop_str_in_output, False),
        "min_tokens": (request.min_tokens, 0),
        "logprobs": (request.top_logprobs if request.logprobs else None, None),
        "skip_special_tokens": (not parses, True),
        "structured_outputs": (_structured_outputs(prepared), None),
        "logit_bias": (request.logit_bias, None),
    }
    return written | {name: value for name, (value, default) in unless_default.items() if value != default}


def _structured_outputs(prepared: Prepared) -> dict[str, Any] | None:
    constraint = _constraint(prepared)
    if constraint is None:
        return None
    options = {"disable_any_whitespace": False, "disable_additional_properties": False, "whitespace_pattern": None}
    return {**constraint.model_dump(by_alias=True), **options, "_backend": None, "_backend_was_auto": False}


def _constraint(prepared: Prepared) -> StructuredOutputs | None:
    wanted = prepared.request.response_format or {}
    if prepared.generation.calls:
        return StructuredOutputs.model_validate({"structural_tag": _structural_tag(prepared.generation.calls)})
    if wanted.get("type") == "json_schema":
        return StructuredOutputs.model_validate({"json": wanted["json_schema"].get("schema", {})})
    if wanted.get("type") == "json_object":
        return StructuredOutputs.model_validate({"json_object": True})
    return prepared.request.structured_outputs


def _structural_tag(calls: tuple[Tool, ...]) -> str:
    """Return the calls that the response consists of, in vLLM's form."""
    tags = [
        {
            "type": "tag",
            "begin": f"{tokenizer.CALL}{tool.name}{NAME_END}",
            "content": {"type": "json_schema", "json_schema": tool.parameters},
            "end": tokenizer.CALLED,
        }
        for tool in calls
    ]
    return dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": tags}}).decode()
