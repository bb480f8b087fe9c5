"""Access control of the admin port: a bearer token if one is configured, and no web page of another site.

The rules: /livez and /readyz need no token, because they only show whether the gateway is ready and what kind of part is down. Operations
always need the token, and are refused for web pages. A security-relevant header must not be duplicated, so that a proxy cannot have
evaluated another value. The admin socket needs none of this, because the kernel identifies its clients.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from hashlib import sha256
from ipaddress import ip_address

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.admin import status_page
from gateway.api.accept import prefers_html
from gateway.client.addresses import is_loopback

OPEN = frozenset({"/livez", "/readyz"})
READING = frozenset({"GET", "HEAD"})
_PAGES = (b"origin", b"sec-fetch-site")
"""Headers that only browsers send, with the requests of a web page (Fetch Standard; Fetch Metadata Request Headers)."""
_ONCE = (b"host", b"authorization")
"""Headers that must not be duplicated (RFC 9112, section 3.2, for Host; RFC 9110, section 5.3, for the other)."""
TWICE = "the header host or authorization was sent more than once"
_PORT = re.compile(r":\d*\Z", re.ASCII)


class Guard:
    """Wrap the admin port's application. ``host`` is the address on which the port listens."""

    def __init__(self, application: ASGIApp, token: str | None, host: str) -> None:
        self._application = application
        self._digest = None if token is None else _digest(token.encode())
        self._local = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._refusal(scope) or self._application)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        if _repeats(scope["headers"]):
            return _TWICE
        if scope["method"] not in READING:
            scope["state"] = {**scope.get("state", {}), "client_name": f"the token, from {(scope['client'] or ('nowhere',))[0]}"}
            return self._refusal_to_act(scope["headers"])
        return None if scope["path"] in OPEN else self._refusal_to_show(scope["headers"])

    def _refusal_to_act(self, headers: Iterable[tuple[bytes, bytes]]) -> Response | None:
        named = dict(headers)
        if self._digest is None:
            return _NO_TOKEN
        if any(name in named for name in _PAGES):
            return _NO_PAGES
        return None if self._is_valid(named.get(b"authorization", b"")) else _UNAUTHORIZED

    def _refusal_to_show(self, headers: Iterable[tuple[bytes, bytes]]) -> Response | None:
        named = dict(headers)
        if self._digest is not None:
            if self._is_valid(named.get(b"authorization", b"")):
                return None
            return status_page.token_page(_CHALLENGE) if prefers_html(named.get(b"accept", b"").decode("latin-1")) else _UNAUTHORIZED
        return None if not self._local or _is_local(named.get(b"host", b"").decode("latin-1")) else _MISDIRECTED

    def _is_valid(self, authorization: bytes) -> bool:
        """Return whether the token is valid. Digests are compared in constant time."""
        scheme, _, token = authorization.partition(b" ")
        assert self._digest is not None
        return scheme.lower() == b"bearer" and hmac.compare_digest(_digest(token.strip(b" ")), self._digest)


def _repeats(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a security-relevant header is duplicated."""
    deciding = [name for name, _ in headers if name in _ONCE]
    return len(deciding) != len(set(deciding))


def _digest(token: bytes) -> bytes:
    return sha256(token).digest()


def _is_local(host: str) -> bool:
    """Return whether a Host is an address, localhost or missing.

    With DNS rebinding a page of another site can only use its own host name.
    """
    name = _PORT.sub("", host)
    if name.lower() in ("", "localhost"):
        return True
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


_TWICE = JSONResponse({"error": TWICE}, 400)
_CHALLENGE = {"www-authenticate": "Bearer", "vary": "accept"}
_UNAUTHORIZED = JSONResponse({"error": "the admin port requires its token"}, 401, _CHALLENGE)
_NO_TOKEN = JSONResponse(
    {"error": "operations over the admin port require server.admin.token; on the gateway's own machine, commands use its socket"},
    403,
)
_NO_PAGES = JSONResponse({"error": "operations are refused for web pages"}, 403)
_MISDIRECTED = JSONResponse({"error": "use the address of the admin port, or localhost"}, 421)
