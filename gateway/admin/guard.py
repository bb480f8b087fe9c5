"""Access control of the admin port: bearer tokens if they are configured, and no web page of another site.

The rules: /livez and /readyz need no token, because they only show whether the gateway is ready and what kind of part is down. The pages of
the console need none, because they contain no data. Operations always need a token, and are refused for web pages, except for those of this
port. A security-relevant header must not be duplicated, so that a proxy cannot have evaluated another value. The admin socket needs none of
this, because the kernel identifies its clients. The role that a route requires is checked where it is routed (``app``); the guard only
identifies the client.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.actor import Actor, Requester, Role
from gateway.access.permissions import OPEN, PERMISSIONS
from gateway.access.tokens import Token, digest_of, presented_token
from gateway.api.accept_header import prefers_html
from gateway.audit.entry import Audit, refused_request
from gateway.config.models import Admin
from gateway.console import documents, pages
from gateway.sign_in.browser import is_for, is_from_this_origin
from gateway.system.addresses import is_loopback, parsed_address

if TYPE_CHECKING:
    from gateway.sign_in.service import SignIn

OPEN_PATHS = frozenset(path for (_, path), permission in PERMISSIONS.items() if permission == OPEN) | pages.PAGES.keys()
READING = frozenset({"GET", "HEAD"})
_PAGES = (b"origin", b"sec-fetch-site")
"""Headers that only browsers send, with the requests of a web page (Fetch Standard; Fetch Metadata Request Headers)."""
_ONCE = (b"host", b"authorization")
"""Headers that must not be duplicated (RFC 9112, section 3.2, for Host; RFC 9110, section 5.3, for the other)."""
TWICE = "the header host or authorization was sent more than once"
_PORT = re.compile(r":\d*\Z", re.ASCII)
_LOOPBACK = Actor("loopback", "", Role.VIEWER)
_UNAUTHENTICATED = Actor("unauthenticated", "", None)


class Guard:
    """Wrap the admin port's application. ``settings`` returns the current ones, and ``host`` is the address on which the port listens.

    ``people`` knows the people who have signed in, None without a sign-in.
    """

    def __init__(self, application: ASGIApp, settings: Callable[[], Admin], host: str, audit: Audit, people: SignIn | None = None) -> None:
        self._application = application
        self._settings = settings
        self._local = is_loopback(host)
        self._audit = audit
        self._people = people
        self._read: Admin | None = None
        self._tokens: tuple[Token, ...] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _repeats(scope["headers"]):
            await _TWICE(scope, receive, send)
            return
        headers: Mapping[bytes, bytes] = dict(scope["headers"])
        actor = self._actor(scope, headers)
        refusal = self._refusal(scope, headers, actor)
        requester = Requester(actor or _UNAUTHENTICATED, (scope["client"] or ("nowhere",))[0])
        if refusal is not None and (scope["method"] not in READING or b"authorization" in headers):
            await asyncio.to_thread(self._audit.record_refused, refused_request(requester, scope["method"], scope["path"], refusal.reason))
        identify = functools.partial(self._actor, scope, headers)  # for a long response: the token may be revoked meanwhile
        scope["state"] = {**scope.get("state", {}), "requester": requester, "identify": identify}
        await (refusal.response if refusal is not None else self._application)(scope, receive, send)

    def _actor(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Actor | None:
        """Return the client of a request as it is known now."""
        return self._person(scope, headers) or self._identified(headers)

    def _identified(self, headers: Mapping[bytes, bytes]) -> Actor | None:
        """Return the client. None: it has no valid token although one is required."""
        if not (tokens := self._current_tokens()):
            return _LOOPBACK
        token = presented_token(headers.get(b"authorization", b""), tokens)
        return None if token is None or token.has_expired(datetime.now(UTC)) else token.actor

    def _person(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Actor | None:
        """Return the person whose session a request without a token has. A change must come from a page of this port."""
        if self._people is None or b"authorization" in headers:
            return None
        actor, origin = self._people.actor(scope["headers"]), self._people.origin("admin")
        if actor is None or origin is None or not is_for(scope["headers"], origin):
            return None
        return actor if scope["method"] in READING or is_from_this_origin(scope["headers"], origin) else None

    def _current_tokens(self) -> tuple[Token, ...]:
        """Return the tokens of the settings, which a reload may have changed."""
        settings = self._settings()
        if settings is not self._read:
            self._read, self._tokens = settings, tuple(_configured(settings))
        return self._tokens

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes], actor: Actor | None) -> _Refusal | None:
        if scope["method"] not in READING:
            return self._refusal_to_act(headers, actor)
        is_open = scope["path"] in OPEN_PATHS or scope["path"].startswith(documents.PREFIX)
        return None if is_open else self._refusal_to_show(headers, actor)

    def _refusal_to_act(self, headers: Mapping[bytes, bytes], actor: Actor | None) -> _Refusal | None:
        if actor is _LOOPBACK:
            return _NO_TOKEN
        if any(name in headers for name in _PAGES) and not (actor is not None and (actor.kind == "person" or _is_own_page(headers))):
            return _NO_PAGES
        return _UNAUTHORIZED if actor is None else None

    def _refusal_to_show(self, headers: Mapping[bytes, bytes], actor: Actor | None) -> _Refusal | None:
        if actor is None:
            is_browser = prefers_html(headers.get(b"accept", b"").decode("latin-1"))
            return _ENTER if is_browser else _UNAUTHORIZED
        if actor is not _LOOPBACK:
            return None
        return None if not self._local or _is_local(headers.get(b"host", b"").decode("latin-1")) else _MISDIRECTED


def _configured(settings: Admin) -> Iterable[Token]:
    """Yield the tokens of the settings. The one of ``token`` has no name."""
    if settings.token is not None:
        yield Token("", digest_of(settings.token.get_secret_value().encode()), Role.ADMIN)
    for each in settings.tokens:
        yield Token(each.name, bytes.fromhex(each.hash.removeprefix("sha256:")), each.role, each.expires)


def _repeats(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a security-relevant header is duplicated."""
    deciding = [name for name, _ in headers if name in _ONCE]
    return len(deciding) != len(set(deciding))


