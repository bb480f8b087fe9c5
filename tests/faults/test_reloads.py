"""Configuration changes under streams: valid and invalid files, new and revoked keys. No stream is dropped and no byte differs."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
import yaml

from gateway.auth import keys
from gateway.key_management.key_file import KeyFiles
from tests.faults.conftest import FULL
from tests.faults.invariants import logged, whole
from tests.support.controlled import Controlled, controlled
from tests.support.process import configuration, launched, write
from tests.support.running import KEY, MODEL, until
from tests.support.scripted import Conversation, Scripted, scripted
from tests.support.wire import COMPLETION, COUNT, DONE, ROLE, STOP, Reply, chat, client, delta, request, request_once

STREAMS = 500 if FULL else 40
RELOADS = 1000 if FULL else 40
PAUSE = 1.0 if FULL else 0.1
"""Seconds between two events of a stream."""
CLIENTS = 3
"""Clients of each key."""
MIB = 1 << 20


class Source:
    """A server whose streams continue until ``enough`` is set. ``sent`` has the bytes of each stream."""

    def __init__(self) -> None:
        self.sent: dict[str, bytes] = {}
        self.enough = asyncio.Event()

    async def __call__(self, talk: Conversation) -> None:
        if talk.request.head.startswith(b"GET /v1/models"):
            await talk.respond(b'{"object":"list","data":[]}')
        elif talk.request.head.startswith(b"GET"):
            await talk.respond(b"{}")
        elif talk.request.json.get("stream"):
            await self._stream(talk, str(talk.request.json["user"]))
        else:
            await talk.respond(COMPLETION)

    async def _stream(self, talk: Conversation, name: str) -> None:
        await talk.begin_stream()
        await self._say(talk, name, ROLE)
        for number in itertools.count():
            if self.enough.is_set():
                break
            await self._say(talk, name, delta(f'{{"content":"{name} {number}"}}'))
            await asyncio.sleep(PAUSE)
        await self._say(talk, name, STOP)
        await talk.chunk(COUNT)
        await self._say(talk, name, DONE)
        await talk.end_stream()

    async def _say(self, talk: Conversation, name: str, event: bytes) -> None:
        self.sent[name] = self.sent.get(name, b"") + event
        await talk.chunk(event)


def far(server: Scripted, **more: Any) -> dict[str, Any]:
    return {"id": MODEL, "servers": [{"url": f"http://127.0.0.1:{server.port}"}], **more}


@asynccontextmanager
async def harmless(folder: Path, server: Scripted, **more: Any) -> AsyncIterator[Controlled]:
    """Run a gateway in front of this server, and check the invariants at the end."""
    with logged(folder / "access-log") as log:
        async with controlled(folder, far(server), **more) as one, whole(one, log=log):
            yield one
            server.hang_up()


@asynccontextmanager
async def streaming(one: Controlled, source: Source, count: int) -> AsyncIterator[list[asyncio.Task[Reply]]]:
    """Run ``count`` streams for the duration of the block."""
    streams = [asyncio.create_task(request_once(one.port, request(chat(stream=True, user=f"s{number}")))) for number in range(count)]
    await until(lambda: len(source.sent) == count, 60.0)
    yield streams
    source.enough.set()
    await asyncio.wait(streams, timeout=60.0)


@dataclass
class Seen:
    """The statuses that a key received. ``served``: the start of the last request that succeeded."""

    statuses: Counter[int] = field(default_factory=Counter)
    served: float = 0.0

    def note(self, began: float, status: int) -> None:
        self.statuses[status] += 1
        if status == 200:
            self.served = max(self.served, began)


@asynccontextmanager
async def sending(one: Controlled, tokens: Sequence[str]) -> AsyncIterator[dict[str, Seen]]:
    """Run ``CLIENTS`` clients for each key. Each sends requests continuously on a separate connection. Yield the results of each key."""
    seen = {token: Seen() for token in tokens}
    stopped = asyncio.Event()

    async def send_continuously(token: str) -> None:
        async with client(one.port) as connection:
            while not stopped.is_set():
                began = time.monotonic()
                reply = await connection.request(request(token=token))
                assert reply.status != 200 or reply.body == COMPLETION
                seen[token].note(began, reply.status)
                await asyncio.sleep(0.005)

    tasks = [asyncio.create_task(send_continuously(token)) for token in tokens for _ in range(CLIENTS)]
    try:
        yield seen
    finally:
        stopped.set()
        await asyncio.gather(*tasks)


def variants(server: Scripted) -> list[tuple[bool, dict[str, Any] | str]]:
    """Return configurations to be loaded in turn. Each comes with a flag that says whether it is valid."""
    good = configuration(far(server), workers=2)
    changes: list[dict[str, Any]] = [{"aliases": ["other"]}, {"timeouts": {"idle": "50s"}}, {"keepalive": "30s"}, {"defaults": {"seed": 1}}]
    more = {"keys": [*good["keys"], {"id": "team-b", "hash": keys.hash_of("sk-b")}]}
    weighted = far(server)
    weighted["servers"][0]["weight"] = 3
    missing = far(server)
    missing["servers"][0] |= {"api_key": {"file": "no-such-secret"}}
    text = yaml.safe_dump(good)
    return [
        *((True, good | {"models": [far(server) | change]}) for change in changes),
        (False, good | {"modles": []}),
        (True, good | more),
        (False, text[: text.index("models:") + 12]),
        (True, good | {"models": [weighted]}),
        (False, good | {"models": [missing]}),
        (True, good | {"models": [far(server), far(server) | {"id": "second"}]}),
        (False, "keys: [\n"),
        (True, good),
    ]


def workers_memory(one: Controlled) -> float:
    return sum(psutil.Process(worker.pid).memory_info().rss for worker in one.control.workers.statuses if worker.pid) / MIB


@pytest.mark.row(22)
@pytest.mark.timeout(1200)
async def test_valid_and_invalid_reloads_under_streams(tmp_path: Path, measured: Callable[[str], None]) -> None:
    source = Source()
    async with scripted(source) as server, harmless(tmp_path, server, workers=2) as one:
        pids = [worker.pid for worker in one.control.workers.statuses]
        async with sending(one, [KEY]) as seen, streaming(one, source, STREAMS) as streams:
            outcomes, grown = {True: 0, False: 0}, 0.0
            for number, (good, text) in zip(range(RELOADS), itertools.cycle(variants(server)), strict=False):
                if isinstance(text, str):
                    one.file.write_text(text)
                else:
                    write(one.file, text)
                reading = await one.reloader.reload()
                outcomes[good] += 1
                assert reading.successful is good, reading
                assert one.value("config_last_reload_successful") == good
                if number == RELOADS // 2:
                    grown = workers_memory(one)
            grown = workers_memory(one) - grown
            assert not any(stream.done() for stream in streams)
        assert one.value("config_reloads_total", "success") == outcomes[True] > 0
        assert one.value("config_reloads_total", "failure") == outcomes[False] > 0
        for number, stream in enumerate(streams):
            reply = stream.result()
            assert reply.status == 200 and reply.whole
            assert reply.body == source.sent[f"s{number}"]
        assert set(seen[KEY].statuses) == {200}
        assert [worker.pid for worker in one.control.workers.statuses] == pids, "no worker was replaced"
    measured(
        f"{RELOADS} reloads, {outcomes[False]} of invalid files, under {STREAMS} streams and {seen[KEY].statuses[200]} requests: "
        f"0 dropped, bytes equal; the workers grew by {grown:.1f} MiB in the second half"
    )
    assert not FULL or grown < 32, f"the workers have grown by {grown:.0f} MiB"


@asynccontextmanager
async def watched(one: Controlled) -> AsyncIterator[None]:
    """Watch the files for changes, as control does."""
    watching = asyncio.create_task(one.reloader.run())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.row(21)
async def test_revoke_and_rotate_under_load(tmp_path: Path, measured: Callable[[str], None]) -> None:
    rounds, source, times = (20 if FULL else 4), Source(), list[float]()
    async with scripted(source) as server, harmless(tmp_path, server, workers=2) as one, watched(one):
        for number in range(rounds):
            former, latter = f"sk-former-{number}", f"sk-latter-{number}"
            file = KeyFiles(one.file)
            file.add([{"id": f"team-{number}", "hash": keys.hash_of(former)}])
            await _until_all(one, former, 200)
            async with sending(one, [KEY, former]) as seen:
                KeyFiles(one.file).change(f"team-{number}", {"hash": [keys.hash_of(former), keys.hash_of(latter)]})
                await _until_all(one, latter, 200)
                assert set(seen[former].statuses) == {200}, "two keys of one principal overlap"
                async with sending(one, [latter]) as fresh:
                    times.append(await _time_to_reject(one, f"team-{number}", "hash", keys.hash_of(latter), former, seen))
                    times.append(await _time_to_reject(one, f"team-{number}", "revoked", True, latter, fresh))
            assert set(seen[KEY].statuses) == {200}, "a key that nobody touched was refused"
    measured(f"{len(times)} keys revoked under load: served for {max(times):.2f} s at most afterwards; 0 false 401s")
    assert max(times) < (1.0 if FULL else 5.0), times


async def _time_to_reject(one: Controlled, identity: str, name: str, value: Any, token: str, seen: dict[str, Seen]) -> float:
    """Change an entry so that a key becomes invalid. Return the seconds for which it was still served."""
    KeyFiles(one.file).change(identity, {name: value})
    began = time.monotonic()
    await _until_all(one, token, 401)
    count = seen[token].statuses[401]
    await until(lambda: seen[token].statuses[401] >= count + 2 * CLIENTS)
    return max(seen[token].served - began, 0.0)


async def _until_all(one: Controlled, token: str, status: int) -> None:
    """Wait until a key gets this status on many connections in a row and all workers have the current snapshot."""
    async with asyncio.timeout(20.0):
        streak = 0
        while streak < 12:
            reply = await request_once(one.port, request(path="/v1/models", method="GET", body=b"", token=token))
            same = {worker.version for worker in one.control.workers.statuses} == {one.control.publisher.version}
            streak = streak + 1 if reply.status == status and same else 0


@pytest.mark.row(21)
async def test_an_expired_hash_is_rejected_without_a_reload(tmp_path: Path, measured: Callable[[str], None]) -> None:
    source = Source()
    async with scripted(source) as server, harmless(tmp_path, server) as one:
        end = time.time() + 3.0
        soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(end)) + f".{int(end % 1 * 1e6):06}Z"
        KeyFiles(one.file).change("team-a", {"hash": [{"hash": keys.hash_of("sk-ends"), "expires": soon}, keys.hash_of(KEY)]})
        assert (await one.reloader.reload()).successful
        assert (await request_once(one.port, request(token="sk-ends"))).status == 200
        async with sending(one, [KEY, "sk-ends"]) as seen:
            await until(lambda: 401 in seen["sk-ends"].statuses, 20.0)
        refused = await request_once(one.port, request(token="sk-ends"))
        assert time.time() >= end
        assert orjson.loads(refused.body)["error"]["code"] == "expired_api_key"
        assert set(seen[KEY].statuses) == {200}
    measured("an expired hash is rejected immediately, without a reload")


@pytest.mark.row(22)
async def test_connections_that_are_open_at_a_reload_are_released_later(tmp_path: Path, measured: Callable[[str], None]) -> None:
    count, rounds = 400, 12
    async with controlled(tmp_path, launched()) as one:
        (status,) = one.control.workers.statuses
        assert status.pid is not None
        process, sizes = psutil.Process(status.pid), list[int]()
        for number in range(rounds):
            connections = [await asyncio.open_connection("127.0.0.1", one.port) for _ in range(count)]
            for _, writer in connections:
                writer.write(request(chat(user="u" * 20_000), token="sk-nobodys"))
            for reader, _ in connections:
                assert (await reader.readline()).startswith(b"HTTP/1.1 401")
            await one.reload(launched() | {"aliases": [f"round-{number}"]})
            for _, writer in connections:
                writer.close()
            sizes.append(process.memory_info().rss)
        growth = (sizes[-1] - sizes[2]) / 2**20
        measured(f"{rounds} reloads, {count} connections open at each: {growth:.1f} MiB more resident after the last than after the third")
        assert growth < 10  # if they were retained, they would hold 25 KiB each: 88 MiB
