"""One request, understood: what will be made of it and in which shape it is shown.

Owns the seam between the APIs (which read requests and write answers) and the exchange (which runs them).
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
from upstream.simulator.errors import Refusal
from upstream.simulator.flags import Settings
from upstream.simulator.text.json_schema import Unmeetable
from upstream.simulator.text.plan import Ask, Kind, Plan, Token, nothing, plan
from upstream.simulator.text.tokenizer import MAX_CHARS_PER_TOKEN


def random_id() -> str:
    """vLLM's random_uuid: sixteen hexadecimal digits."""
    return uuid.uuid4().hex[:16]


@dataclass(slots=True)
class Called:
    """A tool call as far as it has been made."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Said:
    """One choice as far as it has been made."""

    tokens: list[Token] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)
    reasoning_tokens: int = 0
    finish: str | None = None
    stop: str | None = None

    def add(self, emission: Emission) -> None:
        token = emission.token
        self.finish, self.stop = emission.finish, emission.stop
        if token is None:
            return
        self.tokens.append(token)
        if token.kind is Kind.REASONING:
            self.reasoning_tokens += 1
        elif token.kind is Kind.CALL:
            self.calls.append(Called(f"chatcmpl-tool-{random_id()}", token.text))
        elif token.kind is Kind.ARGUMENTS:
            self.calls[-1].pieces.append(token.text)

    @property
    def reasoning(self) -> str:
        return self._text(Kind.REASONING)

    @property
    def content(self) -> str:
        return self._text(Kind.CONTENT)

    def _text(self, kind: Kind) -> str:
        return "".join(token.text for token in self.tokens if token.kind is kind)


class Transcript:
    """A whole answer as far as it has been made."""

    def __init__(self, planned: Plan) -> None:
        self.plan = planned
        self.choices = [Said() for _ in planned.choices]
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
        return sum(len(said.tokens) for said in self.choices)

    @property
    def reasoning_tokens(self) -> int:
        return sum(said.reasoning_tokens for said in self.choices)


class Answer(Protocol):
    """The shapes of one API's answer, over a transcript that grows between the calls."""

    def opening(self) -> Iterable[bytes]:
        """The events that go out before the engine has begun."""

    def step(self, emissions: list[Emission]) -> Iterable[bytes]:
        """The events of one step; the first step has no emissions."""

    def closing(self) -> Iterable[bytes]:
        """The events after the last token."""

    def failure(self, refusal: Refusal) -> Iterable[bytes] | None:
        """The events of a failure in the stream, or None where vLLM breaks the connection off."""

    def body(self) -> Any:
        """The answer that is not streamed, for JSON."""

    def error_body(self, refusal: Refusal) -> Any:
        """A refusal, for JSON."""


@dataclass(slots=True)
class Job:
    """A request that is ready to run. ``refusal`` is what the engine will say to it once it has begun."""

    transcript: Transcript
    answer: Answer
    stream: bool
    behavior: Behavior
    refusal: Refusal | None = None
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it came, and the server's settings: what every API's reader is given."""

    settings: Settings
    body: dict[str, Any]
    headers: Mapping[str, str]
    behavior: Behavior

    def model(self) -> str:
        """The answer's model: the first served name, or the adapter's. Raises Refusal for a name not served."""
        asked = self.body.get("model")
        if asked in {lora.name for lora in self.settings.loras}:
            return str(asked)
        if asked and asked not in self.settings.served:
            raise errors.unknown_model(asked, self.settings.served)
        return self.settings.served[0]

    def request_id(self) -> str:
        """What follows the prefix of the answer's id (GenerateBaseServing._base_request_id)."""
        return self.headers.get("x-request-id") or str(self.body.get("request_id") or random_id())

    def planned(self, ask: Ask) -> tuple[Plan, Refusal | None]:
        """The plan, or an empty one and what the engine says of the constraint."""
        try:
            return plan(ask, self.behavior, self.settings.seed), None
        except (Unmeetable, ValueError, TypeError, KeyError, IndexError) as error:
            return nothing(ask.prompts), errors.plain(f"Grammar error: {error}")


def now() -> int:
    return int(time.time())


def fingerprint(settings: Settings) -> str:
    """As vLLM's: the version and eight digits of the configuration's hash."""
    return f"vllm-0.32.0-{settings.seed & 0xFFFFFFFF:08x}"


def context_checked(prompt_text: str, prompt_length: int, settings: Settings) -> None:
    """Raise the Refusal of a prompt that the context does not hold (renderers/params.py)."""
    limit = settings.max_model_len
    characters = limit * MAX_CHARS_PER_TOKEN
    if len(prompt_text) > characters:
        contained = f"{len(prompt_text)} characters (more than {characters} characters, which is the upper bound for {limit} input tokens)"
        raise _overflow(limit, contained, "input_text", len(prompt_text))
    if prompt_length > limit:
        contained = f"at least {limit + 1} input tokens, which exceeds this limit even without any output tokens"
        raise _overflow(limit, contained, "input_tokens", limit + 1)


def _overflow(limit: int, contained: str, param: str, value: int) -> Refusal:
    message = f"This model's maximum context length is {limit} tokens. However, your prompt contains {contained}. "
    return errors.bad(message + "Please reduce the length of the input prompt.", param, value)


def output_checked(asked: int | None, param: str, settings: Settings) -> None:
    """Raise the Refusal of a token limit that alone is above the context."""
    if asked is not None and asked > settings.max_model_len:
        message = f"{param}={asked} cannot be greater than max_model_len={settings.max_model_len}. Please request fewer output tokens."
        raise errors.bad(message, param, asked)
