"""Where requests wait for a model: until one of its servers is up, or until one that is up has room again. One room per model, bounded.

A room is open while control expects its model to come up, and knows when, and while servers that are up have all the requests
that they may have. Those in it are looked at by the worker's one clock. The rules: whose turn it is is the fair queue's to say;
he is called in the very moment in which there is room for him, and goes on inside that call, so nobody who comes later takes
it; a place is given back by the ``with`` that took it, so a client that leaves frees it at once; control is told whenever it
changes since when a model is asked for that is not up; who was sent away from such a one with a Retry-After is expected back,
so until then it stays asked for.

Times are in seconds of the monotonic clock, which every process's event loop shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from time import monotonic

from gateway.admission.fair_queue import FairQueue
from gateway.api.errors import Refusal, draining, duration, none_healthy
from gateway.snapshot.snapshot import Key, Model, Queue
from gateway.telemetry.shared_counters import Cells
from upstream.balancing.pool import Pool
from upstream.http.deadlines import Deadlines
from upstream.http.inline_task import Signal

ReportDemand = Callable[[str, float | None], None]
"""Tells control since when a model is asked for; None: nobody asks for it any more."""

NO_QUEUE = Queue(size=0, wait=0.0)
RETURN_GRACE = 2.0
"""Seconds for which a client may be late that comes back after its Retry-After."""


def report_nothing(_model: str, _since: float | None) -> None:
    """Asks in vain: for a worker without a control process."""


class ModelQueues:
    """The rooms of a worker. ``cells`` gives a model's gauge of waiting requests."""

    def __init__(self, deadlines: Deadlines, cells: Callable[[str], Cells], ask: ReportDemand) -> None:
        self._deadlines = deadlines
        self._cells = cells
        self._report = ask
        self._queues: dict[str, ModelQueue] = {}

    def set_models(self, models: Iterable[tuple[Model, Pool]]) -> None:
        """Have a room for each model of a new snapshot; those who wait stay where they are."""
        before, self._queues = self._queues, {}
        for model, pool in models:
            room = before.pop(model.id, None) or ModelQueue(model.id, self._deadlines, self._cells(model.id), self._report)
            self._queues[model.id] = room
            room.set_pool(pool, model.queue or NO_QUEUE)
        for room in before.values():
            room.refuse_all(none_healthy)

    def set_expected(self, expected: Mapping[str, float]) -> None:
        """Take over when each model is expected that is not up; who need not wait any longer goes on."""
        for model, room in self._queues.items():
            room.eta = expected.get(model)
            room.update()

    def slot(self, model: str, key: Key, since: float) -> QueueSlot:
        """A place in a model's room, for a request that waits since then. Raises Refusal no_healthy_server for a model that is gone."""
        room = self._queues.get(model)
        if room is None:
            raise none_healthy()
        return QueueSlot(room, key, since)

    def is_expected(self, model: str) -> bool:
        """Whether a model is on its way, as control sees it."""
        room = self._queues.get(model)
        return room is not None and room.eta is not None

    def tick(self) -> None:
        """Give up clients that have not come back."""
        now = monotonic()
        for room in self._queues.values():
            room.tick(now)

    def close(self) -> None:
        """The gateway is stopping: who waits for a model that is not up is told so, and nobody else comes in there.

        The others may get their turn yet.
        """
        for room in self._queues.values():
            room.close()


