"""The composition of a gateway's control process from its parts.

The rule: whatever is started here is ended when the ``async with`` is left, in the opposite order.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.audit.entry import NoAudit
from gateway.check.launch_check import this_machine
from gateway.config import Config
from gateway.control.budgets import BudgetRestorer
from gateway.control.control import Control
from gateway.control.ledger_queries import KeyUsage
from gateway.control.page_responses import PageResponses
from gateway.control.publisher import FirstResults, Publisher
from gateway.control.raises import Raises
from gateway.control.readiness import Readiness
from gateway.control.reload import Reloader, ReloadHistory
from gateway.control.startup_messages import Announcer
from gateway.control.store_counts import StoreCounts
from gateway.fleet.fleet import Fleet
from gateway.monitoring.auto_limits import AutoLimits
from gateway.monitoring.discovery import Discovery
from gateway.monitoring.jwks_fetch import JwksFetcher
from gateway.monitoring.kv_events import kv_events
from gateway.monitoring.monitor import Monitor
from gateway.monitoring.server_observer import ServerObserver
from gateway.snapshot.snapshot import Snapshot
from gateway.system.service_manager import ServiceManager
from gateway.worker.supervisor import WorkerEvents, WorkerSupervisor
from upstream.discovery.dns import Resolve, system_resolver
from upstream.discovery.kubernetes import Cluster
from upstream.discovery.sources import Sources
from upstream.launcher.launcher import Launcher
from upstream.vllm.health import Prober

if TYPE_CHECKING:
    from gateway.audit.log import AuditLog
    from gateway.control.key_store import KeyStore
    from gateway.ledger.writer import Ledger
    from gateway.store.database import KeyDatabase
    from gateway.store.local_copy import LocalCopy
    from gateway.usage.reader import UsageReader

_log = logging.getLogger("vllm_gateway.control")
_HEALTH_CHECK_TIMEOUT = 10.0  # seconds for GET /health: a busy vLLM has been observed to take six


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment in which a gateway runs.

    ``log_folder`` is for the logs of launched servers, and ``environ`` is their environment. ``runtime_parent`` is the folder of their
    sockets, None for the usual one. ``cluster`` and ``resolve`` are used by discovery.
    """

    log_folder: Path
    environ: Mapping[str, str]
    cluster: Cluster
    runtime_parent: str | None = None
    resolve: Resolve = system_resolver


@asynccontextmanager
async def assembled(
    config: Config,
    path: Path,
    data: socket.socket,
    environment: Environment,
    announcer: Announcer,
    manager: ServiceManager | None = None,
    ledger: Ledger | None = None,
    reader: UsageReader | None = None,
    audit: AuditLog | None = None,
    stored: tuple[KeyDatabase, LocalCopy] | None = None,
) -> AsyncIterator[tuple[Control, Reloader]]:
    """Compose control for the length of the block. Nothing is started yet.

    ``path`` is the file of ``config``, and ``data`` the listening socket for requests. ``ledger`` and ``reader``, which reads from it, are
    None if no ledger is configured, and ``audit`` is None without an audit log. ``stored`` are the database of the store and its local
    copy, None without a store.
    """
    started = time.time()
    async with AsyncExitStack() as stack:
        # The parts report events to control, which is composed of them: their callbacks use the name that is bound below.
        launcher = await stack.enter_async_context(
            Launcher(
                on_change=lambda status: control.launch_status_changed(status),
                log_folder=environment.log_folder,
                environ=environment.environ,
                runtime_parent=environment.runtime_parent,
            )
        )
        prober = await stack.enter_async_context(
            Prober(
                on_change=lambda probe: control.health_changed(probe),
                on_lost=lambda probe: control.server_lost(probe),
                deadline=_HEALTH_CHECK_TIMEOUT,
            )
        )
        sources = await stack.enter_async_context(Sources(lambda: control.servers_discovered(), environment.cluster, environment.resolve))
        discovery = Discovery(sources)
        key_sets = await stack.enter_async_context(aclosing(JwksFetcher(lambda: control.key_set_changed())))
        usage = await stack.enter_async_context(aclosing(KeyUsage(reader)))
        pages = await stack.enter_async_context(aclosing(PageResponses()))
        rejected = (lambda _: None) if ledger is None else ledger.rejections.add
        worker_events = WorkerEvents(lambda: control.worker_changed(), key_sets.request, usage.request, pages.request, rejected)
        workers = await stack.enter_async_context(aclosing(WorkerSupervisor(data, config.server.workers, worker_events, ledger)))
        budgets = await stack.enter_async_context(aclosing(BudgetRestorer(ledger, reader, workers.buckets, started)))
        counts = await stack.enter_async_context(aclosing(StoreCounts(lambda: workers.snapshot, ledger, reader)))
        raises = Raises()
        keys: KeyStore | None = None
        if stored is not None:
            from gateway.control import key_store  # it loads SQLAlchemy

            async def applied() -> None:
                await workers.wait_applied(control.publisher.publish_health())  # a worker applies messages in their order

            keys = key_store.KeyStore(*stored, config, workers.send, applied, raises, lambda: control.raises_changed())
            stack.enter_context(key_store.notified(keys, stored[0]))
            workers.stored_keys = keys.messages

        async def before_start(snapshot: Snapshot) -> None:
            await budgets.start(snapshot if keys is None else replace(snapshot, keys=(*snapshot.keys, *keys.keys_with_budgets())))
            await counts.start(snapshot)

        workers.before_start = before_start
        events = await stack.enter_async_context(kv_events(workers.send))
        workers.more_first_messages = events.first_messages
        observer = ServerObserver(config, launcher, prober, discovery, key_sets)
        first_results, history = FirstResults(config), ReloadHistory()
        publisher = Publisher(observer, workers, first_results, started)
        fleet = Fleet(config, launcher, publisher, workers, observer.undiscovered, announcer.action_started)
        observer.launched_out_of_rotation = fleet.out_of_rotation
        limits = AutoLimits(lambda: observer.config, workers.boards, publisher.publish_health)
        publisher.expected, publisher.raised, publisher.max_inflight = fleet.expected_to_publish, raises.snapshot, limits.values
        monitor = Monitor(observer, workers, discovery, key_sets, events, ledger, audit, keys)
        control = Control(
            started=started,
            announcer=announcer,
            manager=manager or ServiceManager(None, None),
            launcher=launcher,
            discovery=discovery,
            key_sets=key_sets,
            observer=observer,
            workers=workers,
            publisher=publisher,
            fleet=fleet,
            monitor=monitor,
            kv_events=events,
            auto_limits=limits,
            budgets=budgets,
            store_counts=counts,
            readiness=Readiness(observer, workers, fleet, monitor, history, first_results),
            history=history,
            raises=raises,
            key_store=keys,
        )
        engine = ledger.engine if ledger is not None else stored[0].engine if stored is not None else None
        if config.sign_in is not None and engine is not None:
            from gateway.control.self_service import beside  # these load SQLAlchemy
            from gateway.control.sign_in import signing_in

            signed = await stack.enter_async_context(signing_in(control, engine, audit or NoAudit()))
            pages.application = beside(signed.pages, control, signed.service, usage, reader, audit or NoAudit())
            control.sign_in = signed.service
            workers.more_first_messages = lambda: (*events.first_messages(), *signed.first_messages())
        conflicts = None if keys is None else lambda config: keys.conflicts(config, str(path))
        machine = partial(this_machine, environ=environment.environ, say=_log.info)
        yield control, Reloader(path, config, control, machine, audit, conflicts)
