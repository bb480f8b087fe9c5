"""Workers share their placements: each one's cost model equals that of a single worker with all requests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.worker.peer_placements import PeerPlacements
from tests.support.examples import examples
from upstream.balancing.cost_model import CostModel, Prompt
from upstream.balancing.placement_log import Kind, PlacementLog, server_key

NAMES = ("a", "b")
Step = tuple[int, str, int, bool]
STEPS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(NAMES), st.integers(1, 30), st.booleans()), max_size=20)


def cost_model(peers: PeerPlacements | None = None) -> CostModel:
    model = CostModel(clock=lambda: 50.0, peers=peers)
    model.set_servers(NAMES)
    return model


@contextmanager
def workers(count: int) -> Iterator[list[CostModel]]:
    """The cost models of this many workers, which share a log. The last section is control's."""
    with ExitStack() as stack:
        log = stack.enter_context(closing(PlacementLog.create(count + 1, count)))
        models = []
        for section in range(count):
            peers = PeerPlacements(stack.enter_context(closing(PlacementLog(os.dup(log.fd), section))))
            models.append(cost_model(peers))
            peers.set_models({"m": models[-1]})
        yield models


@settings(max_examples=examples(30), deadline=None)
@given(STEPS)
def test_two_workers_know_what_one_would(steps: list[Step]) -> None:
    with workers(2) as models:
        single = cost_model()
        for worker, name, blocks, complete in steps:
            for model in (models[worker], single):
                placement = model.start(name, Prompt(range(100 * blocks, 101 * blocks), 512 * blocks), 0)
                if complete:
                    placement.finished()
            for model in models:
                assert model.peers is not None
                model.peers.catch_up()
        for model in models:
            for name in NAMES:
                assert set(model.index.blocks(name)) == set(single.index.blocks(name))
                assert model.servers[name].in_flight == single.servers[name].in_flight
                assert abs(model.servers[name].ready_at - single.servers[name].ready_at) < 0.01


def test_requests_of_a_dead_worker_stop_counting() -> None:
    with ExitStack() as stack:
        log = stack.enter_context(closing(PlacementLog.create(3, 2)))
        models = []
        for section in (0, 1):
            peers = PeerPlacements(PlacementLog(os.dup(log.fd), section))
            models.append(cost_model(peers))
            peers.set_models({"m": models[-1]})
        first, second = models
        first.start("a", Prompt([1, 2], 1024), 0)
        assert second.peers is not None
        second.peers.catch_up()
        assert second.servers["a"].in_flight == 1
        successor = cost_model(peers := PeerPlacements(PlacementLog(os.dup(log.fd), 0)))
        peers.set_models({"m": successor})
        second.peers.catch_up()
        assert second.servers["a"].in_flight == successor.servers["a"].in_flight == 0
        assert successor.index.matched([1, 2]) == second.index.matched([1, 2]) == {"a": 2}


def test_a_worker_that_died_after_its_server_was_removed_changes_nothing() -> None:
    with ExitStack() as stack:
        log = stack.enter_context(closing(PlacementLog.create(3, 2)))
        first, peers = (PeerPlacements(PlacementLog(os.dup(log.fd), section)) for section in (0, 1))
        models = cost_model(first), cost_model(peers)
        for each, model in zip((first, peers), models, strict=True):
            each.set_models({"m": model})
        models[0].start("a", Prompt([1], 512), 0)
        models[0].start("b", Prompt([2], 512), 0)
        peers.catch_up()
        models[1].set_servers(["b"])
        peers.set_models({"m": models[1]})
        assert models[1].servers["b"].in_flight == models[1].in_flight == 1
        successor = cost_model()
        PeerPlacements(PlacementLog(os.dup(log.fd), 0)).set_models({"m": successor})
        peers.catch_up()
        assert models[1].servers["b"].in_flight == models[1].in_flight == 0


def test_the_engines_load_and_cache_size_come_from_control() -> None:
    with ExitStack() as stack:
        control = stack.enter_context(closing(PlacementLog.create(2, 1)))
        peers = PeerPlacements(stack.enter_context(closing(PlacementLog(os.dup(control.fd), 0))))
        model = cost_model(peers)
        peers.set_models({"m": model})
        control.write(Kind.LOAD, server_key("b"), 49_000_000_000, (7, 3, 950))
        control.write(Kind.CAPACITY, server_key("b"), 12_800)
        control.write(Kind.LOAD, server_key("unknown"), 49_000_000_000, (7, 3, 950))
        peers.catch_up()
        assert model.servers["b"].kv_usage == 0.95
        assert model.servers["b"].foreign == (10.0, 3.0) and model.servers["b"].load_at == 49.0
        assert model.servers["b"].capacity == 100 and model.servers["a"].load_at == 0.0
