"""Typed attributes get exactly the types that the compiled core gives them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, cast

import msgspec
import pytest

from gateway.system.compiled_core import core
from tests.compiled.contract import Checked, Field, fields
from upstream.http.connection import Connection


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


@pytest.mark.skipif(core() == "compiled", reason="the compiled core has C fields")
def test_the_attributes_of_the_core_are_checked_in_this_run() -> None:
    assert type(vars(Connection)["write_paused"]) is Checked
