"""The address of a Redis from its URL: ``redis://user:password@host:6379/0``, ``rediss://…``, ``unix:///run/redis.sock?db=0``.

There may be several hosts (``redis://a:6379,b:6379/0``), and Sentinels (``redis+sentinel://a:26379,b:26379/name/0``). The rule: no message
repeats a part of the URL, because it may contain a password.
"""

from __future__ import annotations

from urllib.parse import parse_qs, unquote, urlsplit

from gateway.snapshot.snapshot import LimitsStore

SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "unix")
_PORT, _SENTINEL_PORT = 6379, 26379


def limits_store(url: str, *, refuses: bool = False) -> LimitsStore:
    """Return the store at a URL with one of the schemes. Raises ValueError with a message for the operator."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("the host or the port is not valid") from None
    user, password = (unquote(part) if part else None for part in (parts.username, parts.password))
    if parts.scheme == "unix":
        if not parts.path.strip("/"):
            raise ValueError("the path of the socket is missing: unix:///run/redis.sock")
        path, database = unquote(parts.path), _database(parse_qs(parts.query).get("db", [""])[0])
        return LimitsStore(path=path, user=user, password=password, database=database, refuses=refuses)
    protocol, _, sentinel = parts.scheme.partition("+")
    hosts = _hosts(parts.netloc.rpartition("@")[2], _SENTINEL_PORT if sentinel else _PORT)
    name, path = None, parts.path.strip("/")
    if sentinel:
        name, _, path = parts.path.removeprefix("/").partition("/")
        if not name:
            raise ValueError("the name of the primary is missing: redis+sentinel://localhost:26379/mymaster/0")
    primary, database, tls = unquote(name) if name else None, _database(path.strip("/")), protocol == "rediss"
    return LimitsStore(hosts, primary, tls=tls, user=user, password=password, database=database, refuses=refuses)


def _hosts(text: str, default_port: int) -> tuple[tuple[str, int], ...]:
    """Return the hosts and ports of a list. Raises ValueError."""
    found: list[tuple[str, int]] = []
    for each in text.split(","):
        try:
            parts = urlsplit(f"//{each}")
            host, port = parts.hostname, parts.port
        except ValueError:
            raise ValueError("the host or the port is not valid") from None
        if not host:
            raise ValueError("the host is missing: redis://localhost:6379/0")
        found.append((host, port or default_port))
    return tuple(found)


def _database(text: str) -> int:
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError("the path must be the number of a database, as in redis://localhost:6379/0")
    return int(text or 0)
