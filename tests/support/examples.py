"""How many examples a property is tried with, by the profile of the run: few for a change (``make test``), many in ``make test-deep``."""

from __future__ import annotations

from hypothesis import settings

USUAL = 100
"""Hypothesis's own number, to which the numbers in the tests relate."""


def examples(count: int) -> int:
    """Return how many examples stand for ``count`` in this run; a property without a number of its own stands for ``USUAL``."""
    return max(1, count * settings().max_examples // USUAL)
