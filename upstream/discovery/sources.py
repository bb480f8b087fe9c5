"""All configured sources: a watch for each of them, and its status.

The rule: changes are reported at most a few times a second, for any number of changed endpoints, and always with the last state. A source
of several models is watched only once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

from upstream.discovery import dns, kubernetes
from upstream.discovery.dns import DnsName, Resolve, system_resolver
from upstream.discovery.endpoints import Endpoint, Observation
from upstream.discovery.kubernetes import Cluster, Service

Source: TypeAlias = Service | DnsName
GATHER = 0.05
"""Seconds in which further changes are collected for one report."""
SPACING = 0.5
"""Seconds between two reports."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiscoveryStatus:
    """The status of a source.

    ``first_result``: it has responded or failed at least once. ``problem``: why its endpoints may be old or incomplete; empty otherwise.
    ``since``: wall clock of the last change.
    """

    endpoints: tuple[Endpoint, ...] = ()
    problem: str = ""
    first_result: bool = False
    since: float | None = None


class _SourceWatch:
    """One source, and the task that watches it."""

    def __init__(self, source: Source, work: Callable[[_SourceWatch], Coroutine[Any, Any, None]], on_change: Callable[[], None]) -> None:
        self.source = source
        self.status = DiscoveryStatus()
        self._on_change = on_change
        self.task = asyncio.create_task(self._guarded(work), name=f"discover {source}")

    async def _guarded(self, work: Callable[[_SourceWatch], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await work(self)
            except Exception as error:  # noqa: BLE001  the outer edge: a bug with one source must not end the watches of others
                _log.exception("%s", self.source)
                self.record_problem(f"{type(error).__name__}: {error}")
                await asyncio.sleep(SPACING)

    def record(self, seen: Observation) -> None:
        self._set_status(replace(self.status, endpoints=seen.endpoints, problem=seen.problem, first_result=True))

    def record_problem(self, problem: str) -> None:
        self._set_status(replace(self.status, problem=problem, first_result=True))

    def _set_status(self, finding: DiscoveryStatus) -> None:
        before = self.status
        if finding == before:
            return
        if finding.problem and finding.problem != before.problem:
            _log.warning("%s: %s", self.source, finding.problem)
        elif before.problem and not finding.problem:
            _log.info("%s: recovered, %d endpoints", self.source, len(finding.endpoints))
        self.status = replace(finding, since=time.time())
        self._on_change()


class Sources:
    """Watches the configured sources, and reports to ``on_change``. Sources are set after entering. Exiting ends every watch."""

    def __init__(self, on_change: Callable[[], None], cluster: Cluster, resolve: Resolve = system_resolver) -> None:
        self._on_change = on_change
        self._cluster = cluster
        self._resolve = resolve
        self._watches: dict[Source, _SourceWatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._reported_at = float("-inf")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.set_sources(())
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def set_sources(self, sources: Iterable[Source]) -> None:
        """Watch exactly these sources. Unchanged sources keep their endpoints."""
        wanted = dict.fromkeys(sources)
        for source in wanted.keys() - self._watches.keys():
            watch = self._watches[source] = _SourceWatch(source, self._work, self._changed)
            self._tasks.add(watch.task)
            watch.task.add_done_callback(self._tasks.discard)
        for source in self._watches.keys() - wanted.keys():
            self._watches.pop(source).task.cancel()

    def statuses(self) -> Mapping[Source, DiscoveryStatus]:
        """Return the status of each source."""
        return {source: watch.status for source, watch in self._watches.items()}

    async def _work(self, watch: _SourceWatch) -> None:
        if isinstance(watch.source, Service):
            await kubernetes.watch(watch.source, self._cluster, watch.record, watch.record_problem)
        else:
            await dns.watch(watch.source, self._resolve, watch.record, watch.record_problem)

    def _changed(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time() + GATHER, self._reported_at + SPACING), self._report)

    def _report(self) -> None:
        self._timer, self._reported_at = None, asyncio.get_running_loop().time()
        self._on_change()
