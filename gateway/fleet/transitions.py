"""The transitions of one launched model, step by step: stop, sleep, wake, replace its servers one at a time.

The rule: a server that may still have requests is stopped only when every worker has taken it out of rotation and nothing is in flight on
it, or the drain timeout has expired. A cancelled transition changes nothing more, and the fleet's next pass continues from the current
state.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from gateway.fleet.launch_diff import LaunchDiff
from gateway.fleet.launched_model import LaunchedModel
from gateway.fleet.operations import RefusedOperation
from gateway.system.tasks import wait_at_most, wait_until
from gateway.worker.supervisor import WorkerSupervisor
from upstream.balancing.server import Condition
from upstream.launcher.launcher import Launcher
from upstream.launcher.lifecycle import LaunchSpec, LaunchStatus
from upstream.launcher.schedule import ModelPhase
from upstream.vllm.health import ProbeTarget
from upstream.vllm.sleep import SleepError, fall_asleep, wake_up

STOP_GRACE = 10.0
"""Seconds that a launched server has to exit after SIGTERM once nothing is in flight on it."""
POLL_INTERVAL = 0.05
"""Seconds between two checks of an awaited condition."""
_log = logging.getLogger("vllm_gateway.fleet")


class Rotation(Protocol):
    """The functions of control that the fleet needs to take servers in and out of the workers' rotation."""

    def publish_snapshot(self) -> int:
        """Send the workers a snapshot of the current servers. Returns the message's number for ``have_applied``."""

    def publish_health(self) -> int:
        """Send the workers the current health of servers and models. Returns the message's number for ``have_applied``."""

    def conditions(self) -> Mapping[str, Condition]:
        """Return the condition of every server."""


@dataclass(frozen=True, eq=False, slots=True)
class Transitions:
    """The steps of transitions. ``in_flight`` returns the number of requests on the given servers, in all workers."""

    _launcher: Launcher
    _rotation: Rotation
    _workers: WorkerSupervisor
    _in_flight: Callable[[Iterable[str]], int]

    async def stop(self, model: LaunchedModel) -> None:
        """Stop its servers now."""
        started = time.monotonic()
        launched = model.names & self._launcher.servers.keys()
        await asyncio.gather(*(self._launcher.stop(name, STOP_GRACE) for name in launched))
        model.stop_times.append(time.monotonic() - started)
        model.step = None
        model.out_of_rotation.clear()
        model.surplus_stopped()
        self._rotation.publish_snapshot()

    async def sleep(self, model: LaunchedModel) -> None:
        """Put its servers to sleep. If one cannot sleep, all are stopped."""
        try:
            await asyncio.gather(*(fall_asleep(target, model.launch.sleep_level) for target in self._targets(model)))
        except SleepError as error:
            _log.error("%s cannot sleep and is stopped: %s", model.id, error)
            await self.stop(model)
        else:
            model.step = ModelPhase.SLEEPING

    async def wake(self, model: LaunchedModel) -> None:
        """Wake its servers. If one cannot be woken, all are stopped, so that they are started again."""
        started = time.monotonic()
        try:
            await asyncio.gather(*(wake_up(target, model.launch.sleep_level) for target in self._targets(model)))
        except SleepError as error:
            _log.error("%s cannot be woken and is restarted: %s", model.id, error)
            await self.stop(model)
        else:
            model.wake_times.append(time.monotonic() - started)
            model.step = None
            self._rotation.publish_health()

    def down_first(self, specs: Iterable[LaunchSpec]) -> list[LaunchSpec]:
        """Sort servers that are down before those that are up, so that at most one additional server is down while they are replaced."""
        conditions = self._rotation.conditions()
        return sorted(specs, key=lambda spec: conditions[spec.name] is Condition.UP)

    async def replace(self, model: LaunchedModel, specs: Iterable[LaunchSpec]) -> None:
        """Replace the servers one after the other. Raises RefusedOperation if a server does not come up."""
        for spec in specs:
            await self._replace_one(model, spec)

    async def apply_diff(self, model: LaunchedModel, diff: LaunchDiff) -> None:
        """Change the model's servers to match the configuration.

        Raises RefusedOperation if a replaced server does not come up. The remaining ones then stay as they are.
        """
        _log.info("%s: its configuration has changed", model.id)
        await asyncio.gather(*(self._remove(model, name) for name in diff.removed))
        model.surplus_stopped()
        await self.replace(model, self.down_first(diff.replaced))
        for spec in diff.added:
            self._launcher.start(spec)

    async def stop_when_drained(self, model: LaunchedModel) -> None:
        """Drain all its servers, then stop them. It starts again when its GPUs are free."""
        await self._drain(model, model.names, model.drain_timeout)
        model.stopping = True
        await self.stop(model)

    def take_out_of_rotation(self, model: LaunchedModel, names: Collection[str]) -> int:
        """Take servers out of rotation. Returns the message's number for ``have_applied``."""
        model.out_of_rotation |= set(names)
        return self._rotation.publish_health()

    async def _drain(self, model: LaunchedModel, names: Collection[str], seconds: float) -> None:
        """Take servers out of rotation, and wait until nothing is in flight on them, for ``seconds`` at most."""
        number = self.take_out_of_rotation(model, names)
        drained = wait_until(lambda: self._workers.have_applied(number) and not self._in_flight(names), POLL_INTERVAL)
        await wait_at_most(None if seconds == math.inf else seconds, drained)

    async def _remove(self, model: LaunchedModel, name: str) -> None:
        """Stop a server that the configuration no longer has, after its last request."""
        await self._drain(model, [name], math.inf)
        await self._launcher.stop(name, STOP_GRACE)

    async def _replace_one(self, model: LaunchedModel, spec: LaunchSpec) -> None:
        name = spec.name
        await self._drain(model, [name], model.drain_timeout)
        if self._status(name) is not None:
            await self._launcher.stop(name, STOP_GRACE)
        model.out_of_rotation.discard(name)
        self._launcher.start(spec)
        # The next server is replaced only once every worker uses this one again.
        await wait_until(lambda: (status := self._status(name)) is None or status.first_start_finished, POLL_INTERVAL)
        if self._rotation.conditions()[name] is not Condition.UP:
            raise RefusedOperation(f"the restart stops here because {name} did not become ready again")
        number = self._rotation.publish_health()
        await wait_until(lambda: self._workers.have_applied(number), POLL_INTERVAL)

    def _targets(self, model: LaunchedModel) -> list[ProbeTarget]:
        servers = [server for name, server in self._launcher.servers.items() if name in model.names]
        return [ProbeTarget(server.spec.name, server.status.address, server.api_key) for server in servers]

    def _status(self, name: str) -> LaunchStatus | None:
        return next((status for status in self._launcher.statuses() if status.name == name), None)
