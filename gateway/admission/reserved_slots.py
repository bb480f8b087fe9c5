"""Reserve slots of servers for the first classes: how many slots of each server the requests of later classes may use.

A class with a number of reserved slots leaves the others open to later classes. With ``auto``, the open slots follow the times of its
streams, by additive increase and multiplicative decrease: a few more are open while its objectives are met, a quarter less once they are
missed.

The rules: a change takes effect as requests finish, and until then no further change is decided. Some more slots are open only while the
later classes use all that are open, so that the times say something about them; or while the class is idle, up to the number at which it
last missed an objective. At least one slot is always reserved, and at least one is open.

Several workers: each decides by its own streams, and opens at most one step more than the least of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import monotonic
from typing import NamedTuple, Protocol

from gateway.admission.inflight import worker_share
from gateway.snapshot.snapshot import AUTO, Model, QueueClass, Slo, Snapshot
from gateway.telemetry.shared_counters import SharedCells
from upstream.balancing.server import Server

OBJECTIVES = ("ttft", "itl")
_TOLERATED = 0.05  # share of the times that may miss the objective
_WINDOW = 40  # times after which earlier ones are forgotten
_INTERVAL = 1.0  # seconds between decisions
_DECREASE = 0.75
_PROBE, _SHORTEST_PROBE, _LONGEST_PROBE = 15.0, 1.0, 600.0
"""Seconds at the largest number of open slots that met the objectives, before one more is tried: at first, and the bounds."""


class SlotMetrics(Protocol):
    """The metrics that are written and read here."""

    def cells(self, family: str, /, *labels: str) -> SharedCells:
        """Return the cells of a series, created on first use."""

    def peer_cells(self, family: str, /, *labels: str) -> Sequence[SharedCells | None]:
        """Return the cells of a series in each other worker; None if it does not exist there."""


class AdaptiveSlots:
    """The slots of a server that are open to later classes, by additive increase and multiplicative decrease. Pure; times in seconds."""

    def __init__(self, most: int) -> None:
        self._most = self._ceiling = most
        self.open = max(most // 2, 1)
        self._reached_at = 0.0
        """When the ceiling was reached."""
        self._pause = _PROBE
        self._probes = False
        self._times = self._missed = 0

    @property
    def step(self) -> int:
        """How many slots one increase opens."""
        return max(self.open // 8, 1)

    def bound(self, most: int) -> None:
        """Open at most so many slots: the limit of the servers has changed."""
        if self._ceiling == self._most or self._ceiling > most:
            self._ceiling = most
        self._most, self.open = most, min(self.open, most)

    def note(self, times: int, missed: int) -> None:
        """Note how many times of the class were measured, and how many of them missed the objective."""
        if self._times >= _WINDOW:
            self._times = self._missed = 0
        self._times += times
        self._missed += missed

    def decide(self, now: float, in_use: float) -> None:
        """Change the open slots by the times since the last change. ``in_use``: the part of the open slots that is used, the largest."""
        times, missed = self._times, self._missed
        if in_use > 1.0 or (missed and not in_use):
            self._times = self._missed = 0  # measured while more were used, or missed without any request of a later class
        elif missed > max(_TOLERATED * times, 1):
            self._decrease(now)
        elif not times or (in_use == 1.0 and missed <= _TOLERATED * times):
            self._increase(now, is_idle=not times)

    def _decrease(self, now: float) -> None:
        if self._probes:  # the number before has met the objectives
            self._pause = min(2 * self._pause, _LONGEST_PROBE)
            to = self._ceiling = max(self.open - 1, 1)
        else:
            self._ceiling, to = max(self.open - self.step, 1), max(int(self.open * _DECREASE), 1)
        self._change(to, now, probes=False)

    def _increase(self, now: float, *, is_idle: bool) -> None:
        if self.open < self._ceiling:
            self._change(min(self.open + self.step, self._ceiling), now, probes=False)
            return
        if is_idle:
            return
        if self._probes:  # the last probe met the objectives
            self._probes, self._pause = False, max(self._pause / 2, _SHORTEST_PROBE)
        if self._ceiling < self._most and now - self._reached_at >= self._pause:
            self._ceiling += 1
            self._change(self._ceiling, now, probes=True)

    def _change(self, to: int, now: float, *, probes: bool) -> None:
        self.open, self._probes, self._reached_at = to, probes, now
        self._times = self._missed = 0


class Progress(NamedTuple):
    """The progress of a stream: when its first and its last event arrived, and the number of its events."""

    first: float | None
    last: float
    events: int


class MeasuredStream:
    """The times of a stream of a class with adaptive slots."""

    __slots__ = ("_events", "_has_first", "_last", "_progress", "_received_at")

    def __init__(self, received_at: float, progress: Callable[[], Progress]) -> None:
        self._received_at = received_at
        self._progress = progress
        self._has_first = False
        self._last = 0.0
        self._events = 0

    def times(self, slo: Slo, now: float) -> Iterator[tuple[str, float]]:
        """Yield the times since the last call: the time to the first token, once; the mean time between tokens.

        A request that has waited for longer than its objective counts before it has a token.
        """
        first, last, events = self._progress()
        if not self._has_first:
            waited = (now if first is None else first) - self._received_at
            if first is not None or (slo.ttft is not None and waited > slo.ttft):
                self._has_first = True
                yield "ttft", waited
        if first is None or events <= self._events:
            return
        if not self._events:
            self._events, self._last = 1, first
        if events > self._events:
            yield "itl", (last - self._last) / (events - self._events)
            self._events, self._last = events, last


class ClassSlots:
    """The slots of a model's servers that are open to the classes after a class. ``adaptive``: None for a fixed number.

    ``ratios``: the cells of each objective that the slots follow.
    """

    def __init__(self, limit: int, reserving: QueueClass, slo: Slo, cells: SharedCells, ratios: Mapping[str, SharedCells]) -> None:
        reserved = reserving.reserved_slots
        self.configured = self.limit = limit
        self._reserved = reserved if isinstance(reserved, int) else 0
        self.adaptive = AdaptiveSlots(max(limit - 1, 1)) if reserved == AUTO else None
        self.open = max(limit - self._reserved, 1) if self.adaptive is None else self.adaptive.open
        self.slo = slo
        self.streams: dict[MeasuredStream, None] = {}
        self._cells = cells
        self._ratios = ratios

    def follow(self, limit: int) -> None:
        """Follow a limit of the servers that may have changed."""
        if limit == self.limit:
            return
        self.limit = limit
        if self.adaptive is None:
            self.open = max(limit - self._reserved, 1)
        else:
            self.adaptive.bound(max(limit - 1, 1))
            self.open = self.adaptive.open
        self.publish()

    @contextmanager
    def measured(self, gauge: AbstractContextManager[None], received_at: float, progress: Callable[[], Progress]) -> Iterator[None]:
        """Measure a stream from its start to its end. Holds the gauge of its model's requests."""
        stream = MeasuredStream(received_at, progress)
        with gauge:
            self.streams[stream] = None
            try:
                yield
            finally:
                del self.streams[stream]
                self.measure(stream, monotonic())

    def measure(self, stream: MeasuredStream, now: float) -> None:
        """Note the times of a stream since it was measured last."""
        if self.adaptive is None:
            return
        for objective, seconds in stream.times(self.slo, now):
            if (ratio := self._ratios.get(objective)) is not None:
                target: float = getattr(self.slo, objective)
                self.adaptive.note(1, seconds > target)
                ratio[0] = seconds / target if not ratio[0] else 0.8 * ratio[0] + 0.2 * seconds / target

    def decide(self, now: float, in_use: float, of_others: int) -> bool:
        """Change the open slots. Return whether they have changed. ``of_others``: the least number that is open in another worker."""
        if self.adaptive is None:
            return False
        self.adaptive.decide(now, in_use)
        before = self.open
        self.open = self.adaptive.open = min(self.adaptive.open, of_others + self.adaptive.step)
        self.publish()
        return before != self.open

    @property
    def reserved(self) -> int:
        """The slots of a server that are not open."""
        return self.limit - self.open

    def publish(self) -> None:
        """Show the open slots."""
        self._cells[0] = self.open

    def retire(self) -> None:
        """Show no number any more: the class or its slots are not configured."""
        for cells in (self._cells, *self._ratios.values()):
            cells[0] = 0.0


