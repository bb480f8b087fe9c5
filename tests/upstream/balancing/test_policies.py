"""Which server is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from upstream.balancing.policies import POLICIES, least_busy, round_robin


@dataclass(frozen=True)
class Busy:
    load: float


LOADS = st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=6)


@settings(deadline=None)
@given(LOADS, st.integers(0, 1000))
def test_least_busy_takes_one_of_the_least_busy(loads: list[float], turn: int) -> None:
    servers = [Busy(load) for load in loads]
    assert least_busy(servers, turn).load == min(loads)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(0, 1000))
def test_equally_busy_servers_take_turns(count: int, turn: int) -> None:
    servers = [Busy(0.0) for _ in range(count)]
    for policy in POLICIES.values():
        assert {id(policy(servers, turn + n)) for n in range(count)} == {id(server) for server in servers}


def test_round_robin_ignores_load() -> None:
    servers = [Busy(5.0), Busy(0.0)]
    assert [round_robin(servers, turn).load for turn in range(4)] == [5.0, 0.0, 5.0, 0.0]
