"""POST /v1/chat/completions: the request's rules and the shapes of the response (openai/chat_completion in vLLM 0.32)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from pydantic import Field

from upstream.simulator import errors
from upstream.simulator.endpoints import fields, usage
from upstream.simulator.endpoints.fields import Fields, OrZero, Sampling
from upstream.simulator.endpoints.streams import DONE, StreamShape, frame
from upstream.simulator.engine.engine import Emission
from upstream.simulator.engine.job import ApiRequest, GeneratedChoice, Job, Transcript, context_checked, fingerprint, now, output_checked
from upstream.simulator.errors import ApiError
from upstream.simulator.text.logprobs import chat_entry
from upstream.simulator.text.plan import GenerationRequest, Prompt, TokenKind, Tool


class Message(Fields):
    """A message of a conversation."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class Function(Fields):
    """The definition of a function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolParam(Fields):
    """A tool of a request."""

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(Fields):
    """The name of a function, in ``tool_choice``."""

    name: str


class NamedTool(Fields):
    """A ``tool_choice`` that names a function."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(Sampling):
    """The body of POST /v1/chat/completions."""

    messages: list[Message]
    logprobs: bool | None = False
    top_logprobs: OrZero = 0
    max_completion_tokens: int | None = None
    tools: list[ToolParam] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = "none"
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool = True
    parallel_tool_calls: bool | None = True
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_prompt_text: bool | None = None
    kv_transfer_params: dict[str, Any] | None = Field(None)

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def read(call: ApiRequest) -> ChatRequest:
    """Return the request, checked as vLLM checks it before rendering. Raises ApiError."""
    body = call.body
    fields.check_body(body)
    _check_logprobs(body)
    if body.get("continue_final_message") and body.get("add_generation_prompt"):
        raise errors.plain("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    return fields.read(ChatRequest, with_tool_choice(body))


def with_tool_choice(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with vLLM's default of ``tool_choice``. Raises ApiError for a choice that does not fit the tools."""
    return {**body, **_tool_choice(body)}


def _check_logprobs(body: dict[str, Any]) -> None:
    fields.check_logprobs(body, "top_logprobs")
    top = body.get("top_logprobs")
    if top is not None and (top == -1 or top > 0) and not body.get("logprobs"):
        raise errors.bad("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")


def _tool_choice(body: dict[str, Any]) -> dict[str, Any]:
    """``tool_choice`` with vLLM's default; raises Refusal for a choice that does not fit the tools."""
    tools = body.get("tools")
    if tools == []:
        message = "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely."
        raise errors.bad(message, "tools")
    if "tool_choice" not in body:
        return {"tool_choice": "auto"} if tools else {}
    choice = body["tool_choice"]
    if choice is None or choice == "none":
        return {}
    if tools is None:
        raise errors.bad("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if choice not in ("auto", "required") and not isinstance(choice, dict):
        message = f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or "required" are supported.'
        raise errors.bad(message, "tool_choice")
    if isinstance(choice, dict):
        _check_named(choice, tools)
    return {}


def _check_named(choice: dict[str, Any], tools: Any) -> None:
    usage_hint = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'
    function = choice.get("function")
    if not isinstance(function, dict):
        raise errors.bad(f"Invalid value for `function`: `{function}` in `tool_choice`! {usage_hint}", "tool_choice.function")
    if "name" not in function:
        raise errors.bad(f"Expected field `name` in `function` in `tool_choice`! {usage_hint}", "tool_choice.function.name")
    if function["name"] not in _names(tools):
        raise errors.bad("The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice")


def _names(tools: Any) -> list[Any]:
    return [tool["function"].get("name") for tool in tools if isinstance(tool, dict) and isinstance(tool.get("function"), dict)]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A chat request that has passed all checks, and its generation request."""

    request: ChatRequest
    generation: GenerationRequest
    model: str
    id: str
    refusal: ApiError | None


def job(call: ApiRequest) -> Job:
    """Understand a request. Raises ApiError."""
    request = read(call)
    prepared = prepare(call, request)
    planned, refusal = call.planned(prepared.generation)
    transcript = Transcript(planned)
    response = ChatResponse(call, prepared, transcript)
    priority = call.priority(request.priority)
    return Job(transcript, response, bool(request.stream), call.behavior, prepared.refusal or refusal, priority=priority)


def prepare(call: ApiRequest, request: ChatRequest) -> Prepared:
    """Render the prompt and check it against the model. Raises ApiError."""
    settings = call.settings
    model = call.model()
    _check_tools(call, request)
    untrusted = request.chat_template is not None or "chat_template" in (request.chat_template_kwargs or {})
    if untrusted and not settings.trust_chat_template:
        raise errors.plain(
            "Chat template is passed with request, but --trust-request-chat-template is not set. "
            "Refused request with untrusted chat template."
        )
    param = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
    output_checked(request.most_tokens, param, settings)
    thinking = thinks(call, request)
    prompt = rendered(call, request)
    context_checked(prompt.text, len(prompt.ids), settings)
    available = settings.max_model_len - len(prompt.ids)
    limit = available if request.most_tokens is None else min(available, request.most_tokens)
    fields.check_sampling(request, limit)
    generated = GenerationRequest(
        (prompt,),
        limit,
        n=request.n or 1,
        seed=request.seed,
        stops=request.stops,
        includes_stop=request.include_stop_str_in_output,
        minimum=request.min_tokens,
        ignore_end=request.ignore_eos,
        thinking=thinking,
        forced=fields.constraint(request),
        calls=_called(call, request),
        cache_salt=request.cache_salt or "",
    )
    refusal = fields.engine_refusal(request, request.top_logprobs if request.logprobs else None)
    return Prepared(request, generated, model, f"chatcmpl-{call.request_id()}", refusal)


def _check_tools(call: ApiRequest, request: ChatRequest) -> None:
    settings, choice = call.settings, request.tool_choice
    if choice in (None, "none") or (settings.tool_parser and (settings.auto_tools or choice != "auto")):
        return
    if choice == "auto":
        raise errors.plain('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    named = f'function "{choice.function.name}"' if isinstance(choice, NamedTool) else f'"{choice}"'
    raise errors.plain(f"tool_choice={named} requires --tool-call-parser to be set")


def thinks(call: ApiRequest, request: ChatRequest) -> bool:
    """Return whether the model reasons: with a reasoning parser, unless the template disables it."""
    effort = {} if request.reasoning_effort is None else {"enable_thinking": request.reasoning_effort != "none"}
    return template_thinks(call, {**effort, **(request.chat_template_kwargs or {})})


def template_thinks(call: ApiRequest, kwargs: dict[str, Any]) -> bool:
    """Return whether a prompt that the template has rendered with these arguments makes the model reason."""
    given = kwargs.get("enable_thinking")
    return call.settings.reasoning_parser is not None and (call.settings.thinks_by_default if given is None else bool(given))


def _called(call: ApiRequest, request: ChatRequest) -> tuple[Tool, ...]:
    """Return the tools that the model calls: the named tool, otherwise the first ones, and none after a tool's result."""
    tools = [Tool(tool.function.name, tool.function.parameters or {}) for tool in request.tools or []]
    choice = request.tool_choice
    if not tools or choice in (None, "none"):
        return ()
    if isinstance(choice, NamedTool):
        return tuple(tool for tool in tools if tool.name == choice.function.name)[:1]
    if choice == "auto" and request.messages and request.messages[-1].role == "tool":
        return ()
    count = call.behavior.tool_calls if choice == "auto" else max(1, call.behavior.tool_calls)
    count = min(count, 1) if request.parallel_tool_calls is False else count
    return tuple(tools[at % len(tools)] for at in range(count))


def rendered(call: ApiRequest, request: ChatRequest) -> Prompt:
    """Return the prompt, by a template like ChatML. ``prompt_token_ids`` replace it, as in vLLM."""
    replaced = (request.kv_transfer_params or {}).get("prompt_token_ids")
    if isinstance(replaced, list) and replaced:
        return Prompt.of_ids(replaced)
    parts = (
        ["<|im_start|>system\n", orjson.dumps([tool.model_dump() for tool in request.tools]).decode(), "<|im_end|>\n"]
        if request.tools
        else []
    )
    for message in request.messages:
        parts += ["<|im_start|>", message.role, "\n", _content(message), "<|im_end|>\n"]
    if request.continue_final_message:
        del parts[-1:]
    elif request.add_generation_prompt:
        parts += ["<|im_start|>assistant\n", "<think>\n" if thinks(call, request) else ""]
    return Prompt.of_text("".join(parts))


def _content(message: Message) -> str:
    content = message.content or ""
    text = content if isinstance(content, str) else "\n".join(str(part.get("text", f"<{part.get('type')}>")) for part in content)
    return text + (orjson.dumps(message.tool_calls).decode() if message.tool_calls else "")


class ChatResponse(StreamShape):
    """The shapes of a chat response."""

    def __init__(self, call: ApiRequest, prepared: Prepared, transcript: Transcript) -> None:
        self._settings = call.settings
        self._request = prepared.request
        self._transcript = transcript
        self._head = {"id": prepared.id, "object": "chat.completion.chunk", "created": now(), "model": prepared.model}
        self._prompt = prepared.generation.prompts[0]
        self._usage = usage.UsageOptions.of(prepared.request.stream_options, call.settings)
        self._parses = call.settings.reasoning_parser is not None or call.settings.tool_parser is not None
        self._hides = not prepared.request.include_reasoning and self._parses

    def step(self, emissions: list[Emission]) -> Iterator[bytes]:
        if not emissions:
            yield from self._roles()
        for emission in emissions:
            event = self._event(emission)
            if event is not None:
                yield event

    def closing(self) -> Iterator[bytes]:
        if self._usage.at_end:
            totals = usage.present(usage.chat(self._transcript, self._settings))
            yield frame({**self._head, "choices": [], "usage": totals, "system_fingerprint": fingerprint(self._settings)})
        yield DONE

    def _roles(self) -> Iterator[bytes]:
        ids = self._prompt.ids if self._request.return_token_ids else None
        text = self._prompt.text if self._request.return_prompt_text else None
        for at in range(len(self._transcript.choices)):
            choice = {"index": at, "delta": {"role": self._role, "content": ""}, "logprobs": None, "finish_reason": None}
            yield frame({**self._head, "choices": [choice], **self._running_usage(at), "prompt_token_ids": ids, "prompt_text": text})
            if self._echoed:
                echo = {"index": at, "delta": {"content": self._echoed}, "logprobs": None, "finish_reason": None}
                yield frame({**self._head, "choices": [echo], **self._running_usage(at)})

    @property
    def _role(self) -> str:
        return "assistant" if self._request.add_generation_prompt or not self._request.messages else self._request.messages[-1].role

    @property
    def _echoed(self) -> str:
        last = self._request.messages[-1] if self._request.echo and self._request.messages else None
        return _content(last) if last is not None and last.role == self._role else ""

    def _event(self, emission: Emission) -> bytes | None:
        generated = self._transcript.choices[emission.choice]
        delta = self._delta(emission, generated)
        logprobs = self._logprobs(emission, generated)
        ids = [emission.token.id] if emission.token and self._request.return_token_ids and not self._hides else None
        if delta is None and emission.finish is None and logprobs is None and ids is None:
            return None
        choice: dict[str, Any] = {"index": emission.choice, "delta": delta or {}, "logprobs": logprobs, "finish_reason": None}
        if emission.finish is not None:
            choice |= {"finish_reason": self._finish(generated), "stop_reason": emission.stop}
        event = {**self._head, "choices": [{**choice, "token_ids": ids}], **self._running_usage(emission.choice)}
        if emission.finish is not None and not self._usage.at_end:
            event["system_fingerprint"] = fingerprint(self._settings)
        return frame(event)

    def _delta(self, emission: Emission, generated: GeneratedChoice) -> dict[str, Any] | None:
        token = emission.token
        if token is None or token.kind is TokenKind.SILENT:
            return None if self._parses else {"content": ""}
        if token.kind is TokenKind.CONTENT:
            return {"content": token.text, "reasoning": None} if self._hides else {"content": token.text}
        if token.kind is TokenKind.REASONING:
            return {"reasoning": token.text} if self._request.include_reasoning else None
        index = len(generated.calls) - 1
        if token.kind is TokenKind.CALL:
            opened = {"id": generated.calls[index].id, "type": "function", "index": index, "function": {"name": token.text}}
            return {"tool_calls": [opened]}
        return {"tool_calls": [{"index": index, "function": {"arguments": token.text}}]}

    def _logprobs(self, emission: Emission, generated: GeneratedChoice) -> dict[str, Any] | None:
        if not self._request.logprobs or self._hides or emission.token is None:
            return None
        return {"content": [self._logprob(emission.token.piece, len(generated.tokens) - 1)]}

    def _logprob(self, piece: str, at: int) -> dict[str, Any]:
        return chat_entry(piece, at, self._request.top_logprobs, as_ids=bool(self._request.return_tokens_as_token_ids))

    def _finish(self, generated: GeneratedChoice) -> str | None:
        called = generated.finish == "stop" and generated.calls and not isinstance(self._request.tool_choice, NamedTool)
        return "tool_calls" if called else generated.finish

    def _running_usage(self, at: int) -> dict[str, Any]:
        return {"usage": usage.running_chat(self._transcript, at, self._settings)} if self._usage.running else {}

    def body(self) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(at, choice) for at, choice in enumerate(self._transcript.choices)],
            "service_tier": None,
            "system_fingerprint": fingerprint(self._settings),
            "usage": usage.chat(self._transcript, self._settings),
            "prompt_logprobs": None,
            "prompt_token_ids": self._prompt.ids if self._request.return_token_ids else None,
            "prompt_text": self._prompt.text if self._request.return_prompt_text else None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _choice(self, at: int, generated: GeneratedChoice) -> dict[str, Any]:
        shown = not self._hides
        logprobs = [self._logprob(token.piece, index) for index, token in enumerate(generated.tokens)]
        return {
            "index": at,
            "message": self._message(generated),
            "logprobs": {"content": logprobs} if self._request.logprobs and shown else None,
            "finish_reason": self._finish(generated),
            "stop_reason": generated.stop,
            "token_ids": [token.id for token in generated.tokens] if self._request.return_token_ids and shown else None,
            "routed_experts": None,
        }

    def _message(self, generated: GeneratedChoice) -> dict[str, Any]:
        forced = self._request.tool_choice == "required" or isinstance(self._request.tool_choice, NamedTool)
        message: dict[str, Any] = {
            "role": self._role,
            "content": (self._echoed + generated.content) or ("" if forced or not self._parses else None),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
        }
        if generated.calls:
            message["tool_calls"] = [
                {"id": called.id, "type": "function", "function": {"name": called.name, "arguments": called.arguments}}
                for called in generated.calls
            ]
        message["reasoning"] = (generated.reasoning or None) if self._request.include_reasoning else None
        return message
