"""Decide about changes of keys and teams: whether a change is allowed, and what the entry is afterwards. Pure.

The rules: the YAML is the source of truth for what it names, so no entry of the store has an ID or a hash of the YAML. An entry that the
YAML would refuse is refused here. A change of an existing entry names the version that it changes, so that two people do not overwrite
each other's changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gateway.config import Config, Key, Limits, SelfService, Team
from gateway.config.explain import findings
from gateway.config.models import matches
from gateway.config.problems import did_you_mean
from gateway.key_management.keys_import import has_key_shape
from gateway.key_management.rotation import former_hashes
from gateway.snapshot.identity import subject_prefix
from gateway.snapshot.snapshot import CALENDAR, DEFAULT_CLASS
from gateway.store.entries import StoredKey, StoredTeam, document, merged
from gateway.store.errors import Reason, RefusedChangeError

ATTRIBUTES = {"class": "queue_class"}
"""The attributes of a key whose names are not those of their settings."""
SETTABLE = ("team", "labels", "models", "expires", "limits", "priority", "class", "user_header")
"""The settings of a key that a request may set. The others are set by operations."""
TEAM_SETTINGS = ("limits", "weight", "self_service")
"""The settings of a team that a request may set."""
_MAX_HASHES = 16
_MAX_NAME = 100
E = TypeVar("E", Key, Team)


@dataclass(frozen=True, slots=True)
class Named:
    """The names of the YAML: IDs and hashes of keys, IDs of teams, names of models.

    ``has_prices``: a model has a price. ``subjects`` are the starts of the names of subjects of tokens, which no ID of a key may have.
    ``classes`` are those of queues. ``policies`` are the policies of teams about the keys that their people create, by team.
    """

    keys: Collection[str]
    hashes: Collection[str]
    teams: Collection[str]
    models: Collection[str]
    has_prices: bool
    subjects: tuple[str, ...] = ()
    policies: Mapping[str, SelfService] = field(default_factory=dict)
    classes: Collection[str] = (DEFAULT_CLASS,)

    @classmethod
    def by(cls, config: Config) -> Named:
        """Return what a configuration names."""
        return cls(
            keys=frozenset(key.id for key in config.keys),
            hashes=frozenset(one.text for key in config.keys for one in key.hashes),
            teams=frozenset(team.id for team in config.teams),
            models=config.model_ids,
            has_prices=any(model.price is not None for model in config.models),
            subjects=subject_prefixes(config),
            classes=(DEFAULT_CLASS, *(each.id for each in config.classes)),
            policies={team.id: team.self_service for team in config.teams if team.self_service is not None},
        )


def subject_prefixes(config: Config) -> tuple[str, ...]:
    """Return how the names of subjects of tokens start."""
    entries = {name for issuer in config.jwt for name in issuer.keys}
    return tuple(sorted({prefix for name in entries for prefix in (subject_prefix(name), f"{name}/")}))


# Keys


def new_key(fields: Mapping[str, Any], digest: str, named: Named, teams: Collection[str], now: datetime) -> tuple[Key, str | None]:
    """Return a new key and its name. ``fields`` are of a request, ``teams`` the store's. Raises RefusedChangeError."""
    check_fields(fields, ("id", "name", *SETTABLE))
    key = _new({name: value for name, value in fields.items() if name != "name" and value is not None} | {"hash": digest}, named, teams)
    if key.expired(now):
        raise RefusedChangeError(Reason.INVALID, "expires: the date is in the past")
    return key, _name(fields.get("name"))


def imported_key(entry: Mapping[str, Any], named: Named, teams: Collection[str]) -> Key:
    """Return the key of an entry that was imported. Raises RefusedChangeError."""
    check_fields(entry, ("id", "hash", "revoked", *SETTABLE))
    return _new(entry, named, teams)


def _new(entry: Mapping[str, Any], named: Named, teams: Collection[str]) -> Key:
    identity = entry.get("id")
    if isinstance(identity, str) and has_key_shape(identity):
        raise RefusedChangeError(Reason.INVALID, "id: expected a name, and never a key")
    key = _validated(Key, entry)
    if key.id.startswith(named.subjects):
        raise RefusedChangeError(Reason.CONFLICT, f"{key.id} could be the name of a subject of tokens; choose another ID")
    if key.id in named.keys:
        raise RefusedChangeError(Reason.CONFLICT, f"{key.id} is a key of the configuration, which cannot be in the store as well")
    if any(one.text in named.hashes for one in key.hashes):
        raise RefusedChangeError(Reason.CONFLICT, "the configuration has this key already")
    _check_key(key, named, teams)
    return key


def changed_key(before: StoredKey, patch: Mapping[str, Any], named: Named, teams: Collection[str]) -> tuple[Key, str | None]:
    """Return a key with a merge patch applied, and its name. Raises RefusedChangeError."""
    check_fields(patch, ("name", *SETTABLE))
    after = merged(document(before.key) | ({} if before.name is None else {"name": before.name}), patch)
    name = _name(after.pop("name", None))
    key = _validated(Key, after)
    _check_key(key, named, teams)
    return key, name


