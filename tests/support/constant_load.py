"""Requests at a constant rate over keep-alive connections: ``python -m tests.support.constant_load PORT RATE``, with a token on stdin.

The rule: the rate does not depend on the responses (an open loop). A request is sent when it is due, on any connection without a request
in flight, otherwise on another connection. The end of stdin ends it. Then it prints its counts as JSON.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

_ROOT = Path(__file__).parents[2]
_MAX_CONNECTIONS = 256
_TICK = 0.002  # seconds
_DRAIN = 60.0  # seconds for the last responses


@dataclass
class Counts:
    """Counts of requests. ``statuses`` counts responses by status. ``broken``: connections that failed during a request.

    ``refused``: requests that were not sent, because no gateway listened. ``late``: requests that were sent more than a second after they
    were due. ``seconds`` of sending.
    """

    sent: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    broken: int = 0
    refused: int = 0
    seconds: float = 0.0
    late: int = 0

    @property
    def failed(self) -> int:
        """The number of requests without a response of status 200."""
        return self.sent - self.statuses.get("200", 0)

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.sent / self.seconds if self.seconds else 0.0


class _Load:
    def __init__(self, port: int, token: str) -> None:
        head = f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\r\n"
        self.port, self.request, self.counts = port, head.encode(), Counts()
        self.statuses: Counter[str] = Counter()
        self.due: deque[float] = deque()
        self.idle: list[_Connection] = []
        self.opening: set[asyncio.Task[None]] = set()
        self.connections = 0

    async def run(self, rate: float, stop: asyncio.Event) -> Counts:
        loop = asyncio.get_running_loop()
        began, planned = loop.time(), 0
        while not stop.is_set():
            now = loop.time()
            while planned <= (now - began) * rate:
                self.due.append(began + planned / rate)
                planned += 1
            self.send(now)
            await asyncio.sleep(_TICK)
        self.counts.seconds = loop.time() - began
        async with asyncio.timeout(_DRAIN):
            while len(self.idle) < self.connections:  # noqa: ASYNC110  the connections count themselves
                await asyncio.sleep(_TICK)
        self.counts.statuses = dict(self.statuses)
        return self.counts

    def send(self, now: float) -> None:
        while self.due and self.idle:
            self.idle.pop().send(now - self.due.popleft())
        if len(self.due) > self.connections - len(self.idle) and self.connections < _MAX_CONNECTIONS:
            self.connections += 1
            self.opening.add(task := asyncio.create_task(self._open()))
            task.add_done_callback(self.opening.discard)

    async def _open(self) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: _Connection(self), "127.0.0.1", self.port)
        except OSError:  # there is no gateway at the moment
            self.connections -= 1
            self.counts.refused += 1
            self.due.popleft()


class _Connection(asyncio.Protocol):
    """A keep-alive connection. Responses have a Content-Length."""

    def __init__(self, load: _Load) -> None:
        self._load = load
        self._data = b""
        self._is_waiting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._load.idle.append(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._load.connections -= 1
        if self._is_waiting:
            self._load.counts.broken += 1
        else:
            self._load.idle.remove(self)

    def send(self, late: float) -> None:
        self._is_waiting = True
        self._load.counts.sent += 1
        self._load.counts.late += late > 1
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end or len(body) < int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            return
        self._load.statuses[self._data[9:12].decode()] += 1
        self._data, self._is_waiting = b"", False
        self._load.idle.append(self)


@contextmanager
def constant_load(port: int, rate: float, token: str) -> Iterator[Counts]:
    """Send requests from another process during the block. The yielded counts are complete after it."""
    command = [sys.executable, "-m", "tests.support.constant_load", str(port), str(rate)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
    counts = Counts()
    with process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{token}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "sending\n"
        try:
            yield counts
        finally:
            process.stdin.close()
            counts.__dict__.update(json.loads(process.stdout.read()))


async def _main(port: int, rate: float) -> Counts:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    load = _Load(port, sys.stdin.readline().strip())
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print("sending", flush=True)
    sending = asyncio.create_task(load.run(rate, stop))
    await reader.read()
    stop.set()
    return await sending


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(_main(int(sys.argv[1]), float(sys.argv[2]))))))
