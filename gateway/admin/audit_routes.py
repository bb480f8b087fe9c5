"""The routes of the audit log for administrators: its entries in pages, the newest first, and the verification of its chains.

The rule: a verification reads the whole log, so it runs on a thread, one at a time, and has a timeout.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.audited import Handler, configured, error_response, json_response
from gateway.audit.listing import Filter, instant
from gateway.store.cursor import page_length, position_of

if TYPE_CHECKING:
    from gateway.audit.log import AuditLog

AUDIT = "/admin/v1/audit"
VERIFICATION = f"{AUDIT}/verification"
QUERIES = ("action", "actor", "target", "since", "cursor", "limit")
_NO_AUDIT = "no audit log is configured; add `audit` to the configuration"


def handlers(log: AuditLog | None, seconds: float = 30.0) -> dict[str, Handler]:
    """Return the handlers by path. ``log`` is None if none is configured. ``seconds``: the timeout of a verification."""
    verifying = asyncio.Lock()

    async def listed(request: Request) -> Response:
        known = configured(log, _NO_AUDIT)
        from gateway.audit.paging import AuditQuery, audit_page, position

        sent = request.query_params
        try:
            chosen = Filter(instant(sent["since"]) if "since" in sent else None, sent.get("action"), sent.get("actor"))
            query = AuditQuery(chosen, sent.get("target"), page_length(sent.get("limit")), position(position_of(sent.get("cursor", ""))))
        except ValueError as error:
            return error_response(str(error), 400)
        try:
            page = await asyncio.to_thread(audit_page, known.where, query)
        except ValueError as error:
            return error_response(str(error), 400)
        except OSError as error:
            return error_response(f"{error.filename} cannot be read: {error.strerror}", 503)
        return json_response(page)

    async def verification(_: Request) -> Response:
        known = configured(log, _NO_AUDIT)
        from gateway.audit.lines import moved_files
        from gateway.audit.verification import TooLongError, verify_log

        if verifying.locked():
            return error_response("the log is being verified for another client; try again later", 503)
        async with verifying:
            try:
                older = await asyncio.to_thread(moved_files, known.where)
                found = await asyncio.to_thread(verify_log, known.where, [known.key], older=older, seconds=seconds)
            except TooLongError as error:
                text = f"the first {error.entries:,} entries are intact, and verifying the others takes too long here"
                return error_response(f"{text}; run `vllm-gateway audit verify`", 503)
            except OSError as error:
                return error_response(f"{error.filename} cannot be read: {error.strerror}", 503)
        chains = [{"chain": each.chain, "entries": each.seq} for each in found.checkpoints]
        files = [each.name for each in older]
        shown = {"entries": found.entries, "chains": chains, "checkpoints": found.compared, "moved_files": files, "broken": found.broken}
        return json_response(shown)

    return {AUDIT: listed, VERIFICATION: verification}
