"""One vLLM server as a worker sees it: its specification from the configuration, and its live state.

``ServerSpec`` is a value of the snapshot. ``Server`` is the live side: requests in flight, idle connections, ejection. It survives a reload
for as long as its specification is the same. The rule: ``in_flight`` changes only in ``attempt.Attempt``, whose ``with`` block releases on
every exit what it acquired.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic
from typing import NamedTuple, Protocol

from upstream.balancing.ejection import EjectionState
from upstream.balancing.ranking import Ranking
from upstream.cells import Cells
from upstream.http.address import Address
from upstream.http.connection import Connection, IdleConnections, connect, remembered_headers
from upstream.http.deadlines import TICK
from upstream.http.errors import ConnectFailed, UpstreamError
from upstream.http.write_batching import WriteBatch

_PREFILL_SPEED, _SLOWEST = 2000.0, 500.0  # bytes of requests per second: before the first measurement, and at least
_MEASURABLE = 4096  # bytes of a request whose time to the first event is mostly prefill
_LEARNING = 0.2  # weight of a measurement


class Condition(StrEnum):
    """The state of a server by its probes and its process, as control reports it.

    ``OUT_OF_ROTATION``: the gateway sends it no requests, because it is stopped, asleep or draining.
    """

    UP = "up"
    LOADING = "loading"
    OUT_OF_ROTATION = "out_of_rotation"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A server as the configuration or the launcher specifies it.

    ``name``: unique in the gateway. ``model``: the name under which the server serves its model. ``keep_idle``: seconds for which an idle
    connection to it stays open. ``loads``: the model that a launched server loads.
    """

    name: str
    address: Address
    model: str
    api_key: str | None = field(default=None, repr=False)
    weight: float = 1.0
    keep_idle: float = 4.0
    loads: str = ""

    def serves_like(self, other: ServerSpec) -> bool:
        """Return whether another server has the same model, as far as the configuration shows. A reload may have replaced it."""
        return (self.model, self.loads) == (other.model, other.loads)


class Progress(NamedTuple):
    """The progress of a server's responses: when the last byte arrived, and the predicted seconds of its pending prefills."""

    last_byte_at: float
    prefill: float


class MovableResponse(Protocol):
    """A response that another server can continue."""

    def fail(self, error: UpstreamError) -> None:
        """End it with this error."""


