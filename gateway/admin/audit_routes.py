"""The route of the audit log: its entries for administrators, in pages, the newest first."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.audited import Handler, error_response, json_response
from gateway.audit.listing import Filter, instant
from gateway.store.cursor import page_length, position_of

if TYPE_CHECKING:
    from gateway.audit.log import Where

AUDIT = "/admin/v1/audit"
QUERIES = ("action", "actor", "target", "since", "cursor", "limit")
_NO_AUDIT = "no audit log is configured; add `audit` to the configuration"


def handlers(where: Where | None) -> dict[str, Handler]:
    """Return the handler by path. ``where`` is the log, None if none is configured."""

    async def listed(request: Request) -> Response:
        if where is None:
            return error_response(_NO_AUDIT, 404)
        from gateway.audit.pages import AuditQuery, audit_page, position

        sent = request.query_params
        try:
            chosen = Filter(instant(sent["since"]) if "since" in sent else None, sent.get("action"), sent.get("actor"))
            query = AuditQuery(chosen, sent.get("target"), page_length(sent.get("limit")), position(position_of(sent.get("cursor", ""))))
        except ValueError as error:
            return error_response(str(error), 400)
        try:
            page = await asyncio.to_thread(audit_page, where, query)
        except OSError as error:
            return error_response(f"{error.filename} cannot be read: {error.strerror}", 503)
        return json_response(page)

    return {AUDIT: listed}
