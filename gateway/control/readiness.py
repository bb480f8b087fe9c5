"""Explain whether the gateway is ready, degraded or failed, in sentences for /readyz, /status and the service manager."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from gateway import config as conf
from gateway.api.errors import counted
from gateway.control.publisher import FirstResults
from gateway.control.reload import ReloadHistory
from gateway.fleet.fleet import Fleet
from gateway.fleet.observed_servers import models_served
from gateway.monitoring.monitor import Monitor
from gateway.monitoring.server_observer import ServerObserver
from gateway.worker.supervisor import WorkerSupervisor
from upstream.launcher.schedule import ModelPhase

_INACTIVE = frozenset({ModelPhase.STOPPED, ModelPhase.SLEEPING, ModelPhase.DRAINING})


@dataclass(eq=False, slots=True)
class Readiness:
    """Judges the state of the gateway. ``is_stopping`` is set when the gateway accepts no more requests.

    ``critical_tasks`` run as long as the gateway serves.
    """

    _observer: ServerObserver
    _workers: WorkerSupervisor
    _fleet: Fleet
    _monitor: Monitor
    _history: ReloadHistory
    _first_results: FirstResults
    critical_tasks: list[asyncio.Task[None]] = field(default_factory=list)
    is_stopping: bool = False

    def not_ready(self) -> str | None:
        """Return why the gateway is not ready for traffic, or None if it is ready."""
        if self.is_stopping:
            return "draining"
        if not any(status.up for status in self._workers.statuses):
            return "no worker is up"
        if pending := self.pending():
            return f"waiting for {', '.join(pending)}"
        known = self._first_results.are_applied(self._workers.have_applied)
        return None if known else "waiting for the workers to receive the state of their servers"

    def pending(self) -> list[str]:
        """Return the parts of the initial configuration without a first result."""
        return self._first_results.pending(self._observer.without_first_result())

    def degraded(self) -> list[str]:
        """Explain why some requests cannot be served as configured. The list is empty if all can.

        It contains no configured name, because clients without access to /status may read it.
        """
        ready, models = self._observer.ready_servers(), self._observer.config.served_models
        count = sum(not ready[model.id] and not self._is_inactive(model) for model in models)
        without = [f"{count} of {counted(len(models), 'model')} without a ready server"] if count else []
        wrong = {server.model.id for server, reason in models_served(self._observer.config, self._observer.observe()) if reason}
        if wrong:
            without.append(f"{len(wrong)} of {counted(len(models), 'model')} unknown to a server")
        return without + [f"{name} is down" for name in self._monitor.observed_dependencies().down()]

    def _is_inactive(self, model: conf.Model) -> bool:
        """Return whether the gateway itself has stopped a model's servers, or is starting them again."""
        phase = self._fleet.phase(model.id)
        return phase in _INACTIVE or (phase is ModelPhase.STARTING and self._observer.config.may_stop(model))

    def broken(self) -> str | None:
        """Return what has failed and will not recover without a restart, or None."""
        return task_failure(self.critical_tasks) or self._workers.failure(time.monotonic())

    def headline(self) -> str:
        """Summarize the state of the gateway in one line."""
        servers = f"{self._observer.up()} of {self._observer.in_rotation()} servers up"
        rejected = "" if self._history.last.successful else "; the last configuration was rejected"
        down = "".join(f"; {name} is down" for name in self._monitor.dependencies.down())
        return f"{self.broken() or self.not_ready() or servers}{down}{rejected}"


def task_failure(tasks: Iterable[asyncio.Task[None]]) -> str | None:
    """Return the name of a task that has ended, or None if all are running."""
    ended = next((task for task in tasks if task.done()), None)
    return None if ended is None else f"{ended.get_name()} has ended"
