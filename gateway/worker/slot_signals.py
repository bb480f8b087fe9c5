"""The locks and signals by which workers share the slots of servers. ``upstream.balancing.shared_limit`` decides who gets a slot.

Control creates a file for the locks and an event descriptor for each worker, which all workers inherit. The rules: a lock is a byte of the
file, found by the server's name, and the kernel releases it if the process dies. A signal says only that slots may be free. A worker that
misses one checks again at its next tick.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256

from gateway.admission.inflight import worker_share
from gateway.system.file_lock import FileLock
from gateway.telemetry.metrics import WorkerMetrics
from upstream.balancing.shared_limit import Peer, SharedLimit


class SlotSignals:
    """The descriptors that all workers inherit: that of the locks, and one for each worker, in their order."""

    def __init__(self, locks: int, signals: Sequence[int]) -> None:
        self.locks = locks
        self.signals = tuple(signals)

    @classmethod
    def create(cls, workers: int) -> SlotSignals:
        """Create the descriptors for this number of workers."""
        return cls(os.memfd_create("slots"), [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(workers)])

    def close(self) -> None:
        """Close the descriptors."""
        for fd in (self.locks, *self.signals):
            os.close(fd)

    def wake(self, number: int) -> None:
        """Let a worker check for free slots."""
        os.eventfd_write(self.signals[number], 1)

    def wake_all(self) -> None:
        """Let all workers check for free slots."""
        for number in range(len(self.signals)):
            self.wake(number)

    @contextmanager
    def listening(self, number: int, check: Callable[[], None]) -> Iterator[None]:
        """Call ``check`` in the event loop when this worker is woken, until the context ends."""
        fd, loop = self.signals[number], asyncio.get_running_loop()

        def woken() -> None:
            os.eventfd_read(fd)  # once for all signals so far
            check()

        loop.add_reader(fd, woken)
        try:
            yield
        finally:
            loop.remove_reader(fd)


class SharedSlots:
    """The limits of servers as one worker shares them. ``number``: this worker."""

    def __init__(self, signals: SlotSignals, metrics: WorkerMetrics, number: int) -> None:
        self._signals = signals
        self._metrics = metrics
        self._number = number
        self._workers = len(signals.signals)

    def limit(self, model: str, server: str, index: int, whole: int) -> SharedLimit:
        """Return the limit of a server. ``index``: its place in the model. For each server, another worker has the remainder."""
        parts = [worker_share(whole, number + index, self._workers) for number in range(self._workers)]
        lock = FileLock(self._signals.locks, 1, int.from_bytes(sha256(server.encode()).digest()[:7]))
        queued = self._metrics.cells("queued_requests", model)
        return SharedLimit(whole, self._number, parts, queued, lock, self._peers(model, server), self._signals.wake)

    def _peers(self, model: str, server: str) -> Callable[[], Sequence[Peer]]:
        """Return a function that finds the other workers. A worker that has not applied the model yet uses no slot."""
        numbers = [number for number in range(self._workers) if number != self._number]
        metrics, known = self._metrics, list[Peer]()

        def peers() -> Sequence[Peer]:
            if len(known) < len(numbers):
                used, queued = metrics.peer_cells("server_inflight", model, server), metrics.peer_cells("queued_requests", model)
                found = zip(numbers, used, queued, strict=True)
                known[:] = [Peer(each, used, queued) for each, used, queued in found if used is not None and queued is not None]
            return known

        return peers
