"""Requests that are deferred for others whose prompts are cached on the free server: for whom, how far, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from gateway.admission import queue as queue_module
from gateway.admission.queue import DEFERRAL, ModelQueues, QueuedRequest
from gateway.admission.shares import QueueShares
from gateway.api.errors import Refusal
from gateway.snapshot.snapshot import Key, Model, Queue, QueueClass
from tests.gateway.admission.test_queue_state_machine import Metrics
from upstream.balancing.cost_model import BLOCK_BYTES, CostModel, Prompt
from upstream.balancing.policies import POLICIES
from upstream.balancing.policies.cost import Cost
from upstream.balancing.policies.policy import RequestFacts
from upstream.balancing.pool import Pool
from upstream.balancing.server import Condition, Server, ServerSpec
from upstream.http.address import Address
from upstream.http.deadlines import Deadlines
from upstream.http.inline_task import InlineTask

WAIT = 60.0
CACHED, OTHER = range(1000, 1040), range(2000, 2040)
"""The blocks of a prompt that server ``s1`` has cached, and of a prompt that no server has."""


@dataclass
class Full:
    """Two servers with one slot each, both in use, and the names of the requests that were dispatched."""

    servers: Sequence[Server]
    queues: ModelQueues
    pool: Pool
    metrics: Metrics
    served: list[str]
    now: float = 1000.0

    def wait(self, name: str, blocks: Sequence[int], *, of_class: str | None = None, ttft: float | None = None, most: int = 10) -> None:
        """Queue a request of the key with its name."""
        prompt = Prompt(blocks, len(blocks) * BLOCK_BYTES)
        key = Key(name[0], queue_class=of_class)
        InlineTask(self._wait(name, QueuedRequest(key, self.now, 0, most, arrived=self.now, ttft=ttft, prompt=prompt))).step()

    async def _wait(self, name: str, request: QueuedRequest) -> None:
        try:
            with self.queues.slot("m", request) as slot:
                await slot.wait()
        except Refusal as refusal:
            self.served.append(f"{name}: {refusal.limit}")
            return
        self.pool.choose((), RequestFacts(prompt=request.prompt)).start_exchange()
        self.served.append(name)

    def free(self, number: int = 1) -> None:
        """End the request on a server."""
        self.servers[number].finish_exchange()

    def deferred(self, key: str) -> float:
        return self.metrics.cells("queue_deferred_total", "m", "default", "", key)[0]


MakeFull = Callable[..., Full]


@pytest.fixture(name="full")
def _full(monkeypatch: pytest.MonkeyPatch) -> MakeFull:
    def make(deficit: float = 100.0, *, classes: Sequence[QueueClass] = ()) -> Full:
        servers = [Server(ServerSpec(f"s{number}", Address(port=1), "m"), Condition.UP) for number in range(2)]
        model = CostModel()
        model.set_servers(("s0", "s1"))
        model.index.insert("s1", CACHED)
        for server in servers:
            server.limit = 1
        pool = Pool(servers, Cost(servers, model=model))
        metrics = Metrics()
        world = Full(servers, ModelQueues(Deadlines(), metrics, lambda *_: None), pool, metrics, [])
        monkeypatch.setattr(queue_module, "monotonic", lambda: world.now)
        for server in servers:
            server.start_exchange()
        world.queues.set_models([(Model("m", (), queue=Queue(9, WAIT, deficit=deficit)), pool)], QueueShares(classes))
        return world

    return make


@pytest.mark.parametrize(("deficit", "first"), [(100.0, "b"), (0.0, "a")])
def test_a_cached_prompt_of_another_key_is_first(full: MakeFull, deficit: float, first: str) -> None:
    world = full(deficit)
    world.wait("a", OTHER)
    world.wait("b", CACHED)
    world.free()
    assert world.served == [first] and world.deferred("a") == (first == "b")
    world.free()
    assert sorted(world.served) == ["a", "b"], "a slot is used whatever is cached"


def test_it_is_not_first_on_a_server_that_has_not_cached_it(full: MakeFull) -> None:
    world = full()
    world.wait("a", OTHER)
    world.wait("b", CACHED)
    world.free(0)
    assert world.served == ["a"] and not world.deferred("a")


def test_a_key_is_deferred_within_the_deficit_only(full: MakeFull) -> None:
    """Each request of ``b`` is charged 40, and the deficit is 100: it may have 120 more than ``a``."""
    world = full()
    world.wait("a", OTHER)
    for number in range(8):
        world.wait(f"b{number}", CACHED)
    for _ in range(4):
        world.free()
    assert world.served == ["b0", "b1", "b2", "a"] and world.deferred("a") == 1


def test_only_the_first_request_of_a_key_counts(full: MakeFull) -> None:
    world = full()
    for name, blocks in (("a", OTHER), ("b1", OTHER), ("b2", CACHED)):
        world.wait(name, blocks)
    world.free()
    assert world.served == ["a"]


@pytest.mark.parametrize("strict", [True, False])
def test_another_class_is_not_preferred(full: MakeFull, strict: bool) -> None:
    world = full(classes=[QueueClass("chat", strict=strict), QueueClass("batch")])
    world.wait("a", OTHER, of_class="chat")
    world.wait("b", CACHED, of_class="batch")
    world.wait("c", CACHED, of_class="chat")
    world.free()
    world.free()
    assert world.served == ["c", "b"] if not strict else ["c", "a"]


@pytest.mark.parametrize(("ttft", "allowed"), [(None, WAIT), (20.0, 20.0)])
def test_a_request_is_deferred_for_a_part_of_its_wait(full: MakeFull, ttft: float | None, allowed: float) -> None:
    world = full(1e6)
    world.wait("a", OTHER, ttft=ttft)
    for number in range(5):
        world.wait(f"b{number}", CACHED)
    world.free()
    world.now += DEFERRAL * allowed
    world.free()
    world.now += 0.1
    world.free()
    assert world.served == ["b0", "b1", "a"]


def test_a_preferred_request_that_is_late_gets_no_slot(full: MakeFull) -> None:
    world = full()
    world.wait("a", OTHER)
    world.wait("b", CACHED, ttft=5.0)
    world.now += 6.0
    world.free()
    assert world.served == ["b: queue_late", "a"]


@pytest.mark.parametrize("balance", POLICIES)
def test_only_a_policy_that_knows_caches_defers(balance: str) -> None:
    servers = [Server(ServerSpec(f"s{number}", Address(port=1), "m"), Condition.UP) for number in range(2)]
    assert Pool(servers, POLICIES[balance](servers)).knows_caches == (balance == "cost")
    assert not Pool(servers[:1], POLICIES[balance](servers[:1])).knows_caches
    assert Pool(servers, POLICIES[balance](servers)).cached_tokens(Prompt(CACHED, 1), 0) == 0.0
