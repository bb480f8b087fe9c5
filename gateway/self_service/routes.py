"""The routes of self-service on the data port, as an ASGI application for control.

The rules: every request must name this host and have the session of a person, and a request that changes something must come from a page of
this origin. A change is refused while the audit log cannot be written, and its entry is durable before the response. A key is in one
response only, that of the request that has created it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.access.actor import PersonId
from gateway.api.errors import Refusal, render
from gateway.audit.entry import Audit, AuditUnavailableError, Entry
from gateway.audit.recorded_change import recorded_change
from gateway.config import Team
from gateway.config.quantities import parse_duration
from gateway.key_management.key_list import LastUse, instant_of
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.self_service import openapi
from gateway.self_service.access import Action, check_owner, grant_of, no_key, refusal_of
from gateway.self_service.paths import KEY_OPERATIONS, KEYS, LIMITS, ME, OPENAPI, TEAMS, USAGE
from gateway.sign_in.browser import Headers, is_for, is_from_this_origin
from gateway.sign_in.people import KnownPerson, person_at
from gateway.sign_in.service import SignIn
from gateway.sign_in.sessions import Person
from gateway.store.cursor import cursor_to, page_length, position_of
from gateway.store.documents import Described, key_change, key_deletion, key_document
from gateway.store.entries import Repeatable, StoredKey, document, stored_key
from gateway.store.errors import RefusedChangeError
from gateway.store.service import KeyChange, KeyService, Store
from gateway.usage.errors import QueryError
from gateway.usage.key_report import parse_person_query, parse_team_query
from gateway.usage.queries import UsageQuery

Handler = Callable[[Request, Person], Awaitable[Response]]
_NOT_STORED = {"cache-control": "no-store"}
_UNAVAILABLE = "Self-service is not available at the moment."
_NO_LEDGER = "The usage of keys is not recorded here: no ledger is configured."
_OPERATORS = ("tokens", "labels", "priority", "class", "user_header", "hashes", "made_by")
"""Fields of a key that are for operators, or that self-service shows elsewhere."""
_OVERLAP = "7d"
T = TypeVar("T")
_READING = frozenset({"GET", "HEAD"})


class Gateway(Protocol):
    """The running gateway, as far as self-service reads it."""

    def team(self, identity: str) -> Team | None:
        """Return a team of the configuration or of the store, or None."""

    def wait(self, person: str) -> float:
        """Count a request of a person and return 0; or return the seconds after which a request is allowed."""

    async def usage(self, query: UsageQuery) -> Mapping[str, Any] | None:
        """Return the report of a query; None without a ledger. Raises DatabaseUnavailableError."""

    async def limits(self, key: str) -> Sequence[Mapping[str, Any]]:
        """Return the limits that a key is subject to; none for a key that is not served."""

    async def team_limits(self, team: str) -> Sequence[Mapping[str, Any]]:
        """Return the limits that the keys of a team share."""

    async def last_use(self, keys: Sequence[str]) -> LastUse:
        """Return when keys were last used, or why that is unknown."""


def application(gateway: Gateway, store: Store, sign_in: SignIn, audit: Audit) -> Starlette:
    """Return the routes as an ASGI application. People must sign in on the data port."""
    routes = _Routes(gateway, store, sign_in, audit)
    handlers = routes.handlers()
    made = [Route(each.path, routes.checked(handlers[each.method, each.path]), methods=[each.method]) for each in openapi.ROUTES]
    errors = {
        Refusal: _on_refusal,
        RefusedChangeError: _on_refused_change,
        QueryError: _on_invalid_query,
        HTTPException: _on_http_error,
        DatabaseUnavailableError: _on_unavailable,
        AuditUnavailableError: _on_unavailable,
    }
    return Starlette(routes=made, exception_handlers=errors)  # type: ignore[arg-type]


class _Routes:
    """The handlers."""

    def __init__(self, gateway: Gateway, store: Store, sign_in: SignIn, audit: Audit) -> None:
        self._gateway = gateway
        self._store = store
        self._sign_in = sign_in
        self._audit = audit

    def handlers(self) -> Mapping[tuple[str, str], Handler]:
        """Return the handlers by method and path."""
        key, team = f"{KEYS}/{{id:path}}", f"{TEAMS}/{{team:path}}"
        return {
            ("GET", ME): self.me,
            ("GET", KEYS): self.keys,
            ("POST", KEYS): self.create,
            ("POST", f"{key}/{{operation}}"): self.operate,
            ("GET", key): self.show,
            ("PATCH", key): self.change,
            ("DELETE", key): self.delete,
            ("GET", USAGE): self.usage,
            ("GET", LIMITS): self.limits,
            ("GET", f"{team}/keys"): self.team_keys,
            ("GET", f"{team}/members"): self.people_of_team,
            ("GET", f"{team}/usage"): self.team_usage,
            ("GET", f"{team}/limits"): self.team_limits,
            ("GET", OPENAPI): self.openapi,
        }

    def checked(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that serves only people who are signed in, and their changes only from a page of this origin."""

        async def handle(request: Request) -> Response:
            headers: Headers = request.scope["headers"]
            origin = self._sign_in.origin("data")
            if origin is None or not is_for(headers, origin):
                raise Refusal("permission_denied", "Use the configured address of this gateway.")
            sessions, now = self._sign_in.sessions("data"), time.time()
            if (session := sessions.read(headers, now)) is None:
                raise Refusal("missing_api_key", "No person is signed in. Sign in at /sign-in.")
            if request.method == "HEAD":  # Starlette adds it to GET
                raise Refusal("method_not_allowed", "This route takes GET only.", headers={"allow": "GET"})
            response = await self._served(request, session.person, handler, is_own_page=is_from_this_origin(headers, origin))
            response.headers.update(_NOT_STORED | sessions.renewal(session, now))
            return response

        return handle

    async def _served(self, request: Request, person: Person, handler: Handler, *, is_own_page: bool) -> Response:
        """Serve a request of a person. Refused changes are recorded."""
        if wait := self._gateway.wait(person.actor.name):
            raise Refusal("rate_limit_exceeded", "You send too many requests.", headers={"retry-after": str(int(wait) + 1)})
        if request.method in _READING:
            return await handler(request, person)
        try:
            if not is_own_page:
                raise Refusal("permission_denied", "This request came from another page.")
            await asyncio.to_thread(self._audit.check)
            return await handler(request, person)
        except (Refusal, RefusedChangeError) as error:
            target = f"{request.method} {request.scope['path']}"[:256]
            entry = Entry("request.refused", person.actor, _client(request), target, None, {"reason": str(error)})
            await asyncio.to_thread(self._audit.record_refused, entry)
            raise

    # The person

    async def me(self, _: Request, person: Person) -> Response:
        """Return the person, and their teams as far as they exist."""
        teams = []
        for identity in person.teams:
            if (team := self._gateway.team(identity)) is not None:
                shown = document(team)
                policy = shown.get("self_service")
                teams.append(
                    {"id": identity, "owned": identity in person.owned_teams, "limits": shown.get("limits", {}), "self_service": policy}
                )
        named = {**person.identity._asdict(), "name": person.name, "role": person.role}
        return _json({**named, "teams": teams})

    # Keys

    async def keys(self, request: Request, person: Person) -> Response:
        """List the keys that the person has created."""
        return await self._page_of_keys(request, made_by=person.identity)

    async def create(self, request: Request, person: Person) -> Response:
        """Create a key within the policy of a team."""
        fields, repeatable = await _sent(request, person)
        grant = grant_of(person, "change")
        done = await self._change(
            request, person, "create", lambda service: service.create_own_key(person.identity, grant, fields, repeatable), key_change
        )
        return _with_secret(done, 201)

    async def show(self, request: Request, person: Person) -> Response:
        """Return a key."""
        identity = _identity(request)
        row = await self._store.read(lambda database: database.find("key", identity))
        if row is None or not grant_of(person, "show").includes(stored := stored_key(row)):
            raise no_key()
        return _json(_shown(stored, (await self._gateway.last_use([identity])).times.get(identity)))

    async def change(self, request: Request, person: Person) -> Response:
        """Name a key."""
        identity, (patch, _) = _identity(request), await _sent(request, person)
        if unknown := patch.keys() - {"name"}:
            raise Refusal("invalid_value", "Only the name of a key can be changed. Create another key.", param=min(unknown))
        grant = grant_of(person, "change")
        done = await self._change(request, person, "change", lambda service: service.change_key(identity, patch, None, grant), key_change)
        return _json(_shown(done.after, None))

    async def operate(self, request: Request, person: Person) -> Response:
        """Rotate or revoke a key."""
        identity, operation = _identity(request), request.path_params["operation"]
        if operation not in KEY_OPERATIONS:
            raise no_key()
        fields, repeatable = await _sent(request, person)
        action: Action = "rotate" if operation == "rotate" else "revoke"
        if unknown := fields.keys() - ({"overlap"} if action == "rotate" else set()):
            raise Refusal("invalid_value", f"There is no field {min(unknown)}.", param=min(unknown))
        grant = grant_of(person, action)
        work: Callable[[KeyService], KeyChange]
        if action == "revoke":
            work = partial(KeyService.revoke_key, identity=identity, version=None, revoked=True, grant=grant)
        else:
            overlap = _overlap(fields)
            work = partial(KeyService.rotate_key, identity=identity, overlap=overlap, version=None, repeatable=repeatable, grant=grant)
        done = await self._change(request, person, action, work, key_change)
        return _with_secret(done, 200) if action == "rotate" else _json(_shown(done.after, None))

    async def delete(self, request: Request, person: Person) -> Response:
        """Delete a key."""
        identity, grant = _identity(request), grant_of(person, "delete")
        await self._change(request, person, "delete", lambda service: service.delete_key(identity, None, grant), key_deletion)
        return Response(status_code=204)

    async def _page_of_keys(self, request: Request, *, teams: Sequence[str] | None = None, made_by: PersonId | None = None) -> Response:
        limit, after = _page(request)
        rows = await self._store.read(lambda database: database.page("key", after, limit + 1, teams, made_by))
        use = await self._gateway.last_use([row.id for row in rows[:limit]])
        shown = [_shown(stored_key(row), use.times.get(row.id), with_maker=made_by is None) for row in rows[:limit]]
        cursor = cursor_to(rows[limit - 1].id) if len(rows) > limit else None
        return _json({"keys": shown, "next_cursor": cursor, "last_use_unknown": use.unknown})

    # Usage and limits

    async def usage(self, request: Request, person: Person) -> Response:
        """Report the usage of the person's keys."""
        keys = [each.key.id for each in await self._made_by(person)]
        parameters = dict(request.query_params)
        if "key" in parameters and parameters["key"] not in keys:
            raise no_key()
        return await self._report(parse_person_query(parameters, keys, datetime.now(UTC)))

    async def limits(self, request: Request, person: Person) -> Response:
        """Return the limits of the person's keys."""
        named = request.query_params.get("key")
        keys = [each.key.id for each in await self._made_by(person) if named in (None, each.key.id)]
        if named is not None and not keys:
            raise no_key()
        return _json({"keys": [{"key": key, "limits": await self._gateway.limits(key)} for key in keys]})

    async def _made_by(self, person: Person) -> list[StoredKey]:
        return [stored_key(row) for row in await self._store.read(lambda database: database.made_by(person.identity))]

    async def _report(self, query: UsageQuery) -> Response:
        if (found := await self._gateway.usage(query)) is None:
            raise Refusal("not_found", _NO_LEDGER)
        return _json(found)

    # Teams that the person owns

    async def team_keys(self, request: Request, person: Person) -> Response:
        """List the keys of a team."""
        return await self._page_of_keys(request, teams=[_owned_team(request, person)])

    async def people_of_team(self, request: Request, person: Person) -> Response:
        """List the people of a team."""
        team, (limit, after) = _owned_team(request, person), _page(request)
        try:
            found = await self._sign_in.people(person_at(after), limit + 1, team=team)
        except ValueError as error:
            raise Refusal("invalid_value", f"{error}.", param="cursor") from None
        cursor = cursor_to(found[limit - 1].position) if len(found) > limit else None
        return _json({"people": [_person_document(each, team) for each in found[:limit]], "next_cursor": cursor})

    async def team_usage(self, request: Request, person: Person) -> Response:
        """Report the usage of a team."""
        return await self._report(parse_team_query(dict(request.query_params), _owned_team(request, person), datetime.now(UTC)))

    async def team_limits(self, request: Request, person: Person) -> Response:
        """Return the limits of a team."""
        team = _owned_team(request, person)
        return _json({"team": team, "limits": await self._gateway.team_limits(team)})

    async def openapi(self, _: Request, __: Person) -> Response:
        """Return the description of the routes."""
        return JSONResponse(openapi.document())

    # Records

    async def _change(
        self, request: Request, person: Person, action: str, work: Callable[[KeyService], T], described: Callable[[T], Described | None]
    ) -> T:
        """Run a change of a person, with its entry in the audit log. Raises what ``recorded_change`` raises."""

        def entry(done: T) -> Entry | None:
            change = described(done)
            return None if change is None else Entry(f"key.{action}", person.actor, _client(request), *change)

        return await recorded_change(self._audit, lambda record: self._store.change(work, record), entry)


