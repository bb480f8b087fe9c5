"""Measures an event loop from inside its process: the CPU time of each callback, and the wall-clock pauses between callbacks.

`MeasuredLoop` is uvloop's loop. It times what the loop calls: scheduled callbacks, steps of tasks, and the methods of protocols. A timer
of one millisecond in the same loop measures pauses: each is the delay of the timer's callback.
The rules: a callback within a callback belongs to the outer one. SIGUSR1 begins a measurement, SIGUSR2 ends it and writes its `Result`
to the file that the environment names.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
from bisect import bisect_left
from collections.abc import Callable, Coroutine
from pathlib import Path
from time import monotonic_ns, thread_time_ns
from typing import Any, TypeVar

import msgspec
import uvloop

T = TypeVar("T")
_run = uvloop.run  # before `measure_uvloop`

FILE = "BENCH_PROBE"
"""The environment variable with the path of the result."""
INTERVAL = 0.001
"""Seconds between two callbacks of the timer that measures pauses."""
_NAMED = 100_000  # nanoseconds of CPU from which a callback is noted by name; to find a name takes longer than many callbacks
_MOST_NAMES = 40
_BOUNDS = tuple(int(1000 * 1.05**number) for number in range(330))  # nanoseconds, up to ten seconds
_PROTOCOL = (
    "connection_made",
    "connection_lost",
    "data_received",
    "eof_received",
    "get_buffer",
    "buffer_updated",
    "pause_writing",
    "resume_writing",
)


class Durations(msgspec.Struct, frozen=True):
    """A distribution in seconds; the percentiles are exact to 5%."""

    count: int
    p50: float
    p99: float
    p999: float
    most: float


class Longest(msgspec.Struct, frozen=True):
    """The callbacks of one name that took at least 0.1 ms of CPU: how many, and the seconds of the longest."""

    name: str
    count: int
    most: float


class Result(msgspec.Struct, frozen=True):
    """A measurement. `callbacks` is CPU time, `pauses` wall-clock time; `longest` is sorted, and has garbage collections too."""

    callbacks: Durations
    pauses: Durations
    longest: list[Longest]


class Histogram:
    """Counts durations in buckets that grow by 5%."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._most = 0

    def add(self, nanoseconds: int) -> None:
        self._counts[bisect_left(_BOUNDS, nanoseconds)] += 1
        if nanoseconds > self._most:
            self._most = nanoseconds

    def durations(self) -> Durations:
        """Return the distribution; zeros without any duration."""
        p50, p99, p999 = (self._percentile(share) / 1e9 for share in (0.5, 0.99, 0.999))
        return Durations(sum(self._counts), p50, p99, p999, self._most / 1e9)

    def _percentile(self, share: float) -> int:
        left = share * sum(self._counts)
        for bound, count in zip(_BOUNDS, self._counts, strict=False):
            left -= count
            if left <= 0:
                return min(bound, self._most)
        return self._most


class Probe:
    """One process's measurement."""

    def __init__(self) -> None:
        self._inside = False
        self._collection_began = 0
        self._tick_due = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything measured so far."""
        self._callbacks = Histogram()
        self._pauses = Histogram()
        self._named: dict[str, tuple[int, int]] = {}

    def result(self) -> Result:
        """Return what was measured since the last `clear`."""
        named = sorted(((most, count, name) for name, (count, most) in self._named.items()), reverse=True)
        longest = [Longest(name, count, most / 1e9) for most, count, name in named[:_MOST_NAMES]]
        return Result(self._callbacks.durations(), self._pauses.durations(), longest)

    def timed(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        """Return a callback that does the same, and is measured."""

        def run(*arguments: Any) -> Any:
            if self._inside:
                return callback(*arguments)
            self._inside = True
            began = thread_time_ns()
            try:
                return callback(*arguments)
            finally:
                took = thread_time_ns() - began
                self._inside = False
                self._callbacks.add(took)
                if took >= _NAMED:
                    self._note(name_of(callback), took)

        return run

    def tick(self, loop: MeasuredLoop) -> None:
        """Measure the delay of the timer, and start it again."""
        now = monotonic_ns()
        if self._tick_due:
            self._pauses.add(max(0, now - self._tick_due))
        self._tick_due = now + int(INTERVAL * 1e9)
        loop.call_later_unmeasured(INTERVAL, self.tick, loop)

    def collected(self, phase: str, info: dict[str, int]) -> None:
        """Note the CPU time of a garbage collection, which is also a part of the callback that it interrupts."""
        if phase == "start":
            self._collection_began = thread_time_ns()
        elif (took := thread_time_ns() - self._collection_began) >= _NAMED:
            self._note(f"garbage collection of generation {info['generation']}", took)

    def _note(self, name: str, nanoseconds: int) -> None:
        count, most = self._named.get(name, (0, 0))
        self._named[name] = count + 1, max(most, nanoseconds)


def name_of(callback: Any) -> str:
    """Return the module and name of the function behind a callback; for a step of a task, those of its coroutine."""
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        coroutine: Any = owner.get_coro()
        return f"step of the task {_module(coroutine)}{getattr(coroutine, '__qualname__', coroutine)}"
    if isinstance(callback, functools.partial):
        return name_of(callback.func)
    return f"{getattr(callback, '__module__', None) or type(owner).__module__}.{getattr(callback, '__qualname__', callback)}"


def _module(coroutine: Any) -> str:
    frame = getattr(coroutine, "cr_frame", None)
    return f"{frame.f_globals.get('__name__', '?')}." if frame is not None else ""


class TimedMethod:
    """A protocol's method, measured. Also measures a function that an instance has in its place: transports call either."""

    def __init__(self, probe: Probe, owner: str, name: str, function: Callable[..., Any]) -> None:
        self._probe = probe
        self._stored = f"_timed_{owner}_{name}"
        self._function = function

    def __get__(self, instance: Any, owner: type[Any]) -> Callable[..., Any]:
        if instance is None:
            return self._function
        return self._probe.timed(vars(instance)[self._stored] if self._replaced(instance) else self._function.__get__(instance))

    def __set__(self, instance: Any, function: Callable[..., Any]) -> None:
        vars(instance)[self._stored] = function

    def __delete__(self, instance: Any) -> None:
        del vars(instance)[self._stored]

    def _replaced(self, instance: Any) -> bool:
        return self._stored in getattr(instance, "__dict__", ())


