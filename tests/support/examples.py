"""The number of examples of a property test, by the profile of the run: few in ``make test``, many in ``make test-deep``."""

from __future__ import annotations

from hypothesis import settings

USUAL = 100
"""Hypothesis's default number. The numbers in the tests are relative to it."""


def examples(count: int) -> int:
    """Return the number of examples in this run for a test that declares ``count``; a test that declares no number uses ``USUAL``."""
    return max(1, count * settings().max_examples // USUAL)
