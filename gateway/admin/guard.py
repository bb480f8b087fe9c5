"""Who may use the admin port: a bearer token where one is configured, and no page of another site.

The rules: the probes of a supervisor stay open, since they show whether traffic may come and what kind of part is down, and no more;
nothing is done without the token, whatever may be seen without one, and nothing at all for a page in a browser; a header that decides
comes once, so that whatever stands in front cannot have gone by another one. The admin socket needs none of this: the kernel says who is
at its other end.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from hashlib import sha256
from ipaddress import ip_address

from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.admin import status_page
from gateway.api.accept import prefers_html
from gateway.client.addresses import is_loopback

OPEN = frozenset({"/livez", "/readyz"})
READING = frozenset({"GET", "HEAD"})
_PAGES = (b"origin", b"sec-fetch-site")
"""What browsers send with what a page asks for (Fetch Standard; Fetch Metadata Request Headers), and nobody else."""
_ONCE = (b"host", b"authorization")
"""What decides here (RFC 9112, section 3.2, for Host; RFC 9110, section 5.3, for the other)."""
TWICE = "the header host or authorization was sent more than once"
_PORT = re.compile(r":\d*\Z", re.ASCII)


class Guard:
    """The admin port's application behind its checks. ``host`` is the address that the port listens on."""

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
            scope["state"] = {**scope.get("state", {}), "who": f"the token, from {(scope['client'] or ('nowhere',))[0]}"}
            return self._refusal_to_act(scope["headers"])
        return None if scope["path"] in OPEN else self._refusal_to_show(scope["headers"])

    def _refusal_to_act(self, headers: Iterable[tuple[bytes, bytes]]) -> Response | None:
        named = dict(headers)
        if self._digest is None:
            return _NO_TOKEN
        if any(name in named for name in _PAGES):
            return _NO_PAGES
        return None if self._shown(named.get(b"authorization", b"")) else _UNAUTHORIZED

    def _refusal_to_show(self, headers: Iterable[tuple[bytes, bytes]]) -> Response | None:
        named = dict(headers)
        if self._digest is not None:
            if self._shown(named.get(b"authorization", b"")):
                return None
            return _UNAUTHORIZED_PAGE if prefers_html(named.get(b"accept", b"").decode("latin-1")) else _UNAUTHORIZED
        return None if not self._local or _is_local(named.get(b"host", b"").decode("latin-1")) else _MISDIRECTED

    def _shown(self, authorization: bytes) -> bool:
        """Whether the token was shown. What is compared are digests, in a time that does not depend on them."""
        scheme, _, token = authorization.partition(b" ")
        assert self._digest is not None
        return scheme.lower() == b"bearer" and hmac.compare_digest(_digest(token.strip(b" ")), self._digest)


def _repeats(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a header that decides comes more than once."""
    deciding = [name for name, _ in headers if name in _ONCE]
    return len(deciding) != len(set(deciding))


def _digest(token: bytes) -> bytes:
    return sha256(token).digest()


def _is_local(host: str) -> bool:
    """Whether a Host is an address, localhost, or none. A page of another site can only have its own name lead here (DNS rebinding)."""
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
_UNAUTHORIZED = JSONResponse({"error": "the admin port asks for its token"}, 401, _CHALLENGE)
_UNAUTHORIZED_PAGE = HTMLResponse(status_page.token_page(), 401, _CHALLENGE | status_page.HEADERS)
_NO_TOKEN = JSONResponse(
    {"error": "nothing is done over the admin port without a server.admin.token; on the gateway's own machine the commands use its socket"},
    403,
)
_NO_PAGES = JSONResponse({"error": "nothing is done for a page in a browser"}, 403)
_MISDIRECTED = JSONResponse({"error": "the admin port is asked by its address, or as localhost"}, 421)
