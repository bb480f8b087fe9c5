"""A check that a block of code leaves nothing for the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_cycles() -> Iterator[None]:
    """Check that a block of code leaves no reference cycle."""
    while gc.collect():  # what earlier tests left, in several passes
        pass
    gc.disable()
    try:
        yield
        assert gc.collect() == 0
    finally:
        gc.enable()
