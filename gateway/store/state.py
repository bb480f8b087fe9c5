"""The keys and teams of the store as control knows them, and what of them workers get. Pure.

The rules: the YAML is the source of truth for what it names, so an entry of the store with an ID of the YAML is not served. Neither is a
key whose team does not exist, because its limits would be missing. A change updates only the keys that it names, and the keys of the teams
that it names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from contextlib import suppress
from typing import NamedTuple

from gateway.config import Config, Team
from gateway.store.database import Changed, Changes
from gateway.store.decisions import subject_prefixes
from gateway.store.entries import Holder, KeySummary, Kind, Position, key_summary, parse_team, team_json

Encode = Callable[[str, Team | None], bytes]
"""Returns a key, from its JSON and its team, as workers decode it. Raises ValueError for an invalid entry."""


class Effect(NamedTuple):
    """The effect of a change on workers: encoded keys by ID, and IDs of keys that are not served. ``is_reset``: of all keys."""

    changed: dict[str, bytes]
    removed: list[str]
    is_reset: bool = False


class _Entry(NamedTuple):
    """A key as it is stored, and its summary."""

    json: str
    summary: KeySummary


class StoreState:
    """All entries up to a position of the change log. ``encode`` returns the function that encodes a key for a configuration."""

    def __init__(self, config: Config, encode: Callable[[Config], Encode]) -> None:
        self._config = config
        self._encode = encode
        self._keys: dict[str, _Entry] = {}
        self._hashes: dict[str, str] = {}
        self._teams: dict[str, Team] = {}
        self._keys_of_team: dict[str, set[str]] = defaultdict(set)
        self._in_yaml = _InYaml.of(config)
        self.position = Position()
        self.raises: dict[Holder, str] = {}
        """The raises of limits as JSON, by holder."""
        self.unserved: dict[str, str] = {}
        """Why a key is not served, by its ID."""
        self.expiries: dict[str, float] = {}
        """When a key expires, in seconds since the epoch, by its ID. Keys that do not expire, or are revoked, are omitted."""

    @property
    def count(self) -> int:
        """The number of keys."""
        return len(self._keys)

    def everything(self) -> Changes:
        """Return all entries, as changes that are complete."""
        keys = {identity: entry.json for identity, entry in self._keys.items()}
        teams = {name: team_json(team) for name, team in self._teams.items()}
        return Changes(self.position, Changed(keys), Changed(teams), is_complete=True, raises=dict(self.raises))

    @property
    def teams(self) -> frozenset[str]:
        """The IDs of the store's teams."""
        return frozenset(self._teams)

    def team(self, identity: str) -> Team | None:
        """Return a team, or None. The YAML decides about a team that it names."""
        return self._in_yaml.teams.get(identity) or self._teams.get(identity)

    def keys_of_team(self, team: str) -> Collection[str]:
        """Return the IDs of a team's keys."""
        return self._keys_of_team.get(team, ())

    def apply(self, changes: Changes) -> Effect:
        """Apply changes of the database. Returns what workers have to know."""
        if changes.is_complete:
            self._keys, self._hashes, self._teams, self._keys_of_team = {}, {}, {}, defaultdict(set)
            self.unserved, self.expiries, self.raises = {}, {}, {}
        self._learn_raises(changes)
        affected: dict[str, None] = {}
        for name in (*changes.teams.removed, *changes.teams.entries):
            self._teams.pop(name, None)
            affected |= dict.fromkeys(self._keys_of_team.get(name, ()))
        for name, entry in changes.teams.entries.items():
            with suppress(ValueError):  # without its limits, the team does not exist
                self._teams[name] = parse_team(entry)
        for identity in changes.keys.removed if changes.is_complete else (*changes.keys.removed, *changes.keys.entries):
            self._forget(identity)
        for identity, entry in changes.keys.entries.items():
            self._learn(identity, entry)
        affected |= dict.fromkeys((*changes.keys.removed, *changes.keys.entries))
        self.position = changes.position
        return self._effect(affected, is_reset=changes.is_complete)

    def _learn_raises(self, changes: Changes) -> None:
        kinds: tuple[tuple[Kind, Changed], ...] = ("key", changes.keys), ("team", changes.teams)
        for kind, changed in kinds:
            for identity in (*changed.entries, *changed.removed):
                self.raises.pop((kind, identity), None)
        self.raises.update(changes.raises)

    def again(self, ids: Iterable[str]) -> Effect:
        """Return some keys as workers have to know them, although nothing has changed."""
        return self._effect(dict.fromkeys(ids))

    def use_config(self, config: Config) -> Effect:
        """Use another configuration. Returns what workers have to know."""
        before, self._config = self._config, config
        former, self._in_yaml = self._in_yaml, _InYaml.of(config)
        if before.isolate_prefix_cache != config.isolate_prefix_cache or former.subjects != self._in_yaml.subjects:
            return self._effect(self._keys, is_reset=True)
        named = former.keys ^ self._in_yaml.keys
        old, new = former.teams, self._in_yaml.teams
        teams = {team for team in old.keys() | new.keys() if old.get(team) != new.get(team)}
        of_teams = (each for team in teams for each in self._keys_of_team.get(team, ()))
        return self._effect(dict.fromkeys((*(name for name in named if name in self._keys), *of_teams)))

    def conflicts(self, config: Config) -> Iterator[tuple[str, str]]:
        """Yield what of a configuration the store has as well: the ID of its key or team, and a sentence."""
        for key in config.keys:
            if key.id in self._keys:
                yield key.id, f"the key {key.id} is in the store as well; delete either"
            for one in key.hashes:
                if (holder := self._hashes.get(one.text)) is not None:
                    yield key.id, f"the store has a key of {key.id} as {holder}; delete either"
        prefixes = subject_prefixes(config)
        if prefixes and (found := next((name for name in self._keys if name.startswith(prefixes)), None)) is not None:
            yield found, f"the key {found} of the store could be the name of a subject of tokens; delete it, or rename the entry for tokens"
        for team in config.teams:
            if team.id in self._teams:
                yield team.id, f"the team {team.id} is in the store as well; delete either"
        known = {team.id for team in config.teams} | self._teams.keys()
        for team_id, ids in self._keys_of_team.items():
            if ids and team_id not in known:
                yield team_id, f"the key {min(ids)} of the store belongs to the team {team_id}, which does not exist"

    def _learn(self, identity: str, entry: str) -> None:
        try:
            summary = key_summary(entry)
        except ValueError:
            summary = KeySummary(())  # an entry that cannot be read admits no requests
        self._keys[identity] = _Entry(entry, summary)
        for one in summary.hashes:
            self._hashes[one] = identity
        if summary.team is not None:
            self._keys_of_team[summary.team].add(identity)
        if summary.expires is not None:
            self.expiries[identity] = summary.expires

    def _forget(self, identity: str) -> None:
        former = self._keys.pop(identity, None)
        self.unserved.pop(identity, None)
        self.expiries.pop(identity, None)
        if former is None:
            return
        for one in former.summary.hashes:
            if self._hashes.get(one) == identity:
                del self._hashes[one]
        if (team := former.summary.team) is not None:
            self._keys_of_team[team].discard(identity)
            if not self._keys_of_team[team]:
                del self._keys_of_team[team]

    def _effect(self, ids: Iterable[str], *, is_reset: bool = False) -> Effect:
        effect, encode = Effect({}, [], is_reset), self._encode(self._config)
        for identity in ids:
            self.unserved.pop(identity, None)
            if (entry := self._keys.get(identity)) is None:
                effect.removed.append(identity)
                continue
            team = entry.summary.team
            if (reason := self._why_unserved(identity, team)) is None:
                try:
                    effect.changed[identity] = encode(entry.json, None if team is None else self.team(team))
                except ValueError:
                    reason = "its entry is invalid"
            if reason is not None:
                self.unserved[identity] = reason
                effect.removed.append(identity)
        return effect

    def _why_unserved(self, identity: str, team: str | None) -> str | None:
        if identity in self._in_yaml.keys:
            return "the configuration has a key with this ID"
        if identity.startswith(self._in_yaml.subjects):
            return "it could be the name of a subject of tokens"
        is_known = team is None or team in self._in_yaml.teams or team in self._teams
        return None if is_known else f"there is no team {team}"


class _InYaml(NamedTuple):
    """The IDs of the YAML's keys, its teams, and how the names of subjects of tokens start."""

    keys: Set[str]
    teams: dict[str, Team]
    subjects: tuple[str, ...]

    @classmethod
    def of(cls, config: Config) -> _InYaml:
        return cls(frozenset(key.id for key in config.keys), {team.id: team for team in config.teams}, subject_prefixes(config))
