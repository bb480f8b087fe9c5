"""An identity provider that publishes its keys over HTTP or HTTPS and signs tokens."""

from __future__ import annotations

import base64
import hashlib
import json
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import get_default_algorithms

from tests.support.http_server import threaded

AUDIENCE = "vllm-gateway"
_MAKE = {
    "RS256": lambda: rsa.generate_private_key(65537, 2048),
    "PS256": lambda: rsa.generate_private_key(65537, 2048),
    "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "ES384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate,
}


class SigningKey:
    """A key pair with an ID."""

    def __init__(self, algorithm: str, kid: str | None = None) -> None:
        self.algorithm = algorithm
        self.kid = kid or f"{algorithm.lower()}-{time.monotonic_ns()}"
        self.private: Any = _MAKE[algorithm]()

    @property
    def pem(self) -> bytes:
        """The public key as PEM, which an attacker would try to use as a shared secret."""
        kind = serialization.PublicFormat.SubjectPublicKeyInfo
        return bytes(self.private.public_key().public_bytes(serialization.Encoding.PEM, kind))

    def jwk(self, **more: Any) -> dict[str, Any]:
        """Return the public key as an entry of a JWKS."""
        public = get_default_algorithms()[self.algorithm].to_jwk(self.private.public_key(), as_dict=True)
        return {**public, "kid": self.kid, "use": "sig", **more}


class Issuer:
    """An issuer. ``name`` is the ``iss`` claim; ``published`` are the entries of its JWKS."""

    def __init__(self, name: str = "https://login.example.com/", *keys: SigningKey) -> None:
        self.name = name
        self.keys = list(keys) or [SigningKey("ES256")]
        self.published = [key.jwk() for key in self.keys]

    @property
    def document(self) -> bytes:
        return json.dumps({"keys": self.published}).encode()

    def token(self, key: SigningKey | None = None, *, headers: dict[str, Any] | None = None, **claims: Any) -> str:
        """Return a signed token. Claims that are None are omitted."""
        key = key or self.keys[0]
        usual = {"iss": self.name, "aud": AUDIENCE, "sub": "alice", "exp": int(time.time()) + 86400}
        present = {name: value for name, value in (usual | claims).items() if value is not None}
        return jwt.encode(present, key.private, key.algorithm, headers={"kid": key.kid} if headers is None else headers)


def part(value: Any) -> str:
    """Return an encoded part of a token. ``value`` is JSON, or bytes that are used unchanged."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class Published:
    """The issuer's JWKS on a loopback port. ``status`` is the status of its responses; 0: close without a response."""

    def __init__(self, issuer: Issuer) -> None:
        self.issuer = issuer
        self.status = 200
        self.responses: list[tuple[int, float]] = []
        """Status and monotonic time of each response."""
        self.url = ""

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        document = self.issuer.document
        tag = f'"{hashlib.sha256(document).hexdigest()}"'
        unchanged = self.status == 200 and handler.headers.get("if-none-match") == tag
        status = 304 if unchanged else self.status
        self.responses.append((status, time.monotonic()))
        if not status:
            handler.close_connection = True
            return
        body = b"" if unchanged else document if status == 200 else b"no"
        handler.send_response(status)
        handler.send_header("etag", tag)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


@contextmanager
def published(issuer: Issuer, tls: tuple[Path, Path] | None = None) -> Iterator[Published]:
    """Serve the issuer's JWKS. ``tls``: the files of a certificate for localhost and of its key."""
    shown = Published(issuer)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            shown.respond(self)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    shown.url = f"{'http' if tls is None else 'https'}://localhost:{server.server_port}/keys"
    with threaded(server):
        yield shown
