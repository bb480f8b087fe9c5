"""How the heap of a process that handles large bodies behaves.

glibc gives freed memory above a threshold back to the kernel at once, and gets it again with the next body, page by page: for a body of
a megabyte, which exists in several forms for a moment, that takes as long as all that is done with it. The rule: what large bodies
leave is kept for the next ones, up to a bound.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT = 64 * 1024 * 1024
_LARGEST = 32 * 1024 * 1024  # the largest threshold that glibc takes


def keep_what_is_freed() -> None:
    """Keep up to 64 MiB at the end of the heap; only allocations from 32 MiB on have memory of their own. See mallopt(3)."""
    with suppress(AttributeError, OSError):  # another C library: it has its own ways
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
