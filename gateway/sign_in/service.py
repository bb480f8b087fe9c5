"""Sign people in and out: the steps of the protocol in order, with the database, the providers and the audit log.

The rules: a step that may happen once is noted in the database before anything follows from it. A new session gets a new ID, and replaces
the browser's earlier one. A sign-out returns after this gateway's workers know it. The entry of the audit log is durable before the
response.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gateway import config as conf
from gateway.access.actor import Actor, PersonId, Role
from gateway.audit.entry import Audit, Entry
from gateway.sign_in.browser import Headers, Port, attempt_cookie, cookie
from gateway.sign_in.errors import SignInError
from gateway.sign_in.oidc.authorization import (
    ATTEMPT_SECONDS,
    Attempt,
    Started,
    attempts,
    checked_attempt,
    checked_code,
    nonce_of,
    redirect_uri,
    start,
    verifier_of,
)
from gateway.sign_in.oidc.provider import end_session_url
from gateway.sign_in.oidc.provider_client import ProviderClient
from gateway.sign_in.oidc.roles import IDENTIFIER, GrantRules, person_of
from gateway.sign_in.paths import LINK
from gateway.sign_in.people import EndedSession, KnownPerson, NewSession, PeopleStore, SignInLink, digest
from gateway.sign_in.revocations import Revocations
from gateway.sign_in.sessions import LINK_ISSUER, Person, Session, Sessions, new_session
from gateway.sign_in.settings import client_of, grant_rules, key_of, origin_of, session_rules
from gateway.usage.database import run_in_thread

LINK_SECONDS = 15 * 60
_TIMEOUT = 10.0  # seconds for a change of the database
_LINK_PROVIDER = "link"
_USED = "This sign-in link was used before, or has expired. Ask an administrator for a new one."
_UNAUTHENTICATED = Actor("unauthenticated", "", None)
_log = logging.getLogger("vllm_gateway.control")


@dataclass(frozen=True, slots=True)
class SignedIn:
    """A completed sign-in: the ``Set-Cookie`` value of the session, and the path to go to."""

    cookie: str
    return_to: str


@dataclass(eq=False)
class SignIn:
    """The sign-ins of one gateway.

    ``settings`` returns the present settings, ``teams`` the IDs of the present teams. ``audit`` is the audit log. ``applied`` waits
    until the workers know the revoked sessions.
    """

    _settings: Callable[[], conf.SignIn]
    _people: PeopleStore
    _revocations: Revocations
    _teams: Callable[[], Collection[str]]
    _audit: Audit
    _applied: Callable[[], Awaitable[None]]
    _providers: dict[str, ProviderClient] = field(default_factory=dict)
    link_seconds = LINK_SECONDS

    @property
    def issuers(self) -> Sequence[tuple[str, str]]:
        """The ID and the name of each issuer."""
        return [(issuer.id, issuer.name or issuer.id) for issuer in self._settings().issuers]

    def origin(self, port: Port) -> str | None:
        """Return the address of a port in browsers; None: people do not sign in there."""
        return origin_of(self._settings(), port)

    def sessions(self, port: Port) -> Sessions:
        """Return the sessions of a port. People must sign in there."""
        rules = session_rules(self._settings(), port)
        assert rules is not None
        return Sessions(rules, port, self._revocations.known)

    def attempt_cookie(self, port: Port) -> str:
        """Return the name of the cookie of attempts."""
        return attempt_cookie(port, secure=self._origin(port).startswith("https:"))

    # OpenID Connect

    async def start(self, port: Port, issuer: str, return_to: str) -> Started:
        """Start a sign-in at an issuer. Raises SignInError."""
        provider = self._provider(issuer)
        signer = attempts(key_of(self._settings()))
        return start(signer, provider.client, await provider.metadata(), port, self._origin(port), return_to, time.time())

    async def finish(self, port: Port, issuer: str, query: Sequence[tuple[str, str]], headers: Headers, origin: str) -> SignedIn:
        """Complete a sign-in with the response at the redirect URI. ``origin`` is the client's address. Raises SignInError."""
        try:
            signer = attempts(key_of(self._settings()))
            attempt = checked_attempt(signer, cookie(headers, self.attempt_cookie(port)), issuer, port, query, time.time())
            provider = self._provider(issuer)
            if provider.client.issuer != attempt.issuer:
                raise SignInError("This sign-in has expired. Sign in again.", detail="the issuer's entry was changed meanwhile")
            await self._use_attempt(attempt)
            metadata = await provider.metadata()
            code = checked_code(attempt, query, needs_issuer=metadata.authorization_response_iss_parameter_supported)
            claims, id_token = await self._claims(provider, code, nonce_of(signer, attempt), verifier_of(signer, attempt), port)
            person = person_of(claims, self._rules(issuer), self._teams())
        except SignInError as error:
            await self._record_refused("person.sign_in.refused", issuer, origin, error)
            raise
        sid = claims.get("sid")
        written = await self._begin_session(port, person, headers, origin, sid if isinstance(sid, str) else None, id_token)
        return SignedIn(written, attempt.return_to)

    async def _use_attempt(self, attempt: Attempt) -> None:
        state = digest("state", attempt.state)
        if not await run_in_thread(lambda: self._people.use_once(state, attempt.expires + ATTEMPT_SECONDS), _TIMEOUT):
            raise SignInError("This sign-in was used before. Sign in again.", detail="the state was replayed")

    async def _claims(self, provider: ProviderClient, code: str, nonce: str, verifier: str, port: Port) -> tuple[Mapping[str, object], str]:
        """Exchange a code. Returns the verified claims and the ID token. Raises SignInError."""
        from gateway.sign_in.oidc.tokens import verified_id_token  # with PyJWT, which is an extra

        token = await provider.exchange(code, verifier, redirect_uri(self._origin(port), provider.client.id))
        return await provider.verified(lambda keys: verified_id_token(token, provider.client, keys, nonce)), token

    async def back_channel_logout(self, token: str, origin: str) -> None:
        """End the sessions that an issuer's logout token names (OpenID Connect Back-Channel Logout 1.0). Raises SignInError."""
        from gateway.sign_in.oidc.tokens import unverified_issuer, verified_logout_token

        named = unverified_issuer(token)
        issuer = next((each.id for each in self._settings().issuers if each.issuer == named), None)
        try:
            if issuer is None:
                raise SignInError("The token's issuer is not known here.", detail="a logout token is of another issuer")
            provider = self._provider(issuer)
            logout = await provider.verified(lambda keys: verified_logout_token(token, provider.client, keys))
        except SignInError as error:
            await self._record_refused("person.logout.refused", issuer or "", origin, error)
            raise
        lifetime = self._settings().session.lifetime
        ended = await run_in_thread(lambda: self._people.log_out(logout, lifetime, time.time()), _TIMEOUT)
        await self._make_known()
        await self._record_ended("person.logout", ended, Actor("person", f"{issuer}:{logout.subject or ''}", None), origin)

    def actor(self, headers: Headers) -> Actor | None:
        """Return the person whose session on the admin port a request has, as an actor; None without one."""
        if self.origin("admin") is None:
            return None
        session = self.sessions("admin").read(headers, time.time())
        return None if session is None else session.person.actor

    def renewal(self, headers: Headers) -> dict[str, str]:
        """Return the header that records the use of the session on the admin port that a request has; empty without a use to record."""
        if self.origin("admin") is None:
            return {}
        sessions, now = self.sessions("admin"), time.time()
        session = sessions.read(headers, now)
        return {} if session is None else sessions.renewal(session, now)

    # People

    async def people(self, after: PersonId | None, limit: int, *, subject: str | None = None, team: str | None = None) -> list[KnownPerson]:
        """Return the first ``limit`` people after one (see ``PeopleStore.people``). Raises DatabaseUnavailableError."""
        return await run_in_thread(lambda: self._people.people(after, limit, time.time(), subject=subject, team=team), _TIMEOUT)

    async def end_sessions(self, person: str, actor: Actor, origin: str) -> int | None:
        """End all sessions of the person with this ID, and return their number; None if there is no such person."""
        found = await run_in_thread(lambda: self._people.end_sessions(person, time.time()), _TIMEOUT)
        if found is None:
            return None
        identity, ended = found
        await self._make_known()
        target = f"{identity.issuer} {identity.subject}".strip()
        await self._record(Entry("person.sessions.end", actor, origin, target, {"sessions": len(ended)}, None))
        return len(ended)

    # Sign-in links

    async def create_link(
        self, actor: Actor, origin: str, subject: str, role: Role | None, teams: Sequence[str], owned_teams: Sequence[str]
    ) -> list[str]:
        """Create a sign-in link for a person, and return its URLs. The link can be used once, at any of the URLs. Raises SignInError."""
        if not IDENTIFIER.fullmatch(subject):
            raise SignInError("user must be a name without spaces, of at most 255 characters")
        if unknown := {*teams, *owned_teams} - set(self._teams()):
            raise SignInError(f"there is no team {min(unknown)}")
        if role is None and not (teams or owned_teams):
            raise SignInError("a link needs a role or a team")
        token, now = secrets.token_urlsafe(32), time.time()
        all_teams = tuple(dict.fromkeys((*teams, *owned_teams)))
        link = SignInLink(subject, role, all_teams, tuple(dict.fromkeys(owned_teams)), str(actor), now + LINK_SECONDS)
        await run_in_thread(lambda: self._people.add_link(token, link, now), _TIMEOUT)
        granted = {"role": role, "teams": link.teams, "owned_teams": link.owned_teams, "seconds": LINK_SECONDS}
        await self._record(Entry("sign_in_link.create", actor, origin, f"{_LINK_PROVIDER}:{subject}", None, granted))
        ports: tuple[Port, ...] = ("data", "admin")
        return [f"{address}{LINK}?token={token}" for port in ports if (address := self.origin(port)) is not None]

    async def link(self, token: str) -> SignInLink:
        """Return the sign-in link of a token without using it. Raises SignInError."""
        found = await run_in_thread(lambda: self._people.link(token, time.time()), _TIMEOUT)
        if found is None:
            raise SignInError(_USED, status=403)
        return found

    async def use_link(self, port: Port, token: str, headers: Headers, origin: str) -> SignedIn:
        """Sign in the person of a sign-in link. Raises SignInError."""
        found = await run_in_thread(lambda: self._people.use_link(token, time.time()), _TIMEOUT)
        if found is None:
            error = SignInError(_USED, detail="a sign-in link was used before, has expired or does not exist", status=403)
            await self._record_refused("person.sign_in.refused", _LINK_PROVIDER, origin, error)
            raise error
        person = Person(LINK_ISSUER, _LINK_PROVIDER, found.subject, found.subject, found.role, found.teams, found.owned_teams)
        return SignedIn(await self._begin_session(port, person, headers, origin, None, None), "/")

    # Sessions

    async def _begin_session(self, port: Port, person: Person, headers: Headers, origin: str, sid: str | None, id_token: str | None) -> str:
        """Store a new session, and return the ``Set-Cookie`` value. Raises SignInError."""
        sessions, now = self.sessions(port), time.time()
        before = sessions.read(headers, now)
        session = new_session(person, now)
        written = sessions.write(session)
        new = NewSession(session, port, sessions.expires(session), sid, id_token)
        replaced = [] if before is None else [before.id]
        if not await run_in_thread(lambda: self._people.sign_in(new, replaced, now), _TIMEOUT):
            raise SignInError("You have signed out meanwhile. Sign in again.", detail="the provider's session has ended")
        if replaced:
            await self._make_known()
        granted = {"role": person.role, "teams": list(person.teams), "owned_teams": list(person.owned_teams), "port": port}
        await self._record(Entry("person.sign_in", person.actor, origin, person.actor.name, None, granted))
        return written

    async def sign_out(self, port: Port, headers: Headers, origin: str) -> str | None:
        """End the browser's sessions on both ports. Returns where the person ends the provider's own session, None if nowhere."""
        now = time.time()
        ports: tuple[Port, ...] = ("data", "admin")
        found = [self.sessions(each).read(headers, now) for each in ports if self.origin(each) is not None]
        if not (sessions := [each for each in found if each is not None]):
            return None
        ended = await run_in_thread(lambda: self._people.sign_out([each.id for each in sessions], now), _TIMEOUT)
        await self._make_known()
        await self._record_ended("person.sign_out", ended, sessions[0].person.actor, origin)
        return await self._end_session_url(port, sessions[0], ended)

    async def _end_session_url(self, port: Port, session: Session, ended: Sequence[EndedSession]) -> str | None:
        """Return the URL of the provider's logout; None without one, also while the provider is away: people are signed out here anyway."""
        provider = next((each.id for each in self._settings().issuers if each.issuer == session.person.issuer), None)
        if provider is None:
            return None
        hint = next((each.id_token for each in ended if each.id_token is not None), None)
        try:
            client = self._provider(provider)
            return end_session_url(client.client, await client.metadata(), hint, f"{self._origin(port)}/sign-in")
        except SignInError as error:
            _log.warning("the end of the session at %s is unknown: %s", provider, error.detail)
            return None

    async def _make_known(self) -> None:
        """Wait until this gateway's workers know the revoked sessions."""
        await self._revocations.refresh()
        await self._applied()

    # Parts

    def _origin(self, port: Port) -> str:
        origin = self.origin(port)
        assert origin is not None
        return origin

    def _provider(self, identity: str) -> ProviderClient:
        """Return the provider of an issuer's entry. Its metadata and keys are retained while its entry is unchanged. Raises SignInError."""
        client = client_of(self._entry(identity))
        known = self._providers.get(identity)
        if known is None or known.client != client:
            known = self._providers[identity] = ProviderClient(client)
        return known

    def _entry(self, identity: str) -> conf.SignInIssuer:
        found = next((issuer for issuer in self._settings().issuers if issuer.id == identity), None)
        if found is None:
            raise SignInError("There is no such identity provider here.", status=404)
        return found

    def _rules(self, identity: str) -> GrantRules:
        return grant_rules(self._entry(identity), self._settings())

    # Records

    async def _record(self, entry: Entry) -> None:
        """Record an entry. Raises AuditUnavailableError."""
        await asyncio.to_thread(self._audit.record, entry)

    async def _record_ended(self, action: str, ended: Sequence[EndedSession], actor: Actor, origin: str) -> None:
        if ended:
            await self._record(Entry(action, actor, origin, actor.name, {"sessions": len(ended)}, None))

    async def _record_refused(self, action: str, issuer: str, origin: str, error: SignInError) -> None:
        """Record and log a refused attempt. ``issuer`` is the ID of an entry, or text of the client."""
        issuer = issuer if issuer in {"", _LINK_PROVIDER, *(known for known, _ in self.issuers)} else "an unknown issuer"
        _log.info("a sign-in at %s from %s was refused: %s", issuer, origin, error.detail or error)
        entry = Entry(action, _UNAUTHENTICATED, origin, issuer, None, {"reason": error.detail or str(error)})
        await asyncio.to_thread(self._audit.record_refused, entry)
