"""Encode a dataclass without the fields that have their default, which a decoder adds again. Pure."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any


def without_defaults(value: Any) -> Any:
    """Return a dataclass as a mapping of its fields, without defaults, also inside of tuples. Other values are returned unchanged."""
    if isinstance(value, tuple):
        return [without_defaults(each) for each in value]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return {name: without_defaults(found) for name, default in _defaults(type(value)) if (found := getattr(value, name)) != default}


@cache
def _defaults(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    """Return the names and defaults of a dataclass's fields. A field that has no default or is computed has ``MISSING``."""
    return tuple((each.name, each.default if each.default_factory is MISSING else each.default_factory()) for each in fields(kind))
