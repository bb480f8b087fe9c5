"""Write the errors for exceeded limits, with their ``Retry-After``: which limit, its state, and what lets the request pass. Pure.

The rule: a time to wait appears only if the same request can pass after it. A request that reserves more than a whole budget gets none.
"""

from __future__ import annotations

import math

from gateway.api.errors import Refusal, duration
from gateway.limits.decision import RATES
from gateway.limits.estimate import TokenEstimate
from gateway.limits.windows import ExceededLimit
from gateway.snapshot.money import Price, completion_within, decimal_of

_ROUNDING = 1e-6  # as in ``decision``


def limit_text(reason: str, limit: float) -> str:
    """Write a limit: a rate, or a budget with its window, such as ``tokens_per_7d``."""
    if reason == "concurrent":
        return f"{_number(limit)} requests at once"
    kind, _, window = reason.partition("_per_")
    return f"a cost of {_cost(limit)} per {window}" if kind == "cost" else f"{_number(limit)} {kind} per {window}"


def refusal(holder: str, exceeded: ExceededLimit, estimated: TokenEstimate, price: Price | None) -> Refusal:
    """Return the error for an exceeded limit.

    ``estimated``: what the request reserves, where ``max_tokens`` bounds the completion; ``price``: the model's.
    """
    seconds = max(math.ceil(exceeded.wait or 0), 1)
    is_cost, is_quota = exceeded.reason.startswith("cost"), exceeded.reason not in RATES
    written = _cost if is_cost else _number
    limit, left = limit_text(exceeded.reason, exceeded.limit), math.floor(exceeded.left + _ROUNDING)  # whole tokens, or nano-units
    reserved = f"{'a cost of ' if is_cost else ''}{written(exceeded.requested)}{'' if is_cost else ' tokens'}"
    now = _most_tokens(exceeded.reason, left, estimated, price)
    fits = [f"Set 'max_tokens' to at most {_number(now)}"] if now else []
    advice, waits = fits, True
    if exceeded.requested > exceeded.limit:
        state = f"This request reserves {reserved}, more than the whole limit of {limit} ({holder})."
        detail = f"reserves {reserved}, more than the whole {limit}"
        waits = not is_quota  # a request larger than a rate is admitted when its bucket is full
        if not now and not waits:
            ever = _most_tokens(exceeded.reason, exceeded.limit, estimated, price)
            later = f"Set 'max_tokens' to at most {_number(ever)}; it then fits in {duration(seconds)}, when the limit is free again"
            advice = [later if ever else "Shorten the input, or ask the operator for a higher limit"]
    elif left <= 0:
        state = f"The limit of {limit} is reached ({holder})."
        detail = f"{limit} are used up"
    else:
        are = "is" if is_cost else "are"
        state = f"This request reserves {reserved}, and of the limit of {limit} only {written(left)} {are} left ({holder})."
        detail = f"reserves {reserved}, and {written(left)} of {limit} {are} left"
    if exceeded.reason.endswith("_per_session"):
        advice, waits = [*fits, "start a new session" if fits else "Start a new session"], False
    if waits:
        advice = [*advice, f"{'try' if advice else 'Try'} again in {duration(seconds)}"]
    headers = {"x-should-retry": "false"} if is_quota else {}
    if waits:
        headers["retry-after"] = str(seconds)
    refused = Refusal("insufficient_quota" if is_quota else "rate_limit_exceeded", f"{state} {', or '.join(advice)}.", headers=headers)
    refused.limit, refused.limit_holder, refused.detail = exceeded.reason, holder, f"{exceeded.reason} of {holder}: {detail}"
    return refused


def _most_tokens(reason: str, capacity: float, estimated: TokenEstimate, price: Price | None) -> int:
    """Return the largest ``max_tokens`` that lets a request fit into what is left; 0 if none does."""
    if estimated.completion < 2:
        return 0
    if not reason.startswith("cost"):
        return max(math.floor((capacity - estimated.prompt) / estimated.choices + _ROUNDING), 0)
    fits = math.inf if price is None else completion_within(int(capacity), estimated.prompt, price)
    return 0 if fits == math.inf else max(int(fits) // estimated.choices, 0)


def _number(value: float) -> str:
    return f"{value:,.12g}"


def _cost(nano: float) -> str:
    return f"{decimal_of(int(nano)):,f}"
