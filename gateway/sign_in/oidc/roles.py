"""From claims of a verified ID token to a role and teams. Pure.

The rules: an issuer grants only what its entry names a claim for, so one issuer cannot grant what another one may. A text is one value and
is never split, because people can choose some texts. An e-mail address counts only if the issuer has verified it.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.access.actor import RANKS, Role
from gateway.auth.claims import claim_at
from gateway.sign_in.errors import SignInError
from gateway.sign_in.sessions import Person

IDENTIFIER = re.compile(r"[^\s\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,255}")
"""The form of subjects, session IDs and token IDs: a database can store them, and a line of a log can show them."""
_MAX_VALUES = 1000  # of one claim
_MAX_TEAMS = 50
_MAX_NAME = 100  # characters of a name for display


@dataclass(frozen=True, slots=True)
class GrantRules:
    """The claims that grant roles and teams; None: the issuer grants none. A name with dots leads into a claim.

    ``values`` gives the values of the claim ``roles`` that grant each role. ``provider`` is the ID of the issuer's entry.
    """

    provider: str
    name: str
    roles: str | None
    teams: str | None
    owned_teams: str | None
    values: Mapping[Role, tuple[str, ...]]


def person_of(claims: Mapping[str, Any], rules: GrantRules, known_teams: Container[str]) -> Person:
    """Return the person whom verified claims describe. Raises SignInError for a person without any role and team."""
    subject = claims.get("sub")
    if not isinstance(subject, str) or not IDENTIFIER.fullmatch(subject):
        raise SignInError("Your identity provider sent no usable subject.", detail="the claim sub is missing or is not a name")
    owned = _teams(claims, rules.owned_teams, known_teams)
    teams = tuple(dict.fromkeys((*_teams(claims, rules.teams, known_teams), *owned)))
    role = _role(_values(claims, rules.roles), rules.values)
    if role is None and not teams:
        raise SignInError(
            "Your account has no access here. Ask an administrator of this gateway for a team or a role.",
            detail=f"no claim grants {rules.provider}:{subject} a role or a team",
            status=403,
        )
    return Person(str(claims["iss"]), rules.provider, subject, _name(claims, rules.name, subject), role, teams, owned)


def _role(values: frozenset[str], granting: Mapping[Role, tuple[str, ...]]) -> Role | None:
    """Return the highest role that a value grants."""
    return max([role for role, wanted in granting.items() if not values.isdisjoint(wanted)], key=RANKS.__getitem__, default=None)


def _teams(claims: Mapping[str, Any], claim: str | None, known: Container[str]) -> tuple[str, ...]:
    teams = tuple(sorted(value for value in _values(claims, claim) if value in known))
    if len(teams) > _MAX_TEAMS:
        raise SignInError(f"Your account has more than {_MAX_TEAMS} teams.", detail=f"by the claim {claim}", status=403)
    return teams


def _values(claims: Mapping[str, Any], claim: str | None) -> frozenset[str]:
    """Return the texts in a claim. Raises SignInError for too many of them."""
    if claim is None or (claim == "email" and claims.get("email_verified") is not True):
        return frozenset()
    found = claim_at(claims, claim)
    if found is None and claim in _elsewhere(claims):
        detail = f"the claim {claim} has too many values for an ID token (_claim_names); let the provider send fewer groups, or app roles"
        raise SignInError("Your account has too many groups.", detail=detail, status=403)
    values = found if isinstance(found, list) else [found]
    if len(values) > _MAX_VALUES:
        raise SignInError("Your account has too many groups.", detail=f"the claim {claim} has {len(values)} values", status=403)
    return frozenset(value for value in values if isinstance(value, str))


def _elsewhere(claims: Mapping[str, Any]) -> Container[str]:
    """Return the names of distributed claims, which are not in the token (OpenID Connect Core, section 5.6.2)."""
    found = claims.get("_claim_names")
    return found if isinstance(found, dict) else ()


def _name(claims: Mapping[str, Any], claim: str, subject: str) -> str:
    """Return the name for display: of printable characters, and bounded."""
    found = claim_at(claims, claim)
    name = "".join(each for each in found if each.isprintable()).strip()[:_MAX_NAME] if isinstance(found, str) else ""
    return name or subject[:_MAX_NAME]
