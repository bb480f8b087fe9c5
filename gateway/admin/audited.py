"""Parts that the admin port's handlers share: the check of the client's role, the entry of the audit log for each operation, and responses.

The rules: an operation is refused while the audit log cannot be written. Its entry is durable before the response, so there is no
acknowledged change without an entry. The entry of a change in the store is durable before its commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.access.actor import Actor, Requester
from gateway.access.permissions import Permission, is_permitted
from gateway.audit.entry import Audit, AuditUnavailableError, Entry, refused_request
from gateway.audit.recorded_change import Change, recorded_change
from gateway.fleet.operations import RefusedOperation
from gateway.store.documents import Described

Handler = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")
_log = logging.getLogger("vllm_gateway.control")


class AuditedHandlers:
    """Wraps handlers, with the audit log in which they are recorded."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit

    def permitted(self, handler: Handler, permission: Permission) -> Handler:
        """Return a handler that refuses clients without the permission."""

        async def handle(request: Request) -> Response:
            actor: Actor = request.state.requester.actor
            if is_permitted(actor, permission):
                return await handler(request)
            reason = f"this requires the role {permission.role}; the {actor} has {f'the role {actor.role}' if actor.role else 'no role'}"
            await self._record_refused(request, reason)
            return error_response(reason, 403)

        return handle

    def recorded(self, handler: Handler) -> Handler:
        """Return a handler of an operation that refuses it while it cannot be recorded, and records what the handler forbids."""

        async def handle(request: Request) -> Response:
            try:
                await asyncio.to_thread(self._audit.check)
            except AuditUnavailableError as error:
                return error_response(f"the audit log cannot be written, so nothing was changed: {error}", 503)
            response = await handler(request)
            if response.status_code == 403:
                await self._record_refused(request, msgspec.json.decode(response.body)["error"])
            return response

        return handle

    async def _record_refused(self, request: Request, reason: str) -> None:
        entry = refused_request(request.state.requester, request.method, request.url.path, reason)
        await asyncio.to_thread(self._audit.record_refused, entry)

    async def perform(
        self, request: Request, entry: Entry, operation: Coroutine[Any, Any, None], state: Callable[[], Mapping[str, Any] | None]
    ) -> None:
        """Perform an operation, and record its entry with the state afterwards. Raises RefusedOperation and AuditUnavailableError."""
        name = entry.action.partition(".")[2]
        log_operation(f"{name} of {entry.target}" if entry.target else name, request)
        try:
            await operation
        except RefusedOperation as refused:
            refusal = replace(entry, action=f"{entry.action}.refused", after={"reason": str(refused)})
            await asyncio.to_thread(self._audit.record_refused, refusal)
            raise
        await self.note(request, entry.action, entry.target, entry.before, state())

    async def note(
        self, request: Request, action: str, target: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
    ) -> None:
        """Record a change that was made. Raises AuditUnavailableError, and then the change must not be acknowledged."""
        await asyncio.to_thread(self._audit.record, replace(entry_of(action, request, target, before), after=after))

    async def change(self, request: Request, action: str, change: Change[T], described: Callable[[T], Described | None]) -> T:
        """Make a change, with its entry. Raises what ``recorded_change`` raises."""

        def entry(done: T) -> Entry | None:
            found = described(done)
            return None if found is None else replace(entry_of(action, request, found.target, found.before), after=found.after)

        return await recorded_change(self._audit, change, entry)


def entry_of(action: str, request: Request, target: str, before: Mapping[str, Any] | None) -> Entry:
    """Return the entry of an operation before it is performed."""
    requester: Requester = request.state.requester
    return Entry(action, requester.actor, requester.origin, target, before, None)


def log_operation(operation: str, request: Request) -> None:
    """Log an operation and its client. The text is formatted here, so that each line differs and no line is suppressed as a repetition."""
    _log.info(f"{operation} requested by {request.state.requester}")


class RefusedRequest(Exception):
    """A request is refused with this status. The text explains the reason to the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def configured(part: T | None, text: str) -> T:
    """Return a part of the gateway. Raises RefusedRequest with the text if it is not configured."""
    if part is None:
        raise RefusedRequest(404, text)
    return part


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] = {}) -> Response:
    """Return JSON that is not stored. Unlike JSONResponse, it can have decimals with all of their digits."""
    return Response(msgspec.json.encode(content), status, {"cache-control": "no-store", **headers}, "application/json")


def error_response(message: str, status: int) -> Response:
    """Return an error in the form of the admin port."""
    return JSONResponse({"error": message}, status)
