"""One run: a gateway of several workers behind a proxy, clients with a thousand keys, hostile clients among them, and the checks.

The rules: a response contains no secret of another connection. A response to an ordinary request contains its secret. A server has
received each secret once, under its own key, as the access log shows, and never a secret without a key. A run counts what it sends and
stops by itself.
"""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from tests.proxies import secrets
from tests.proxies.fronts import FRONTS
from tests.proxies.origin import origin
from tests.proxies.sharing import cutting, send, sharing
from tests.proxies.traffic import KINDS, WITH_LENGTH, Client, Plan, hostile, ordinary
from tests.support.certificates import certificate
from tests.support.issuer import AUDIENCE, Issuer, published
from tests.support.process import Gateway, gateway

SHARING = "sharing"
"""The proxy of the tests, in place of one of ``FRONTS``."""
WORKERS = 2
_CLIENTS, _HOSTILE = 40, 12
_QUIET = 0.15
"""Seconds without a byte after which a hostile client disconnects."""
_RESPONSE = 60.0
_LIMIT = 65536
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MOST_VIOLATIONS = 20


@dataclass(frozen=True, slots=True)
class Scenario:
    """A proxy, and the requests to send. ``front`` is a name of ``FRONTS``, or ``SHARING``."""

    front: str
    requests: int
    seed: int
    tls: bool = False


@dataclass
class Findings:
    """The results of a run."""

    scenario: Scenario
    seconds: float = 0.0
    sent: int = 0
    ordinary: int = 0
    """Ordinary requests with a complete response."""
    hostile: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    """Ordinary requests without a response of status 200, by what happened."""
    examples: dict[str, str] = field(default_factory=dict)
    """By status, the first request of ``failed`` and its response."""
    executed: int = 0
    """Requests that a server has received."""
    violations: list[str] = field(default_factory=list)

    def violation(self, text: str) -> None:
        """Note a violation, unless there are many."""
        if len(self.violations) < _MOST_VIOLATIONS:
            self.violations.append(text)


class _Line(msgspec.Struct):
    """The fields of a line of the access log that are compared."""

    request_id: str
    key: str | None = None


