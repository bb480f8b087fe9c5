"""The blocks of a prompt, which ``balance: cost`` looks up in the prefix index.

The canonical prompt is JSON text: the tools, the system prompt and the messages in their order, a raw prompt, or token IDs. Two requests
with the same start have the same text up to the end of what they share. It is cut into blocks of ``BLOCK_BYTES``, and the key of a block
depends on all text before it. The rules:

* **Equal in all processes.** A key is made with CRC-32 and the hash of two integers, which do not depend on the process.
* **Separate caches have separate keys.** The chain starts with the LoRA adapter and the ``cache_salt``, so tenants with different
  salts share nothing.
* **Media count by their digest.** An image of several megabytes is not cut into blocks.
* **Bounded.** Only the first ``MOST_BLOCKS`` blocks of a prompt have keys.

A collision makes the index wrong about one block, which costs time on the server and nothing else. Pure.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any
from zlib import crc32

import orjson

from upstream.balancing.cost_model import BLOCK_BYTES, Prompt

MOST_BLOCKS = 4096
"""Two megabytes of text: about 500,000 tokens."""
_STEP = 256  # blocks that are hashed without a pause: less than a millisecond
_SESSION_BYTES = 512
_FIRST = ("tools", "documents", "system", "instructions")
_PROMPTS = ("messages", "input", "prompt")


def prompt_of(document: Mapping[str, Any], adapter: str | None = None, session: bytes | None = None) -> Generator[None, None, Prompt]:
    """Return the blocks of a merged request body, in steps.

    ``adapter``: the ID of the LoRA adapter that the request names. ``session``: the value of x-session-id.
    """
    text = b"".join(_json(value) for name in _FIRST if (value := document.get(name)) is not None)
    for name in _PROMPTS:
        if (value := document.get(name)) is not None:
            text += yield from _prompt(value)
    salt = document.get("cache_salt")
    adapter_key = None if adapter is None else hash((1, crc32(adapter.encode())))
    key = hash((adapter_key or 0, crc32(salt.encode("utf-8", "surrogatepass")))) if isinstance(salt, str) else adapter_key or 0
    keys: list[int] = []
    end = min(len(text) // BLOCK_BYTES, MOST_BLOCKS) * BLOCK_BYTES
    for first in range(0, end, _STEP * BLOCK_BYTES):
        if first:
            yield
        last = min(first + _STEP * BLOCK_BYTES, end)
        keys += [key := hash((key, crc32(text[start : start + BLOCK_BYTES]))) for start in range(first, last, BLOCK_BYTES)]
    return Prompt(
        keys,
        len(text),
        stream=document.get("stream") is True,
        session=None if not session else hash((2, crc32(session[:_SESSION_BYTES]))),
        adapter=adapter_key,
    )


def _prompt(value: Any) -> Generator[None, None, bytes]:
    """Return the text of a prompt: messages, a text, token IDs, or the first of several texts or lists of token IDs."""
    if isinstance(value, list) and value:
        first = value[0]
        if isinstance(first, dict):
            return _json((yield from _without_media(value)))
        if isinstance(first, str | list):
            return _json(first)  # the engine treats each other prompt of the array as a separate request
    return _json(value)


def _without_media(messages: list[Any]) -> Generator[None, None, list[Any]]:
    """Return the messages, with a digest in place of each part that is not text."""
    if not any(isinstance(message, dict) and isinstance(message.get("content"), list) for message in messages):
        return messages
    found = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            found.append(message)
            continue
        parts = []
        for part in content:
            if isinstance(part, dict) and "text" not in part:
                part = crc32(_json(part))
                yield
            parts.append(part)
        found.append({**message, "content": parts})
    return found


def _json(value: Any) -> bytes:
    """Return a value as JSON; nothing for what orjson refuses and msgspec accepts, e.g. an integer of more than 64 bits."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return b""
