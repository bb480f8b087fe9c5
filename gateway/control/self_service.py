"""Self-service in the running gateway: what its routes read of control, and their place beside the sign-in."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.errors import Refusal, render
from gateway.audit.entry import Audit
from gateway.config import Team
from gateway.control.control import Control
from gateway.control.key_store import KeyStore
from gateway.control.ledger_queries import KeyUsage, QueryRate
from gateway.control.limit_report import limit_report
from gateway.control.report import GatewayReport
from gateway.key_management.key_list import LastUse
from gateway.self_service.paths import PREFIX
from gateway.self_service.routes import application
from gateway.sign_in.service import SignIn
from gateway.usage.errors import QueryError
from gateway.usage.queries import UsageQuery
from gateway.usage.reader import UsageReader

_BURST, _INTERVAL = 60, 0.2  # requests of a person at once, and seconds after which one more is allowed
_NO_STORE = Refusal("not_found", "There is no self-service here: no store is configured.")
_HEADERS = {"cache-control": "no-store", **_NO_STORE.headers}
_MISSING: ASGIApp = Response(render(_NO_STORE), _NO_STORE.spec.status, _HEADERS, "application/json")


class SelfServiceGateway:
    """Implements ``Gateway`` of the routes. ``reader`` is None without a ledger."""

    def __init__(self, control: Control, keys: KeyStore, usage: KeyUsage, reader: UsageReader | None) -> None:
        self._control = control
        self._keys = keys
        self._usage = usage
        self._report = GatewayReport(control, _reader=reader)
        self._rate = QueryRate(_BURST, _INTERVAL)

    def team(self, identity: str) -> Team | None:
        """Return a team of the configuration or of the store, or None."""
        return self._keys.team(identity)

    def wait(self, person: str) -> float:
        """Count a request of a person and return 0; or return the seconds after which a request is allowed."""
        return self._rate.wait(person, time.monotonic())

    async def usage(self, query: UsageQuery) -> Mapping[str, Any] | None:
        """Return the report of a query; None without a ledger. Raises DatabaseUnavailableError."""
        return await self._usage.of_people(query)

    async def limits(self, key: str) -> Sequence[Mapping[str, Any]]:
        """Return the limits that a key is subject to; none for a key that is not served."""
        workers, stored, found = self._control.workers, self._control.store_counts, self._keys.key(key)
        if workers.snapshot is None or found is None:
            return ()
        await stored.refresh()
        shown: Sequence[Mapping[str, Any]] = limit_report(
            replace(workers.snapshot, keys=(found,), teams={}), workers.buckets, stored, {"key": key}
        )["limits"]
        return shown

    async def team_limits(self, team: str) -> Sequence[Mapping[str, Any]]:
        """Return the limits that the keys of a team share; none for a team without keys."""
        try:
            shown: Sequence[Mapping[str, Any]] = (await self._report.limits({"team": team}))["limits"]
        except QueryError:
            return ()
        return shown

    async def last_use(self, keys: Sequence[str]) -> LastUse:
        """Return when keys were last used, or why that is unknown."""
        return await self._report.last_use(keys)


def beside(pages: ASGIApp, control: Control, sign_in: SignIn, usage: KeyUsage, reader: UsageReader | None, audit: Audit) -> ASGIApp:
    """Return the application for the requests that workers pass on: the routes of self-service, and those of the sign-in (``pages``)."""
    keys = control.key_store
    own = _MISSING if keys is None else application(SelfServiceGateway(control, keys, usage, reader), keys, sign_in, audit)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await (own if scope["path"].startswith(f"{PREFIX}/") else pages)(scope, receive, send)

    return serve
