"""The process of ``vllm-gateway serve``: it opens the ports, starts everything, waits for a signal to stop, and stops in order.

The rules: every resource is released by the ``async with`` that acquired it, so no process and no port is left in any case. During the
stop, open requests finish before a server is stopped.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from gateway import __version__
from gateway.access.actor import Actor
from gateway.admin import unix_socket
from gateway.admin.app import application
from gateway.admin.connection import AdminConnections, AdminProtocol
from gateway.admin.guard import Guard
from gateway.admin.unix_socket import OwnUsersProtocol, SocketTakenError
from gateway.audit.configuration import fingerprint
from gateway.audit.entry import Entry, NoAudit
from gateway.audit.journal import JournalLockedError
from gateway.check import preflight
from gateway.check.launch_check import this_machine
from gateway.check.lint import OPEN_ADMIN_PORT
from gateway.config import Config, drafted, load
from gateway.config.source import read
from gateway.control.admin_operations import AdminOperations
from gateway.control.assembly import Environment, assembled
from gateway.control.control import Control, configure_logging
from gateway.control.live_overview import LiveOverview
from gateway.control.report import GatewayReport
from gateway.control.startup_messages import Announcer
from gateway.control.stored_raises import StoredRaises, raises_file
from gateway.fleet.snapshot_builder import client_limits
from gateway.monitoring.engine_loads import EngineLoads
from gateway.monitoring.hung_engines import HungEngines
from gateway.system import logs
from gateway.system.acceptor import Acceptor, Seats
from gateway.system.addresses import is_loopback
from gateway.system.file_descriptors import open_missing_standard_streams, raise_limit
from gateway.system.listener_drain import refuse_new_connections
from gateway.system.service_manager import VARIABLES, ServiceManager
from gateway.system.signals import on_hangup, stop_signals
from gateway.system.tasks import background, cancel, wait_at_most
from gateway.system.tls import Certificate, CertificateError
from upstream.discovery.kubernetes import Cluster
from upstream.vllm.command_line import inherited

if TYPE_CHECKING:
    from gateway.audit.log import AuditLog
    from gateway.control.key_store import KeyStore
    from gateway.ledger.writer import Ledger
    from gateway.store.database import KeyDatabase
    from gateway.store.local_copy import LocalCopy
    from gateway.usage.reader import UsageReader

_BACKLOG = 4096
_MAX_DESCRIPTORS = 65_535
"""The limit of control's file descriptors. Launched servers inherit it, and vLLM itself sets it to this number (``set_ulimit`` in
vllm/utils/system_utils.py). Some programs iterate over all possible descriptors, and a hard limit can be in the millions."""
_CHECK_INTERVAL = 1.0  # seconds between two checks of the admin port's connections
_log = logging.getLogger("vllm_gateway.control")


class StartError(Exception):
    """The gateway could not start. The text explains why, in one line."""


def serve(path: Path, announcer: Announcer | None = None) -> int:
    """Run the gateway of this configuration until SIGTERM or SIGINT. Returns the exit code.

    Raises gateway.config.ConfigurationError for an invalid configuration, and StartError when a port cannot be opened.
    """
    open_missing_standard_streams()
    once = {Path(os.path.abspath(path)): read(path)}  # a pipe can be read only once
    config = load(path, instead=once)
    configure_logging(config)
    raise_limit(_MAX_DESCRIPTORS)
    announcer = announcer or Announcer()
    if (draft := drafted(path, once)) is not None:
        for problem in preflight.missing(draft, this_machine(draft, _launch_environment(config), _log.info, with_gpus=False)):
            announcer.cannot_launch(problem)
    return asyncio.run(run(config, path, announcer))


async def run(config: Config, path: Path, announcer: Announcer) -> int:
    """Start everything, wait for a signal to stop, stop everything. ``path`` is the file of ``config``."""
    stop_requests = stop_signals()
    asyncio.get_running_loop().set_exception_handler(logs.uncaught)
    async with AsyncExitStack() as stack:
        # Open the ports, and compose control.
        data = stack.enter_context(closing(listen(config.server.host, config.server.port, "server.port")))
        admin = stack.enter_context(closing(listen(config.server.admin.host, config.server.admin.port, "server.admin.port")))
        certificate = _certificate(config)
        commands = _admin_socket(path, stack)
        manager = ServiceManager.of(os.environ, os.getpid())
        environment = Environment(state_folder() / "logs", _launch_environment(config), Cluster.of(os.environ))
        audit_log = _audit(config, path, stack)
        audit = audit_log or NoAudit()
        ledger, reader = _ledger(config, path, stack)
        stored = _store(config, path, stack)
        parts = assembled(config, path, data, environment, announcer, manager, ledger, reader, audit=audit_log, stored=stored)
        control, reloader = await stack.enter_async_context(parts)
        critical = control.readiness.critical_tasks
        if (keys := control.key_store) is not None:
            await _learn_keys(keys, config, path)
            critical += await _begun(stack, keys.run())
        if audit_log is not None and stored is not None:
            from gateway.control.last_change import check_last_change  # it loads SQLAlchemy

            await _begun(stack, check_last_change(audit_log, stored[0]))
        on_hangup(stop_requests, reloader.request)

        # Serve operators, and start the tasks that run until the end.
        await _begun(stack, manager.run(control.readiness))
        report = GatewayReport(control, ledger, reader, audit_log)
        if config.ledger is not None and ledger is not None and reader is not None:
            from gateway.monitoring.engine_sampler import EngineSampler  # it loads SQLAlchemy

            boards, interval = control.workers.boards, config.ledger.sample_interval
            sampler = EngineSampler(report.engines, lambda: control.config, boards, ledger, reader, interval)
            control.after_drain = sampler.sample_last
            await _begun(stack, sampler.run())
        loads = EngineLoads(report.engines, lambda: control.config, control.workers.placements, control.auto_limits)
        await _begun(stack, loads.run())
        progress_of_servers, served = control.workers.server_progress, control.observer.served
        hung = HungEngines(report.engines, progress_of_servers, served, control.engine_hung, control.engine_recovered)
        await _begun(stack, hung.run())
        if config.notices:
            from gateway.control.notices import WatchedKeys, opened_notices  # it loads SQLAlchemy

            watched = WatchedKeys(control)
            control.notices = notices = stack.enter_context(opened_notices(lambda: control.config, watched, path, state_folder()))
            await _begun(stack, notices.watch(), notices.deliver())
        storage = StoredRaises(control, raises_file(path, state_folder()))
        storage.load()
        await _begun(stack, storage.run())
        operations = AdminOperations(control, reloader, stop_requests)
        live = LiveOverview(control, report, reader, audit_log)
        await _begun(stack, live.run(), live.follow_cost())
        shown = application(
            report,
            operations,
            audit,
            raises=storage,
            live=live,
            files=reloader,
            store=keys,
            sign_in=control.sign_in,
            notices=control.notices,
            audit_log=audit_log,
        )
        guarded: ASGIApp = Guard(shown, lambda: control.config.server.admin, config.server.admin.host, audit, control.sign_in)
        if control.sign_in is not None:
            from gateway.control.sign_in import before  # it loads SQLAlchemy

            guarded = before(control.sign_in, guarded)
        critical.append(await stack.enter_async_context(_served(guarded, admin, control, certificate=certificate)))
        if commands is not None:
            critical.append(await stack.enter_async_context(_served(shown, commands, control, OwnUsersProtocol)))
        stack.push_async_callback(live.close)
        critical += await _begun(stack, control.monitor.run(), control.workers.watch())
        announcer.summary(config, data, admin)
        if not (config.server.admin.token or config.server.admin.tokens or is_loopback(config.server.admin.host)):
            _log.warning(OPEN_ADMIN_PORT)

        # Start the servers and workers, and wait for a signal.
        control.start()
        fleet, progress, files = await _begun(stack, control.fleet.run(), control.report_progress(), reloader.run())
        critical += fleet, files
        await stop_requests.get()

        # Stop: first no reloads, then no requests, then no servers.
        files.cancel()
        await _linger(control, stop_requests)
        progress.cancel()
        fleet.cancel()
        refuse_new_connections(data)
        data.close()  # the workers close theirs, so that later connections are refused instead of waiting in the backlog
        await _stop(control, stop_requests)
    announcer.stopped()
    return 0


async def _begun(stack: AsyncExitStack, *work: Coroutine[Any, Any, None]) -> list[asyncio.Task[None]]:
    """Run work in the background until the stack is left, and return its tasks."""
    return [await stack.enter_async_context(background(each)) for each in work]


async def _linger(control: Control, stop_requests: asyncio.Queue[int]) -> None:
    """Continue to serve while load balancers detect that the gateway is stopping. A second signal ends it."""
    control.announce_stop()
    if seconds := control.config.server.linger:
        control.announcer.lingering(seconds)
        await wait_at_most(seconds, stop_requests.get())


async def _stop(control: Control, stop_requests: asyncio.Queue[int]) -> None:
    """Drain the workers, then stop the servers. A second signal ends the wait."""
    control.announcer.stopping(control.config.server.drain)
    stopping = asyncio.create_task(control.stop())
    second_signal = asyncio.create_task(stop_requests.get())
    await asyncio.wait((stopping, second_signal), return_when=asyncio.FIRST_COMPLETED)
    await cancel(stopping, second_signal)


def _launch_environment(config: Config) -> dict[str, str]:
    """Return the environment that launched servers inherit: the gateway's own without its secrets."""
    withheld = {*config.withheld, *VARIABLES}
    return inherited({name: value for name, value in os.environ.items() if name not in withheld}, Path(sys.executable).parent)


