"""Map the claims of a verified token to a key: to an entry of keys, with the subject, teams, models and priority of the token. No I/O.

The rules: a claim with a wrong value refuses the token. An entry has at most ``subjects`` keys; later subjects share the key of the entry.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway.api.errors import Refusal
from gateway.snapshot.identity import subject_id
from gateway.snapshot.snapshot import Allowance, Issuer, Key, Snapshot, weight_of

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


class SubjectKeys:
    """The keys of the subjects of tokens: of each, its entry with its own limits. The subjects of an entry are bounded."""

    def __init__(self) -> None:
        self._subjects: dict[str, set[str]] = {}  # by entry
        self._issuers: tuple[Issuer, ...] = ()
        self._entries: dict[str, Key] = {}
        self._teams: Mapping[str, tuple[Allowance, ...]] = {}

    def apply_snapshot(self, snapshot: Snapshot) -> None:
        """Use this snapshot for new keys."""
        self._issuers = snapshot.issuers
        self._entries = {key.id: key for key in snapshot.keys}
        self._teams = snapshot.teams

    def key_of(self, verified: VerifiedToken) -> Key:
        """Return the configured entry for this subject, with its own limits, cache salt and id. Raises Refusal."""
        entry = self._entries.get(verified.entry)
        if entry is None or entry.revoked:
            raise Refusal("invalid_api_key", "The token's key is not known here." if entry is None else "This API key has been revoked.")
        identity = self._identity(entry.id, verified)
        team = next((team for team in verified.teams if team in self._teams), None)
        fields, weight = dict(entry.fields), entry.weight
        if verified.priority is not None:
            fields["priority"], weight = verified.priority, weight_of(verified.priority)
        if "cache_salt" in fields:
            fields["cache_salt"] = hmac.new(fields["cache_salt"].encode(), verified.subject.encode(), hashlib.sha256).hexdigest()
        return replace(
            entry,
            id=identity,
            entry=entry.id,
            digests=(),
            digest_expiries={},
            expires=verified.expires if entry.expires is None else min(verified.expires, entry.expires),
            fields=fields,
            weight=weight,
            team=team or entry.team,
            allowances=_allowances(entry, identity, None if team is None else self._teams[team]),
            within=verified.models,
            user_header=None,  # the subject is the end user, and must not name another one
        )

    def _identity(self, entry: str, verified: VerifiedToken) -> str:
        """Return the subject's own id, or the entry's id if there are too many subjects."""
        known = self._subjects.setdefault(entry, set())
        most = max(issuer.subjects for issuer in self._issuers)
        if verified.subject not in known and len(known) >= most:
            return entry
        known.add(verified.subject)
        return subject_id(entry, verified.subject)


def _allowances(entry: Key, identity: str, of_team: tuple[Allowance, ...] | None) -> tuple[Allowance, ...]:
    """Return the entry's own limits for this identity, and the limits of a team: the team of the token, or of the entry.

    Limits of end users stay those of the entry: its subjects are its end users.
    """
    mark = f"key {entry.id}"
    own = [each for each in entry.allowances if each.holder.startswith(mark)]
    shared = of_team if of_team is not None else [each for each in entry.allowances if each not in own]
    renamed = (each if each.users is not None else replace(each, holder=f"key {identity}{each.holder[len(mark) :]}") for each in own)
    return (*renamed, *shared)


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
