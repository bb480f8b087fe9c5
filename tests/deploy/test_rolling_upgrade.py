"""Several gateways behind nginx, replaced one after the other under load: no client notices."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import select

from gateway.auth import keys
from gateway.ledger.schema import USAGE
from gateway.ledger.store import UsageStore, database_url
from tests.faults.conftest import FULL
from tests.support import postgres
from tests.support.nginx import nginx
from tests.support.ports import reserved
from tests.support.process import Gateway, gateway
from tests.support.redis_server import redis_server
from tests.support.running import KEY, until
from tests.support.simulated import simulated
from tests.support.wire import DONE, Client, Reply, chat, client, request

MODEL = "sim/one"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
STREAMS = 300 if FULL else 60
CLIENTS = 8 if FULL else 4
"""Clients that request JSON, one request after the other."""
TOKENS, RATE = (40, 5.0) if FULL else (30, 10.0)
"""Events of a stream, and events per second."""
LINGER = 4
SITE = re.search(r"^```nginx\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
_WORKERS = (1, 2, 1)  # both ways of accepting connections
_HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


@dataclass
class Replica:
    """One of the gateways: a folder that stays, and the process of the moment."""

    folder: Path
    config: dict[str, Any]
    running: Gateway | None = None
    output: str = ""
    """By all processes that have ended."""
    _life: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        self.running = self._life.enter_context(gateway(self.folder, self.config, seconds=60))

    def end(self) -> None:
        """As an operator does: SIGTERM, and then wait."""
        running, self.running = self.running, None
        if running is not None:
            running.process.terminate()
            assert running.process.wait(90) == 0
            self.output += running.output
        self._life.close()


@asynccontextmanager
async def replicas(folder: Path, ports: Sequence[int], config: dict[str, Any]) -> AsyncIterator[list[Replica]]:
    made = []
    for host, port, workers in zip(_HOSTS, ports, _WORKERS, strict=True):
        (target := folder / host).mkdir()
        made.append(Replica(target, {**config, "server": {**config["server"], "host": host, "port": port, "workers": workers}}))
    async with AsyncExitStack() as stack:
        for each in made:
            stack.push_async_callback(asyncio.to_thread, each.end)
        await asyncio.gather(*(asyncio.to_thread(each.start) for each in made))
        yield made


def configuration(servers: Sequence[int], redis: str, ledger: str) -> dict[str, Any]:
    """The configuration that all of them share."""
    limits = {"requests_per_minute": 10**6, "tokens_per_day": 10**9, "concurrent": 10**4}
    return {
        "server": {"admin": {"port": 0}, "linger": f"{LINGER}s", "drain": "1m", "trusted_proxies": ["127.0.0.1"]},
        "models": [{"id": MODEL, "servers": [{"url": f"http://127.0.0.1:{port}"} for port in servers]}],
        "keys": [{"id": "team-a", "hash": keys.hash_of(KEY), "limits": limits}],
        "limits_store": redis,
        "ledger": ledger,
    }


def site(port: int, gateways: Sequence[int]) -> str:
    """The shown configuration, for these ports."""
    assert SITE is not None
    text = SITE[1].replace("listen 80;", f"listen 127.0.0.1:{port};")
    for number, (host, each) in enumerate(zip(_HOSTS, gateways, strict=True)):
        text = text.replace(f"10.0.0.1{number + 1}:8000", f"{host}:{each}")
    return text


@dataclass
class Load:
    """Clients that send requests continuously, the results of their responses, and the wrong responses."""

    port: int
    tokens: dict[str, int] = field(default_factory=dict)
    """Total tokens of each response by request ID."""
    wrong: list[str] = field(default_factory=list)
    begun: Counter[int] = field(default_factory=Counter)
    """Number of started streams by client."""
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    async def all_keys_stream(self) -> None:
        """Wait until each client has started another stream. On a slow machine some end before others start. Raises TimeoutError."""
        before = self.begun.copy()
        await until(lambda: all(self.begun[number] > before[number] for number in range(STREAMS)), 90)

    async def stream(self, number: int) -> None:
        simulate = {"tokens": TOKENS, "tokens_per_second": RATE}
        data = request(chat(model=MODEL, stream=True, stream_options={"include_usage": True}, simulate=simulate))
        while not self.finished.is_set():
            async with client(self.port) as one:
                pending = asyncio.create_task(one.request(data))
                begun = asyncio.create_task(one.begun.wait())
                await asyncio.wait((pending, begun), return_when=asyncio.FIRST_COMPLETED)
                self.begun[number] += 1
                reply = await pending
                begun.cancel()
            self.take(reply, reply.body.removesuffix(DONE).rpartition(b"data: ")[2] if reply.body.endswith(DONE) else None)

    async def probe(self) -> None:
        data = request(chat(model=MODEL, simulate={"tokens": 5, "tokens_per_second": 0}))
        while not self.finished.is_set():
            async with client(self.port) as one:
                await self._send_continuously(one, data)

    async def _send_continuously(self, one: Client, data: bytes) -> None:
        """Send some requests on one connection."""
        for _ in range(50):
            reply = await one.request(data)
            self.take(reply, reply.body)
            if self.finished.is_set() or not reply.whole or reply.headers.get("connection") == "close":
                return
            await asyncio.sleep(0.05)

    def take(self, reply: Reply, last: bytes | None) -> None:
        """Record a response. ``last``: the document with the usage; None if a stream is truncated."""
        if reply.status == 200 and reply.whole and last is not None and b'"error"' not in reply.body:
            self.tokens[reply.headers["x-request-id"]] = orjson.loads(last)["usage"]["total_tokens"]
        else:
            self.wrong.append(f"{reply.status}, whole: {reply.whole}: {reply.body[-300:]!r}")


@asynccontextmanager
async def load(port: int) -> AsyncIterator[Load]:
    made = Load(port)
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(STREAMS):
                group.create_task(made.stream(number))
            for _ in range(CLIENTS):
                group.create_task(made.probe())
            await made.all_keys_stream()
            yield made
            made.finished.set()
    finally:
        made.finished.set()


def rows(url: str, folder: Path) -> dict[str, int]:
    """Return the tokens of each request in the ledger by request ID. Check that all responses are complete."""
    with closing(UsageStore(database_url(url, folder))) as store, store.engine.connect() as connection:
        found = [dict(each) for each in connection.execute(select(USAGE)).mappings()]
    assert {(each["status"], each["incomplete"]) for each in found} == {(200, None)}
    return {each["request_id"]: each["prompt_tokens"] + each["completion_tokens"] for each in found}


@pytest.mark.row(23)
async def test_gateways_are_replaced_one_after_the_other_without_errors(tmp_path: Path, measured: Callable[[str], None]) -> None:
    if not postgres.installed():
        pytest.skip(postgres.NOT_INSTALLED)
    with ExitStack() as stack:
        servers = [stack.enter_context(simulated(MODEL)) for _ in range(2)]
        redis, base = stack.enter_context(redis_server()), stack.enter_context(postgres.postgres())
        ports = [stack.enter_context(reserved(host)) for host in _HOSTS]
        front, url = stack.enter_context(reserved()), base.database()
        async with replicas(tmp_path, ports, configuration(servers, redis.url, url)) as three:
            log = stack.enter_context(nginx(site(front, ports), front))
            async with load(front) as clients:
                for each in three:
                    await asyncio.to_thread(each.end)
                    await asyncio.to_thread(each.start)
                    await clients.all_keys_stream()
            with redis.client() as store:
                await until(lambda: not store.zcard("vllm-gateway:key team-a leases"), 30)
                counted = float(store.hget("vllm-gateway:key team-a", "dt") or 0)
        assert clients.wrong == [], "\n".join(line for line in log.read_text().splitlines() if "[info]" not in line)[-4000:]
        assert rows(url, tmp_path) == clients.tokens
        was_late = any("limits store at" in each.output for each in three)  # on a busy machine: then each has counted by itself
        assert was_late or counted == sum(clients.tokens.values())
    measured(
        f"three gateways behind nginx replaced one after the other under {STREAMS} streams: {len(clients.tokens):,} requests, "
        "0 failed, 0 truncated, each once in the ledger and in the shared limits"
    )
