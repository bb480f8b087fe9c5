"""Numbers in memory that several processes read: what a class needs of them, whichever process owns the memory."""

from __future__ import annotations

from typing import Protocol


class Cells(Protocol):
    """An array of numbers, for example a ``memoryview`` of shared memory, or a list in a test."""

    def __getitem__(self, index: int, /) -> float:
        """Return one number."""

    def __setitem__(self, index: int, value: float, /) -> None:
        """Change one number."""
