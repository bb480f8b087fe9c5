"""The route that creates sign-in links. The rule: a link grants no more than a role and teams that exist here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from gateway.access.actor import Requester, Role
from gateway.admin.audited import Handler, configured, error_response, json_response
from gateway.sign_in.errors import SignInError

if TYPE_CHECKING:
    from gateway.sign_in.service import SignIn

PATH = "/admin/v1/sign-in-links"
QUERIES = ("user", "role", "team", "owned_team")


def handler(sign_in: SignIn | None) -> Handler:
    """Return the handler. ``sign_in``: None if it is not configured."""

    async def create(request: Request) -> Response:
        known = configured(sign_in, "sign_in is not configured")
        query = request.query_params
        if unknown := set(query) - set(QUERIES):
            return error_response(f"there is no parameter {min(unknown)}", 400)
        requester: Requester = request.state.requester
        try:
            role = Role(query["role"]) if "role" in query else None
            teams, owned = query.getlist("team"), query.getlist("owned_team")
            urls = await known.create_link(requester.actor, requester.origin, query.get("user", ""), role, teams, owned)
        except ValueError:
            return error_response(f"role is not one of {', '.join(Role)}", 400)
        except SignInError as error:
            return error_response(str(error), 400)
        return json_response({"urls": urls, "expires_in": known.link_seconds}, 201)

    return create