def listen(host: str, port: int, setting: str) -> socket.socket:
    """Open a listening socket. On ``::`` it accepts IPv4 connections too. Raises StartError, which names the setting of the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        remedy = f"; end the other program, or change {setting}" if error.errno == errno.EADDRINUSE else ""
        raise StartError(f"cannot listen on {host}:{port}: {os.strerror(error.errno) if error.errno else error}{remedy}") from error


def state_folder() -> Path:
    """Return the folder for what is stored between runs: the user's state folder (XDG base directories)."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "vllm-gateway"


def _audit(config: Config, path: Path, stack: AsyncExitStack) -> AuditLog | None:
    """Start the audit log if it is configured. The stack stops it. Raises StartError if its file cannot be opened."""
    if config.audit is None:
        return None
    from gateway.audit.location import key_of, where_of
    from gateway.audit.log import running

    where = where_of(config.audit, config, path, state_folder())
    after = {"version": __version__, "configuration": fingerprint(config)}
    started = Entry("gateway.start", Actor("gateway", "", None), socket.gethostname(), "", None, after)
    output = sys.stdout.fileno() if config.audit.stdout else None
    try:
        return stack.enter_context(running(where, key_of(config.audit.secret.get_secret_value()), output, started))
    except (OSError, JournalLockedError) as error:
        raise StartError(f"the audit log cannot be opened: {error}") from error


