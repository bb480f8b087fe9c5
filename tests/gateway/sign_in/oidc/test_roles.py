"""Claims to roles and teams: what an issuer grants, and what a person cannot grant themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.actor import Role
from gateway.sign_in.errors import SignInError
from gateway.sign_in.oidc.roles import GrantRules, person_of

ISSUER = "https://login.example.com"
VALUES = {Role.VIEWER: ("everyone",), Role.OPERATOR: ("ops",), Role.ADMIN: ("llm-admins", "root@example.com")}
RULES = GrantRules("login", "name", "groups", "groups", None, VALUES)
TEAMS = frozenset({"lab", "ops"})


def person(rules: GrantRules = RULES, **claims: Any) -> Any:
    return person_of({"iss": ISSUER, "sub": "alice", **claims}, rules, TEAMS)


@pytest.mark.parametrize(
    ("groups", "role", "teams"),
    [
        (["everyone"], Role.VIEWER, ()),
        (["everyone", "llm-admins", "ops"], Role.ADMIN, ("ops",)),
        (["ops", "lab", "lab", "unknown"], Role.OPERATOR, ("lab", "ops")),
        ("lab", None, ("lab",)),
    ],
)
def test_values_grant_the_highest_role_and_the_known_teams(groups: Any, role: Role | None, teams: tuple[str, ...]) -> None:
    found = person(groups=groups)
    assert (found.role, found.teams, found.owned_teams) == (role, teams, ())


@pytest.mark.parametrize(
    "groups",
    [None, [], "llm-admins lab", ["LLM-Admins"], ["llm-admins "], [["llm-admins"]], {"llm-admins": True}, 1, True, [None, 5], "", ["*"]],
)
def test_a_person_without_a_role_and_a_team_is_refused(groups: Any) -> None:
    with pytest.raises(SignInError, match="no access here") as refused:
        person(groups=groups)
    assert refused.value.status == 403 and "login:alice" in refused.value.detail


def test_an_issuer_grants_only_what_its_entry_names() -> None:
    claims = {"groups": ["llm-admins", "lab"]}
    assert person(replace(RULES, roles=None), **claims).role is None
    assert person(replace(RULES, teams=None), **claims).teams == ()
    with pytest.raises(SignInError):
        person(replace(RULES, roles=None, teams=None), **claims)


def test_owners_are_members_too() -> None:
    found = person(replace(RULES, teams=None, owned_teams="owns"), owns=["lab", "unknown"])
    assert (found.teams, found.owned_teams, found.actor.teams) == (("lab",), ("lab",), frozenset({"lab"}))


def test_a_path_leads_into_a_claim_and_a_name_with_dots_comes_first() -> None:
    rules = replace(RULES, roles="realm_access.roles")
    assert person(rules, realm_access={"roles": ["ops"]}).role is Role.OPERATOR
    assert person(rules, **{"realm_access.roles": ["everyone"]}, realm_access={"roles": ["ops"]}).role is Role.VIEWER


@pytest.mark.parametrize(("verified", "role"), [(True, Role.ADMIN), (False, None), (None, None), ("true", None), (1, None)])
def test_only_a_verified_address_grants_a_role(verified: Any, role: Role | None) -> None:
    rules = replace(RULES, roles="email")
    assert person(rules, email="root@example.com", email_verified=verified, groups=["lab"]).role is role


def test_groups_that_are_not_in_the_token_are_named_in_the_log() -> None:
    with pytest.raises(SignInError, match="too many groups") as refused:
        person(_claim_names={"groups": "src1"}, _claim_sources={"src1": {"endpoint": "https://evil.example.com"}})
    assert "app roles" in refused.value.detail


@pytest.mark.parametrize("count", [1000, 1001])
def test_the_number_of_groups_is_bounded(count: int) -> None:
    groups = ["lab", *(f"g{number}" for number in range(count - 1))]
    if count <= 1000:
        assert person(groups=groups).teams == ("lab",)
    else:
        with pytest.raises(SignInError, match="too many groups"):
            person(groups=groups)


@pytest.mark.parametrize("subject", [None, "", 5, "two words", "a\nb", "a\0", "x" * 256, "\ud800", ["alice"]])
def test_a_subject_that_is_no_name_is_refused(subject: Any) -> None:
    with pytest.raises(SignInError, match="no usable subject"):
        person_of({"iss": ISSUER, "sub": subject, "groups": ["lab"]}, RULES, TEAMS)


@given(st.text(max_size=300))
def test_a_name_is_printable_and_bounded(name: str) -> None:
    shown = person(groups=["lab"], name=name).name
    assert shown and shown.isprintable() and len(shown) <= 100


def test_the_display_name_is_not_the_identity() -> None:
    found = person(groups=["lab"], name="token root", preferred_username="root")
    assert (found.name, found.actor.name) == ("token root", "login:alice")