_Loop: Any = uvloop.Loop  # without its types: the methods below only pass their arguments on


class MeasuredLoop(_Loop):  # type: ignore[misc]
    """uvloop's event loop, in which a probe measures what the loop calls."""

    def __init__(self) -> None:
        self.probe = Probe()

    def call_soon(self, callback: Callable[..., Any], *arguments: Any, context: Any = None) -> Any:
        return super().call_soon(self.probe.timed(callback), *arguments, context=context)

    def call_soon_threadsafe(self, callback: Callable[..., Any], *arguments: Any, context: Any = None) -> Any:
        return super().call_soon_threadsafe(self.probe.timed(callback), *arguments, context=context)

    def call_later(self, delay: float, callback: Callable[..., Any], *arguments: Any, context: Any = None) -> Any:  # call_at calls it
        return super().call_later(delay, self.probe.timed(callback), *arguments, context=context)

    def call_later_unmeasured(self, delay: float, callback: Callable[..., Any], *arguments: Any) -> None:
        """Call a function of the probe itself."""
        super().call_later(delay, callback, *arguments)

    def add_reader(self, fd: Any, callback: Callable[..., Any], *arguments: Any) -> Any:
        return super().add_reader(fd, self.probe.timed(callback), *arguments)

    async def create_server(self, factory: Any, *arguments: Any, **more: Any) -> Any:
        return await super().create_server(self._observed(factory), *arguments, **more)

    async def create_connection(self, factory: Any, *arguments: Any, **more: Any) -> Any:
        return await super().create_connection(self._observed(factory), *arguments, **more)

    async def create_unix_connection(self, factory: Any, *arguments: Any, **more: Any) -> Any:
        return await super().create_unix_connection(self._observed(factory), *arguments, **more)

    async def connect_accepted_socket(self, factory: Any, *arguments: Any, **more: Any) -> Any:
        return await super().connect_accepted_socket(self._observed(factory), *arguments, **more)

    def _observed(self, factory: Callable[[], Any]) -> Callable[[], Any]:
        """Return a factory of the same protocols, with measured methods."""

        def make() -> Any:
            protocol = factory()
            self._observe(type(protocol))
            return protocol

        return make

    def _observe(self, protocol: type[Any]) -> None:
        for name in _PROTOCOL:
            function = getattr(protocol, name, None)
            if function is not None and not isinstance(_found(protocol, name), TimedMethod):
                setattr(protocol, name, TimedMethod(self.probe, protocol.__qualname__, name, function))


def _found(protocol: type[Any], name: str) -> Any:
    return next((vars(each)[name] for each in protocol.__mro__ if name in vars(each)), None)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `uvloop.run` does, measured."""
    return _run(_measured(main), loop_factory=MeasuredLoop)


def measure_uvloop() -> None:
    """Let `uvloop.run` measure, for a program that does not depend on this module."""
    uvloop.run = run  # type: ignore[assignment]  # it has fewer parameters, and the gateway's worker uses none of the others


async def _measured(main: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, MeasuredLoop)
    probe, file = loop.probe, Path(os.environ[FILE])
    loop.add_signal_handler(signal.SIGUSR1, probe.clear)
    loop.add_signal_handler(signal.SIGUSR2, lambda: _write(file, probe.result()))
    gc.callbacks.append(probe.collected)
    probe.tick(loop)
    return await main


def _write(file: Path, result: Result) -> None:
    """Write the file in one step."""
    fresh = file.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(result))
    fresh.replace(file)
