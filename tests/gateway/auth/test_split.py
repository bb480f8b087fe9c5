"""Which model a text means, how many texts each model gets, and which texts move when weights change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth.split import Split

TEXTS = [f"team-{number}" for number in range(20_000)]
DEVIATIONS = 5.0
WEIGHTS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 1000), min_size=1).filter(lambda weights: any(weights.values()))


def chosen(weights: Mapping[str, int], texts: Sequence[str] = TEXTS) -> list[str]:
    split = Split([(name, name, weight) for name, weight in weights.items()])
    return [split.choose(text) for text in texts]


@pytest.mark.parametrize("weights", [{"a": 95, "b": 5}, {"a": 1, "b": 1, "c": 2}, {"a": 999, "b": 1}, {"a": 3}, {"a": 0, "b": 7}])
def test_each_model_has_its_share(weights: dict[str, int]) -> None:
    counts, whole = Counter(chosen(weights)), sum(weights.values())
    for name, weight in weights.items():
        expected = len(TEXTS) * weight / whole
        assert abs(counts[name] - expected) <= DEVIATIONS * (expected * (1 - weight / whole)) ** 0.5, (name, counts[name], expected)


@given(WEIGHTS, st.text())
def test_the_same_text_has_the_same_model_whatever_the_order_and_the_scale(weights: dict[str, int], text: str) -> None:
    (one,) = chosen(weights, [text])
    assert weights[one] > 0
    assert chosen(dict(reversed(weights.items())), [text]) == [one]
    assert chosen(weights, [text]) == [one]


def test_a_change_of_weight_moves_only_the_share_that_must_move() -> None:
    before, after = chosen({"a": 95, "b": 5}), chosen({"a": 90, "b": 10})
    moved = Counter(pair for pair in zip(before, after, strict=True) if pair[0] != pair[1])
    assert moved.keys() == {("a", "b")}, "nothing goes back"
    assert abs(moved["a", "b"] - 0.05 * len(TEXTS)) <= DEVIATIONS * (0.05 * len(TEXTS)) ** 0.5


@given(WEIGHTS, st.sampled_from("abcd"), st.integers(0, 1000))
def test_a_change_of_one_weight_moves_requests_in_one_direction(weights: dict[str, int], name: str, weight: int) -> None:
    changed = weights | {name: weight}
    if not any(changed.values()):
        return
    texts = TEXTS[:200]
    moved = {pair for pair in zip(chosen(weights, texts), chosen(changed, texts), strict=True) if pair[0] != pair[1]}
    assert all((pair[1] if weight > weights.get(name, 0) else pair[0]) == name for pair in moved)
