"""The keys and teams that a person reaches. ``gateway.store.self_service`` decides what a key may have. Pure.

The rule: a key or team out of reach gets the response for a missing key or team, so no ID can be tried.
"""

from __future__ import annotations

from typing import Literal

from gateway.api.errors import Refusal
from gateway.sign_in.sessions import Person
from gateway.store.errors import Reason, RefusedChangeError
from gateway.store.self_service import Grant

Action = Literal["show", "change", "rotate", "revoke", "delete"]
_OF_OWNERS = frozenset[Action]({"show", "revoke"})
"""The actions of an owner on the keys of others. A rotation would give them a secret in another person's name."""
_CODES = {
    Reason.INVALID: "invalid_value",
    Reason.FORBIDDEN: "permission_denied",
    Reason.NOT_FOUND: "not_found",
    Reason.CONFLICT: "conflict",
    Reason.CHANGED: "conflict",
    Reason.OTHER_REQUEST: "conflict",
}


def grant_of(person: Person, action: Action) -> Grant:
    """Return the keys on which a person may perform an action."""
    return Grant(person.identity, frozenset(person.teams), frozenset(person.owned_teams) if action in _OF_OWNERS else frozenset())


def check_owner(person: Person, team: str) -> None:
    """Check that a person owns a team. Raises Refusal."""
    if team not in person.owned_teams:
        raise Refusal("not_found", "There is no such team, or you do not own it.")


def no_key() -> Refusal:
    """Return the error for a key that does not exist, or that the person may not reach."""
    return Refusal("not_found", "There is no such key, or it is not yours.")


def refusal_of(error: RefusedChangeError) -> Refusal:
    """Return the error of a change that the store has refused."""
    if error.reason is Reason.NOT_FOUND:
        return no_key()
    setting, colon, _ = str(error).partition(": ")
    param = setting if error.reason is Reason.INVALID and colon and " " not in setting else None
    return Refusal(_CODES[error.reason], f"{error}.", param=param)
