"""The union of several ranks, compared with sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from upstream.vllm.kv_events.blocks import Changes
from upstream.vllm.kv_events.ranks import RankUnion

KEYS = st.frozensets(st.integers(0, 5))


@given(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 2), st.booleans(), KEYS), max_size=30))
def test_a_block_is_known_while_one_rank_has_it(ranks: int, steps: list[tuple[int, bool, frozenset[int]]]) -> None:
    union, cached, reported = RankUnion(ranks), [set[int]() for _ in range(ranks)], set[int]()
    for index, cleared, wanted in steps:
        own = cached[index % ranks]
        before = set() if cleared else set(own)
        changes = Changes(cleared, tuple(before - wanted), tuple(wanted - before))
        own.clear()
        own.update(wanted)
        found = union.merge(index % ranks, changes)
        reported = (set() if found.cleared else reported - set(found.removed)) | set(found.inserted)
        assert reported == set().union(*cached)
