"""Slow, silent, greedy or many clients of a gateway that runs as a process. Other clients are not affected."""

from __future__ import annotations

import asyncio
import json
import resource
import select
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Queue
from typing import Any

import httpx2
import psutil
import pytest

from tests.faults.conftest import FULL
from tests.faults.invariants import soon_idle, whole
from tests.support.process import Gateway, configuration, gateway, launched, wait_for
from tests.support.running import KEY
from tests.support.scripted import Conversation, Script, scripted
from tests.support.wire import COMPLETION, DONE, HELLO, chat, request

MODEL = "sim/one"
MiB = 1 << 20
WINDOW = 500 if FULL else 40
WINDOWS = 5
"""``WINDOW``: requests in each 99th percentile. ``WINDOWS``: the least number of percentiles of which a figure is the median."""
FLOOR = 0.005
"""Seconds. Shorter times depend on the machine rather than on the gateway."""


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """Raise the limit of file descriptors to its maximum, for the sockets of many clients."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


SERVED = f'vllm_gateway_requests_total{{code="200",endpoint="/v1/chat/completions",error="",model="{MODEL}"}}'
QUICK = soon_idle(launched(MODEL, **{"sim-tokens": 4, "sim-tokens-per-second": 0}))
"""A simulator that responds at once."""


@contextmanager
def serving(folder: Path, *models: dict[str, Any], **server: Any) -> Iterator[Gateway]:
    """Run a gateway, and check the invariants at the end."""
    with gateway(folder, configuration(*models, **server)) as running, whole(running):
        yield running


def started(folder: Path, **server: Any) -> AbstractContextManager[Gateway]:
    return serving(folder, QUICK, **server)


def worker(running: Gateway) -> psutil.Process:
    return psutil.Process(running.workers()[0])


def connected(
    stack: ExitStack, running: Gateway, count: int, *, receive: int | None = None, port: int | None = None
) -> list[socket.socket]:
    """Open ``count`` connections, which are closed with the stack. ``receive``: the size of their receive buffers. ``port``: a port
    other than the data port."""
    made = []
    for _ in range(count):
        one = stack.enter_context(socket.socket())
        if receive is not None:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        one.settimeout(60)
        one.connect(("127.0.0.1", port or running.data))
        made.append(one)
    return made


def ended(sockets: list[socket.socket], seconds: float, meanwhile: Callable[[], None] = lambda: None) -> list[bytes]:
    """Return the bytes that each connection received until it was closed.

    Raises AssertionError if a connection is not closed in time.
    """
    received = {one.fileno(): b"" for one in sockets}
    by_number, poll, deadline = {one.fileno(): one for one in sockets}, select.epoll(), time.monotonic() + seconds
    last = 0.0
    with poll:
        for number in by_number:
            poll.register(number, select.EPOLLIN)
        while by_number:
            assert time.monotonic() < deadline, f"{len(by_number)} of {len(sockets)} connections are still open"
            for number, _ in poll.poll(0.25):
                data = _received(by_number[number])
                received[number] += data
                if not data:
                    poll.unregister(number)
                    del by_number[number]
            if time.monotonic() - last > 0.25:
                meanwhile()
                last = time.monotonic()
    return list(received.values())


def _received(one: socket.socket) -> bytes:
    try:
        return one.recv(65536)
    except ConnectionError:
        return b""


class Healthy:
    """A client that sends one request after the other in a separate thread. ``times`` has the seconds of each."""

    def __init__(self, running: Gateway) -> None:
        self._running = running
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send)
        self.times: list[float] = []
        self.failures: list[str] = []

    def __enter__(self) -> Healthy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _send(self) -> None:
        body = chat(model=MODEL)
        with httpx2.Client(base_url=self._running.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60, trust_env=False) as one:
            while not self._stop.is_set():
                since = time.perf_counter()
                response = one.post("/v1/chat/completions", json=body)
                self.times.append(time.perf_counter() - since)
                if response.status_code != 200:
                    self.failures.append(response.text)
                time.sleep(0.005)

    @property
    def enough(self) -> bool:
        """Whether there are enough times for a figure."""
        return len(self.times) >= WINDOWS * WINDOW

    @property
    def p99(self) -> float:
        """The median of the 99th percentiles of windows of equal size, so that a single slow moment of the machine does not count."""
        windows = [self.times[at : at + WINDOW] for at in range(0, len(self.times) - WINDOW + 1, WINDOW)]
        return statistics.median(statistics.quantiles(window, n=100)[98] for window in windows or [self.times])


def healthy_alone(running: Gateway) -> float:
    """Return the 99th percentile of the times of a client that is the only one."""
    with Healthy(running) as client:
        wait_for(lambda: client.enough, 120)
    assert client.failures == []
    return client.p99


def is_not_held_up(client: Healthy, alone: float) -> bool:
    """Check that a client is at most slowed by a factor of two during a fault. This applies at full size, on an idle machine.

    Times below the floor depend on the machine rather than on the gateway.
    """
    return not FULL or (client.enough and client.p99 < 2 * max(alone, FLOOR))


def in_flight(running: Gateway, name: str = MODEL) -> float:
    return running.metric(f'vllm_gateway_inflight_requests{{model="{name}"}}')


def faults(running: Gateway, reason: str) -> float:
    return running.metric(f'vllm_gateway_client_faults_total{{reason="{reason}"}}')


@pytest.mark.row(10)
def test_slow_and_silent_clients_are_disconnected_and_others_are_not_affected(tmp_path: Path, measured: Callable[[str], None]) -> None:
    count = 5000 if FULL else 200
    limits = {} if FULL else {"headers_timeout": "6s", "body_timeout": "7s"}
    longest = 60 if FULL else 7
    partial_headers, partial_body = (
        request(chat(model=MODEL)).partition(b"host: te")[0] + b"host: te",
        request(chat(model=MODEL, user="u" * 100_000))[:-50_000],
    )
    with started(tmp_path, **limits) as running, ExitStack() as stack:
        alone, since = healthy_alone(running), time.monotonic()
        silent, slow_headers, slow_bodies = (connected(stack, running, number) for number in (count, count, count // 10))
        for one in slow_headers:
            one.sendall(partial_headers)
        for one in slow_bodies:
            one.sendall(partial_body)

        def trickle() -> None:
            """Send single bytes, which does not extend the deadline."""
            for one in (*slow_headers[::10], *slow_bodies):
                try:
                    one.send(b"a")
                except OSError:
                    pass  # the gateway has closed it

        with Healthy(running) as client:
            received = ended([*silent, *slow_headers, *slow_bodies], 3 * longest + 60, trickle)
        took = time.monotonic() - since
        measured(
            f"{count} silent connections, {count} slow headers, {len(slow_bodies)} slow bodies: all closed after {took:.0f} s; "
            f"a healthy client's p99 {client.p99 * 1000:.1f} ms, alone {alone * 1000:.1f} ms"
        )
        assert client.failures == [] and len(client.times) > 10
        assert is_not_held_up(client, alone), f"{client.p99} s, {alone} s alone"
        assert received[: len(silent)] == [b""] * len(silent)
        assert {each[:12] for each in received[len(silent) :]} == {b"HTTP/1.1 408"}
        counted = {reason: faults(running, reason) for reason in ("silent", "slow_head", "slow_body")}
        assert counted == {"silent": len(silent), "slow_head": len(slow_headers), "slow_body": len(slow_bodies)}
        wait_for(lambda: in_flight(running) == 0)


# The admin port

HALF = b"GET /livez HTTP/1.1\r\nhost: a"


def control(running: Gateway) -> psutil.Process:
    return psutil.Process(running.process.pid)


def alive(running: Gateway) -> bool:
    """Whether a probe on a new connection succeeds."""
    try:
        return running.get("/livez").status_code == 200
    except httpx2.TransportError:
        return False


@contextmanager
def few_descriptors(soft: int = 1024) -> Iterator[None]:
    """Lower the limit of file descriptors for the processes that the block starts."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.row(10)
