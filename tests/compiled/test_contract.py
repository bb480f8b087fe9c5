"""Typed attributes get exactly the types that the compiled core gives them."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from typing import Any, cast

import msgspec
import pytest

from tests.compiled.contract import ROOT, Checked, Field, fields

_FOLDERS = ("tests/gateway/auth", "tests/gateway/proxy", "tests/upstream/balancing", "tests/upstream/http")
"""Tests of the compiled modules, in which most of their attributes are set."""


def test_the_types_are_those_of_the_declarations() -> None:
    source = (
        "class A:\n    b: bool\n    c: dict[str, int] | None = None\n    d: int\n    def __init__(self) -> None:\n        self.e = 1.0\n"
    )
    assert [*fields({"a": source})] == [Field("a", "A", "b", "bint"), Field("a", "A", "c", "dict"), Field("a", "A", "e", "double")]


class Plain:
    flag: bool
    speed: float
    found: dict[str, int] | None = None


class Slotted:
    __slots__ = ("flag", "found", "speed")


class Record(msgspec.Struct, eq=False):
    flag: bool
    speed: float
    found: dict[str, int] | None = None


@pytest.fixture(scope="module", autouse=True)
def checks() -> None:
    """Check the attributes of the three classes, which exist for this only."""
    for kind in (Plain, Slotted, Record):
        for name, each, takes_none in (("flag", bool, False), ("speed", float, False), ("found", dict, True)):
            setattr(kind, name, Checked(kind, name, each, takes_none=takes_none, takes_subclasses=False))


@pytest.mark.parametrize("kind", [Plain, Slotted, Record])
@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("flag", True, True), ("flag", 1, False), ("flag", None, False), ("speed", 1.5, True), ("speed", 1, False), ("speed", None, False),
        ("found", {}, True), ("found", None, True), ("found", defaultdict(int), False),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused(kind: type, name: str, value: Any, fits: bool) -> None:
    one: Any = kind(True, 1.0) if kind is Record else kind()
    if fits:
        setattr(one, name, value)
        assert getattr(one, name) is value
    else:
        with pytest.raises(TypeError, match=rf"{name} is \w+ in the compiled core, not"):
            setattr(one, name, value)


def test_the_values_of_a_constructor_are_checked_when_they_are_read() -> None:
    one: Any = Record(True, cast("Any", 1))
    with pytest.raises(TypeError, match="speed is float in the compiled core, not 1"):
        _ = one.speed


def test_the_attributes_of_the_core_have_their_types() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.compiled.contract", "-p", "no:cacheprovider", "-n", "2", *_FOLDERS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
