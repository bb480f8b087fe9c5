"""The routes of keys and teams that are made at run time, below ``/admin/v1``.

The rules: a change of an existing entry names the version that it changes (``If-Match``), so that two people do not overwrite each other's
changes. A request that was sent again with the same ``Idempotency-Key`` changes nothing. A key is in one response only: the response to the
request that created it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.access.actor import Actor
from gateway.access.permissions import MANAGE_TEAM, VIEW_TEAM, Permission, may_manage
from gateway.admin.audited import AuditedHandlers, Handler, RefusedRequest, configured, error_response, json_response, log_operation
from gateway.admin.raise_routes import RaiseStorage
from gateway.audit.entry import AuditUnavailableError
from gateway.config.quantities import parse_duration
from gateway.key_management.key_list import LastUse
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.store.cursor import cursor_to, page_length, position_of
from gateway.store.documents import (
    Described,
    imported_keys,
    key_change,
    key_deletion,
    key_document,
    team_change,
    team_deletion,
    team_document,
)
from gateway.store.entries import Kind, Repeatable, StoredKey, stored_key, stored_team
from gateway.store.errors import Reason, RefusedChangeError
from gateway.store.self_service import Grant
from gateway.store.service import CHANGE_TIMEOUT, KeyService, Store

KEYS, TEAMS = "/admin/v1/keys", "/admin/v1/teams"
OPERATIONS = ("rotate", "revoke", "restore")
"""The operations on a key."""
_MAX_BODY, _MAX_IMPORT = 1024 * 1024, 64 * 1024 * 1024  # bytes
_MAX_SEARCH = 200  # characters
_OVERLAP = "7d"
_IMPORT_TIMEOUT = 120.0
_ETAG = re.compile(r'"(\d{1,18})"')
_NO_STORE = "no store is configured; add `store: ledger`, or `store: sqlite:///keys.db`, to the configuration"
T = TypeVar("T")


class Usage(Protocol):
    """The ledger of a running gateway."""

    async def last_use(self, keys: Sequence[str]) -> LastUse:
        """Return when keys were last used, or why that is unknown."""

    def keys_of_teams(self, teams: Iterable[str]) -> Mapping[str, int]:
        """Return the number of keys of each team, in the configuration and in the store."""


def handlers(store: Store | None, usage: Usage, audit: AuditedHandlers, raises: RaiseStorage) -> dict[str, Mapping[str, Handler]]:
    """Return the handlers by path and method. ``store`` is None if none is configured."""
    keys, teams = _Keys(store, usage, audit, raises), _Teams(store, usage, audit, raises)
    return {
        KEYS: {"GET": _guarded(keys.list), "POST": _guarded(keys.create)},
        f"{KEYS}/import": {"POST": _guarded(keys.take_over)},
        f"{KEYS}/{{id:path}}/{{key_operation}}": {"POST": _guarded(keys.operate)},
        f"{KEYS}/{{id:path}}": {"GET": _guarded(keys.show), "PATCH": _guarded(keys.change), "DELETE": _guarded(keys.delete)},
        TEAMS: {"GET": _guarded(teams.list), "POST": _guarded(teams.create)},
        f"{TEAMS}/{{id:path}}": {"GET": _guarded(teams.show), "PATCH": _guarded(teams.change), "DELETE": _guarded(teams.delete)},
    }


def _guarded(handler: Handler) -> Handler:
    """Return the handler with responses for its errors."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except RefusedChangeError as refused:
            return error_response(str(refused), refused.reason.value)
        except AuditUnavailableError as error:
            return error_response(f"the audit log cannot be written, so nothing was changed: {error}", 503)
        except DatabaseUnavailableError as error:
            text = f"the store's database does not respond, so keys cannot be changed: {error}"
            return JSONResponse({"error": text}, 503, {"retry-after": "5"})

    return handle


