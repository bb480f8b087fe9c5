"""The simulator's tokenizer: text to numbered pieces and back, with no vocabulary to load.

A piece is a special token, up to five ASCII letters or digits with the space before them, or one character.
The rule: ``decode(encode(text)) == text`` for every text, and a piece has the same number in every process.

A generated piece has another number than the same piece of a prompt. So the simulator, which has no model, finds the start of a response in
a prompt, and continues it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

SPECIALS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
END: Final = "<|im_end|>"
THOUGHT: Final = "</think>"
CALL: Final = "<tool_call>"
CALLED: Final = "</tool_call>"

MAX_CHARS_PER_TOKEN: Final = max(map(len, SPECIALS))

_PIECE: Final = re.compile("|".join(map(re.escape, SPECIALS)) + r"| ?[A-Za-z0-9]{1,5}|[\s\S]")
_GENERATED: Final = 1 << 50
_NUMBER_OF_SPECIAL: Final = {text: number for number, text in enumerate(SPECIALS)}


def pieces(text: str) -> list[str]:
    """Return the pieces of a text. Joined they are the text."""
    return _PIECE.findall(text)


def number(piece: str) -> int:
    """Return a piece's token id: its UTF-8 bytes after a leading 1, so that it is below 2**49 and needs no table."""
    special = _NUMBER_OF_SPECIAL.get(piece)
    return special if special is not None else int.from_bytes(b"\x01" + piece.encode("utf-8", "replace"))


def generated(piece: str) -> int:
    """Return the token id of a generated piece."""
    return number(piece) | _GENERATED


def is_generated(token_id: int) -> bool:
    """Return whether this is the id of a generated piece."""
    return bool(token_id & _GENERATED)


def encode(text: str) -> list[int]:
    """Return the token ids of a text."""
    return [number(piece) for piece in pieces(text)]


def decode(ids: Iterable[int]) -> str:
    """Return the text of token ids. An unknown ID, which a client may send, is decoded to its number as text."""
    return "".join(map(piece_of, ids))


def piece_of(token_id: int) -> str:
    """Return the piece with this id."""
    token_id &= ~_GENERATED
    if token_id < len(SPECIALS):
        return SPECIALS[token_id]
    raw = token_id.to_bytes((token_id.bit_length() + 7) // 8)
    return raw[1:].decode("utf-8", "replace") if raw[0] == 1 and len(raw) > 1 else f" {token_id}"
