"""The address of a Redis from its URL: ``redis://user:password@host:6379/0``, ``rediss://…``, ``unix:///run/redis.sock?db=0``.

The rule: no message repeats a part of the URL, because it may contain a password.
"""

from __future__ import annotations

from urllib.parse import parse_qs, unquote, urlsplit

from gateway.snapshot.snapshot import LimitsStore


def limits_store(url: str, *, refuses: bool = False) -> LimitsStore:
    """Return the store at a URL. Raises ValueError with a message for the operator."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError("the host or the port is not valid") from None
    user, password = (unquote(part) if part else None for part in (parts.username, parts.password))
    if parts.scheme == "unix":
        if not parts.path.strip("/"):
            raise ValueError("the path of the socket is missing: unix:///run/redis.sock")
        path, database = unquote(parts.path), _database(parse_qs(parts.query).get("db", [""])[0])
        return LimitsStore(path=path, user=user, password=password, database=database, refuses=refuses)
    if not host:
        raise ValueError("the host is missing: redis://localhost:6379/0")
    tls, database = parts.scheme == "rediss", _database(parts.path.strip("/"))
    return LimitsStore(host, port or 6379, tls=tls, user=user, password=password, database=database, refuses=refuses)


def _database(text: str) -> int:
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError("the path must be the number of a database, as in redis://localhost:6379/0")
    return int(text or 0)
