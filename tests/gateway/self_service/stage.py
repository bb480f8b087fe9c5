"""A gateway with a store and a sign-in, and browsers of people who are signed in."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2

from gateway.access.actor import Role
from gateway.sign_in.browser import Port
from gateway.sign_in.sessions import Person, Session, Sessions, new_session
from gateway.snapshot.snapshot import SessionRules
from tests.support.process import Gateway, configuration, gateway, wait_for
from tests.support.running import KEY

SESSION_KEY = "a session key of more than 32 characters"
TOKEN = "an-admin-token-of-the-tests"
ISSUER = "https://login.example.com"
MODELS = [
    {"id": name, "servers": [{"url": "http://127.0.0.1:9"}], "price": {"prompt": 1.0}}  # authentication needs no server
    for name in ("sim/one", "sim/two", "other")
]
CEILINGS = {"requests_per_minute": 60, "cost_per_day": 5.0, "budgets": [{"window": "7d", "tokens": 1000}]}
POLICY = {"max_keys": 2, "max_lifetime": "30d", "models": ["sim/*"], "limits": CEILINGS}
TEAMS: list[dict[str, Any]] = [
    {"id": "lab", "limits": {"tokens_per_day": 1_000_000},
     "self_service": POLICY},
    {"id": "open", "self_service": {"max_keys": 1000}},
    {"id": "closed"},
]  # fmt: skip
PORTAL = "/portal/v1"


def person(subject: str, *teams: str, owned: tuple[str, ...] = (), role: Role | None = None, issuer: str = ISSUER) -> Person:
    """Return a person as a sign-in describes them."""
    return Person(issuer, "one" if issuer else "link", subject, subject.title(), role, (*teams, *owned), owned)


def session_cookie(session: Session, port: Port = "data", revoked: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the cookie of a session."""
    rules = SessionRules(SESSION_KEY.encode(), False, 28_800, 86_400, ("", ISSUER))
    name, _, rest = Sessions(rules, port, revoked).write(session).partition("=")
    return {name: rest.partition(";")[0]}


@dataclass
class Browser:
    """The browser of a person, on one port. ``headers`` are sent with each request. ``waits``: a request that came too soon is repeated."""

    origin: str
    cookies: Mapping[str, str]
    headers: dict[str, str] = field(default_factory=dict)
    waits: bool = True

    def send(self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **more: Any) -> httpx2.Response:
        """Send a request as a page of this origin does."""
        return self.send_as_is(
            method, path, {"origin": self.origin, "sec-fetch-site": "same-origin", **self.headers, **(headers or {})}, **more
        )

    def send_as_is(self, method: str, path: str, headers: Mapping[str, str], **more: Any) -> httpx2.Response:
        """Send a request with these headers alone."""
        with httpx2.Client(trust_env=False, timeout=60, cookies=dict(self.cookies)) as client:
            while (response := client.request(method, self.origin + path, headers=headers, **more)).status_code == 429 and self.waits:
                time.sleep(int(response.headers["retry-after"]))
        return response

    def get(self, path: str, **query: str) -> httpx2.Response:
        return self.send("GET", PORTAL + path, params=query)

    def create(self, team: str, **fields: Any) -> httpx2.Response:
        return self.send("POST", f"{PORTAL}/keys", json={"team": team, **fields})

    def created(self, team: str, **fields: Any) -> dict[str, Any]:
        """Create a key, and return it with its secret."""
        response = self.create(team, **fields)
        assert response.status_code == 201, response.text
        made: dict[str, Any] = response.json()
        return made


def browser(one: Gateway, visitor: Person, port: Port = "data", *, created: float = 0.0, seen: float = 0.0) -> Browser:
    """Return the browser of a person with a session since ``created`` seconds, and was active ``seen`` seconds ago."""
    now = time.time()
    session = replace(new_session(visitor, now), created=int(now - max(created, seen)), seen=int(now - seen))
    number = one.data if port == "data" else one.admin
    return Browser(f"http://127.0.0.1:{number}", session_cookie(session, port))


def free_ports(count: int) -> list[int]:
    """Return ports that are free at the moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Return a configuration with a store, a sign-in and an audit log."""
    (folder / "session.key").write_text(SESSION_KEY)
    data, admin = free_ports(2)
    sign_in = {"key": {"file": "session.key"}, "url": f"http://127.0.0.1:{data}", "admin_url": f"http://127.0.0.1:{admin}"}
    issuer = {"id": "one", "issuer": ISSUER, "client_id": "gateway", "claims": {"teams": "groups"}}
    own = configuration(*MODELS, port=data, admin={"port": admin, "token": {"env": "ADMIN_TOKEN"}}, workers=2)
    audit = {"secret": {"env": "ADMIN_TOKEN"}, "file": "audit.jsonl"}
    return own | {"store": "sqlite:///keys.db", "sign_in": sign_in | {"issuers": [issuer]}, "teams": TEAMS, "audit": audit, **more}


@contextmanager
def running(folder: Path, config: dict[str, Any] | None = None) -> Iterator[Gateway]:
    """Run a gateway until the end of the block."""
    folder.mkdir(exist_ok=True)
    with gateway(folder, config or settings(folder), variables={"ADMIN_TOKEN": TOKEN}, ready=False) as one:
        wait_for(lambda: one.process.poll() is not None or accepts(one, KEY), 90, why=lambda: one.output)
        wait_for(lambda: browser(one, person("first", "lab")).get("/me").status_code == 200, 90, why=lambda: one.output)
        yield one


def accepts(one: Gateway, token: str, count: int = 1) -> bool:
    """Return whether a key is accepted on each of some new connections."""
    return all(models(one, token) == 200 for _ in range(count))


def models(one: Gateway, token: str) -> int:
    """Return the status of a list of models with a key; 0 while the gateway does not respond."""
    try:
        return httpx2.get(f"{one.url}/v1/models", headers={"authorization": f"Bearer {token}"}, timeout=60).status_code
    except httpx2.HTTPError:
        return 0


def admin(one: Gateway, method: str, path: str, **more: Any) -> httpx2.Response:
    """Send a request with the admin token."""
    headers = {"authorization": f"Bearer {TOKEN}", "if-match": "*"}
    return httpx2.request(method, f"http://127.0.0.1:{one.admin}{path}", headers=headers, timeout=60, **more)
