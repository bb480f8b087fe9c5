"""The simulation of caches, at a small size."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import hypothesis.strategies as some
import pytest
from hypothesis import given

from tests.benchmarks.prefix.__main__ import COST, EVENTS, choosers
from tests.benchmarks.prefix.cache import Cache
from tests.benchmarks.prefix.choosers import CHOOSERS, Chooser, KnownServer
from tests.benchmarks.prefix.engines import BatchedEngine, SerialEngine
from tests.benchmarks.prefix.requests import Machine, Request
from tests.benchmarks.prefix.traces import BLOCK, TRACES, Prompt, Segment, document
from tests.benchmarks.prefix.world import MakeEngine, play


def segment(number: int, blocks: int = 1, role: str = "user") -> Segment:
    return Segment(number, role, blocks * BLOCK)


def prompt(*segments: Segment) -> Prompt:
    return Prompt().then(*segments)


class PlainCache:
    """A cache as a list of blocks, the least recently used first."""

    def __init__(self, blocks: int) -> None:
        self._capacity = blocks
        self._blocks: list[tuple[int, int]] = []

    def known(self, prompt: Prompt) -> int:
        return sum(1 for _ in itertools.takewhile(self._blocks.__contains__, blocks_of(prompt))) * BLOCK

    def admit(self, prompt: Prompt) -> None:
        used = blocks_of(prompt)
        self._blocks = [block for block in self._blocks if block not in used] + used[::-1]
        self._blocks = self._blocks[-self._capacity :]


def blocks_of(prompt: Prompt) -> list[tuple[int, int]]:
    return [
        (node, number) for node, segment in zip(prompt.nodes, prompt.segments, strict=True) for number in range(segment.tokens // BLOCK)
    ]


def test_a_cache_finds_the_longest_known_prefix() -> None:
    cache = Cache(10 * BLOCK)
    cache.admit(prompt(segment(1, 2), segment(2, 2)))
    assert cache.known(prompt(segment(1, 2), segment(3))) == 2 * BLOCK
    assert cache.known(prompt(segment(4), segment(2, 2))) == 0, "the same words behind another beginning"


def test_a_cache_forgets_the_end_of_the_oldest_first() -> None:
    cache = Cache(4 * BLOCK)
    first = prompt(segment(1, 3))
    assert cache.admit(first) == []
    assert cache.admit(prompt(segment(2, 2))) == [(first.nodes[0], 2)]
    assert cache.known(first) == 2 * BLOCK


@given(some.lists(some.lists(some.integers(0, 3), min_size=1, max_size=4)), some.integers(1, 12))
def test_a_cache_is_a_list_of_blocks(rows: list[list[int]], capacity: int) -> None:
    cache, plain = Cache(capacity * BLOCK), PlainCache(capacity)
    for row in rows:
        one = prompt(*(segment(number, number + 1) for number in row))
        assert cache.known(one) == plain.known(one)
        cache.admit(one)
        plain.admit(one)


def test_a_prompt_is_a_chat_request() -> None:
    segments = (segment(1, role="system"), segment(2), segment(3), segment(4, role="assistant"))
    messages = document(segments)["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[1]["content"] == segment(2).text + segment(3).text
    assert len(segment(2).text) == 4 * BLOCK


@pytest.mark.parametrize("kind", ["chat", "texts"])
def test_policies_rank_as_expected_and_every_run_is_the_same(kind: str) -> None:
    talks = TRACES[kind].of(seed=1, servers=4, requests=400)
    outcomes = {name: play(talks, 4, chooser) for name, chooser in CHOOSERS.items()}
    assert outcomes["`prefix`"].hits > outcomes["`least_busy`"].hits + 0.1
    assert outcomes["`prefix`"].skew < 2
    assert play(talks, 4, CHOOSERS["`prefix`"]) == outcomes["`prefix`"]


class First(Chooser):
    """Sends everything to one server, and counts its feedback."""

    samples = True

    def __init__(self, machines: Sequence[Machine], _: Sequence[KnownServer]) -> None:
        self.first = machines[0]
        self.reports: Counter[str] = Counter()
        self.cached: dict[int, int] = {}
        self.most = 0

    def choose(self, request: Request, now: float) -> Machine:
        assert request.arrived == now
        self.reports["chosen"] += 1
        return self.first

    def first_token(self, request: Request, machine: Machine, now: float) -> None:
        assert machine is self.first and now > request.arrived
        self.reports["first"] += 1

    def finished(self, request: Request, machine: Machine, now: float) -> None:
        assert machine is self.first and now > request.arrived
        self.reports["finished"] += 1

    def stored(self, machine: Machine, prompt: Prompt) -> None:
        assert machine.number == 0
        self.reports["stored"] += 1
        self.cached.update(zip(prompt.nodes, (segment.tokens // BLOCK for segment in prompt.segments), strict=True))

    def evicted(self, machine: Machine, node: int, blocks: int) -> None:
        assert machine.number == 0 and self.cached[node] > blocks
        self.reports["evicted"] += 1
        self.cached[node] = blocks

    def sampled(self, machine: Machine, waiting: int, running: int, now: float) -> None:
        assert machine.number == 0 or waiting == running == 0
        self.most = max(self.most, waiting + running)


@pytest.mark.parametrize("engine", [SerialEngine, BatchedEngine])
def test_all_to_one_is_seen_as_what_it_is(engine: MakeEngine) -> None:
    assert play(TRACES["chat"].of(seed=1, servers=4, requests=100), 4, First, engine=engine).skew == pytest.approx(4)


@pytest.mark.parametrize("engine", [SerialEngine, BatchedEngine])
def test_every_gateway_gets_its_own_requests_and_all_events(engine: MakeEngine) -> None:
    made: list[First] = []

    def maker(machines: Sequence[Machine], servers: Sequence[KnownServer]) -> Chooser:
        made.append(First(machines, servers))
        return made[-1]

    talks = TRACES["texts"].of(seed=1, servers=2, requests=200)
    play(talks, 2, maker, gateways=2, event_delay=0.1, engine=engine)
    one, other = (each.reports for each in made)
    assert one["chosen"] == one["first"] == one["finished"] > 0
    assert one["chosen"] + other["chosen"] == sum(len(talk.turns) for talk in talks)
    assert one["stored"] == other["stored"] == 2 * (one["chosen"] + other["chosen"])
    assert one["evicted"] == other["evicted"] > 0
    assert made[0].cached == made[1].cached
    assert made[0].most == made[1].most > 1
    assert all(machine.in_flight == 0 for machine in (made[0].first, made[1].first))


def test_long_contexts_are_found_by_their_cost() -> None:
    talks = TRACES["b2b-2"].of(seed=7, servers=8, requests=2000)
    first = {name: play(talks, 8, chooser).first for name, chooser in choosers().items() if name in ("`prefix`", "oracle", COST)}
    assert first[COST] < 0.5 < 10 < first["`prefix`"]
    assert first["oracle"] < 0.6


def test_four_gateways_are_nearly_as_fast_as_one() -> None:
    talks, makers = TRACES["b2b-2"].of(seed=7, servers=8, requests=2000), choosers()
    for name, delay, most in ((EVENTS, 0.1, 1.6), (COST, None, 3.0)):
        alone, together = (play(talks, 8, makers[name], gateways=gateways, event_delay=delay) for gateways in (1, 4))
        assert together.first < most * alone.first, name


def test_gateways_with_events_know_what_the_others_sent() -> None:
    talks = TRACES["b2b-1"].of(seed=1, servers=4, requests=400)
    makers = choosers()
    alone, together = play(talks, 4, makers[COST]), play(talks, 4, makers[EVENTS], gateways=4, event_delay=0.1)
    assert together.hits > alone.hits - 0.1
    assert together.skew < 1.5
