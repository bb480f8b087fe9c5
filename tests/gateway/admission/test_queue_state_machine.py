"""Servers with limits and requests queued for them: whatever the order of events, no request is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from time import monotonic

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.admission.queue import ModelQueues, QueuedRequest
from gateway.admission.shares import QueueShares
from gateway.admission.weighted_tokens import Tokens
from gateway.api.errors import Refusal
from gateway.snapshot.snapshot import Key, Model, Queue, QueueClass
from gateway.telemetry.metrics import FAMILIES
from gateway.telemetry.shared_counters import SharedCells
from tests.support.examples import examples
from tests.support.pools import pool_of
from upstream.balancing.attempt import MAX_PREEMPTIONS
from upstream.balancing.cost_model import BLOCK_BYTES, Prompt
from upstream.balancing.ejection import LONGEST_PAUSE
from upstream.balancing.policies import POLICIES
from upstream.balancing.policies.policy import RequestFacts
from upstream.balancing.pool import NoServerError
from upstream.balancing.server import Condition, Server, ServerSpec
from upstream.http.address import Address
from upstream.http.deadlines import Deadlines
from upstream.http.errors import ConnectFailed
from upstream.http.inline_task import InlineTask, Signal

KEYS = tuple(
    Key(name, weight=weight, queue_class=name_of_class)
    for name, weight, name_of_class in (("a", 1.0, "chat"), ("b", 1.0, "tools"), ("c", 4.0, "batch"), ("d", 1.0, "batch"))
)
FOR_EVER = 1e9


class Metrics:
    """Cells in the memory of the test."""

    has_peers = False

    def __init__(self) -> None:
        self.cells_by_name: dict[tuple[str, ...], SharedCells] = {}

    def cells(self, *name: str) -> SharedCells:
        return self.cells_by_name.setdefault(name, memoryview(bytearray(8 * FAMILIES[name[0]].cells)).cast("d"))

    def peer_cells(self, *name: str) -> list[SharedCells]:
        return []

    def peer_series(self, *name: str) -> list[tuple[tuple[str, ...], SharedCells]]:
        return []


class Visitor:
    """A request's use of a server: it chooses one, may wait for it, occupies a slot, and releases the slot."""

    def __init__(self, world: World, number: int, key: Key) -> None:
        self.number = number
        self.key = key
        self.preemptions = 0
        self.stopped = False
        self.sent_at = 0.0
        self.prompt = Prompt(range(1000 * (number // 4), 1000 * (number // 4) + 4), 4 * BLOCK_BYTES)
        self.fate = "waits"
        self.finished = Signal()
        self.server: Server | None = None
        self.tier = 0
        self.task = InlineTask(self._visit(world))
        self.task.step()

    def preemptible_for(self, tier: int) -> bool:
        """Every third request has had its first byte."""
        is_silent = self.fate == "served" and self.number % 3 != 0 and self.preemptions < MAX_PREEMPTIONS and not self.stopped
        return is_silent and self.server is not None and self.server.would_serve(tier)

    def preempt(self) -> None:
        self.preemptions += 1
        self.stopped = True
        self.finished.set()

    async def _visit(self, world: World) -> None:
        since, preempted_at = monotonic(), None
        while await self._attempt(world, since, preempted_at):
            self.stopped, self.finished, preempted_at = False, Signal(), monotonic()

    async def _attempt(self, world: World, since: float, preempted_at: float | None) -> bool:
        """Be served once. Return whether the request was preempted."""
        slot = None
        try:
            while True:
                try:
                    if preempted_at is not None and slot is None:
                        raise NoServerError(full=True)
                    facts = RequestFacts(prompt=self.prompt, tier=world.queues.class_of(self.key, None)[1])
                    server = world.pool.choose(request=facts)
                    break
                except NoServerError as error:
                    if not (error.full or world.queues.is_expected("m")):
                        raise
                    if slot is not None:
                        slot.finish()
                    with world.queues.slot("m", QueuedRequest(self.key, since, prompt=self.prompt, preempted_at=preempted_at)) as slot:
                        await slot.wait()
            assert not server.full and server.condition is Condition.UP
            tier = world.queues.class_of(self.key, None)[1]
            assert all(
                world.in_flight_above(server, each) < max(server.limit - slots, 1) for each, slots in enumerate(server.reserved[:tier])
            )
            await self._hold(server, world)
        except (Refusal, NoServerError):
            self.fate = "refused"
        except asyncio.CancelledError:
            self.fate = "gone"
        finally:
            if slot is not None:
                slot.finish(computed=Tokens(output=7.0 * self.number))
        return self.fate == "waits"

    async def _hold(self, server: Server, world: World) -> None:
        self.server, self.tier = server, world.queues.class_of(self.key, None)[1]
        server.start_exchange(self.tier)
        self.fate, self.sent_at = "served", monotonic()
        world.served.append(self)
        queue = world.queues._queues["m"]
        queue.running[self] = world.queues.class_of(self.key, None)[0]
        try:
            await self.finished
            self.fate = "waits" if self.stopped else "done"
        except asyncio.CancelledError:
            self.fate = "gone"  # before the end of its exchange, in which a request that waits may take its slot
            raise
        finally:
            del queue.running[self]
            server.finish_exchange(self.tier)


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0  # seconds, on the clock that ejections use; only the rule `time_passes` advances it
        self.servers = [Server(ServerSpec(f"s{n}", Address(port=1), "m"), Condition.UP, clock=lambda: self.now) for n in range(2)]
        self.deadlines = Deadlines()
        self.demand: float | None = None
        self.soon: list[Callable[[], None]] = []
        self.metrics = Metrics()
        self.gauge = self.metrics.cells("queued_requests", "m")
        self.queues = ModelQueues(self.deadlines, self.metrics, self._report_demand, self.soon.append)
        self.visitors: list[Visitor] = []
        self.served: list[Visitor] = []
        self.expected = False
        self.pool = pool_of((), "least_busy")
        self.reload([1, 1], 4, "cost", [0, 0], [True, False], 1000.0, [True, True])

    def _report_demand(self, _: str, since: float | None) -> None:
        self.demand = since

    def in_flight_above(self, server: Server, tier: int) -> int:
        return sum(one.server is server and one.tier > tier for one in self.those("served"))

    def those(self, fate: str) -> list[Visitor]:
        return [one for one in self.visitors if one.fate == fate]

    # Events

    @rule(key=st.sampled_from(KEYS))
    def one_comes(self, key: Key) -> None:
        self.visitors.append(Visitor(self, len(self.visitors), key))
        while self.soon:
            self.soon.pop(0)()

    @precondition(lambda self: self.those("served"))
    @rule(which=st.integers(0, 99))
    def one_is_done(self, which: int) -> None:
        served = self.those("served")
        served[which % len(served)].finished.set()

    @precondition(lambda self: self.those("served") or self.those("waits"))
    @rule(which=st.integers(0, 99))
    def one_leaves(self, which: int) -> None:
        there = self.those("served") + self.those("waits")
        there[which % len(there)].task.cancel()

    @rule(
        limits=st.lists(st.sampled_from([1, 2, 4]), min_size=2, max_size=2),
        size=st.integers(1, 6),
        balance=st.sampled_from([*sorted(POLICIES), "cost"]),
        reserved=st.lists(st.integers(0, 3), min_size=2, max_size=2),
        strict=st.lists(st.booleans(), min_size=2, max_size=2),
        deficit=st.sampled_from([0.0, 1000.0]),
        preempts=st.lists(st.booleans(), min_size=2, max_size=2),
    )
    def reload(
        self, limits: list[int], size: int, balance: str, reserved: list[int], strict: list[bool], deficit: float, preempts: list[bool]
    ) -> None:
        classes = tuple(
            QueueClass(name, strict=strict[at], reserved_slots=reserved[at], preempts=preempts[at])
            for at, name in enumerate(("chat", "tools"))
        )
        for server, limit in zip(self.servers, limits, strict=True):
            server.limit = limit
            server.reserve(tuple(filter(None, reserved)))
        self.pool.retire()
        self.pool = pool_of(self.servers, balance)
        shares = QueueShares((*classes, QueueClass("batch")))
        self.queues.set_models([(Model("m", (), queue=Queue(size, FOR_EVER, deficit=deficit)), self.pool)], shares)

    @rule(which=st.integers(0, 1), slots=st.integers(0, 3))
    def a_reservation_changes(self, which: int, slots: int) -> None:
        server = self.servers[which]
        server.reserve((slots,) * len(server.reserved))

    @rule(up=st.lists(st.booleans(), min_size=2, max_size=2), expected=st.booleans())
    def control_reports(self, up: list[bool], expected: bool) -> None:
        for server, is_up in zip(self.servers, up, strict=True):
            server.condition = Condition.UP if is_up else Condition.LOADING
        self.expected = expected
        self.queues.set_expected({"m": monotonic() + FOR_EVER} if expected else {})

    @rule(which=st.integers(0, 1))
    def one_refuses(self, which: int) -> None:
        self.servers[which].record_failure(ConnectFailed("x", "refused"))

    @rule()
    def servers_recover(self) -> None:
        for server in self.servers:
            server.record_success()

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, LONGEST_PAUSE]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for server in self.servers:
            server.expire()  # the worker's tick

    @rule()
    def the_worker_ticks(self) -> None:
        """A request that may preempt others does not wait while it can."""
        self.queues.tick()
        queue = self.queues._queues["m"]
        assert not queue._waiting or queue._preempted_for(queue._waiting.next()[0].class_name) is None

    @rule()
    def all_timeouts_expire(self) -> None:
        for watched in tuple(self.deadlines._watched):
            watched.check(monotonic() + 2 * FOR_EVER)

    # Invariants

    @invariant()
    def every_served_request_is_on_a_server(self) -> None:
        assert sum(server.in_flight for server in self.servers) == len(self.those("served"))

    @invariant()
    def no_request_waits_without_reason(self) -> None:
        waiting = len(self.those("waits"))
        assert waiting == self.gauge[0] == len(self.deadlines)
        assert not any(self.pool.has_capacity(self.queues.class_of(one.key, None)[1]) for one in self.those("waits"))
        assert not waiting or self.pool.is_up or self.expected

    @invariant()
    def demand_is_reported_while_a_model_is_not_up(self) -> None:
        assert self.demand is None if self.pool.is_up else (self.demand is not None or not self.those("waits"))

    @invariant()
    def requests_of_a_key_stay_in_order(self) -> None:
        for key in KEYS:
            numbers = [one.number for one in self.served if one.key is key and not one.preemptions]
            assert numbers == sorted(numbers)

    def teardown(self) -> None:
        for _ in range(len(self.visitors) + 1):
            for one in self.those("served"):
                one.finished.set()
        for one in self.those("waits"):
            one.task.cancel()
        assert {one.fate for one in self.visitors} <= {"done", "refused", "gone"}
        queue = self.queues._queues["m"]
        assert not queue._dispatched and not any(key.flow.in_flight for key in queue._keys.values())
        assert all(server.in_flight == 0 for server in self.servers) and not len(self.deadlines) and not self.gauge[0]


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(4))
def test_no_slot_is_idle_while_requests_are_deferred_and_preempted(seed: int) -> None:
    """The same rules in overload, where both happen all the time."""
    draw, world = Random(seed), World()
    world.reload([2, 4], 20, "cost", [seed % 2, 0], [True, False], 1000.0, [True, True])
    for step in range(1000):
        if len(world.those("waits")) < 20 and draw.random() < 0.6:
            world.one_comes(draw.choice(KEYS))
        elif world.those("served"):
            world.one_is_done(draw.randrange(100))
        if step % 50 == 0:
            world.the_worker_ticks()
        world.every_served_request_is_on_a_server()
        world.no_request_waits_without_reason()
        world.requests_of_a_key_stay_in_order()
    assert sum(one.preemptions for one in world.visitors) > 10
    assert sum(cells[0] for name, cells in world.metrics.cells_by_name.items() if name[0] == "queue_deferred_total") > 0
    world.teardown()
