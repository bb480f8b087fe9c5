"""The affinity key of a request: equal for requests with an equal prefix. ``balance: prefix`` chooses a server by it.

vLLM caches prompts in blocks, from their start. The key hashes the following parts of a request:

* **Everything up to the first user message** (the system prompt, ``instructions``, a developer's message), **and that message**. Each
  request of a conversation sends both again, so a conversation has one key, and different conversations have different keys.
* **Only the first ``USER_PREFIX`` characters of the user message.** Questions that follow the same long text share a key. The hashed
  text is also bounded: a prompt of a megabyte costs no more than a prompt of two kilobytes.
* **The start and the length of a system prompt.** All requests of an application have the same system prompt, and its full text would
  send them all to one server. So a long system prompt of an application is cached on several servers.
* **The ``cache_salt``**, which separates requests in vLLM's cache.
* **The header ``x-session-id`` instead of all of this**, for a client that sets it: requests with the same value belong together.

The hash is CRC-32: it is fast, and equal in every process, unlike Python's own. Collisions need no defense: the bound on a server's load
limits their effect. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any
from zlib import crc32

import orjson

USER_PREFIX = 2048
"""Maximum characters of a user message or a raw prompt; about 500 tokens."""
SYSTEM_PREFIX = 512
PREFIX_TOKENS = 512
"""Maximum token IDs of a prompt that is sent as tokens."""
MAX_MESSAGES = 8
"""Maximum messages, or parts of a message, that are read."""


def affinity_key(document: Mapping[str, Any], session: bytes | None = None) -> int | None:
    """Return the affinity key of a merged request body; None if it has no text. ``session``: the value of x-session-id."""
    if session:
        return crc32(session[:USER_PREFIX])
    key = 0
    for piece in _pieces(document):
        key = crc32(piece, key)
    salt = document.get("cache_salt")
    if key and isinstance(salt, str):
        key = crc32(_bytes(salt[:USER_PREFIX]), key)
    return key or None


def _pieces(document: Mapping[str, Any]) -> Iterator[bytes]:
    for name in ("system", "instructions"):
        yield from _system(document.get(name))
    for name in ("messages", "input", "prompt"):
        prompt = document.get(name)
        if isinstance(prompt, str):
            yield _bytes(prompt[:USER_PREFIX])
        elif isinstance(prompt, list) and prompt:
            yield from _messages(prompt) if isinstance(prompt[0], dict) else _raw(prompt)


def _messages(messages: list[Any]) -> Iterator[bytes]:
    for message in islice(messages, MAX_MESSAGES):
        if not isinstance(message, dict):
            return
        if message.get("role") == "user":
            yield from _parts(message.get("content"), USER_PREFIX)
            return
        yield from _system(message.get("content"))


def _system(content: Any) -> Iterator[bytes]:
    if isinstance(content, str | list):
        yield from _parts(content, SYSTEM_PREFIX)
        yield b"%d" % len(content)


def _parts(content: Any, limit: int) -> Iterator[bytes]:
    """Yield the text of a message, up to ``limit`` characters. An image is read by the start of its URL."""
    parts = [content] if isinstance(content, str) else content if isinstance(content, list) else []
    for part in islice(parts, MAX_MESSAGES):
        text = _text(part)[:limit]
        yield _bytes(text)
        limit -= len(text)
        if not limit:
            return


def _text(part: Any) -> str:
    if isinstance(part, dict):
        part = part.get("text") or part.get("image_url")
        part = part.get("url") if isinstance(part, dict) else part
    return part if isinstance(part, str) else ""


def _raw(prompt: list[Any]) -> Iterator[bytes]:
    """Yield a raw prompt: the first of several texts, or token IDs, or the first of several lists of token IDs."""
    if isinstance(prompt[0], str):
        yield _bytes(prompt[0][:USER_PREFIX])
        return
    tokens = prompt[0] if isinstance(prompt[0], list) else prompt
    yield orjson.dumps([token for token in tokens[:PREFIX_TOKENS] if isinstance(token, int)])


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
