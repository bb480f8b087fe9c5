"""Log probabilities: invented, the same for the same token at the same place, and ordered as they must be."""

from __future__ import annotations

from typing import Any

from upstream.simulator.text.speaker import WORDS, seed_of
from upstream.simulator.text.tokenizer import generated, pieces

Ranked = list[tuple[str, float]]


def ranked(piece: str, at: int, count: int) -> Ranked:
    """Return the token itself, then ``count - 1`` other tokens with decreasing probability. The result has at least the token itself."""
    draw = seed_of(piece, at)
    logprob = -(draw % 997) / 1000
    others = ((" " + WORDS[(draw + rank) % len(WORDS)], logprob - rank - 0.25) for rank in range(1, count))
    return [(piece, logprob), *others]


def chat_entry(piece: str, at: int, count: int, *, as_ids: bool = False) -> dict[str, Any]:
    """Return one element of a chat choice's ``logprobs.content``."""
    entries = [_entry(f"token_id:{generated(name)}" if as_ids else name, logprob) for name, logprob in ranked(piece, at, count)]
    return {**entries[0], "top_logprobs": entries[:count]}


def token_entry(piece: str, at: int, count: int) -> dict[str, Any]:
    """Return one element of the ``logprobs.content`` of /inference/v1/generate."""
    ids = ((generated(pieces(name)[0]), logprob) for name, logprob in ranked(piece, at, count))
    entries = [{"token_id": token_id, "logprob": logprob, "rank": rank} for rank, (token_id, logprob) in enumerate(ids, 1)]
    return {**entries[0], "top_logprobs": entries[: max(count, 1)]}


def _entry(name: str, logprob: float) -> dict[str, Any]:
    return {"token": name, "logprob": logprob, "bytes": list(name.encode("utf-8", "replace"))}


def completion_logprobs(parts: list[str], at: int, offset: int, count: int) -> dict[str, Any]:
    """Return a completion choice's ``logprobs`` for some tokens. ``at`` and ``offset``: the position of the first token."""
    each = [ranked(piece, at + number, max(count, 1)) for number, piece in enumerate(parts)]
    offsets = []
    for piece in parts:
        offsets.append(offset)
        offset += len(piece)
    return {
        "text_offset": offsets,
        "token_logprobs": [entries[0][1] for entries in each],
        "tokens": parts,
        "top_logprobs": [dict(entries) for entries in each],
    }
