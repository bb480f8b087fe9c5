"""The routes of temporary raises: limits of a key or a team, of the store or of the YAML, are raised until a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.audited import AuditedHandlers, Handler, RefusedRequest, configured, json_response, log_operation
from gateway.audit.entry import AuditUnavailableError
from gateway.key_management.raises import Raise, RaiseChange, Work, new_raise
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.snapshot.snapshot import Allowance
from gateway.store.documents import Described
from gateway.store.entries import Holder, Kind

KEY_RAISES, TEAM_RAISES = "/admin/v1/keys/{id:path}/raises", "/admin/v1/teams/{id:path}/raises"
_KINDS: Mapping[str, Kind] = {KEY_RAISES: "key", TEAM_RAISES: "team"}
_MAX_BODY = 64 * 1024  # bytes


class RaiseStorage(Protocol):
    """The raises of a running gateway."""

    def of(self, holder: Holder) -> tuple[Raise, ...]:
        """Return the raises of a holder that are in force."""

    def allowance(self, holder: Holder) -> Allowance | None:
        """Return the limits of a key or team as they are in force; None if it does not exist. Without limits they are empty."""

    async def change(self, holder: Holder, work: Work, record: Callable[[RaiseChange], None]) -> RaiseChange:
        """Change the raises of a holder. Returns those before and after, when the workers of this gateway have applied them.

        ``record`` gets them before they are stored. Raises its errors and those of ``work``, DatabaseUnavailableError, and OSError if
        they cannot be stored.
        """


def handlers(storage: RaiseStorage, audited: AuditedHandlers) -> dict[str, Mapping[str, Handler]]:
    """Return the handlers by path and method."""
    routes = {path: _Routes(kind, storage, audited) for path, kind in _KINDS.items()}
    return {path: {"GET": each.show, "POST": each.add, "DELETE": each.end} for path, each in routes.items()}


class _Routes:
    """The routes of the raises of keys, or of teams. All may raise RefusedRequest."""

    def __init__(self, kind: Kind, storage: RaiseStorage, audited: AuditedHandlers) -> None:
        self._kind = kind
        self._storage = storage
        self._audited = audited

    async def show(self, request: Request) -> Response:
        holder, _ = self._found(request)
        return _shown(self._storage.of(holder))

    async def add(self, request: Request) -> Response:
        holder, allowance = self._found(request)
        try:
            made = new_raise(await _fields(request), allowance, datetime.now(UTC), str(request.state.requester.actor))
        except ValueError as error:
            raise RefusedRequest(400, str(error)) from None

        def with_made(before: tuple[Raise, ...]) -> tuple[Raise, ...]:
            return (*(each for each in before if each.limit != made.limit), made)

        return _shown(await self._change(request, holder, "raise", with_made), 201)

    async def end(self, request: Request) -> Response:
        holder, limit = self._holder(request), request.query_params.get("limit")

        def without_ended(before: tuple[Raise, ...]) -> tuple[Raise, ...]:
            left = () if limit is None else tuple(each for each in before if each.limit != limit)
            if left == before:
                raise LookupError("no limit of the {} {} is raised".format(*holder) if limit is None else f"{limit} is not raised")
            return left

        return _shown(await self._change(request, holder, "end_raise", without_ended))

    def _holder(self, request: Request) -> Holder:
        return self._kind, request.path_params["id"]

    def _found(self, request: Request) -> tuple[Holder, Allowance]:
        """Return the key or team of a request, which exists, and its limits."""
        holder = self._holder(request)
        return holder, configured(self._storage.allowance(holder), "there is no {} {}".format(*holder))

    async def _change(self, request: Request, holder: Holder, action: str, work: Work) -> tuple[Raise, ...]:
        """Change the raises of a holder, with an entry in the audit log and a line in the log. Returns the raises in force then."""
        kind, identity = holder
        try:
            done = await self._audited.change(
                request,
                f"{kind}.{action}",
                lambda record: self._storage.change(holder, work, record),
                lambda done: Described(identity, _audited(done.before), _audited(done.after)),
            )
        except LookupError as error:
            raise RefusedRequest(404, str(error.args[0])) from None
        except AuditUnavailableError as error:
            raise RefusedRequest(503, f"the audit log cannot be written, so nothing was changed: {error}") from None
        except DatabaseUnavailableError as error:
            raise RefusedRequest(503, f"the store's database does not respond, so no limit was changed: {error}") from None
        except OSError as error:
            raise RefusedRequest(503, f"the raises cannot be stored, so no limit was changed: {error.strerror}") from None
        log_operation(f"{action.replace('_', ' ')} of {kind} {identity}", request)
        return done.after


async def _fields(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request. Raises ValueError."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY:
            raise ValueError(f"the body is larger than {_MAX_BODY} bytes")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the body is not valid JSON") from None
    if not isinstance(found, dict):
        raise ValueError("expected a JSON object")  # noqa: TRY004  one error for all invalid requests
    return found


def _shown(raises: Sequence[Raise], status: int = 200) -> Response:
    return json_response({"raises": [each.document() for each in raises]}, status)


def _audited(raises: Sequence[Raise]) -> Mapping[str, Any]:
    """Return raises for the audit log, whose encoder writes plain numbers."""
    return {each.limit: json.loads(msgspec.json.encode(each.document())) for each in raises}
