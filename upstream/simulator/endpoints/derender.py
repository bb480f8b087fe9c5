"""POST /v1/chat/completions/derender: the token IDs of a chunk as the chunk of a chat stream (entrypoints/scale_out/derender in vLLM 0.32).

The rule: no state is stored. The client repeats the tokens before the chunk in ``stream_state``. Only streams are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, TypeAdapter, ValidationError, model_validator

from upstream.simulator import errors
from upstream.simulator.endpoints import chat, usage
from upstream.simulator.endpoints.chat import ChatRequest, NamedTool
from upstream.simulator.endpoints.fields import Fields
from upstream.simulator.engine.job import ApiRequest, ToolCall, now, random_id
from upstream.simulator.text import tokenizer
from upstream.simulator.text.parser import Parser
from upstream.simulator.text.plan import Token, TokenKind

CONTEXT = 4
"""The last tokens that vLLM carries to decode log probabilities."""

ChatRequestField = Annotated[ChatRequest, BeforeValidator(lambda value: chat.with_tool_choice(value) if isinstance(value, dict) else value)]


class ChunkChoice(Fields):
    """The tokens of a choice in a chunk."""

    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class Usage(Fields):
    """The usage of a chunk."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class GenerateChunk(Fields):
    """An event of a stream of POST /inference/v1/generate."""

    request_id: str = Field(default_factory=random_id)
    usage: Usage | None = None
    choices: list[ChunkChoice]


class StreamState(Fields):
    """The state that the client carries from one chunk to the next."""

    prev_tokens: list[str] = Field(default_factory=list, max_length=1024)
    prefix_offset: NonNegativeInt = 0
    read_offset: NonNegativeInt = 0
    role_sent: bool = False
    logprob_context_token_ids: list[int] = Field(default_factory=list, max_length=CONTEXT)
    logprob_text_offset: NonNegativeInt = 0
    output_token_ids: list[int] = Field(default_factory=list)
    output_chunk_lens: list[Annotated[int, Field(gt=0)]] = Field(default_factory=list)
    tools_streamed: bool = False
    last_tool_call_ids: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_chunks(self) -> StreamState:
        total, length = sum(self.output_chunk_lens), len(self.output_token_ids)
        if total != length:
            raise ValueError(f"output_chunk_lens must sum to len(output_token_ids) (got sum={total}, len(output_token_ids)={length})")
        return self


class DerenderChatRequest(Fields):
    """The body for a whole response. pydantic names the class in vLLM's errors, as that of the next one."""

    stream: Literal[False] = False
    generate_response: dict[str, Any]
    chat_request: ChatRequestField | None = None


class DerenderChatStreamRequest(Fields):
    """The body for a chunk."""

    stream: Literal[True]
    generate_chunk: GenerateChunk
    stream_state: StreamState | None = None
    prompt_tokens: int | None = None
    prompt_token_ids: list[NonNegativeInt] | None = None
    chat_request: ChatRequestField | None = None


_BODY: TypeAdapter[DerenderChatRequest | DerenderChatStreamRequest] = TypeAdapter(DerenderChatRequest | DerenderChatStreamRequest)


def chat_chunk(call: ApiRequest) -> dict[str, Any]:
    """Return the chunk and the next state. Raises ApiError."""
    try:
        body = _BODY.validate_python(call.body)
    except ValidationError as error:
        raise errors.malformed(error.errors(include_url=False), ("body",)) from error
    if isinstance(body, DerenderChatRequest):
        raise errors.not_simulated("The simulator derenders streams only.")
    model = call.model()
    _check(call, body)
    chunk, state = body.generate_chunk, body.stream_state or StreamState()
    choices = []
    for choice in chunk.choices:
        shown, state = _derendered(call, body.chat_request, choice, state)
        choices.append(shown)
    event = {"id": chunk.request_id, "object": "chat.completion.chunk", "created": now(), "model": model, "choices": choices}
    nothing = {"system_fingerprint": None, "prompt_token_ids": None, "prompt_text": None, "metrics": None}
    return {"chunk": {**event, "usage": _usage(body), **nothing}, "stream_state": state.model_dump()}


def _check(call: ApiRequest, body: DerenderChatStreamRequest) -> None:
    """Check what vLLM checks before it decodes. Raises ApiError."""
    if _parses(call) and body.chat_request is None:
        raise errors.plain(
            "chat_request is required when a tool or reasoning parser is configured because plain detokenization would leak raw parser "
            "markup into content."
        )
    if _parses(call) and body.prompt_token_ids is None:
        raise errors.plain(
            "prompt_token_ids is required when a tool or reasoning parser is configured. Without it parse_delta cannot tell whether the "
            "prompt left reasoning open (e.g. a chat template that pre-opens <think>) and would misclassify reasoning content as plain "
            "content."
        )
    choices = body.generate_chunk.choices
    if len(choices) > 1:
        raise errors.plain(f"derender_chat_stream expects at most one choice per chunk (got {len(choices)}).")
    prompt, prior = len(body.prompt_token_ids or ()), len(body.stream_state.output_token_ids if body.stream_state else ())
    delta, limit = sum(len(choice.token_ids or ()) for choice in choices), call.settings.max_model_len
    if prompt + prior + delta > limit:
        raise errors.plain(
            f"prompt_token_ids length ({prompt}) plus output_token_ids length ({prior}) plus delta ({delta}) exceeds max_model_len "
            f"({limit})."
        )