@pytest.mark.parametrize("listener", ["port", "socket"])
def test_slow_and_silent_clients_of_the_admin_port_are_disconnected(tmp_path: Path, listener: str, measured: Callable[[str], None]) -> None:
    count = 50
    with started(tmp_path, headers_timeout="6s", body_timeout="7s", write_timeout="7s") as running, ExitStack() as stack:
        before, since = control(running).num_fds(), time.monotonic()
        (path,) = running.runtime.glob("vllm-gateway/*.sock")

        def connect(number: int) -> list[socket.socket]:
            if listener == "port":
                return connected(stack, running, number, port=running.admin)
            made = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(number)]
            for one in made:
                one.connect(str(path))
            return made

        silent, slow_headers, seconds, bodies = (connect(count) for _ in range(4))
        for one in slow_headers:
            one.sendall(HALF)
        for one in seconds:
            one.sendall(HALF + b"\r\n\r\n" + HALF)
        for one in bodies:
            one.sendall(HALF + b"\r\ncontent-length: 100\r\n\r\nab")
        received = ended([*silent, *slow_headers, *seconds, *bodies], 60, lambda: _assert_alive(running))
        took = time.monotonic() - since
        assert received[: 2 * count] == [b""] * 2 * count
        assert [each.count(b"HTTP/1.1 200") for each in received[2 * count :]] == [1] * 2 * count
        wait_for(lambda: control(running).num_fds() <= before)
    measured(
        f"admin {listener}: {4 * count} silent connections, partial headers and partial bodies: "
        f"all closed after {took:.0f} s, /livez responds"
    )


