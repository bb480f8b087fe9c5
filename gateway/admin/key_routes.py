"""The routes of keys and teams that are made at run time, below ``/admin/v1``.

The rules: a change of an existing entry names the version that it changes (``If-Match``), so that two people do not overwrite each other's
changes. A request that was sent again with the same ``Idempotency-Key`` changes nothing. A key is in one response only, that of the request
that has created it.
"""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.admin.audited import AuditedHandlers, Handler, error_response, log_operation
from gateway.audit.entry import AuditUnavailableError
from gateway.config.quantities import parse_duration
from gateway.key_management.key_list import LastUse, instant, shown_key
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.store.decisions import SETTABLE
from gateway.store.entries import Kind, Repeatable, StoredKey, StoredTeam, document, stored_key, stored_team
from gateway.store.errors import Reason, RefusedChangeError

if TYPE_CHECKING:
    from gateway.store.database import KeyDatabase
    from gateway.store.service import ImportedKeys, KeyChange, KeyService, TeamChange

KEYS, TEAMS = "/admin/v1/keys", "/admin/v1/teams"
OPERATIONS = ("rotate", "revoke", "restore")
"""The operations on a key."""
_MAX_BODY, _MAX_IMPORT = 1024 * 1024, 64 * 1024 * 1024  # bytes
_PAGE, _MAX_PAGE = 100, 1000  # entries
_OVERLAP = "7d"
CHANGE_TIMEOUT = 15.0
"""Seconds for a change."""
_IMPORT_TIMEOUT = 120.0
_ETAG = re.compile(r'"(\d{1,18})"')
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_NO_STORE = "no store is configured; add `store: ledger`, or `store: sqlite:///keys.db`, to the configuration"
T = TypeVar("T")
Entry = Mapping[str, Any]
Described = tuple[str, Entry | None, Entry | None]
"""A change for the audit log: the ID of the entry, and the entry's document before and after it."""


class Store(Protocol):
    """The store of a running gateway."""

    async def change(self, work: Callable[[KeyService], T], record: Callable[[T], None], seconds: float = CHANGE_TIMEOUT) -> T:
        """Run a change. ``record`` gets its result on a thread, before the commit.

        Raises RefusedChangeError, what ``record`` raises, and DatabaseUnavailableError also after ``seconds``.
        """

    async def read(self, work: Callable[[KeyDatabase], T]) -> T:
        """Run a query. Raises DatabaseUnavailableError."""


class Usage(Protocol):
    """The ledger of a running gateway."""

    async def last_use(self, keys: Sequence[str]) -> LastUse:
        """Return when keys were last used, or why that is unknown."""


def handlers(store: Store | None, usage: Usage, audit: AuditedHandlers) -> dict[str, Mapping[str, Handler]]:
    """Return the handlers by path and method. ``store`` is None if none is configured."""
    keys, teams = _Keys(store, usage, audit), _Teams(store, audit)
    return {
        KEYS: {"GET": _guarded(keys.list), "POST": _guarded(keys.create)},
        f"{KEYS}/import": {"POST": _guarded(keys.take_over)},
        f"{KEYS}/{{id:path}}/{{key_operation}}": {"POST": _guarded(keys.operate)},
        f"{KEYS}/{{id:path}}": {"GET": _guarded(keys.show), "PATCH": _guarded(keys.change), "DELETE": _guarded(keys.delete)},
        TEAMS: {"GET": _guarded(teams.list), "POST": _guarded(teams.create)},
        f"{TEAMS}/{{id:path}}": {"GET": _guarded(teams.show), "PATCH": _guarded(teams.change), "DELETE": _guarded(teams.delete)},
    }


class _RefusedRequest(Exception):
    """The request is refused with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _guarded(handler: Handler) -> Handler:
    """Return the handler with responses for its errors."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except _RefusedRequest as refused:
            return error_response(str(refused), refused.status)
        except RefusedChangeError as refused:
            return error_response(str(refused), refused.reason.value)
        except DatabaseUnavailableError as error:
            text = f"the store's database does not respond, so keys cannot be changed: {error}"
            return JSONResponse({"error": text}, 503, {"retry-after": "5"})
        except AuditUnavailableError as error:
            return error_response(f"the audit log cannot be written, so nothing was changed: {error}", 503)

    return handle


