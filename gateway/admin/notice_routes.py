"""The routes of notices: the last ones with the state of their delivery, and test notices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.admin.audited import AuditedHandlers, Handler, configured, error_response, json_response, log_operation

if TYPE_CHECKING:
    from gateway.notices.service import Notices

NOTICES = "/admin/v1/notices"
TEST = f"{NOTICES}/test"
_LISTED, _MAX_LISTED = 100, 1000  # notices
_NONE_CONFIGURED = "no notices are configured; add `notices` to the configuration"


def handlers(notices: Notices | None, audited: AuditedHandlers) -> dict[str, Handler]:
    """Return the handlers by path. ``notices`` is None if none are configured."""

    async def recent(request: Request) -> Response:
        known = configured(notices, _NONE_CONFIGURED)
        text = request.query_params.get("limit", str(_LISTED))
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _MAX_LISTED):
            return error_response(f"limit: expected a number from 1 to {_MAX_LISTED}", 400)
        return json_response({"notices": await known.recent(int(text))})

    async def test(request: Request) -> Response:
        known = configured(notices, _NONE_CONFIGURED)
        name = request.query_params.get("name")
        log_operation(f"test of the notices {name}" if name else "test of all notices", request)
        if not (trials := await known.test(name)):
            return error_response(_NONE_CONFIGURED if name is None else f"there are no notices {name} in the configuration", 404)
        results = [
            {"name": each.name, "accepted": each.result.is_sent, "result": each.result.text, "reply": each.result.reply} for each in trials
        ]
        await audited.note(request, "notices.test", name or "", None, {each.name: each.result.text for each in trials})
        return JSONResponse({"results": results})

    return {NOTICES: recent, TEST: audited.recorded(test)}
