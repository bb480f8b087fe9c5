"""The available servers, sorted by load."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upstream.balancing.ranking import CandidateList, Ranking

STEPS = st.lists(st.tuples(st.sampled_from(["start", "finish", "leave", "return", "choose"]), st.integers(0, 4)), max_size=60)


class FakeServer:
    name = "s"

    def __init__(self, weight: float) -> None:
        self.weight, self.in_flight, self.available = weight, 0, True

    @property
    def load(self) -> float:
        return self.in_flight / self.weight


@settings(deadline=None)
@given(weights=st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=5), steps=STEPS)
def test_a_ranking_agrees_with_a_scan_of_all_servers(weights: list[float], steps: list[tuple[str, int]]) -> None:
    servers = [FakeServer(weight) for weight in weights]
    ranking = Ranking(servers)
    for step, number in steps:
        server = servers[number % len(servers)]
        if step in ("start", "finish"):
            server.in_flight = max(server.in_flight + (1 if step == "start" else -1), 0)
            ranking.update_load(server)
        elif step in ("leave", "return"):
            server.available = step == "return"
            ranking.update_availability(server)
        available = [server for server in servers if server.available]
        assert ranking.members == tuple(available)
        assert [server in ranking for server in servers] == [server.available for server in servers]
        if available:
            assert ranking.least_busy().load == CandidateList(available, number).least_busy().load
        else:
            with pytest.raises(ValueError, match="empty"):
                ranking.least_busy()


@settings(deadline=None)
@given(count=st.integers(1, 8), rounds=st.integers(1, 3))
def test_an_idle_pool_is_used_evenly(count: int, rounds: int) -> None:
    ranking = Ranking([FakeServer(1.0) for _ in range(count)])
    assert set(Counter(ranking.least_busy() for _ in range(count * rounds)).values()) == {rounds}
