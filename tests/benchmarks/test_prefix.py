"""The simulation of caches, at a small size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.benchmarks.prefix.choosers import CHOOSERS, Chooser, Machine
from tests.benchmarks.prefix.traces import BLOCK, TRACES, Segment, document
from tests.benchmarks.prefix.world import Cache, play


def segment(number: int, blocks: int = 1, role: str = "user") -> Segment:
    return Segment(number, role, blocks * BLOCK)


def test_a_cache_finds_the_longest_known_prefix() -> None:
    cache = Cache(10 * BLOCK)
    assert cache.admit([segment(1, 2), segment(2, 2)]) == 0
    assert cache.admit([segment(1, 2), segment(3)]) == 2 * BLOCK
    assert cache.admit([segment(4), segment(2, 2)]) == 0, "the same words behind another beginning"


def test_a_cache_forgets_the_end_of_the_oldest_first() -> None:
    cache = Cache(4 * BLOCK)
    cache.admit([segment(1, 3)])
    cache.admit([segment(2, 2)])
    assert cache.admit([segment(1, 3)]) == 2 * BLOCK


def test_a_prompt_is_a_chat_request() -> None:
    prompt = (segment(1, role="system"), segment(2), segment(3), segment(4, role="assistant"))
    messages = document(prompt)["messages"]
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


def test_all_to_one_is_seen_as_what_it_is() -> None:
    def first(machines: Sequence[Machine]) -> Chooser:
        return lambda _: machines[0]

    assert play(TRACES["chat"].of(seed=1, servers=4, requests=100), 4, first).skew == pytest.approx(4)
