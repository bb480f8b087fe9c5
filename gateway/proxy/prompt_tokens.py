"""The request to ``/tokenize`` that gives a prompt's token IDs, exactly as the server computes them for the request itself. Pure.

Servers that publish KV cache events are compared by token IDs. Only a server knows its chat template, its tokenizer and their settings,
so the server computes the IDs. The rule: a request whose prompt ``/tokenize`` cannot express has no plan, and is compared by its text.
Examples are requests with media, which the server would load twice, requests with several prompts, and routes whose prompt vLLM builds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

_MOST_TOKENS = 1_000_000
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_UNEXPRESSED = ("truncate_prompt_tokens", "prompt_logprobs", "prompt_embeds", "chat_template", "mm_processor_kwargs", "media_io_kwargs")
"""Fields with an effect on the prompt or on the use of the cache that ``/tokenize`` does not have, or that need more than text."""
_PASSED = ("add_generation_prompt", "continue_final_message", "add_special_tokens", "tools")
_TEMPLATE_FIELDS = ("documents", "reasoning_effort")
"""Fields that vLLM passes on to the chat template (``build_chat_params`` in vllm/entrypoints/openai/chat_completion/protocol.py)."""


class TokenPlan(NamedTuple):
    """How to get the token IDs of a prompt.

    ``token_ids``: those of the request itself, if it has them. ``fields``: otherwise, of the request to ``/tokenize``.
    ``salt``: the request's ``cache_salt``.
    """

    token_ids: Sequence[int] | None
    fields: Mapping[str, Any] | None
    salt: str | None

    def body(self, model: str) -> bytes:
        """Return the body of the request to ``/tokenize``. ``model``: the name under which the server knows the model."""
        return orjson.dumps({"model": model, **(self.fields or {})})


def token_plan(document: Mapping[str, Any], path: str) -> TokenPlan | None:
    """Return how to get the token IDs of a request; None if there is no exact way. ``path``: the server's route."""
    if any(document.get(name) is not None for name in _UNEXPRESSED):
        return None
    salt = document.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        return None
    if path == _CHAT:
        fields = _chat_fields(document)
        return None if fields is None else TokenPlan(None, fields, salt)
    return _completion_plan(document, salt) if path == _COMPLETIONS else None


def _chat_fields(document: Mapping[str, Any]) -> dict[str, Any] | None:
    messages = document.get("messages")
    if not isinstance(messages, list) or not all(map(_is_text, messages)):
        return None
    given = document.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        return None
    kwargs = {name: document[name] for name in _TEMPLATE_FIELDS if document.get(name) is not None}
    if "reasoning_effort" in kwargs and "enable_thinking" not in given:
        kwargs["enable_thinking"] = kwargs["reasoning_effort"] != "none"
    fields = {name: document[name] for name in _PASSED if document.get(name) is not None}
    return {"messages": messages, **fields, **({"chat_template_kwargs": given | kwargs} if given or kwargs else {})}


def _is_text(message: Any) -> bool:
    """Return whether a message has no media."""
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    return not isinstance(content, list) or all(
        isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text") for part in content
    )


def _completion_plan(document: Mapping[str, Any], salt: str | None) -> TokenPlan | None:
    prompt = document.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        is_tokens = 0 < len(prompt) <= _MOST_TOKENS and all(type(each) is int and 0 <= each < 2**32 for each in prompt)
        return TokenPlan(prompt, None, salt) if is_tokens else None
    if not isinstance(prompt, str) or not prompt:
        return None
    special = document.get("add_special_tokens")
    return TokenPlan(None, {"prompt": prompt, **({} if special is None else {"add_special_tokens": special})}, salt)
