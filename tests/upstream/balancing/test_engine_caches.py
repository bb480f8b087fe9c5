"""The reported caches of servers, compared with plain sets."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from upstream.balancing.engine_caches import EngineCaches

KEYS = st.frozensets(st.integers(0, 5))
NAMES = ("a", "b", "c")


def data(*keys: int) -> bytes:
    return array("Q", keys).tobytes()


def apply(caches: EngineCaches, name: str, size: int = 16, *keys: int, removed: tuple[int, ...] = (), cleared: bool = False) -> None:
    caches.apply(name, size, True, cleared=cleared, removed=data(*removed), inserted=data(*keys))


def known(*names: str) -> EngineCaches:
    caches = EngineCaches()
    caches.set_servers(names)
    return caches


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.booleans(), KEYS), max_size=20), st.lists(st.integers(0, 5), unique=True, max_size=6))
def test_cached_tokens_are_those_of_the_leading_blocks(steps: list[tuple[str, bool, frozenset[int]]], prompt: list[int]) -> None:
    caches = known(*NAMES)
    sets: dict[str, frozenset[int]] = {}
    for name, cleared, wanted in steps:
        before = frozenset[int]() if cleared else sets.get(name, frozenset())
        apply(caches, name, 16, *(wanted - before), removed=tuple(before - wanted), cleared=cleared)
        sets[name] = wanted
    expected = {name: 16 * next((at for at, key in enumerate(prompt) if key not in own), len(prompt)) for name, own in sets.items()}
    assert caches.cached_tokens({16: prompt}) == expected


def test_servers_may_have_different_block_sizes() -> None:
    caches = known("a", "b")
    apply(caches, "a", 16, 1, 2)
    apply(caches, "b", 64, 3)
    assert caches.block_sizes == {16, 64}
    assert caches.cached_tokens({16: [1, 2, 9], 64: [3]}) == {"a": 32, "b": 64}
    assert caches.cached_tokens({16: [1]}) == {"a": 16}


def test_a_server_whose_events_are_lost_is_unknown() -> None:
    caches = known("a", "b")
    apply(caches, "a", 16, 1)
    apply(caches, "b", 16, 1)
    apply(caches, "a", 0, cleared=True)
    assert caches.cached_tokens({16: [1]}) == {"b": 16}
    caches.set_servers(["a"])
    assert (caches.block_sizes, caches.size) == (frozenset(), 0)


def test_incomplete_knowledge_is_marked() -> None:
    caches = known("a")
    caches.apply("a", 16, False, cleared=False, removed=b"", inserted=data(1))
    assert caches.incomplete == {"a"}
    apply(caches, "a", 16, cleared=True)
    assert caches.incomplete == set()


def test_a_model_whose_token_ids_are_wrong_needs_no_more_keys() -> None:
    caches = known("a")
    apply(caches, "a", 16, 1)
    for expected in (9, 9, 10, 9, 9):
        caches.verify(expected, 10)
        assert caches.block_sizes
    caches.verify(9, 10)
    apply(caches, "a", 16, 2)
    assert not caches.block_sizes


def test_the_cached_tokens_of_one_server_are_those_of_all() -> None:
    caches = known("a", "b", "c")
    apply(caches, "a", 16, 1, 2)
    apply(caches, "b", 32, 7)
    keys = {16: (1, 2, 3), 32: (7, 8)}
    assert {name: caches.cached_on(name, keys) for name in ("a", "b")} == caches.cached_tokens(keys) == {"a": 32, "b": 32}
    assert caches.cached_on("c", keys) is None and caches.cached_on("b", {16: (1,)}) is None
