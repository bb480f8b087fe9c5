"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's shapes over a chat request (anthropic/ in vLLM 0.32).

As in vLLM the request is turned into a chat request and then follows its rules; errors found by those rules are
in Anthropic's shape, errors of the fields' types in OpenAI's.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, field_validator

from upstream.simulator.endpoints import chat, fields, usage
from upstream.simulator.endpoints.chat import Prepared
from upstream.simulator.endpoints.fields import MOST_STOPS, Fields
from upstream.simulator.engine.engine import Emission
from upstream.simulator.engine.job import ApiRequest, GeneratedChoice, Job, ResponseShape, Transcript
from upstream.simulator.errors import ApiError
from upstream.simulator.flags import Settings
from upstream.simulator.text.plan import Token, TokenKind

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class AnthropicMessage(Fields):
    """A message of Anthropic's API."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class MessageTool(Fields):
    """A tool of Anthropic's API."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(Fields):
    """The ``tool_choice`` of Anthropic's API."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Fields):
    """The ``thinking`` of Anthropic's API."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1024)


class CountRequest(Fields):
    """The body of POST /v1/messages/count_tokens."""

    model: str
    messages: list[AnthropicMessage]
    system: str | list[dict[str, Any]] | None = None
    thinking: Thinking | None = None
    tools: list[MessageTool] | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("model")
    @classmethod
    def _some_model(cls, model: str) -> str:
        if not model:
            raise ValueError("Model is required")
        return model


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages."""

    max_tokens: int
    stop_sequences: Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    output_config: dict[str, Any] | None = None

    @field_validator("max_tokens")
    @classmethod
    def _positive(cls, count: int) -> int:
        if count <= 0:
            raise ValueError("max_tokens must be positive")
        return count


class MessagesError(ApiError):
    """An error response in Anthropic's shape."""

    def body(self) -> dict[str, Any]:
        return self.messages_body()


def job(call: ApiRequest) -> Job:
    """Understand a request. Raises ApiError."""
    request = fields.read(MessagesRequest, call.body)
    prepared = _prepared(call, _as_chat(request))
    planned, refusal = call.planned(prepared.generation)
    transcript = Transcript(planned)
    response = MessagesResponse(prepared, transcript, call.settings)
    return Job(transcript, response, bool(request.stream), call.behavior, prepared.refusal or refusal, priority=call.priority(0))


def count(call: ApiRequest) -> dict[str, Any]:
    """Return the response of count_tokens. Raises ApiError."""
    request = fields.read(CountRequest, call.body)
    tokens = len(_prepared(call, _as_chat(request)).generation.prompts[0].ids)
    return {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}


def _prepared(call: ApiRequest, body: dict[str, Any]) -> Prepared:
    inner = replace(call, body=body)
    try:
        return chat.prepare(inner, chat.read(inner))
    except ApiError as refusal:
        raise MessagesError(refusal.message, refusal.status, refusal.kind, refusal.param) from refusal


def _as_chat(request: CountRequest) -> dict[str, Any]:
    """Return the chat request to which vLLM converts the request."""
    messages = [{"role": "system", "content": _text(request.system)}] if request.system else []
    messages += [converted for message in request.messages for converted in _chat_messages(message)]
    body: dict[str, Any] = {"model": request.model, "messages": messages, "chat_template_kwargs": request.chat_template_kwargs}
    if request.tools is not None:
        body["tools"] = [{"type": "function", "function": _function(tool)} for tool in request.tools] or None
        body["tool_choice"] = _choice(request.tool_choice)
        body["parallel_tool_calls"] = not (request.tool_choice and request.tool_choice.disable_parallel_tool_use)
    if request.thinking is not None and request.thinking.type == "disabled":
        body["reasoning_effort"] = "none"
    if isinstance(request, MessagesRequest):
        body |= {"max_tokens": request.max_tokens, "max_completion_tokens": request.max_tokens, "stop": request.stop_sequences}
        body |= {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k, "cache_salt": request.cache_salt}
        body |= _format((request.output_config or {}).get("format"))
    return body


