"""Queue requests for a model until one of its servers is up, or until a server has capacity. One bounded queue per model.

A queue is open while control expects the model to come up at a known time, and while servers that are up are at capacity. The rules: the
fair queue picks the next request and resumes it as soon as capacity frees up, inside that same call, so no later request takes the
capacity. The ``with`` block that acquired a queue slot releases it, so a disconnect releases it immediately. Control is notified when
requests start or stop waiting for a model that is not up. A client that was sent away with a Retry-After is expected back; until then its
model counts as requested.

Times are in seconds of the monotonic clock, which all processes share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from time import monotonic

from gateway.admission.fair_queue import FairQueue
from gateway.api.errors import Refusal, draining, duration, none_healthy
from gateway.snapshot.snapshot import Key, Model, Queue
from gateway.telemetry.shared_counters import SharedCells
from upstream.balancing.policies.least_busy import LeastBusy
from upstream.balancing.pool import Pool
from upstream.http.deadlines import Deadlines
from upstream.http.inline_task import Signal

ReportDemand = Callable[[str, float | None], None]
"""Reports to control the time since which a model is requested; None if it is no longer requested."""

NO_QUEUE = Queue(size=0, wait=0.0)
RETURN_GRACE = 2.0
"""Seconds that a client may be late when it retries after its Retry-After."""


class ModelQueues:
    """The queues of a worker. ``cells`` returns a model's gauge of waiting requests."""

    def __init__(self, deadlines: Deadlines, cells: Callable[[str], SharedCells], report: ReportDemand) -> None:
        self._deadlines = deadlines
        self._cells = cells
        self._report = report
        self._queues: dict[str, ModelQueue] = {}

    def set_models(self, models: Iterable[tuple[Model, Pool]]) -> None:
        """Create the queues for the models of a new snapshot. Waiting requests stay."""
        before, self._queues = self._queues, {}
        for model, pool in models:
            queue = before.pop(model.id, None) or ModelQueue(model.id, self._deadlines, self._cells(model.id), self._report)
            self._queues[model.id] = queue
            queue.set_pool(pool, model.queue or NO_QUEUE)
        for queue in before.values():
            queue.refuse_all(none_healthy)

    def set_expected(self, expected: Mapping[str, float]) -> None:
        """Store the time at which each model that is not up is expected, and resume requests that need not wait any longer."""
        for model, queue in self._queues.items():
            queue.eta = expected.get(model)
            queue.update()

    def slot(self, model: str, key: Key, since: float) -> QueueSlot:
        """Return a slot in a model's queue for a request that has waited since that time.

        Raises Refusal no_healthy_server for a removed model.
        """
        queue = self._queues.get(model)
        if queue is None:
            raise none_healthy()
        return QueueSlot(queue, key, since)

    def is_expected(self, model: str) -> bool:
        """Check whether control expects a model to come up."""
        queue = self._queues.get(model)
        return queue is not None and queue.eta is not None

    def tick(self) -> None:
        """Forget clients that have not returned."""
        now = monotonic()
        for queue in self._queues.values():
            queue.tick(now)

    def close(self) -> None:
        """Refuse all current and later requests for models that are not up: the gateway is stopping.

        The other requests may still get a server.
        """
        for queue in self._queues.values():
            queue.close()