def _assert_alive(running: Gateway) -> None:
    assert alive(running)


@pytest.mark.row(10)
def test_endless_headers_are_not_buffered_by_the_admin_port(tmp_path: Path) -> None:
    with started(tmp_path) as running, ExitStack() as stack:
        for first in (HALF, HALF + b"\r\n\r\n" + HALF):
            (one,) = connected(stack, running, 1, port=running.admin)
            one.sendall(first)
            sent = 0
            with suppress(ConnectionError):
                while sent < 64 * MiB:
                    sent += one.send(b"\r\nx: " + b"a" * 8192)
            assert sent < 16 * MiB, "what the sockets hold"
        assert alive(running)


@pytest.mark.row(28)
@pytest.mark.parametrize("head", [b"", HALF], ids=["silent", "half a head"])
def test_many_connections_to_the_admin_port(tmp_path: Path, head: bytes, measured: Callable[[str], None]) -> None:
    count = 2000
    with ExitStack() as stack:
        with few_descriptors():
            running = stack.enter_context(gateway(tmp_path, configuration(QUICK)))
        with whole(running):
            process = control(running)
            before = process.num_fds()
            assert process.rlimit(resource.RLIMIT_NOFILE)[0] > 1024
            held = []
            for _ in range(20):
                held += connected(stack, running, count // 20, port=running.admin)
                for one in held[-count // 20 :] if head else ():
                    one.sendall(head)
                _assert_alive(running)
            most = process.num_fds()
            for _ in range(50):
                _assert_alive(running)
            assert most < before + 600 and running.request().status_code == 200
            for one in held:
                one.close()
            wait_for(lambda: process.num_fds() <= before)
            assert alive(running) and running.metric("process_open_fds") > 0
        assert "uncaught error" not in running.output and "Too many open files" not in running.output
        assert running.stop() == 0
    measured(
        f"{count} connections to the admin port, {'partial headers each' if head else 'silent'}: "
        f"/livez responded, {most - before} stayed open"
    )


@pytest.mark.row(28)
def test_all_descriptors_of_control_are_used_up(tmp_path: Path, measured: Callable[[str], None]) -> None:
    """The limit is below the number of accepted connections. Their deadline closes them, and control continues."""
    with started(tmp_path, headers_timeout="2s") as running, ExitStack() as stack:
        process = control(running)
        before = process.num_fds()
        limits = process.rlimit(resource.RLIMIT_NOFILE)
        process.rlimit(resource.RLIMIT_NOFILE, (before + 10, limits[1]))
        held = connected(stack, running, 30, port=running.admin)
        wait_for(lambda: process.num_fds() >= before + 10)
        assert running.request().status_code == 200, "the data port is nobody's who talks to the other one"
        ended(held, 120)
        wait_for(lambda: alive(running))
        assert "uncaught error" not in running.output and 1 <= running.output.count("connections cannot be accepted") <= 20
    measured("control's descriptors used up by 30 silent connections: all closed, /livez responds again")


def _stream(tokens: int) -> bytes:
    return request(chat(model=MODEL, stream=True, simulate={"tokens": tokens, "tokens_per_second": 0}))


@pytest.mark.row(9)
def test_a_reader_that_stops_frees_its_slot(tmp_path: Path, measured: Callable[[str], None]) -> None:
    with started(tmp_path, **({} if FULL else {"write_timeout": "2s"})) as running, ExitStack() as stack:
        (one,) = connected(stack, running, 1, receive=65536)
        one.sendall(_stream(100_000))
        since = time.monotonic()
        wait_for(lambda: faults(running, "slow_reader") == 1, 100)
        wait_for(lambda: in_flight(running) == 0)
        took = time.monotonic() - since
        assert running.metric(f'vllm_gateway_incomplete_total{{model="{MODEL}",reason="client"}}') == 1
        wait_for(lambda: running.log.endswith("\n"))
        (line,) = [json.loads(line) for line in running.log.splitlines() if "chat" in line]
        assert (line["status"], line["incomplete"]) == (499, "client")
    measured(f"slot freed after {took:.1f} s with a write_timeout of {60 if FULL else 2} s")


def _flood(count: int) -> Script:
    """Send endless streams, as fast as they are read, after ``count`` streams have started."""
    begun, all_started = 0, asyncio.Event()

    async def script(talk: Conversation) -> None:
        nonlocal begun
        if talk.request.head.startswith(b"GET"):
            await talk.respond(b"{}")
            return
        await talk.begin_stream()
        await talk.chunk(HELLO)
        begun += 1
        if begun == count:
            all_started.set()
        await all_started.wait()
        while True:
            await talk.chunk(HELLO * 400)

    return script


class _Lasting:
    """Streams that continue until ``enough`` is set. ``sent`` has the number of events of each. All other requests are served at once, and
    their connection is closed."""

    def __init__(self) -> None:
        self.enough = threading.Event()
        self.sent: list[int] = []

    async def __call__(self, talk: Conversation) -> None:
        if talk.request.head.startswith(b"GET"):
            await talk.respond(b"{}")
        elif talk.request.json.get("stream"):
            await self._stream(talk)
        else:
            await talk.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(COMPLETION), COMPLETION))
            talk.writer.close()

    async def _stream(self, talk: Conversation) -> None:
        await talk.begin_stream()
        count = 0
        while not self.enough.is_set():
            await talk.chunk(HELLO)
            count += 1
            await asyncio.sleep(0.1)
        self.sent.append(count)
        await talk.chunk(DONE)
        await talk.end_stream()