def _ledger(config: Config, path: Path, stack: AsyncExitStack) -> tuple[Ledger, UsageReader] | tuple[None, None]:
    """Start the ledger and its reader, if a ledger is configured. The stack stops it. Raises StartError if its spool cannot be opened."""
    if config.ledger is None:
        return None, None
    from gateway.ledger.spool_folders import owner_of, spool_of  # SQLAlchemy and alembic are loaded only where a ledger is configured
    from gateway.ledger.writer import running
    from gateway.usage.reader import UsageReader

    owner = owner_of(config.ledger.url.get_secret_value(), path)
    try:
        opened = spool_of(owner, state_folder() / "ledger")
        ledger = stack.enter_context(running(config.ledger, Path(os.path.abspath(path)).parent, opened, config.server.workers))
    except OSError as error:
        raise StartError(f"the ledger's spool cannot be opened: {error}") from error
    return ledger, UsageReader(ledger.engine)


def _store(config: Config, path: Path, stack: AsyncExitStack) -> tuple[KeyDatabase, LocalCopy] | None:
    """Return the database of the store and its local copy, None without a store. The stack closes them. No connection is opened yet."""
    if config.store_url is None:
        return None
    from gateway.ledger.spool_folders import owner_of  # these load SQLAlchemy
    from gateway.ledger.store import database_url
    from gateway.store.database import KeyDatabase
    from gateway.store.local_copy import LocalCopy

    folder = Path(os.path.abspath(path)).parent
    database, owner = stack.enter_context(closing(KeyDatabase(database_url(config.store_url, folder)))), owner_of(config.store_url, path)
    name = hashlib.sha256(f"{owner.database}\n{owner.configuration}".encode()).hexdigest()[:16]
    return database, stack.enter_context(closing(LocalCopy(state_folder() / "store" / f"{name}.db")))


