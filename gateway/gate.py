"""What the story of a request needs of its worker."""

from __future__ import annotations

from typing import Protocol

from gateway.admission import House
from gateway.auth import Keyring
from gateway.body_shape import Sample
from gateway.catalog import Catalog
from gateway.ledger.books import Books
from gateway.limits import Admission, Limiter
from gateway.metrics import WorkerMetrics
from gateway.record import Record
from gateway.state import Snapshot
from gateway.steps import Steps
from gateway.tracing import Sampler
from gateway.waiting import Lobby
from upstream.deadlines import Deadlines


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
