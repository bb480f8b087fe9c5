"""Keys of KV cache blocks: 64 bits over a block's tokens and everything before them.

The hashes that vLLM publishes depend on its version, its settings and perhaps a random seed. The gateway therefore computes
its own keys, from the token IDs of events and of prompts. The rule: equal prefixes have equal keys in all processes, so no key depends
on Python's randomized ``hash``. As in vLLM, a block differs if its adapter, the request's ``cache_salt`` or its media differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

TOKEN_BYTES = 4
ROOT = 0
"""The key before the first block of a prompt without an adapter."""

ExtraKeys = Sequence[object] | None
"""The values that distinguish a block besides its tokens: the salt (in the first block), ``(digest, offset)`` of media. Most blocks have
none."""


def root_key(adapter: str | None) -> int:
    """Return the key before the first block of a prompt for a LoRA adapter, or for the base model (None)."""
    return ROOT if adapter is None else _key(ROOT, adapter.encode(), b"")


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Return token IDs as bytes, ``TOKEN_BYTES`` for each. Raises OverflowError for an ID above 32 bits or below 0."""
    return array("I", token_ids).tobytes()


def block_keys(parent: int, tokens: bytes, block_size: int, extra_keys: Sequence[ExtraKeys] = ()) -> list[int]:
    """Return the keys of consecutive full blocks.

    ``parent``: the key before the first one. ``tokens``: from ``token_bytes``; an unfinished last block is left out. ``extra_keys``: the
    extra keys of the first blocks; the others have none.
    """
    step = block_size * TOKEN_BYTES
    keys: list[int] = []
    for index, start in enumerate(range(0, len(tokens) - step + 1, step)):
        extra = extra_keys[index] if index < len(extra_keys) else None
        parent = _key(parent, msgspec.msgpack.encode(extra) if extra else b"", tokens[start : start + step])
        keys.append(parent)
    return keys


def prompt_keys(token_ids: Sequence[int], block_size: int, adapter: str | None = None, salt: str | None = None) -> list[int]:
    """Return the keys of the blocks of a prompt that vLLM may take from its cache.

    vLLM always computes the last token, and a block as a whole. If the prompt ends with a full block, this block is therefore left out.
    ``adapter``: the LoRA adapter's name on the server. ``salt``: the request's ``cache_salt``. Raises OverflowError for an invalid ID.
    """
    usable = max(len(token_ids) - 1, 0) // block_size * block_size
    return block_keys(root_key(adapter), token_bytes(token_ids[:usable]), block_size, ([salt],) if salt else ())


def _key(parent: int, extra: bytes, tokens: bytes) -> int:
    """Hash one block. The length of ``extra`` separates it from the tokens."""
    return int.from_bytes(blake2b(b"%b%b%b%b" % (parent.to_bytes(8), len(extra).to_bytes(4), extra, tokens), digest_size=8).digest())
