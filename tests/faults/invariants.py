"""Invariants that must hold after every fault.

1. Every started request was finished and recorded: requests started = requests settled = records.
2. Nothing is in flight: no in-flight slot, gauge, server slot, queue slot or watched deadline.
3. Nothing is left: no additional task, connection or file descriptor.

``unharmed`` serves a worker in the event loop of the test and can inspect all of its state. ``whole`` inspects a gateway of several
processes from outside, by its metrics, its access log and its processes in the operating system. It cannot see the tasks of a worker,
but it can see what a task would hold: a request in flight or a connection.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from gateway.api.routes import ENDPOINTS
from gateway.snapshot.snapshot import Key, Model
from gateway.telemetry.metrics import PREFIX
from tests.support.controlled import Controlled
from tests.support.process import Gateway, alive
from tests.support.running import Served, serving, until

_SETTLES_WITHIN = 15.0
"""Seconds that requests and tasks may take to finish on a busy machine."""
_WHOLE_SETTLES_WITHIN = 60.0
"""Seconds that all processes of a gateway may take to settle. A launched server may have to be restarted meanwhile."""
_POLL_INTERVAL = 0.05
_IN_FLIGHT = ("inflight_requests", "queued_requests", "server_inflight")


@asynccontextmanager
async def unharmed(models: Sequence[Model], keys: Sequence[Key] = (), **more: Any) -> AsyncIterator[Served]:
    """Serve as ``serving`` does while the block provokes a fault. Then check the invariants."""
    async with nothing_left(), serving(models, keys, **more) as served:
        yield served
        await settled(served)


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """Wait at the end until this process has no more tasks, descriptors and child processes than before the block."""
    tasks, descriptors, processes = len(asyncio.all_tasks()), _descriptors(), _children()
    yield
    await until(lambda: len(asyncio.all_tasks()) <= tasks, _SETTLES_WITHIN)
    await until(lambda: _descriptors() <= descriptors, _SETTLES_WITHIN)
    await until(lambda: _children() <= processes, _SETTLES_WITHIN)


async def settled(served: Served) -> None:
    """Wait until nothing is in flight. Then check that every started request was recorded exactly once.

    The other routes (``/health``, the model lists) have records too, but they are not counted as started requests.
    """
    await until(lambda: served.in_flight == 0 and served.total("queued_requests") == 0 and not served.inline_tasks, _SETTLES_WITHIN)
    records = [record for record in served.context.records if record.endpoint in ENDPOINTS]
    assert served.context.started == len(records), f"{served.context.started} requests were begun and {len(records)} recorded"
    assert len({record.id for record in records}) == len(records), "a request was recorded twice"


async def longest_iteration(stop: asyncio.Event) -> float:
    """Return the CPU time, in seconds, of the longest event-loop iteration until ``stop``. CPU time excludes other programs."""
    longest, last = 0.0, time.thread_time()
    while not stop.is_set():
        await asyncio.sleep(0)
        now = time.thread_time()
        longest, last = max(longest, now - last), now
    return longest


# A gateway of several processes


def soon_idle(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model with launched servers that close idle connections after 0.5 s instead of 75 s. Later connections are leaks."""
    launch = {**model["launch"], "env": {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "0.5"}}
    return {**model, "launch": launch}


@dataclass(frozen=True, slots=True)
class View:
    """A gateway seen from outside. ``processes``: control and its workers by name. ``starting``: number of workers that are not up yet.
    ``samples``: family, labels and value of each series. ``log``: the access log, or None if it cannot be read."""

    processes: Callable[[], Mapping[str, int]]
    starting: Callable[[], int]
    samples: Callable[[], Iterator[tuple[str, tuple[str, ...], float]]]
    log: Callable[[], str] | None


def _of_processes(one: Gateway) -> View:
    def samples() -> Iterator[tuple[str, tuple[str, ...], float]]:
        for family in text_string_to_metric_families(one.get("/metrics").text):
            for sample in family.samples:
                yield sample.name.removeprefix(PREFIX), tuple(sample.labels.values()), sample.value

    def processes() -> Mapping[str, int]:
        return {"control": one.process.pid, **{f"worker {number}": pid for number, pid in one.workers().items()}}

    def starting() -> int:
        return sum(not worker["up"] for worker in one.get("/status").json()["workers"])

    return View(processes, starting, samples, lambda: one.log)


def _of_control(one: Controlled, log: Callable[[], str] | None) -> View:
    def samples() -> Iterator[tuple[str, tuple[str, ...], float]]:
        for series, values in one.report.series().items():
            yield series.family, series.labels, values[0]

    def processes() -> Mapping[str, int]:
        workers = {f"worker {number}": worker.pid for number, worker in enumerate(one.control.workers.statuses)}
        return {"control": os.getpid(), **{name: pid for name, pid in workers.items() if pid}}

    return View(processes, lambda: sum(not worker.up for worker in one.control.workers.statuses), samples, log)