@contextmanager
def serving_beside(script: Script) -> Iterator[dict[str, Any]]:
    """Run a scripted server in a separate thread, and yield the configuration of its model ``beside``."""
    port: Queue[int] = Queue()
    stop, loop = asyncio.Event(), asyncio.new_event_loop()

    async def serve() -> None:
        async with scripted(script) as server:
            port.put(server.port)
            await stop.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield {"id": "beside", "servers": [{"url": f"http://127.0.0.1:{port.get(timeout=30)}"}]}
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


@pytest.mark.row(8)
def test_slow_readers_of_fast_streams_cost_little_memory(tmp_path: Path, measured: Callable[[str], None]) -> None:
    count = 1000 if FULL else 60
    with serving_beside(_flood(count)) as flood, ExitStack() as stack:
        running = stack.enter_context(serving(tmp_path, QUICK, flood))
        alone, process = healthy_alone(running), worker(running)
        before = process.memory_info().rss
        readers = connected(stack, running, count, receive=16384)
        for one in readers:
            one.sendall(request(chat(model="beside", stream=True)))
        wait_for(lambda: in_flight(running, "beside") == count, 120)
        with Healthy(running) as client:
            most, stop = 0, time.monotonic() + (20 if FULL else 4)
            while time.monotonic() < stop or not (client.enough if FULL else len(client.times) > 10):
                most = max(most, process.memory_info().rss)
                for one in readers[::10]:
                    one.recv(1024)
                time.sleep(0.1)
        growth = (most - before) / MiB
        measured(
            f"{count} slow readers: RSS grew by {growth:.0f} MiB; "
            f"a fast client's p99 {client.p99 * 1000:.1f} ms, alone {alone * 1000:.1f} ms"
        )
        assert client.failures == [] and len(client.times) > 10
        assert growth < 256 * count / 1000 + (0 if FULL else 32), (
            f"{growth:.0f} MiB"
        )  # the growth by so few readers is less than that of caches
        assert is_not_held_up(client, alone), f"{client.p99} s, {alone} s alone"
        for one in readers:
            one.close()
        wait_for(lambda: in_flight(running, "beside") == 0, 60)


