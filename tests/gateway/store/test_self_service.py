"""The keys that people may create for themselves: each policy, ceiling and ownership."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.actor import PersonId
from gateway.auth.keys import hash_of
from gateway.config import Key, Limits, SelfService
from gateway.store.decisions import Named, new_key
from gateway.store.entries import StoredKey, document
from gateway.store.errors import Reason, RefusedChangeError
from gateway.store.self_service import Grant, changed_own_key, check_policy, chosen_team, new_own_key, within

NOW = datetime(2027, 1, 15, 12, 30, tzinfo=UTC)
ALICE, BOB = PersonId("https://login.example.com", "alice"), PersonId("https://login.example.com", "bob")
NAMED = Named(keys=(), hashes=(), teams={"lab", "ops"}, models={"sim/one", "sim/two", "other"}, has_prices=True)
DIGEST = hash_of("sk-of-the-tests")
CEILINGS = {
    "requests_per_minute": 60,
    "cost_per_day": 5.0,
    "budgets": [{"window": "7d", "tokens": 1000}],
    "session": {"tokens": 50},
    "models": [{"models": ["sim/two"], "concurrent": 2}],
}
POLICY = SelfService.model_validate({"max_keys": 2, "max_lifetime": "30d", "models": ["sim/*"], "limits": CEILINGS})
GRANT = Grant(ALICE, {"lab"})
LAST = "2027-02-14T12:30:00Z"


def made(*held: StoredKey, policy: SelfService = POLICY, **fields: Any) -> Key:
    return new_own_key("key-1", {"team": "lab", **fields}, DIGEST, policy, held, NAMED, (), NOW)[0]


def stored(identity: str = "held", maker: PersonId | None = ALICE, team: str | None = "lab", **fields: Any) -> StoredKey:
    key = Key.model_validate({"id": identity, "hash": DIGEST, "team": team, **fields})
    return StoredKey(key, None, 1, NOW, NOW, maker)


def test_what_is_left_open_is_as_the_policy_allows_at_most() -> None:
    key = document(made())
    assert key == {"id": "key-1", "hash": [DIGEST], "team": "lab", "models": ["sim/*"], "expires": LAST, "limits": CEILINGS}


def test_lower_limits_and_fewer_models_stay() -> None:
    own = {
        "requests_per_minute": 5, "cost_per_day": 0.5, "concurrent": 1, "budgets": [{"window": "7d", "tokens": 10}],
        "session": {"tokens": 5}, "models": [{"models": ["sim/one"], "concurrent": 1}],
    }  # fmt: skip
    key = document(made(models=["sim/one"], expires="2027-01-20", limits=own, name="Laptop"))
    assert (key["models"], key["expires"]) == (["sim/one"], "2027-01-20T00:00:00Z")
    assert key["limits"] == own | {"models": [*own["models"], *CEILINGS["models"]]}  # type: ignore[misc]


def test_a_policy_without_bounds_sets_none() -> None:
    key = document(made(policy=SelfService(max_keys=1)))
    assert key == {"id": "key-1", "hash": [DIGEST], "team": "lab"}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"limits": {"requests_per_minute": 61}}, "limits.requests_per_minute: at most 60"),
        ({"limits": {"cost_per_day": 5.01}}, "limits.cost_per_day: at most 5"),
        ({"limits": {"budgets": [{"window": "7d", "tokens": 1001}]}}, "limits.budgets.7d.tokens: at most 1000"),
        ({"limits": {"budgets": [{"window": "168h", "tokens": 1001}]}}, "limits.budgets.7d.tokens: at most 1000"),
        ({"limits": {"session": {"tokens": 51}}}, "limits.session.tokens: at most 50"),
        ({"limits": {"models": [{"models": ["sim/one"], "concurrent": 1}] * 9}}, "limits.models: at most 8"),
        ({"models": ["other"]}, "models: other is not allowed"),
        ({"models": ["*"]}, "models: * is not allowed"),
        ({"models": ["sim/one", "o*"]}, "models: o* is not allowed"),
        ({"models": ["s*m/*"]}, "models: s*m/* is not allowed"),
        ({"models": ["sim/?ne"]}, "models: sim/?ne is not allowed"),
        ({"expires": "2027-02-15"}, "expires: at the latest 2027-02-14T12:30:00Z"),
        ({"expires": "2027-01-14"}, "expires: the date is in the past"),
        ({"priority": -5}, "there is no field priority"),
        ({"labels": {"cost_center": "17"}}, "there is no field labels"),
        ({"user_header": "X-User"}, "there is no field user_header"),
        ({"id": "mine"}, "there is no field id"),
        ({"hash": DIGEST}, "there is no field hash"),
        ({"made_by": {"subject": "bob"}}, "there is no field made_by"),
        ({"name": "a\x1b[31m"}, "name: "),
        ({"name": "a\nb"}, "name: "),
        ({"name": "\u202egnp"}, "name: "),
        ({"name": "x" * 101}, "name: "),
        ({"name": 7}, "name: "),
        ({"limits": {"requests_per_minute": 0}}, "limits.requests_per_minute: "),
        ({"limits": {"requests_per_minute": True}}, "limits.requests_per_minute: "),
        ({"limits": []}, "limits: "),
        ({"models": []}, "models: "),
    ],
)
def test_a_key_beyond_the_policy_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(RefusedChangeError) as refused:
        made(**fields)
    assert refused.value.reason is Reason.INVALID
    assert str(refused.value).startswith(text)


def test_markup_in_a_name_is_a_text() -> None:
    key, name = new_own_key("key-1", {"team": "lab", "name": "<script>alert(1)</script>"}, DIGEST, POLICY, (), NAMED, (), NOW)
    assert name == "<script>alert(1)</script>" and key.id == "key-1"


def test_the_number_of_valid_keys_of_a_team_is_bounded() -> None:
    made(stored(), stored(team="ops"), stored(team=None), stored(revoked=True), stored(expires="2027-01-01"))
    with pytest.raises(RefusedChangeError) as refused:
        made(stored(), stored())
    assert (refused.value.reason, str(refused.value)) == (Reason.CONFLICT, "you have 2 valid keys in lab, and 2 are allowed; revoke one")


def test_the_number_of_ended_keys_is_bounded() -> None:
    made(*[stored(revoked=True)] * 99)
    with pytest.raises(RefusedChangeError, match="delete some of them"):
        made(*[stored(revoked=True)] * 100)


@pytest.mark.parametrize(
    ("key", "grant", "is_included"),
    [
        (stored(), Grant(ALICE, ()), True),
        (stored(maker=BOB), Grant(ALICE, {"lab"}), False),
        (stored(maker=PersonId("https://other.example.com", "alice")), Grant(ALICE, {"lab"}), False),
        (stored(maker=PersonId("", "alice")), Grant(ALICE, {"lab"}), False),
        (stored(maker=None), Grant(ALICE, {"lab"}), False),
        (stored(maker=None, team=None), Grant(None, {"lab"}, {"lab"}), False),
        (stored(maker=BOB), Grant(ALICE, (), {"lab"}), True),
        (stored(maker=BOB, team="ops"), Grant(ALICE, (), {"lab"}), False),
        (stored(maker=None, team=None), Grant(None, (), ()), False),
    ],
)
def test_a_key_is_reached_by_its_maker_and_by_owners_of_its_team(key: StoredKey, grant: Grant, is_included: bool) -> None:
    assert grant.includes(key) is is_included
    if not is_included:
        with pytest.raises(RefusedChangeError, match=r"^there is no key held in the store$") as refused:
            grant.check(key)
        assert refused.value.reason is Reason.NOT_FOUND


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({}, Reason.INVALID), ({"team": None}, Reason.INVALID), ({"team": ["lab"]}, Reason.INVALID), ({"team": "ops"}, Reason.FORBIDDEN),
     ({"team": "lab\0"}, Reason.FORBIDDEN)],
)  # fmt: skip
def test_a_key_is_created_in_a_team_of_the_person(fields: dict[str, Any], reason: Reason) -> None:
    with pytest.raises(RefusedChangeError) as refused:
        chosen_team(fields, GRANT)
    assert refused.value.reason is reason
    assert chosen_team({"team": "lab"}, GRANT) == "lab"


@pytest.mark.parametrize(("team", "policy"), [("lab", None), ("ops", POLICY), (None, POLICY)])
def test_without_a_policy_or_outside_of_the_team_nothing_is_created(team: str | None, policy: SelfService | None) -> None:
    with pytest.raises(RefusedChangeError) as refused:
        check_policy(team, policy, GRANT)
    assert refused.value.reason is Reason.FORBIDDEN


def changed(before: StoredKey, policy: SelfService | None = POLICY, **patch: Any) -> Key:
    return changed_own_key(before, patch, policy, GRANT, NAMED, ())[0]


def test_a_change_stays_within_the_policy() -> None:
    own = stored(limits={"requests_per_minute": 5})
    assert document(changed(own, limits={"requests_per_minute": 50}))["limits"]["requests_per_minute"] == 50
    for patch in ({"limits": {"requests_per_minute": 61}}, {"expires": "2030-01-01"}, {"models": ["*"]}, {"team": "ops"}, {"team": None}):
        with pytest.raises(RefusedChangeError):
            changed(own, **patch)
    assert document(changed(own, limits=None, models=None, expires=None)) == document(changed(own)) | {
        "models": ["sim/*"], "expires": LAST, "limits": CEILINGS
    }  # fmt: skip


def test_a_name_needs_no_policy_and_changes_nothing_else() -> None:
    by_admin = stored(limits={"requests_per_minute": 1000}, models=["other"])
    assert changed(by_admin, None, name="Robot") == by_admin.key
    with pytest.raises(RefusedChangeError) as refused:
        changed(by_admin, None, models=["sim/one"])
    assert refused.value.reason is Reason.FORBIDDEN


def test_the_lifetime_counts_from_the_creation() -> None:
    old = StoredKey(stored().key, None, 1, NOW - timedelta(days=29), NOW, ALICE)
    with pytest.raises(RefusedChangeError, match="at the latest 2027-01-16T12:30:00Z"):
        changed(old, expires="2027-01-17")


def test_a_lifetime_beyond_the_calendar_is_no_bound() -> None:
    forever = SelfService.model_validate({"max_keys": 1, "max_lifetime": "999999999999d"})
    assert made(policy=forever).expires is None


amounts = st.none() | st.integers(1, 10)


@st.composite
def some_limits(draw: st.DrawFn) -> dict[str, Any]:
    names = ("requests_per_minute", "tokens_per_day", "concurrent", "max_tokens")
    limits: dict[str, Any] = {name: draw(amounts) for name in names}
    windows = draw(st.dictionaries(st.sampled_from(["day", "7d"]), st.integers(1, 10), max_size=2))
    return {
        **{name: value for name, value in limits.items() if value is not None},
        **({"budgets": [{"window": window, "tokens": tokens} for window, tokens in windows.items()]} if windows else {}),
        **({"session": {"tokens": draw(st.integers(1, 10))}} if draw(st.booleans()) else {}),
    }


def flat(limits: Limits | None) -> dict[str, int]:
    """Return the amount of each limit by a name."""
    if limits is None:
        return {}
    found = {name: getattr(limits, name) for name in ("requests_per_minute", "tokens_per_day", "concurrent", "max_tokens")}
    found |= {f"budget {each.window}": each.tokens for each in limits.budgets}
    found["session"] = None if limits.session is None else limits.session.tokens
    return {name: value for name, value in found.items() if value is not None}


@given(some_limits(), some_limits())
def test_no_key_has_a_limit_above_a_ceiling(own: dict[str, Any], ceilings: dict[str, Any]) -> None:
    policy = SelfService.model_validate({"max_keys": 1, **({"limits": ceilings} if ceilings else {})})
    key, _ = new_key({"id": "a", "team": "lab", "limits": own}, DIGEST, NAMED, (), NOW)
    wanted, most = flat(key.limits), flat(policy.limits)
    try:
        capped = within(key, policy, NOW)
    except RefusedChangeError:
        assert any(wanted[name] > most[name] for name in wanted.keys() & most.keys())
        return
    assert flat(capped.limits) == most | wanted
    assert all(flat(capped.limits)[name] <= most[name] for name in most)
    assert within(capped, policy, NOW) == capped
