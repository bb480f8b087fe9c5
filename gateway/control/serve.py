"""The process that ``vllm-gateway serve`` is: it opens the ports, starts everything, waits for the word to stop, and stops in order.

The rules: what was started is ended by the ``async with`` that started it, so every way out leaves no process and no port; on the way
down, clients are served to their end before a server is stopped.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from gateway import config as conf
from gateway.admin import unix_socket
from gateway.admin.app import application
from gateway.admin.connection import AdminProtocol, Hall
from gateway.admin.guard import Guard
from gateway.admin.unix_socket import OwnUsersProtocol, SocketTakenError
from gateway.check.launch_check import LaunchCheck
from gateway.check.lint import OPEN_ADMIN_PORT
from gateway.client.addresses import is_loopback
from gateway.config import Config, drafted, load
from gateway.config.source import read
from gateway.control.assembly import Surroundings, assembled
from gateway.control.control import Control, speak_by
from gateway.control.report import Report
from gateway.control.startup_messages import Announcer
from gateway.fleet.plan import clients
from gateway.system import logs
from gateway.system.acceptor import Acceptor, Seats
from gateway.system.file_descriptors import raise_limit, stand_in
from gateway.system.listener_drain import let_nobody_in
from gateway.system.service_manager import VARIABLES, ServiceManager
from gateway.system.signals import on_hangup, stop_signals
from upstream.discovery import Cluster
from upstream.vllm.command_line import inherited

if TYPE_CHECKING:
    from gateway.ledger.writer import Ledger

_BACKLOG = 4096
_DESCRIPTORS = 65_535
"""What control takes at most. Servers that it launches take it over, and it is what vLLM takes by itself (vllm/utils/system_utils.py,
``set_ulimit``); the millions of some systems' hard limits would be a surprise to programs that go through all numbers there may be."""
_LOOK = 1.0  # seconds between two looks at the admin port's connections
_log = logging.getLogger("vllm_gateway.control")


class StartError(Exception):
    """The gateway could not start; the text says why, in one line."""


def serve(path: Path, announcer: Announcer | None = None) -> int:
    """Run the gateway of this configuration until SIGTERM or SIGINT; returns the exit code.

    Raises gateway.config.ConfigurationError for a bad configuration and StartError when a port can't be had.
    """
    stand_in()
    once = {Path(os.path.abspath(path)): read(path)}  # a pipe has its text once
    config = load(path, instead=once)
    speak_by(config)
    raise_limit(_DESCRIPTORS)
    announcer = announcer or Announcer()
    if (draft := drafted(path, once)) is not None:
        for problem in LaunchCheck(_for_servers(config), _log.info).missing(draft):
            announcer.cannot_launch(problem)
    return asyncio.run(run(config, path, announcer))


async def run(config: Config, path: Path, announcer: Announcer) -> int:
    """Start everything, wait for the word to stop, stop everything. ``path``: where the configuration is from."""
    asked = stop_signals()
    asyncio.get_running_loop().set_exception_handler(logs.uncaught)
    async with AsyncExitStack() as stack:
        data = stack.enter_context(closing(listen(config.server.host, config.server.port)))
        admin = stack.enter_context(closing(listen(config.server.admin.host, config.server.admin.port)))
        commands = _admin_socket(path, stack)
        control = Control(config, announcer, ServiceManager.of(os.environ, os.getpid()))
        control.asked = asked
        around = Surroundings(log_folder(), _for_servers(config), Cluster.of(os.environ))
        await stack.enter_async_context(assembled(control, path, data, around, _ledger(config, path, stack)))
        on_hangup(asked, control.reloader.ask)
        await stack.enter_async_context(_background(control.manager.run(control)))
        shown = application(Report(control), control)
        control.lasting.append(await stack.enter_async_context(_served(_guarded(shown, config.server.admin), admin, control)))
        if commands is not None:
            control.lasting.append(await stack.enter_async_context(_served(shown, commands, control, OwnUsersProtocol)))
        control.lasting += [
            await stack.enter_async_context(_background(work)) for work in (control.watch_tokens(), control.workers.watch())
        ]
        announcer.summary(config, data, admin)
        if config.server.admin.token is None and not is_loopback(config.server.admin.host):
            _log.warning(OPEN_ADMIN_PORT)
        control.begin()
        fleet = await stack.enter_async_context(_background(control.fleet.run()))
        waiting = await stack.enter_async_context(_background(control.report_progress()))
        files = await stack.enter_async_context(_background(control.reloader.run()))
        control.lasting += [fleet, files]
        await asked.get()
        files.cancel()
        await _linger(control, asked)
        waiting.cancel()
        fleet.cancel()
        let_nobody_in(data)
        data.close()  # the workers close theirs: who comes then is refused, and does not wait in the kernel's queue
        await _stop(control, asked)
    announcer.stopped()
    return 0


