"""The IDs of requests: unique, and in the order of their seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from time import time


def request_ids() -> Iterator[str]:
    """Generate request IDs: ``req_`` and 24 hexadecimal digits.

    Each ID starts with the second in which it was generated, like a UUID of version 7, so that a database's index grows at its end. The
    other 64 bits are random; they are generated for many IDs together.
    """
    while True:
        second, digits = f"req_{int(time()):08x}", os.urandom(8 * 256).hex()
        for start in range(0, len(digits), 16):
            yield second + digits[start : start + 16]
