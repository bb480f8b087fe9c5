"""``balance: prefix``: requests with one affinity key get the same server, unless it is out of rotation or too busy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.upstream.balancing.policies.servers import FakeServer, candidates, named
from upstream.balancing.policies.policy import NO_FACTS, RequestFacts
from upstream.balancing.policies.prefix import CHOICES, FACTOR, FREE, SLOTS, Prefix


def choose(policy: Prefix[FakeServer], servers: Sequence[FakeServer], key: int) -> FakeServer:
    return policy.choose(candidates(servers), RequestFacts(key))


def owners(servers: Sequence[FakeServer]) -> list[str]:
    """The preferred server of each slot."""
    policy = Prefix(servers)
    return [policy.order(slot)[0].name for slot in range(SLOTS)]


NAMES = st.lists(st.text("abc/:.0123456789", min_size=1, max_size=12), min_size=2, max_size=10, unique=True)
KEYS = st.integers(0, 2**32 - 1)
COMMON = settings(deadline=None, max_examples=examples(60))
FEW = settings(deadline=None, max_examples=examples(10))


@COMMON
@given(NAMES, KEYS)
def test_all_workers_agree_whatever_the_order_of_their_servers(names: list[str], key: int) -> None:
    one, other = (Prefix(named(each)) for each in (names, reversed(names)))
    assert [server.name for server in one.order(key)] == [server.name for server in other.order(key)]
    assert len(one.order(key)) == min(len(names), CHOICES)


@COMMON
@given(NAMES, KEYS)
def test_a_server_that_goes_away_moves_only_its_own_keys(names: list[str], key: int) -> None:
    servers = named(names)
    policy = Prefix(servers)
    first = choose(policy, servers, key)
    assert first is policy.order(key)[0]
    for removed in servers:
        left = [server for server in servers if server is not removed]
        chosen = choose(policy, left, key)  # the server is down
        assert chosen is (first if removed is not first else policy.order(key)[1])
        assert choose(Prefix(left), left, key) is chosen  # the server is no longer configured


@FEW
@given(NAMES, st.just("new"))
def test_a_new_server_takes_its_share_and_nothing_moves_between_the_others(names: list[str], new: str) -> None:
    before, after = owners(named(names)), owners(named([*names, new]))
    moved = [now for was, now in zip(before, after, strict=True) if was != now]
    assert set(moved) <= {new}
    share = SLOTS / (len(names) + 1)
    assert abs(len(moved) - share) < 6 * math.sqrt(share)


@FEW
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6))
def test_shares_follow_the_weights(weights: list[int]) -> None:
    servers = [FakeServer(f"s{number}", float(weight)) for number, weight in enumerate(weights)]
    counts = Counter(owners(servers))
    for server in servers:
        share = SLOTS * server.weight / sum(weights)
        assert abs(counts[server.name] - share) < 6 * math.sqrt(share)


@COMMON
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 40)), min_size=1, max_size=CHOICES), KEYS)
def test_the_load_of_the_chosen_server_is_bounded(loads: list[tuple[int, int]], key: int) -> None:
    servers = [FakeServer(f"s{number}", float(weight), in_flight) for number, (weight, in_flight) in enumerate(loads)]
    chosen = choose(Prefix(servers), servers, key)
    chosen.in_flight += 1
    share = chosen.weight * sum(server.in_flight for server in servers) / sum(server.weight for server in servers)
    assert chosen.in_flight <= max(FREE, math.ceil(FACTOR * share))


@COMMON
@given(NAMES, st.lists(KEYS, min_size=1, max_size=400))
def test_the_bound_holds_for_every_request_of_a_frequent_prefix(names: list[str], keys: list[int]) -> None:
    servers = named(names[:CHOICES])
    policy = Prefix(servers)
    for key in [keys[0]] * 100 + keys:
        chosen = choose(policy, servers, key)
        chosen.in_flight += 1
        mean = sum(server.in_flight for server in servers) / len(servers)
        assert chosen.in_flight <= max(FREE, math.ceil(FACTOR * mean))


def test_the_overflow_of_a_busy_server_spreads_over_the_others() -> None:
    servers = named(f"s{number}" for number in range(CHOICES))
    policy = Prefix(servers)
    servers[0].in_flight = 1000
    seconds = Counter(choose(policy, servers, slot).name for slot in range(SLOTS) if policy.order(slot)[0] is servers[0])
    assert seconds.keys() == {server.name for server in servers[1:]}
    assert max(seconds.values()) < 2 * min(seconds.values())


def test_the_least_busy_server_gets_a_request_whose_stored_servers_are_out_of_rotation() -> None:
    servers = named(f"s{number}" for number in range(CHOICES + 2))
    policy = Prefix(servers)
    busy, idle = (server for server in servers if server not in policy.order(7))
    busy.in_flight = 1
    assert choose(policy, [busy, idle], 7) is idle


def test_the_least_busy_server_gets_a_request_without_a_key() -> None:
    busy, idle = servers = [FakeServer("busy", in_flight=1), FakeServer("idle")]
    assert [Prefix(servers).choose(candidates(servers, offset), NO_FACTS) for offset in range(3)] == [idle] * 3
    assert busy.in_flight == 1
