"""Read integers as vLLM does, even if they are written in another form. Pure.

vLLM validates its fields with pydantic, which accepts ``50.0``, ``"50"``, ``" 5_0 "`` and ``true`` as integers (its lax mode). The
rule: a value that pydantic accepts as a number above 0 is read here as the same number. A value that pydantic rejects may be read or
not, since the server responds with an error. (Below 1 pydantic also accepts text such as ``"0-5"``, which is not read here.)
"""

from __future__ import annotations

import re
from typing import Any

MAX_INT = 2**63 - 1
"""Larger numbers in text, which pydantic accepts, are treated as this one."""

_TEXT = re.compile(r"([+-]?)([0-9][0-9_]*)(?:\.0+)?", re.ASCII)
_SAFE_DIGITS = 18  # digits of a number that is certainly below ``MAX_INT``
_MAX_DIGITS = 4300  # digits that pydantic reads at most, leading zeros aside


def lax_int(value: Any) -> int | None:
    """Return a JSON value as an integer; None if it is not one."""
    kind = type(value)
    if kind is int or kind is bool:
        return int(value)
    if kind is float:
        return int(value) if value.is_integer() and abs(value) <= MAX_INT else None
    return _of_text(value) if kind is str else None


def _of_text(text: str) -> int | None:
    text = text.strip()
    found = _TEXT.fullmatch(text if len(text) <= _MAX_DIGITS else _shortened(text))
    if found is None:
        return None
    digits = found[2].replace("_", "").lstrip("0") or "0"
    number = int(digits) if len(digits) <= _SAFE_DIGITS else MAX_INT
    return -number if found[1] == "-" else number


def _shortened(text: str) -> str:
    """Return a long text without zeros and with a bounded number of digits: the pattern is slow on megabytes."""
    number, point, fraction = text.replace("_", "").partition(".")
    if point and (not fraction or fraction.strip("0")):
        return ""
    return ("-0" if number.startswith("-") else "0") + number.lstrip("+-0")[:_MAX_DIGITS]
