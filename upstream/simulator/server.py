"""The process: arguments, socket, start, stop.

Owns the start sequence of a vLLM server. The arguments are checked. The socket is bound, so that a taken port or a left-over socket
file fails at once. The model is "loaded" while connections are refused. Only then the server listens.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from upstream.simulator.app import Simulator
from upstream.simulator.flags import BadArguments, Settings, parse


def main(argv: Sequence[str], command: str = "python -m upstream.simulator") -> int:
    """Run the simulator with the arguments of ``vllm serve``; the exit status is vLLM's. ``command`` is what ``--help`` calls it.

    Raises SystemExit(2) for arguments that do not parse, and SystemExit(0) for ``--help``.
    """
    try:
        settings = parse(argv, os.environ, command)
        listener = _bound(settings)
    except (BadArguments, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    with listener:
        if not _loaded(settings):
            return 1
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, listener))
    return 0


def _bound(settings: Settings) -> socket.socket:
    """Return the socket, bound and not listening. A unix socket's file remains at the end, and the next start fails on it."""
    if settings.uds:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(settings.uds)
        return listener
    listener = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((settings.host, settings.port))
    return listener


def _loaded(settings: Settings) -> bool:
    """Pretend to load the model."""
    time.sleep(settings.start.listen_after)
    if settings.start.failure:
        print("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}", file=sys.stderr)
    return not settings.start.failure


async def _serve(settings: Settings, listener: socket.socket) -> None:
    simulator = Simulator(settings)
    config = uvicorn.Config(
        simulator,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=_whole_or_part(settings.keep_alive),
    )
    server = _Server(config, f"Starting vLLM server on {_address(settings, listener)} (simulator)")
    loop = asyncio.get_running_loop()
    stopping: set[asyncio.Task[None]] = set()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: stopping.add(asyncio.ensure_future(_stop(simulator, server))))
    await server.serve(sockets=[listener])


def _whole_or_part(seconds: float) -> Any:
    return int(seconds) if seconds == int(seconds) else seconds


async def _stop(simulator: Simulator, server: uvicorn.Server) -> None:
    """Shut down like vLLM: requests in flight have ``--shutdown-timeout`` seconds, then their choices finish with ``abort``."""
    simulator.engine.draining = True
    try:
        await asyncio.wait_for(simulator.engine.idle.wait(), simulator.settings.shutdown_timeout)
    except TimeoutError:
        pass  # what outlasts the time is aborted with the rest
    simulator.engine.abort_all()
    server.should_exit = True


def _address(settings: Settings, listener: socket.socket) -> str:
    if settings.uds:
        return f"unix:{settings.uds}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """A uvicorn server that does not handle signals and reports when it listens."""

    def __init__(self, config: uvicorn.Config, announcement: str) -> None:
        super().__init__(config)
        self._announcement = announcement

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._announcement, file=sys.stderr, flush=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(HttpToolsProtocol):
    """uvicorn's connection, which shows its transport to the application: a cut closes it."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["transport"] = self.transport
