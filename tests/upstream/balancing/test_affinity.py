"""Who is asked for requests that begin alike: always the same, unless it is away or too busy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from upstream.balancing.affinity import CHOICES, FACTOR, FREE, SLOTS, Affinity


@dataclass(eq=False)
class Member:
    name: str
    weight: float = 1.0
    in_flight: int = 0


def members(names: Iterable[str]) -> list[Member]:
    return [Member(name) for name in names]


def owners(servers: Sequence[Member]) -> list[str]:
    """Who is first in each slot."""
    affinity = Affinity(servers)
    return [affinity.order(slot)[0].name for slot in range(SLOTS)]


NAMES = st.lists(st.text("abc/:.0123456789", min_size=1, max_size=12), min_size=2, max_size=10, unique=True)
HINTS = st.integers(0, 2**32 - 1)
COMMON = settings(deadline=None, max_examples=examples(60))
FEW = settings(deadline=None, max_examples=examples(10))


@COMMON
@given(NAMES, HINTS)
def test_every_worker_agrees_whatever_the_order_of_its_servers(names: list[str], hint: int) -> None:
    one, other = (Affinity(members(each)) for each in (names, reversed(names)))
    assert [server.name for server in one.order(hint)] == [server.name for server in other.order(hint)]
    assert len(one.order(hint)) == min(len(names), CHOICES)


@COMMON
@given(NAMES, HINTS)
def test_one_that_goes_away_moves_its_own_requests_alone(names: list[str], hint: int) -> None:
    servers = members(names)
    affinity = Affinity(servers)
    first = affinity.choose(servers, hint)
    assert first is affinity.order(hint)[0]
    for gone in servers:
        left = [server for server in servers if server is not gone]
        chosen = affinity.choose(left, hint)  # it is down
        assert chosen is (first if gone is not first else affinity.order(hint)[1])
        anew = Affinity(left).choose(left, hint)  # it is no longer configured
        assert anew is chosen


@FEW
@given(NAMES, st.just("new"))
def test_one_that_comes_takes_about_its_share_and_nothing_moves_between_the_others(names: list[str], new: str) -> None:
    before, after = owners(members(names)), owners(members([*names, new]))
    moved = [now for was, now in zip(before, after, strict=True) if was != now]
    assert set(moved) <= {new}
    share = SLOTS / (len(names) + 1)
    assert abs(len(moved) - share) < 6 * math.sqrt(share)


@FEW
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6))
def test_weights_are_shares(weights: list[int]) -> None:
    servers = [Member(f"s{number}", float(weight)) for number, weight in enumerate(weights)]
    counts = Counter(owners(servers))
    for server in servers:
        share = SLOTS * server.weight / sum(weights)
        assert abs(counts[server.name] - share) < 6 * math.sqrt(share)


@COMMON
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 40)), min_size=1, max_size=CHOICES), HINTS)
def test_the_load_is_bounded_and_no_request_is_left_over(loads: list[tuple[int, int]], hint: int) -> None:
    servers = [Member(f"s{number}", float(weight), in_flight) for number, (weight, in_flight) in enumerate(loads)]
    chosen = Affinity(servers).choose(servers, hint)
    assert chosen is not None, "one of them has less than its share"
    chosen.in_flight += 1
    share = chosen.weight * sum(server.in_flight for server in servers) / sum(server.weight for server in servers)
    assert chosen.in_flight <= max(FREE, math.ceil(FACTOR * share))


@COMMON
@given(NAMES, st.lists(HINTS, min_size=1, max_size=400))
def test_however_hot_one_beginning_is_the_bound_holds_all_the_way(names: list[str], hints: list[int]) -> None:
    servers = members(names[:CHOICES])
    affinity = Affinity(servers)
    for hint in [hints[0]] * 100 + hints:
        chosen = affinity.choose(servers, hint)
        assert chosen is not None
        chosen.in_flight += 1
        mean = sum(server.in_flight for server in servers) / len(servers)
        assert chosen.in_flight <= max(FREE, math.ceil(FACTOR * mean))


def test_what_one_busy_server_sends_on_is_spread_over_the_others() -> None:
    servers = members(f"s{number}" for number in range(CHOICES))
    affinity = Affinity(servers)
    servers[0].in_flight = 1000
    seconds = Counter(
        server.name for slot in range(SLOTS) if (server := affinity.choose(servers, slot)) and affinity.order(slot)[0] is servers[0]
    )
    assert seconds.keys() == {server.name for server in servers[1:]}
    assert max(seconds.values()) < 2 * min(seconds.values())


def test_there_may_be_nobody_left_of_those_that_are_remembered() -> None:
    servers = members(f"s{number}" for number in range(CHOICES + 1))
    affinity = Affinity(servers)
    others = [server for server in servers if server not in affinity.order(7)]
    assert len(others) == 1 and affinity.choose(others, 7) is None
