"""The sign-in of people in the running gateway: its database, the revoked sessions that workers get, and its routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sqlalchemy import Engine
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import config as conf
from gateway.audit.entry import Audit
from gateway.control.control import Control
from gateway.sign_in.paths import endpoint_of
from gateway.sign_in.people import PeopleStore
from gateway.sign_in.revocations import Revocations
from gateway.sign_in.routes import application
from gateway.sign_in.service import SignIn
from gateway.snapshot.link import RevokedSessions
from gateway.system.tasks import background


@dataclass(frozen=True, slots=True)
class SigningIn:
    """The running sign-in. ``pages`` are the routes of the data port."""

    service: SignIn
    pages: ASGIApp
    revocations: Revocations

    def first_messages(self) -> Iterable[RevokedSessions]:
        """Return what a new worker gets: the revoked sessions, as far as they are known."""
        known = self.revocations.known
        return () if known is None else (RevokedSessions(known),)


@asynccontextmanager
async def signing_in(control: Control, engine: Engine, audit: Audit) -> AsyncIterator[SigningIn]:
    """Run the sign-in for the length of the block. ``engine`` is the database's, ``audit`` records who signs in and out."""
    people = PeopleStore(engine)
    revocations = Revocations(people, lambda: control.workers.send(RevokedSessions(revocations.known or ())))

    def settings() -> conf.SignIn:
        settings = control.config.sign_in
        assert settings is not None, "adding and removing it needs a restart"
        return settings

    async def applied() -> None:
        # Messages arrive in order: a worker that knows this health knows the revoked sessions.
        await control.wait_applied(control.publisher.publish_health())

    def teams() -> frozenset[str]:
        stored = frozenset[str]() if control.key_store is None else control.key_store.teams
        return stored | {team.id for team in control.config.teams}

    service = SignIn(settings, people, revocations, teams, audit, applied)
    async with background(revocations.run()):
        yield SigningIn(service, application(service, "data"), revocations)


def before(service: SignIn, others: ASGIApp) -> ASGIApp:
    """Return the application of the admin port: the routes of the sign-in, which need no authorization, in front of the others.

    Responses of the others renew the session of a person.
    """
    routes = application(service, "admin")

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if service.origin("admin") is not None and endpoint_of(scope["path"]) is not None:
            await routes(scope, receive, send)
            return
        renewal = [(name.encode(), value.encode()) for name, value in service.renewal(scope["headers"]).items()]

        async def send_renewed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *renewal]
            await send(message)

        await others(scope, receive, send_renewed if renewal else send)

    return serve
