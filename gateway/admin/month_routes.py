"""The routes of closed months, below ``/admin/v1/months``, and what they share with the route of single requests.

The rule: a month is closed once. Only the request that has closed it is recorded in the audit log.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.audited import AuditedHandlers, Handler, RefusedRequest, configured, json_response, log_operation

if TYPE_CHECKING:
    from gateway.ledger.months.closing import ClosedMonth

REQUESTS, MONTHS = "/admin/v1/requests", "/admin/v1/months"
MONTH, CLOSE = f"{MONTHS}/{{month}}", f"{MONTHS}/{{month}}/close"
PARAMETERS = ("id", "code", "key", "model", "reason", "status", "team", "user", "since", "until", "cursor", "limit")
"""The parameters of a query for requests; a test compares them with ``gateway.usage.requests.query``, which loads SQLAlchemy."""
NO_LEDGER = "no ledger is configured; add `ledger: sqlite:///usage.db` to the configuration"


class Months(Protocol):
    """The months of a running ledger. Every method raises DatabaseUnavailableError."""

    async def months(self) -> list[tuple[str, datetime, str]]:
        """Return the closed months, each with the time at which it was closed and its hash."""

    async def month(self, month: str) -> ClosedMonth | None:
        """Return a closed month; None if it is not closed. Raises MonthError."""

    async def close_month(self, month: str) -> ClosedMonth:
        """Close a month, or return it if it is closed. Raises MonthError."""


def handlers(months: Callable[[], Months | None], audited: AuditedHandlers) -> dict[str, Handler]:
    """Return the handlers by path. ``months`` returns None if no ledger is configured."""

    def running() -> Months:
        return configured(months(), NO_LEDGER)

    async def listed(_: Request) -> Response:
        found = [{"month": month, "closed": closed.isoformat(), "hash": value} for month, closed, value in await running().months()]
        return json_response({"months": found})

    async def shown(request: Request) -> Response:
        month = request.path_params["month"]
        if (found := await running().month(month)) is None:
            raise RefusedRequest(404, f"{month} is not closed")
        return json_response(document(found))

    async def close(request: Request) -> Response:
        month = request.path_params["month"]
        was_closed = await running().month(month) is not None
        found = await running().close_month(month)
        if not was_closed:
            log_operation(f"close of {month}", request)
            await audited.note(request, "month.close", month, None, {"hash": found.hash, "lines": len(found.lines)})
        return json_response(document(found))

    return {MONTHS: listed, MONTH: shown, CLOSE: audited.recorded(close)}


def document(found: ClosedMonth) -> dict[str, Any]:
    """Return a closed month as JSON. Its lines are texts, so that their hash can be checked."""
    return {
        "month": found.month,
        "closed": found.closed.isoformat(),
        "hash": found.hash,
        "intact": found.is_intact,
        "lines": list(found.lines),
        "corrections": list(found.corrections),
    }
