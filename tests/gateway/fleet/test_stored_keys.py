"""A key of the store reaches workers as a key of the configuration would."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import config as conf
from gateway.auth.keys import hash_of
from gateway.config import Config
from gateway.config.secret import Surroundings
from gateway.fleet.observed_servers import ObservedServers
from gateway.fleet.snapshot_builder import build_snapshot
from gateway.fleet.stored_keys import KeyEncoder
from gateway.snapshot.snapshot import Key
from gateway.store.entries import key_json

MODELS = [{"id": "tiny", "servers": [{"url": "http://10.0.0.1"}], "price": {"prompt": 1.0}}]
_names = st.text("abc-/", min_size=1, max_size=5)
_amounts = st.fixed_dictionaries(
    {}, optional={"requests_per_minute": st.integers(1, 9), "cost_per_day": st.sampled_from((0.5, 2.25)), "max_tokens": st.integers(1, 9)}
)
_hashes = st.integers(0, 99).map(lambda number: hash_of(f"key {number}"))
_times = st.sampled_from(("2027-01-01", "2027-01-01T12:30:00Z", "2030-06-01T00:00:00+02:00"))
_entries = st.fixed_dictionaries(
    {"id": _names, "hash": st.lists(_hashes | st.fixed_dictionaries({"hash": _hashes, "expires": _times}), min_size=1, max_size=3)},
    optional={
        "team": st.just("ops"),
        "labels": st.dictionaries(_names, _names, max_size=2),
        "models": st.just(["t*", "x"]),
        "expires": _times,
        "limits": st.builds(lambda own, row: {**own, "models": [{"models": ["t*"], **row}]} if row else own, _amounts, _amounts),
        "priority": st.integers(-3, 3),
        "user_header": st.just("X-User"),
        "revoked": st.booleans(),
    },
)


def configured(entries: list[dict[str, Any]], **more: Any) -> Config:
    teams = [{"id": "ops", "limits": {"concurrent": 3, "models": [{"models": ["t*"], "tokens_per_day": 5}]}}]
    return Config.model_validate({"models": MODELS, "teams": teams, "keys": entries, **more})


@pytest.mark.parametrize("isolated", [False, True])
@given(st.lists(_entries, max_size=4))
def test_a_key_is_the_same_in_the_store_and_in_the_configuration(isolated: bool, entries: list[dict[str, Any]]) -> None:
    config = configured(entries)
    if isolated:
        around = Surroundings({"SALT": "a secret"}, None, [])  # type: ignore[arg-type]
        secret = conf.PrefixCacheIsolation.model_validate({"secret": {"env": "SALT"}}, context=around)
        config = config.model_copy(update={"isolate_prefix_cache": secret})
    encode = KeyEncoder(config)
    expected = build_snapshot(config, ObservedServers({}, {}, {}), 1, 0).keys
    for key, made in zip(config.keys, expected, strict=True):
        team = config.teams[0] if key.team == "ops" else None
        assert msgspec.msgpack.decode(encode(key_json(key, "A name"), team), type=Key) == made


def test_a_key_has_the_weight_of_its_team() -> None:
    entry = json.dumps({"id": "a", "hash": [hash_of("a")], "team": "lab"})
    encode = KeyEncoder(configured([]))
    assert msgspec.msgpack.decode(encode(entry, conf.Team(id="lab", weight=3.0)), type=Key).team_weight == 3.0


INVALID = (
    "",
    "{",
    "[]",
    "{}",
    '{"id": "a"}',
    '{"id": "a", "hash": [5]}',
    '{"id": "a", "hash": ["sha256:xy"]}',
    '{"id": "a", "hash": [], "x": 1}',
)


@pytest.mark.parametrize("entry", INVALID)
def test_an_invalid_entry_is_an_error(entry: str) -> None:
    with pytest.raises(ValueError, match=r"invalid|hexadecimal|validation"):
        KeyEncoder(configured([]))(entry, None)


def test_many_different_settings_are_encoded_too() -> None:
    encode = KeyEncoder(configured([]))
    for number in range(1, 1500):
        entry = json.dumps({"id": f"key-{number}", "hash": [hash_of(str(number))], "limits": {"concurrent": number}})
        key = msgspec.msgpack.decode(encode(entry, None), type=Key)
        assert (key.id, key.allowances[0].limits.concurrent, key.allowances[0].holder) == (f"key-{number}", number, f"key key-{number}")
