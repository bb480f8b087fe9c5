"""Queue requests for a model until one of its servers is up, or until a server has capacity. One bounded queue per model.

A queue is open while control expects the model to come up at a known time, and while servers that are up are at capacity. The rules: the
fair queue picks the next request and resumes it as soon as capacity frees up, inside that same call, so no later request takes the
capacity. The ``with`` block that acquired a queue slot releases it, so a disconnect releases it immediately. A request that was dispatched
is charged an estimate of its service until ``finish``, which each of them reaches. Control is notified when requests start or stop waiting
for a model that is not up. A client that was sent away with a Retry-After is expected back; until then its model counts as requested.
Requests with a deadline are admitted by ``deadlines``, and are refused when it has passed. While the model is loading, it has no effect.

With a deficit, and a policy that knows the servers' caches, the next request is the one with the most cached tokens on the server that has
become free, among those that the fair queue may serve. This changes the order within a class only, and never leaves a slot empty. A request
is deferred for at most ``DEFERRAL`` of the time that it may wait.

With several workers, each orders its own queue, and charges flows for what the others have served. The counters of the key of the next
request are read before it is dispatched, those of the others at a tick. The remaining error is a constant: for two keys at most one request
for each slot, because requests are charged by estimates while they run; for two teams also the service of their other keys since the last
tick.

If the next request has to wait, and its class preempts, another one is stopped for it (``preemption``).

Times are in seconds of the monotonic clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import monotonic
from typing import NamedTuple, Protocol

from gateway.admission.bookings import RETURN_GRACE, Booking
from gateway.admission.deadlines import DeadlinePlan
from gateway.admission.fair_queue import FairQueue, Flow, Share
from gateway.admission.preemption import RunningRequest, RunningRequests, preempted_for, preemptible
from gateway.admission.reserved_slots import ReservedSlots
from gateway.admission.shared_bookings import SharedBookings
from gateway.admission.shares import QueueShares, RequestFlows
from gateway.admission.weighted_tokens import NO_TOKENS, KeyUse, ServiceWeights, TokenCells, Tokens, UsualUse
from gateway.api.errors import Refusal, draining, duration, none_healthy
from gateway.api.usage import Usage
from gateway.snapshot.snapshot import Key, Model, Queue, Slo
from gateway.telemetry.shared_counters import SharedCells
from upstream.balancing.cost_model import Prompt
from upstream.balancing.policies.least_busy import LeastBusy
from upstream.balancing.pool import Pool
from upstream.http.deadlines import Deadlines
from upstream.http.inline_task import Signal

ReportDemand = Callable[[str, float | None], None]
"""Reports to control the time since which a model is requested; None if it is no longer requested."""
CallSoon = Callable[[Callable[[], None]], None]
"""Calls a function once the requests that are running now have come to a wait."""

DEFERRAL = 0.25
"""The part of ``queue.wait``, or of the time until its deadline, for which a request may be deferred."""
NO_QUEUE = Queue(size=0, wait=0.0)
_IN_FLIGHT = "queue_service_in_flight"
_FLOW_METRICS = ("queue_waiting_requests", "queue_requests_total", "queue_wait_seconds_total", "queue_service_total", _IN_FLIGHT)
_BOOKINGS = "queue_bookings"
_TOKENS = "tokens_total"
_TOKEN_TYPES = ("prompt", "completion", "cached")
_FORGET_EVERY = 10.0  # seconds
_READ_AT_ONCE = 200  # keys whose counters are read in one tick
_FIND_AT_ONCE = 2000  # keys in other workers of which a tick checks whether they are served
_READ_TO_DISPATCH = 2  # keys whose counters are read at most before a request is dispatched


def _call_soon(function: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(function)


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request, as far as a queue knows it. ``fingerprint`` returns a number that only a retry of the same request has, too.

    ``since``: when it began to wait. ``size``: bytes of its body. ``most``: tokens that its output may have. ``user``: its end user.
    ``lowered_to``: the class that its client wants, which counts if it is after that of the key. ``arrived``: the start of the time to its
    first token, for which ``ttft`` is the client's own objective. ``returns``: whether its client will retry after a refusal.
    ``prompt``: the blocks of its prompt, if the policy of its servers requires them. ``preempted_at``: when it was last preempted.
    """

    key: Key
    since: float
    size: int = 0
    most: float = math.inf
    user: str | None = None
    lowered_to: str | None = None
    arrived: float = 0.0
    ttft: float | None = None
    returns: bool = True
    prompt: Prompt | None = None
    preempted_at: float | None = None
    fingerprint: Callable[[], int] = lambda: 0