def _post(port: int, data: bytes, status_lines: list[bytes]) -> None:
    with socket.create_connection(("127.0.0.1", port)) as one:
        one.settimeout(120)
        try:
            one.sendall(data)
        except ConnectionError:
            pass  # it was refused before it was sent completely; the response can be read
        status_lines.append(_received(one)[:12])


@contextmanager
def _at_once(running: Gateway, bodies: list[bytes]) -> Iterator[list[bytes]]:
    """Send all bodies at the same time. The yielded list fills during the block and is complete after it."""
    status_lines: list[bytes] = []
    threads = [threading.Thread(target=_post, args=(running.data, body, status_lines)) for body in bodies]
    for each in threads:
        each.start()
    yield status_lines
    for each in threads:
        each.join()


@pytest.mark.row(11)
@pytest.mark.parametrize("framing", ["sized", "chunked"])
def test_many_large_bodies_at_once_cost_bounded_memory(tmp_path: Path, framing: str, measured: Callable[[str], None]) -> None:
    limit, budget, count = (20 * MiB, 256 * MiB, 100) if FULL else (2 * MiB, 8 * MiB, 40)
    data = request(chat(model="beside", messages=[{"role": "user", "content": "a" * (limit - 1000)}]))
    if framing == "chunked":
        head, _, body = data.partition(b"\r\n\r\n")
        lines = [line for line in head.split(b"\r\n") if not line.startswith(b"content-length")]
        data = b"\r\n".join([*lines, b"transfer-encoding: chunked", b"", b""]) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    with serving_beside(_Lasting()) as beside, ExitStack() as stack:
        running = stack.enter_context(serving(tmp_path, beside, body_limit=f"{limit}B", body_memory=f"{budget}B"))
        process = worker(running)
        before = most = process.memory_info().rss
        with _at_once(running, [data] * count) as status_lines:
            while len(status_lines) < count:
                most = max(most, process.memory_info().rss)
                time.sleep(0.02)
        growth, refused = most - before, status_lines.count(b"HTTP/1.1 503")
        assert set(status_lines) <= {b"HTTP/1.1 200", b"HTTP/1.1 503"} and b"HTTP/1.1 200" in status_lines
        assert growth < 4 * budget + 32 * MiB, f"{growth / MiB:.0f} MiB"
        wait_for(lambda: in_flight(running, "beside") == 0)
        with _at_once(running, [data]) as alone:
            pass
        assert alone == [b"HTTP/1.1 200"], "what was taken was given back"
    measured(
        f"{count} bodies of {limit // MiB} MiB at once, {framing}, with {budget // MiB} MiB of body_memory: "
        f"RSS grew by {growth / MiB:.0f} MiB, "
        f"{refused} were rejected"
    )


@pytest.mark.row(11)
def test_a_body_above_the_limit(tmp_path: Path, measured: Callable[[str], None]) -> None:
    limit = 100_000
    head = request(b"")[:-4].replace(b"content-length: 0", b"transfer-encoding: chunked") + b"\r\n\r\n"
    with started(tmp_path, body_limit=f"{limit}B") as running:
        for data in (request(b"a" * (limit + 1)), head + b"%x\r\n%b\r\n0\r\n\r\n" % (limit + 1, b"a" * (limit + 1))):
            status_lines: list[bytes] = []
            _post(running.data, data, status_lines)
            assert status_lines == [b"HTTP/1.1 413"]
        status_lines = []
        _post(running.data, request(b"a" * limit), status_lines)
        assert status_lines == [b"HTTP/1.1 400"], "a body of exactly the limit is read"
    measured("limit + 1, sized and chunked: 413")