class ModelQueue:
    """Those who wait for one model. ``eta``: when it should be up, None while nobody expects it."""

    def __init__(self, model: str, deadlines: Deadlines, gauge: Cells, ask: ReportDemand) -> None:
        self.deadlines = deadlines
        self.bounds = NO_QUEUE
        self.eta: float | None = None
        self._pool = Pool((), "least_busy")
        self._closing = False
        self._model = model
        self._gauge = gauge
        self._report = ask
        self._waiting = FairQueue[QueueSlot]()
        self._rate = DispatchRate()
        self._dispatching = False
        self._reported: float | None = None
        self._returning: tuple[float, float] | None = None
        """Since when those who were sent away have asked, and until when they are expected back."""

    def set_pool(self, pool: Pool, queue: Queue) -> None:
        """From now on it is these servers that are waited for, within these bounds; who is here already stays."""
        self._pool, self.bounds = pool, queue
        pool.on_capacity(self.dispatch)
        if pool.is_up:
            self.update()

    def enter(self, place: QueueSlot) -> None:
        """Take a place. Raises Refusal."""
        if not self._pool.is_up:
            if self._closing:
                raise draining()
            if self.eta is None:
                raise none_healthy()
        if len(self._waiting) >= self.bounds.size:
            self._displace_for(place)
        if not self._waiting:
            self._rate.start(monotonic())
        self._waiting.put(place, place.key.id, place.key.weight, place.since)
        self._publish()

    def _displace_for(self, place: QueueSlot) -> None:
        latest = self._waiting.displaced_by(place.key.id, place.key.weight)
        if latest is None:
            raise self.retry_later(place.since)
        self.refuse(latest, self.retry_later(latest.since))

    def remove(self, place: QueueSlot) -> None:
        """Give a place back that was not called."""
        self._waiting.remove(place, place.key.id)
        self._publish()

    def refuse(self, place: QueueSlot, refusal: Refusal) -> None:
        """Let one wait no longer."""
        self.remove(place)
        place.resume(refusal)

    def dispatch(self) -> None:
        """Let as many go on as there is room for, in their order."""
        if self._dispatching or not self._waiting:
            return  # who goes on takes a server, or leaves one: it is seen below
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
        """Something has changed that is waited for."""
        up = self._pool.is_up
        if up or self.eta is None:
            self._returning = None
        if up:
            self.dispatch()
        elif self.eta is None:
            self.refuse_all(none_healthy)
        self._publish()

    def refuse_all(self, reason: Callable[[], Refusal]) -> None:
        """Let nobody wait any longer."""
        for place in tuple(self._waiting):
            if place.waits:
                self.refuse(place, reason())

    def close(self) -> None:
        """The gateway is stopping."""
        self._closing = True
        if not self._pool.is_up:
            self.refuse_all(draining)

    def retry_later(self, since: float) -> Refusal:
        """What one is told who cannot wait, or has waited too long: when to come back."""
        now = monotonic()
        if self._pool.is_up:
            return _overloaded(self._rate.seconds_for(len(self._waiting), now))
        seconds = max(math.ceil((self.eta or now) - now), 1)
        first, until = self._returning or (since, 0.0)
        self._returning = min(first, since), max(until, now + seconds + RETURN_GRACE)
        self._publish()
        return Refusal(
            "model_loading", f"The model is being loaded. Try again in {duration(seconds)}.", headers={"retry-after": str(seconds)}
        )

    def tick(self, now: float) -> None:
        if self._returning is not None and now > self._returning[1]:
            self._returning = None
            self._publish()

    def _publish(self) -> None:
        """Leave the number for others to read, and tell control when it has changed since when the model is asked for."""
        self._gauge[0] = len(self._waiting)
        asked = None if self._pool.is_up else self._oldest_demand()
        if asked != self._reported:
            self._reported = asked
            self._report(self._model, asked)

    def _oldest_demand(self) -> float | None:
        """Since when somebody wants the model who is here or is expected back."""
        return min((since for since in (self._waiting.oldest, self._returning and self._returning[0]) if since is not None), default=None)


class QueueSlot:
    """One request's place in a room. Watched by the worker's clock."""

    __slots__ = ("_queue", "_refusal", "_signal", "key", "since", "waits")

    def __init__(self, room: ModelQueue, key: Key, since: float) -> None:
        self.key = key
        self.since = since
        self.waits = False
        self._queue = room
        self._signal = Signal()
        self._refusal: Refusal | None = None

    def __enter__(self) -> QueueSlot:
        self._queue.enter(self)
        self.waits = True
        self._queue.deadlines.watch(self)
        self._queue.dispatch()  # it may come from servers of a snapshot before, which are full where those of now are not
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.deadlines.forget(self)
        if self.waits:
            self.waits = False
            self._queue.remove(self)

    async def wait(self) -> None:
        """Wait until a server may be had. Raises Refusal model_loading or overloaded when the wait is over before."""
        await self._signal
        if self._refusal is not None:
            raise self._refusal

    def resume(self, refusal: Refusal | None = None) -> None:
        """Its wait is over, and it is in the room no longer."""
        self.waits = False
        self._refusal = refusal
        self._signal.set()

    def check(self, now: float) -> None:
        if self.waits and now - self.since > self._queue.bounds.wait:
            self._queue.refuse(self, self._queue.retry_later(self.since))


class DispatchRate:
    """How long it takes from one turn to the next: the mean of the latest times between two, in seconds."""

    _MEMORY = 16

    def __init__(self) -> None:
        self._mean = 0.0
        self._seen = 0
        self._last = 0.0

    def start(self, now: float) -> None:
        """Somebody waits again."""
        self._last = now

    def record_dispatch(self, now: float) -> None:
        """One of those who wait has his turn."""
        self._seen = min(self._seen + 1, self._MEMORY)
        self._mean += (now - self._last - self._mean) / self._seen
        self._last = now

    def seconds_for(self, turns: int, now: float) -> int:
        """Whole seconds, at least one, that so many turns will take."""
        return max(math.ceil(max(self._mean, now - self._last) * turns), 1)


def _overloaded(seconds: int) -> Refusal:
    words = f"The model has as many requests as it can take, and others wait. Try again in {duration(seconds)}."
    return Refusal("overloaded", words, headers={"retry-after": str(seconds)})
