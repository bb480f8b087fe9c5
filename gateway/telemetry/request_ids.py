"""The IDs of requests: unique, and in the order of their seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from time import time

_DIGITS, _IDS = 8, 0x1_0000_0000  # hexadecimal digits of an ID that decide about a sample, and the number of their values


def request_ids() -> Iterator[str]:
    """Generate request IDs: ``req_`` and 24 hexadecimal digits.

    Each ID starts with the second in which it was generated, like a UUID of version 7, so that a database's index grows at its end. The
    other 64 bits are random; they are generated for many IDs together.
    """
    while True:
        second, digits = f"req_{int(time()):08x}", os.urandom(8 * 256).hex()
        for start in range(0, len(digits), 16):
            yield second + digits[start : start + 16]


class RequestSample:
    """Selects a ``share`` of the requests, above 0 up to 1, by their IDs, which clients cannot choose."""

    def __init__(self, share: float) -> None:
        self._below = round(share * _IDS)

    def includes(self, request_id: str) -> bool:
        """Check whether a request is selected."""
        return int(request_id[-_DIGITS:], 16) < self._below
