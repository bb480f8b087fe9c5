"""POST /tokenize and /detokenize (entrypoints/serve/tokenize in vLLM 0.32)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from upstream.simulator.endpoints import chat, fields
from upstream.simulator.endpoints.fields import Fields
from upstream.simulator.engine.job import ApiRequest
from upstream.simulator.text import tokenizer


class TokenizeRequest(Fields):
    """The body of POST /tokenize with a prompt."""

    prompt: str
    return_token_strs: bool | None = False


class TokenizeChatRequest(chat.ChatRequest):
    """The body of POST /tokenize with messages."""

    return_token_strs: bool | None = False


class DetokenizeRequest(Fields):
    """The body of POST /detokenize."""

    tokens: list[Annotated[int, Field(ge=0, le=2**63 - 1)]]


def tokenize(call: ApiRequest) -> dict[str, Any]:
    """Return the ids of a prompt, or of messages as the chat template renders them. Raises ApiError."""
    call.model()
    text, wants_strings = _chat_text(call) if "messages" in call.body else _text(call)
    pieces = tokenizer.pieces(text)
    return {
        "count": len(pieces),
        "max_model_len": call.settings.max_model_len,
        "tokens": [tokenizer.number(piece) for piece in pieces],
        "token_strs": pieces if wants_strings else None,
    }


def _text(call: ApiRequest) -> tuple[str, bool]:
    request = fields.read(TokenizeRequest, call.body)
    return request.prompt, bool(request.return_token_strs)


def _chat_text(call: ApiRequest) -> tuple[str, bool]:
    request = fields.read(TokenizeChatRequest, call.body)
    return chat.rendered(call, request).text, bool(request.return_token_strs)


def detokenize(call: ApiRequest) -> dict[str, Any]:
    """Return the text of token IDs. Raises ApiError."""
    request = fields.read(DetokenizeRequest, call.body)
    call.model()
    return {"prompt": tokenizer.decode(request.tokens)}
