"""Keys and teams of the store as JSON for programs, and for the audit log. Pure.

The rule: nothing that identifies a key, not even its hash, is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.key_management.key_list import instant, shown_key
from gateway.store.decisions import ATTRIBUTES, SETTABLE
from gateway.store.entries import StoredKey, StoredTeam, document

if TYPE_CHECKING:
    from gateway.config import Team
    from gateway.store.service import ImportedKeys, KeyChange, TeamChange


def key_document(stored: StoredKey, last: datetime | None, now: datetime) -> dict[str, Any]:
    """Return a key. ``last`` is when it was last used."""
    shown = shown_key(stored.key, last, now)
    settings = {name: getattr(stored.key, ATTRIBUTES.get(name, name)) for name in SETTABLE if name not in shown}
    dates = {"created": instant(stored.created), "changed": instant(stored.changed)}
    made_by = None if stored.made_by is None else stored.made_by._asdict()
    return {"id": stored.key.id, "name": stored.name, **shown, **settings, **dates, "made_by": made_by}


def team_document(stored: StoredTeam) -> dict[str, Any]:
    """Return a team."""
    return team_settings(stored.team) | {"created": instant(stored.created), "changed": instant(stored.changed)}


def team_settings(team: Team) -> dict[str, Any]:
    """Return what a team of the store or of the configuration has."""
    written = document(team)
    return {"id": team.id, "limits": written.get("limits", {}), "weight": team.weight, "self_service": written.get("self_service")}


class Described(NamedTuple):
    """A change for the audit log: the ID of the entry, and the entry's document before and after it."""

    target: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None


def key_change(done: KeyChange) -> Described | None:
    """Describe a change of a key; None for a repetition, which changes nothing."""
    return None if done.is_repeated else Described(done.after.key.id, audited_key(done.before), audited_key(done.after))


def key_deletion(before: StoredKey) -> Described:
    """Describe the deletion of a key."""
    return Described(before.key.id, audited_key(before), None)


def team_change(done: TeamChange) -> Described | None:
    """Describe a change of a team; None for a repetition."""
    return None if done.is_repeated else Described(done.after.team.id, _audited_team(done.before), _audited_team(done.after))


def team_deletion(before: StoredTeam) -> Described:
    """Describe the deletion of a team."""
    return Described(before.team.id, _audited_team(before), None)


def imported_keys(done: ImportedKeys) -> Described | None:
    """Describe an import; None if it has added no key."""
    if not done.added:
        return None
    return Described(f"{len(done.added)} keys", None, {"added": [each.key.id for each in done.added], "version": done.added[0].version})


def _audited_team(stored: StoredTeam | None) -> Mapping[str, Any] | None:
    return None if stored is None else document(stored.team) | {"version": stored.version}


def audited_key(stored: StoredKey | None) -> Mapping[str, Any] | None:
    """Return a key for the audit log, without its hashes. Its version is the number of the change in the store's log."""
    if stored is None:
        return None
    shown = {name: value for name, value in document(stored.key).items() if name != "hash"}
    made_by = {} if stored.made_by is None else {"made_by": stored.made_by._asdict()}
    return shown | {"name": stored.name, "hashes": len(stored.key.hashes), "version": stored.version} | made_by