def _is_local(host: str) -> bool:
    """Return whether a Host is an address, localhost or missing.

    With DNS rebinding a page of another site can only use its own host name.
    """
    name = _PORT.sub("", host)
    return name.lower() in ("", "localhost") or parsed_address(name.removeprefix("[").removesuffix("]")) is not None


def _is_own_page(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a page of this port sent the request with the token that it holds.

    A browser says so in ``Sec-Fetch-Site``, but only over HTTPS and on localhost (Fetch Metadata, section 2). Without it the origin must be
    the host of the request.
    """
    if (site := headers.get(b"sec-fetch-site")) is not None:
        return site == b"same-origin"
    return headers[b"origin"].partition(b"://")[2] == headers.get(b"host", b"")


class _Refusal:
    """A response that refuses a request, with its reason for the audit log."""

    def __init__(self, reason: str, response: Response) -> None:
        self.reason = reason
        self.response = response


_CHALLENGE = {"www-authenticate": "Bearer", "vary": "accept"}
_TOKEN_REQUIRED = "the admin port requires its token"  # noqa: S105  a message
_TWICE = JSONResponse({"error": TWICE}, 400)
_ENTER = _Refusal(_TOKEN_REQUIRED, RedirectResponse("/console", 303, {"vary": "accept", "cache-control": "no-store"}))
_UNAUTHORIZED = _Refusal(_TOKEN_REQUIRED, JSONResponse({"error": _TOKEN_REQUIRED}, 401, _CHALLENGE))


def _explained(message: str, status: int) -> _Refusal:
    return _Refusal(message, JSONResponse({"error": message}, status))


_NO_TOKEN = _explained(
    "operations over the admin port require server.admin.token; on the gateway's own machine, commands use its socket", 403
)
_NO_PAGES = _explained("operations are refused for web pages", 403)
_MISDIRECTED = _explained("use the address of the admin port, or localhost", 421)