async def _linger(control: Control, asked: asyncio.Queue[int]) -> None:
    """Serve on while those who send requests hear that no more should come; a second signal ends it."""
    control.leave()
    seconds = control.config.server.linger
    if seconds:
        control.announcer.lingering(seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asked.get()


async def _stop(control: Control, asked: asyncio.Queue[int]) -> None:
    """Clients first, then servers; a second signal ends the patience."""
    control.announcer.stopping(control.config.server.drain)
    stopping = asyncio.create_task(control.end())
    impatient = asyncio.create_task(asked.get())
    await asyncio.wait((stopping, impatient), return_when=asyncio.FIRST_COMPLETED)
    for task in (stopping, impatient):
        task.cancel()
    await asyncio.gather(stopping, impatient, return_exceptions=True)


def _for_servers(config: Config) -> dict[str, str]:
    """The environment that launched servers inherit: the gateway's own without its secrets."""
    withheld = {*config.withheld, *VARIABLES}
    return inherited({name: value for name, value in os.environ.items() if name not in withheld}, Path(sys.executable).parent)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; on ``::`` it accepts IPv4 connections too. Raises StartError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def state_folder() -> Path:
    """What is kept between runs: the user's state folder (XDG base directories)."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "vllm-gateway"


def log_folder() -> Path:
    """Where launched servers' logs go."""
    return state_folder() / "logs"


def _ledger(config: Config, path: Path, stack: AsyncExitStack) -> Ledger | None:
    """The ledger, if there is to be one, running until the stack ends. Raises StartError where its spool can't be had."""
    if config.ledger is None:
        return None
    from gateway.ledger.errors import SpoolLockedError  # SQLAlchemy and alembic are loaded by those who need them
    from gateway.ledger.writer import running, spool_folder

    folder = spool_folder(state_folder(), path)
    try:
        return stack.enter_context(running(config.ledger, Path(os.path.abspath(path)).parent, folder, config.server.workers))
    except (SpoolLockedError, OSError) as error:
        raise StartError(f"the ledger has no place for its spool: {error}") from error


def _admin_socket(path: Path, stack: AsyncExitStack) -> socket.socket | None:
    """The socket for commands; None where there can be none, which is no reason not to serve. Raises StartError."""
    try:
        return stack.enter_context(unix_socket.listening(unix_socket.socket_path(path, os.environ)))
    except SocketTakenError as error:
        raise StartError(str(error)) from error
    except OSError as error:
        _log.warning("no admin socket, so commands will not reach this gateway: %s", error)
        return None


def _guarded(app: Starlette, section: conf.Admin) -> Guard:
    return Guard(app, None if section.token is None else section.token.get_secret_value(), section.host)


@asynccontextmanager
async def _served(
    app: ASGIApp, listener: socket.socket, control: Control, protocol: type[AdminProtocol] = AdminProtocol
) -> AsyncIterator[asyncio.Task[None]]:
    """uvicorn without its way of accepting: where descriptors run out, asyncio's asks again at once, and again, and says so each time."""
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False)
    config.load()
    server, hall, loop = uvicorn.Server(config), Hall(), asyncio.get_running_loop()
    make = functools.partial(protocol, config, server.server_state, {}, hall=hall)
    begin = functools.partial(loop.connect_accepted_socket, make)
    with closing(hall), closing(Seats.create(1)) as seats, closing(Acceptor(listener, begin, seats, lambda: len(hall))):
        async with _background(_look_after(server, hall, control)) as task:
            yield task


async def _look_after(server: uvicorn.Server, hall: Hall, control: Control) -> None:
    while True:
        await server.on_tick(0)  # the Date header
        hall.check(time.monotonic(), clients(control.config.server))  # of this moment: they may be reloaded
        await asyncio.sleep(_LOOK)


@asynccontextmanager
async def _background(work: Any) -> AsyncIterator[asyncio.Task[None]]:
    """A task that does not outlive the block."""
    task = asyncio.create_task(work, name=work.__qualname__)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
