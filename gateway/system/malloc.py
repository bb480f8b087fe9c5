"""Tune the heap of a process that handles large bodies.

By default glibc returns freed memory above a threshold to the kernel immediately, and requests it again for the next body, page by page.
For a body of a megabyte, which exists in several forms for a moment, this takes as long as all other work on it. The rule: the memory of
large bodies is retained for the next bodies, up to a bound.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_RETAINED = 64 * 1024 * 1024
_LARGEST = 32 * 1024 * 1024  # the largest threshold that glibc accepts


def keep_what_is_freed() -> None:
    """Retain up to 64 MiB at the end of the heap. Only allocations of 32 MiB or more get a separate mapping. See mallopt(3)."""
    with suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, _RETAINED)
