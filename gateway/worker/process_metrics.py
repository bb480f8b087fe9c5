"""CPU time, memory and file descriptors of the workers' processes, as the kernel reports them (proc(5)).

The rule: control reads them when Prometheus scrapes, so they cost the scrape and never a request. A process that ends while it is read
has no series.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from prometheus_client import ProcessCollector

from gateway.telemetry.metrics import Series
from gateway.worker.supervisor import WorkerStatus

_FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "process_cpu_seconds_total": "worker_cpu_seconds_total",
        "process_resident_memory_bytes": "worker_resident_memory_bytes",
        "process_open_fds": "worker_open_fds",
        "process_max_fds": "worker_max_fds",
    }
)


def process_series(workers: Iterable[WorkerStatus]) -> Iterator[tuple[Series, float]]:
    """Return the series of every worker that has a process."""
    for worker in workers:
        if worker.pid is not None:
            yield from _of_one(str(worker.number), worker.pid)


def _of_one(worker: str, pid: int) -> Iterator[tuple[Series, float]]:
    for metric in ProcessCollector(pid=lambda: pid, registry=None).collect():
        for sample in metric.samples:
            if sample.name in _FAMILIES:
                yield Series(_FAMILIES[sample.name], (worker,)), sample.value
