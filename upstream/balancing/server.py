"""One vLLM server as a worker sees it: what the configuration says of it, and what is live.

``ServerSpec`` is a value and may be swapped with the next snapshot. ``Server`` is the
live side: what is in flight, the parked connections, whether it can take a request. It outlives a reload as
long as its spec is the same. The rule: ``in_flight`` changes only in
``attempt.Attempt``, which gives back on every way out what it took.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic
from typing import Protocol

from upstream.balancing.ejection import EjectionState
from upstream.balancing.ranking import Ranking
from upstream.http.address import Address
from upstream.http.connection import Connection, IdleConnections, connect
from upstream.http.errors import UpstreamError
from upstream.http.write_batching import WriteBatch


class Condition(StrEnum):
    """What control knows of a server from its probes and its process. ``OUT_OF_ROTATION``: the gateway
    sends it no requests: it is stopped, asleep or draining."""

    UP = "up"
    LOADING = "loading"
    OUT_OF_ROTATION = "out_of_rotation"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What the configuration or the launcher says of one server.

    ``name`` is unique in the gateway; ``model`` is the name the server serves its model under; ``keep_idle``
    is how long, in seconds, an idle connection to it is kept.
    """

    name: str
    address: Address
    model: str
    api_key: str | None = field(default=None, repr=False)
    weight: float = 1.0
    keep_idle: float = 4.0


class Cells(Protocol):
    """A place where a number is left for others to read."""

    def __getitem__(self, index: int, /) -> float:
        """The number."""

    def __setitem__(self, index: int, value: float, /) -> None:
        """Leave the number."""


class Server:
    """The live side of one server."""

    def __init__(
        self,
        spec: ServerSpec,
        condition: Condition = Condition.LOADING,
        write_batch: WriteBatch | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``write_batch``: that of the process, if there are more who write. ``clock`` times ejections, in seconds."""
        self.spec = spec
        self._condition = condition
        self.in_flight = 0
        self.limit = math.inf
        """Exchanges that it is given at once."""
        self.in_flight_cells: Cells = [0.0]
        self.rankings: list[Ranking[Server]] = []
        """Those that are to be told when its load or its availability changes."""
        self.ejected_cells: Cells = [0.0]
        """1 at its index 0 while it is passed over, for whoever reads it from outside."""
        self.recently_failed = False
        """It has failed since it last succeeded."""
        self._ejection = EjectionState()
        self._clock = clock
        self._idle = IdleConnections(spec.keep_idle)
        self._write_batch = write_batch or WriteBatch()
        self._request_heads: dict[str, bytes] = {}
        self._tls = ssl.create_default_context() if spec.address.tls else None

    def __repr__(self) -> str:
        return f"<Server {self.spec.name} {self._condition.value}, {self.in_flight} in flight, {len(self._idle)} idle>"

    @property
    def condition(self) -> Condition:
        """What is known of it."""
        return self._condition

    @condition.setter
    def condition(self, condition: Condition) -> None:
        comes_up = condition is Condition.UP and self._condition is not Condition.UP
        self._condition = condition
        if comes_up:
            self.record_success()  # what it did before is another life's
        else:
            self._update_rankings()

    def start_exchange(self) -> None:
        """An exchange begins; it is added to ``mirror[0]``, for whoever reads that from outside."""
        self.in_flight += 1
        self.in_flight_cells[0] += 1
        for ranking in self.rankings:
            ranking.update_load(self)

    def finish_exchange(self) -> None:
        """An exchange is over."""
        self.in_flight -= 1
        self.in_flight_cells[0] -= 1
        for ranking in self.rankings:
            ranking.update_load(self)

    def publish_in_flight(self, mirror: Cells) -> None:
        """Leave the number there from now on, that of what is under way too. Servers of one name may share a place."""
        if mirror is not self.in_flight_cells:
            self.in_flight_cells[0] -= self.in_flight
            mirror[0] += self.in_flight
            self.in_flight_cells = mirror

    def _update_rankings(self) -> None:
        for ranking in self.rankings:
            ranking.update_availability(self)

    def request_head(self, path: str) -> bytes:
        """How a POST to it begins: request line, Host and its own key; made once for each path."""
        found = self._request_heads.get(path)
        if found is None:
            address, key = self.spec.address, self.spec.api_key
            lines = f"POST {address.prefix}{path} HTTP/1.1\r\nhost: {address.authority}\r\n" + (
                f"authorization: Bearer {key}\r\n" if key else ""
            )
            found = self._request_heads[path] = lines.encode()
        return found

    @property
    def name(self) -> str:
        """As in its spec."""
        return self.spec.name

    @property
    def weight(self) -> float:
        """As in its spec."""
        return self.spec.weight

    @property
    def load(self) -> float:
        """In flight by weight: the measure of busyness."""
        return self.in_flight / self.spec.weight

    @property
    def full(self) -> bool:
        """It has as many exchanges as it is given at once."""
        return self.in_flight >= self.limit

    @property
    def is_ejected(self) -> bool:
        """It gets no requests for its failures, as long as there is another server."""
        until = self._ejection.ejected_until
        return until != 0.0 and self._clock() < until

    @property
    def available(self) -> bool:
        """It is up, not full, and not passed over for its failures."""
        return self._condition is Condition.UP and not self.full and not self.is_ejected

    def record_failure(self, error: UpstreamError) -> None:
        """A request failed on it: when that was too much, it is passed over for a while, where another one can take requests."""
        ejected = self._ejection.record_failure(error, self._clock())
        self.recently_failed = self._ejection.has_failures
        if ejected:
            self.ejected_cells[0] = 1.0
            self._update_rankings()

    def record_success(self) -> None:
        """It has given a whole answer, or has come up anew."""
        self._ejection.reset()
        self.recently_failed = False
        self.ejected_cells[0] = 0.0
        self._update_rankings()

    def add_idle_connection(self, connection: Connection) -> None:
        """Keep a connection that has nothing to do."""
        self._idle.add(connection)

    def take_idle_connection(self) -> Connection | None:
        """A kept connection that is still good, if there is one."""
        return self._idle.pop()

    async def connect(self, timeout: float) -> Connection:
        """A new connection; raises ConnectTimeout or ConnectFailed."""
        connecting = asyncio.create_task(connect(self.spec.name, self.spec.address, timeout, self._tls, self._idle.add, self._write_batch))
        try:
            return await connecting
        except asyncio.CancelledError:
            if connecting.done() and not connecting.cancelled() and connecting.exception() is None:
                connecting.result().close()  # it was made in the very moment in which nobody wanted it any more
            raise

    def expire(self) -> None:
        """Close connections that were kept too long; let a server that was passed over be tried again when it is time."""
        self._idle.close_expired()
        if self._ejection.expire(self._clock()):
            self.ejected_cells[0] = 0.0
            self._update_rankings()

    def retire(self) -> None:
        """The configuration no longer names it: close what is idle; what is busy ends in its own time, and is counted until then."""
        self.ejected_cells[0] = 0.0
        self.ejected_cells = [0.0]  # its name, and the number left under it, may be another's by now
        self._idle.max_idle = 0.0
        self._idle.close_all()
