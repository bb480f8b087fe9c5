"""Which web pages may read responses: the CORS headers of the Fetch standard, section 3.2.

The rule: responses to an origin that is not configured have none of these headers. Credentials are never allowed: a page sends its API key
in a header.
"""

from __future__ import annotations

import re

_EXPOSED = "*"  # all headers: budgets have headers that are named after their windows
_METHODS = "GET, POST"
_MAX_AGE = "600"  # seconds for which a browser may cache the response to a preflight
_FIELD_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2048}\Z")


class Cors:
    """The allowed origins of one snapshot. ``*`` allows every origin."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins)

    def headers(self, origin: str | None) -> dict[str, str]:
        """Return the headers of a response to a page of this origin. None: the request has no Origin header."""
        if not self._origins:
            return {}
        if "*" in self._origins:
            return {} if origin is None else {"access-control-allow-origin": "*", "access-control-expose-headers": _EXPOSED}
        if origin not in self._origins:
            return {"vary": "Origin"}
        return {"access-control-allow-origin": origin, "access-control-expose-headers": _EXPOSED, "vary": "Origin"}

    def lines(self, origin: bytes) -> bytes:
        """Return the headers as lines, each with its CRLF."""
        headers = self.headers(origin.decode("latin-1"))
        return b"".join(b"%b: %b\r\n" % (name.encode(), value.encode("latin-1")) for name, value in headers.items())

    def preflight(self, origin: str | None, wanted_headers: str | None) -> dict[str, str] | None:
        """Return the headers of the response to a preflight, or None if the origin is not allowed.

        All requested header names are allowed.
        """
        allowed = self.headers(origin)
        if "access-control-allow-origin" not in allowed:
            return None
        headers = {"access-control-allow-methods": _METHODS, "access-control-max-age": _MAX_AGE}
        if wanted_headers is not None and _FIELD_NAMES.match(wanted_headers):
            headers["access-control-allow-headers"] = wanted_headers
        return allowed | headers