class _Load:
    """The clients of a run."""

    def __init__(self, port: int, credentials: Sequence[bytes], findings: Findings) -> None:
        self._port = port
        self._credentials = credentials
        self._findings = findings

    async def run(self) -> None:
        """Send all requests of the scenario."""
        findings, started = self._findings, time.monotonic()
        await asyncio.gather(
            *(self._clients(number, self._ordinary if number < _CLIENTS else self._hostile) for number in range(_CLIENTS + _HOSTILE))
        )
        findings.seconds = time.monotonic() - started

    async def _clients(self, number: int, connect: Any) -> None:
        scenario = self._findings.scenario
        dice = random.Random(f"{scenario.seed}-{number}")
        while self._findings.sent < scenario.requests and len(self._findings.violations) < _MOST_VIOLATIONS:
            await connect(Client(dice, dice.randrange(secrets.KEYS), self._credentials))

    async def _ordinary(self, client: Client) -> None:
        findings = self._findings
        try:
            async with asyncio.timeout(_RESPONSE), self._connected() as (reader, writer):
                for _ in range(client.dice.randrange(1, 40)):
                    findings.sent += 1
                    if not await self._exchanged(client, reader, writer):
                        return
        except TimeoutError:
            findings.failed["timeout"] += 1
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            findings.failed[type(error).__name__] += 1

    async def _exchanged(self, client: Client, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Send a request and check the response. Returns whether the connection can be used again."""
        findings, (wire, secret) = self._findings, ordinary(client)
        cut = client.dice.randrange(len(wire)) if client.dice.random() < 0.1 else 0
        if cut:
            send(writer, wire[:cut])
            await asyncio.sleep(0)
        send(writer, wire[cut:])
        response = await _response(reader)
        seen = secrets.found(response)
        if response.startswith(b"HTTP/1.1 200"):
            findings.ordinary += 1
            if seen != {secret}:
                findings.violation(f"the response to {secret!r} contains {seen}: {response[:400]!r}")
        else:
            by = "gateway" if b"\r\nx-request-id:" in response.lower() else "proxy"
            findings.failed[f"{response[9:12].decode()} by the {by}"] += 1
            findings.examples.setdefault(response[9:12].decode(), f"{wire[:300]!r} -> {response[-400:]!r}")
            if seen:
                findings.violation(f"an error for {secret!r} contains {seen}: {response[:400]!r}")
        return b"\r\nconnection: close" not in response.lower()

    async def _hostile(self, client: Client) -> None:
        kind, plan = hostile(client, WITH_LENGTH if self._findings.scenario.front == SHARING else tuple(KINDS))
        self._findings.sent += 1 + len(plan.beside)
        self._findings.hostile[kind] += 1
        with suppress(ConnectionError):
            async with AsyncExitStack() as stack:
                connections = [await stack.enter_async_context(self._connected()) for _ in range(1 + len(plan.beside))]
                (reader, writer), *others = connections
                for piece in plan.pieces:
                    send(writer, piece)
                    await asyncio.sleep(0)
                if not plan.disconnects:
                    self._check(kind, plan, await until_quiet(reader))
                for (_, other), wire in zip(others, plan.beside, strict=True):
                    send(other, wire)
                for response in await asyncio.gather(*(until_quiet(other) for other, _ in others)):
                    self._check(kind, Plan(()), response)

    def _check(self, kind: str, plan: Plan, received: bytes) -> None:
        if foreign := secrets.found(received) - plan.own:
            self._findings.violation(f"{kind}: a response contains {foreign}, and {set(plan.own)} were sent: {plan.pieces!r:.800}")

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=_LIMIT)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


async def _response(reader: asyncio.StreamReader) -> bytes:
    """Read one response with a length or chunks; its own text contains no final chunk."""
    headers = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(headers)
    return headers + await (reader.readexactly(int(length[1])) if length else reader.readuntil(b"\r\n0\r\n\r\n"))


async def until_quiet(reader: asyncio.StreamReader) -> bytes:
    """Return all bytes until the connection closes or nothing arrives for a while."""
    received = b""
    with suppress(TimeoutError, ConnectionError):
        while data := await asyncio.wait_for(reader.read(_LIMIT), _QUIET):
            received += data
    return received


@asynccontextmanager
async def _front(scenario: Scenario, port: int) -> AsyncIterator[int]:
    """Run the proxy of a scenario in front of the gateway, half of its connections through ``cutting``. Yield its port."""
    dice = random.Random(scenario.seed)
    if scenario.front == SHARING:
        async with sharing(port, dice) as front:
            yield front
        return
    async with cutting(port, dice) as cut:
        with FRONTS[scenario.front].run((port, cut), scenario.tls) as front:
            yield front


def _configuration(ports: tuple[int, int], jwks: str, issuer: Issuer, folder: Path, *, tls: bool) -> dict[str, Any]:
    server: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "admin": {"port": 0}, "drain": "5s", "workers": WORKERS}
    if tls:
        cert, key = certificate(folder)
        server["tls"] = {"cert": str(cert), "key": str(key)}
    good, faulty = ({"servers": [{"url": f"http://127.0.0.1:{port}"}]} for port in ports)
    return {
        "server": server,
        "models": [{"id": "m", **good}, {"id": "faulty", **faulty, "timeouts": {"first_byte": "1s", "idle": "1s"}}],
        "keys": secrets.configured(),
        "jwt": [{"issuer": issuer.name, "audience": AUDIENCE, "jwks": jwks, "keys": [secrets.ENTRY], "algorithms": ["ES256"]}],
    }


def _credentials(issuer: Issuer) -> list[bytes]:
    return [
        f"Bearer {issuer.token(sub=f'user-{number:04}') if secrets.is_subject(number) else secrets.plain_key(number)}".encode()
        for number in range(secrets.KEYS)
    ]


def run(scenario: Scenario, folder: Path | None = None) -> Findings:
    """Run a scenario, in a temporary folder or a given one."""
    findings, issuer = Findings(scenario), Issuer()
    with ExitStack() as stack:
        base = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="proxies-")))
        record = base / "received"
        with published(issuer) as shown, origin(record) as ports:
            configuration = _configuration(ports, shown.url, issuer, base, tls=scenario.tls)
            with gateway(base, configuration) as one:
                uvloop.run(_loaded(one, scenario, _credentials(issuer), findings))
        compare(_received(record), _logged(one), findings)
    return findings


async def _loaded(one: Gateway, scenario: Scenario, credentials: Sequence[bytes], findings: Findings) -> None:
    async with _front(scenario, one.data) as port:
        await _Load(port, credentials, findings).run()


def _received(record: Path) -> Iterator[tuple[str, str]]:
    with open(record) as lines:
        for line in lines:
            identity, _, secret = line.strip().partition(" ")
            yield identity, secret


def _logged(one: Gateway) -> dict[str, str | None]:
    """Return the key of each request in the access log."""
    decoder, keys = msgspec.json.Decoder(_Line), {}
    with open(one.folder / "stdout", "rb") as lines:
        for line in lines:
            decoded = decoder.decode(line)
            keys[decoded.request_id] = decoded.key
    return keys


def compare(received: Iterator[tuple[str, str]], keys: dict[str, str | None], findings: Findings) -> None:
    """Compare the requests that a server has received, each with its ID and secret, with the keys in the access log."""
    by_secret: dict[str, str] = {}
    for identity, secret in received:
        findings.executed += 1
        if secret == "-":  # changed bytes
            continue
        owner = secrets.owner(secret.encode())
        if owner == secrets.NO_KEY:
            findings.violation(f"{secret} was served under {keys.get(identity)} ({identity})")
        elif keys.get(identity) != secrets.identity(int(owner)):
            findings.violation(f"{secret} was served under {keys.get(identity, 'no record')} ({identity})")
        if by_secret.setdefault(secret, identity) != identity:
            findings.violation(f"{secret} was served twice: {by_secret[secret]} and {identity}")
