"""The requests and answers of every measurement: what clients send, and what the stand-in upstream returns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

MODEL = "bench-model"
TOKEN = "sk-bench-500"
"""The key that is used where a proxy knows one, and one of the thousand that the gateway knows."""

_CREATED = 1760000000
_EVENT_SIZE = 200
_STAMP = 19
"""Digits of `time.monotonic_ns()`, behind an `@`, which occurs in no event elsewhere."""


def chat(model: str = MODEL, size: int = 300, *, stream: bool = False) -> bytes:
    """A chat request of `size` bytes or a little more, with an `extra_body` to merge."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": ""}],
        "max_tokens": 128,
        "temperature": 0.7,
        "stream": stream,
        "extra_body": {"top_k": 20, "chat_template_kwargs": {"enable_thinking": False}},
    }
    body["messages"] = [{"role": "user", "content": "Why? " * ((size - len(json.dumps(body))) // 5)}]
    return json.dumps(body).encode()


def prompt() -> bytes:
    """A request for a stream of the older kind, /v1/completions."""
    return json.dumps({"model": MODEL, "prompt": "Why?", "max_tokens": 128, "temperature": 0.7, "stream": True}).encode()


def completion() -> bytes:
    """An answer of 750 bytes as vLLM words it, with usage."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None, "tool_calls": [], "reasoning": None}
    usage = {"prompt_tokens": 24, "total_tokens": 152, "completion_tokens": 128, "prompt_tokens_details": None}
    body = {
        "id": "chatcmpl-5f3c1a7e9b2d4c68a1e0",
        "object": "chat.completion",
        "created": _CREATED,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "service_tier": None,
        "usage": usage,
        "prompt_logprobs": None,
    }
    message["content"] = "Because " * ((750 - len(json.dumps(body, separators=(",", ":")))) // 8)
    return json.dumps(body, separators=(",", ":")).encode()


def models(names: Sequence[str]) -> bytes:
    """The list of models that a server of these names gives."""
    cards = [{"id": name, "object": "model", "created": 0, "owned_by": "vllm", "max_model_len": 32768} for name in names]
    return json.dumps({"object": "list", "data": cards}).encode()


def event(stamp: int) -> bytes:
    """An event of 200 bytes that says when it was made, in nanoseconds of the monotonic clock."""
    return _EVENT_START + b"%019d" % stamp + _EVENT_END


def counted_event(stamp: int, number: int) -> bytes:
    """The same event with the running usage that vLLM adds on request; `number` counts the events of its stream."""
    counts = b',"usage":{"prompt_tokens":24,"total_tokens":%d,"completion_tokens":%d}}\n\n' % (24 + number, number)
    return event(stamp).removesuffix(b"}\n\n") + counts


def stamp_in(data: bytes) -> int | None:
    """When the first event in `data` was made; None without a complete stamp."""
    start = data.find(b"@") + 1
    digits = data[start : start + _STAMP]
    return int(digits) if start and len(digits) == _STAMP and digits.isdigit() else None


def _event_around() -> tuple[bytes, bytes]:
    choice = {"index": 0, "delta": {"content": "@"}, "finish_reason": None}
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": _CREATED, "model": MODEL, "choices": [choice]}
    prefix, tail = json.dumps(body, separators=(",", ":")).split("@")
    filling = " " * (_EVENT_SIZE - len(f"data: {prefix}@{tail}\n\n") - _STAMP)
    return f"data: {prefix}@".encode(), f"{filling}{tail}\n\n".encode()


def prompt_event() -> bytes:
    """An event of an answer to `prompt`."""
    choice = {"index": 0, "text": " Because", "logprobs": None, "finish_reason": None, "stop_reason": None}
    body = {"id": "cmpl-1", "object": "text_completion", "created": _CREATED, "model": MODEL, "choices": [choice], "usage": None}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


_EVENT_START, _EVENT_END = _event_around()

_COUNTS = b'"usage":{"prompt_tokens":24,"total_tokens":152,"completion_tokens":128}'
USAGE = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1760000000,"model":"bench-model","choices":[],%b}\n\n' % _COUNTS
)
DONE = b"data: [DONE]\n\n"


def request(body: bytes, path: str = "/v1/chat/completions", token: str = TOKEN) -> bytes:
    """A whole request."""
    headers = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nauthorization: Bearer {token}\r\n"
    return f"{headers}content-length: {len(body)}\r\n\r\n".encode() + body