class ModelSlots:
    """The reserved slots of the servers of one model in one worker. ``number``: that of the worker; ``workers``: how many there are."""

    def __init__(self, number: int, workers: int, servers: Sequence[Server], classes: Mapping[str, ClassSlots]) -> None:
        self.classes = classes
        self._number = number
        self._workers = workers
        self._servers = tuple(servers)

    def apply(self) -> None:
        """Reserve the slots of each server. If their limits differ, the least counts."""
        least = min((int(server.limit) for server in self._servers), default=1)
        for each in self.classes.values():
            each.follow(least)
        for number, server in enumerate(self._servers, self._number):
            limit = int(server.limit)
            is_open = [max(limit - each.reserved, 1) for each in self.classes.values()]
            server.reserve(tuple(limit - worker_share(slots, number, self._workers) for slots in is_open))
            # The queued requests of a worker may be of the last class, so no worker has a part of the reserved slots.
            index = number - self._number
            server.guarantee([worker_share(min(is_open), worker + index, self._workers) for worker in range(self._workers)])

    def in_use(self, tier: int) -> float:
        """Return the part of the open slots that later classes use, on the server where it is largest."""
        return max((server.in_flight_above(tier) / server.open_to(tier) for server in self._servers), default=0.0)


class ReservedSlots:
    """The reserved slots of all servers of a worker."""

    def __init__(self, metrics: SlotMetrics) -> None:
        self._metrics = metrics
        self._models: dict[str, ModelSlots] = {}
        self._number = 0
        self._workers = 1
        self._decide_at = 0.0

    def apply_snapshot(self, snapshot: Snapshot, servers: Mapping[str, Server], number: int) -> None:
        """Reserve the slots of a snapshot, before the pools of its servers are created. Measured numbers stay."""
        before, self._models = self._models, {}
        for slots in before.values():
            for each in slots.classes.values():
                each.retire()
        self._number, self._workers = number, snapshot.workers
        reserving = [each for each in snapshot.classes if each.reserved_slots]
        for model in snapshot.bases:
            of_model = [servers[spec.name] for spec in model.servers]
            if model.max_inflight is None or not reserving:
                for server in of_model:
                    server.reserve(())
                continue
            known = before[model.id].classes if model.id in before else {}
            classes = {each.name: self._class_slots(model, model.max_inflight, each, known.get(each.name)) for each in reserving}
            self._models[model.id] = slots = ModelSlots(number, snapshot.workers, of_model, classes)
            slots.apply()

    def _class_slots(self, model: Model, limit: int, reserving: QueueClass, before: ClassSlots | None) -> ClassSlots:
        labels, slo, worker = (model.id, reserving.name), reserving.slo.with_defaults(model.slo), str(self._number)
        followed = [name for name in OBJECTIVES if reserving.reserved_slots == AUTO and getattr(slo, name) is not None]
        ratios = {name: self._metrics.cells("objective_ratio", *labels, name, worker) for name in followed}
        made = ClassSlots(limit, reserving, slo, self._metrics.cells("open_slots", *labels, worker), ratios)
        if made.adaptive is not None and before is not None and before.adaptive is not None and before.configured == limit:
            made.adaptive, made.open, made.streams, made.limit = before.adaptive, before.open, before.streams, before.limit
        made.publish()
        return made

    def apply(self) -> None:
        """Reserve the slots again: the limits of servers have changed."""
        for slots in self._models.values():
            slots.apply()

    def measured(
        self, model: str, of_class: str, gauge: AbstractContextManager[None], received_at: float, progress: Callable[[], Progress]
    ) -> AbstractContextManager[None]:
        """Return the context of a stream that is measured if its class has adaptive slots. It holds the gauge."""
        slots = self._models[model].classes.get(of_class) if model in self._models else None
        return gauge if slots is None or slots.adaptive is None else slots.measured(gauge, received_at, progress)

    def tick(self, now: float) -> None:
        """Measure the streams, and once a second decide how many slots are open."""
        decides = now >= self._decide_at
        if decides:
            self._decide_at = now + _INTERVAL
        for model, slots in self._models.items():
            for tier, (name, each) in enumerate(slots.classes.items()):
                for stream in each.streams:
                    each.measure(stream, now)
                if decides and each.decide(now, slots.in_use(tier), self._of_others(model, name)):
                    slots.apply()

    def _of_others(self, model: str, name: str) -> int:
        """Return the least number of slots that are open in another worker."""
        others = (number for number in range(self._workers) if number != self._number)
        cells = (each for number in others for each in self._metrics.peer_cells("open_slots", model, name, str(number)))
        return min((int(each[0]) for each in cells if each is not None and each[0]), default=2**31)