class QueueMetrics(Protocol):
    """The metrics that queues write, and the counters of tokens that they read."""

    @property
    def has_peers(self) -> bool:
        """Whether there are other workers."""

    def cells(self, family: str, /, *labels: str) -> SharedCells:
        """Return the cells of a series, created on first use."""

    def peer_cells(self, family: str, /, *labels: str) -> Sequence[SharedCells | None]:
        """Return the cells of a series in each other worker; None if it does not exist there."""

    def peer_series(self, family: str, label: str, /) -> Sequence[tuple[tuple[str, ...], SharedCells]]:
        """Return the other labels and the cells of the series of a family with this first label, in all other workers."""


class ModelQueues:
    """The queues of a worker."""

    def __init__(self, deadlines: Deadlines, metrics: QueueMetrics, report: ReportDemand, call_soon: CallSoon = _call_soon) -> None:
        self._deadlines = deadlines
        self._call_soon = call_soon
        self._metrics = metrics
        self._report = report
        self._queues: dict[str, ModelQueue] = {}
        self._shares = QueueShares()
        self.reserved = ReservedSlots(metrics)
        self.preempts = False
        """Whether requests of a class may preempt others."""

    def set_models(self, models: Sequence[tuple[Model, Pool]], shares: QueueShares) -> None:
        """Create the queues for the models of a new snapshot. Waiting requests stay. ``models``: those with servers, and adapters."""
        before, self._queues, self._shares, self.preempts = self._queues, {}, shares, bool(shares.preempting)
        names: dict[str, list[str]] = {}
        for model, _ in models:
            names.setdefault(model.base, []).append(model.id)
        for model, pool in models:
            if model.parent is not None:
                continue
            queue = before.pop(model.id, None) or ModelQueue(model.id, self._deadlines, self._metrics, self._report, self._call_soon)
            self._queues[model.id] = queue
            queue.names = tuple(names[model.id])
            queue.set_shares(shares)
            queue.set_pool(pool, model.queue or NO_QUEUE, model.slo)
        for queue in before.values():
            queue.refuse_all(none_healthy)

    def set_expected(self, expected: Mapping[str, float]) -> None:
        """Store the time at which each model that is not up is expected, and resume requests that need not wait any longer."""
        for model, queue in self._queues.items():
            queue.eta = expected.get(model)
            queue.update()

    def class_of(self, key: Key, lowered_to: str | None) -> tuple[str, int]:
        """Return the class of a request, and its tier: how many reservations of slots it must leave free."""
        name = self._shares.class_of(key, lowered_to)
        return name, self._shares.tiers[name]

    def preemptible(
        self, model: str, key: Key, lowered_to: str | None, attempt: RunningRequest, gauge: AbstractContextManager[None]
    ) -> AbstractContextManager[None]:
        """Return the context of a request that may be preempted. It holds the gauge of its model's requests."""
        queue = self._queues.get(model)
        return gauge if queue is None else preemptible(queue.running, attempt, self._shares.class_of(key, lowered_to), gauge)

    def slot(self, model: str, request: QueuedRequest) -> QueueSlot:
        """Return a slot in a model's queue.

        Raises Refusal no_healthy_server for a removed model.
        """
        queue = self._queues.get(model)
        if queue is None:
            raise none_healthy()
        return QueueSlot(queue, request)

    def is_expected(self, model: str) -> bool:
        """Check whether control expects a model to come up."""
        queue = self._queues.get(model)
        return queue is not None and queue.eta is not None

    def tick(self) -> None:
        """Run the periodic work of all queues and of the reserved slots."""
        now = monotonic()
        for queue in self._queues.values():
            queue.tick(now)
        self.reserved.tick(now)

    def close(self) -> None:
        """Refuse all current and later requests for models that are not up: the gateway is stopping.

        The other requests may still get a server.
        """
        for queue in self._queues.values():
            queue.close()


