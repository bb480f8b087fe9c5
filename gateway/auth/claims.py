"""Find a claim of a token by its name. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def claim_at(claims: Mapping[str, Any], name: str | None) -> object:
    """Return a claim by its name or by a dotted path; None if it is missing, or without a name."""
    if name is None or name in claims:
        return claims.get(name) if name is not None else None
    found: object = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
