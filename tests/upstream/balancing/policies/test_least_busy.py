"""``balance: least_busy``."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.upstream.balancing.policies.servers import FakeServer, candidates
from upstream.balancing.policies.least_busy import LeastBusy
from upstream.balancing.policies.policy import NO_FACTS

LOADS = st.lists(st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.integers(0, 3)), min_size=1, max_size=6)


@settings(deadline=None)
@given(LOADS, st.integers(0, 1000))
def test_a_server_with_the_smallest_load_is_chosen(loads: list[tuple[float, int]], offset: int) -> None:
    servers = [FakeServer(weight=weight, in_flight=in_flight) for weight, in_flight in loads]
    chosen = LeastBusy(servers).choose(candidates(servers, offset), NO_FACTS)
    assert chosen.load == min(server.load for server in servers)
