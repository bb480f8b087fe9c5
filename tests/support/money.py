"""Prices and amounts in units of the currency, as tests write them."""

from __future__ import annotations

from gateway.snapshot.money import Price, nano_units


def price(prompt: float, completion: float, cached: float | None = None, reasoning: float | None = None) -> Price:
    """Make a price from those of a million tokens of each kind."""
    of_cached, of_reasoning = prompt if cached is None else cached, completion if reasoning is None else reasoning
    return Price(nano_units(prompt), nano_units(completion), nano_units(of_cached), nano_units(of_reasoning))
