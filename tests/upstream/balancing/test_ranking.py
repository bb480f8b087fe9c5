"""The servers by load, kept up to date."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from upstream.balancing.policies import least_busy
from upstream.balancing.ranking import Ranking

STEPS = st.lists(st.tuples(st.sampled_from(["enter", "leave", "away", "back", "choose"]), st.integers(0, 4)), max_size=60)


class One:
    def __init__(self, weight: float) -> None:
        self.weight, self.in_flight, self.available = weight, 0, True

    @property
    def load(self) -> float:
        return self.in_flight / self.weight


@settings(deadline=None)
@given(weights=st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=5), steps=STEPS)
def test_it_agrees_with_a_look_at_each(weights: list[float], steps: list[tuple[str, int]]) -> None:
    servers = [One(weight) for weight in weights]
    ranking = Ranking(servers)
    for step, number in steps:
        one = servers[number % len(servers)]
        if step in ("enter", "leave"):
            one.in_flight = max(one.in_flight + (1 if step == "enter" else -1), 0)
            ranking.update_load(one)
        elif step in ("away", "back"):
            one.available = step == "back"
            ranking.update_availability(one)
        there = [server for server in servers if server.available]
        assert ranking.members == tuple(there) and set(ranking.available) == set(there)
        first = ranking.least_busy()
        assert first is None if not there else first is not None and first.load == least_busy(there, 0).load


@settings(deadline=None)
@given(count=st.integers(1, 8), rounds=st.integers(1, 3))
def test_an_idle_pool_is_used_evenly(count: int, rounds: int) -> None:
    ranking = Ranking([One(1.0) for _ in range(count)])
    assert set(Counter(ranking.least_busy() for _ in range(count * rounds)).values()) == {rounds}
