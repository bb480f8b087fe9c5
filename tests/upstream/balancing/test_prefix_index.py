"""The index of cached blocks: compared with a plain model of LRU caches."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from upstream.balancing.prefix_index import PrefixIndex

NAMES = ("a", "b", "c")
CAPACITIES = st.integers(1, 12)
PROMPTS = st.integers(0, 4).flatmap(lambda first: st.integers(0, 8).map(lambda length: [10 * first + block for block in range(length)]))


class LruCaches(RuleBasedStateMachine):
    """The servers' caches as plain ordered dictionaries, beside the index."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.caches: dict[str, OrderedDict[int, None]] = {}
        self.capacities: dict[str, int] = {}

    @rule(name=st.sampled_from(NAMES), capacity=CAPACITIES)
    def add(self, name: str, capacity: int) -> None:
        self.index.add_server(name, capacity)
        self.caches.setdefault(name, OrderedDict())
        self.capacities[name] = capacity
        self._evict(name)

    @rule(name=st.sampled_from(NAMES))
    def remove_server(self, name: str) -> None:
        self.index.remove_server(name)
        self.caches.pop(name, None)

    @rule(name=st.sampled_from(NAMES), prompt=PROMPTS)
    def use(self, name: str, prompt: list[int]) -> None:
        self.index.insert(name, prompt)
        if (cache := self.caches.get(name)) is not None:
            for block in reversed(prompt):
                cache[block] = None
                cache.move_to_end(block)
            self._evict(name)

    @rule(name=st.sampled_from(NAMES), blocks=st.lists(st.integers(0, 50), max_size=5, unique=True))
    def remove(self, name: str, blocks: list[int]) -> None:
        self.index.remove(name, blocks)
        for block in blocks:
            self.caches.get(name, OrderedDict()).pop(block, None)

    @rule(name=st.sampled_from(NAMES))
    def restart(self, name: str) -> None:
        self.index.clear(name)
        self.caches.get(name, OrderedDict()).clear()

    @rule(prompt=PROMPTS)
    def match(self, prompt: list[int]) -> None:
        expected = {}
        for name, cache in self.caches.items():
            depth = next((depth for depth, block in enumerate(prompt) if block not in cache), len(prompt))
            if depth:
                expected[name] = depth
        assert self.index.matched(prompt) == expected

    @invariant()
    def the_blocks_are_equal(self) -> None:
        for name, cache in self.caches.items():
            assert list(self.index.blocks(name)) == list(cache)
        assert self.index.size == sum(map(len, self.caches.values()))

    def _evict(self, name: str) -> None:
        while len(self.caches[name]) > self.capacities[name]:
            self.caches[name].popitem(last=False)


TestLruCaches = LruCaches.TestCase


def test_all_servers_together_have_a_bound() -> None:
    index = PrefixIndex(limit=100)
    for name in NAMES:
        index.add_server(name, 1000)
        index.insert(name, range(80))
    assert index.size <= 100
    assert all(index.matched(range(80))[name] >= 100 // len(NAMES) for name in NAMES)


def test_a_server_within_its_share_loses_nothing_to_the_others() -> None:
    index = PrefixIndex(limit=100)
    for name, used in zip(NAMES, (10, 80, 80), strict=True):
        index.add_server(name, 1000)
        index.insert(name, range(used))
    assert len(index.blocks("a")) == 10 and index.size <= 100


def test_any_number_of_sets_of_servers_is_matched() -> None:
    """More sets than the index stores the names of."""
    index = PrefixIndex()
    names = [f"s{number}" for number in range(11)]
    for name in names:
        index.add_server(name)
    sets = range(1, 1 << len(names))
    for chosen in sets:
        for position, name in enumerate(names):
            if chosen >> position & 1:
                index.insert(name, [chosen])
    for _ in range(2):
        for chosen in sets:
            assert index.matched([chosen]) == {name: 1 for position, name in enumerate(names) if chosen >> position & 1}


def test_a_removed_server_leaves_nothing_behind() -> None:
    index = PrefixIndex()
    index.add_server("a")
    index.add_server("b")
    index.insert("a", [1, 2])
    index.insert("b", [1])
    index.remove_server("a")
    index.add_server("c")
    assert index.matched([1, 2]) == {"b": 1} and index.size == 1


def test_equal_keys_within_one_prompt_count_once() -> None:
    index = PrefixIndex()
    index.add_server("a")
    index.insert("a", [1, 2, 1])
    assert index.size == 2 and index.matched([1, 2]) == {"a": 2}


@given(uses=st.lists(st.tuples(st.sampled_from(NAMES), PROMPTS), max_size=30), capacity=CAPACITIES, prompt=PROMPTS)
def test_the_depth_of_one_server_is_what_matches(uses: list[tuple[str, list[int]]], capacity: int, prompt: list[int]) -> None:
    index = PrefixIndex()
    for name in NAMES:
        index.add_server(name, capacity)
    for name, used in uses:
        index.insert(name, used)
    assert {name: depth for name in NAMES if (depth := index.depth(name, prompt))} == index.matched(prompt)
    assert index.depth("unknown", prompt) == 0
