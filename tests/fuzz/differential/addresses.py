"""Targets and hosts: the route that the gateway chooses and the host that it accepts, against urllib and Starlette."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from random import Random
from urllib.parse import unquote, urlsplit

from starlette.datastructures import URL

from gateway.api.media_urls import MediaHosts
from gateway.api.routes import ROUTES
from gateway.auth.catalog import Catalog, Target
from gateway.client.http.head import is_host
from gateway.snapshot.snapshot import Model
from tests.fuzz.differential.cases import Case, check, choose, mutated
from upstream.balancing.server import Server

_MOUNTS = ("/one", "/two/", "/v1")
_NO_SERVERS: Mapping[str, Server] = {}
_MEDIA = MediaHosts(["a.org", "*.b.org", "10.0.0.7", "c:81"])
_ALLOWED = ("a.org", "10.0.0.7", "c")


def _targets() -> Mapping[bytes, Target]:
    return Catalog((Model("one", (), mounts=_MOUNTS[:1]), Model("two", (), mounts=_MOUNTS[1:])), _NO_SERVERS).targets


def _paths() -> Mapping[str, str]:
    """Return the path of the route by each path that a client may use, with a mount and without, by docs/routes.md."""
    prefixes = ("", *(mount.rstrip("/") for mount in _MOUNTS))
    return {prefix + path: path for prefix in prefixes for path in ROUTES}


def compare_target(target: bytes, targets: Mapping[bytes, Target], paths: Mapping[str, str]) -> None:
    """Compare the route of a request target. The look-up is that of ``ClientConnection.request_received``."""
    found = targets.get(target) or targets.get(target.partition(b"?")[0])
    text = target.decode("latin-1")
    if not text.startswith("/") or text.startswith("//"):
        check(found is None, "a target that is no path has a route", target)
        return
    path = urlsplit(text).path
    if found is None:
        check(paths.get(path) is None or "#" in text, "a target without a route", target)  # a target has no fragment
        return
    one_slash = path.removesuffix("/")
    check(paths.get(one_slash) is not None, "urllib reads a path that has no route", target, path)
    check(unquote(path) == path, "an escaped path has a route", target)
    starlette = URL(scope={"type": "http", "scheme": "http", "server": ("h", 80), "path": path, "headers": []}).path
    # Two mounts may make one path. The longer rest decides then, as in the catalog.
    check(starlette.rstrip("/").endswith(found.route.path), "another route than Starlette's path", target, found.route.path)


def compare_host(host: bytes) -> None:
    """Compare a Host header."""
    text = host.decode("latin-1")
    try:
        parts = urlsplit(f"http://{text}/path")
        port = parts.port
    except ValueError:
        parts = None
    if not is_host(host):
        check(text not in _HOSTS, "a valid host is refused", host)
        return
    if parts is None:
        check(":" in text and not text.endswith("]") and int(text.rpartition(":")[2]) > 65535, "urllib reads no host", host)
        return
    name, _, digits = text.rpartition(":") if ":" in text.rpartition("]")[2] else (text, "", "")
    check(
        parts.path == "/path" and parts.username is None and not parts.query and not parts.fragment, "a host with other parts", host, parts
    )
    check(parts.hostname == name.strip("[]").lower(), "urllib reads another host", host, parts.hostname)
    check(port == (int(digits) if digits else None), "urllib reads another port", host, port)
    scope = {"type": "http", "scheme": "http", "server": ("h", 80), "path": "/path", "headers": [(b"host", host)]}
    url = URL(scope=scope)
    same = url.hostname == parts.hostname or text.endswith(":")  # Starlette ignores a host with an empty port
    check(same and url.path == "/path", "Starlette reads another URL", host, str(url))


def compare_media(text: str) -> None:
    """Compare a URL of media: an allowed URL has an allowed host for urllib."""
    if not _MEDIA.allows(text) or text[:5].lower() == "data:":
        return
    parts = urlsplit(text)
    host = parts.hostname or ""
    check(parts.scheme in ("http", "https") and parts.username is None, "another scheme or a user", text)
    check(host in _ALLOWED or host.endswith(".b.org"), "urllib reads a host that is not allowed", text, host)


# Generated addresses

_HOSTS = ("h", "h:80", "a.b", "[::1]", "[::1]:80", "10.0.0.1:8000", "a-b_c.d")
_PARTS = (
    "/v1",
    "/chat",
    "/completions",
    "/embeddings",
    "/",
    "//",
    "/.",
    "/..",
    "?",
    "?x=1",
    "#",
    ";x",
    "%2f",
    "/%76%31",
    "/one",
    "/two",
    "\\",
    "@",
    ":80",
    " ",
    "é",
)
_HOST_PARTS = (
    "h",
    "a",
    ".",
    ":",
    "80",
    "[",
    "]",
    "::1",
    "@",
    "/",
    "?",
    "#",
    "%41",
    "%",
    "\\",
    ",",
    " ",
    "é",
    "99999",
    "0",
    "-",
    "fe80::1%25x",
    "1.2",
)
_URL_PARTS = (
    "http://",
    "https://",
    "HTTP:",
    "//",
    "/",
    "\\",
    "a.org",
    "b.org",
    ".b.org",
    "x.b.org",
    "10.0.0.7",
    "c:81",
    "c",
    "@",
    ":",
    "?",
    "#",
    "%2e",
    "evil",
    "\t",
    "ａ.org",
    ".",
)


def _joined(random: Random, parts: tuple[str, ...], most: int) -> str:
    return "".join(choose(random, parts) for _ in range(1 + int(random.random() * most)))


@contextmanager
def opened() -> Iterator[Case]:
    """Provide the function for one case, with the routes of a catalog with mounts."""
    targets, paths = _targets(), _paths()
    known = [*targets, *(path.encode() for path in paths)]

    def case(random: Random) -> None:
        kind = random.random()
        if kind < 0.2:
            compare_target(_joined(random, _PARTS, 6).encode(), targets, paths)
        elif kind < 0.45:
            target = choose(random, known) + choose(random, (b"", b"?x=1", b"#x", b"/", b"//", b"%20", b";x", b"?", b"/.", b"\xc3\xa9"))
            compare_target(target if random.random() < 0.5 else mutated(random, target, b"/%?#.;A "), targets, paths)
        elif kind < 0.75:
            host = choose(random, _HOSTS) if random.random() < 0.3 else _joined(random, _HOST_PARTS, 5)
            compare_host(host.encode())
        else:
            compare_media(_joined(random, _URL_PARTS, 6))

    yield case
