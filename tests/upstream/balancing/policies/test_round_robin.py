"""``balance: round_robin``."""

from __future__ import annotations

from tests.upstream.balancing.policies.servers import FakeServer, candidates
from upstream.balancing.policies.policy import NO_FACTS
from upstream.balancing.policies.round_robin import RoundRobin


def test_the_servers_take_turns_whatever_their_load() -> None:
    servers = [FakeServer(in_flight=5), FakeServer()]
    policy = RoundRobin(servers)
    assert [policy.choose(candidates(servers), NO_FACTS) for _ in range(4)] == [servers[1], servers[0]] * 2
