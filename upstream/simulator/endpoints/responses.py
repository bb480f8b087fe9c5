"""POST /v1/responses: OpenAI's responses over a chat request (openai/responses in vLLM 0.32).

Nothing is stored, as in vLLM without VLLM_ENABLE_RESPONSES_API_STORE. The stream has no [DONE]; if it fails, vLLM closes the connection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import orjson
from pydantic import Field

from upstream.simulator import errors
from upstream.simulator.endpoints import chat, fields
from upstream.simulator.endpoints.chat import Prepared
from upstream.simulator.endpoints.fields import Fields, OrZero, Priority
from upstream.simulator.engine.engine import Emission
from upstream.simulator.engine.job import ApiRequest, GeneratedChoice, Job, ResponseShape, Transcript, now, output_checked, random_id
from upstream.simulator.errors import ApiError
from upstream.simulator.text.plan import Token, TokenKind


class ResponsesRequest(Fields):
    """The body of POST /v1/responses."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    metadata: dict[str, str] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    parallel_tool_calls: bool | None = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    include_reasoning: bool = True
    background: bool | None = False
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = "auto"
    store: bool | None = True
    stream: bool | None = False
    temperature: float | None = None
    text: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = Field(default_factory=list)
    top_logprobs: OrZero = 0
    include: list[str] | None = None
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    user: str | None = None
    request_id: str | None = None
    priority: Priority = 0


def job(call: ApiRequest) -> Job:
    """Understand a request. Raises ApiError."""
    _check(call.body)
    request = fields.read(ResponsesRequest, call.body)
    call.model()
    if request.previous_response_id is not None:
        raise not_found(request.previous_response_id)
    output_checked(request.max_output_tokens, "max_output_tokens", call.settings)
    inner = replace(call, body=_as_chat(call.body, request))
    prepared = chat.prepare(inner, chat.read(inner))
    planned, refusal = call.planned(prepared.generation)
    transcript = Transcript(planned)
    response = ResponsesResponse(request, prepared, transcript)
    priority = call.priority(request.priority)
    return Job(transcript, response, bool(request.stream), call.behavior, prepared.refusal or refusal, priority=priority)


def not_found(response_id: str) -> ApiError:
    """Return the error of an unknown response ID."""
    return ApiError(f"Response with id '{response_id}' not found.", 404, "invalid_request_error", "response_id")


def _check(body: dict[str, Any]) -> None:
    if body.get("prompt") is not None:
        raise errors.bad("prompt template is not supported", "prompt")
    if body.get("background") and not body.get("store", True):
        raise errors.bad("background can only be used when `store` is true", "background")
    if body.get("background"):
        message = (
            "This vLLM engine does not support `store=True` and therefore does not support the background mode. To enable these "
            "features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server."
        )
        raise ApiError(message, 400, "invalid_request_error", "background")
    if not body.get("tools") and body.get("tool_choice") == "required":
        raise errors.bad("Tool choice 'required' must be specified with 'tools' parameter.", "tool_choice")
    if isinstance(body.get("tool_choice"), dict) and body["tool_choice"].get("name") not in _names(body.get("tools")):
        raise errors.bad("Tool choice 'function' not found in 'tools' parameter.", "tool_choice")


def _names(tools: Any) -> list[Any]:
    return [tool.get("name") for tool in tools or [] if isinstance(tool, dict)]


_PASSED = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "ignore_eos",
    "logit_bias",
    "cache_salt",
    "structured_outputs",
    "chat_template_kwargs",
    "include_reasoning",
    "parallel_tool_calls",
    "kv_transfer_params",
)


def _as_chat(body: dict[str, Any], request: ResponsesRequest) -> dict[str, Any]:
    """Return the chat request with the same prompt, limits and tools."""
    chat_body = {name: body[name] for name in _PASSED if name in body}
    tools = [_tool(tool) for tool in request.tools if tool.get("type") == "function"]
    chat_body |= {"messages": _messages(request), "max_tokens": request.max_output_tokens}
    if tools:
        chat_body |= {"tools": tools, "tool_choice": _choice(request.tool_choice)}
    if request.reasoning and request.reasoning.get("effort"):
        chat_body["reasoning_effort"] = request.reasoning["effort"]
    if "message.output_text.logprobs" in (request.include or []):
        chat_body |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    return chat_body | _format((request.text or {}).get("format"))


