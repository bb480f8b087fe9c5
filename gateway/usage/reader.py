"""Run the queries of a gateway whose ledger is running: reports, reconciliations, and what control reads for itself.

The rule: the event loop waits for no database, so each query runs on a thread, for a bounded time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine

from gateway.key_management.key_list import LastUse
from gateway.ledger.errors import DatabaseUnavailableError
from gateway.ledger.months.closing import ClosedMonth, close_month, closed_months, read_month
from gateway.limits.budget_holders import Budgets, HolderUse
from gateway.limits.windows import Moment
from gateway.snapshot.link import RejectedRequest, UsageRequested
from gateway.usage.database import connected_work, run_in_thread
from gateway.usage.key_activity import last_use
from gateway.usage.key_report import own_usage, parse_own_query
from gateway.usage.period_sums import earlier_use
from gateway.usage.queries import UsageQuery, parse_query, run_query
from gateway.usage.reconciliation_queries import Reconciliation, parse_reconciliation_query, run_reconciliation
from gateway.usage.requests.explanation import explained
from gateway.usage.requests.query import RequestPage, find_requests, parse_request_query

_QUERY_TIMEOUT = 60.0
_OWN_QUERY_TIMEOUT = 5.0  # of a key's query for its own usage
_RESTORE_TIMEOUT = 300.0
_CLOSE_TIMEOUT = 900.0  # of a month of some ten million rows
_MARGIN = 5.0  # seconds that a connection may take in addition to its query


class UsageReader:
    """Reads the database of a running ledger. ``engine`` is the ledger's, which closes it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def report(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        """Return the report for a query. Raises QueryError and DatabaseUnavailableError."""
        if "reconcile" in parameters:
            return (await self.reconcile(parse_reconciliation_query(parameters, datetime.now(UTC)))).document()
        query = parse_query(parameters, datetime.now(UTC))
        return (await run_in_thread(lambda: run_query(self._engine, query), _QUERY_TIMEOUT)).document()

    async def requests(self, parameters: Mapping[str, str], rejections: Iterable[RejectedRequest]) -> dict[str, Any]:
        """Return a page of single requests. Raises QueryError and DatabaseUnavailableError."""
        return (await self._found(parameters, rejections)).document()

    async def request(self, identity: str, rejections: Iterable[RejectedRequest]) -> dict[str, Any] | None:
        """Return one request with what happened to it, None for an unknown one. Raises QueryError and DatabaseUnavailableError."""
        found = (await self._found({"id": identity}, rejections)).requests
        return explained(found[0]) if found else None

    async def _found(self, parameters: Mapping[str, str], rejections: Iterable[RejectedRequest]) -> RequestPage:
        query, known = parse_request_query(parameters, datetime.now(UTC)), tuple(rejections)
        return await run_in_thread(lambda: find_requests(self._engine, query, known), _QUERY_TIMEOUT)

    async def months(self) -> list[tuple[str, datetime, str]]:
        """Return the closed months (see ``closed_months``). Raises DatabaseUnavailableError."""
        return await run_in_thread(lambda: connected_work(lambda: closed_months(self._engine)), _QUERY_TIMEOUT)

    async def month(self, month: str) -> ClosedMonth | None:
        """Return a closed month; None if it is not closed. Raises MonthError and DatabaseUnavailableError."""
        return await run_in_thread(lambda: connected_work(lambda: read_month(self._engine, month)), _QUERY_TIMEOUT)

    async def close_month(self, month: str) -> ClosedMonth:
        """Close a month, or return it if it is closed. Raises MonthError and DatabaseUnavailableError."""
        now = datetime.now(UTC)
        return await run_in_thread(lambda: connected_work(lambda: close_month(self._engine, month, now)), _CLOSE_TIMEOUT)

    async def own_usage(self, request: UsageRequested, now: datetime) -> bytes:
        """Return a key's own usage as JSON. Raises QueryError and DatabaseUnavailableError."""
        query = parse_own_query(request, now)
        return await run_in_thread(lambda: own_usage(self._engine, query, _OWN_QUERY_TIMEOUT), _OWN_QUERY_TIMEOUT + _MARGIN)

    async def usage_of_people(self, query: UsageQuery) -> dict[str, Any]:
        """Return the report for a query of a person. Raises DatabaseUnavailableError."""
        seconds = _OWN_QUERY_TIMEOUT
        return (await run_in_thread(lambda: run_query(self._engine, query, seconds), seconds + _MARGIN)).document()

    async def reconcile(self, query: UsageQuery) -> Reconciliation:
        """Compare the ledger with the engines' counters. Raises DatabaseUnavailableError."""
        return await run_in_thread(lambda: run_reconciliation(self._engine, query), _QUERY_TIMEOUT)

    async def last_use(self, keys: Sequence[str], of_tokens: Set[str]) -> LastUse:
        """Return when these keys were last used, or why that is unknown. ``of_tokens`` are those that are used for tokens."""
        try:
            return LastUse(await run_in_thread(lambda: last_use(self._engine, keys, of_tokens), _QUERY_TIMEOUT))
        except DatabaseUnavailableError as error:
            return LastUse(unknown=f"the ledger's database does not respond: {error}")

    async def earlier_use(self, budgets: Budgets, before: float, at: Moment) -> dict[str, HolderUse]:
        """Return the use in the rows before a time that counts at a moment, by the name of its holder. Raises DatabaseUnavailableError."""
        starts, seconds = budgets.counted_starts(at), _RESTORE_TIMEOUT
        found = await run_in_thread(lambda: earlier_use(self._engine, budgets, starts, before, seconds), seconds + _MARGIN)
        return budgets.use_by_holder(found, starts, at)
