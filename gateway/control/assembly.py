"""A gateway's control with all that it works with, put together in one place.

The rule: whatever is started here is ended when the ``async with`` is left, in the opposite order.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.check.launch_check import LaunchCheck
from gateway.control.control import Control
from gateway.control.discovery import Discovery
from gateway.control.jwks_fetch import key_sets
from gateway.control.reload import Reloader
from gateway.fleet.fleet import Fleet
from gateway.worker.supervisor import WorkerEvents, running_workers
from upstream.discovery import Cluster, Resolve, Sources, system_resolver
from upstream.launcher.launcher import Launcher
from upstream.vllm.health import Prober

if TYPE_CHECKING:
    from gateway.ledger.writer import Ledger

_log = logging.getLogger("vllm_gateway.control")
_PROBE_DEADLINE = 10.0  # seconds for GET /health: a busy vLLM has been seen to take six


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where a gateway runs: the folder for its servers' logs, the environment that they get, the folder in which their sockets are (None:
    the usual one), and where servers are looked for."""

    log_folder: Path
    environ: Mapping[str, str]
    cluster: Cluster
    runtime_parent: str | None = None
    resolve: Resolve = system_resolver


@asynccontextmanager
async def assembled(
    control: Control, path: Path, data: socket.socket, around: Surroundings, ledger: Ledger | None = None
) -> AsyncIterator[None]:
    """Give control its parts for the length of the block; nothing is begun yet but the workers' processes.

    ``path``: where its configuration is from; ``data``: the port for requests.
    """
    config = control.config
    async with AsyncExitStack() as stack:
        launcher = Launcher(
            on_change=control.launched, log_folder=around.log_folder, environ=around.environ, runtime_parent=around.runtime_parent
        )
        control.launcher = await stack.enter_async_context(launcher)
        prober = Prober(on_change=control.probed, on_lost=control.lost, deadline=_PROBE_DEADLINE)
        control.prober = await stack.enter_async_context(prober)
        sources = await stack.enter_async_context(Sources(control.found, around.cluster, around.resolve))
        control.discovery = Discovery(sources)
        control.key_sets = await stack.enter_async_context(key_sets(control.fetched))
        control.ledger = ledger
        served = running_workers(data, config.server.workers, WorkerEvents(control.nudged, control.key_sets.ask), ledger)
        control.workers = await stack.enter_async_context(served)
        control.fleet = Fleet(config, control.launcher, control.workers, control)
        launches = LaunchCheck(around.environ, _log.info)
        control.reloader = Reloader(path, config, control, launches=launches)
        yield
