"""The order of the fair queue: shares by weight, order within a key, and the request that gives up its slot."""

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
    """Return a queue with one request for each letter. The letter is its key, and its index is the arrival time."""
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
def test_keys_are_served_in_proportion_to_their_weights(waiting: str, weights: dict[str, float], expected: str) -> None:
    assert order(queue_of(waiting, **weights)) == expected


def test_a_key_that_arrives_late_gets_no_credit_for_the_past() -> None:
    queue = queue_of("a" * 10)
    assert [queue.pop()[0] for _ in range(4)] == list("aaaa")
    for at in range(10, 14):
        queue.put(("b", at), "b", 1.0, at)
    assert order(queue)[:6] in ("bababa", "ababab")


def test_a_key_that_returns_is_not_served_first_again() -> None:
    queue = queue_of("aabb")
    assert queue.pop()[0] == "a"
    queue.remove(("a", 1), "a")
    queue.put(("a", 9), "a", 1.0, 9)
    assert order(queue)[0] == "b"


def test_a_requeued_request_precedes_later_requests_of_its_key() -> None:
    queue = queue_of("aaab")
    first = queue.pop()
    queue.put(first, "a", 1.0, first[1])
    mine = [item[1] for item in (queue.pop() for _ in range(4)) if item[0] == "a"]
    assert mine == [0, 1, 2]


@settings(deadline=None)
@given(weights=WEIGHTS, rounds=st.integers(1, 200))
def test_keys_that_keep_waiting_have_shares_by_weight(weights: list[float], rounds: int) -> None:
    weight_by_key, queue, served = dict(zip(KEYS, weights, strict=False)), FairQueue[tuple[str, int]](), Counter[str]()
    for key, weight in weight_by_key.items():
        for at in range(2):
            queue.put((key, at), key, weight, at)
    for number in range(rounds):
        key, _ = queue.pop()
        served[key] += 1
        queue.put((key, number + 2), key, weight_by_key[key], number + 2)
    for one, other in combinations(weight_by_key, 2):
        difference = abs(served[one] / weight_by_key[one] - served[other] / weight_by_key[other])
        assert difference <= 1 / weight_by_key[one] + 1 / weight_by_key[other] + 1e-9


STEPS = st.lists(st.tuples(st.sampled_from(["put", "pop", "remove", "yield"]), st.sampled_from(KEYS), st.integers(0, 30)), max_size=80)


@settings(deadline=None)
@given(steps=STEPS)
def test_no_request_is_lost_and_each_key_keeps_its_order(steps: list[tuple[str, str, int]]) -> None:
    queue = FairQueue[tuple[str, int]]()
    queued: dict[str, list[tuple[str, int]]] = {key: [] for key in KEYS}
    for at, (step, key, number) in enumerate(steps):
        mine, total = queued[key], sum(map(len, queued.values()))
        if step == "put":
            queue.put((key, at), key, 1.0, at)
            mine.append((key, at))
        elif step == "remove" and mine:
            queue.remove(mine.pop(number % len(mine)), key)
        elif step == "pop" and total:
            item = queue.pop()
            assert queued[item[0]].pop(0) == item
        elif step == "yield":
            latest = queue.displaced_by(key, 1.0)
            assert latest is None or (latest == queued[latest[0]][-1] and latest[0] != key and len(queued[latest[0]]) > 1)
        assert set(queue) == {item for each in queued.values() for item in each} and len(queue) == sum(map(len, queued.values()))
        assert queue.oldest == min((item[1] for each in queued.values() for item in each), default=None)


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
def test_the_key_with_the_most_requests_gives_up_a_slot(
    waiting: str, weights: dict[str, float], comes: str, yields: tuple[str, int] | None
) -> None:
    assert queue_of(waiting, **weights).displaced_by(comes, weights.get(comes, 1.0)) == yields


@pytest.mark.parametrize(("priority", "weight"), [(None, 1.0), (0, 1.0), (-1, 2.0), (3, 0.125), (-10, 1024.0), (-99, 1024.0), (99, 2**-10)])
def test_a_step_of_priority_doubles_the_weight(priority: int | None, weight: float) -> None:
    assert weight_of(priority) == weight