async def _learn_keys(keys: KeyStore, config: Config, path: Path) -> None:
    """Learn the store's keys. Raises StartError if the configuration has an ID of the store."""
    await keys.start()
    if problems := keys.conflicts(config, str(path)):
        raise StartError(f"the configuration and the store do not fit together: {problems[0].message}")


def _admin_socket(path: Path, stack: AsyncExitStack) -> socket.socket | None:
    """Open the socket for commands. Without one (None) the gateway still serves. Raises StartError if another gateway has it."""
    try:
        return stack.enter_context(unix_socket.listening(unix_socket.socket_path(path, os.environ)))
    except SocketTakenError as error:
        raise StartError(str(error)) from error
    except OSError as error:
        _log.warning("the admin socket cannot be opened, so commands cannot reach this gateway: %s", error)
        return None


def _certificate(config: Config) -> Certificate | None:
    """Return the certificate of the admin port, None without TLS. Raises StartError."""
    try:
        return None if config.server.admin.tls is None else Certificate(config.server.admin.tls.files)
    except CertificateError as error:
        raise StartError(f"server.admin.tls: {error}") from error


@asynccontextmanager
async def _served(
    app: ASGIApp,
    listener: socket.socket,
    control: Control,
    protocol: type[AdminProtocol] = AdminProtocol,
    certificate: Certificate | None = None,
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve an application with uvicorn's protocol on an ``Acceptor``, with TLS if there is a certificate.

    When file descriptors run out, asyncio's own accept loop retries without a pause and logs each attempt.
    """
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False)
    config.load()
    server, connections, loop = uvicorn.Server(config), AdminConnections(), asyncio.get_running_loop()
    make = functools.partial(protocol, config, server.server_state, {}, connections=connections)
    tls: dict[str, Any] = {}
    if certificate is not None:  # the handshake counts towards the timeout of the headers
        tls = {"ssl": certificate.context, "ssl_handshake_timeout": control.config.server.headers_timeout}
    connect = functools.partial(loop.connect_accepted_socket, make, **tls)
    with closing(connections), closing(Seats.create(1)) as seats, closing(Acceptor(listener, connect, seats)):  # it shares with none
        async with background(_check_connections(server, connections, control, certificate)) as task:
            yield task


async def _check_connections(
    server: uvicorn.Server, connections: AdminConnections, control: Control, certificate: Certificate | None
) -> None:
    while True:
        if certificate is not None and (tls := control.config.server.admin.tls) is not None:
            certificate.reload(tls.files)
        await server.on_tick(0)  # updates the Date header
        connections.check(time.monotonic(), client_limits(control.config.server))  # a reload may change the timeouts
        await asyncio.sleep(_CHECK_INTERVAL)