def rotated_key(before: StoredKey, digest: str, end: datetime, now: datetime) -> Key:
    """Return a key with a new hash. The former ones expire at ``end``. Raises RefusedChangeError."""
    key = before.key
    if key.revoked or key.expired(now):
        state = "is revoked" if key.revoked else "has expired"
        raise RefusedChangeError(Reason.CONFLICT, f"{key.id} {state}, which would apply to its new key")
    hashes = [*former_hashes(key, end, now), digest]
    if len(hashes) > _MAX_HASHES:
        raise RefusedChangeError(Reason.CONFLICT, f"{key.id} has {_MAX_HASHES} valid keys already; rotate with a shorter overlap")
    return with_fields(key, hash=hashes)


def revoked_key(before: StoredKey, *, revoked: bool) -> Key:
    """Return a key that is revoked, or restored."""
    return with_fields(before.key, revoked=revoked)


def with_fields(key: Key, **fields: Any) -> Key:
    """Return a key with other settings, in the form of JSON. Raises RefusedChangeError."""
    return _validated(Key, document(key) | fields)


def _check_key(key: Key, named: Named, teams: Collection[str]) -> None:
    if key.team is not None and key.team not in named.teams and key.team not in teams:
        raise RefusedChangeError(Reason.INVALID, f"team: there is no team {key.team}{did_you_mean(key.team, [*named.teams, *teams])}")
    if key.queue_class is not None and key.queue_class not in named.classes:
        raise RefusedChangeError(
            Reason.INVALID, f"class: there is no class {key.queue_class}{did_you_mean(key.queue_class, named.classes)}"
        )
    _check_models("models", key.models, named)
    _check_limits("limits", key.limits, named)


# Teams


def new_team(fields: Mapping[str, Any], named: Named) -> Team:
    """Return a new team. Raises RefusedChangeError."""
    check_fields(fields, ("id", *TEAM_SETTINGS))
    team = _validated(Team, {name: value for name, value in fields.items() if value is not None})
    if team.id in named.teams:
        raise RefusedChangeError(Reason.CONFLICT, f"{team.id} is a team of the configuration, which cannot be in the store as well")
    _check_team(team, named)
    return team


def changed_team(before: StoredTeam, patch: Mapping[str, Any], named: Named) -> Team:
    """Return a team with a merge patch applied. Raises RefusedChangeError."""
    check_fields(patch, TEAM_SETTINGS)
    team = _validated(Team, merged(document(before.team), patch))
    _check_team(team, named)
    return team


def _check_team(team: Team, named: Named) -> None:
    _check_limits("limits", team.limits, named)
    if (policy := team.self_service) is not None:
        _check_models("self_service.models", policy.models, named)
        _check_limits("self_service.limits", policy.limits, named)


# Common checks


def check_version(identity: str, version: int, expected: int | None) -> None:
    """Check that an entry has the version that a request expects. None: any version. Raises RefusedChangeError."""
    if expected is not None and version != expected:
        raise RefusedChangeError(Reason.CHANGED, f"{identity} was changed in the meantime; read it again")


def check_fields(fields: Mapping[str, Any], allowed: Collection[str]) -> None:
    """Check that a request sets only some fields. Raises RefusedChangeError."""
    for name in fields:
        if name not in allowed:
            raise RefusedChangeError(Reason.INVALID, f"there is no field {name}{did_you_mean(name, list(allowed))}")


def _name(name: object) -> str | None:
    if name is None:
        return None
    if not isinstance(name, str) or not name.strip() or len(name) > _MAX_NAME or not name.isprintable() or has_key_shape(name):
        raise RefusedChangeError(Reason.INVALID, f"name: expected up to {_MAX_NAME} printable characters, and never a key")
    return name


def _validated(section: type[E], fields: Mapping[str, Any]) -> E:
    try:
        return section.model_validate(fields)
    except ValidationError as error:
        raise RefusedChangeError(Reason.INVALID, _first(error, section)) from None


def _first(error: ValidationError, section: type[BaseModel]) -> str:
    finding = next(iter(findings(error, section)))
    return f"{'.'.join(map(str, finding.path))}: {finding.message}"


def _check_models(setting: str, patterns: Collection[str], named: Named) -> None:
    for pattern in patterns:
        if pattern != "*" and not any(matches(pattern, name) for name in named.models):
            raise RefusedChangeError(Reason.INVALID, f"{setting}: {pattern} matches no model{did_you_mean(pattern, list(named.models))}")


def _check_limits(setting: str, limits: Limits | None, named: Named) -> None:
    if limits is None:
        return
    for number, row in enumerate(limits.models):
        _check_models(f"{setting}.models.{number}.models", row.models, named)
    if not named.has_prices and any(_costs(limits)):
        raise RefusedChangeError(Reason.INVALID, f"{setting}: no model has a price, so no request has a cost; set models[].price")


def _costs(limits: Limits) -> Iterator[int | None]:
    for row in (limits, *limits.models, *([] if limits.per_user is None else [limits.per_user])):
        yield from (getattr(row, f"cost_per_{window}") for window in CALENDAR)
        yield from (budget.cost for budget in row.budgets)
    yield None if limits.session is None else limits.session.cost