def _format(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or not given.get("schema"):
        return {}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": given["schema"]}}}


def _function(tool: MessageTool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": {"type": "object", **tool.input_schema}}


def _choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return "auto"
    return _CHOICES.get(choice.type) or {"type": "function", "function": {"name": choice.name}}


def _chat_messages(turn: AnthropicMessage) -> list[dict[str, Any]]:
    """Return the tool results of a message as separate messages, then its other content."""
    blocks = [{"type": "text", "text": turn.content}] if isinstance(turn.content, str) else turn.content
    results = [block for block in blocks if block.get("type") == "tool_result"]
    others = [block for block in blocks if block.get("type") != "tool_result"]
    messages = [{"role": "tool", "content": _text(block.get("content") or "")} for block in results]
    return messages + ([{"role": turn.role, "content": _text(others)}] if others else [])


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(_block_text(block) for block in content)


def _block_text(block: dict[str, Any]) -> str:
    if block.get("type") == "tool_use":
        return f"{block.get('name')}({json.dumps(block.get('input'))})"
    return str(block.get("text") or block.get("thinking") or f"<{block.get('type')}>")


class MessagesResponse(ResponseShape):
    """A message's shapes: named events, one content block open at a time."""

    def __init__(self, prepared: Prepared, transcript: Transcript, settings: Settings) -> None:
        self._prepared = prepared
        self._transcript = transcript
        self._settings = settings
        self._open: str | None = None
        self._index = 0

    @property
    def _generated(self) -> GeneratedChoice:
        return self._transcript.choices[0]

    def step(self, emissions: list[Emission]) -> Iterator[bytes]:
        if not emissions:
            yield self._start()
        for emission in emissions:
            if emission.token is not None and emission.token.kind is not TokenKind.SILENT:
                yield from self._shown(emission.token)

    def closing(self) -> Iterator[bytes]:
        yield from self._close()
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield _event({"type": "message_delta", "delta": delta, "usage": usage.message(self._transcript, self._settings)})
        yield _event({"type": "message_stop"})

    def failure(self, refusal: ApiError) -> Iterable[bytes]:
        """Return pydantic's error: vLLM fails to read its own error event here, and ends the stream."""
        given = str(refusal.body())
        shown = given if len(given) <= 78 else f"{given[:39]}...{given[-36:]}"
        missing = "".join(
            f"\n{name}\n  Field required [type=missing, input_value={shown}, input_type=dict]" for name in ("model", "choices")
        )
        message = f"2 validation errors for ChatCompletionStreamResponse{missing}"
        return (_event({"type": "error", "error": {"type": "internal_error", "message": message}}),)

    def error_body(self, refusal: ApiError) -> Any:
        return refusal.messages_body()

    def _start(self) -> bytes:
        message: dict[str, Any] = {
            "id": self._prepared.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._prepared.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._transcript.prompt_tokens, "output_tokens": 0},  # cached tokens are reported at the end
        }
        return _event({"type": "message_start", "message": message})

    def _shown(self, token: Token) -> Iterator[bytes]:
        if token.kind is TokenKind.CALL:
            called = self._generated.calls[-1]
            yield from self._begin({"type": "tool_use", "id": called.id, "name": called.name, "input": {}})
        elif token.kind is TokenKind.ARGUMENTS:
            yield self._delta({"type": "input_json_delta", "partial_json": token.text})
        elif token.kind is TokenKind.REASONING:
            if self._open != "thinking":
                yield from self._begin({"type": "thinking", "thinking": ""})
            yield self._delta({"type": "thinking_delta", "thinking": token.text})
        else:
            if self._open != "text":
                yield from self._begin({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": token.text})

    def _begin(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._open = block["type"]
        yield _event({"type": "content_block_start", "content_block": block, "index": self._index})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "delta": delta, "index": self._index})

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": uuid.uuid4().hex})
        yield _event({"type": "content_block_stop", "index": self._index})
        self._open = None
        self._index += 1

    def _stop(self) -> tuple[str | None, str | None]:
        choice = self._generated
        if choice.finish == "length":
            return "max_tokens", None
        if choice.finish != "stop":
            return None, None
        if choice.calls:
            return "tool_use", None
        return ("stop_sequence", choice.stop) if choice.stop is not None else ("end_turn", None)

    def body(self) -> dict[str, Any]:
        reason, sequence = self._stop()
        fields = {
            "id": self._prepared.id,
            "type": "message",
            "role": "assistant",
            "content": list(self._blocks()) or [{"type": "text", "text": ""}],
            "model": self._prepared.model,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage.message(self._transcript, self._settings),
        }
        return {name: value for name, value in fields.items() if value is not None}

    def _blocks(self) -> Iterator[dict[str, Any]]:
        choice = self._generated
        if choice.reasoning:
            yield {"type": "thinking", "thinking": choice.reasoning, "signature": uuid.uuid4().hex}
        if choice.content:
            yield {"type": "text", "text": choice.content}
        for called in choice.calls:
            yield {"type": "tool_use", "id": called.id, "name": called.name, "input": _arguments(called.arguments)}


def _arguments(text: str) -> Any:
    """Return the arguments as an object; empty if the token limit truncated them."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {}


def _event(event: dict[str, Any]) -> bytes:
    name: str = event["type"]
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"
