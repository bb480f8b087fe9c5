"""An OpenID Connect issuer on a loopback port, which signs in whom a test names, and which can be hostile in every step."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote_plus, urlencode, urlsplit

import jwt

from tests.support.http_server import threaded
from tests.support.issuer import SigningKey

CLIENT, SECRET = "vllm-gateway", "the secret/of the client"
LOGOUT_EVENT = "http://schemas.openid.net/event/backchannel-logout"


@dataclass
class Grant:
    """A code that was issued: the parameters of its authorization request, and the claims of its ID token."""

    parameters: dict[str, str]
    claims: dict[str, Any]
    used: bool = False


@dataclass
class OidcIssuer:
    """The issuer.

    ``sends_issuer``: responses have ``iss`` (RFC 9207). ``announces_issuer``: the metadata says so. ``metadata`` replaces fields of the
    metadata. ``sign`` makes an ID token of claims. ``token_status`` is the status of token responses. ``hostile`` are handlers that respond
    instead, by path. ``requests`` are the paths that were requested.
    """

    keys: list[SigningKey] = field(default_factory=lambda: [SigningKey("ES256", "es")])
    published: list[dict[str, Any]] = field(default_factory=list)
    sends_issuer: bool = True
    announces_issuer: bool = True
    metadata: dict[str, Any] = field(default_factory=dict)
    sign: Callable[[dict[str, Any]], str] | None = None
    token_status: int = 200
    down: bool = False
    hostile: dict[str, Callable[[BaseHTTPRequestHandler], None]] = field(default_factory=dict)
    url: str = ""
    codes: dict[str, Grant] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    exchanges: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.published = [key.jwk() for key in self.keys]

    # For the person at the issuer

    def approve(self, authorization: str, **claims: Any) -> str:
        """Sign a person in at an authorization URL. Returns the URL to which the browser is sent."""
        parameters = dict(parse_qsl(urlsplit(authorization).query))
        code = secrets.token_urlsafe(16)
        self.codes[code] = Grant(parameters, claims)
        response = {"code": code, "state": parameters["state"], **({"iss": self.url} if self.sends_issuer else {})}
        return f"{parameters['redirect_uri']}?{urlencode(response)}"

    def claims(self, grant: Grant) -> dict[str, Any]:
        """Return the claims of an ID token. A claim that is None is omitted."""
        now = int(time.time())
        usual = {"iss": self.url, "aud": CLIENT, "sub": "alice", "iat": now, "exp": now + 300, "nonce": grant.parameters.get("nonce")}
        return {name: value for name, value in (usual | grant.claims).items() if value is not None}

    def signed(self, claims: dict[str, Any], key: SigningKey | None = None, **headers: Any) -> str:
        """Return a signed token."""
        key = key or self.keys[0]
        return jwt.encode(claims, key.private, key.algorithm, headers={"kid": key.kid, **headers})

    def logout_token(self, **claims: Any) -> str:
        """Return a logout token. A claim that is None is omitted."""
        now, identity = int(time.time()), secrets.token_urlsafe(8)
        usual = {"iss": self.url, "aud": CLIENT, "iat": now, "exp": now + 120, "jti": identity, "events": {LOGOUT_EVENT: {}}}
        present = {name: value for name, value in (usual | claims).items() if value is not None}
        return self.signed(present, typ="logout+jwt")

    # For the gateway

    def respond(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, dict[str, Any]]:
        self.requests.append(path)
        if self.down:
            return 503, {}
        match method, path:
            case "GET", "/.well-known/openid-configuration":
                return 200, self._metadata()
            case "GET", "/keys":
                return 200, {"keys": self.published}
            case "POST", "/token":
                return self._token(headers, dict(parse_qsl(body.decode())))
            case _:
                return 404, {}

    def _metadata(self) -> dict[str, Any]:
        return {
            "issuer": self.url,
            "authorization_endpoint": f"{self.url}/authorize?tenant=1",
            "token_endpoint": f"{self.url}/token",
            "jwks_uri": f"{self.url}/keys",
            "end_session_endpoint": f"{self.url}/logout",
            "response_types_supported": ["code"],
            "code_challenge_methods_supported": ["S256"],
            "authorization_response_iss_parameter_supported": self.announces_issuer,
        } | self.metadata

    def _token(self, headers: Any, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        self.exchanges.append(form)
        if self.token_status != 200:
            return self.token_status, {"error": "server_error"}
        if not self._is_client(headers.get("authorization", ""), form):
            return 401, {"error": "invalid_client"}
        grant = self.codes.get(form.get("code", ""))
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form.get("code_verifier", "").encode()).digest()).rstrip(b"=").decode()
        if grant is None or grant.used or grant.parameters["code_challenge"] != challenge:
            return 400, {"error": "invalid_grant"}
        if form.get("redirect_uri") != grant.parameters["redirect_uri"]:
            return 400, {"error": "invalid_grant"}
        grant.used = True
        return 200, {"access_token": "a", "token_type": "Bearer", "id_token": (self.sign or self.signed)(self.claims(grant))}

    def _is_client(self, authorization: str, form: dict[str, str]) -> bool:
        if not authorization:
            return (form.get("client_id"), form.get("client_secret")) == (CLIENT, SECRET)
        pair = base64.b64decode(authorization.removeprefix("Basic ")).decode().split(":")
        return [unquote_plus(each) for each in pair] == [CLIENT, SECRET]


@contextmanager
def oidc_issuer(**settings: Any) -> Iterator[OidcIssuer]:
    """Run an issuer for the duration of the block."""
    issuer = OidcIssuer(**settings)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._respond("GET")

        def do_POST(self) -> None:
            self._respond("POST")

        def _respond(self, method: str) -> None:
            sent = self.rfile.read(int(self.headers.get("content-length", 0)))
            if self.path in issuer.hostile:
                issuer.requests.append(self.path)
                issuer.hostile[self.path](self)
                return
            status, document = issuer.respond(method, self.path, self.headers, sent)
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    issuer.url = f"http://127.0.0.1:{server.server_port}"
    with threaded(server):
        yield issuer
