"""How limits stand, as headers in OpenAI's words: ``x-ratelimit-{limit,remaining,reset}-{requests,tokens}``. Pure.

Source: OpenAI's guide on rate limits. ``reset`` is the time until all of the limit is there again, as Go writes
durations: ``17ms``, ``1s``, ``6m0s``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from gateway.limits.rules import Standing


def lines(requests: Iterable[Standing], tokens: Iterable[Standing]) -> bytes:
    """Header lines for the tightest limit of each kind; none for a kind that is not limited."""
    return _lines(b"requests", requests) + _lines(b"tokens", tokens)


def _lines(kind: bytes, standings: Iterable[Standing]) -> bytes:
    tightest = min(standings, key=lambda each: (each.remaining, -each.reset), default=None)
    if tightest is None:
        return b""
    limit, remaining, reset = tightest
    return b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %d\r\nx-ratelimit-reset-%b: %b\r\n" % (
        kind, limit, kind, remaining, kind, duration(reset).encode()
    )  # fmt: skip


def duration(seconds: float) -> str:
    """Seconds as Go writes them, in whole milliseconds, rounded up."""
    whole = math.ceil(seconds * 1000 - 1e-3)
    if whole < 1000:
        return f"{whole}ms" if whole > 0 else "0s"
    minutes, rest = divmod(whole, 60_000)
    hours, minutes = divmod(minutes, 60)
    shown = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{shown}"
    return f"{minutes}m{shown}" if minutes else shown
