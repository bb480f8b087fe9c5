"""Money: prices, the cost of a request, and exact decimals. Pure.

The rules: money is whole nano-units everywhere inside the gateway, an ``int`` in billionths of the operator's currency. So sums
are exact in memory, in Redis and in both databases. A cost is rounded once for each request, half to even, never for each kind of
token. Only ``cost_of`` computes a cost.
"""

from __future__ import annotations

from decimal import Decimal
from math import inf
from typing import TypeAlias

import msgspec

from gateway.api.usage import Usage

NANO = 1_000_000_000
"""Nano-units in one unit of the currency."""
MAX_COST = 2**63 - 1
"""The largest cost of one request, in nano-units: the maximum of an integer column of the ledger."""
MAX_PRICE = 1_000_000_000
"""The largest price of a million tokens, in units of the currency."""
MAX_COST_LIMIT = 9_000_000
"""The largest limit on cost, in units of the currency. Counts of limits are float64, which is exact up to 2**53 nano-units."""
MAX_DECIMALS, MAX_DIGITS = 9, 15
"""Digits of an amount in the configuration: after the decimal point, and in total. A float64 keeps 15 decimal digits exactly."""
_MILLION = 1_000_000


TokenCounts: TypeAlias = Usage  # as the limits name it


class Price(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Prices in nano-units per million tokens. ``prompt`` is for prompt tokens that were not cached, ``completion`` without reasoning."""

    prompt: int
    completion: int
    cached: int
    reasoning: int


def cost_of(tokens: Usage, price: Price) -> int:
    """Return the cost of a request in nano-units, at most ``MAX_COST``."""
    prompt, completion = tokens.prompt, tokens.completion
    cached = min(tokens.cached, prompt)
    reasoning = min(tokens.reasoning, completion)
    return _per_million(
        (prompt - cached) * price.prompt + cached * price.cached + (completion - reasoning) * price.completion + reasoning * price.reasoning
    )


def highest_cost(prompt: int, completion: int, price: Price) -> int:
    """Return the maximum cost of a number of tokens in nano-units, whether or not they are cached or reasoning tokens."""
    return _per_million(prompt * highest_prompt_price(price) + completion * highest_completion_price(price))


def completion_within(cost: int, prompt: int, price: Price) -> float:
    """Return the completion tokens that cost at most this together with a prompt: infinite if they are free."""
    each = highest_completion_price(price)
    return (cost * _MILLION - prompt * highest_prompt_price(price)) // each if each else inf


def highest_prompt_price(price: Price) -> int:
    """Return the higher price of the two kinds of prompt tokens."""
    return max(price.prompt, price.cached)


def highest_completion_price(price: Price) -> int:
    """Return the higher price of the two kinds of completion tokens."""
    return max(price.completion, price.reasoning)


def _per_million(total: int) -> int:
    """Divide by a million, rounded half to even."""
    whole, rest = divmod(total, _MILLION)
    if rest * 2 > _MILLION or (rest * 2 == _MILLION and whole % 2):
        whole += 1
    return min(whole, MAX_COST)


def nano_units(amount: float) -> int:
    """Return an amount in units of the currency as whole nano-units. Raises ValueError with a message for the operator.

    A text of up to 15 digits is the shortest one of its float64, so its decimals are recovered exactly.
    """
    exact = Decimal(repr(amount)).normalize()
    digits, exponent = exact.as_tuple()[1:]
    if int(exponent) < -MAX_DECIMALS or len(digits) > MAX_DIGITS:
        raise ValueError(f"expected at most {MAX_DECIMALS} digits after the decimal point, and at most {MAX_DIGITS} in total")
    return int(exact * NANO)


def rounded_nano_units(amount: float) -> int:
    """Return an amount in units of the currency as whole nano-units, rounded half to even and at most ``MAX_COST``."""
    return min(int((Decimal(repr(amount)) * NANO).to_integral_value()), MAX_COST)


def decimal_of(nano: int) -> Decimal:
    """Return nano-units as an exact decimal in units of the currency, without trailing zeros."""
    whole, rest = divmod(abs(nano), NANO)
    text = f"{whole}.{rest:09d}".rstrip("0").rstrip(".")
    return Decimal(f"-{text}" if nano < 0 else text)


def decimal_text(nano: int) -> str:
    """Write nano-units in units of the currency: all digits, without an exponent."""
    return f"{decimal_of(nano):f}"


def json_number(nano: int) -> msgspec.Raw:
    """Write nano-units in units of the currency as a number of JSON with all of its digits, for an encoder of msgspec."""
    return msgspec.Raw(decimal_text(nano).encode())
