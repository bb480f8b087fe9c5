"""The decisions about roles."""

from __future__ import annotations

import pytest

from gateway.access.actor import Actor, Role
from gateway.access.permissions import ADMINISTER, MANAGE_TEAM, OPEN, OPERATE, VIEW, VIEW_TEAM, Permission, is_permitted, may_manage

NOTHING = Actor("person", "eve", None)
OWNER = Actor("person", "olga", None, frozenset({"research"}))
VIEWER = Actor("token", "prometheus", Role.VIEWER)
OPERATOR = Actor("token", "ci", Role.OPERATOR)
ADMIN = Actor("socket", "uid 1000", Role.ADMIN)
ALL = (None, NOTHING, OWNER, VIEWER, OPERATOR, ADMIN)

PERMITTED = {
    OPEN: ALL,
    VIEW: (VIEWER, OPERATOR, ADMIN),
    OPERATE: (OPERATOR, ADMIN),
    ADMINISTER: (ADMIN,),
    VIEW_TEAM: (OWNER, VIEWER, OPERATOR, ADMIN),
    MANAGE_TEAM: (OWNER, ADMIN),
}


@pytest.mark.parametrize("permission", PERMITTED)
def test_each_permission_admits_exactly_its_roles(permission: Permission) -> None:
    assert tuple(actor for actor in ALL if is_permitted(actor, permission)) == PERMITTED[permission]


def test_an_owner_manages_only_targets_of_the_own_teams() -> None:
    assert may_manage(OWNER, MANAGE_TEAM, "research")
    assert not may_manage(OWNER, MANAGE_TEAM, "sales")
    assert not may_manage(OWNER, MANAGE_TEAM, None)
    assert not may_manage(OWNER, ADMINISTER, "research")


def test_a_role_on_the_gateway_covers_every_team_and_targets_without_one() -> None:
    assert may_manage(ADMIN, MANAGE_TEAM, "sales")
    assert may_manage(ADMIN, MANAGE_TEAM, None)
    assert not may_manage(OPERATOR, MANAGE_TEAM, "research")


def test_an_actor_reads_as_its_kind_and_name() -> None:
    assert str(VIEWER) == "token prometheus"
    assert str(Actor("loopback", "", Role.VIEWER)) == "loopback"
