"""``balance: cost``: a request goes where it costs the least time."""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import count

import pytest

from tests.upstream.balancing.policies.servers import FakeServer, candidates, named
from upstream.balancing.cost_model import CostModel, EngineLoad, Placement, Prompt
from upstream.balancing.policies.cost import CONSIDERED, FOUND, Cost, CostSettings
from upstream.balancing.policies.policy import RequestFacts

BLOCK = 512
LONG = 40  # blocks: 5,120 tokens, 0.64 s at the assumed speed


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Router:
    """A policy with its servers, and a clock that the test moves."""

    def __init__(self, *names: str, explain: bool = False) -> None:
        self.clock = Clock()
        self.model = CostModel(clock=self.clock)
        self.servers = named(names)
        self.policy: Cost[FakeServer] = Cost(self.servers, CostSettings(explain=explain), self.model)
        self._requests = 0

    def send(self, first: int, blocks: int = LONG, *, own: int = 0, session: int | None = None, adapter: int | None = None) -> Placement:
        """Send a stream whose prompt starts with these blocks, followed by ``own`` blocks that no other prompt has."""
        self._requests += 1
        keys = [*range(first, first + blocks), *range(1_000_000 + 1000 * self._requests, 1_000_000 + 1000 * self._requests + own)]
        prompt = Prompt(keys, len(keys) * BLOCK, stream=True, session=session, adapter=adapter)
        chosen = self.policy.choose(candidates(self.servers, self._requests), RequestFacts(prompt=prompt))
        assert prompt.placement is not None and prompt.placement.server == chosen.name
        return prompt.placement

    def serve(self, first: int, blocks: int = LONG, seconds: float = 0.0, cached: int = 0) -> Placement:
        """Send a stream that the server finishes before the next one."""
        placement = self.send(first, blocks)
        self.clock.now += seconds
        placement.responded()
        placement.finished(blocks * BLOCK // 4, cached, 10)
        return placement


def test_a_prompt_goes_where_its_start_is_cached() -> None:
    router = Router("a", "b", "c")
    for first in (1000, 2000, 3000):
        server = router.serve(first).server
        router.clock.now += 10
        assert {router.serve(first, LONG + more).server for more in range(5)} == {server}


def test_unknown_prompts_are_spread_over_idle_servers() -> None:
    router = Router("a", "b", "c")
    assert Counter(router.send(1000 * number).server for number in range(1, 7)) == {"a": 2, "b": 2, "c": 2}


def test_a_backlog_that_takes_longer_than_the_prefix_is_avoided() -> None:
    router = Router("a", "b")
    home = router.serve(1000).server
    router.clock.now += 10
    servers = [router.send(1000, own=10).server for _ in range(9)]
    assert servers[:3] == [home] * 3  # ten blocks to compute each, against fifty elsewhere
    assert set(servers) == {"a", "b"}


def test_a_short_backlog_is_waited_for() -> None:
    router = Router("a", "b")
    home = router.serve(1000).server
    router.clock.now += 10
    assert router.send(1000, own=4).server == router.send(1000, own=4).server == home


def test_speeds_are_learned_from_streams() -> None:
    router = Router("a", "b")
    for first in range(1000, 9000, 1000):
        placement = router.send(first)
        router.clock.now += 1.0 if placement.server == "a" else 0.25
        placement.responded()
        placement.finished(LONG * BLOCK // 4, 0, 1)
        router.clock.now += 10
    slow, fast = router.model.servers["a"].seconds_per_token, router.model.servers["b"].seconds_per_token
    assert fast is not None and (slow is None or slow > 2 * fast)
    assert {router.send(50_000 + 1000 * number, 4).server for number in range(2)} == {"b"}


def test_prompts_of_other_workers_do_not_make_a_server_seem_slower() -> None:
    router, tokens = Router("a"), LONG * BLOCK / 4
    for first in range(1000, 9000, 1000):  # the server needs a second for each prompt
        own = [router.send(first)]
        router.model.peer_placed("a", range(first + 300, first + 340), tokens)
        own.append(router.send(first + 500))
        for placement, seconds in zip(own, (1, 2), strict=True):
            router.clock.now += seconds
            placement.responded()
            placement.finished(int(tokens), 0, 1)
        router.model.peer_finished("a", (), 1)
        router.clock.now += 20
    assert router.model.servers["a"].seconds_per_token == pytest.approx(1 / tokens)


def test_prompts_of_other_gateways_hardly_make_a_server_seem_slower() -> None:
    router = Router("a")
    router.serve(500, seconds=1.0)
    for first in range(1000, 21000, 1000):  # each waits for those of others
        router.model.engine_load("a", EngineLoad(router.clock.now, 8, 0))
        router.serve(first, seconds=4.0)
    assert 1.0 < (router.model.servers["a"].seconds_per_token or 0.0) * LONG * BLOCK / 4 < 1.1


def test_the_first_known_speed_beside_other_gateways_is_the_fastest_of_a_few() -> None:
    router, tokens = Router("a"), LONG * BLOCK / 4
    server, assumed = router.model.servers["a"], router.model.pace
    for first, seconds in ((1000, 4.0), (2000, 3.0), (3000, 1.0), (4000, 2.0)):  # most wait for prompts of others
        assert server.seconds_per_token is None and router.model.pace == assumed
        router.model.engine_load("a", EngineLoad(router.clock.now, 8, 0))
        router.serve(first, seconds=seconds)
    assert server.seconds_per_token == pytest.approx(1 / tokens)
    assert router.model.pace == server.seconds_per_token


def test_a_server_that_others_crowd_is_avoided() -> None:
    """The requests of others count for the mean of the last seconds, too."""
    router = Router("a", "b")
    home = router.serve(1000).server
    other = "b" if home == "a" else "a"
    for _ in range(30):
        router.clock.now += 1
        for name, running in ((home, 30), (other, 2)):
            router.model.engine_load(name, EngineLoad(router.clock.now, running, 0))
    for name in "ab":  # the crowd has just left, which says nothing about the next seconds
        router.model.engine_load(name, EngineLoad(router.clock.now, 2, 0))
    assert router.send(1000).server == other


def test_responses_teach_the_bytes_of_a_token() -> None:
    router = Router("a", "b")
    for number in range(1, 60):
        placement = router.send(1000 * number)
        placement.finished(LONG * BLOCK // 2)
    assert 1.99 < router.model.bytes_per_token < 2.01


def test_a_restarted_server_has_nothing_cached() -> None:
    router = Router("a", "b")
    home = router.serve(1000).server
    router.clock.now += 10
    assert router.send(1000).predicted > 0
    router.model.restarted(home)
    assert router.model.index.size == 0 or router.send(1000).server != home


def test_evictions_shrink_the_assumed_cache() -> None:
    router = Router("a", "b")
    home = router.serve(1000).server
    before = router.model.servers[home].capacity
    router.clock.now += 10
    router.serve(1000, cached=500)  # the server reports cached tokens, and had fewer than predicted
    router.clock.now += 10
    router.serve(1000, cached=0)
    assert router.model.servers[home].capacity < before


def test_a_server_that_reports_no_cached_tokens_teaches_nothing() -> None:
    router = Router("a", "b")
    home = router.serve(1000).server
    before = router.model.servers[home].capacity
    for _ in range(5):
        router.clock.now += 10
        router.serve(1000)
    assert router.model.servers[home].capacity == before


def test_a_session_stays_on_its_server_when_little_speaks_against_it() -> None:
    router = Router("a", "b", "c")
    first = router.send(1000, 1, session=7)
    first.responded()
    first.finished()
    router.clock.now += 10
    for number in range(2, 9):
        again = router.send(1000 * number, 1, session=7)
        again.responded()
        again.finished()
        router.clock.now += 10
        assert again.server == first.server


def test_an_adapter_stays_where_it_is_loaded() -> None:
    router = Router("a", "b", "c")
    servers = set()
    for number in range(1, 9):
        placement = router.send(1000 * number, 1, adapter=5)
        placement.responded()
        placement.finished()
        router.clock.now += 10
        servers.add(placement.server)
    assert len(servers) == 1


def test_requests_of_another_gateway_count_while_their_sample_is_fresh() -> None:
    router = Router("a", "b")
    router.serve(1000)
    router.clock.now += 10
    router.model.engine_load("a", EngineLoad(router.clock.now, running=20, waiting=5))
    for number in range(2, 6):
        assert router.serve(1000 * number, 2).server == "b"
        router.clock.now += 0.5
    router.clock.now += 60
    assert {router.send(1000 * number, 2).server for number in range(6, 10)} == {"a", "b"}


def test_a_request_that_has_ended_since_the_sample_does_not_count_as_one_of_others() -> None:
    router = Router("a", "b")
    used = {router.serve(1000, 8).server}
    for _ in range(20):
        placement = router.send(1000, 8)
        sampled_at, router.clock.now = router.clock.now, router.clock.now + 0.01
        placement.responded()
        placement.finished()
        router.model.engine_load(placement.server, EngineLoad(sampled_at, running=1, waiting=0))
        assert router.model.others(router.clock.now) == 0
        router.clock.now += 1
        used.add(placement.server)
    assert len(used) == 1
    router.model.engine_load("a", EngineLoad(router.clock.now, running=1, waiting=0))
    assert router.model.others(router.clock.now) == 1


def test_a_server_with_a_full_kv_cache_is_avoided_while_its_sample_is_fresh() -> None:
    router = Router("a", "b")
    router.model.engine_load("a", EngineLoad(router.clock.now, running=0, waiting=0, kv_usage=0.99))
    for number in range(2, 6):
        assert router.serve(1000 * number, 2).server == "b"
        router.clock.now += 0.5
    router.clock.now += 60
    assert {router.send(1000 * number, 2).server for number in range(6, 10)} == {"a", "b"}


def test_a_choice_is_explained_on_request() -> None:
    router = Router("a", "b", explain=True)
    home = router.serve(1000).server
    router.clock.now += 10
    explained = {name: (cost, cached) for name, cost, cached in router.send(1000).candidates}
    other = "b" if home == "a" else "a"
    assert explained[home][0] < explained[other][0]
    assert (explained[home][1] > 0) and explained[other][1] == 0
    assert Router("a", "b").send(1).candidates == ()


def test_nothing_is_left_in_flight() -> None:
    router = Router("a", "b")
    placements = [router.send(1000 * number % 3000) for number in range(1, 20)]
    for number, placement in enumerate(placements):
        if number % 2:
            placement.responded()
        placement.finished()
    assert [(server.in_flight, server.waiting) for server in router.model.servers.values()] == [(0, 0.0), (0, 0.0)]


def test_what_was_learned_survives_a_reload() -> None:
    router = Router("a", "b")
    home = router.serve(1000).server
    servers = named(["a", "b", "c"])
    reloaded: Cost[FakeServer] = Cost(servers, model=router.model)
    router.clock.now += 10
    prompt = Prompt(range(1000, 1000 + LONG), LONG * BLOCK, stream=True)
    assert reloaded.choose(candidates(servers), RequestFacts(prompt=prompt)).name == home


def test_a_pool_from_before_a_reload_chooses_without_the_removed_server() -> None:
    router = Router("a", "b")
    router.model.set_servers(["b"])
    assert router.send(1000).server == "b"
    prompt = Prompt([1], BLOCK)
    assert router.policy.choose(candidates(router.servers[:1]), RequestFacts(prompt=prompt)).name == "a"
    assert prompt.placement is None and router.model.in_flight == 1
    prompt.responded()
    assert router.model.in_flight == 1


def test_observations_of_a_removed_server_change_nothing() -> None:
    router = Router("a", "b")
    placement = router.send(1000)
    removed = placement.server
    (other,) = {"a", "b"} - {removed}
    router.model.set_servers([other])
    placement.responded()
    placement.finished(LONG * BLOCK // 4, 0, 10)
    router.model.peer_placed(removed, [1], 100.0)
    router.model.peer_finished(removed, [1], 10)
    router.model.peers_ended(removed, 1)
    router.model.set_cache_size(removed, 100_000)
    router.model.engine_load(removed, EngineLoad(router.clock.now, running=20, waiting=5))
    assert set(router.model.servers) == {other} and router.model.in_flight == router.model.others(router.clock.now) == 0
    assert router.model.index.size == 0


def test_a_configured_cache_size_has_precedence_over_the_engines() -> None:
    for configured, expected in ((None, 400), (64_000, 500)):
        model = CostModel(configured)
        model.set_servers(["a"])
        model.set_cache_size("a", 51_200)
        assert model.servers["a"].capacity == expected


def test_a_cache_size_that_is_reported_again_does_not_undo_what_was_learned() -> None:
    model = CostModel()
    model.set_servers(["a"])
    model.set_cache_size("a", 51_200)
    model.index.insert("a", range(400))
    model.correct("a", predicted=5000.0, cached=1)
    learned = model.servers["a"].capacity
    assert learned < 400
    model.set_cache_size("a", 51_200)
    assert model.servers["a"].capacity == learned
    model.set_cache_size("a", 64_000)
    assert model.servers["a"].capacity == 500


def test_a_request_that_is_sent_again_is_placed_once() -> None:
    router = Router("a", "b")
    prompt = Prompt(range(1000, 1000 + LONG), LONG * BLOCK, stream=True)
    first = router.policy.choose(candidates(router.servers[:1]), RequestFacts(prompt=prompt))
    second = router.policy.choose(candidates(router.servers[1:]), RequestFacts(prompt=prompt))
    states = router.model.servers
    assert [states[server.name].in_flight for server in (first, second)] == [0, 1]
    assert states[first.name].waiting == 0.0 < states[second.name].waiting


def test_a_large_pool_finds_the_cached_prefix() -> None:
    router = Router(*(f"s{number}" for number in range(200)))
    homes = {first: router.serve(first).server for first in range(1000, 40_000, 1000)}
    router.clock.now += 100
    assert {first: router.serve(first).server for first in homes} == homes


def test_in_a_large_pool_a_popular_prefix_is_used_on_all_its_servers() -> None:
    """More servers have it than are compared for one request."""
    router = Router(*(f"s{number}" for number in range(3 * CONSIDERED)))
    having = {server.name for server in router.servers[: 2 * CONSIDERED]}
    for name in having:
        router.model.index.insert(name, range(1000, 1000 + LONG))
    placements = [router.serve(1000) for _ in range(8 * CONSIDERED)]
    assert {placement.server for placement in placements} == having
    assert all(placement.predicted > 0 for placement in placements)


def test_an_idle_server_gets_a_copy_sooner_than_a_busy_one() -> None:
    """One server has the prefix and a backlog. The other one computed prompts all the time, or none."""

    def waits_for_home(*, busy: bool) -> bool:
        router = Router("a", "b")
        home = router.serve(1000).server
        router.clock.now += 100
        other = next(server.name for server in router.servers if server.name != home)
        if busy:
            for second in range(20):
                router.model.peer_placed(other, [5000 + second], 8000 / 2)
                router.clock.now += 1
                router.model.peer_finished(other, [], 0)
        for _ in range(5):
            router.model.peer_placed(home, [], 1400)  # 0.9 s of work, against 0.64 s for the prefix
        return router.send(1000).server == home

    assert not waits_for_home(busy=False)
    assert waits_for_home(busy=True)


def test_a_crowded_server_is_avoided_although_it_has_the_prefix() -> None:
    router = Router("a", "b", "c", "d")
    home = router.serve(1000, 8).server
    router.clock.now += 10
    used = []
    for _ in range(40):
        placement = router.send(1000, 8)
        placement.responded()  # the prompt is cached, and the response takes long
        router.clock.now += 1
        used.append(placement.server)
    assert used[:4] == [home] * 4
    assert max(Counter(used).values()) <= 15, "ten are the mean"


def test_gateways_that_do_not_know_each_other_agree_on_an_unknown_prompt() -> None:
    names = [f"server-{number}" for number in range(8)]
    gateways = [Router(*names) for _ in range(4)]
    for seed, router in enumerate(gateways):
        for name in names:
            router.model.engine_load(name, EngineLoad(router.clock.now, 3, 0))
        router.policy._choices = seed
    for first in range(1000, 21000, 1000):
        assert len({router.send(first).server for router in gateways}) == 1
        for router in gateways:
            router.clock.now += 0.01


def test_prompts_that_others_never_sent_are_not_expected_elsewhere() -> None:
    router = Router(*(f"server-{number}" for number in range(8)))
    router.serve(500)
    router.serve(500, cached=LONG * BLOCK // 4)  # this server reports cached tokens
    before = router.model.found
    for first in range(1000, 200_000, 1000):
        for server in router.servers:
            router.model.engine_load(server.name, EngineLoad(router.clock.now, 3, 0))
        router.serve(first)
        router.clock.now += 1
    assert router.model.found < before / 2


def test_prefixes_that_others_sent_are_expected_more_after_each_response() -> None:
    """A prefix that the gateway sent itself proves nothing about the others."""
    router = Router(*(f"server-{number}" for number in range(8)))
    expected = []
    for first in range(1000, 20_000, 1000):
        for server in router.servers:
            router.model.engine_load(server.name, EngineLoad(router.clock.now, 3, 0))
        expected.append(router.serve(first, cached=LONG * BLOCK // 4).assumed)
        found = router.model.found
        router.serve(first, LONG + 2, cached=LONG * BLOCK // 4)
        assert router.model.found == found
        router.clock.now += 1
    assert expected == sorted(expected) and expected[0] < expected[-1] == LONG * BLOCK // 4


def test_busy_servers_get_a_copy_later_if_other_gateways_use_the_same_home() -> None:
    """The home has the prefix and a backlog, and the other servers compute prompts all the time."""

    def longest_wait(found: float) -> int:
        for waiting in count():
            router = Router(*(f"server-{number}" for number in range(4)))
            router.model.found = found
            home = router.policy._homes.order(1000)[0]
            router.model.index.insert(home.name, range(1000, 1000 + LONG))
            for server in router.servers:
                router.model.engine_load(server.name, EngineLoad(router.clock.now, 3, 0))
                for _ in range(waiting if server is home else 1):
                    router.model.peer_placed(server.name, [], 8000.0)
            if router.send(1000).server != home.name:
                return waiting
        raise AssertionError

    assert longest_wait(0.0) < longest_wait(FOUND / 2) < longest_wait(FOUND)


def test_the_cached_tokens_of_one_server_are_known() -> None:
    router = Router("a", "b")
    placed = router.serve(1000)
    other = next(server for server in router.servers if server.name != placed.server)
    prompt = Prompt([*range(1000, 1020), 7, 8], 22 * BLOCK, token_keys={16: (1, 2, 3)})
    of = {server.name: router.policy.cached_tokens(server, prompt) for server in router.servers}
    assert of == {placed.server: pytest.approx(20 * BLOCK / router.model.bytes_per_token), other.name: 0.0}
    router.model.engines.apply(other.name, 16, False, cleared=False, removed=b"", inserted=array("Q", [1, 2]).tobytes())
    assert router.policy.cached_tokens(other, prompt) == 32
    router.model.index.insert(other.name, range(1000, 1020))
    assert router.policy.cached_tokens(other, prompt) == of[placed.server], "events are incomplete"
    router.model.engines.apply(other.name, 16, True, cleared=False, removed=b"", inserted=b"")
    assert router.policy.cached_tokens(other, prompt) == 32