class _Entries:
    """The common part of the routes of keys and of teams."""

    kind: Kind

    def __init__(self, store: Store | None, usage: Usage, audit: AuditedHandlers, raises: RaiseStorage) -> None:
        self._configured = store
        self._usage = usage
        self._audit = audit
        self._raises = raises

    @property
    def _store(self) -> Store:
        return configured(self._configured, _NO_STORE)

    async def _page(self, request: Request, team: str | None = None) -> tuple[list[Any], str | None]:
        """Return the rows of a page that the client may see, and the cursor of the next one."""
        (limit, after), grant = _limit_and_after(request), _grant(request, VIEW_TEAM)
        teams: tuple[str, ...] | None = None if team is None else (team,)
        if grant is not None:
            teams = tuple(each for each in grant.owned if team in (None, each))
        text, last = _search(request), None
        if text:
            rows, last = await self._store.read(lambda database: database.search(self.kind, text, after, limit + 1, teams))
        else:
            rows = await self._store.read(lambda database: database.page(self.kind, after, limit + 1, teams))
        if len(rows) > limit:
            last = rows[limit - 1].id
        return rows[:limit], None if last is None else cursor_to(last)

    async def _row(self, request: Request) -> Any:
        identity = request.path_params["id"]
        if (row := await self._store.read(lambda database: database.find(self.kind, identity))) is None:
            raise RefusedChangeError(Reason.NOT_FOUND, f"there is no {self.kind} {identity} in the store")
        return row

    def _raised(self, identity: str) -> dict[str, Any]:
        """Return the limits that are raised for a time, empty without any."""
        raises = self._raises.of((self.kind, identity))
        return {"raises": [each.document() for each in raises]} if raises else {}

    async def _change(
        self,
        request: Request,
        action: str,
        work: Callable[[KeyService], T],
        described: Callable[[T], Described | None],
        seconds: float = CHANGE_TIMEOUT,
    ) -> T:
        """Run a change, record it in the audit log, and log it. ``described`` returns None if nothing was changed."""
        store = self._store
        done: T = await self._audit.change(request, f"{self.kind}.{action}", lambda record: store.change(work, record, seconds), described)
        if (change := described(done)) is not None:
            log_operation(f"{action} of {self.kind} {change.target}", request)
        return done


class _Keys(_Entries):
    kind = "key"

    async def list(self, request: Request) -> Response:
        rows, cursor = await self._page(request, request.query_params.get("team"))
        use = await self._usage.last_use([row.id for row in rows])
        now = datetime.now(UTC)
        shown = [key_document(stored_key(row), use.times.get(row.id), now) for row in rows]
        return _json({"keys": shown, "next_cursor": cursor, "last_use_unknown": use.unknown})

    async def create(self, request: Request) -> Response:
        (fields, repeatable), grant, maker = await _sent(request), _grant(request, MANAGE_TEAM), _actor(request).person
        if grant is None:
            done = await self._change(request, "create", lambda service: service.create_key(fields, repeatable), key_change)
        else:
            assert maker is not None, "only people own teams"
            done = await self._change(
                request, "create", lambda service: service.create_own_key(maker, grant, fields, repeatable), key_change
            )
        return await self._with_secret(done.after, done.secret, 201, is_repeated=done.is_repeated)

    async def show(self, request: Request) -> Response:
        stored, grant = stored_key(await self._row(request)), _grant(request, VIEW_TEAM)
        if grant is not None:
            grant.check(stored)
        return await self._shown(stored)

    async def change(self, request: Request) -> Response:
        identity, version, (patch, _) = request.path_params["id"], _version(request), await _sent(request)
        grant = _grant(request, MANAGE_TEAM)
        done = await self._change(request, "change", lambda service: service.change_key(identity, patch, version, grant), key_change)
        return await self._shown(done.after)

    async def delete(self, request: Request) -> Response:
        identity, version, grant = request.path_params["id"], _version(request), _grant(request, MANAGE_TEAM)
        await self._change(request, "delete", lambda service: service.delete_key(identity, version, grant), key_deletion)
        return Response(status_code=204)

    async def operate(self, request: Request) -> Response:
        identity, operation = request.path_params["id"], request.path_params["key_operation"]
        if operation not in OPERATIONS:
            raise RefusedRequest(404, f"there is no operation {operation}; the operations are {', '.join(OPERATIONS)}")
        version = _version(request)
        if operation == "rotate":
            return await self._rotate(request, identity, version)
        revoked, grant = operation == "revoke", _grant(request, MANAGE_TEAM)
        done = await self._change(
            request, operation, lambda service: service.revoke_key(identity, version, revoked=revoked, grant=grant), key_change
        )
        return await self._shown(done.after)

    async def _rotate(self, request: Request, identity: str, version: int | None) -> Response:
        (fields, repeatable), grant = await _sent(request), _grant(request, MANAGE_TEAM)
        if unknown := fields.keys() - {"overlap"}:
            raise RefusedRequest(400, f"there is no field {min(unknown)}")
        try:
            overlap = parse_duration(fields.get("overlap", _OVERLAP))
        except ValueError as error:
            raise RefusedRequest(400, f"overlap: {error}") from None
        done = await self._change(
            request, "rotate", lambda service: service.rotate_key(identity, overlap, version, repeatable, grant), key_change
        )
        return await self._with_secret(done.after, done.secret, 200, is_repeated=done.is_repeated)

    async def take_over(self, request: Request) -> Response:
        try:
            text = (await _body(request, _MAX_IMPORT)).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise RefusedRequest(400, "the body is not UTF-8 text") from None
        done = await self._change(request, "import", lambda service: service.import_keys(text), imported_keys, _IMPORT_TIMEOUT)
        return _json({"added": [each.key.id for each in done.added], "known": done.known, "messages": list(done.messages)})

    async def _shown(self, stored: StoredKey) -> Response:
        shown = key_document(stored, (await self._usage.last_use([stored.key.id])).times.get(stored.key.id), datetime.now(UTC))
        return _json(shown | self._raised(stored.key.id), version=stored.version)

    async def _with_secret(self, stored: StoredKey, secret: str | None, status: int, *, is_repeated: bool) -> Response:
        shown = key_document(stored, None, datetime.now(UTC)) | {"secret": secret}
        return _json(shown, status, version=stored.version, headers={"idempotency-replayed": "true"} if is_repeated else {})


