"""The worker context: everything that connections and requests need of their worker.

``WorkerContext`` lives as long as its worker. ``ActiveSnapshot`` is one version of the configuration, compiled for look-ups. The rule: an
``ActiveSnapshot`` never changes, and the next one replaces it by one assignment to ``WorkerContext.active``. A request that waited reads
``active`` again if it needs the newest version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

from gateway.admission.body_memory import BodyMemory
from gateway.admission.inflight import ConcurrencyLimit
from gateway.admission.inflight_slot import InflightCounts
from gateway.admission.mirror_tasks import MirrorTasks
from gateway.admission.queue import ModelQueues, ReportDemand, report_nothing
from gateway.auth.catalog import Catalog
from gateway.auth.keyring import Keyring
from gateway.client.addresses import ConnectionCounts, Proxies
from gateway.client.asgi import Application
from gateway.client.eviction import Unauthenticated
from gateway.client.http.cors import Cors
from gateway.client.request import request_ids
from gateway.ledger.recorder import Recorder
from gateway.limits import Limiter
from gateway.limits.buckets import Buckets
from gateway.snapshot.link import ChoiceExplained, Health
from gateway.snapshot.snapshot import Key, Snapshot
from gateway.system.steps import Steps
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.body_shape import ShapeSample
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.request_record import RequestRecord
from gateway.telemetry.tracing import Sampler, Spans
from upstream.balancing.engine_caches import EngineCaches
from upstream.balancing.side_requests import SideRequests
from upstream.http.deadlines import Deadlines
from upstream.http.inline_task import InlineTask
from upstream.http.write_batching import WriteBatch
from upstream.vllm.tokenize import Tokenization

if TYPE_CHECKING:
    from gateway.client.connection import ClientConnection
    from gateway.client.request import ClientRequest

Handler = Callable[["ClientRequest", "WorkerContext"], Coroutine[Any, Any, None]]
"""Serves one inference request to its end."""


@dataclass(frozen=True, slots=True)
class ActiveSnapshot:
    """One snapshot, compiled for look-ups."""

    snapshot: Snapshot
    keyring: Keyring
    catalog: Catalog
    cors: Cors
    proxies: Proxies
    body_allowance: int
    """Bytes that a body may have without a memory reservation."""
    concurrency_limit: ConcurrencyLimit | None
    """The limit on all requests in flight; None without a limit."""
    sampler: Sampler | None
    """Decides which requests are traced; None if tracing is off."""
    shape_sample: ShapeSample | None
    """Decides for which requests the shape of the body is logged; None if no shape is logged."""


def _ignore(_: object) -> None:
    """Do nothing: there is no control process to report to."""


def _do_nothing() -> None:
    """Do nothing: the listening socket has one worker."""


class WorkerContext:
    """Everything that connections and requests need of their worker. All of it but ``active`` lives as long as the worker."""

    active: ActiveSnapshot
    """The current snapshot. ``Worker`` assigns it."""
    other_routes: Application
    """Serves the requests that are not inference. ``Worker`` assigns it."""

    def __init__(
        self,
        handle_request: Handler,
        *,
        metrics: WorkerMetrics,
        log: AccessLog,
        write_batch: WriteBatch,
        ledger: Recorder | None = None,
        buckets: Buckets | None = None,
        spans: Spans | None = None,
        report_demand: ReportDemand = report_nothing,
        report_store: Callable[[str | None], None] = _ignore,
        report_choice: Callable[[ChoiceExplained], None] = _ignore,
    ) -> None:
        self.handle_request = handle_request
        # Connections
        self.connections: set[ClientConnection] = set()
        self.connection_closed: Callable[[], None] = _do_nothing
        """Called after each connection. Workers that share a listening socket count their connections with it."""
        self.handlers: set[InlineTask | asyncio.Task[None]] = set()
        """The running handlers of requests."""
        self.keep_alive = True
        """False when the worker is about to drain: each response is then the last response on its connection."""
        self.write_batch = write_batch
        self.addresses = ConnectionCounts()
        self.unauthenticated = Unauthenticated()
        self.request_ids = request_ids()
        self.date_line = b""
        """The Date header of this second."""
        # Requests
        self.draining = False
        """The drain timeout has expired: requests are refused."""
        self.health = Health({}, {})
        """Control's last report about servers and models."""
        self.deadlines = Deadlines()
        self.side_requests = SideRequests(self.deadlines)
        self.steps = Steps()
        self.tokenization = Tokenization(SideRequests(self.deadlines))
        self.engine_caches: Mapping[str, EngineCaches] = {}
        """The reported caches of the servers of each model whose policy uses them, by the model's ID. ``Worker`` assigns it."""
        self.memory = BodyMemory(0)
        self.inflight = InflightCounts()
        self.limiter = Limiter(metrics, buckets or Buckets.private(), report_store, write_batch)
        self.mirrors = MirrorTasks()
        self.queues = ModelQueues(self.deadlines, metrics.queued, report_demand)
        self._report_choice = report_choice
        self._choice_times: dict[str, float] = {}
        # Records of finished requests
        self.metrics = metrics
        self.log = log
        self.ledger = ledger
        self.spans = spans or Spans()
        self.update_date()

    def update_date(self) -> None:
        """Set the Date header to the current time."""
        self.date_line = f"date: {formatdate(usegmt=True)}\r\n".encode()

    def report_choice(self, choice: ChoiceExplained) -> None:
        """Report to control why a server was chosen, for /status; at most once a second for each model."""
        if choice.time - self._choice_times.get(choice.model, 0.0) >= 1.0:
            self._choice_times[choice.model] = choice.time
            self._report_choice(choice)

    def authenticate(self, request: ClientRequest) -> Key:
        """Return the key of a request. Raises Refusal if the key is missing or invalid."""
        headers, keyring = request.head.headers, self.active.keyring
        if (authorization := headers.get(b"authorization")) is not None:
            return keyring.authenticate(authorization)
        return keyring.authenticate(None, headers.get(b"x-api-key") if request.target.route.anthropic else None, headers)

    def record_request(self, record: RequestRecord) -> None:
        """Record a finished request of any route in metrics, access log, ledger and traces. No other function does."""
        self.metrics.record_request(record)
        self.log.add(record)
        if self.ledger is not None:
            self.ledger.record_request(record)
        if record.trace is not None and record.trace.sampled:
            self.spans.add(record)