class Whole:
    """The state of a gateway before a fault, to be compared with its state afterwards.

    ``lost``: the most lines of the access log that a killed worker may have buffered and not written. ``written``: whether the log can
    be written at all. ``within``: seconds in which the gateway has to settle.
    """

    def __init__(self, view: View, lost: int, written: bool, within: float) -> None:
        self._view = view
        self._lost = lost
        self._logged = written and view.log is not None
        self._within = within
        self._control = view.processes()["control"]
        self._descriptors: dict[str, int] = {}
        self._processes = 0

    def __enter__(self) -> Whole:
        for _ in self._start():
            time.sleep(_POLL_INTERVAL)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            for _ in self._end():
                time.sleep(_POLL_INTERVAL)

    async def __aenter__(self) -> Whole:
        for _ in self._start():
            await asyncio.sleep(_POLL_INTERVAL)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Wait without blocking the event loop of the test. The clients' connections close in it, and control may run in it."""
        if error is None:
            for _ in self._end():
                await asyncio.sleep(_POLL_INTERVAL)

    def _start(self) -> Iterator[None]:
        """Record the state once every worker is up and no more descriptors are opened. Yield between two polls."""
        yield from self._until("workers that are not up", self._view.starting)
        while self._descriptors != (held := self._held()):
            self._descriptors = held
            yield
        self._processes = _children(self._control)

    def _end(self) -> Iterator[None]:
        """Yield between two polls until nothing is left.

        Raises AssertionError with what remains.
        """
        yield from self._until("in flight", self._in_flight)
        if self._logged:
            yield from self._until("requests that have ended, and are not in the log once", self._unrecorded)
        yield from self._until("more descriptors than before", self._more_descriptors)
        yield from self._until("more processes than before", lambda: max(_children(self._control) - self._processes, 0))

    def _until(self, name: str, left: Callable[[], object]) -> Iterator[None]:
        deadline = time.monotonic() + self._within
        while found := left():
            assert time.monotonic() < deadline, f"{name}: {found}"
            yield

    def _in_flight(self) -> dict[tuple[str, ...], float]:
        return {(name, *labels): value for name, labels, value in self._view.samples() if name in _IN_FLIGHT and value}

    def _ended(self) -> int:
        return int(sum(value for name, _, value in self._view.samples() if name == "requests_total"))

    def _unrecorded(self) -> int:
        assert self._view.log is not None
        ended, lines = self._ended(), request_ids(self._view.log())
        assert len(set(lines)) == len(lines), "a request was recorded twice"
        missing = ended - len(lines)
        return 0 if 0 <= missing <= self._lost else missing

    def _more_descriptors(self) -> dict[str, int]:
        more = {name: count - self._descriptors.get(name, 0) for name, count in self._held().items()}
        return {name: count for name, count in more.items() if count > 0}

    def _held(self) -> dict[str, int]:
        return {name: _descriptors(pid) for name, pid in self._view.processes().items()}


def whole(
    one: Gateway | Controlled,
    *,
    log: Callable[[], str] | None = None,
    lost: int = 0,
    written: bool = True,
    within: float = _WHOLE_SETTLES_WITHIN,
) -> Whole:
    """Check the invariants at the end of the block. All clients of the block must have disconnected by then.

    ``log`` reads the access log of a gateway whose control runs in the test process (see ``logged``). The result is an
    asynchronous context manager too.
    """
    return Whole(_of_processes(one) if isinstance(one, Gateway) else _of_control(one, log), lost, written, within)


@contextmanager
def ended(one: Gateway, within: float = _SETTLES_WITHIN) -> Iterator[None]:
    """Check a block in which the gateway exits: none of its processes remains, and no request is in its log twice."""
    tree = one.tree()
    yield
    assert one.process.poll() is not None
    deadline = time.monotonic() + within
    while left := alive(tree):
        assert time.monotonic() < deadline, f"outlives the gateway: {left}"
        time.sleep(_POLL_INTERVAL)
    lines = request_ids(one.log)
    assert len(set(lines)) == len(lines), "a request was recorded twice"


@contextmanager
def logged(file: Path) -> Iterator[Callable[[], str]]:
    """Yield a reader of the access log of workers that the block starts, with control in the test process. The log is its stdout."""
    before = os.dup(1)
    try:
        with open(file, "ab") as output:
            os.dup2(output.fileno(), 1)
        yield file.read_text
    finally:
        os.dup2(before, 1)
        os.close(before)


def request_ids(log: str) -> list[str]:
    """Return the request IDs of an access log, in order. An incomplete last line is skipped."""
    return [str(json.loads(line)["request_id"]) for line in log.splitlines(keepends=True) if line.endswith("\n") and line.startswith("{")]


def _descriptors(pid: int | str = "self") -> int:
    """Count the file descriptors of a process. A process that has just exited has none."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except FileNotFoundError:
        return 0


def _children(pid: int | None = None) -> int:
    """Count the descendants of a process."""
    return len(psutil.Process(pid).children(recursive=True))
