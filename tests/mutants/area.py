"""An area of the mutants: modules, each with the tests that notice its mutants. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Tested(NamedTuple):
    """The tests of a module, and the definitions that are changed."""

    tests: tuple[str, ...]
    """Arguments of pytest, the fastest tests first: the first failure ends a trial."""
    only: tuple[str, ...] = ()
    """The definitions that are changed, if the module has others."""


class Area(NamedTuple):
    """Modules that hold one behavior together."""

    title: str
    modules: Mapping[str, Tested]
    most: int = 600
    """Mutants that are tried. Of more, a sample is tried."""
