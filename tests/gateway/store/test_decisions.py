"""Which changes of keys and teams are allowed, and what the entry is afterwards."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gateway.auth.keys import hash_of, mint
from gateway.store.decisions import Named, changed_key, check_version, imported_key, new_key, new_team, revoked_key, rotated_key
from gateway.store.entries import StoredKey, key_json, merged, parse_key
from gateway.store.errors import Reason, RefusedChangeError

NOW = datetime(2027, 1, 15, tzinfo=UTC)
SECRET = mint("alice")
NAMED = Named(
    keys={"yaml"},
    hashes={hash_of("sk-of-the-yaml")},
    teams={"lab"},
    models={"qwen", "llama"},
    has_prices=False,
    subjects=("staff/",),
)


def made(**fields: Any) -> StoredKey:
    key, name = new_key({"id": "alice", **fields}, hash_of(SECRET), NAMED, ["ops"], NOW)
    return StoredKey(key, name, 7, NOW, NOW)


def test_an_entry_survives_its_json() -> None:
    fields = {
        "team": "ops",
        "labels": {"cost_center": "17"},
        "models": ["qwen"],
        "expires": "2027-06-01",
        "limits": {"requests_per_minute": 5, "budgets": [{"window": "7d", "tokens": 100}], "models": [{"models": ["q*"], "concurrent": 2}]},
        "priority": -3,
        "user_header": "X-User",
    }
    stored = made(name="Alice's laptop", **fields)
    assert parse_key(key_json(stored.key, stored.name)) == (stored.key, "Alice's laptop")
    assert SECRET not in key_json(stored.key, stored.name)


@pytest.mark.parametrize(
    ("fields", "reason", "text"),
    [
        ({"id": "yaml"}, Reason.CONFLICT, "yaml is a key of the configuration"),
        ({"id": "staff/alice"}, Reason.CONFLICT, "staff/alice could be the name of a subject of tokens"),
        ({"id": "a b"}, Reason.INVALID, "id: "),
        ({"id": "a\n"}, Reason.INVALID, "id: "),
        ({"id": ""}, Reason.INVALID, "id: "),
        ({"id": SECRET}, Reason.INVALID, "id: expected a name"),
        ({"name": "x" * 101}, Reason.INVALID, "name: "),
        ({"name": "a\x1b[31m"}, Reason.INVALID, "name: "),
        ({"name": SECRET}, Reason.INVALID, "name: "),
        ({"team": "nobody"}, Reason.INVALID, "team: there is no team nobody"),
        ({"models": ["qwne"]}, Reason.INVALID, "models: qwne matches no model; did you mean `qwen`?"),
        ({"limits": {"models": [{"models": ["x"], "concurrent": 1}]}}, Reason.INVALID, "limits.models.0.models: x matches no model"),
        ({"limits": {"requests_per_minute": 0}}, Reason.INVALID, "limits.requests_per_minute: "),
        ({"limits": {"cost_per_day": 1.0}}, Reason.INVALID, "limits: no model has a price"),
        ({"limits": {"session": {"cost": 1.0}}}, Reason.INVALID, "limits: no model has a price"),
        ({"expires": "2027-01-14"}, Reason.INVALID, "expires: the date is in the past"),
        ({"revoked": True}, Reason.INVALID, "there is no field revoked"),
        ({"anonymous": True}, Reason.INVALID, "there is no field anonymous"),
        ({"hash": hash_of(SECRET)}, Reason.INVALID, "there is no field hash"),
        ({"expire": "2028-01-01"}, Reason.INVALID, "there is no field expire; did you mean `expires`?"),
    ],
)
def test_a_new_key_that_is_refused(fields: dict[str, Any], reason: Reason, text: str) -> None:
    with pytest.raises(RefusedChangeError) as refused:
        made(**fields)
    assert refused.value.reason is reason
    assert str(refused.value).startswith(text)
    assert SECRET not in str(refused.value)


def test_a_key_of_the_yaml_is_not_imported_under_another_id() -> None:
    with pytest.raises(RefusedChangeError, match="the configuration has this key already"):
        imported_key({"id": "other", "hash": hash_of("sk-of-the-yaml")}, NAMED, ())


def test_a_patch_changes_only_what_it_names() -> None:
    before = made(name="A", team="lab", limits={"requests_per_minute": 5, "concurrent": 2}, labels={"a": "1", "b": "2"})
    key, name = changed_key(before, {"limits": {"concurrent": None, "tokens_per_day": 9}, "labels": {"a": None}}, NAMED, ())
    assert (key.team, key.labels, name) == ("lab", {"b": "2"}, "A")
    assert key.limits is not None
    assert (key.limits.requests_per_minute, key.limits.concurrent, key.limits.tokens_per_day) == (5, None, 9)
    key, name = changed_key(before, {"limits": None, "team": None, "name": None}, NAMED, ())
    assert (key.limits, key.team, name) == (None, None, None)
    assert key.hashes == before.key.hashes


@pytest.mark.parametrize("field", ["id", "hash", "revoked", "anonymous", "other"])
def test_a_patch_sets_no_other_field(field: str) -> None:
    with pytest.raises(RefusedChangeError, match=f"there is no field {field}"):
        changed_key(made(), {field: None}, NAMED, ())


def test_former_keys_expire_after_a_rotation_and_never_live_longer() -> None:
    end = NOW + timedelta(days=7)
    first = rotated_key(made(), hash_of("second"), end, NOW)
    assert [(one.text, one.expires) for one in first.hashes] == [(hash_of(SECRET), end), (hash_of("second"), None)]
    stored = StoredKey(first, None, 8, NOW, NOW)
    second = rotated_key(stored, hash_of("third"), NOW + timedelta(days=30), NOW)
    assert [one.expires for one in second.hashes] == [end, NOW + timedelta(days=30), None]
    third = rotated_key(stored, hash_of("third"), NOW, NOW)
    assert [one.text for one in third.hashes] == [hash_of("third")]


def test_a_rotation_has_a_bound() -> None:
    stored = made()
    for number in range(15):
        stored = StoredKey(rotated_key(stored, hash_of(f"key {number}"), NOW + timedelta(days=7), NOW), None, 8, NOW, NOW)
    with pytest.raises(RefusedChangeError, match="has 16 valid keys already"):
        rotated_key(stored, hash_of("one more"), NOW + timedelta(days=7), NOW)


def test_a_key_that_is_refused_gets_no_new_key() -> None:
    revoked = StoredKey(revoked_key(made(), revoked=True), None, 8, NOW, NOW)
    with pytest.raises(RefusedChangeError, match="alice is revoked"):
        rotated_key(revoked, hash_of("second"), NOW, NOW)
    with pytest.raises(RefusedChangeError, match="alice has expired"):
        rotated_key(made(expires="2027-01-16"), hash_of("second"), NOW, NOW + timedelta(days=2))
    assert not revoked_key(revoked, revoked=False).revoked


def test_a_team_of_the_yaml_is_not_in_the_store_as_well() -> None:
    assert new_team({"id": "ops", "limits": {"concurrent": 3}}, NAMED).id == "ops"
    with pytest.raises(RefusedChangeError, match="lab is a team of the configuration"):
        new_team({"id": "lab"}, NAMED)


def test_a_version_is_compared() -> None:
    check_version("alice", 7, 7)
    check_version("alice", 7, None)
    with pytest.raises(RefusedChangeError) as refused:
        check_version("alice", 8, 7)
    assert refused.value.reason is Reason.CHANGED


@pytest.mark.parametrize(
    ("before", "patch", "after"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_the_examples_of_rfc_7396(before: dict[str, Any], patch: dict[str, Any], after: dict[str, Any]) -> None:
    assert merged(before, patch) == after