class ModelQueue:
    """The requests that wait for one model. ``eta``: when it should be up, or None if it is not expected."""

    def __init__(self, model: str, deadlines: Deadlines, gauge: SharedCells, report: ReportDemand) -> None:
        self.deadlines = deadlines
        self.bounds = NO_QUEUE
        self.eta: float | None = None
        self._pool = Pool((), LeastBusy(()))
        self._closing = False
        self._model = model
        self._gauge = gauge
        self._report = report
        self._waiting = FairQueue[QueueSlot]()
        self._rate = DispatchRate()
        self._dispatching = False
        self._reported: float | None = None
        self._returning: tuple[float, float] | None = None
        """The first time at which a client was asked to retry later, and the time until which retries are expected."""

    def set_pool(self, pool: Pool, queue: Queue) -> None:
        """Replace the servers and the bounds. Waiting requests stay."""
        self._pool, self.bounds = pool, queue
        pool.on_capacity(self.dispatch)
        if pool.is_up:
            self.update()

    def enter(self, slot: QueueSlot) -> None:
        """Add a slot. Raises Refusal."""
        if not self._pool.is_up:
            if self._closing:
                raise draining()
            if self.eta is None:
                raise none_healthy()
        if len(self._waiting) >= self.bounds.size:
            self._displace_for(slot)
        if not self._waiting:
            self._rate.start(monotonic())
        self._waiting.put(slot, slot.key.id, slot.key.weight, slot.since)
        self._publish()

    def _displace_for(self, slot: QueueSlot) -> None:
        latest = self._waiting.displaced_by(slot.key.id, slot.key.weight)
        if latest is None:
            raise self.retry_later(slot.since)
        self.refuse(latest, self.retry_later(latest.since))

    def remove(self, slot: QueueSlot) -> None:
        """Remove a slot that was not resumed."""
        self._waiting.remove(slot, slot.key.id)
        self._publish()

    def refuse(self, slot: QueueSlot, refusal: Refusal) -> None:
        """End the wait of a slot with a refusal."""
        self.remove(slot)
        slot.resume(refusal)

    def dispatch(self) -> None:
        """Resume requests in order as long as there is capacity."""
        if self._dispatching or not self._waiting:
            return  # a resumed request takes a server or frees one, which the loop below sees
        self._dispatching = True
        try:
            for _ in range(len(self._waiting)):
                if not (self._waiting and self._pool.has_capacity()):
                    break
                self._rate.record_dispatch(monotonic())
                self._waiting.pop().resume()
        finally:
            self._dispatching = False
        self._publish()

    def update(self) -> None:
        """Apply a change of the servers or of the time at which the model is expected."""
        up = self._pool.is_up
        if up or self.eta is None:
            self._returning = None
        if up:
            self.dispatch()
        elif self.eta is None:
            self.refuse_all(none_healthy)
        self._publish()

    def refuse_all(self, reason: Callable[[], Refusal]) -> None:
        """End the wait of all slots."""
        for slot in tuple(self._waiting):
            if slot.waits:
                self.refuse(slot, reason())

    def close(self) -> None:
        """Refuse requests for a model that is not up: the gateway is stopping."""
        self._closing = True
        if not self._pool.is_up:
            self.refuse_all(draining)

    def retry_later(self, since: float) -> Refusal:
        """Return the refusal, with the time to retry, for a request that cannot wait or has waited too long."""
        now = monotonic()
        if self._pool.is_up:
            seconds = self._rate.seconds_for(len(self._waiting), now)
            code, reason = "overloaded", "The model has as many requests as it can take, and others wait."
        else:
            seconds = max(math.ceil((self.eta or now) - now), 1)
            code, reason = "model_loading", "The model is being loaded."
            first, until = self._returning or (since, 0.0)
            self._returning = min(first, since), max(until, now + seconds + RETURN_GRACE)
            self._publish()
        return Refusal(code, f"{reason} Try again in {duration(seconds)}.", headers={"retry-after": str(seconds)})

    def tick(self, now: float) -> None:
        """Forget clients that have not returned in time."""
        if self._returning is not None and now > self._returning[1]:
            self._returning = None
            self._publish()

    def _publish(self) -> None:
        """Set the gauge of waiting requests, and report the oldest demand to control if it has changed."""
        self._gauge[0] = len(self._waiting)
        oldest_demand = None if self._pool.is_up else self._oldest_demand()
        if oldest_demand != self._reported:
            self._reported = oldest_demand
            self._report(self._model, oldest_demand)

    def _oldest_demand(self) -> float | None:
        """Return the time since which a waiting or returning client has requested the model."""
        return min((since for since in (self._waiting.oldest, self._returning and self._returning[0]) if since is not None), default=None)


class QueueSlot:
    """One request's slot in a queue, watched by the worker's deadline clock."""

    __slots__ = ("_queue", "_refusal", "_signal", "key", "since", "waits")

    def __init__(self, queue: ModelQueue, key: Key, since: float) -> None:
        self.key = key
        self.since = since
        self.waits = False
        self._queue = queue
        self._signal = Signal()
        self._refusal: Refusal | None = None

    def __enter__(self) -> QueueSlot:
        self._queue.enter(self)
        self.waits = True
        self._queue.deadlines.watch(self)
        self._queue.dispatch()  # its servers may be of an older snapshot, and full while the current ones are not
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.deadlines.forget(self)
        if self.waits:
            self.waits = False
            self._queue.remove(self)

    async def wait(self) -> None:
        """Wait until a server is available. Raises Refusal model_loading or overloaded if the wait ends before."""
        await self._signal
        if self._refusal is not None:
            raise self._refusal

    def resume(self, refusal: Refusal | None = None) -> None:
        """End the wait; the slot is no longer in the queue."""
        self.waits = False
        self._refusal = refusal
        self._signal.set()

    def check(self, now: float) -> None:
        """End the wait if it has taken too long."""
        if self.waits and now - self.since > self._queue.bounds.wait:
            self._queue.refuse(self, self._queue.retry_later(self.since))


class DispatchRate:
    """Mean of the latest times between two dispatches, in seconds."""

    _MEMORY = 16

    def __init__(self) -> None:
        self._mean = 0.0
        self._seen = 0
        self._last = 0.0

    def start(self, now: float) -> None:
        """Start measuring: the queue is no longer empty."""
        self._last = now

    def record_dispatch(self, now: float) -> None:
        """Record that a request was dispatched."""
        self._seen = min(self._seen + 1, self._MEMORY)
        self._mean += (now - self._last - self._mean) / self._seen
        self._last = now

    def seconds_for(self, dispatches: int, now: float) -> int:
        """Return the whole seconds, at least one, that a number of dispatches will take."""
        return max(math.ceil(max(self._mean, now - self._last) * dispatches), 1)
