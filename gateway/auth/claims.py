"""Map the claims of a verified token to an entry of keys, its subject, its teams, its models and its priority. Pure.

The rule: a claim with a wrong value refuses the token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.api.errors import Refusal
from gateway.snapshot.snapshot import Issuer

_SUBJECT = re.compile(r"[^\s\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,200}")
_MAX_NAMES = 64  # of teams or models in one claim
_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class VerifiedToken:
    """The result of verifying a token. ``expires`` is in seconds since the epoch and includes the leeway."""

    entry: str
    subject: str
    expires: float
    teams: tuple[str, ...] = ()
    models: tuple[str, ...] | None = None
    priority: int | None = None


def read_claims(claims: Mapping[str, Any], issuer: Issuer) -> VerifiedToken:
    """Return the result for a verified token. Raises Refusal if it cannot be a principal here."""
    names, subject = issuer.claims, claim_at(claims, issuer.claims.subject)
    if not isinstance(subject, str) or not _SUBJECT.fullmatch(subject):
        raise Refusal("invalid_api_key", f"The token's claim {names.subject} is not a name.")
    models, priority = claim_at(claims, names.models), claim_at(claims, names.priority)
    return VerifiedToken(
        _entry(claims, issuer),
        subject,
        float(claims["exp"]) + issuer.leeway,
        _names(claim_at(claims, names.team), names.team),
        None if models is None else _names(models, names.models),
        None if priority is None else _number(priority, names.priority),
    )


def _entry(claims: Mapping[str, Any], issuer: Issuer) -> str:
    """Return the ID of its configured entry: the only entry, or the first entry that a claim names. Raises Refusal."""
    if issuer.claims.key is None:
        return issuer.keys[0]
    named = _names(claim_at(claims, issuer.claims.key), issuer.claims.key)
    if (found := next((name for name in named if name in issuer.keys), None)) is None:
        raise Refusal("invalid_api_key", f"The token's claim {issuer.claims.key} names no key of this gateway.")
    return found


def _names(value: object, name: str | None) -> tuple[str, ...]:
    """Return the names in a list, or the names in one text, separated by spaces. Raises Refusal."""
    found = value.split() if isinstance(value, str) else [] if value is None else value
    if not isinstance(found, list) or len(found) > _MAX_NAMES or not all(isinstance(each, str) for each in found):
        raise Refusal("invalid_api_key", f"The token's claim {name} is not a list of at most {_MAX_NAMES} names.")
    return tuple(found)


def _number(value: object, name: str | None) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -_INT64 <= value < _INT64:
        raise Refusal("invalid_api_key", f"The token's claim {name} is not a whole number.")
    return value


def claim_at(claims: Mapping[str, Any], name: str | None) -> object:
    """Return a claim by its name or by a dotted path; None if it is missing, or without a name."""
    if name is None or name in claims:
        return claims.get(name) if name is not None else None
    found: object = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
