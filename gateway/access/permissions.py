"""The permission that each route of the admin port requires, and the decision. Pure.

``PERMISSIONS`` is the only table of them. A route that is missing there cannot be described, so it cannot be served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.access.actor import RANKS, Actor, Role


@dataclass(frozen=True, slots=True)
class Permission:
    """The right that a route requires: at least ``role``, or with ``owner`` the ownership of a team.

    ``role`` is None for a route that everyone may use. A route with ``owner`` must also call ``may_manage`` with the team of its target.
    """

    role: Role | None
    owner: bool = False


OPEN = Permission(None)
VIEW = Permission(Role.VIEWER)
OPERATE = Permission(Role.OPERATOR)
ADMINISTER = Permission(Role.ADMIN)
VIEW_TEAM = Permission(Role.VIEWER, owner=True)
MANAGE_TEAM = Permission(Role.ADMIN, owner=True)

PERMISSIONS: Mapping[tuple[str, str], Permission] = {
    ("GET", "/"): OPEN,
    ("GET", "/console"): OPEN,
    ("GET", "/console/{page}"): OPEN,
    ("GET", "/console/docs/{document:path}"): OPEN,
    ("GET", "/admin/v1/me"): VIEW_TEAM,
    ("GET", "/admin/v1/overview"): VIEW,
    ("GET", "/admin/v1/overview/events"): VIEW,
    ("GET", "/admin/v1/overview/changes"): ADMINISTER,
    ("GET", "/admin/v1/configuration"): VIEW,
    ("GET", "/metrics"): VIEW,
    ("GET", "/metrics/targets"): VIEW,
    ("GET", "/metrics/servers/{server:path}"): VIEW,
    ("GET", "/livez"): OPEN,
    ("GET", "/readyz"): OPEN,
    ("GET", "/status"): VIEW,
    ("GET", "/usage"): VIEW,
    ("GET", "/limits"): VIEW,
    ("GET", "/keys"): VIEW,
    ("GET", "/teams"): VIEW,
    ("GET", "/queue"): VIEW,
    ("GET", "/openapi.json"): VIEW,
    ("GET", "/docs"): VIEW,
    ("GET", "/admin/v1/keys"): VIEW_TEAM,
    ("GET", "/admin/v1/keys/{id:path}/raises"): VIEW,
    ("POST", "/admin/v1/keys/{id:path}/raises"): OPERATE,
    ("DELETE", "/admin/v1/keys/{id:path}/raises"): OPERATE,
    ("GET", "/admin/v1/teams/{id:path}/raises"): VIEW,
    ("POST", "/admin/v1/teams/{id:path}/raises"): OPERATE,
    ("DELETE", "/admin/v1/teams/{id:path}/raises"): OPERATE,
    ("POST", "/admin/v1/keys"): MANAGE_TEAM,
    ("POST", "/admin/v1/keys/import"): ADMINISTER,
    ("POST", "/admin/v1/keys/{id:path}/{key_operation}"): MANAGE_TEAM,
    ("GET", "/admin/v1/keys/{id:path}"): VIEW_TEAM,
    ("PATCH", "/admin/v1/keys/{id:path}"): MANAGE_TEAM,
    ("DELETE", "/admin/v1/keys/{id:path}"): MANAGE_TEAM,
    ("GET", "/admin/v1/teams"): VIEW_TEAM,
    ("POST", "/admin/v1/teams"): ADMINISTER,
    ("GET", "/admin/v1/teams/{id:path}"): VIEW_TEAM,
    ("PATCH", "/admin/v1/teams/{id:path}"): ADMINISTER,
    ("DELETE", "/admin/v1/teams/{id:path}"): ADMINISTER,
    ("GET", "/admin/v1/audit"): ADMINISTER,
    ("GET", "/admin/v1/audit/verification"): ADMINISTER,
    ("GET", "/admin/v1/people"): ADMINISTER,
    ("DELETE", "/admin/v1/people/{id}/sessions"): ADMINISTER,
    ("GET", "/admin/v1/models"): VIEW,
    ("GET", "/admin/v1/requests"): VIEW,
    ("GET", "/admin/v1/requests/{id}"): VIEW,
    ("GET", "/admin/v1/requests/{id}/record"): ADMINISTER,
    ("GET", "/admin/v1/months"): VIEW,
    ("GET", "/admin/v1/months/{month}"): VIEW,
    ("POST", "/admin/v1/months/{month}/close"): ADMINISTER,
    ("POST", "/admin/v1/sign-in-links"): ADMINISTER,
    ("GET", "/admin/v1/notices"): VIEW,
    ("POST", "/admin/v1/notices/test"): OPERATE,
    ("POST", "/reload"): OPERATE,
    ("POST", "/drain"): OPERATE,
    ("POST", "/models/{id:path}/{operation}"): OPERATE,
    ("POST", "/servers/{server:path}/{server_operation}"): OPERATE,
}
"""The permission of each route, by method and path as Starlette writes it."""


def has_role(actor: Actor, least: Role) -> bool:
    """Return whether the actor has at least this role on the whole gateway."""
    return actor.role is not None and RANKS[actor.role] >= RANKS[least]


def is_permitted(actor: Actor | None, permission: Permission) -> bool:
    """Return whether the actor may use a route. None: the client is not authenticated."""
    if permission.role is None:
        return True
    if actor is None:
        return False
    return has_role(actor, permission.role) or (permission.owner and bool(actor.teams))


def may_manage(actor: Actor, permission: Permission, team: str | None) -> bool:
    """Return whether the actor may use a route for a target of this team. None: the target has no team, so no owner may use it."""
    if permission.role is None or has_role(actor, permission.role):
        return True
    return permission.owner and team is not None and team in actor.teams
