"""What the story of a request needs of its worker."""

from __future__ import annotations

from typing import Protocol

from gateway.admission.inflight import House
from gateway.admission.queue import Lobby
from gateway.auth.catalog import Catalog
from gateway.auth.keyring import Keyring
from gateway.ledger.recorder import Books
from gateway.limits import Admission, Limiter
from gateway.snapshot.snapshot import Snapshot
from gateway.system.steps import Steps
from gateway.telemetry.body_shape import Sample
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.request_record import Record
from gateway.telemetry.tracing import Sampler
from upstream.http.deadlines import Deadlines


class Gate(Protocol):
    """What the story needs of its worker."""

    keyring: Keyring
    catalog: Catalog
    admission: Admission
    limits: Limiter
    deadlines: Deadlines
    lobby: Lobby
    metrics: WorkerMetrics
    books: Books | None
    steps: Steps
    sampler: Sampler | None
    """Decides which requests are traced; None where none is."""
    sample: Sample | None
    """Decides of which requests the body's shape is logged; None where of none."""
    draining: bool
    house: House | None
    """None: any number of requests may be under way at once."""

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot of the configuration that is served by."""

    def settled(self, record: Record) -> None:
        """Take a finished request to the books."""