# Requests


def _client(request: Request) -> str:
    return "" if request.client is None else request.client.host


def _identity(request: Request) -> str:
    """Return the ID of the key in the path. Raises Refusal."""
    identity: str = request.path_params["id"]
    if "\0" in identity:  # PostgreSQL text cannot contain it
        raise no_key()
    return identity


def _owned_team(request: Request, person: Person) -> str:
    """Return the team in the path, which the person owns. Raises Refusal."""
    team: str = request.path_params["team"]
    check_owner(person, team)
    return team


def _page(request: Request) -> tuple[int, str]:
    """Return the length of a page, and the text after which it begins. Raises Refusal."""
    query = request.query_params
    try:
        return page_length(query.get("limit")), position_of(query.get("cursor", ""))
    except ValueError as error:
        raise Refusal("invalid_value", f"{error}.") from None


async def _sent(request: Request, person: Person) -> tuple[dict[str, Any], Repeatable | None]:
    """Return the JSON object of a request, and what makes it repeatable. An empty body is an empty object. Raises Refusal."""
    body = await request.body()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and kind != "application/json":
        raise Refusal("unsupported_media_type", "Send application/json.")
    try:
        found = orjson.loads(body) if body else {}
    except ValueError:
        raise Refusal("invalid_json", "The body is not valid JSON.") from None
    if not isinstance(found, dict):
        raise Refusal("invalid_json", "The body is not a JSON object.")
    try:
        repeatable = Repeatable.of(request.headers.get("idempotency-key"), request.method, request.scope["path"], body, person.identity)
    except ValueError as error:
        raise Refusal("invalid_value", f"{error}.") from None
    return found, repeatable


