"""The affinity key of a request: the number that requests with the same prefix share, by which ``balance: prefix`` chooses a server.

vLLM caches prompts in blocks, from the beginning on. What is hashed of a request, and why:

* **Everything up to the first user message** (the system prompt, ``instructions``, a developer's message), **and that message**.
  Each turn of a conversation sends both again, so all its turns have one number, and other conversations have others.
* **Of the user's message only its first ``HEAD`` characters.** Questions about one long text that stands before them share a number; and
  what is hashed is bounded: a prompt of a megabyte costs no more than one of two kilobytes.
* **Of a system prompt its beginning and its length.** It is the same for all requests of an application; by itself it would send all
  of them to one server. So applications whose long texts are in the system prompt have them cached on several servers.
* **The ``cache_salt``**, which keeps requests apart in the cache.
* **A client that knows better says so** by ``x-session-id``: requests with the same one belong together, whatever they say.

CRC-32, because it is quick, and the same in every process, as Python's own hash is not; it need not withstand anybody:
whoever makes numbers collide meets the bound on load. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any
from zlib import crc32

import orjson

HEAD = 2048
"""Characters of a user's message or a raw prompt; some 500 tokens."""
SYSTEM_HEAD = 512
TOKENS = 512
"""Of a prompt that is given as tokens."""
MESSAGES = 8
"""Messages, or parts of one, that are looked at."""


def affinity_key(document: Mapping[str, Any], session: bytes | None = None) -> int | None:
    """The number of a merged request body; None for one without a text to begin with. ``session``: the value of x-session-id."""
    if session:
        return crc32(session[:HEAD])
    number = 0
    for piece in _pieces(document):
        number = crc32(piece, number)
    salt = document.get("cache_salt")
    if number and isinstance(salt, str):
        number = crc32(_bytes(salt[:HEAD]), number)
    return number or None


def _pieces(document: Mapping[str, Any]) -> Iterator[bytes]:
    for name in ("system", "instructions"):
        yield from _system(document.get(name))
    for name in ("messages", "input", "prompt"):
        begin = document.get(name)
        if isinstance(begin, str):
            yield _bytes(begin[:HEAD])
        elif isinstance(begin, list) and begin:
            yield from _messages(begin) if isinstance(begin[0], dict) else _raw(begin)


def _messages(messages: list[Any]) -> Iterator[bytes]:
    for message in islice(messages, MESSAGES):
        if not isinstance(message, dict):
            return
        if message.get("role") == "user":
            yield from _parts(message.get("content"), HEAD)
            return
        yield from _system(message.get("content"))


def _system(content: Any) -> Iterator[bytes]:
    if isinstance(content, str | list):
        yield from _parts(content, SYSTEM_HEAD)
        yield b"%d" % len(content)


def _parts(content: Any, head: int) -> Iterator[bytes]:
    """The text of a message, up to ``head`` characters of it; of an image the beginning of its URL."""
    parts = [content] if isinstance(content, str) else content if isinstance(content, list) else []
    for part in islice(parts, MESSAGES):
        text = _text(part)[:head]
        yield _bytes(text)
        head -= len(text)
        if not head:
            return


def _text(part: Any) -> str:
    if isinstance(part, dict):
        part = part.get("text") or part.get("image_url")
        part = part.get("url") if isinstance(part, dict) else part
    return part if isinstance(part, str) else ""


def _raw(prompt: list[Any]) -> Iterator[bytes]:
    """Several texts, of which the first stands for all; or tokens, or several lists of those."""
    if isinstance(prompt[0], str):
        yield _bytes(prompt[0][:HEAD])
        return
    tokens = prompt[0] if isinstance(prompt[0], list) else prompt
    yield orjson.dumps([token for token in tokens[:TOKENS] if isinstance(token, int)])


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
