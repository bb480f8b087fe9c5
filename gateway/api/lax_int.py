"""What a server reads as a whole number, though it may be written in another form. Pure.

vLLM's fields are pydantic's, which takes ``50.0``, ``"50"``, ``" 5_0 "`` and ``true`` for integers (its lax mode). The rule: whatever
it takes for a number above 0 is read here as the same. What it refuses may be read as a number or not: its server answers with an error.
(Of numbers below 1 it also takes such as ``"0-5"``, which is none here.)
"""

from __future__ import annotations

import re
from typing import Any

MOST = 2**63 - 1
"""Larger numbers in texts, which pydantic has, are as good as this one."""

_TEXT = re.compile(r"([+-]?)([0-9][0-9_]*)(?:\.0+)?", re.ASCII)
_LONGEST = 18  # digits of a number that is surely below ``MOST``
_LONG = 4300  # digits that pydantic reads at most, leading zeros aside


def lax_int(value: Any) -> int | None:
    """A member of a JSON object as a whole number; None for what is none."""
    kind = type(value)
    if kind is int or kind is bool:
        return int(value)
    if kind is float:
        return int(value) if value.is_integer() and abs(value) <= MOST else None
    return _of_text(value) if kind is str else None


def _of_text(text: str) -> int | None:
    text = text.strip()
    found = _TEXT.fullmatch(text if len(text) <= _LONG else _shortened(text))
    if found is None:
        return None
    digits = found[2].replace("_", "").lstrip("0") or "0"
    number = int(digits) if len(digits) <= _LONGEST else MOST
    return -number if found[1] == "-" else number


def _shortened(text: str) -> str:
    """A long text without its zeros and with a bounded number of digits: a pattern is slow on megabytes."""
    number, point, fraction = text.replace("_", "").partition(".")
    if point and (not fraction or fraction.strip("0")):
        return ""
    return ("-0" if number.startswith("-") else "0") + number.lstrip("+-0")[:_LONG]
