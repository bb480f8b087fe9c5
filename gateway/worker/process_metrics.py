"""CPU time, memory and file descriptors of the workers' processes, as the kernel reports them (proc(5)).

The rule: control reads them when Prometheus scrapes, so they cost the scrape and never a request. A process that ends while it is read
has no series.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import ProcessCollector

from gateway.telemetry.metrics import Series
from gateway.worker.supervisor import WorkerStatus

_SHOWN = ("cpu_seconds_total", "resident_memory_bytes", "open_fds", "max_fds")
"""The ends of metric names, which begin with ``process_`` in the collector, and with ``worker_`` in the gateway."""


def process_series(workers: Iterable[WorkerStatus]) -> Iterator[tuple[Series, float]]:
    """Return the series of every worker that has a process."""
    for worker in workers:
        if worker.pid is not None:
            yield from _of_one(str(worker.number), worker.pid)


def _of_one(worker: str, pid: int) -> Iterator[tuple[Series, float]]:
    for metric in ProcessCollector(pid=lambda: pid, registry=None).collect():
        for sample in metric.samples:
            name = sample.name.removeprefix("process_")
            if name in _SHOWN:
                yield Series(f"worker_{name}", (worker,)), sample.value
