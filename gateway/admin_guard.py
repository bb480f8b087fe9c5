"""Who may look at the admin port: a bearer token where one is configured, and no page of another site.

The rule: the probes of a supervisor stay open, since they say nothing but yes or no. The admin socket needs none of this:
the kernel says who is at its other end.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from hashlib import sha256
from ipaddress import ip_address

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
OPEN = frozenset({"/livez", "/readyz"})
_PORT = re.compile(r":\d*\Z", re.ASCII)


class Guard:
    """The admin port's application behind its checks. ``host`` is the address that the port listens on."""

    def __init__(self, application: ASGIApp, token: str | None, host: str) -> None:
        self._application = application
        self._digest = None if token is None else _digest(token.encode())
        self._local = host in LOCAL_HOSTS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = None if scope["path"] in OPEN else self._refusal(scope["headers"])
        await (refused or self._application)(scope, receive, send)

    def _refusal(self, headers: Iterable[tuple[bytes, bytes]]) -> Response | None:
        named = {name: value for name, value in headers if name in (b"authorization", b"host")}
        if self._digest is not None:
            return None if self._shown(named.get(b"authorization", b"")) else _UNAUTHORIZED
        return None if not self._local or _is_local(named.get(b"host", b"").decode("latin-1")) else _MISDIRECTED

    def _shown(self, authorization: bytes) -> bool:
        """Whether the token was shown. What is compared are digests, in a time that does not depend on them."""
        scheme, _, token = authorization.partition(b" ")
        assert self._digest is not None
        return scheme.lower() == b"bearer" and hmac.compare_digest(_digest(token.strip(b" ")), self._digest)


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


_UNAUTHORIZED = JSONResponse({"error": "the admin port asks for its token"}, 401, {"www-authenticate": "Bearer"})
_MISDIRECTED = JSONResponse({"error": "the admin port is asked by its address, or as localhost"}, 421)