class Server:
    """The live side of one server."""

    def __init__(
        self,
        spec: ServerSpec,
        condition: Condition = Condition.LOADING,
        write_batch: WriteBatch | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Create a server without connections.

        ``write_batch``: shared by all connections of the process. ``clock``: monotonic seconds, for ejections.
        """
        self.spec = spec
        self._condition = condition
        self.in_flight = 0
        self.limit = math.inf
        """Requests that may be in flight at once."""
        self._reserved: tuple[int, ...] = ()
        self._in_tiers: list[int] = []
        """The requests in flight of higher tiers than the index."""
        self.in_flight_cells: Cells = [0.0]
        self.rankings: list[Ranking[Server]] = []
        """The rankings to update when the load or the availability changes."""
        self.ejected_cells: Cells = [0.0]
        """Cell 0 is 1 while the server is ejected."""
        self.scale_out = False
        """Whether the server has the routes that continue a chat from its token IDs."""
        self.loaded = ""
        """The model that the server has loaded, as it reports it; empty if that is not known."""
        self.movable: set[MovableResponse] = set()
        """The responses that another server can continue (see ``moves``)."""
        self.move_after = 5.0
        """Seconds after which a drain moves these responses."""
        self.model_id = ""
        """The model that has the server."""
        self.draining_since: float | None = None
        """When the server left the rotation, by the clock of exchanges."""
        self.waited_for = False
        """Whether a response was awaited since ``take_progress``."""
        self.waiting_bytes = 0
        """The bytes of the requests that had no byte of a response since ``take_progress``."""
        self.last_byte_at = 0.0
        """When the last byte of a response was seen, by the clock of exchanges. A slow client's response counts as if bytes arrived."""
        self._prefill_speed = _PREFILL_SPEED
        self.recently_failed = False
        """Whether a request has failed since the last success."""
        self._ejection = EjectionState()
        self._clock = clock
        self._idle = IdleConnections(spec.keep_idle)
        self._write_batch = write_batch or WriteBatch()
        self._headers = remembered_headers()
        self._request_prefixes: dict[str, bytes] = {}
        self._tls = ssl.create_default_context() if spec.address.tls else None

    def __repr__(self) -> str:
        return f"<Server {self.spec.name} {self._condition.value}, {self.in_flight} in flight, {len(self._idle)} idle>"

    def serves_like(self, other: Server) -> bool:
        """Return whether another server has the same model, as far as the configuration and the servers show."""
        return self.spec.serves_like(other.spec) and (not self.loaded or not other.loaded or self.loaded == other.loaded)

    @property
    def condition(self) -> Condition:
        """The condition that control reported last."""
        return self._condition

    @condition.setter
    def condition(self, condition: Condition) -> None:
        comes_up = condition is Condition.UP and self._condition is not Condition.UP
        self._condition = condition
        if condition is not Condition.OUT_OF_ROTATION:
            self.draining_since = None
        elif self.draining_since is None:
            self.draining_since = self._clock()
        if comes_up:
            self.record_success()  # earlier failures belong to an earlier process
        else:
            self.update_rankings()

    @property
    def reserved(self) -> tuple[int, ...]:
        """Slots that are reserved: the requests of higher tiers than the index never use the last so many, but always one."""
        return self._reserved

    def reserve(self, slots: tuple[int, ...]) -> None:
        """Change the slots that are reserved."""
        if slots != self._reserved:
            self._reserved = slots
            self._in_tiers += [0] * (len(slots) - len(self._in_tiers))
            self.update_rankings()

    def open_to(self, tier: int) -> float:
        """Return how many requests of higher tiers may be in flight."""
        return max(self.limit - self._reserved[tier], 1)

    def in_flight_above(self, tier: int) -> int:
        """Return how many requests of higher tiers are in flight."""
        return self._in_tiers[tier]

    def start_exchange(self, tier: int = 0) -> None:
        """Count a request as in flight."""
        self.in_flight += 1
        if tier:
            self.count_in_tiers(tier, 1)
        self.in_flight_cells[0] += 1
        for ranking in self.rankings:
            ranking.update_load(self)

    def finish_exchange(self, tier: int = 0) -> None:
        """Count a request as finished."""
        self.in_flight -= 1
        if tier:
            self.count_in_tiers(tier, -1)
        self.in_flight_cells[0] -= 1
        for ranking in self.rankings:
            ranking.update_load(self)

    def count_in_tiers(self, tier: int, change: int) -> None:
        """Count a request of a tier, or its end."""
        self._in_tiers += [0] * (tier - len(self._in_tiers))
        for lower in range(tier):
            self._in_tiers[lower] += change

    def guarantee(self, parts: Sequence[int]) -> None:
        """Guarantee these numbers of slots to the workers, if they share them."""

    def take_slot(self) -> bool:
        """Take a slot before ``start_exchange``. Returns False if other workers have taken all."""
        return True

    def offer_slot(self) -> None:
        """Offer a free slot to other workers, if there are any."""

    def set_limit(self, limit: float) -> None:
        """Bound the requests in flight from now on. Requests above a lower limit finish, and a higher one starts queued requests."""
        if limit != self.limit:
            self.limit = limit
            for ranking in self.rankings:
                ranking.update_load(self)

    def publish_in_flight(self, cells: Cells) -> None:
        """Count the requests in flight in cell 0 of ``cells`` from now on. Servers of the same name may share a cell."""
        if cells is not self.in_flight_cells:
            self.in_flight_cells[0] -= self.in_flight
            cells[0] += self.in_flight
            self.in_flight_cells = cells

    def update_rankings(self) -> None:
        """Let the rankings check whether the server is available."""
        for ranking in self.rankings:
            ranking.update_availability(self)

    def request_head(self, path: str) -> bytes:
        """Return the first lines of a POST: request line, Host and the server's own key. Computed once for each path."""
        head = self._request_prefixes.get(path)
        if head is None:
            address, api_key = self.spec.address, self.spec.api_key
            key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
            lines = f"POST {address.prefix}{path} HTTP/1.1\r\nhost: {address.authority}\r\n{key}"
            head = self._request_prefixes[path] = lines.encode()
        return head

    @property
    def name(self) -> str:
        """The name in the specification."""
        return self.spec.name

    @property
    def weight(self) -> float:
        """The weight in the specification."""
        return self.spec.weight

    @property
    def is_shared(self) -> bool:
        """Whether other workers use its slots, too."""
        return False

    @property
    def load(self) -> float:
        """The requests in flight divided by the weight."""
        return self.in_flight / self.spec.weight

    @property
    def full(self) -> bool:
        """Whether as many requests are in flight as the limit allows."""
        return self.in_flight >= self.limit

    def full_for(self, tier: int) -> bool:
        """Return whether a request of this tier must not use the free slots, if there are any."""
        return self.full or (tier > 0 and any(self._in_tiers[each] >= self.open_to(each) for each in range(min(tier, len(self._reserved)))))

    @property
    def is_over_limit(self) -> bool:
        """Whether it would be full even if one of its requests ended."""
        return self.in_flight > self.limit

    def would_serve(self, tier: int) -> bool:
        """Return whether it could take a request of this tier if a request of the same or a later tier ended."""
        reserved = range(min(tier, len(self._reserved)))
        is_usable = self._condition is Condition.UP and not self.is_ejected and not self.is_over_limit
        return is_usable and all(self._in_tiers[each] <= self.open_to(each) for each in reserved)

    @property
    def is_ejected(self) -> bool:
        """Whether the server gets no requests because of its failures, as long as there is another server."""
        until = self._ejection.ejected_until
        return until != 0.0 and self._clock() < until

    @property
    def available(self) -> bool:
        """Whether the server is up, not full and not ejected."""
        return self.available_for(0)

    def available_for(self, tier: int) -> bool:
        """Return whether the server is up, not ejected, and has a slot for a request of this tier."""
        return self._condition is Condition.UP and not self.full_for(tier) and not self.is_ejected

    def record_failure(self, error: UpstreamError) -> None:
        """Record that a request failed on the server, and eject the server after too many failures."""
        ejected = self._ejection.record_failure(error, self._clock())
        self.recently_failed = self._ejection.has_failures
        if ejected:
            self.ejected_cells[0] = 1.0
            self.update_rankings()

    def record_success(self) -> None:
        """Record a complete response, or that the server came up: forget its failures."""
        self._ejection.reset()
        self.recently_failed = False
        self.ejected_cells[0] = 0.0
        self.update_rankings()

    def measure_prefill(self, size: int, seconds: float) -> None:
        """Learn the speed of the prefill from a stream: ``size`` bytes of a request, and the seconds until its first event."""
        if size >= _MEASURABLE:
            self._prefill_speed += _LEARNING * (max(size / max(seconds, TICK), _SLOWEST) - self._prefill_speed)

    def take_progress(self) -> Progress | None:
        """Return the progress of the responses since the last call, None if no response was awaited."""
        if not self.waited_for:
            return None
        progress = Progress(self.last_byte_at, self.waiting_bytes / self._prefill_speed)
        self.waited_for, self.waiting_bytes = False, 0
        return progress

    def add_idle_connection(self, connection: Connection) -> None:
        """Store a connection without an exchange, for the next request."""
        self._idle.add(connection)

    def take_idle_connection(self) -> Connection | None:
        """Return an idle connection that is still usable, or None."""
        return self._idle.pop()

    async def connect(self, timeout: float) -> Connection:
        """Open a connection. Raises ConnectTimeout, LocalLimit and ConnectFailed."""
        spec, done, batch = self.spec, self._idle.add, self._write_batch
        connecting = asyncio.create_task(connect(spec.name, spec.address, timeout, self._tls, done, batch, self._headers))
        try:
            connection = await connecting
        except asyncio.CancelledError:
            if connecting.done() and not connecting.cancelled() and connecting.exception() is None:
                connecting.result().close()  # it was established at the moment of the cancellation
            raise
        if connection.closed:  # in the few event-loop iterations since it was established: the server died
            raise ConnectFailed(self.spec.name, "closed the connection before a request was sent")
        return connection

    def expire(self) -> None:
        """Close expired idle connections, and end an expired ejection."""
        self._idle.close_expired()
        if self._ejection.expire(self._clock()):
            self.ejected_cells[0] = 0.0
            self.update_rankings()

    def retire(self) -> None:
        """Close the idle connections: the server is no longer configured. Requests in flight finish, and are counted until then."""
        if self.draining_since is None:
            self.draining_since = self._clock()
        self.ejected_cells[0] = 0.0
        self.ejected_cells = [0.0]  # another server may soon use the name and its cells
        self._idle.max_idle = 0.0
        self._idle.close_all()
