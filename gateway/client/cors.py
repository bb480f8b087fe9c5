"""Which browsers' pages may read answers: the headers of the Fetch standard, section 3.2.

The rule: an origin that the configuration does not name gets none of them. Credentials are never allowed; a page
sends its key in a header that it knows.
"""

from __future__ import annotations

import re

_LIMITS = (f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset"))
_EXPOSED = ", ".join(("x-request-id", "request-id", "retry-after", "x-should-retry", "x-vllm-gateway-fallback", *_LIMITS))
_METHODS = "GET, POST"
_MAX_AGE = "600"  # seconds for which a browser may keep the answer to a preflight
_FIELD_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2048}\Z")


class Cors:
    """The origins of one snapshot; ``*`` among them allows every one."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins)

    def headers(self, origin: str | None) -> dict[str, str]:
        """What an answer to a page of this origin carries; empty when it is not allowed, or not from a page."""
        if origin is None or not self._origins:
            return {}
        if "*" in self._origins:
            return {"access-control-allow-origin": "*", "access-control-expose-headers": _EXPOSED}
        if origin not in self._origins:
            return {"vary": "Origin"}
        return {"access-control-allow-origin": origin, "access-control-expose-headers": _EXPOSED, "vary": "Origin"}

    def preflight(self, origin: str | None, wanted_headers: str | None) -> dict[str, str] | None:
        """The answer to a preflight; None when the origin is not allowed. The headers that a page asks for are allowed."""
        allowed = self.headers(origin)
        if "access-control-allow-origin" not in allowed:
            return None
        headers = {"access-control-allow-methods": _METHODS, "access-control-max-age": _MAX_AGE}
        if wanted_headers is not None and _FIELD_NAMES.match(wanted_headers):
            headers["access-control-allow-headers"] = wanted_headers
        return allowed | headers
