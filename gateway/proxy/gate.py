"""What the story of a request needs of its worker."""

from __future__ import annotations

from typing import Protocol

from gateway.admission.inflight import ConcurrencyLimit
from gateway.admission.inflight_slot import InflightCounts
from gateway.admission.queue import ModelQueues
from gateway.auth.catalog import Catalog
from gateway.auth.keyring import Keyring
from gateway.ledger.recorder import Recorder
from gateway.limits import Limiter
from gateway.snapshot.snapshot import Snapshot
from gateway.system.steps import Steps
from gateway.telemetry.body_shape import ShapeSample
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.request_record import RequestRecord
from gateway.telemetry.tracing import Sampler
from upstream.http.deadlines import Deadlines


class Gate(Protocol):
    """What the story needs of its worker."""

    keyring: Keyring
    catalog: Catalog
    admission: InflightCounts
    limits: Limiter
    deadlines: Deadlines
    lobby: ModelQueues
    metrics: WorkerMetrics
    books: Recorder | None
    steps: Steps
    sampler: Sampler | None
    """Decides which requests are traced; None where none is."""
    sample: ShapeSample | None
    """Decides of which requests the body's shape is logged; None where of none."""
    draining: bool
    house: ConcurrencyLimit | None
    """None: any number of requests may be under way at once."""

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot of the configuration that is served by."""

    def settled(self, record: RequestRecord) -> None:
        """Take a finished request to the books."""
