"""One version of the configuration, compiled for look-ups.

The rule: an ``ActiveSnapshot`` never changes. ``Worker`` replaces it for connections and requests by one statement. A request that waited
reads ``active`` again if it needs the newest version.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.admission.inflight import ConcurrencyLimit
from gateway.auth.catalog import Catalog
from gateway.auth.keyring import Keyring
from gateway.client.addresses import Proxies
from gateway.client.http.cors import Cors
from gateway.snapshot.snapshot import Snapshot
from gateway.telemetry.request_ids import RequestSample
from gateway.telemetry.trace import Sampler


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
    shape_sample: RequestSample | None
    """Decides for which requests the shape of the body is logged; None if no shape is logged."""
