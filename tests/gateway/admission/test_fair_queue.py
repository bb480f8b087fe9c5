"""Whose turn it is: shares by weight, order within a key, and who gives his place up."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.fair_queue import FairQueue
from gateway.snapshot.snapshot import weight_of

KEYS = "abcd"
WEIGHTS = st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0]), min_size=2, max_size=4)


def queue_of(waiting: str, **weights: float) -> FairQueue[tuple[str, int]]:
    """The letters are keys; each one's place is its time of arrival."""
    queue = FairQueue[tuple[str, int]]()
    for at, key in enumerate(waiting):
        queue.put((key, at), key, weights.get(key, 1.0), at)
    return queue


def order(queue: FairQueue[tuple[str, int]]) -> str:
    return "".join(queue.pop()[0] for _ in range(len(queue)))


@pytest.mark.parametrize(
    ("waiting", "weights", "expected"),
    [
        ("aaaa", {}, "aaaa"),
        ("aaaabb", {}, "abab" + "aa"),
        ("aaaabbcc", {}, "abcabcaa"),
        ("aaaabb", {"a": 2.0}, "abaaba"),
        ("aaaabb", {"b": 4.0}, "abbaaa"),
    ],
)
def test_keys_take_turns_by_their_weights(waiting: str, weights: dict[str, float], expected: str) -> None:
    assert order(queue_of(waiting, **weights)) == expected


def test_one_who_comes_later_is_not_owed_what_he_did_not_wait_for() -> None:
    queue = queue_of("a" * 10)
    assert [queue.pop()[0] for _ in range(4)] == list("aaaa")
    for at in range(10, 14):
        queue.put(("b", at), "b", 1.0, at)
    assert order(queue)[:6] in ("bababa", "ababab")


def test_one_who_leaves_and_comes_back_does_not_come_first_again() -> None:
    queue = queue_of("aabb")
    assert queue.pop()[0] == "a"
    queue.remove(("a", 1), "a")
    queue.put(("a", 9), "a", 1.0, 9)
    assert order(queue)[0] == "b"


def test_one_who_had_a_turn_to_no_avail_is_before_those_of_his_key_who_came_later() -> None:
    queue = queue_of("aaab")
    first = queue.pop()
    queue.put(first, "a", 1.0, first[1])
    mine = [item[1] for item in (queue.pop() for _ in range(4)) if item[0] == "a"]
    assert mine == [0, 1, 2]


@settings(deadline=None)
@given(weights=WEIGHTS, turns=st.integers(1, 200))
def test_keys_that_keep_waiting_have_shares_by_weight(weights: list[float], turns: int) -> None:
    of, queue, had = dict(zip(KEYS, weights, strict=False)), FairQueue[tuple[str, int]](), Counter[str]()
    for key, weight in of.items():
        for at in range(2):
            queue.put((key, at), key, weight, at)
    for turn in range(turns):
        key, _ = queue.pop()
        had[key] += 1
        queue.put((key, turn + 2), key, of[key], turn + 2)
    for one, other in combinations(of, 2):
        apart = abs(had[one] / of[one] - had[other] / of[other])
        assert apart <= 1 / of[one] + 1 / of[other] + 1e-9


STEPS = st.lists(st.tuples(st.sampled_from(["put", "pop", "remove", "yield"]), st.sampled_from(KEYS), st.integers(0, 30)), max_size=80)


@settings(deadline=None)
@given(steps=STEPS)
def test_nobody_is_lost_and_a_keys_own_keep_their_order(steps: list[tuple[str, str, int]]) -> None:
    queue = FairQueue[tuple[str, int]]()
    there: dict[str, list[tuple[str, int]]] = {key: [] for key in KEYS}
    for at, (step, key, number) in enumerate(steps):
        mine, total = there[key], sum(map(len, there.values()))
        if step == "put":
            queue.put((key, at), key, 1.0, at)
            mine.append((key, at))
        elif step == "remove" and mine:
            queue.remove(mine.pop(number % len(mine)), key)
        elif step == "pop" and total:
            item = queue.pop()
            assert there[item[0]].pop(0) == item
        elif step == "yield":
            latest = queue.displaced_by(key, 1.0)
            assert latest is None or (latest == there[latest[0]][-1] and latest[0] != key and len(there[latest[0]]) > 1)
        assert set(queue) == {item for each in there.values() for item in each} and len(queue) == sum(map(len, there.values()))
        assert queue.oldest == min((item[1] for each in there.values() for item in each), default=None)


@pytest.mark.parametrize(
    ("waiting", "weights", "comes", "yields"),
    [
        ("aaaa", {}, "a", None),
        ("aaaa", {}, "b", ("a", 3)),
        ("aabb", {}, "a", None),
        ("aaab", {}, "b", ("a", 2)),
        ("aab", {}, "b", None),
        ("abcd", {}, "e", None),
        ("aabb", {"a": 0.5}, "b", ("a", 1)),
        ("aaaaaa", {"a": 8.0}, "b", ("a", 5)),
        ("aaaaaab", {"a": 8.0}, "b", None),
    ],
)
def test_who_has_most_gives_up_a_place(waiting: str, weights: dict[str, float], comes: str, yields: tuple[str, int] | None) -> None:
    assert queue_of(waiting, **weights).displaced_by(comes, weights.get(comes, 1.0)) == yields


@pytest.mark.parametrize(("priority", "weight"), [(None, 1.0), (0, 1.0), (-1, 2.0), (3, 0.125), (-10, 1024.0), (-99, 1024.0), (99, 2**-10)])
def test_a_step_of_priority_doubles_the_weight(priority: int | None, weight: float) -> None:
    assert weight_of(priority) == weight
