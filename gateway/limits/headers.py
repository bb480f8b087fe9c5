"""How limits stand, as headers in OpenAI's words: ``x-ratelimit-{limit,remaining,reset}-{requests,tokens}``. Pure.

Source: OpenAI's guide on rate limits. ``reset`` is the time until all of the limit is there again, as Go writes
durations: ``17ms``, ``1s``, ``6m0s``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from gateway.limits.rules import Meter, Standing, standing
from gateway.state import Limits


def lines(found: Iterable[tuple[Limits, Meter]], now: float) -> bytes:
    """Header lines for the tightest limit of each kind; none for a kind that is not limited."""
    requests: Standing | None = None
    tokens: Standing | None = None
    for limits, meter in found:
        if limits.requests_per_minute is not None:
            requests = _tighter(requests, standing(limits.requests_per_minute, meter.requests, now))
        if limits.tokens_per_minute is not None:
            tokens = _tighter(tokens, standing(limits.tokens_per_minute, meter.tokens, now))
    return _lines(b"requests", requests) + _lines(b"tokens", tokens)


def _tighter(one: Standing | None, other: Standing) -> Standing:
    return one if one is not None and (one.remaining, -one.reset) <= (other.remaining, -other.reset) else other


def _lines(kind: bytes, shown: Standing | None) -> bytes:
    if shown is None:
        return b""
    limit, remaining, reset = shown
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