class _Entries:
    """The common part of the routes of keys and of teams."""

    kind: Kind

    def __init__(self, store: Store | None, audit: AuditedHandlers) -> None:
        self._configured = store
        self._audit = audit

    @property
    def _store(self) -> Store:
        if self._configured is None:
            raise _RefusedRequest(404, _NO_STORE)
        return self._configured

    async def _page(self, request: Request, team: str | None = None) -> tuple[list[Any], str | None]:
        """Return the rows of a page, and the cursor of the next one."""
        limit, after = _limit(request), _after(request)
        rows = await self._store.read(lambda database: database.page(self.kind, after, limit + 1, team))
        more = len(rows) > limit
        return rows[:limit], urlsafe_b64encode(rows[limit - 1].id.encode()).decode().rstrip("=") if more else None

    async def _row(self, request: Request) -> Any:
        identity = request.path_params["id"]
        row = await self._store.read(lambda database: database.find(self.kind, identity))
        if row is None:
            raise RefusedChangeError(Reason.NOT_FOUND, f"there is no {self.kind} {identity} in the store")
        return row

    async def _change(
        self,
        request: Request,
        action: str,
        work: Callable[[KeyService], T],
        described: Callable[[T], Described | None],
        seconds: float = CHANGE_TIMEOUT,
    ) -> T:
        """Run a change, and log it. Its entry of the audit log is durable before the commit. None: nothing was changed."""
        name, recorded = f"{self.kind}.{action}", list[Described]()

        def record(done: T) -> None:
            if (change := described(done)) is not None:
                self._audit.record(request, name, *change)
                recorded.append(change)

        try:
            done = await self._store.change(work, record, seconds)
        except DatabaseUnavailableError as error:
            for identity, before, _ in recorded:
                await self._audit.note_unconfirmed(request, name, identity, before, error)
            raise
        for identity, _, _ in recorded:
            log_operation(f"{action} of {self.kind} {identity}", request)
        return done


class _Keys(_Entries):
    kind = "key"

    def __init__(self, store: Store | None, usage: Usage, audit: AuditedHandlers) -> None:
        super().__init__(store, audit)
        self._usage = usage

    async def list(self, request: Request) -> Response:
        rows, cursor = await self._page(request, request.query_params.get("team"))
        use = await self._usage.last_use([row.id for row in rows])
        now = datetime.now(UTC)
        shown = [_key(stored_key(row), use.times.get(row.id), now) for row in rows]
        return _json({"keys": shown, "next_cursor": cursor, "last_use_unknown": use.unknown})

    async def create(self, request: Request) -> Response:
        fields, repeatable = await _sent(request)
        done = await self._change(request, "create", lambda service: service.create_key(fields, repeatable), _key_change)
        return await self._with_secret(done.after, done.secret, 201, is_repeated=done.is_repeated)

    async def show(self, request: Request) -> Response:
        return await self._shown(stored_key(await self._row(request)))

    async def change(self, request: Request) -> Response:
        identity, version, (patch, _) = request.path_params["id"], _version(request), await _sent(request)
        done = await self._change(request, "change", lambda service: service.change_key(identity, patch, version), _key_change)
        return await self._shown(done.after)

    async def delete(self, request: Request) -> Response:
        identity, version = request.path_params["id"], _version(request)
        await self._change(request, "delete", lambda service: service.delete_key(identity, version), _key_deletion)
        return Response(status_code=204)

    async def operate(self, request: Request) -> Response:
        identity, operation = request.path_params["id"], request.path_params["key_operation"]
        if operation not in OPERATIONS:
            raise _RefusedRequest(404, f"there is no operation {operation}; the operations are {', '.join(OPERATIONS)}")
        version = _version(request)
        if operation == "rotate":
            return await self._rotate(request, identity, version)
        revoked = operation == "revoke"
        done = await self._change(request, operation, lambda service: service.revoke_key(identity, version, revoked=revoked), _key_change)
        return await self._shown(done.after)

    async def _rotate(self, request: Request, identity: str, version: int | None) -> Response:
        fields, repeatable = await _sent(request)
        if unknown := fields.keys() - {"overlap"}:
            raise _RefusedRequest(400, f"there is no field {min(unknown)}")
        try:
            overlap = parse_duration(fields.get("overlap", _OVERLAP))
        except ValueError as error:
            raise _RefusedRequest(400, f"overlap: {error}") from None
        done = await self._change(
            request, "rotate", lambda service: service.rotate_key(identity, overlap, version, repeatable), _key_change
        )
        return await self._with_secret(done.after, done.secret, 200, is_repeated=done.is_repeated)

    async def take_over(self, request: Request) -> Response:
        try:
            text = (await _body(request, _MAX_IMPORT)).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise _RefusedRequest(400, "the body is not UTF-8 text") from None
        done = await self._change(request, "import", lambda service: service.import_keys(text), _imported, _IMPORT_TIMEOUT)
        added = [each.key.id for each in done.added]
        return _json({"added": added, "known": done.known, "messages": list(done.messages)})

    async def _shown(self, stored: StoredKey) -> Response:
        use = await self._usage.last_use([stored.key.id])
        return _json(_key(stored, use.times.get(stored.key.id), datetime.now(UTC)), version=stored.version)

    async def _with_secret(self, stored: StoredKey, secret: str | None, status: int, *, is_repeated: bool) -> Response:
        shown = _key(stored, None, datetime.now(UTC)) | {"secret": secret}
        replayed = {"idempotency-replayed": "true"} if is_repeated else {}
        return _json(shown, status, version=stored.version, headers=replayed)


