"""What is done with the servers of one model, step by step: ended, put to sleep, woken, replaced one after the other.

The rule: a server that may still have requests is ended only when every worker knows that it gets no new ones and nothing is in flight
on it, or the model's patience is over. Who is cancelled on the way leaves things where they are: the fleet's next look goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from contextlib import suppress
from typing import Protocol

from gateway.fleet.launch_diff import Reshape
from gateway.fleet.launched_model import Resident
from gateway.fleet.operations import RefusedOperation
from gateway.worker.supervisor import WorkerSupervisor
from upstream.balancing.server import Condition
from upstream.launcher.launcher import Launcher
from upstream.launcher.lifecycle import LaunchSpec, LaunchStatus
from upstream.launcher.schedule import Action, ModelPhase
from upstream.vllm.health import Target
from upstream.vllm.sleep import SleepError, fall_asleep, wake_up

STOP_GRACE = 10.0
"""Seconds that a launched server has to end by itself once nothing is in flight on it."""
CLOSE_LOOK = 0.05
"""Seconds between two looks where something is waited for."""
_log = logging.getLogger("vllm_gateway.fleet")


class Host(Protocol):
    """What the fleet needs of control, beside launcher and workers."""

    def configure(self) -> int:
        """Have the workers serve by the servers that there are now; returns the number of that word."""

    def tell_health(self) -> int:
        """Tell the workers what is known of servers and models; returns the number of that word."""

    def conditions(self) -> Mapping[str, Condition]:
        """What is known of every server."""

    def awaited(self) -> Set[str]:
        """The models whose servers are still looked for."""

    def acts(self, action: Action) -> None:
        """Tell the operator what is done."""


class Handling:
    """The steps. ``in_flight``: how many requests these servers have, in all workers."""

    def __init__(self, launcher: Launcher, workers: WorkerSupervisor, host: Host, in_flight: Callable[[Iterable[str]], int]) -> None:
        self._launcher = launcher
        self._workers = workers
        self._host = host
        self._in_flight = in_flight

    async def end(self, resident: Resident) -> None:
        """End its servers, at once."""
        began = time.monotonic()
        launched = [status.name for status in self._launcher.statuses() if status.name in resident.names]
        await asyncio.gather(*(self._launcher.stop(name, STOP_GRACE) for name in launched))
        resident.stops.add(time.monotonic() - began)
        resident.step = None
        resident.away.clear()
        resident.settled()
        self._host.configure()

    async def lull(self, resident: Resident) -> None:
        """Put its servers to sleep; those that cannot are ended."""
        try:
            await asyncio.gather(*(fall_asleep(target, resident.launch.sleep_level) for target in self._targets(resident)))
        except SleepError as error:
            _log.error("%s cannot sleep and is stopped: %s", resident.id, error)
            await self.end(resident)
        else:
            resident.step = ModelPhase.SLEEPING

    async def rouse(self, resident: Resident) -> None:
        """Wake its servers; those that cannot be woken are ended, so that they are started anew."""
        began = time.monotonic()
        try:
            await asyncio.gather(*(wake_up(target, resident.launch.sleep_level) for target in self._targets(resident)))
        except SleepError as error:
            _log.error("%s does not wake and is started anew: %s", resident.id, error)
            await self.end(resident)
        else:
            resident.wakes.add(time.monotonic() - began)
            resident.step = None
            self._host.tell_health()

    def in_turn(self, specs: Iterable[LaunchSpec]) -> list[LaunchSpec]:
        """Those that are down first, so that never more than one is missing while they are replaced."""
        conditions = self._host.conditions()
        return sorted(specs, key=lambda spec: conditions[spec.name] is Condition.UP)

    async def roll(self, resident: Resident, specs: Iterable[LaunchSpec]) -> None:
        """Replace one server after the other. Raises RefusedOperation."""
        for spec in specs:
            await self._renew(resident, spec)

    async def reshape(self, resident: Resident, change: Reshape) -> None:
        """Make its servers those of the configuration: some leave, some are replaced one after the other, some are new.

        Raises RefusedOperation where one does not come up: those that have not been replaced then stay as they are.
        """
        _log.info("%s: its configuration has changed", resident.id)
        await asyncio.gather(*(self._part_with(resident, name) for name in change.leave))
        resident.settled()
        await self.roll(resident, self.in_turn(change.renew))
        for spec in change.add:
            self._launcher.start(spec)

    async def begin_anew(self, resident: Resident) -> None:
        """End all its servers when their requests have ended; it is started again when there is room."""
        await self._quiet(resident, resident.names, resident.patience)
        resident.ending = True
        await self.end(resident)

    async def _part_with(self, resident: Resident, name: str) -> None:
        """End a server that workers no longer have, when its last request has ended."""
        await self._quiet(resident, [name], math.inf)
        await self._launcher.stop(name, STOP_GRACE)

    def set_aside(self, resident: Resident, names: Collection[str]) -> int:
        """Take servers out of routing; returns the number of the word by which workers know."""
        resident.away |= set(names)
        return self._host.tell_health()

    async def _quiet(self, resident: Resident, names: Collection[str], patience: float) -> None:
        """Take servers out of routing, and wait until nothing is in flight on them, or for so long."""
        number = self.set_aside(resident, names)
        with suppress(TimeoutError):
            async with asyncio.timeout(None if patience == math.inf else patience):
                await until(lambda: self._workers.have_applied(number) and not self._in_flight(names))

    async def _renew(self, resident: Resident, spec: LaunchSpec) -> None:
        name = spec.name
        await self._quiet(resident, [name], resident.patience)
        if self._status(name) is not None:
            await self._launcher.stop(name, STOP_GRACE)
        resident.away.discard(name)
        self._launcher.start(spec)
        await until(lambda: (status := self._status(name)) is None or status.first_start_finished)
        if self._host.conditions()[name] is not Condition.UP:
            raise RefusedOperation(f"the restart ends here, since {name} did not come up again")
        number = self._host.tell_health()
        await until(lambda: self._workers.have_applied(number))

    def _targets(self, resident: Resident) -> list[Target]:
        return [
            Target(status.name, status.address, self._launcher.api_key(status.name))
            for status in self._launcher.statuses()
            if status.name in resident.names
        ]

    def _status(self, name: str) -> LaunchStatus | None:
        return next((status for status in self._launcher.statuses() if status.name == name), None)


async def until(condition: Callable[[], bool]) -> None:
    """Look again and again until it is so."""
    while not condition():  # noqa: ASYNC110  # what is waited for is in other processes
        await asyncio.sleep(CLOSE_LOOK)
