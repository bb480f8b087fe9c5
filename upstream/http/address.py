"""The address of a server: one frozen value for TCP, TLS and unix sockets.

Owns the parsing of a server's URL. Addresses come from the configuration or from the launcher, never from a request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Address:
    """An address to connect to. ``uds`` (a path) takes precedence over ``host`` and ``port``. ``prefix`` precedes every path."""

    host: str = "127.0.0.1"
    port: int = 0
    tls: bool = False
    uds: str | None = None
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse ``http://host:port[/prefix]``, ``https://…`` or ``unix:/path/to.sock``.

        Raises ValueError, with a message for the operator, for anything else: another scheme, no host, credentials, a query or a fragment.
        """
        if url.startswith("unix:"):
            path = "/" + url.removeprefix("unix:").lstrip("/")
            if path == "/":
                raise ValueError("unix: needs the path of a socket, e.g. unix:/run/vllm.sock")
            return cls(host="localhost", uds=path)
        if not re.fullmatch("[!-~]*", url):
            raise ValueError("a server's URL consists of visible ASCII characters")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise ValueError("a server's URL starts with http://, https:// or unix:")
        if not parts.hostname:
            raise ValueError("the URL names no host")
        try:
            parts.hostname.encode("idna")
        except UnicodeError:
            raise ValueError("the URL's host is no valid name") from None
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("a server's URL has no credentials, query or fragment; use api_key for its key")
        tls = parts.scheme == "https"
        return cls(host=parts.hostname, port=parts.port or (443 if tls else 80), tls=tls, prefix=parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def authority(self) -> str:
        """The value of the Host header (RFC 9110, section 7.2)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.uds or self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @property
    def base_url(self) -> str:
        """The URL for httpx2; a unix socket also needs a transport."""
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"

    def __str__(self) -> str:
        return f"unix:{self.uds}" if self.uds else self.base_url
