"""The operations of the admin port and the admin socket, on the running gateway."""

from __future__ import annotations

import asyncio
import signal

from gateway.access.actor import Requester
from gateway.control.control import Control
from gateway.control.reload import Reloader
from gateway.fleet.operations import RefusedOperation, ReloadResult


class AdminOperations:
    """Implements ``Operations``. While the gateway stops, an operation that would start something is refused."""

    def __init__(self, control: Control, reloader: Reloader, stop_requests: asyncio.Queue[int]) -> None:
        self._control = control
        self._reloader = reloader
        self._stop_requests = stop_requests

    async def start(self, model: str) -> None:
        """Start a model, even if ``stop`` has stopped it."""
        self._refuse_while_stopping()
        await self._control.fleet.start(model)

    async def stop(self, model: str) -> None:
        """Drain and stop a model, and keep it stopped."""
        await self._control.fleet.stop(model)

    async def restart(self, model: str) -> None:
        """Start to replace a model's servers, one at a time."""
        self._refuse_while_stopping()
        await self._control.fleet.restart(model)

    async def wake(self, model: str) -> None:
        """Start a model as a request would."""
        await self.start(model)

    async def cordon(self, server: str) -> None:
        """Take one server out of rotation until ``uncordon`` or the end of the gateway."""
        await self._control.set_cordoned(server, cordoned=True)

    async def uncordon(self, server: str) -> None:
        """Return a server to rotation."""
        await self._control.set_cordoned(server, cordoned=False)

    async def reload(self, requester: Requester) -> ReloadResult:
        """Read the configuration again, and apply it if it is valid."""
        self._refuse_while_stopping()
        return await self._reloader.reload(requester)

    async def drain(self) -> None:
        """Start to stop the gateway."""
        self._refuse_while_stopping()
        self._control.announce_stop()
        self._stop_requests.put_nowait(signal.SIGTERM)

    def _refuse_while_stopping(self) -> None:
        if self._control.readiness.is_stopping:
            raise RefusedOperation("the gateway is stopping")
