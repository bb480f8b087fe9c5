"""The fields that chat, completions and responses share: their types, and the values that vLLM rejects.

Owns the validation. Types are pydantic's, so that its messages are vLLM's; rules are those of vLLM 0.32's
request models and of its sampling parameters. Rules that vLLM's engine checks only once a stream has begun are
in ``engine_refusal``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from json import dumps, loads
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from upstream.simulator import errors
from upstream.simulator.errors import ApiError
from upstream.simulator.text import json_schema
from upstream.simulator.text.speaker import Speaker

MOST_LOGPROBS: Final = 20
MOST_CHOICES: Final = 16384
MOST_STOPS: Final = 4
VOCABULARY: Final = 151936

_INT64: Final = 2**63

Priority = Annotated[int, Field(ge=-_INT64, le=_INT64 - 1)]
OrZero = Annotated[int, BeforeValidator(lambda value: 0 if value is None else value)]


class Fields(BaseModel):
    """Unknown fields are ignored, as in vLLM."""

    model_config = ConfigDict(extra="ignore")


class StreamOptions(Fields):
    """The ``stream_options`` of a request."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class StructuredOutputs(Fields):
    """The ``structured_outputs`` of a request."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class Sampling(Fields):
    """The fields that chat and completions share."""

    model: str | None = None
    n: int | None = 1
    seed: int | None = Field(None, ge=-_INT64, le=_INT64 - 1)
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    include_stop_str_in_output: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_k: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Priority = 0
    cache_salt: str | None = None
    return_token_ids: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


Model = TypeVar("Model", bound=Fields)


def read(model: type[Model], body: Mapping[str, Any]) -> Model:
    """Parse the body as a model. Raises ApiError for wrong types."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise errors.malformed(error.errors(include_url=False), ("body",)) from error


def check_body(body: Mapping[str, Any]) -> None:
    """Check the rules of vLLM's ``mode="before"`` validators, on the raw object."""
    _check_salt(body.get("cache_salt"))
    if body.get("stream_options") and not body.get("stream"):
        raise errors.bad("Stream options can only be defined when `stream=True`.", "stream_options")
    wanted = body.get("response_format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema" and wanted.get("json_schema") is None:
        raise errors.bad("When response_format type is 'json_schema', the 'json_schema' field must be provided.", "response_format")
    _check_constraints(body.get("structured_outputs"))


def _check_salt(salt: object) -> None:
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise errors.bad("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > 128 or not set("@/\\\0").isdisjoint(salt):
        message = "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL."
        raise errors.bad(message, "cache_salt")


def _check_constraints(given: object) -> None:
    if isinstance(given, dict) and sum(given.get(name) is not None for name in ("json", "regex", "choice")) > 1:
        raise errors.plain("You can only use one kind of constraints for structured outputs ('json', 'regex' or 'choice').")


def check_logprobs(body: Mapping[str, Any], name: str) -> None:
    """Check ``top_logprobs`` (chat) and ``logprobs`` (completions), before the stream."""
    for field in ("prompt_logprobs", name):
        value = body.get(field)
        if value is not None and not isinstance(value, int | float):
            raise errors.bad(f"`{field}` must be an integer.", field, value)
        if value is not None and value < 0 and value != -1:
            raise errors.bad(f"`{field}` must be a positive value or -1.", field, value)
    requested = body.get("prompt_logprobs")
    if body.get("stream") and requested is not None and (requested > 0 or requested == -1):
        raise errors.bad("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")


def check_sampling(request: Sampling, limit: int) -> None:
    """Check the rules of vLLM's SamplingParams, in its order. ``limit``: the token limit after clamping."""
    n, temperature = request.n or 1, request.temperature
    if n < 1 or request.n == 0:
        raise errors.plain(f"n must be at least 1, got {request.n}.")
    if n > MOST_CHOICES:
        raise errors.plain(
            f"n must be at most {MOST_CHOICES}, got {n}. To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable."
        )
    for name in ("presence_penalty", "frequency_penalty"):
        _within(getattr(request, name), -2, 2, f"{name} must be in [-2, 2], got {getattr(request, name)}.")
    if temperature is not None:
        _check_temperature(temperature)
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise errors.bad(f"top_p must be in (0, 1], got {request.top_p}.", "top_p", request.top_p)
    if request.top_k is not None and request.top_k < -1:
        raise errors.plain(f"top_k must be 0 (disable), or at least 1, got {request.top_k}.")
    _within(request.min_p, 0, 1, f"min_p must be in [0, 1], got {request.min_p}.")
    if limit < 1:
        raise errors.bad(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
    if request.min_tokens > limit:
        raise errors.plain(f"min_tokens must be less than or equal to max_tokens={limit}, got {request.min_tokens}.")
    if "" in request.stops:
        raise errors.plain("stop cannot contain an empty string.")
    if n > 1 and temperature is not None and temperature < 1e-5:
        raise errors.plain(f"n must be 1 when using greedy sampling, got {n}.")


def _check_temperature(given: float) -> None:
    if not math.isfinite(given):
        raise errors.bad(f"temperature must be a finite number, got {given}.", "temperature", given)
    if given < 0:
        raise errors.bad(f"temperature must be non-negative, got {given}.", "temperature", given)
    if given > 2:
        raise errors.bad(f"temperature must be in [0, 2], got {given}.", "temperature", given)


def _within(value: float | None, low: float, high: float, message: str) -> None:
    if value is not None and not low <= value <= high:
        raise errors.plain(message)


def engine_refusal(request: Sampling, logprobs: int | None) -> ApiError | None:
    """Return the error that vLLM finds only in the engine: a 400, or the first event of a stream."""
    if logprobs is not None and logprobs > MOST_LOGPROBS:
        message = f"Requested sample logprobs of {logprobs}, which is greater than max allowed: {MOST_LOGPROBS}"
        return errors.bad(message, "logprobs", logprobs)
    unknown = [int(token) for token in request.logit_bias or {} if not 0 <= int(token) < VOCABULARY]
    if unknown:
        message = f"token_id(s) {unknown} in logit_bias contain out-of-vocab token ids. Vocabulary size: {VOCABULARY}"
        return errors.bad(message, "logit_bias", unknown)
    return None


def constraint(request: Sampling) -> Callable[[Speaker], str] | None:
    """Return a generator of text that satisfies the request's constraint, or None without a constraint."""
    wanted = request.response_format or {}
    if wanted.get("type") == "json_schema":
        given = wanted["json_schema"]
        return partial(_json_text, given.get("schema", {}) if isinstance(given, dict) else {})
    if wanted.get("type") == "json_object":
        return _json_object
    return structured(request.structured_outputs) if request.structured_outputs else None


def structured(wanted: StructuredOutputs) -> Callable[[Speaker], str] | None:
    """Return a generator of text that satisfies the constraint. A structural tag constrains no text: it contains the calls of tools."""
    if wanted.json_ is not None:
        return partial(_json_text, wanted.json_)
    if wanted.regex is not None:
        return partial(json_schema.matching, wanted.regex)
    if wanted.choice:
        choices = wanted.choice
        return lambda speaker: choices[speaker.between(0, len(choices) - 1)]
    return _json_object if wanted.json_object else None


def _json_text(given: dict[str, Any] | str, speaker: Speaker) -> str:
    wanted = loads(given) if isinstance(given, str) else given
    return dumps(json_schema.instance(wanted, speaker), ensure_ascii=False, separators=(",", ":"))


def _json_object(speaker: Speaker) -> str:
    return dumps({speaker.word(): speaker.word(), "ok": True}, ensure_ascii=False, separators=(",", ":"))
