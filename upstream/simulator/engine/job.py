"""One parsed request: its plan, and the shape of its response.

Owns the interface between the endpoints, which parse requests and shape responses, and the generation, which runs them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from upstream.simulator import errors
from upstream.simulator.behavior import Behavior
from upstream.simulator.engine.engine import Emission, Slot
from upstream.simulator.errors import ApiError
from upstream.simulator.flags import Settings
from upstream.simulator.text.json_schema import UnsatisfiableSchemaError
from upstream.simulator.text.plan import GenerationRequest, Plan, Token, TokenKind, empty_plan, plan
from upstream.simulator.text.tokenizer import MAX_CHARS_PER_TOKEN


def random_id() -> str:
    """Return sixteen hexadecimal digits, like vLLM's random_uuid."""
    return uuid.uuid4().hex[:16]


@dataclass(slots=True)
class ToolCall:
    """A tool call, up to its current token."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @classmethod
    def named(cls, name: str) -> ToolCall:
        return cls(f"chatcmpl-tool-{random_id()}", name)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class GeneratedChoice:
    """One choice, up to its current token."""

    tokens: list[Token] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    reasoning_tokens: int = 0
    finish: str | None = None
    stop: str | None = None

    def add(self, emission: Emission) -> None:
        token = emission.token
        self.finish, self.stop = emission.finish, emission.stop
        if token is None:
            return
        self.tokens.append(token)
        if token.kind is TokenKind.REASONING:
            self.reasoning_tokens += 1
        elif token.kind is TokenKind.CALL:
            self.calls.append(ToolCall.named(token.text))
        elif token.kind is TokenKind.ARGUMENTS:
            self.calls[-1].pieces.append(token.text)

    @property
    def reasoning(self) -> str:
        return self._text(TokenKind.REASONING)

    @property
    def content(self) -> str:
        return self._text(TokenKind.CONTENT)

    def _text(self, kind: TokenKind) -> str:
        return "".join(token.text for token in self.tokens if token.kind is kind)


class Transcript:
    """A response, up to its current token."""

    def __init__(self, planned: Plan) -> None:
        self.plan = planned
        self.choices = [GeneratedChoice() for _ in planned.choices]
        self.cached = 0

    def add(self, emissions: Iterable[Emission], slot: Slot) -> None:
        self.cached = slot.cached
        for emission in emissions:
            self.choices[emission.choice].add(emission)

    @property
    def prompt_tokens(self) -> int:
        return self.plan.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self.choices)


class ResponseShape(Protocol):
    """The shapes of one API's response, over a transcript that grows between the calls."""

    def opening(self) -> Iterable[bytes]:
        """Return the events before the engine starts."""
        return ()

    def step(self, emissions: list[Emission]) -> Iterable[bytes]:
        """Return the events of one step. The first step has no emissions."""

    def closing(self) -> Iterable[bytes]:
        """Return the events after the last token."""

    def failure(self, _refusal: ApiError) -> Iterable[bytes] | None:
        """Return the events of a failure in the stream, or None if vLLM closes the connection."""
        return None

    def body(self) -> Any:
        """Return the response without streaming, for JSON."""

    def error_body(self, refusal: ApiError) -> Any:
        """Return an error, for JSON."""
        return refusal.body()


@dataclass(slots=True)
class Job:
    """A request that is ready to run. ``refusal``: the engine's error, once it has started."""

    transcript: Transcript
    response: ResponseShape
    stream: bool
    behavior: Behavior
    refusal: ApiError | None = None
    content_type: str = "application/json"
    priority: int = 0


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A request as received, and the server's settings: the input of every endpoint."""

    settings: Settings
    body: dict[str, Any]
    headers: Mapping[str, str]
    behavior: Behavior

    def model(self) -> str:
        """Return the model of the response: the first served name, or the adapter's. Raises ApiError for an unknown name."""
        requested = self.body.get("model")
        if requested in {lora.name for lora in self.settings.loras}:
            return str(requested)
        if requested and requested not in self.settings.served:
            raise errors.unknown_model(requested, self.settings.served)
        return self.settings.served[0]

    def request_id(self) -> str:
        """Return the part of the response's id after its prefix (GenerateBaseServing._base_request_id)."""
        return self.headers.get("x-request-id") or str(self.body.get("request_id") or random_id())

    def priority(self, field: int) -> int:
        """Return the priority of the header, if it is a number, or else of the body (GenerateBaseServing._get_priority)."""
        try:
            return int(self.headers["x-vllm-priority"])
        except (KeyError, ValueError):
            return field

    def planned(self, generation: GenerationRequest) -> tuple[Plan, ApiError | None]:
        """Return the plan, or an empty plan and the engine's error about the constraint."""
        try:
            return plan(generation, self.behavior, self.settings.seed), None
        except (UnsatisfiableSchemaError, ValueError, TypeError, KeyError, IndexError) as error:
            return empty_plan(generation.prompts), errors.plain(f"Grammar error: {error}")


def now() -> int:
    """Return the current time in seconds since the epoch."""
    return int(time.time())


def fingerprint(settings: Settings) -> str:
    """Return a fingerprint like vLLM's: the version and eight digits of the configuration's hash."""
    return f"vllm-0.32.0-{settings.seed & 0xFFFFFFFF:08x}"


def context_checked(prompt_text: str, prompt_length: int, settings: Settings) -> None:
    """Raise the ApiError for a prompt that exceeds the context (renderers/params.py)."""
    limit = settings.max_model_len
    characters = limit * MAX_CHARS_PER_TOKEN
    if len(prompt_text) > characters:
        contained = f"{len(prompt_text)} characters (more than {characters} characters, which is the upper bound for {limit} input tokens)"
        raise _overflow(limit, contained, "input_text", len(prompt_text))
    if prompt_length > limit:
        contained = f"at least {limit + 1} input tokens, which exceeds this limit even without any output tokens"
        raise _overflow(limit, contained, "input_tokens", limit + 1)


def _overflow(limit: int, contained: str, param: str, value: int) -> ApiError:
    message = f"This model's maximum context length is {limit} tokens. However, your prompt contains {contained}. "
    return errors.bad(message + "Please reduce the length of the input prompt.", param, value)


def output_checked(requested: int | None, param: str, settings: Settings) -> None:
    """Raise the ApiError of a token limit that alone is above the context."""
    if requested is not None and requested > settings.max_model_len:
        message = f"{param}={requested} cannot be greater than max_model_len={settings.max_model_len}. Please request fewer output tokens."
        raise errors.bad(message, param, requested)
