"""The sign-in of one gateway on two real ports, with a database and issuers, and browsers that use it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from pydantic import SecretStr
from sqlalchemy import Engine

from gateway import config as conf
from gateway.audit.entry import Entry
from gateway.ledger.store import create_database_engine, database_url
from gateway.sign_in.browser import Port
from gateway.sign_in.people import PeopleStore
from gateway.sign_in.revocations import Revocations
from gateway.sign_in.routes import application
from gateway.sign_in.service import SignIn
from tests.support.oidc_issuer import CLIENT, SECRET, OidcIssuer

KEY = "k" * 32


class Entries(list[Entry]):
    """An audit log in memory."""

    def check(self) -> None:
        """Accept every change."""

    def record(self, entry: Entry) -> None:
        self.append(entry)

    record_refused = record


@dataclass
class Ports:
    """The running ports. ``entries`` are the recorded audit entries."""

    origins: dict[Port, str]
    settings: conf.SignIn
    service: SignIn
    people: PeopleStore
    revocations: Revocations
    entries: Entries = field(default_factory=Entries)

    def actions(self) -> list[str]:
        return [entry.action for entry in self.entries]

    def browser(self) -> httpx2.AsyncClient:
        """Return a browser with its own cookies."""
        return httpx2.AsyncClient(trust_env=False, timeout=30)

    async def start(self, browser: httpx2.AsyncClient, port: Port = "data", issuer: str = "one", **query: str) -> str:
        """Start a sign-in, and return the authorization URL."""
        response = await browser.get(f"{self.origins[port]}/sign-in", params={"issuer": issuer, **query})
        assert response.status_code == 303, response.text
        return response.headers["location"]

    async def sign_in(
        self, browser: httpx2.AsyncClient, issuer: OidcIssuer, port: Port = "data", provider: str = "one", **claims: Any
    ) -> httpx2.Response:
        """Sign a person in, and return the response at the redirect URI."""
        authorization = await self.start(browser, port, provider)
        return await browser.get(issuer.approve(authorization, **{"groups": ["lab", "llm-admins"], "name": "Alice", **claims}))

    async def person(self, browser: httpx2.AsyncClient, port: Port = "data") -> dict[str, Any] | None:
        """Return the person of the session on a port, None without a session."""
        response = await browser.get(f"{self.origins[port]}/sign-in/session")
        found: dict[str, Any] = response.json()
        return found if response.status_code == 200 else None

    async def post(self, browser: httpx2.AsyncClient, path: str, port: Port = "data", **form: str) -> httpx2.Response:
        """Send a form from a page of this origin."""
        origin = self.origins[port]
        return await browser.post(f"{origin}{path}", data=form, headers={"origin": origin, "sec-fetch-site": "same-origin"})


def entry(issuer: OidcIssuer, identity: str = "one", **more: Any) -> dict[str, Any]:
    """Return an entry of `sign_in.issuers`."""
    claims = {"roles": "groups", "teams": "groups", **more.pop("claims", {})}
    return {"id": identity, "issuer": issuer.url, "client_id": CLIENT, "client_secret": SecretStr(SECRET), "claims": claims, **more}


def settings_of(*issuers: dict[str, Any], **more: Any) -> conf.SignIn:
    roles = {"admin": "llm-admins", "viewer": ["everyone"]}
    return conf.SignIn.model_validate({"key": SecretStr(KEY), "issuers": list(issuers), "roles": roles, **more})


@asynccontextmanager
async def ports(folder: Path, *issuers: dict[str, Any], url: str | None = None, **more: Any) -> AsyncIterator[Ports]:
    """Run the ports for the duration of the block."""
    sockets: dict[Port, socket.socket] = {"data": socket.create_server(("127.0.0.1", 0)), "admin": socket.create_server(("127.0.0.1", 0))}
    origins: dict[Port, str] = {port: f"http://127.0.0.1:{each.getsockname()[1]}" for port, each in sockets.items()}
    settings = settings_of(*issuers, **{"url": origins["data"], "admin_url": origins["admin"], **more})
    engine: Engine = create_database_engine(database_url(url or "sqlite:///people.db", folder))
    people, entries = PeopleStore(engine), Entries()
    revocations = Revocations(people, lambda: None)

    async def applied() -> None:
        """Nothing: there are no workers."""

    service = SignIn(lambda: running.settings, people, revocations, lambda: {"lab", "ops"}, entries, applied)
    running = Ports(origins, settings, service, people, revocations, entries)
    await revocations.refresh()
    servers = []
    for port, listener in sockets.items():
        config = uvicorn.Config(application(service, port), log_config=None, lifespan="off", ws="none", http="h11")
        server = uvicorn.Server(config)
        servers.append((server, asyncio.create_task(server._serve([listener]))))
    try:
        yield running
    finally:
        for server, task in servers:
            server.should_exit = True
            with suppress(asyncio.CancelledError):
                await task
        engine.dispose()
