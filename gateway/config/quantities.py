"""Sizes, durations, shares and windows of budgets as operators write them: ``20MiB``, ``30s``, ``5%``, ``week``.

A number without a unit is an error, because its unit would be unclear.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from gateway.snapshot.snapshot import CALENDAR

SIZE_UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
DURATION_UNITS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600), "d": Decimal(86400)}
_NUMBER = r"([0-9]{1,12}(?:\.[0-9]{1,9})?)"
SIZE_PATTERN = rf"^{_NUMBER}({'|'.join(SIZE_UNITS)})$"
DURATION_PATTERN = rf"^{_NUMBER}({'|'.join(DURATION_UNITS)})$"
SHARE_PATTERN = rf"^{_NUMBER}(%)$"


def parse_size(text: object) -> int:
    """Return the bytes of a size such as ``20MiB`` or ``1.5GB``. Raises ValueError with a message for the operator."""
    number, unit = _parts(text, SIZE_PATTERN, "a size with its unit, e.g. 20MiB (B, KiB, MiB, GiB, TiB, kB, MB, GB, TB)")
    size = number * SIZE_UNITS[unit]
    if size != int(size):
        raise ValueError("a size is a whole number of bytes")
    return int(size)


def parse_duration(text: object) -> float:
    """Return the seconds of a duration such as ``500ms``, ``30s``, ``15m``, ``1.5h`` or ``1d``. Raises ValueError."""
    number, unit = _parts(text, DURATION_PATTERN, "a duration with its unit, e.g. 30s (ms, s, m, h, d)")
    return float(number * DURATION_UNITS[unit])


def duration_text(seconds: float) -> str:
    """Return a duration as it can be written, in the largest unit of which it is a whole number: ``90d``."""
    exact = Decimal(repr(seconds))
    unit = next((unit for unit in reversed(DURATION_UNITS) if not exact % DURATION_UNITS[unit]), "ms")
    return f"{(exact / DURATION_UNITS[unit]).normalize():f}{unit}"


def parse_share(text: object) -> float:
    """Return a share such as ``5%`` as a number up to 1. Raises ValueError with a message for the operator."""
    number, _ = _parts(text, SHARE_PATTERN, "a share in percent, e.g. 5%")
    if number > 100:
        raise ValueError("a share is at most 100%")
    return float(number / 100)


_ROLLING = {"d": 86400, "h": 3600, "m": 60}
_LONGEST_WINDOW = 366 * 86400


def parse_window(text: object) -> str:
    """Return the window of a budget: ``day``, ``week``, ``month``, or the length of a rolling window in its largest unit.

    ``168h`` is ``7d``. Raises ValueError with a message for the operator.
    """
    if text in CALENDAR:
        return str(text)
    try:
        seconds = parse_duration(text)
    except ValueError:
        raise ValueError("expected day, week, month, or the length of a rolling window, e.g. 7d (m, h, d)") from None
    if not 60 <= seconds <= _LONGEST_WINDOW or seconds % 60:
        raise ValueError("a rolling window is whole minutes, up to 366d")
    unit = next(unit for unit, size in _ROLLING.items() if not seconds % size)
    return f"{int(seconds) // _ROLLING[unit]}{unit}"


def window_seconds(window: str) -> float:
    """Return the length of a rolling window by its name, 0 for a window of the calendar."""
    return 0.0 if window in CALENDAR else float(int(window[:-1]) * _ROLLING[window[-1]])


def _parts(text: object, pattern: str, wanted: str) -> tuple[Decimal, str]:
    found = re.fullmatch(pattern, text) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f"expected {wanted}")
    return Decimal(found[1]), found[2]


def _positive(parse: Any) -> Any:
    def check(text: object) -> Any:
        if not (value := parse(text)):
            raise ValueError("must be more than zero")
        return value

    return check


_SIZE_SCHEMA = WithJsonSchema({"type": "string", "pattern": SIZE_PATTERN, "examples": ["20MiB"]})
_DURATION_SCHEMA = WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN, "examples": ["30s"]})

Size = Annotated[int, PlainValidator(_positive(parse_size)), _SIZE_SCHEMA]
"""Bytes, more than zero."""

Duration = Annotated[float, PlainValidator(_positive(parse_duration)), _DURATION_SCHEMA]
"""Seconds, more than zero."""

Share = Annotated[
    float, PlainValidator(_positive(parse_share)), WithJsonSchema({"type": "string", "pattern": SHARE_PATTERN, "examples": ["5%"]})
]
"""A number above 0 and up to 1."""

DurationOrZero = Annotated[float, PlainValidator(parse_duration), Field(), _DURATION_SCHEMA]
"""Seconds. ``0s`` means immediately."""

Window = Annotated[
    str,
    PlainValidator(parse_window),
    WithJsonSchema({"type": "string", "pattern": f"^({'|'.join(CALENDAR)})$|{DURATION_PATTERN}", "examples": ["week", "7d"]}),
]
"""``day``, ``week``, ``month``, or the length of a rolling window in its largest unit."""
