"""Write the errors for exceeded limits: which limit, its state, and what lets the request pass. Pure.

The rule: a time to wait appears only if the same request can pass after it. A request that reserves more than the whole limit of a
day or a month gets none.
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

_NAMES: Mapping[str, str] = MappingProxyType(
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


def refusal(holder: str, exceeded: ExceededLimit, estimated: TokenEstimate, price: tuple[float, float] | None) -> Refusal:
    """Return the error for an exceeded limit.

    ``estimated``: what the request reserves, where ``max_tokens`` bounds the completion; ``price`` is per million tokens.
    """
    seconds = max(math.ceil(exceeded.wait or 0), 1)
    is_cost, is_quota = exceeded.reason.startswith("cost"), exceeded.reason in rules.QUOTAS
    limit, left = _NAMES[exceeded.reason].format(_number(exceeded.limit)), _rounded(exceeded.left, is_cost)
    reserved = f"{'a cost of ' if is_cost else ''}{_number(exceeded.requested)}{'' if is_cost else ' tokens'}"
    now = _most_tokens(exceeded.reason, left, estimated, price)
    advice = [f"Set 'max_tokens' to at most {_number(now)}"] if now else []
    waits = True
    if exceeded.requested > exceeded.limit:
        state = f"This request reserves {reserved}, more than the whole limit of {limit} ({holder})."
        ever = _most_tokens(exceeded.reason, exceeded.limit, estimated, price)
        waits = not is_quota
        if not now and waits and ever:
            advice = [f"Set 'max_tokens' to at most {_number(ever)}"]
        elif not now and ever:
            advice = [f"Set 'max_tokens' to at most {_number(ever)}; it then fits in {duration(seconds)}, when the limit is free again"]
        elif not now and not waits:
            advice = ["Shorten the input, or ask the operator for a higher limit"]
    elif left <= 0:
        state = f"The limit of {limit} is reached ({holder})."
    else:
        are = "is" if is_cost else "are"
        state = f"This request reserves {reserved}, and of the limit of {limit} only {_number(left)} {are} left ({holder})."
    if waits:
        advice.append(f"{'try' if advice else 'Try'} again in {duration(seconds)}")
    headers = {"x-should-retry": "false"} if is_quota else {}
    if waits:
        headers["retry-after"] = str(seconds)
    return Refusal("insufficient_quota" if is_quota else "rate_limit_exceeded", f"{state} {', or '.join(advice)}.", headers=headers)


def _most_tokens(reason: str, capacity: float, estimated: TokenEstimate, price: tuple[float, float] | None) -> int:
    """Return the largest ``max_tokens`` with which a request fits into what is left; 0 if none does."""
    if estimated.completion < 2:
        return 0
    tokens = capacity - estimated.prompt
    if reason.startswith("cost"):
        if price is None or price[1] <= 0:
            return 0
        tokens = (capacity * _MILLION - estimated.prompt * price[0]) / price[1]
    return max(math.floor(tokens / estimated.choices + _ROUNDING), 0)


def _rounded(left: float, is_cost: bool) -> float:
    """Round down to whole tokens, or to millionths of the currency."""
    return math.floor(left * _MILLION) / _MILLION if is_cost else math.floor(left + _ROUNDING)


def _number(value: float) -> str:
    return f"{value:,.12g}" if value >= 1 else f"{value:.12g}"
