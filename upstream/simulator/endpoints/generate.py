"""POST /inference/v1/generate: token IDs to token IDs (entrypoints/scale_out/token_in_token_out in vLLM 0.32).

The rule: a prompt that ends with the start of a response generates exactly its rest (``text.plan``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import orjson
from pydantic import Field, ValidationError, field_validator

from upstream.simulator import errors
from upstream.simulator.endpoints import chat, fields, usage
from upstream.simulator.endpoints.fields import Fields, Priority, Sampling, StreamOptions, StructuredOutputs
from upstream.simulator.endpoints.streams import DONE, StreamShape, frame
from upstream.simulator.engine.engine import Emission
from upstream.simulator.engine.job import ApiRequest, GeneratedChoice, Job, Transcript, now
from upstream.simulator.text import tokenizer
from upstream.simulator.text.logprobs import token_entry
from upstream.simulator.text.plan import NAME_END, GenerationRequest, Prompt, Token, Tool


class SamplingParams(Sampling):
    """The ``sampling_params`` of a request."""

    logprobs: int | None = None


class ReasoningParserKwargs(Fields):
    """The arguments with which the chat template has rendered the prompt."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class GenerateRequest(Fields):
    """The body of POST /inference/v1/generate."""

    token_ids: list[int] = Field(min_length=1)
    sampling_params: SamplingParams
    model: str | None = None
    reasoning_parser_kwargs: ReasoningParserKwargs | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    priority: Priority = 0

    @field_validator("token_ids")
    @classmethod
    def _check_ids(cls, ids: list[int]) -> list[int]:
        if any(token_id < 0 for token_id in ids):
            raise ValueError("token_ids must not contain negative values")
        return ids


def job(call: ApiRequest) -> Job:
    """Understand a request. Raises ApiError."""
    request = fields.read(GenerateRequest, call.body)
    params = request.sampling_params
    fields.check_sampling(params, 1 if params.max_tokens is None else params.max_tokens)
    model = call.model()
    if request.output_mode != "tokens":
        raise errors.not_simulated("The simulator has only output_mode='tokens'.")
    planned, refusal = call.planned(_generation_request(call, request))
    transcript = Transcript(planned)
    response = GenerateResponse(call, request, model, transcript)
    refusal = fields.engine_refusal(params, params.logprobs) or refusal
    return Job(transcript, response, bool(request.stream), call.behavior, refusal, priority=request.priority)


def _generation_request(call: ApiRequest, request: GenerateRequest) -> GenerationRequest:
    params = request.sampling_params
    available = _available(call, len(request.token_ids))
    return GenerationRequest(
        (Prompt.of_ids(request.token_ids),),
        available if params.max_tokens is None else min(available, params.max_tokens),
        n=params.n or 1,
        seed=params.seed,
        stops=params.stops,
        includes_stop=params.include_stop_str_in_output,
        minimum=params.min_tokens,
        ignore_end=params.ignore_eos,
        thinking=_thinks(call, request.reasoning_parser_kwargs),
        forced=fields.constraint(params),
        calls=_calls(params.structured_outputs),
        cache_salt=request.cache_salt or "",
    )


def _available(call: ApiRequest, length: int) -> int:
    """Return how many tokens fit after the prompt. Raises ApiError if none does."""
    limit = call.settings.max_model_len
    if length > limit:
        raise errors.plain(f"Input length ({length}) exceeds model's maximum context length ({limit}).")
    if length == limit:
        raise errors.plain(
            f"The decoder prompt (length {length}) plus the number of requested output tokens (at least 1) is longer than the maximum "
            f"model length of {limit}. Make sure that `max_model_len` is no smaller than the number of text tokens (prompt + requested "
            "output tokens)."
        )
    return limit - length


def _thinks(call: ApiRequest, kwargs: ReasoningParserKwargs | None) -> bool:
    return kwargs is not None and chat.template_thinks(call, kwargs.chat_template_kwargs)


def _calls(constraint: StructuredOutputs | None) -> tuple[Tool, ...]:
    """Return the calls of a structural tag of ``render``. Raises ApiError for other tags."""
    if constraint is None or constraint.structural_tag is None:
        return ()
    try:
        tags = orjson.loads(constraint.structural_tag)["format"]["elements"]
        return tuple(_Tag.model_validate(tag).tool for tag in tags)
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise errors.not_simulated("The simulator has only the structural tags that it renders.") from error


class _Schema(Fields):
    json_schema: dict[str, Any]


class _Tag(Fields):
    begin: str
    content: _Schema

    @property
    def tool(self) -> Tool:
        return Tool(self.begin.removeprefix(tokenizer.CALL).removesuffix(NAME_END), self.content.json_schema)


class GenerateResponse(StreamShape):
    """The shapes of a response of token IDs."""

    def __init__(self, call: ApiRequest, request: GenerateRequest, model: str, transcript: Transcript) -> None:
        self._settings = call.settings
        self._request = request
        self._model = model
        self._transcript = transcript
        self._id = f"generate-tokens-{call.request_id()}"
        self._prompt_ids = transcript.plan.prompts[0].ids if request.return_token_ids else None
        self._usage = usage.UsageOptions.requested(request.stream_options)

    def step(self, emissions: list[Emission]) -> Iterator[bytes]:
        for emission in emissions:
            yield self._event(emission)

    def closing(self) -> Iterator[bytes]:
        if self._usage.at_end:
            totals = usage.present(usage.completion(self._transcript, self._settings))
            yield frame({"request_id": self._id, "usage": totals, "output_mode": "tokens", "choices": []})
        yield DONE

    def _event(self, emission: Emission) -> bytes:
        generated = self._transcript.choices[emission.choice]
        tokens = [emission.token] if emission.token else []
        shown = {"prompt_token_ids": self._prompt_ids} if self._prompt_ids is not None else {}
        self._prompt_ids = None
        counts = usage.without_details(self._transcript.prompt_tokens, len(generated.tokens)) if self._usage.running else None
        choice = self._choice(emission.choice, generated, tokens, emission.finish)
        return frame({"request_id": self._id, "usage": counts, **shown, "output_mode": "tokens", "choices": [choice]})

    def body(self) -> dict[str, Any]:
        return {
            "request_id": self._id,
            "model": self._model,
            "created": now(),
            "usage": usage.completion(self._transcript, self._settings),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": self._prompt_ids,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": "tokens",
            "choices": [self._choice(at, each, each.tokens, each.finish) for at, each in enumerate(self._transcript.choices)],
        }

    def _choice(self, at: int, generated: GeneratedChoice, tokens: list[Token], finish: str | None) -> dict[str, Any]:
        """Return the tokens of a choice, up to its last token so far."""
        count, start = self._request.sampling_params.logprobs, len(generated.tokens) - len(tokens)
        logprobs = None if count is None else {"content": [token_entry(token.piece, start + i, count) for i, token in enumerate(tokens)]}
        return {
            "index": at,
            "finish_reason": finish,
            "stop_reason": generated.stop,
            "token_ids": [token.id for token in tokens],
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": [{"version": "default", "start": 0, "end": len(generated.tokens)}] if finish is not None else None,
            "logprobs": logprobs,
        }