class _Teams(_Entries):
    kind = "team"

    async def list(self, request: Request) -> Response:
        rows, cursor = await self._page(request)
        counts = self._usage.keys_of_teams([row.id for row in rows])
        return _json({"teams": [{**team_document(stored_team(row)), "keys": counts[row.id]} for row in rows], "next_cursor": cursor})

    async def create(self, request: Request) -> Response:
        fields, repeatable = await _sent(request)
        done = await self._change(request, "create", lambda service: service.create_team(fields, repeatable), team_change)
        return _json(team_document(done.after), 201, version=done.after.version)

    async def show(self, request: Request) -> Response:
        if not may_manage(_actor(request), VIEW_TEAM, request.path_params["id"]):
            raise RefusedChangeError(Reason.NOT_FOUND, f"there is no team {request.path_params['id']} in the store")
        stored = stored_team(await self._row(request))
        return _json(team_document(stored) | self._raised(stored.team.id), version=stored.version)

    async def change(self, request: Request) -> Response:
        identity, version, (patch, _) = request.path_params["id"], _version(request), await _sent(request)
        done = await self._change(request, "change", lambda service: service.change_team(identity, patch, version), team_change)
        return _json(team_document(done.after), version=done.after.version)

    async def delete(self, request: Request) -> Response:
        identity, version = request.path_params["id"], _version(request)
        await self._change(request, "delete", lambda service: service.delete_team(identity, version), team_deletion)
        return Response(status_code=204)


# Requests


def _actor(request: Request) -> Actor:
    actor: Actor = request.state.requester.actor
    return actor


def _grant(request: Request, permission: Permission) -> Grant | None:
    """Return the keys that the owner of a team may use; None for a client whose role permits all keys."""
    actor = _actor(request)
    return None if may_manage(actor, permission, None) else Grant(None, actor.teams, actor.teams)


def _limit_and_after(request: Request) -> tuple[int, str]:
    """Return the length of a page, and the ID after which it begins."""
    try:
        return page_length(request.query_params.get("limit")), position_of(request.query_params.get("cursor", ""))
    except ValueError as error:
        raise RefusedRequest(400, str(error)) from None


def _search(request: Request) -> str:
    text = request.query_params.get("search", "")
    if len(text) > _MAX_SEARCH or "\0" in text:  # PostgreSQL text cannot contain it
        raise RefusedRequest(400, f"search: expected up to {_MAX_SEARCH} characters without NUL")
    return text


def _version(request: Request) -> int | None:
    """Return the version that a change expects; None for any version (``*``)."""
    if (tag := request.headers.get("if-match")) is None:
        raise RefusedRequest(428, "a change requires If-Match with the ETag of the entry, or * for any version")
    found = _ETAG.fullmatch(tag.strip())
    return None if tag.strip() == "*" else -1 if found is None else int(found[1])


async def _sent(request: Request) -> tuple[dict[str, Any], Repeatable | None]:
    """Return the JSON object of a request, and what makes it repeatable. An empty body is an empty object."""
    body, key = await _body(request, _MAX_BODY), request.headers.get("idempotency-key")
    try:
        repeatable = Repeatable.of(key, request.method, request.scope["path"], body, _actor(request).person)
    except ValueError as error:
        raise RefusedRequest(400, str(error)) from None
    try:
        found = msgspec.json.decode(body) if body else {}
    except (ValueError, RecursionError):  # also for half a character, which no response could repeat
        raise RefusedRequest(400, "the body is not valid JSON") from None
    if not isinstance(found, dict):
        raise RefusedRequest(400, "expected a JSON object")
    return found, repeatable


async def _body(request: Request, limit: int) -> bytes:
    """Return the body. Raises RefusedRequest if it is too large."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise RefusedRequest(413, f"the body is larger than {limit} bytes")
        parts.append(part)
    return b"".join(parts)


# Responses


def _json(content: Mapping[str, Any], status: int = 200, *, version: int | None = None, headers: Mapping[str, str] = {}) -> Response:
    return json_response(content, status, headers if version is None else {"etag": f'"{version}"', **headers})
