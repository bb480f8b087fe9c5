"""The objects that the requests of a worker share: limits, queues, counts, side requests, and the records of finished requests.

The rule: nothing here belongs to one request (see ``context``) or to one connection (see ``gateway.client.connection_context``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.admission.body_memory import BodyMemory
from gateway.admission.inflight_slot import InflightCounts
from gateway.admission.mirror_tasks import MirrorTasks
from gateway.admission.queue import ModelQueues
from gateway.client.active_snapshot import ActiveSnapshot
from gateway.client.request import ClientRequest
from gateway.ledger.recorder import Recorder
from gateway.limits import Limiter
from gateway.limits.shared_counts import Buckets
from gateway.recording.recorder import BodyRecorder
from gateway.snapshot.link import ChoiceExplained, Message, ModelRequested, StoreStatus
from gateway.snapshot.snapshot import Key
from gateway.system.steps import Steps
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.request_record import RequestRecord
from gateway.telemetry.tracing import Spans
from upstream.balancing.engine_caches import EngineCaches
from upstream.balancing.side_requests import SideRequests
from upstream.http.deadlines import Deadlines
from upstream.http.write_batching import WriteBatch
from upstream.vllm.tokenize import Tokenization


class RequestServices:
    """The objects that the requests of a worker share. All of it but ``active`` lives as long as the worker.

    ``send`` sends a message to control.
    """

    active: ActiveSnapshot
    """The current snapshot. ``Worker`` assigns it."""

    def __init__(
        self,
        *,
        metrics: WorkerMetrics,
        log: AccessLog,
        write_batch: WriteBatch,
        ledger: Recorder | None = None,
        buckets: Buckets | None = None,
        spans: Spans | None = None,
        recorder: BodyRecorder | None = None,
        send: Callable[[Message], None] = lambda _: None,
    ) -> None:
        self.draining = False
        """The drain timeout has expired: requests are refused."""
        self.deadlines = Deadlines()
        self.side_requests = SideRequests(self.deadlines)
        self.continuations = SideRequests(self.deadlines)
        """Requests that render and derender the continued streams of chats."""
        self.steps = Steps()
        self.tokenization = Tokenization(SideRequests(self.deadlines))
        self.engine_caches: Mapping[str, EngineCaches] = {}
        """The reported caches of the servers of each model whose policy uses them, by the model's ID. ``Worker`` assigns it."""
        self.memory = BodyMemory(0)
        self.inflight = InflightCounts()
        self.limiter = Limiter(metrics, buckets or Buckets.private(), lambda error: send(StoreStatus(error)), write_batch)
        self.mirrors = MirrorTasks()
        self.queues = ModelQueues(self.deadlines, metrics, lambda model, since: send(ModelRequested(model, since)))
        self.send = send
        self._choice_times: dict[str, float] = {}
        # Records of finished requests
        self.metrics = metrics
        self.log = log
        self.ledger = ledger
        self.spans = spans or Spans()
        self.recorder = recorder
        """Records the bodies of selected requests; None in a worker without a place for them."""

    def report_choice(self, choice: ChoiceExplained) -> None:
        """Report to control why a server was chosen, for /status; at most once a second for each model."""
        if choice.time - self._choice_times.get(choice.model, 0.0) >= 1.0:
            self._choice_times[choice.model] = choice.time
            self.send(choice)

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
