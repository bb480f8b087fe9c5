"""The routes of temporary raises: limits of a key or a team, of the store or of the YAML, are raised until a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.audited import AuditedHandlers, Handler, error_response, json_response, log_operation
from gateway.audit.entry import AuditUnavailableError
from gateway.key_management.raises import Raise, new_raise
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.snapshot.snapshot import Allowance
from gateway.store.documents import Described

Kind = Literal["key", "team"]
Holder = tuple[Kind, str]
Changed = tuple[tuple[Raise, ...], tuple[Raise, ...]]
KEY_RAISES, TEAM_RAISES = "/admin/v1/keys/{id:path}/raises", "/admin/v1/teams/{id:path}/raises"
_KINDS: Mapping[str, Kind] = {KEY_RAISES: "key", TEAM_RAISES: "team"}
_MAX_BODY = 64 * 1024  # bytes


class RaiseStorage(Protocol):
    """The raises of a running gateway."""

    def of(self, holder: Holder) -> tuple[Raise, ...]:
        """Return the raises of a holder that are in force."""

    def allowance(self, holder: Holder) -> Allowance | None:
        """Return the limits of a key or team as they are in force; None if it does not exist. Without limits they are empty."""

    async def change(
        self, holder: Holder, work: Callable[[tuple[Raise, ...]], tuple[Raise, ...]], record: Callable[[Changed], None]
    ) -> Changed:
        """Change the raises of a holder. Returns those before and after, when the workers of this gateway have applied them.

        ``record`` gets them before they are stored. Raises its errors and those of ``work``, DatabaseUnavailableError, and OSError if
        they cannot be stored.
        """


def handlers(storage: RaiseStorage, audited: AuditedHandlers) -> dict[str, Mapping[str, Handler]]:
    """Return the handlers by path and method."""
    return {path: _of_kind(kind, storage, audited) for path, kind in _KINDS.items()}


def _of_kind(kind: Kind, storage: RaiseStorage, audited: AuditedHandlers) -> Mapping[str, Handler]:
    async def show(request: Request) -> Response:
        holder = kind, request.path_params["id"]
        return _unknown(holder) if storage.allowance(holder) is None else _shown(storage.of(holder))

    async def add(request: Request) -> Response:
        holder = kind, request.path_params["id"]
        if (allowance := storage.allowance(holder)) is None:
            return _unknown(holder)
        try:
            made = new_raise(await _fields(request), allowance, datetime.now(UTC), str(request.state.requester.actor))
        except ValueError as error:
            return error_response(str(error), 400)

        def work(before: tuple[Raise, ...]) -> tuple[Raise, ...]:
            return (*(each for each in before if each.limit != made.limit), made)

        return await changed(request, holder, "raise", work, 201)

    async def end(request: Request) -> Response:
        holder, limit = (kind, request.path_params["id"]), request.query_params.get("limit")

        def work(before: tuple[Raise, ...]) -> tuple[Raise, ...]:
            left = tuple(each for each in before if limit not in (None, each.limit))
            if left == before:
                raise LookupError(f"no limit of the {kind} {holder[1]} is raised" if limit is None else f"{limit} is not raised")
            return left

        return await changed(request, holder, "end_raise", work, 200)

    async def changed(
        request: Request, holder: Holder, action: str, work: Callable[[tuple[Raise, ...]], tuple[Raise, ...]], status: int
    ) -> Response:
        try:
            _, after = await audited.change(
                request,
                f"{kind}.{action}",
                lambda record: storage.change(holder, work, record),
                lambda done: Described(holder[1], _audited(done[0]), _audited(done[1])),
            )
        except LookupError as error:
            return error_response(str(error.args[0]), 404)
        except AuditUnavailableError as error:
            return error_response(f"the audit log cannot be written, so nothing was changed: {error}", 503)
        except DatabaseUnavailableError as error:
            return error_response(f"the store's database does not respond, so no limit was changed: {error}", 503)
        except OSError as error:
            return error_response(f"the raises cannot be stored, so no limit was changed: {error.strerror}", 503)
        log_operation(f"{action.replace('_', ' ')} of {kind} {holder[1]}", request)
        return _shown(after, status)

    return {"GET": show, "POST": add, "DELETE": end}


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


def _unknown(holder: Holder) -> Response:
    return error_response("there is no {} {}".format(*holder), 404)


def _shown(raises: Sequence[Raise], status: int = 200) -> Response:
    return json_response({"raises": [each.document() for each in raises]}, status)


def _audited(raises: Sequence[Raise]) -> Mapping[str, Any]:
    """Return raises for the audit log, whose encoder writes plain numbers."""
    return {each.limit: json.loads(msgspec.json.encode(each.document())) for each in raises}
