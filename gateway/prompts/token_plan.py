"""The way to the token IDs of a prompt, exactly as the server computes them for the request itself. Pure.

Servers that publish KV cache events are compared by token IDs. Only a server knows its chat template, its tokenizer and their settings,
so the server computes the IDs. The rule: a request whose prompt ``/tokenize`` does not express exactly
(``gateway.api.vllm.prompt_count``) has no plan, and is compared by its text. Examples are requests with media, which the server would
load twice, and with several prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from gateway.api.vllm.prompt_count import tokenize_request

_COMPLETIONS = "/v1/completions"
_UNPLANNED = ("prompt_logprobs", "prompt_embeds", "truncate_prompt_tokens", "media_io_kwargs", "mm_processor_kwargs")
"""Fields of prompts that are not cached, that are not only text, or that are truncated."""


class TokenPlan(NamedTuple):
    """How to get the token IDs of a prompt.

    ``token_ids``: the request's own token IDs, if it has them. ``fields``: otherwise, of the request to ``/tokenize``.
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
    salt = document.get("cache_salt")
    if any(document.get(name) is not None for name in _UNPLANNED) or not (salt is None or isinstance(salt, str)):
        return None
    if path == _COMPLETIONS:
        prompt = document.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, list):
            is_tokens = bool(prompt) and all(type(each) is int and 0 <= each < 2**32 for each in prompt)
            return TokenPlan(prompt, None, salt) if is_tokens else None
        document = {**document, "prompt": prompt}
    if (request := tokenize_request(path, dict(document))) is None:
        return None
    messages = [] if "prompt" in request.body else request.body.get("messages")
    return TokenPlan(None, request.body, salt) if isinstance(messages, list) and all(map(_is_text, messages)) else None


def _is_text(message: Any) -> bool:
    """Return whether a message has no media."""
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    return content is None or isinstance(content, str) or (isinstance(content, list) and all(map(_is_text_part, content)))


def _is_text_part(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text")
