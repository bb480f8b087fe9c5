"""POST /v1/completions: the request's rules and the shapes of the response (openai/completion in vLLM 0.32)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from upstream.simulator import errors
from upstream.simulator.endpoints import fields, usage
from upstream.simulator.endpoints.fields import Sampling
from upstream.simulator.endpoints.streams import DONE, StreamShape, frame
from upstream.simulator.engine.engine import Emission
from upstream.simulator.engine.job import ApiRequest, GeneratedChoice, Job, Transcript, context_checked, fingerprint, now, output_checked
from upstream.simulator.text.logprobs import completion_logprobs
from upstream.simulator.text.plan import GenerationRequest, Prompt, prompts_of
from upstream.simulator.text.tokenizer import piece_of

DEFAULT_TOKENS = 16

TokenIds = list[Annotated[int, Field(ge=0)]]


class CompletionRequest(Sampling):
    """The body of POST /v1/completions."""

    prompt: TokenIds | list[TokenIds] | str | list[str] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    n: int = 1
    max_tokens: int | None = DEFAULT_TOKENS
    return_tokens_as_token_ids: bool | None = None


def job(call: ApiRequest) -> Job:
    """Understand a request. Raises ApiError."""
    body = call.body
    fields.check_body(body)
    fields.check_logprobs(body, "logprobs")
    if body.get("prompt") in (None, ""):
        raise errors.bad("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    request = fields.read(
        CompletionRequest, {**body, "max_tokens": DEFAULT_TOKENS if body.get("max_tokens") is None else body["max_tokens"]}
    )
    model = call.model()
    planned, refusal = call.planned(_generation_request(call, request))
    transcript = Transcript(planned)
    response = CompletionResponse(call, request, model, transcript)
    refusal = fields.engine_refusal(request, request.logprobs) or refusal
    return Job(transcript, response, bool(request.stream), call.behavior, refusal, priority=call.priority(request.priority))


def _generation_request(call: ApiRequest, request: CompletionRequest) -> GenerationRequest:
    settings = call.settings
    output_checked(request.max_tokens, "max_tokens", settings)
    prompts = tuple(prompts_of(request.prompt))
    for prompt in prompts:
        context_checked(prompt.text, len(prompt.ids), settings)
    available = settings.max_model_len - max((len(prompt.ids) for prompt in prompts), default=0)
    limit = min(available, DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens)
    fields.check_sampling(request, max(limit, 1) if request.echo else limit)
    return GenerationRequest(
        prompts,
        limit,
        n=request.n,
        seed=request.seed,
        stops=request.stops,
        includes_stop=request.include_stop_str_in_output,
        minimum=request.min_tokens,
        ignore_end=request.ignore_eos,
        forced=fields.constraint(request),
        cache_salt=request.cache_salt or "",
    )


class CompletionResponse(StreamShape):
    """A completion's shapes. Choices are numbered prompt by prompt."""

    def __init__(self, call: ApiRequest, request: CompletionRequest, model: str, transcript: Transcript) -> None:
        self._settings = call.settings
        self._request = request
        self._transcript = transcript
        self._head = {"id": f"cmpl-{call.request_id()}", "object": "text_completion", "created": now(), "model": model}
        self._usage = usage.UsageOptions.of(request.stream_options, call.settings)
        self._offsets = [0] * len(transcript.choices)

    def step(self, emissions: list[Emission]) -> Iterator[bytes]:
        for emission in emissions:
            yield self._event(emission)

    def closing(self) -> Iterator[bytes]:
        if self._usage.at_end:
            totals = usage.present(usage.completion(self._transcript, self._settings))
            yield frame({**self._head, "choices": [], "usage": totals, "system_fingerprint": fingerprint(self._settings)})
        yield DONE

    def _event(self, emission: Emission) -> bytes:
        at, generated = emission.choice, self._transcript.choices[emission.choice]
        first = len(generated.tokens) <= 1
        text = emission.token.text if emission.token else ""
        pieces = [emission.token.piece] if emission.token else []
        if first and self._request.echo:
            prompt = self._prompt(at)
            text, pieces = prompt.text + text, [*map(piece_of, prompt.ids), *pieces]
        shows_prompt = first and (self._request.echo or self._request.return_token_ids)
        choice = {
            "index": at,
            "text": text,
            "logprobs": self._logprobs(at, pieces, len(generated.tokens) - 1),
            "finish_reason": emission.finish,
            "stop_reason": emission.stop,
            "prompt_token_ids": self._prompt(at).ids if shows_prompt else None,
            "token_ids": [emission.token.id] if emission.token and self._request.return_token_ids else None,
        }
        event = {**self._head, "choices": [choice]}
        if self._usage.running:
            event["usage"] = usage.counts(len(self._prompt(at).ids), len(generated.tokens))
        if emission.finish is not None and not self._usage.at_end:
            event["system_fingerprint"] = fingerprint(self._settings)
        return frame(event)

    def _prompt(self, at: int) -> Prompt:
        return self._transcript.plan.prompts[at // self._request.n]

    def _logprobs(self, at: int, pieces: list[str], start: int) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        offset = self._offsets[at]
        self._offsets[at] += sum(map(len, pieces))
        return completion_logprobs(pieces, start, offset, self._request.logprobs)

    def body(self) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [self._choice(at, choice) for at, choice in enumerate(self._transcript.choices)],
            "service_tier": None,
            "system_fingerprint": fingerprint(self._settings),
            "usage": usage.completion(self._transcript, self._settings),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _choice(self, at: int, generated: GeneratedChoice) -> dict[str, Any]:
        prompt = self._prompt(at)
        echoed = list(map(piece_of, prompt.ids)) if self._request.echo else []
        return {
            "index": at,
            "text": (prompt.text if self._request.echo else "") + generated.content,
            "logprobs": self._logprobs(at, [*echoed, *(token.piece for token in generated.tokens)], 0),
            "finish_reason": generated.finish,
            "stop_reason": generated.stop,
            "token_ids": [token.id for token in generated.tokens] if self._request.return_token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": prompt.ids if self._request.return_token_ids else None,
            "routed_experts": None,
        }
