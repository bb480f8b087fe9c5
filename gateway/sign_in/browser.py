"""The values that a browser sends and stores: cookies, the origin of a request, and paths to return to. Pure.

The rules: a cookie that was sent twice is ignored, because a page of a neighboring host can add one. A request that changes something must
come from a page of this origin. A path to return to cannot leave this origin.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal
from urllib.parse import urlsplit

Port = Literal["data", "admin"]
Headers = Sequence[tuple[bytes, bytes]]

_SESSIONS: dict[Port, str] = {"data": "vllm-gateway-session", "admin": "vllm-gateway-admin-session"}
_ATTEMPTS: dict[Port, str] = {"data": "vllm-gateway-sign-in", "admin": "vllm-gateway-admin-sign-in"}
_LOCAL_PATH = re.compile(r"/(?![/\\])[!-\[\]-~]{0,1000}\Z")  # visible ASCII without a backslash, which browsers read as a slash


def session_cookie(port: Port, *, secure: bool) -> str:
    """Return the name of the session cookie. Cookies are not separated by port (RFC 6265, section 8.5), so the names are."""
    return f"__Host-{_SESSIONS[port]}" if secure else _SESSIONS[port]


def attempt_cookie(port: Port, *, secure: bool) -> str:
    """Return the name of the cookie that binds a sign-in to the browser that started it."""
    return f"__Host-{_ATTEMPTS[port]}" if secure else _ATTEMPTS[port]


def set_cookie(name: str, value: str, max_age: float) -> str:
    """Return a ``Set-Cookie`` value. A ``__Host-`` name needs Secure, Path=/ and no Domain (RFC 6265bis, section 4.1.3.2)."""
    secure = "; Secure" if name.startswith("__Host-") else ""
    return f"{name}={value}; Path=/; Max-Age={int(max_age)}; HttpOnly; SameSite=Lax{secure}"


def delete_cookie(name: str) -> str:
    """Return the ``Set-Cookie`` value that deletes a cookie."""
    return set_cookie(name, "", 0)


def cookie(headers: Headers, name: str) -> str | None:
    """Return the value of a cookie; None if it is missing or was sent more than once."""
    found = [value for header, text in headers if header == b"cookie" for key, value in _pairs(text.decode("latin-1")) if key == name]
    return found[0] if len(found) == 1 else None


def _pairs(text: str) -> Iterable[tuple[str, str]]:
    for part in text.split(";"):
        key, _, value = part.partition("=")
        yield key.strip(), value.strip()


def is_from_this_origin(headers: Headers, origin: str) -> bool:
    """Return whether a browser sent a request from a page of this origin.

    ``Origin`` (RFC 6454) and ``Sec-Fetch-Site`` (Fetch Metadata) cannot be set by a page. At least one is required, and each that is
    present must agree.
    """
    origins = [value for name, value in headers if name == b"origin"]
    sites = [value for name, value in headers if name == b"sec-fetch-site"]
    return bool(origins or sites) and all(each == origin.encode() for each in origins) and all(each == b"same-origin" for each in sites)


def is_for(headers: Headers, origin: str) -> bool:
    """Return whether ``Host`` is the host of an origin."""
    hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
    return hosts == [urlsplit(origin).netloc.lower()]


def local_path(text: str | None) -> str:
    """Return a path to return to, with its query; ``/`` for everything that is not certainly a path of this origin."""
    return text if text is not None and _LOCAL_PATH.match(text) else "/"