def _overlap(fields: Mapping[str, Any]) -> float:
    try:
        return parse_duration(fields.get("overlap", _OVERLAP))
    except ValueError as error:
        raise Refusal("invalid_value", f"overlap: {error}.", param="overlap") from None


# Responses


def _shown(stored: StoredKey, last: datetime | None, *, with_maker: bool = False) -> dict[str, Any]:
    """Return a key for people. ``last`` is when it was last used."""
    known = key_document(stored, last, datetime.now(UTC))
    shown = {name: value for name, value in known.items() if name not in _OPERATORS}
    return shown | ({"made_by": known["made_by"]} if with_maker else {})


def _with_secret(done: KeyChange, status: int) -> Response:
    replayed = {"idempotency-replayed": "true"} if done.is_repeated else {}
    return _json(_shown(done.after, None) | {"secret": done.secret}, status, replayed)


def _person_document(person: KnownPerson, team: str) -> dict[str, Any]:
    owned = team in person.owned_teams
    return {**person.identity._asdict(), "name": person.name, "owned": owned, "last_sign_in": instant_of(person.last_sign_in)}


def _json(content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, dict(headers or {}), "application/json")


# Errors. These are coroutines because Starlette runs a plain function in a thread.


async def _on_refusal(_: Request, refusal: Refusal) -> Response:
    return Response(render(refusal), refusal.spec.status, refusal.headers | _NOT_STORED, media_type="application/json")


async def _on_refused_change(request: Request, error: RefusedChangeError) -> Response:
    return await _on_refusal(request, refusal_of(error))


async def _on_invalid_query(request: Request, error: QueryError) -> Response:
    return await _on_refusal(request, Refusal("invalid_value", f"The query is invalid: {error}."))


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    """Translate Starlette's own errors: 405 for a method that no route has, 404 for a path that no route has."""
    if error.status_code == 405:
        return await _on_refusal(request, Refusal("method_not_allowed", "The method is not allowed here."))
    return await _on_refusal(request, Refusal("not_found", "There is no such route."))


async def _on_unavailable(request: Request, _: Exception) -> Response:
    return await _on_refusal(request, Refusal("overloaded", _UNAVAILABLE))