def _format(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("type") not in ("json_object", "json_schema"):
        return {}
    return {"response_format": {"type": given["type"], "json_schema": {"name": given.get("name"), "schema": given.get("schema", {})}}}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: tool.get(name) for name in ("name", "description", "parameters")}}


def _choice(choice: str | dict[str, Any]) -> Any:
    return choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice.get("name")}}


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    instructions = [{"role": "system", "content": request.instructions}] if request.instructions else []
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    return instructions + [_message(item) for item in items if item.get("type") != "reasoning"]


def _message(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type") == "function_call_output":
        return {"role": "tool", "content": str(item.get("output"))}
    if item.get("type") == "function_call":
        return {"role": "assistant", "content": f"{item.get('name')}({item.get('arguments')})"}
    return {"role": item.get("role", "user"), "content": item.get("content")}


class ResponsesResponse(ResponseShape):
    """A response's shapes: numbered events, one output item open at a time."""

    def __init__(self, request: ResponsesRequest, prepared: Prepared, transcript: Transcript) -> None:
        self._request = request
        self._prepared = prepared
        self._transcript = transcript
        self._id = request.request_id or f"resp_{random_id()}"
        self._created = now()
        self._sequence = 0
        self._open: TokenKind | None = None
        self._item = ""
        self._text = ""
        self._output: list[dict[str, Any]] = []

    @property
    def _generated(self) -> GeneratedChoice:
        return self._transcript.choices[0]

    def opening(self) -> Iterator[bytes]:
        begun = self._response("in_progress", [], None)
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def step(self, emissions: list[Emission]) -> Iterator[bytes]:
        for emission in emissions:
            if emission.token is not None and emission.token.kind is not TokenKind.SILENT:
                yield from self._shown(emission.token)

    def closing(self) -> Iterator[bytes]:
        yield from self._close()
        yield self._event("response.completed", response=self._response(self._status(), self._output, self._usage()))

    def _shown(self, token: Token) -> Iterator[bytes]:
        if token.kind is TokenKind.REASONING and not self._request.include_reasoning:
            return
        if token.kind is TokenKind.ARGUMENTS:
            yield from self._more("response.function_call_arguments.delta", token.text)
            return
        if token.kind is TokenKind.CALL or token.kind is not self._open:
            yield from self._close()
            yield from self._begin(token)
        if token.kind is TokenKind.REASONING:
            yield from self._more("response.reasoning_text.delta", token.text, content_index=0)
        elif token.kind is TokenKind.CONTENT:
            yield from self._more("response.output_text.delta", token.text, content_index=0, logprobs=[])

    def _more(self, name: str, delta: str, **fields: Any) -> Iterator[bytes]:
        self._text += delta
        yield self._event(name, **fields, delta=delta, item_id=self._item, output_index=len(self._output))

    def _begin(self, token: Token) -> Iterator[bytes]:
        self._open, self._text = token.kind, ""
        prefix, part = _PARTS[token.kind]
        self._item = f"{prefix}_{random_id()}"
        yield self._event("response.output_item.added", item=self._begun(token.kind), output_index=len(self._output))
        if part is not None:
            position = {"item_id": self._item, "output_index": len(self._output)}
            yield self._event("response.content_part.added", content_index=0, **position, part=part)

    def _begun(self, kind: TokenKind) -> dict[str, Any]:
        if kind is TokenKind.REASONING:
            return _reasoning(self._item, None, "in_progress")
        if kind is TokenKind.CONTENT:
            return _message_item(self._item, [], "in_progress")
        called = self._generated.calls[-1]
        return _call_item(self._item, called.id, called.name, "", "in_progress")

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        part: dict[str, Any] = {}
        position: dict[str, Any] = {"item_id": self._item, "output_index": len(self._output)}
        if self._open is TokenKind.REASONING:
            yield self._event("response.reasoning_text.done", content_index=0, **position, text=self._text)
            part = {"text": self._text, "type": "reasoning_text"}
            done = _reasoning(self._item, [part], "completed")
        elif self._open is TokenKind.CONTENT:
            yield self._event("response.output_text.done", content_index=0, **position, logprobs=[], text=self._text)
            part = {"annotations": [], "text": self._text, "type": "output_text", "logprobs": None}
            done = _message_item(self._item, [part], "completed")
        else:
            called = self._generated.calls[-1]
            yield self._event("response.function_call_arguments.done", arguments=self._text, **position, name=called.name)
            done = _call_item(self._item, called.id, called.name, self._text, "completed")
        if self._open is not TokenKind.CALL:
            yield self._event("response.content_part.done", content_index=0, **position, part=part)
        yield self._event("response.output_item.done", item=done, output_index=len(self._output))
        self._output.append(done)
        self._open = None

    def _event(self, event_type: str, **fields: Any) -> bytes:
        event = {**fields, "sequence_number": self._sequence, "type": event_type}
        self._sequence += 1
        return b"event: " + event_type.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"

    def body(self) -> dict[str, Any]:
        return self._response(self._status(), list(self._items()), self._usage())

    def _items(self) -> Iterator[dict[str, Any]]:
        choice = self._generated
        if choice.reasoning and self._request.include_reasoning:
            yield _reasoning(f"rs_{random_id()}", [{"text": choice.reasoning, "type": "reasoning_text"}], None)
        if choice.content:
            shown: dict[str, Any] = {"annotations": [], "text": choice.content, "type": "output_text", "logprobs": None}
            yield _message_item(f"msg_{random_id()}", [shown], "completed")
        for called in choice.calls:
            yield _call_item(f"fc_{random_id()}", called.id, called.name, called.arguments, "completed")

    def _status(self) -> str:
        return "incomplete" if self._generated.finish == "length" else "completed"

    def _usage(self) -> dict[str, Any]:
        read, made = self._transcript.prompt_tokens, self._transcript.completion_tokens
        cached = self._transcript.cached
        return {
            "input_tokens": read,
            "input_tokens_details": {
                "cached_tokens": cached,
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": made,
            "output_tokens_details": {
                "reasoning_tokens": self._transcript.reasoning_tokens,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": read + made,
        }

    def _response(self, status: str, output: list[dict[str, Any]], used: dict[str, Any] | None) -> dict[str, Any]:
        request = self._request
        return {
            "id": self._id,
            "created_at": self._created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "metadata": request.metadata,
            "model": self._prepared.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "tool_choice": request.tool_choice if request.tools else "none",
            "tools": [_shown_tool(tool) for tool in request.tools],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "background": bool(request.background),
            "max_output_tokens": self._prepared.generation.limit,
            "max_tool_calls": request.max_tool_calls,
            "previous_response_id": request.previous_response_id,
            "prompt": None,
            "reasoning": None if request.reasoning is None else _complete(request.reasoning, _REASONING),
            "service_tier": request.service_tier,
            "status": status,
            "text": None if request.text is None else _shown_text(request.text),
            "top_logprobs": request.top_logprobs if "message.output_text.logprobs" in (request.include or []) else None,
            "truncation": request.truncation or "disabled",
            "usage": used,
            "user": request.user,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }


_PARTS: dict[TokenKind, tuple[str, dict[str, Any] | None]] = {
    TokenKind.REASONING: ("rs", {"text": "", "type": "reasoning_text"}),
    TokenKind.CONTENT: ("msg", {"annotations": [], "text": "", "type": "output_text", "logprobs": []}),
    TokenKind.CALL: ("fc", None),
}


_FUNCTION = ("name", "parameters", "strict", "type", "allowed_callers", "async", "defer_loading", "description", "output_schema")
_REASONING = ("context", "effort", "generate_summary", "mode", "summary")
_SCHEMA = ("name", "schema", "type", "description", "strict")


def _complete(given: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return an object with every field of openai's own model."""
    return {name: given.get(name) for name in names}


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return _complete(tool, _FUNCTION) if tool.get("type") == "function" else tool


def _shown_text(text: dict[str, Any]) -> dict[str, Any]:
    wanted = text.get("format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        wanted = _complete(wanted, _SCHEMA)
    return {"format": wanted, "verbosity": text.get("verbosity")}


def _reasoning(item: str, content: list[dict[str, Any]] | None, status: str | None) -> dict[str, Any]:
    return {"id": item, "summary": [], "type": "reasoning", "content": content, "encrypted_content": None, "status": status}


def _message_item(item: str, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    return {"id": item, "content": content, "role": "assistant", "status": status, "type": "message", "phase": None}


def _call_item(item: str, call: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    fields = {"arguments": arguments, "call_id": call, "name": name, "type": "function_call", "id": item}
    return {**fields, "async": None, "caller": None, "namespace": None, "status": status}