@pytest.mark.row(28)
def test_all_descriptors_are_used_up(tmp_path: Path, measured: Callable[[str], None]) -> None:
    with started(tmp_path, headers_timeout="600s") as running:
        process = worker(running)
        before = process.num_fds()
        assert running.request().status_code == 200
        wait_for(lambda: process.num_fds() <= before)  # the client's connection and the idle connection to the server are closed
        most = before + 40
        process.rlimit(resource.RLIMIT_NOFILE, (most, most))
        with ExitStack() as stack:
            held = []
            for _ in range(50):
                held += connected(stack, running, 4)
                assert running.request().status_code == 200
            ended(held[:100], 120)
            held[-1].sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            assert held[-1].recv(12) == b"HTTP/1.1 200"
            assert faults(running, "evicted") >= 100 and process.num_fds() < most
        wait_for(lambda: process.num_fds() < most, 120)
        wait_for(lambda: _serves(running), 120)
        assert running.workers() == {0: process.pid}, "the worker has not been replaced"
    measured("descriptors used up by idle connections without a key: the oldest are closed, and every request is served")


def _serves(running: Gateway) -> bool:
    try:
        return running.request().status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.row(28)
def test_the_disk_of_the_access_log_is_full(tmp_path: Path, measured: Callable[[str], None]) -> None:
    """The log cannot be written, so only metrics are checked."""
    (tmp_path / "stdout").symlink_to("/dev/full")
    with gateway(tmp_path, configuration(QUICK)) as running:
        with whole(running, written=False):
            for _ in range(50):
                assert running.request().status_code == 200
            wait_for(lambda: in_flight(running) == 0)
            pids = running.workers()
            time.sleep(1)  # a few ticks, in which lines are written
            assert running.request().status_code == 200 and running.workers() == pids
            wait_for(lambda: running.metric(SERVED) == 51)
        assert running.stop() == 0
        assert "Traceback" not in running.output
    measured("standard output is /dev/full: every request served, an orderly stop")


@pytest.mark.row(28)
def test_the_clock_jumps(tmp_path: Path, measured: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock jumps, as a wrong NTP server would set it. The monotonic clock continues."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
    if library is None:
        pytest.skip("libfaketime is not installed (Debian: faketime)")
    clock = tmp_path / "clock"

    def set_clock(jump: str) -> None:
        (tmp_path / "next").write_text(jump + "\n")
        (tmp_path / "next").replace(clock)

    source = _Lasting()
    set_clock("+0")
    faked = {"LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": clock, "FAKETIME_NO_CACHE": 1, "FAKETIME_DONT_FAKE_MONOTONIC": 1}
    with serving_beside(source) as beside, ExitStack() as stack:
        with monkeypatch.context() as environ:
            for name, value in faked.items():
                environ.setenv(name, str(value))
            running = stack.enter_context(serving(tmp_path, beside))
        streams = connected(stack, running, 10)
        for one in streams:
            one.sendall(request(chat(model="beside", stream=True), extra=("connection: close",)))
        wait_for(lambda: in_flight(running, "beside") == len(streams))
        days = {_day(running)}
        for jump in ("+48h", "-48h"):
            set_clock(jump)
            wait_for(lambda: _day(running) not in days)
            days.add(_day(running))
        source.enough.set()
        received = ended(streams, 60)
        assert sorted(each.count(HELLO) for each in received) == sorted(source.sent) and len(received) == len(source.sent)
        assert all(each.endswith(DONE + b"\r\n0\r\n\r\n") for each in received)
        assert in_flight(running, "beside") == 0 and running.workers() and "exited unexpectedly" not in running.output
    measured("clock moved two days forward and back: 10 of 10 streams whole, every request served")


def _day(running: Gateway) -> str:
    """Return the day in the ``Date`` header of a response of the gateway."""
    response = running.request(model="beside")
    assert response.status_code == 200
    return response.headers["date"][:16]
