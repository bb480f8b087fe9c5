"""Refusals by a limit, as a client reads them: which limit, how it stands, and what lets the request pass. Pure.

The rule: a time to wait appears only where the same request can pass after it. A request that reserves more than the whole of a
day's or a month's limit gets none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from gateway.api.errors import Refusal, duration
from gateway.limits import rules
from gateway.limits.estimate import TokenEstimate
from gateway.limits.rules import ExceededLimit

_MILLION = 1_000_000
_ROUNDING = 1e-6  # as in ``rules``

_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "concurrent": "{} requests at once",
        "requests_per_minute": "{} requests per minute",
        "tokens_per_minute": "{} tokens per minute",
        "tokens_per_day": "{} tokens per day",
        "tokens_per_month": "{} tokens per month",
        "cost_per_day": "a cost of {} per day",
        "cost_per_month": "a cost of {} per month",
    }
)


def refusal(holder: str, refused: ExceededLimit, guess: TokenEstimate, price: tuple[float, float] | None) -> Refusal:
    """A limit that has no room for a request.

    ``guess``: what the request reserves, of which ``max_tokens`` bounds the completion; ``price`` is per million tokens.
    """
    seconds = max(math.ceil(refused.wait or 0), 1)
    is_cost, is_quota = refused.reason.startswith("cost"), refused.reason in rules.QUOTAS
    limit, left = _WORDS[refused.reason].format(_number(refused.limit)), _rounded(refused.left, is_cost)
    reserved = f"{'a cost of ' if is_cost else ''}{_number(refused.requested)}{'' if is_cost else ' tokens'}"
    now = _most_tokens(refused.reason, left, guess, price)
    cures = [f"Set 'max_tokens' to at most {_number(now)}"] if now else []
    waits = True
    if refused.requested > refused.limit:
        state = f"This request reserves {reserved}, more than the whole limit of {limit} ({holder})."
        ever = _most_tokens(refused.reason, refused.limit, guess, price)
        waits = not is_quota
        if not now and waits and ever:
            cures = [f"Set 'max_tokens' to at most {_number(ever)}"]
        elif not now and ever:
            cures = [f"Set 'max_tokens' to at most {_number(ever)}; it then fits in {duration(seconds)}, when the limit is free again"]
        elif not now and not waits:
            cures = ["Shorten the input, or ask the operator for a higher limit"]
    elif left <= 0:
        state = f"The limit of {limit} is reached ({holder})."
    else:
        are = "is" if is_cost else "are"
        state = f"This request reserves {reserved}, and of the limit of {limit} only {_number(left)} {are} left ({holder})."
    if waits:
        cures.append(f"{'try' if cures else 'Try'} again in {duration(seconds)}")
    headers = {"x-should-retry": "false"} if is_quota else {}
    if waits:
        headers["retry-after"] = str(seconds)
    return Refusal("insufficient_quota" if is_quota else "rate_limit_exceeded", f"{state} {', or '.join(cures)}.", headers=headers)


def _most_tokens(reason: str, room: float, guess: TokenEstimate, price: tuple[float, float] | None) -> int:
    """The largest ``max_tokens`` with which a request fits into what is left; 0 where none does."""
    if guess.completion < 2:
        return 0
    tokens = room - guess.prompt
    if reason.startswith("cost"):
        if price is None or price[1] <= 0:
            return 0
        tokens = (room * _MILLION - guess.prompt * price[0]) / price[1]
    return max(math.floor(tokens / guess.choices + _ROUNDING), 0)


def _rounded(left: float, is_cost: bool) -> float:
    """Whole tokens, or millionths of the currency."""
    return math.floor(left * _MILLION) / _MILLION if is_cost else math.floor(left + _ROUNDING)


def _number(value: float) -> str:
    return f"{value:,.12g}" if value >= 1 else f"{value:.12g}"
