"""Decide about the keys that people create for themselves, and that owners manage for their team. Pure.

The rules: a team without a policy (``self_service``) has no such keys. A key is within the policy when it is created and after each change:
the ceilings of the policy are limits of the key, unless it has lower ones. A key that a person may not reach does not exist for them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from gateway.access.actor import PersonId
from gateway.config import Key, Limits, SelfService
from gateway.config.models import matches
from gateway.config.section import Section
from gateway.key_management.key_list import instant, state
from gateway.store.decisions import Named, changed_key, check_fields, new_key, with_fields
from gateway.store.entries import StoredKey
from gateway.store.errors import Reason, RefusedChangeError

FIELDS = ("name", "models", "expires", "limits")
"""The fields of a key that a person may set. ``team`` is set when it is created."""
_LISTS = ("budgets", "session", "models")
_AMOUNTS = tuple(name for name in Limits.model_fields if name not in _LISTS)
_MAX_ROWS = 8  # of limits for some models: each counts in the memory that all keys share
_MAX_ENDED = 100  # revoked and expired keys of a person
_ENDED = ("revoked", "expired")
_PATTERN = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Grant:
    """The keys that a client may change: those that ``person`` has created, and those of the ``owned`` teams.

    In ``teams`` keys are created and rotated.
    """

    person: PersonId | None
    teams: Collection[str]
    owned: Collection[str] = ()

    def includes(self, stored: StoredKey) -> bool:
        """Return whether it includes a key."""
        return (self.person is not None and stored.made_by == self.person) or stored.key.team in self.owned

    def check(self, stored: StoredKey) -> None:
        """Check that it includes a key. Raises RefusedChangeError, the same as for a key that does not exist."""
        if not self.includes(stored):
            raise RefusedChangeError(Reason.NOT_FOUND, no_key(stored.key.id))


def no_key(identity: str) -> str:
    """Return the message about a key that does not exist, or that a client may not know."""
    return f"there is no key {identity} in the store"


def chosen_team(fields: Mapping[str, Any], grant: Grant) -> str:
    """Return the team of a new key. Raises RefusedChangeError."""
    team = fields.get("team")
    if not isinstance(team, str):
        raise RefusedChangeError(Reason.INVALID, "team: name the team of the key")
    if team not in grant.teams:
        raise RefusedChangeError(Reason.FORBIDDEN, "team: it is not a team in which you may create keys")
    return team


def check_policy(team: str | None, policy: SelfService | None, grant: Grant) -> SelfService:
    """Return the policy by which keys of a team are created and rotated. Raises RefusedChangeError."""
    if policy is None or team not in grant.teams:
        raise RefusedChangeError(Reason.FORBIDDEN, "people cannot create keys in this team: it has no self_service, or it is not yours")
    return policy


def new_own_key(
    identity: str,
    fields: Mapping[str, Any],
    digest: str,
    policy: SelfService,
    held: Sequence[StoredKey],
    named: Named,
    teams: Collection[str],
    now: datetime,
) -> tuple[Key, str | None]:
    """Return a new key and its name. ``held`` are all keys that the person has created. Raises RefusedChangeError."""
    check_fields(fields, ("team", *FIELDS))
    key, name = new_key({**fields, "id": identity}, digest, named, teams, now)
    _check_number(held, key.team, policy, now)
    return within(key, policy, now), name


def changed_own_key(
    before: StoredKey, patch: Mapping[str, Any], policy: SelfService | None, grant: Grant, named: Named, teams: Collection[str]
) -> tuple[Key, str | None]:
    """Return a key with a merge patch applied, and its name. Raises RefusedChangeError."""
    check_fields(patch, FIELDS)
    key, name = changed_key(before, patch, named, teams)
    if patch.keys() <= {"name"}:
        return key, name
    return within(key, check_policy(key.team, policy, grant), before.created), name


def _check_number(held: Sequence[StoredKey], team: str | None, policy: SelfService, now: datetime) -> None:
    ended = [each for each in held if state(each.key, now) in _ENDED]
    valid = sum(each.key.team == team for each in held) - sum(each.key.team == team for each in ended)
    if valid >= policy.max_keys:
        raise RefusedChangeError(Reason.CONFLICT, f"you have {valid} valid keys in {team}, and {policy.max_keys} are allowed; revoke one")
    if len(ended) >= _MAX_ENDED:
        raise RefusedChangeError(Reason.CONFLICT, f"you have {len(ended)} revoked and expired keys; delete some of them")


def within(key: Key, policy: SelfService, created: datetime) -> Key:
    """Return a key within a policy: a missing field gets the most that the policy allows. Raises RefusedChangeError for more."""
    limits = _limited(key.limits, policy.limits)
    return with_fields(
        key, models=list(_models(key, policy)), expires=_expiry(key, policy, created), **({} if limits is None else {"limits": limits})
    )


def _models(key: Key, policy: SelfService) -> Collection[str]:
    if "models" not in key.model_fields_set:
        return policy.models
    for pattern in key.models:
        if not _is_allowed(pattern, policy.models):
            allowed = ", ".join(policy.models)
            raise RefusedChangeError(Reason.INVALID, f"models: {pattern} is not allowed; choose from {allowed}, or models that they match")
    return key.models


def _is_allowed(pattern: str, allowed: Collection[str]) -> bool:
    """Return whether everything that a pattern matches is allowed. Of two different patterns this is never assumed."""
    if pattern in allowed or "*" in allowed:
        return True
    return not _PATTERN.search(pattern) and any(matches(each, pattern) for each in allowed)


def _expiry(key: Key, policy: SelfService, created: datetime) -> str | None:
    if policy.max_lifetime is None:
        return None if key.expires is None else key.expires.isoformat()
    try:
        last = (created + timedelta(seconds=policy.max_lifetime)).replace(microsecond=0)
    except OverflowError:
        return None if key.expires is None else key.expires.isoformat()
    if key.expires is not None and key.expires > last:
        raise RefusedChangeError(Reason.INVALID, f"expires: at the latest {instant(last)}")
    return (key.expires or last).isoformat()


def _limited(own: Limits | None, ceilings: Limits | None) -> dict[str, Any] | None:
    """Return limits with the ceilings where they have none; None for no limits. Raises RefusedChangeError for a limit above its ceiling."""
    own, most = own or Limits(), ceilings or Limits()
    if len(own.models) > _MAX_ROWS:
        raise RefusedChangeError(Reason.INVALID, f"limits.models: at most {_MAX_ROWS} entries")
    limits = _capped("limits", _AMOUNTS, own, most)
    budgets = {(each.window, each.soft): each for each in own.budgets}
    capped = {(each.window, each.soft): each for each in most.budgets}
    shown = [
        _capped(f"limits.budgets.{window}", ("tokens", "cost"), budgets.get((window, soft)), capped.get((window, soft)))
        for window, soft in dict.fromkeys((*budgets, *capped))
    ]
    if shown:
        limits["budgets"] = shown
    if session := _capped("limits.session", ("tokens", "cost"), own.session, most.session):
        limits["session"] = session
    rows = [_document(each) for each in own.models]
    if rows := [*rows, *(row for row in map(_document, most.models) if row not in rows)]:
        limits["models"] = rows
    return limits or None


def _capped(setting: str, names: Collection[str], own: Section | None, most: Section | None) -> dict[str, Any]:
    """Return a section with the amounts of the ceilings where it has none. Raises RefusedChangeError for a higher amount."""
    mine, theirs = ({} if each is None else _document(each) for each in (own, most))
    for name in names:
        amount, ceiling = getattr(own, name, None), getattr(most, name, None)
        if amount is not None and ceiling is not None and amount > ceiling:
            raise RefusedChangeError(Reason.INVALID, f"{setting}.{name}: at most {theirs[name]}")
    return {name: value for name, value in (theirs | mine).items() if name not in _LISTS}


def _document(section: Section) -> dict[str, Any]:
    """Return a section as the configuration writes it, without defaults."""
    written: dict[str, Any] = section.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return written
