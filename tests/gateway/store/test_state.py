"""The keys of the store that are served, and the keys that a change costs."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway import config as conf
from gateway.auth.keys import hash_of
from gateway.config import Config, Key
from gateway.key_management.key_list import expiry
from gateway.store.database import Changed, Changes
from gateway.store.entries import Position, key_json, key_summary, parse_key
from gateway.store.state import Encode, StoreState

Entry = tuple[str, str]
"""The ID and the JSON of an entry."""


def config(**more: Any) -> Config:
    return Config.model_validate({"models": [{"id": "tiny", "servers": [{"url": "http://10.0.0.1"}]}], **more})


def encoder(_: Config) -> Encode:
    def encode(entry: str, team: conf.Team | None) -> bytes:
        key, _ = parse_key(entry)
        limits = None if team is None else team.limits
        return f"{key.id} {None if limits is None else limits.concurrent}".encode()

    return encode


def row(identity: str, **fields: Any) -> Entry:
    return identity, json.dumps({"id": identity, "hash": [hash_of(identity)], **fields})


def team(identity: str, concurrent: int) -> Entry:
    return identity, json.dumps({"id": identity, "limits": {"concurrent": concurrent}})


def changes(*keys: Entry, teams: tuple[Entry, ...] = (), removed: tuple[str, ...] = (), gone: tuple[str, ...] = ()) -> Changes:
    return Changes(Position(2, "m"), Changed(dict(keys), removed), Changed(dict(teams), gone))


def started(*keys: Entry, stored: tuple[Entry, ...] = (), **yaml: Any) -> StoreState:
    state = StoreState(config(**yaml), encoder)
    state.apply(changes(*keys, teams=stored)._replace(is_complete=True))
    return state


def test_a_change_costs_the_keys_that_it_names() -> None:
    state = started(*(row(f"key-{number}") for number in range(100)))
    effect = state.apply(changes(row("key-3", priority=1), removed=("key-4", "nobody")))
    assert (effect.changed, sorted(effect.removed), effect.is_reset) == ({"key-3": b"key-3 None"}, ["key-4", "nobody"], False)
    assert state.count == 99


def test_a_team_changes_its_keys() -> None:
    keys = (row("a", team="ops"), row("b", team="ops"), row("c"))
    state = started(*keys, stored=(team("ops", 3),))
    assert state.apply(changes(teams=(team("ops", 5),))).changed == {"a": b"a 5", "b": b"b 5"}
    assert state.apply(changes(row("a"))).changed == {"a": b"a None"}
    assert state.apply(changes(teams=(team("ops", 7),))).changed == {"b": b"b 7"}
    assert set(state.keys_of_team("ops")) == {"b"}


def test_a_team_of_the_yaml_changes_its_keys() -> None:
    state = started(row("a", team="lab"), row("c"), teams=[{"id": "lab", "limits": {"concurrent": 1}}])
    effect = state.use_config(config(teams=[{"id": "lab", "limits": {"concurrent": 2}}]))
    assert (effect.changed, effect.removed, effect.is_reset) == ({"a": b"a 2"}, [], False)


def test_a_key_without_its_team_is_not_served() -> None:
    state = started(row("a", team="ops"), stored=(team("ops", 3),))
    assert state.apply(changes(gone=("ops",))).removed == ["a"]
    assert state.unserved == {"a": "there is no team ops"}
    assert state.apply(changes(teams=(team("ops", 4),))).changed == {"a": b"a 4"}
    assert state.unserved == {}


def test_a_key_of_the_yaml_is_not_served_from_the_store() -> None:
    state = started(row("a"), row("b"))
    yaml = config(keys=[{"id": "a", "hash": hash_of("another")}, {"id": "x", "hash": hash_of("b")}], teams=[{"id": "ops"}])
    assert [name for name, _ in state.conflicts(yaml)] == ["a", "x"]
    assert state.use_config(yaml).removed == ["a"]
    assert state.unserved == {"a": "the configuration has a key with this ID"}
    assert state.use_config(config()).changed == {"a": b"a None"}


def test_a_team_that_the_store_needs_is_not_removed_from_the_yaml() -> None:
    state = started(row("a", team="lab"), stored=(team("ops", 1),), teams=[{"id": "lab"}])
    assert list(state.conflicts(config(teams=[{"id": "lab"}]))) == []
    (missing,) = state.conflicts(config())
    assert missing == ("lab", "the key a of the store belongs to the team lab, which does not exist")
    (twice,) = state.conflicts(config(teams=[{"id": "lab"}, {"id": "ops"}]))
    assert twice[0] == "ops"


def test_an_invalid_entry_harms_no_other() -> None:
    broken = ("a", "{"), row("b", limits={"concurrent": -1})
    state = started(*broken, row("c"))
    assert state.unserved == dict.fromkeys("ab", "its entry is invalid")
    assert state.apply(changes(row("a"))).changed == {"a": b"a None"}


def test_another_secret_changes_every_key(tmp_path: Any) -> None:
    (tmp_path / "secret").write_text("a secret")
    state = started(row("a"), row("b"))
    secret = conf.PrefixCacheIsolation.model_construct(secret="another")
    effect = state.use_config(config().model_copy(update={"isolate_prefix_cache": secret}))
    assert (sorted(effect.changed), effect.is_reset) == (["a", "b"], True)


def test_a_key_with_the_name_of_a_subject_is_not_served() -> None:
    state = started(row("staff/alice"), row("b"))
    jwks = conf.Jwt.model_construct(issuer="https://login", keys=("staff",))
    yaml = config().model_copy(update={"jwt": (jwks,)})
    assert [name for name, _ in state.conflicts(yaml)] == ["staff/alice"]
    assert state.use_config(yaml).removed == ["staff/alice"]
    assert state.unserved == {"staff/alice": "it could be the name of a subject of tokens"}


def test_everything_leads_to_the_same_state() -> None:
    state = started(row("a", team="ops"), row("b"), stored=(team("ops", 3),))
    state.apply(changes(row("c"), removed=("b",)))
    other = StoreState(config(), encoder)
    assert other.apply(state.everything()).changed == {"a": b"a 3", "c": b"c None"}
    assert (other.position, other.everything()) == (state.position, state.everything())


def test_keys_of_an_invalid_team_are_not_served() -> None:
    state = started(row("a", team="ops"), row("b"), stored=(("ops", "{"),))
    assert state.unserved == {"a": "there is no team ops"}


_moments = st.datetimes(datetime(2020, 1, 1), datetime(2090, 1, 1), timezones=st.just(UTC)).map(lambda moment: moment.isoformat())
_hashes = st.integers(0, 9).map(lambda number: hash_of(f"key {number}"))


@given(
    st.fixed_dictionaries(
        {"hash": st.lists(_hashes | st.fixed_dictionaries({"hash": _hashes, "expires": _moments}), min_size=1, max_size=3)},
        optional={"expires": _moments, "revoked": st.booleans(), "team": st.just("ops")},
    )
)
def test_the_summary_of_a_key_is_that_of_the_validated_key(fields: dict[str, Any]) -> None:
    key = Key.model_validate({"id": "a", **fields})
    end = expiry(key)
    expected = (tuple(one.text for one in key.hashes), key.team, None if end is None else end.timestamp())
    assert key_summary(json.dumps({"id": "a", **fields})) == key_summary(key_json(key, "a name")) == expected


def test_keys_that_expire_are_known() -> None:
    state = started(row("a", expires="2030-01-01T00:00:00Z"), row("b"), row("c", expires="2031-01-01T00:00:00Z"))
    assert state.expiries == {"a": 1893456000, "c": 1924992000}
    state.apply(changes(row("a", expires="2030-01-01T00:00:00Z", revoked=True), removed=("c",)))
    assert state.expiries == {}


def test_raises_belong_to_their_holders() -> None:
    state = started(row("a", team="ops"), row("b"), stored=(team("ops", 3),))
    effect = state.apply(
        changes(removed=("yaml",), teams=(team("ops", 3),))._replace(raises={("key", "yaml"): "[1]", ("team", "ops"): "[2]"})
    )
    assert (effect.changed, effect.removed) == ({"a": b"a 3"}, ["yaml"])
    assert state.everything().raises == state.raises == {("key", "yaml"): "[1]", ("team", "ops"): "[2]"}
    state.apply(changes(row("b")))
    assert len(state.raises) == 2
    state.apply(changes(removed=("yaml",)))
    assert state.raises == {("team", "ops"): "[2]"}
    assert state.again(["a", "b"]).changed == {"a": b"a 3", "b": b"b None"}
    state.apply(changes()._replace(is_complete=True))
    assert state.raises == {}