def _parses(call: ApiRequest) -> bool:
    return call.settings.reasoning_parser is not None or call.settings.tool_parser is not None


def _usage(body: DerenderChatStreamRequest) -> dict[str, Any] | None:
    counted = body.generate_chunk.usage
    if counted is None:
        return None
    prompt = counted.prompt_tokens if body.prompt_tokens is None else body.prompt_tokens
    return usage.without_details(prompt, counted.completion_tokens or 0)


def _derendered(
    call: ApiRequest, request: ChatRequest | None, choice: ChunkChoice, state: StreamState
) -> tuple[dict[str, Any], StreamState]:
    """Return a choice of a chat chunk, and the next state."""
    ids, parses = choice.token_ids or [], _parses(call)
    parser = Parser(thinking=request is not None and chat.thinks(call, request))
    before, tokens = ([parser.token(tokenizer.piece_of(each)) for each in some] for some in (state.output_token_ids, ids))
    calls = _Calls(before, state.last_tool_call_ids)
    delta: dict[str, Any] = {
        "role": None if state.role_sent else "assistant",
        "content": _joined(tokens, TokenKind.CONTENT),
        "reasoning": _joined(tokens, TokenKind.REASONING) if request is None or request.include_reasoning else None,
    }
    called = calls.deltas(tokens)
    streamed = state.tools_streamed or bool(called)
    if request is not None and request.parallel_tool_calls is False:
        called = [each for each in called if each["index"] == 0]
    finish = choice.finish_reason
    if finish is not None and streamed and not (request is not None and isinstance(request.tool_choice, NamedTool)):
        finish = "tool_calls"
    shows_ids = request is not None and request.return_token_ids and (request.include_reasoning or not parses)
    shown = {
        "index": choice.index,
        "delta": delta | ({"tool_calls": called} if called else {}),
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids if shows_ids else None,
    }
    changes = _parsed_changes(state, ids, streamed, calls.ids) if parses else _plain_changes(state, ids)
    return shown, state.model_copy(update={"role_sent": True, **changes})


def _joined(tokens: Sequence[Token], kind: TokenKind) -> str | None:
    return "".join(token.text for token in tokens if token.kind is kind) or None


def _parsed_changes(state: StreamState, ids: list[int], streamed: bool, calls: list[str]) -> dict[str, Any]:
    """Return the changes for a server with parsers: vLLM carries all tokens, and how they were grouped into chunks."""
    lengths = [*state.output_chunk_lens, *([len(ids)] if ids else [])]
    tokens = [*state.output_token_ids, *ids]
    return {"output_token_ids": tokens, "output_chunk_lens": lengths, "tools_streamed": streamed, "last_tool_call_ids": calls}


def _plain_changes(state: StreamState, ids: list[int]) -> dict[str, Any]:
    """Return the changes without a parser: vLLM carries the last tokens. Here a token never depends on those before it."""
    window = [*state.prev_tokens, *map(tokenizer.piece_of, ids)][-1:]
    return {
        "prev_tokens": window,
        "read_offset": len(window),
        "logprob_context_token_ids": [*state.logprob_context_token_ids, *ids][-CONTEXT:],
    }


class _Calls:
    """The calls of tools so far. ``ids``: known ids, which are not changed."""

    def __init__(self, before: Sequence[Token], ids: Sequence[str]) -> None:
        self.ids = list(ids)
        self._count = sum(token.kind is TokenKind.CALL for token in before)

    def deltas(self, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        """Return what the tokens add to the calls, one object for each call."""
        found: dict[int, dict[str, Any]] = {}
        for token in tokens:
            if token.kind is TokenKind.CALL:
                self._count += 1
                index = self._count - 1
                if index == len(self.ids):
                    self.ids.append(ToolCall.named(token.text).id)
                found[index] = _delta(index, id=self.ids[index], type="function", name=token.text)
            elif token.kind is TokenKind.ARGUMENTS:
                function = found.setdefault(self._count - 1, _delta(self._count - 1))["function"]
                function["arguments"] = (function["arguments"] or "") + token.text
        return list(found.values())


def _delta(index: int, *, id: str | None = None, type: str | None = None, name: str | None = None) -> dict[str, Any]:
    return {"id": id, "type": type, "index": index, "function": {"name": name, "arguments": None}}
