"""Check in plain Python that the typed attributes of the compiled core get exactly their types, in every run of the suite.

The compiled core stores such an attribute as a C field. It would turn an int in a ``float`` into a float, and a truthy value in a ``bool``
into True. It would raise TypeError for another container, or for an object of another class. All that passes mypy. The rule: the types are
read from the declarations that Cython gets, so nothing is listed here.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from compiled.declarations import compilable
from compiled.hook import MODULES

ROOT = Path(__file__).resolve().parents[2]
_CLASS = re.compile(r"cdef class (\w+)")
_FIELD = re.compile(r"    cdef (?:public|readonly) (\w+) (\w+)")
_EXACT: Mapping[str, type] = {"bint": bool, "double": float, "dict": dict, "list": list, "set": set, "bytes": bytes, "bytearray": bytearray}


class Field(NamedTuple):
    """A typed attribute: its class, its name, and its type by the declarations."""

    module: str
    owner: str
    name: str
    kind: str


def fields(sources: Mapping[str, str]) -> Iterator[Field]:
    """Yield the typed attributes of modules. ``sources``: the source texts by module."""
    for module, made in compilable(sources).items():
        owner = ""
        for line in made.declarations.splitlines():
            if (found := _CLASS.match(line)) is not None:
                owner = found[1]
            elif (found := _FIELD.match(line)) is not None and found[1] != "object":
                yield Field(module, owner, found[2], found[1])


class Checked:
    """A data descriptor in place of an attribute. It checks each value that is set, and stores it as before.

    The constructor of a Struct sets the attributes without descriptors, so a Struct's values are checked when they are read.
    """

    def __init__(self, owner: type, name: str, kind: type, *, takes_none: bool, takes_subclasses: bool) -> None:
        self._owner, self._name, self._kind = owner, name, kind
        self._takes_none, self._takes_subclasses = takes_none, takes_subclasses
        self._has_default, self._before = name in owner.__dict__, owner.__dict__.get(name)
        self._is_slot = hasattr(self._before, "__set__")
        self._is_struct = issubclass(owner, msgspec.Struct)

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self._before
        if self._is_slot:
            assert self._before is not None
            value = self._before.__get__(instance, owner)
            if self._is_struct:
                self._check(value)
            return value
        if self._name in instance.__dict__:
            return instance.__dict__[self._name]
        if not self._has_default:
            raise AttributeError(self._name)
        return self._before

    def __set__(self, instance: Any, value: Any) -> None:
        self._check(value)
        if self._is_slot:
            assert self._before is not None
            self._before.__set__(instance, value)
        else:
            instance.__dict__[self._name] = value

    def _check(self, value: Any) -> None:
        """Raise TypeError for a value that the compiled core would change or refuse."""
        if type(value) is self._kind or (value is None and self._takes_none) or (self._takes_subclasses and isinstance(value, self._kind)):
            return
        raise TypeError(f"{self._owner.__qualname__}.{self._name} is {self._kind.__name__} in the compiled core, not {value!r}")


def install() -> int:
    """Check all typed attributes of this process's modules from now on. Returns their number; 0 with the compiled core."""
    sources = {name: (ROOT / (name.replace(".", "/") + ".py")).read_text() for name in MODULES}
    number = 0
    for module, owner, name, kind in list(fields(sources)):
        loaded = importlib.import_module(module)
        if not str(loaded.__file__).endswith(".py"):
            return 0
        checked = Checked(
            getattr(loaded, owner),
            name,
            _EXACT.get(kind) or getattr(loaded, kind),
            takes_none=kind not in ("bint", "double"),
            takes_subclasses=kind not in _EXACT,
        )
        setattr(getattr(loaded, owner), name, checked)
        number += 1
    return number
