"""Prices, costs and amounts: exact in every place."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.usage import Usage
from gateway.snapshot.money import (
    MAX_COST,
    MAX_COST_LIMIT,
    MAX_PRICE,
    NANO,
    Price,
    cost_of,
    decimal_of,
    decimal_text,
    highest_cost,
    json_number,
    nano_units,
    rounded_nano_units,
)
from tests.support.money import price

prices = st.builds(Price, *[st.integers(0, MAX_PRICE * NANO)] * 4)
tokens = st.integers(0, 2**40)
usages = st.builds(Usage, tokens, tokens, tokens, tokens)


@given(usages, prices)
def test_a_cost_is_the_sum_of_all_tokens_rounded_once(used: Usage, each: Price) -> None:
    cached, reasoning = min(used.cached, used.prompt), min(used.reasoning, used.completion)
    exact = (
        Fraction(used.prompt - cached) * each.prompt
        + Fraction(cached) * each.cached
        + Fraction(used.completion - reasoning) * each.completion
        + Fraction(reasoning) * each.reasoning
    ) / 1_000_000
    assert cost_of(used, each) == min(round(exact), MAX_COST), "Fraction rounds half to even"


@given(usages, prices)
def test_no_split_of_the_tokens_costs_more_than_the_highest_cost(used: Usage, each: Price) -> None:
    assert cost_of(used, each) <= highest_cost(used.prompt, used.completion, each)


@pytest.mark.parametrize(
    ("used", "each", "cost"),
    [
        (Usage(5010, 98), price(1, 3), 5_304_000),
        (Usage(5010, 100), price(1, 3), 5_310_000),
        (Usage(10, 0, cached=4), price(1, 0, cached=0.1), 6_400),
        (Usage(0, 10, reasoning=4), price(0, 1, reasoning=2), 14_000),
        (Usage(1), Price(500_000, 0, 500_000, 0), 0),
        (Usage(3), Price(500_000, 0, 500_000, 0), 2),
        (Usage(1, 1), Price(300_000, 300_000, 300_000, 300_000), 1),
        (Usage(2, cached=3), price(1, 1, cached=0.5), 1000),
    ],
    ids=["truncated", "complete", "cached", "reasoning", "half to even: down", "half to even: up", "rounded once", "cached beyond prompt"],
)
def test_costs(used: Usage, each: Price, cost: int) -> None:
    assert cost_of(used, each) == cost


amounts = st.integers(0, 10**15 - 1).flatmap(
    lambda digits: st.builds(lambda decimals: Decimal(digits).scaleb(-decimals), st.integers(0, 9))
)


@given(amounts)
def test_an_amount_is_read_as_it_is_written(amount: Decimal) -> None:
    """A float64 keeps up to 15 digits."""
    assert nano_units(float(str(amount))) == amount * NANO


@pytest.mark.parametrize("amount", [0.0000000001, 0.1234567891, 0.30000000000000004, 123456789.123456789, 1e-300])
def test_an_amount_with_too_many_digits_is_refused(amount: float) -> None:
    with pytest.raises(ValueError, match="at most 9 digits after the decimal point, and at most 15 in total"):
        nano_units(amount)


def test_the_bounds_are_exact() -> None:
    assert nano_units(MAX_PRICE) == 10**18 <= MAX_COST
    assert int(float(nano_units(MAX_COST_LIMIT))) == 9 * 10**15 < 2**53, "counts of limits are float64"


def test_amounts_of_earlier_versions_are_rounded() -> None:
    assert [rounded_nano_units(each) for each in (0.2, 1e-10, 1.5e-9, 1e30)] == [200_000_000, 0, 2, MAX_COST]


@given(st.integers(-(10**40), 10**40))
def test_an_amount_is_written_with_all_of_its_digits(nano: int) -> None:
    text = decimal_text(nano)
    assert Fraction(text) == Fraction(nano, NANO) and "E" not in text.upper()
    assert bytes(json_number(nano)).decode() == text
    assert f"{decimal_of(nano):f}" == text


def test_decimals() -> None:
    amounts = (0, 1, 300_000_000, 12 * NANO, -1_500_000_000)
    assert [decimal_text(nano) for nano in amounts] == ["0", "0.000000001", "0.3", "12", "-1.5"]
