"""Write the state of limits as OpenAI's headers: ``x-ratelimit-{limit,remaining,reset}-{requests,tokens}``. Pure.

Source: OpenAI's guide on rate limits. ``reset`` is the time until all of the limit is available again, as Go writes durations:
``17ms``, ``1s``, ``6m0s``.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from gateway.limits.rules import BucketState, bucket_state
from gateway.snapshot.snapshot import Limits


def header_lines(buckets: Iterable[tuple[Limits, float, float]], now: float) -> bytes:
    """Return header lines for the tightest limit of each kind; none for a kind without limits.

    ``buckets``: limits, and when their buckets of requests and of tokens are full again.
    """
    requests: BucketState | None = None
    tokens: BucketState | None = None
    for limits, requests_full, tokens_full in buckets:
        if limits.requests_per_minute is not None:
            state = bucket_state(limits.requests_per_minute, requests_full, now)
            requests = state if requests is None else _tighter(requests, state)
        if limits.tokens_per_minute is not None:
            state = bucket_state(limits.tokens_per_minute, tokens_full, now)
            tokens = state if tokens is None else _tighter(tokens, state)
    lines = b"" if requests is None else _REQUESTS % (requests.limit, requests.remaining, duration(requests.reset))
    return lines if tokens is None else lines + _TOKENS % (tokens.limit, tokens.remaining, duration(tokens.reset))


def _tighter(one: BucketState, other: BucketState) -> BucketState:
    return one if (one.remaining, -one.reset) <= (other.remaining, -other.reset) else other


_LINES = b"x-ratelimit-limit-%b: %%d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%b\r\n"
_REQUESTS, _TOKENS = (_LINES % (kind, kind, kind) for kind in (b"requests", b"tokens"))


def duration(seconds: float) -> bytes:
    """Write seconds as Go does, in whole milliseconds, rounded up."""
    whole = ceil(seconds * 1000 - 1e-3)
    if whole < 1000:
        return b"%dms" % whole if whole > 0 else b"0s"
    minutes, rest = divmod(whole, 60_000)
    state = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if minutes == 0:
        return state.encode()
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h{minutes}m{state}" if hours else f"{minutes}m{state}").encode()
