"""Settings that are declared where they are used, as fields of dataclasses. The configuration derives sections and documents from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any


def setting(description: str, default: Any = None, *, make: Callable[[], Any] | None = None, **details: Any) -> Any:
    """Return a field with a default, or with one from ``make``. ``details``: bounds such as ``ge``, and what its readers need."""
    metadata = {"description": description, **details}
    return field(default=default, metadata=metadata) if make is None else field(default_factory=make, metadata=metadata)
