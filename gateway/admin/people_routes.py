"""The routes of the people who have signed in: list them, and end their sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.access.actor import Requester
from gateway.admin.audited import Handler, configured, error_response, json_response, log_operation
from gateway.key_management.key_list import instant_of
from gateway.store.cursor import cursor_to, page_length, position_of

if TYPE_CHECKING:
    from gateway.sign_in.people import KnownPerson
    from gateway.sign_in.service import SignIn

PEOPLE = "/admin/v1/people"
SESSIONS = f"{PEOPLE}/{{id}}/sessions"
QUERIES = ("cursor", "limit", "subject")
_NO_SIGN_IN = "sign_in is not configured"


def handlers(sign_in: SignIn | None) -> dict[str, Mapping[str, Handler]]:
    """Return the handlers by path and method. ``sign_in``: None if it is not configured."""

    async def people(request: Request) -> Response:
        known = configured(sign_in, _NO_SIGN_IN)
        from gateway.sign_in.people import person_at  # it loads SQLAlchemy, which a gateway with a sign-in has loaded

        query = request.query_params
        try:
            limit, after = page_length(query.get("limit")), person_at(position_of(query.get("cursor", "")))
        except ValueError as error:
            return error_response(str(error), 400)
        if "\0" in query.get("subject", ""):  # PostgreSQL text cannot contain it
            return error_response("no subject has a NUL", 400)
        found = await known.people(after, limit + 1, subject=query.get("subject"))
        shown = [person_document(each) for each in found[:limit]]
        return json_response({"people": shown, "next_cursor": cursor_to(found[limit - 1].position) if len(found) > limit else None})

    async def end_sessions(request: Request) -> Response:
        known, identity = configured(sign_in, _NO_SIGN_IN), request.path_params["id"]
        requester: Requester = request.state.requester
        log_operation(f"end of the sessions of {identity}", request)
        ended = await known.end_sessions(identity, requester.actor, requester.origin)
        return error_response(f"there is no person {identity}", 404) if ended is None else JSONResponse({"ended": ended})

    return {PEOPLE: {"GET": people}, SESSIONS: {"DELETE": end_sessions}}


def person_document(person: KnownPerson) -> dict[str, Any]:
    """Return a person as JSON."""
    return {
        "id": person.id,
        **person.identity._asdict(),
        "name": person.name,
        "role": person.role,
        "teams": person.teams,
        "owned_teams": person.owned_teams,
        "sessions": person.sessions,
        "created": instant_of(person.created),
        "last_sign_in": instant_of(person.last_sign_in),
    }