class _Teams(_Entries):
    kind = "team"

    async def list(self, request: Request) -> Response:
        rows, cursor = await self._page(request)
        return _json({"teams": [_team(stored_team(row)) for row in rows], "next_cursor": cursor})

    async def create(self, request: Request) -> Response:
        fields, repeatable = await _sent(request)
        done = await self._change(request, "create", lambda service: service.create_team(fields, repeatable), _team_change)
        return _json(_team(done.after), 201, version=done.after.version)

    async def show(self, request: Request) -> Response:
        stored = stored_team(await self._row(request))
        return _json(_team(stored), version=stored.version)

    async def change(self, request: Request) -> Response:
        identity, version, (patch, _) = request.path_params["id"], _version(request), await _sent(request)
        done = await self._change(request, "change", lambda service: service.change_team(identity, patch, version), _team_change)
        return _json(_team(done.after), version=done.after.version)

    async def delete(self, request: Request) -> Response:
        identity, version = request.path_params["id"], _version(request)
        await self._change(request, "delete", lambda service: service.delete_team(identity, version), _team_deletion)
        return Response(status_code=204)


# Requests


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", str(_PAGE))
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= _MAX_PAGE:
        raise _RefusedRequest(400, f"limit: expected a number from 1 to {_MAX_PAGE}")
    return int(text)


def _after(request: Request) -> str:
    """Return the ID behind which a page begins."""
    cursor = request.query_params.get("cursor", "")
    try:
        return urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except ValueError:
        raise _RefusedRequest(400, "cursor: expected the next_cursor of an earlier page") from None


def _version(request: Request) -> int | None:
    """Return the version that a change expects; None for any version (``*``)."""
    tag = request.headers.get("if-match")
    if tag is None:
        raise _RefusedRequest(428, "a change requires If-Match with the ETag of the entry, or * for any version")
    found = _ETAG.fullmatch(tag.strip())
    return None if tag.strip() == "*" else -1 if found is None else int(found[1])


async def _sent(request: Request) -> tuple[dict[str, Any], Repeatable | None]:
    """Return the JSON object of a request, and what makes it repeatable. An empty body is an empty object."""
    body, key = await _body(request, _MAX_BODY), request.headers.get("idempotency-key")
    if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
        raise _RefusedRequest(400, "Idempotency-Key: expected 1 to 255 visible characters")
    try:
        found = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        raise _RefusedRequest(400, "the body is not valid JSON") from None
    if not isinstance(found, dict):
        raise _RefusedRequest(400, "expected a JSON object")
    request_digest = sha256(f"{request.method} {request.scope['path']}\n".encode() + body).hexdigest()
    return found, None if key is None else Repeatable(key, request_digest)


async def _body(request: Request, limit: int) -> bytes:
    """Return the body. Raises _RefusedRequest if it is too large."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _RefusedRequest(413, f"the body is larger than {limit} bytes")
        parts.append(part)
    return b"".join(parts)


# Responses


def _key(stored: StoredKey, last: datetime | None, now: datetime) -> dict[str, Any]:
    shown = shown_key(stored.key, last, now)
    settings = {name: getattr(stored.key, name) for name in SETTABLE if name not in shown}
    dates = {"created": instant(stored.created), "changed": instant(stored.changed)}
    return {"id": stored.key.id, "name": stored.name, **shown, **settings, **dates}


def _team(stored: StoredTeam) -> dict[str, Any]:
    limits = stored.team.limits.model_dump(exclude_defaults=True) if stored.team.limits else {}
    return {"id": stored.team.id, "limits": limits, "created": instant(stored.created), "changed": instant(stored.changed)}


def _key_change(done: KeyChange) -> Described | None:
    return None if done.is_repeated else (done.after.key.id, _audited(done.before), _audited(done.after))


def _team_change(done: TeamChange) -> Described | None:
    return None if done.is_repeated else (done.after.team.id, _audited_team(done.before), _audited_team(done.after))


def _key_deletion(before: StoredKey) -> Described:
    return before.key.id, _audited(before), None


def _team_deletion(before: StoredTeam) -> Described:
    return before.team.id, _audited_team(before), None


def _imported(done: ImportedKeys) -> Described | None:
    if not done.added:
        return None
    return f"{len(done.added)} keys", None, {"added": [each.key.id for each in done.added], "version": done.added[0].version}


def _audited_team(stored: StoredTeam | None) -> Entry | None:
    return None if stored is None else document(stored.team) | {"version": stored.version}


def _audited(stored: StoredKey | None) -> Entry | None:
    """Return a key without its hashes, for the audit log. Its version is the number of the change in the store's log."""
    if stored is None:
        return None
    shown = {name: value for name, value in document(stored.key).items() if name != "hash"}
    return shown | {"name": stored.name, "hashes": len(stored.key.hashes), "version": stored.version}


def _json(content: Mapping[str, Any], status: int = 200, *, version: int | None = None, headers: Mapping[str, str] = {}) -> Response:
    tags = {} if version is None else {"etag": f'"{version}"'}
    found = {"cache-control": "no-store", **tags, **headers}
    return Response(msgspec.json.encode(content), status, found, "application/json")