class FlowMetrics(NamedTuple):
    """The cells of a flow: requests that wait, that were dispatched, and their seconds of waiting; their service, ended and in flight."""

    waiting: SharedCells
    requests: SharedCells
    seconds: SharedCells
    service: SharedCells
    in_flight: SharedCells


@dataclass(slots=True, eq=False)
class KeyFlow:
    """A key in a class of a model's queue: its flow, its ID, what it uses in all classes, the labels and the cells of its metrics.

    ``in_flight``: the service of its requests in flight in other workers, as it was read last.
    """

    flow: Flow[QueueSlot]
    owner: str
    use: KeyUse
    labels: tuple[str, ...]
    metrics: FlowMetrics
    in_flight: float = 0.0


class ModelQueue:
    """The requests that wait for one model. ``eta``: when it should be up, or None if it is not expected.

    ``names``: the model and its adapters.
    """

    def __init__(self, model: str, deadlines: Deadlines, metrics: QueueMetrics, report: ReportDemand, call_soon: CallSoon) -> None:
        self.deadlines = deadlines
        self.call_soon = call_soon
        self.bounds = NO_QUEUE
        self.eta: float | None = None
        self.names: tuple[str, ...] = (model,)
        self.shares = QueueShares()
        self.running: RunningRequests = {}
        self._slo = Slo()
        self._plan: DeadlinePlan | None = None
        """None until the first request with a deadline."""
        self._weights = ServiceWeights()
        self._pool = Pool((), LeastBusy(()))
        self._deficit = 0.0
        self._closing = False
        self._model = model
        self._metrics = metrics
        self._gauge = metrics.cells("queued_requests", model)
        self._report = report
        self._waiting = FairQueue[QueueSlot]()
        self._dispatched: dict[QueueSlot, None] = {}
        self._keys: dict[Flow[QueueSlot], KeyFlow] = {}
        self._uses: dict[str, KeyUse] = {}
        self._usual = UsualUse()
        self._aged: frozenset[str] = frozenset()
        self._read_next = self._find_next = 0
        self._forget_at = 0.0
        self._rate = DispatchRate()
        self._dispatching = False
        self._reported: float | None = None
        self._returning: tuple[float, float] | None = None
        """The first time at which a client was asked to retry later, and the time until which retries are expected."""

    def set_shares(self, shares: QueueShares) -> None:
        """Replace the shares. Waiting requests stay in their classes, whose order and tiers may have changed."""
        self.shares = shares
        for name in shares.classes if self._waiting else ():
            self._waiting.flow((shares.class_share(name, self._aged),))

    def set_pool(self, pool: Pool, queue: Queue, slo: Slo) -> None:
        """Replace the servers, the bounds and the objectives. Waiting requests stay."""
        self._pool, self.bounds, self._slo = pool, queue, slo
        self._waiting.longest_wait = queue.wait
        self._deficit = queue.deficit if pool.knows_caches else 0.0
        self._weights = ServiceWeights(queue.prompt_weight, queue.completion_weight)
        for key, use in self._uses.items():
            use.own.use(self._token_cells(key))
            use.peers.use(self._peer_cells(key))
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
        now, request = monotonic(), slot.request
        flows = self.shares.flows_of(request.key, request.user, request.lowered_to, self._aged)
        slot.key_flow = self._key_flow(flows)
        self._waiting.forget_some(slot.key_flow.flow)
        leaf = slot.leaf = self._waiting.leaf(flows.path)
        self._charge_unseen(slot.key_flow, now)
        self._check_deadline(slot, flows.class_name, now)
        if request.preempted_at is not None:
            self._charge_prompt(slot, now)
        elif len(self._waiting) >= self.bounds.size:
            self._displace_for(slot)
        if not self._waiting:
            self._rate.start(now)
            if self._plan is not None:
                self._plan.rate.start(now)
        slot.queued_at = now
        self._waiting.put(slot, leaf, request.since, now, slot.deadline)
        if slot.expected:
            self._expect(slot, 1.0, now)
        slot.key_flow.metrics.waiting[0] += 1
        self._publish()

    def _key_flow(self, flows: RequestFlows) -> KeyFlow:
        """Return the key of a request."""
        flow = self._waiting.flow(flows.path[: flows.key_at + 1])
        if (found := self._keys.get(flow)) is not None:
            return found
        labels = (self._model, flows.class_name, flows.team, flows.key)
        metrics = FlowMetrics(*(self._metrics.cells(name, *labels) for name in _FLOW_METRICS))
        # A key may be in two classes. Its requests that did not wait are charged once, in either.
        use = self._uses.get(flows.key)
        if use is None:
            use = self._uses[flows.key] = KeyUse(self._token_cells(flows.key), self._peer_cells(flows.key), self._usual)
        found = self._keys[flow] = KeyFlow(flow, flows.key, use, labels, metrics)
        return found

    def _token_cells(self, key: str) -> list[TokenCells]:
        """Return the counters of a key's tokens in this worker."""
        return [TokenCells(*(self._metrics.cells(_TOKENS, key, name, kind) for kind in _TOKEN_TYPES)) for name in self.names]

    def _peer_cells(self, key: str) -> list[TokenCells]:
        """Return those in the other workers."""
        found = (zip(*(self._metrics.peer_cells(_TOKENS, key, name, kind) for kind in _TOKEN_TYPES), strict=True) for name in self.names)
        return [
            TokenCells(prompt, completion, cached)
            for workers in found
            for prompt, completion, cached in workers
            if prompt is not None and completion is not None and cached is not None
        ]

    def _displace_for(self, slot: QueueSlot) -> None:
        latest = self._waiting.displaced_by(slot.leaf)
        if latest is None:
            raise self.refusal(slot, "full")
        self.refuse(latest, self.refusal(latest, "full"))

    def remove(self, slot: QueueSlot) -> None:
        """Remove a slot that was not resumed."""
        now = monotonic()
        self._waiting.remove(slot, slot.leaf, now)
        if slot.expected:
            self._expect(slot, -1.0, now)
        slot.key_flow.metrics.waiting[0] -= 1
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
                if not self._waiting.waits_up_to(tier := self._pool.open_tier()):
                    break
                now = monotonic()
                if self._metrics.has_peers:
                    self._charge_next(now, tier)
                preferred = self._with_most_cached(now, tier) if self._deficit else None
                if self._plan is not None:
                    late = self._waiting.next(tier)[0] if preferred is None else preferred.first
                    if late.latest < now:
                        self.refuse(late, self.refusal(late, "late"))
                        continue
                self._rate.record_dispatch(now)
                self._dispatch_next(now, tier, preferred)
        finally:
            self._dispatching = False
        self._publish()

    def preempt(self) -> None:
        """Stop requests of later classes, as long as the next request is of a class that preempts."""
        while self._waiting and (running := self._preempted_for((slot := self._waiting.next()[0]).class_name)) is not None:
            self._metrics.cells("queue_preemptions_total", self._model, self.running[running])[0] += 1
            running.preempt()
            if slot.waits:
                break  # it does not have the slot yet, so no other request is stopped

    def _preempted_for(self, class_name: str) -> RunningRequest | None:
        return preempted_for(class_name, self.running, self.shares, self._aged)

    def _with_most_cached(self, now: float, tier: float) -> Flow[QueueSlot]:
        """Return the leaf within the deficit whose first request has the most tokens cached where a slot is free."""
        flows = self._waiting.candidates(self._deficit, tier, below_top=self.shares.has_classes)
        least = flows[0]
        if len(flows) == 1 or now > (slot := least.first).deferred_until:
            return least
        of_class = least.top.tier
        cached = [self._pool.cached_tokens(leaf.first.request.prompt, of_class) for leaf in flows]
        best = flows[cached.index(max(cached))]
        if best is not least and slot.deferred_until == math.inf:
            slot.deferred_until = now + DEFERRAL * min(self.bounds.wait, slot.latest - now)
            self._metrics.cells("queue_deferred_total", *slot.key_flow.labels)[0] += 1
        return best

    def _dispatch_next(self, now: float, tier: float, preferred: Flow[QueueSlot] | None) -> None:
        """Resume the next request up to a tier, or that of a preferred leaf, and charge what it will probably use."""
        slot, _ = self._waiting.pop(now, tier, preferred)
        if self._plan is not None:
            self._expect(slot, -1.0, now)
            self._plan.rate.record_dispatch(slot.expected, now)
            slot.dispatched_at = now
        key, request = slot.key_flow, slot.request
        slot.estimate = key.use.usual.estimate(request.size, request.most)
        self._dispatched[slot] = None
        key.metrics.waiting[0] -= 1
        key.metrics.requests[0] += 1
        key.metrics.seconds[0] += now - slot.queued_at
        self._charge(slot, now)
        slot.resume()

    # Service

    def _charge(self, slot: QueueSlot, now: float) -> None:
        """Charge a slot's flows for its estimate, or for the change of it."""
        service = self._weights.service(slot.estimate)
        more, slot.charged = service - slot.charged, service
        slot.key_flow.metrics.in_flight[0] += more
        self._waiting.charge(slot.leaf, more, now)

    def _charge_prompt(self, slot: QueueSlot, now: float) -> None:
        """Charge the flows of a request that was preempted for its prompt, which the server has probably computed."""
        service = self._weights.service(Tokens(slot.key_flow.use.usual.estimate(slot.request.size).prompt))
        slot.key_flow.metrics.service[0] += service
        self._waiting.charge_served(slot.leaf, service, service, now)

    def _charge_unseen(self, key: KeyFlow, now: float) -> None:
        """Charge a key's flows for its requests that have ended without waiting, and for those of other workers."""
        service = self._weights.service(key.use.own.take_unseen())
        key.metrics.service[0] += service
        if self._metrics.has_peers:
            service += self._unseen_of_peers(key)
        self._charge_served(key, service, now)

    def _unseen_of_peers(self, key: KeyFlow) -> float:
        """Return the service that a key got in other workers, or lost there by corrections, since the last call."""
        before, key.in_flight = key.in_flight, 0.0
        for each in self._metrics.peer_cells(_IN_FLIGHT, *key.labels):
            if each is not None:
                key.in_flight += each[0]
        return self._weights.service(key.use.peers.take_unseen()) + key.in_flight - before

    def _charge_served(self, key: KeyFlow, service: float, now: float) -> None:
        if service:
            self._waiting.charge_served(key.flow, service, self._weights.completion * key.use.usual.output, now)

    def _charge_next(self, now: float, tier: float) -> None:
        """Charge the key of the next request for what it has used in other workers by now, until the same request remains the next.

        The tags of the other keys may be too small, but seldom too large, so reading the counters of all keys would change little.
        """
        slot, _ = self._waiting.next(tier)
        for _ in range(_READ_TO_DISPATCH):
            if not (service := self._unseen_of_peers(slot.key_flow)):
                return
            self._charge_served(slot.key_flow, service, now)
            before, (slot, _) = slot, self._waiting.next(tier)
            if slot is before:
                return

    def finish(self, slot: QueueSlot, usage: Usage | None, computed: Tokens, first_token: float | None) -> None:
        """Settle the charge of a request that was dispatched. ``computed``: what the server has computed if there is no ``usage``."""
        if slot not in self._dispatched:
            return
        if self._plan is not None and first_token is not None and slot.dispatched_at:
            self._plan.first_token.learn(first_token - slot.dispatched_at, slot.request.size, first_token)
        del self._dispatched[slot]
        slot.output = None
        use = slot.key_flow.use
        if usage is not None:
            computed = Tokens.of(usage)
            use.own.note(computed)
            use.usual.learn(computed, slot.request.size)
            self._usual.learn(computed, slot.request.size)
        service = self._weights.service(computed)
        slot.key_flow.metrics.service[0] += service
        slot.key_flow.metrics.in_flight[0] -= slot.charged
        self._waiting.settle(slot.leaf, slot.charged, service, monotonic())

    def _correct(self, now: float) -> None:
        """Charge what requests in flight have used beyond their estimates."""
        for slot in self._dispatched:
            if slot.output is not None and (output := slot.output()) > slot.estimate.output:
                slot.estimate = Tokens(slot.estimate.prompt, output)
                self._charge(slot, now)

    def _read_counters(self, now: float) -> None:
        """Charge what keys have used without waiting. Of many keys, some in turn."""
        if not self._keys:
            return
        first = self._read_next if self._read_next < len(self._keys) else 0
        self._read_next = first + _READ_AT_ONCE
        if self._metrics.has_peers:
            self._find_keys(now)
        for key in tuple(islice(self._keys.values(), first, self._read_next)):
            if self._metrics.has_peers:
                key.use.peers.add(self._peer_cells(key.owner))
            self._charge_unseen(key, now)

    def _find_keys(self, now: float) -> None:
        """Add the keys that are served only by other workers, in the teams and classes that are known here: these are charged for them."""
        series = self._metrics.peer_series(_IN_FLIGHT, self._model)
        first = self._find_next if self._find_next < len(series) else 0
        self._find_next = first + _FIND_AT_ONCE
        for (class_name, team, key), cells in islice(series, first, self._find_next):
            above = self.shares.names_above(class_name, team) if cells[0] else ()
            if not above or (path := self._waiting.path_to(above)) is None:
                continue
            if (share := self.shares.key_share(key)).name not in path[-1].children:
                shares = (*(Share(each.name, each.weight, each.rank, each.tier) for each in path), share)
                found = self._key_flow(RequestFlows(class_name, team, key, shares, len(above)))
                found.flow.active_at = now
                self._charge_unseen(found, now)

    def _age(self, now: float) -> None:
        """Let classes whose requests have waited too long compete with the strict ones."""
        aged = set()
        for name, each in self.shares.classes.items():
            if each.aging is not None and (oldest := self._waiting.oldest_below(f"class {name}")) is not None and now - oldest > each.aging:
                aged.add(name)
        if aged != self._aged:
            changed, self._aged = aged ^ self._aged, frozenset(aged)
            for name in changed & self.shares.classes.keys():
                self._waiting.flow((self.shares.class_share(name, aged),))

    # Deadlines

    def _check_deadline(self, slot: QueueSlot, class_name: str, now: float) -> None:
        """Refuse a request that would probably miss its deadline. Raises Refusal."""
        request, plan = slot.request, self._plan
        ttft = self.shares.classes[class_name].slo.with_defaults(self._slo).ttft if request.ttft is None else request.ttft
        if ttft is not None and self._pool.is_up and request.preempted_at is None:
            plan = self._plan = plan or self._new_plan(now)
            slot.deadline = request.arrived + ttft
            slot.latest = slot.deadline - plan.first_token.usual(request.size, now)
            slot.slack = max(slot.latest - request.arrived, ttft / 4)
        if plan is not None:
            slot.expected = self._expected(slot)
        if plan is None or slot.deadline == math.inf:
            return
        if plan.bookings.exist and (booking := plan.bookings.take(slot.leaf, request.fingerprint(), now)) is not None:
            slot.has_booking, slot.deadline = True, booking.deadline  # of its first attempt: it comes before later requests of its flow
            return
        if self._pool.has_capacity() or self._preempted_for(class_name) is not None:
            return
        own = sum(each.expected for each in slot.leaf.requests if each.deadline <= slot.deadline)
        if (wait := plan.too_long_wait(slot.leaf, own, slot.latest, now)) is not None:
            refusal = self.refusal(slot, "predicted")
            refusal.detail = f"a wait of {wait:.1f} s was predicted, and the deadline allows {max(slot.latest - now, 0.0):.1f} s"
            raise refusal

    def _new_plan(self, now: float) -> DeadlinePlan:
        """Start to predict waits: with the service of the requests that wait already."""
        for slot in self._waiting:
            slot.expected = self._expected(slot)
            slot.leaf.expect(slot.expected)
        shared = SharedBookings(self._metrics.cells(_BOOKINGS, self._model), partial(self._metrics.peer_cells, _BOOKINGS, self._model))
        return DeadlinePlan(self._waiting, now, shared)

    def _expect(self, slot: QueueSlot, sign: float, now: float) -> None:
        """Count the probable service of a request while it waits. With a booking, it is before the requests of others."""
        slot.leaf.expect(sign * slot.expected)
        if slot.has_booking:
            if sign > 0.0:
                slot.credit = slot.expected + self._waiting.lag(slot.leaf)
            self._waiting.charge(slot.leaf, -sign * slot.credit, now)

    def _expected(self, slot: QueueSlot) -> float:
        """Return the service that a request will probably get."""
        return self._weights.service(slot.key_flow.use.usual.estimate(slot.request.size, slot.request.most))

    def refusal(self, slot: QueueSlot, reason: str) -> Refusal:
        """Return the refusal of a request with a time to return, and count it. A request with a deadline gets a booking of its flow."""
        plan, now = self._plan, monotonic()
        self._metrics.cells("queue_refused_total", *slot.key_flow.labels, reason)[0] += 1
        booked = None
        if plan is not None and slot.deadline < math.inf and slot.request.returns and self._pool.is_up:
            booked = plan.add_booking(
                Booking(now, slot.expected, slot.leaf, slot.request.fingerprint(), slot.deadline), slot.slack, self.bounds.size, now
            )
        if booked is None:
            refusal = self.retry_later(slot.request.since)
        else:
            message = f"The request cannot be served within its deadline. Try again in {duration(booked[0])}."
            refusal = Refusal("overloaded", message, headers={"retry-after": str(booked[0])})
        refusal.limit = f"queue_{reason}"
        return refusal

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

    @property
    def reason(self) -> str:
        """Why a request waits now."""
        return "full" if self._pool.is_up else "loading"

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
        """Correct charges, let classes age, and forget flows without requests and clients that have not returned in time."""
        if self._plan is not None:
            self._plan.bookings.remove_honored()
            self._plan.bookings.expire(now)
        self._correct(now)
        self._read_counters(now)
        if self.shares.preempting:
            self.preempt()
        if self._waiting or self._aged:
            self._age(now)
        if now > self._forget_at:
            self._forget_at = now + _FORGET_EVERY
            for flow in self._waiting.forget(now):
                self._keys.pop(flow, None)
            known = {key.owner for key in self._keys.values()}
            self._uses = {key: use for key, use in self._uses.items() if key in known}
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
    """One request's slot in a queue, watched by the worker's deadline clock. After its dispatch it is charged until ``finish``.

    ``reason``: why it waits. ``output``: returns the tokens of its output so far. ``deadline``: the time by which its first token is due.
    ``latest``: the time by which it must be dispatched for that. ``slack``: the wait that this allows. ``expected``: its probable service.
    ``deferred_until``: the time until which requests of other flows may precede it for their cached tokens, since it first happened.
    """

    __slots__ = (
        "_queue", "_refusal", "_signal", "charged", "credit", "deadline", "deferred_until", "dispatched_at", "estimate", "expected",
        "has_booking", "key_flow", "latest", "leaf", "output", "queued_at", "reason", "request", "slack", "waits",
    )  # fmt: skip

    leaf: Flow[QueueSlot]
    key_flow: KeyFlow

    def __init__(self, queue: ModelQueue, request: QueuedRequest) -> None:
        self.request = request
        self.waits = self.has_booking = False
        self.credit = 0.0
        self.reason = queue.reason
        self.charged = 0.0
        self.estimate = NO_TOKENS
        self.queued_at = self.dispatched_at = 0.0
        self.deadline = self.latest = self.deferred_until = math.inf
        self.slack = self.expected = 0.0
        self.output: Callable[[], int] | None = None
        self._queue = queue
        self._signal = Signal()
        self._refusal: Refusal | None = None

    def __enter__(self) -> QueueSlot:
        self._queue.enter(self)
        self.waits = True
        self._queue.deadlines.watch(self)
        self._queue.dispatch()  # its servers may be of an older snapshot, and full while the current ones are not
        if self.waits and self._queue.shares.preempting:
            self._queue.call_soon(self._queue.preempt)  # it must await the slot by then, to take it before others can
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._queue.deadlines.forget(self)
        if self.waits:
            self.waits = False
            self._queue.remove(self)
        elif kind is not None:
            self.finish()  # it was dispatched while its client disconnected

    @property
    def class_name(self) -> str:
        """The class of the request."""
        return self.key_flow.labels[1]

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

    def finish(self, usage: Usage | None = None, computed: Tokens = NO_TOKENS, first_token: float | None = None) -> None:
        """Settle the charge of the request, once: by its usage, or by what the server has computed of it. It has ended.

        ``first_token``: when the first token of its stream came.
        """
        self._queue.finish(self, usage, computed, first_token)

    def check(self, now: float) -> None:
        """End the wait if it has taken too long."""
        if not self.waits:
            return
        if now > self.latest:
            self._queue.refuse(self, self._queue.refusal(self, "late"))
        elif now - (self.request.preempted_at or self.request.since) > self._queue.bounds.wait:
            self._queue.refuse(self, self._queue.refusal(self, "timeout"))


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
