"""The paths of self-service. A worker passes the requests for them to control."""

from __future__ import annotations

PREFIX = "/portal/v1"
ME, KEYS, USAGE, LIMITS, OPENAPI = (f"{PREFIX}/{name}" for name in ("me", "keys", "usage", "limits", "openapi.json"))
TEAMS = f"{PREFIX}/teams"
KEY_OPERATIONS = ("rotate", "revoke")
"""The operations on a key."""
OF_TEAM = ("keys", "members", "usage", "limits")
"""The lists and reports for the owner of a team."""
FOR_KEYS = frozenset({USAGE, LIMITS})
"""The reports that a key reads about itself, without a session."""
_EXACT = frozenset({ME, KEYS, USAGE, LIMITS, OPENAPI})


def endpoint_of(path: str) -> str | None:
    """Return the route of a path as metrics show it; None if it is not of self-service. IDs may contain slashes."""
    if path in _EXACT:
        return path
    parent, _, last = path.rpartition("/")
    if path.startswith(f"{KEYS}/"):
        return f"{KEYS}/{{id}}/{last}" if last in KEY_OPERATIONS and parent != KEYS else f"{KEYS}/{{id}}"
    return f"{TEAMS}/{{team}}/{last}" if parent.startswith(f"{TEAMS}/") and last in OF_TEAM else None
