"""Define the targets of differential fuzzing, and the choices of their generators.

The rule: a case depends only on the seed and its number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from random import Random
from typing import NamedTuple, TypeVar

T = TypeVar("T")

Case = Callable[[Random], None]
"""Makes one input by random numbers and compares its readers. Raises Difference."""

_SEED_STRIDE = 1 << 40
_EMPTY_EXTENSION = re.compile(rb"\r\n[0-9A-Fa-f]+;(?:[^\r\n]*[;=])?[;=\r]")


class Difference(AssertionError):
    """Two readers of the same bytes disagree."""


class Target(NamedTuple):
    """``opened`` provides the function for one case. ``cases``: the number of a full run. ``quick_cases``: the number in the test suite."""

    opened: Callable[[], AbstractContextManager[Case]]
    cases: int
    quick_cases: int
    compares: str


def seed(run: int, number: int) -> int:
    """Return the seed of a case: its number in a run with this seed."""
    return run * _SEED_STRIDE + number


def check(holds: object, rule: str, *shown: object) -> None:
    """Raise Difference unless a rule holds, with the values that show it."""
    if not holds:
        raise Difference("\n  ".join([rule, *map(repr, shown)]))


def choose(random: Random, values: Sequence[T]) -> T:
    """Return one of the values. It takes a third of the time of ``Random.choice``."""
    return values[int(random.random() * len(values))]


def has_empty_extension(data: bytes) -> bool:
    """Return whether a chunk may have an extension without a name or a value, which RFC 9112, section 7.1.1, does not allow."""
    return _EMPTY_EXTENSION.search(data) is not None


def cut(random: Random, data: bytes, most: int = 5) -> list[bytes]:
    """Cut bytes at up to ``most`` random indexes."""
    indexes = sorted(int(random.random() * (len(data) + 1)) for _ in range(1 + int(random.random() * most)))
    return [piece for piece in (data[start:end] for start, end in zip([0, *indexes], [*indexes, len(data)], strict=True)) if piece]


def single_bytes(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def mutated(random: Random, data: bytes, inserted: bytes) -> bytes:
    """Remove, insert, replace or repeat some bytes."""
    if not data:
        return data
    kind, at = int(random.random() * 5), int(random.random() * len(data))
    end = at + 1 + int(random.random() * 30)
    other = bytes((choose(random, inserted),))
    return (
        data[:at] + data[at + 1 :],
        data[:at] + other + data[at:],
        data[:at] + other + data[at + 1 :],
        data[:end] + data[at:end] + data[end:],
        data[:at] + data[end:],
    )[kind]
