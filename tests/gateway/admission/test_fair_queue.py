"""The fair queue: shares of service by weight at each level, debts, order within a flow, and the request that gives up its slot."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.fair_queue import CANDIDATES, MANY, MEMORY, PAUSE, FairQueue, Flow, Share
from gateway.snapshot.snapshot import weight_of
from tests.support.examples import examples

KEYS = "abcd"
WEIGHTS = st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0]), min_size=2, max_size=4)
Item = tuple[str, int]


def queue_of(waiting: str, **weights: float) -> FairQueue[Item]:
    """Return a queue with one request for each letter. The letter is its key, and its index is the arrival time."""
    queue = FairQueue[Item]()
    for at, key in enumerate(waiting):
        put(queue, key, at, weights.get(key, 1.0))
    return queue


def put(queue: FairQueue[Item], key: str, at: int, weight: float = 1.0) -> None:
    queue.put((key, at), queue.leaf([Share(key, weight)]), at, 0.0)


def pop(queue: FairQueue[Item], service: float = 1.0) -> Item:
    """Dispatch a request that uses so much service, and ends."""
    item, leaf = queue.pop(0.0)
    queue.settle(leaf, 0.0, service, 0.0)
    return item


def order(queue: FairQueue[Item]) -> str:
    return "".join(pop(queue)[0] for _ in range(len(queue)))


def test_a_flow_whose_tags_are_lowered_by_its_lag_is_next_until_they_are_raised_again() -> None:
    queue = FairQueue[Item]()
    flows = {name: queue.leaf([Share("team " + name, 2.0), Share(name, 0.5)]) for name in "ab"}
    for at, name in enumerate("aabb"):
        queue.put((name, at), flows[name], at, 0.0)
    queue.charge(flows["b"], 40.0, 0.0)
    lag = queue.lag(flows["b"])
    assert (lag, queue.lag(flows["a"])) == (40.0, 0.0)
    queue.charge(flows["b"], -lag - 1.0, 0.0)
    item, leaf = queue.pop(0.0)
    queue.charge(leaf, lag + 1.0, 0.0)
    assert (item, order(queue)) == (("b", 2), "aab")


@pytest.mark.parametrize(
    ("waiting", "weights", "expected"),
    [
        ("aaaa", {}, "aaaa"),
        ("aaaabb", {}, "abab" + "aa"),
        ("aaaabbcc", {}, "abcabcaa"),
        ("aaaabb", {"a": 2.0}, "ababaa"),
        ("aaaabb", {"b": 4.0}, "abbaaa"),
    ],
)
def test_keys_are_served_in_proportion_to_their_weights(waiting: str, weights: dict[str, float], expected: str) -> None:
    assert order(queue_of(waiting, **weights)) == expected


def test_an_empty_queue_has_no_next_request() -> None:
    with pytest.raises(ValueError, match="empty"):
        FairQueue[Item]().pop(0.0)


def test_a_path_is_found_only_if_all_its_flows_exist() -> None:
    queue = FairQueue[Item]()
    leaf = queue.leaf([Share("team", 3.0), Share("key", 2.0)])
    assert queue.path_to(["team", "key"]) == [leaf.parent, leaf] and queue.path_to(["team", "other"]) is None
    assert leaf.parent is not None and list(leaf.parent.children) == ["key"]


def test_a_key_that_arrives_late_gets_no_credit_for_the_past() -> None:
    queue = queue_of("a" * 10)
    assert [pop(queue)[0] for _ in range(4)] == list("aaaa")
    for at in range(10, 14):
        put(queue, "b", at)
    assert order(queue)[:6] in ("bababa", "ababab")


def test_a_key_that_returns_is_not_served_first_again() -> None:
    queue = queue_of("aabb")
    assert pop(queue)[0] == "a"
    queue.remove(("a", 1), queue.leaf([Share("a", 1.0)]), 0.0)
    put(queue, "a", 9)
    assert order(queue)[0] == "b"


def test_a_requeued_request_precedes_later_requests_of_its_key() -> None:
    queue = queue_of("aaab")
    first = pop(queue)
    put(queue, "a", first[1])
    mine = [item[1] for item in (pop(queue) for _ in range(4)) if item[0] == "a"]
    assert mine == [0, 1, 2]


# Debts and pauses


def test_a_debt_stays_while_the_queue_is_empty() -> None:
    queue = queue_of("ab")
    pop(queue, 100.0), pop(queue, 1.0)  # a has used 99 more than b
    assert len(queue) == 0
    for at in range(300):
        put(queue, "a", at)
        put(queue, "b", at)
    assert order(queue)[:98] == "b" * 98


def test_a_debt_is_forgotten_after_the_stated_time() -> None:
    queue = queue_of("ab")
    pop(queue, 100.0), pop(queue, 1.0)
    assert queue.forget(MEMORY) == []
    assert sorted(flow.name for flow in queue.forget(MEMORY + 0.1)) == ["a", "b"]
    for at in range(4):
        put(queue, "a", at)
        put(queue, "b", at)
    assert Counter(order(queue)[:4]) == {"a": 2, "b": 2}


def test_a_flow_with_a_request_in_flight_is_not_forgotten() -> None:
    queue = queue_of("a")
    _, leaf = queue.pop(0.0)
    assert queue.forget(10 * MEMORY) == []
    queue.settle(leaf, 0.0, 1.0, 0.0)
    assert queue.forget(10 * MEMORY) == [leaf]


@pytest.mark.parametrize(("pause", "first"), [(PAUSE / 2, "bbbb"), (3 * PAUSE, "b")])
def test_a_short_pause_costs_a_flow_nothing_and_a_long_one_gives_no_credit(pause: float, first: str) -> None:
    queue, now = FairQueue[Item](), 100.0
    a, b = queue.leaf([Share("a", 1.0)]), queue.leaf([Share("b", 1.0)])
    for number, leaf in enumerate((a, b) * 20):
        queue.put((leaf.name, number), leaf, number, now)
    for _ in range(20):
        _, leaf = queue.pop(now)
        queue.settle(leaf, 0.0, 1.0, now)
    for item in [each for each in queue if each[0] == "b"]:
        queue.remove(item, b, now)
    for step in range(4):  # b misses four requests
        _, leaf = queue.pop(now + pause * (step + 1) / 4)
        queue.settle(leaf, 0.0, 1.0, now + pause * (step + 1) / 4)
        assert leaf is a
    now += pause
    for number in range(100, 110):
        queue.put(("b", number), b, number, now)
    served = ""
    for _ in range(6):
        (name, _), leaf = queue.pop(now)
        queue.settle(leaf, 0.0, 1.0, now)
        served += name
    assert served.startswith(first) and served != "b" * 6
    assert (served.count("b") >= 4) is (first == "bbbb")


def test_service_without_waiting_counts_as_soon_as_the_flow_waits() -> None:
    queue = queue_of("ab")
    pop(queue), pop(queue)
    queue.charge_served(queue.leaf([Share("a", 1.0)]), 10.0, 10.0, 0.0)
    for at in range(30):
        put(queue, "a", at)
        put(queue, "b", at)
    assert order(queue)[:10] == "b" * 10


def test_a_flow_that_was_alone_owes_nothing_to_a_later_flow() -> None:
    """Its service while no request waited has moved virtual time."""
    queue = queue_of("a")
    pop(queue)
    queue.charge_served(queue.leaf([Share("a", 1.0)]), 1000.0, 1.0, 5 * PAUSE)
    for at in range(10):
        queue.put(("a", at), queue.leaf([Share("a", 1.0)]), at, 9 * PAUSE)
        queue.put(("b", at), queue.leaf([Share("b", 1.0)]), at, 9 * PAUSE)
    assert Counter(order(queue)[:6]) == {"a": 3, "b": 3}


def test_estimates_that_were_too_high_do_not_hold_up_a_later_flow() -> None:
    queue = queue_of("aaaaaaaabbbbbbbb")
    in_flight = []
    for _ in range(4):
        _, leaf = queue.pop(0.0)
        queue.charge(leaf, 1000.0, 0.0)
        in_flight.append(leaf)
    put(queue, "c", 90)
    for leaf in in_flight:
        queue.settle(leaf, 1000.0, 1.0, 0.0)
    put(queue, "d", 91)
    assert {"c", "d"} <= set(order(queue)[:6])


# The tree


def served_by(queue: FairQueue[Item], paths: Mapping[str, Sequence[Share]], rounds: int, cost: Mapping[str, float]) -> Counter[str]:
    """Dispatch requests of flows that always wait. Return the service of each."""
    numbers, served = count(), Counter[str]()
    for name, path in paths.items():
        for _ in range(2):
            queue.put((name, next(numbers)), queue.leaf(path), 0, 0.0)
    for _ in range(rounds):
        (name, _), leaf = queue.pop(0.0)
        queue.settle(leaf, 0.0, cost.get(name, 1.0), 0.0)
        served[name] += int(cost.get(name, 1.0))
        queue.put((name, next(numbers)), leaf, 0, 0.0)
    return served


def test_a_team_of_fifty_keys_has_the_share_of_one_key() -> None:
    paths = {f"k{n}": [Share("team", 1.0), Share(f"k{n}", 1.0)] for n in range(50)} | {"alone": [Share("alone", 1.0)]}
    served = served_by(FairQueue(), paths, 1000, {})
    assert served["alone"] == 500 and {served[f"k{n}"] for n in range(50)} == {10}


def test_teams_have_shares_by_weight_whatever_their_requests_cost() -> None:
    paths = {
        "a": [Share("one", 1.0), Share("a", 1.0)],
        "b": [Share("three", 3.0), Share("b", 1.0)],
        "c": [Share("three", 3.0), Share("c", 2.0)],
    }
    served = served_by(FairQueue(), paths, 4000, {"a": 40, "b": 3, "c": 7})
    assert (served["b"] + served["c"]) / served["a"] == pytest.approx(3, rel=0.02)
    assert served["c"] / served["b"] == pytest.approx(2, rel=0.02)


def test_a_flow_of_a_lower_rank_is_served_first() -> None:
    queue = FairQueue[Item]()
    urgent, other = queue.leaf([Share("urgent", 1.0)]), queue.leaf([Share("other", 9.0, rank=1)])
    for number in range(3):
        queue.put(("o", number), other, number, 0.0)
        queue.put(("u", number), urgent, number, 0.0)
    assert order(queue) == "uuuooo"
    queue.put(("o", 7), other, 7, 0.0)
    queue.put(("u", 7), urgent, 7, 0.0)
    queue.flow([Share("other", 9.0, rank=-1)])  # it waits when its rank changes
    assert order(queue) == "ou"


def test_a_leaf_that_becomes_a_parent_still_serves_its_own_requests() -> None:
    queue = FairQueue[Item]()
    key = [Share("key", 1.0)]
    queue.put(("old", 0), queue.leaf(key), 0, 0.0)
    queue.put(("user", 1), queue.leaf([*key, Share("user", 1.0)]), 1, 0.0)
    queue.put(("unnamed", 2), queue.leaf(key), 2, 0.0)
    assert {pop(queue)[0] for _ in range(3)} == {"old", "user", "unnamed"}


def test_the_oldest_request_of_a_flow_at_the_top_is_known() -> None:
    queue = FairQueue[Item]()
    assert queue.oldest_below("team") is None
    for key, since in (("a", 5), ("b", 3), ("c", 1)):
        queue.put((key, since), queue.leaf([Share("other" if key == "c" else "team", 1.0), Share(key, 1.0)]), since, 9.0)
    assert (queue.oldest_below("team"), queue.oldest_below("other"), queue.oldest) == (3, 1, 1)


# The bound


class Schedule:
    """Requests of flows, whose service is estimated at their dispatch and known at their end."""

    def __init__(self, weights: Iterable[float], slots: int, deficit: float = 0.0) -> None:
        self.queue = FairQueue[Item]()
        self.deficit = deficit
        self.flows = [self.queue.leaf([Share(str(number), weight)]) for number, weight in enumerate(weights)]
        self.slots = slots
        self.now = 0.0
        self.numbers = count()
        self.in_flight: list[tuple[Flow[Item], float]] = []
        self.largest: dict[Flow[Item], float] = defaultdict(float)
        self.corrections: dict[Flow[Item], float] = defaultdict(float)
        """The largest correction of one request of a flow."""
        self.together: dict[tuple[Flow[Item], Flow[Item]], float] = {}
        """The difference of the tags of two flows at the time since which both have waited."""

    def arrive(self, leaf: Flow[Item]) -> None:
        number = next(self.numbers)
        self.queue.put((leaf.name, number), leaf, number, self.now)

    def dispatch(self, estimate: float, which: int) -> None:
        """Dispatch a request. With a deficit, it is of any candidate, as if it had the most cached tokens."""
        if len(self.in_flight) < self.slots and len(self.queue):
            candidates = self.queue.candidates(self.deficit)
            assert candidates[0] is self.queue.next()[1] and all(leaf.waiting for leaf in candidates), "no slot is left empty"
            assert len(set(candidates)) == len(candidates)
            preferred = candidates[which % len(candidates)] if self.deficit else None
            _, leaf = self.queue.pop(self.now, preferred=preferred)
            assert preferred in (None, leaf)
            self.queue.charge(leaf, estimate, self.now)
            self.largest[leaf] = max(self.largest[leaf], estimate)
            self.in_flight.append((leaf, estimate))

    def end(self, which: int, actual: float) -> None:
        if self.in_flight:
            leaf, estimate = self.in_flight.pop(which % len(self.in_flight))
            self.corrections[leaf] = max(self.corrections[leaf], abs(actual - estimate))
            self.queue.settle(leaf, estimate, actual, self.now)

    def disconnect(self, leaf: Flow[Item]) -> None:
        if leaf.requests:
            self.queue.remove(next(reversed(leaf.requests)), leaf, self.now)

    def check(self) -> None:
        for f in self.flows:
            for g in self.flows:
                if f is g or not (f.waiting and g.waiting):
                    self.together.pop((f, g), None)
                    continue
                start = self.together.setdefault((f, g), f.tag - g.tag)
                d_f, d_g = self.slots * self.corrections[f], self.slots * self.corrections[g]
                bound = max(start, self.deficit + (self.largest[f] + d_f) / f.weight + d_g / g.weight)
                assert f.tag - g.tag <= bound + 1e-6


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "dispatch", "dispatch", "end", "disconnect", "wait"]), st.integers(0, 9), st.floats(0, 100)
    ),
    max_size=120,
)


@settings(deadline=None, max_examples=examples(200))
@given(weights=WEIGHTS, slots=st.integers(1, 4), deficit=st.sampled_from([0.0, 50.0, 500.0]), events=EVENTS)
def test_two_flows_that_wait_stay_within_the_stated_bound(
    weights: list[float], slots: int, deficit: float, events: list[tuple[str, int, float]]
) -> None:
    schedule = Schedule(weights, slots, deficit)
    for event, which, amount in events:
        leaf = schedule.flows[which % len(schedule.flows)]
        match event:
            case "arrive":
                schedule.arrive(leaf)
            case "dispatch":
                schedule.dispatch(amount, which)
            case "end":
                schedule.end(which, amount)
            case "disconnect":
                schedule.disconnect(leaf)
            case "wait":
                schedule.now += amount / 20
        schedule.check()
        assert len(schedule.queue) == sum(leaf.waiting for leaf in schedule.flows)


@pytest.mark.parametrize("case", ["equal", "1 : 3", "log-normal", "estimates that are always wrong", "answers that are cut"])
def test_shares_are_within_two_percent_of_the_weights(case: str) -> None:
    """Two flows, four slots, until each has had 200 requests."""
    random = Random(7)
    weights = (1.0, 3.0) if case == "1 : 3" else (1.0, 1.0)
    schedule = Schedule(weights, 4)
    served: dict[Flow[Item], float] = defaultdict(float)
    ended = Counter[str]()
    running: list[tuple[Flow[Item], float, float]] = []
    for leaf in schedule.flows * 8:
        schedule.arrive(leaf)
    while min(ended[leaf.name] for leaf in schedule.flows) < 200:
        while len(running) < 4:
            _, leaf = schedule.queue.pop(0.0)
            usual = 400.0 if leaf is schedule.flows[0] else 20.0
            actual = random.lognormvariate(4, 1) if case == "log-normal" else usual
            if case == "answers that are cut" and usual == 400.0:
                actual *= 0.9
            estimate = 100.0 if "wrong" in case else usual
            schedule.queue.charge(leaf, estimate, 0.0)
            running.append((leaf, estimate, actual))
            schedule.arrive(leaf)
        leaf, estimate, actual = running.pop(random.randrange(4))
        schedule.queue.settle(leaf, estimate, actual, 0.0)
        ended[leaf.name] += 1
        served[leaf] += actual
    first, second = (served[leaf] / leaf.weight for leaf in schedule.flows)
    assert first / second == pytest.approx(1, abs=0.02)


def test_a_flow_is_deferred_by_the_deficit_and_no_further() -> None:
    """The caller always prefers ``b``, whose requests cost 10."""
    queue, deferred = queue_of("a" + "b" * 20), 0
    while preferred := next((leaf for leaf in queue.candidates(50.0) if leaf.name == "b"), None):
        _, leaf = queue.pop(0.0, preferred=preferred)
        queue.settle(leaf, 0.0, 10.0, 0.0)
        deferred += 1
    assert deferred == 6 and pop(queue)[0] == "a"


def test_a_flow_that_begins_to_wait_is_not_put_after_a_deferred_one() -> None:
    queue = queue_of("ab" + "b" * 9)
    for _ in range(5):
        [preferred] = [leaf for leaf in queue.candidates(100.0) if leaf.name == "b"]
        queue.settle(queue.pop(0.0, preferred=preferred)[1], 0.0, 10.0, 0.0)
    put(queue, "c", 20)
    assert queue.leaf([Share("c", 1.0)]).tag == queue.leaf([Share("a", 1.0)]).tag == 0.0


def test_candidates_are_bounded_and_of_many_parents() -> None:
    queue = FairQueue[Item]()
    for number in range(1000):
        queue.put(("", number), queue.leaf([Share(f"team {number % 4}", 1.0), Share(f"key {number}", 1.0)]), number, 0.0)
    found = queue.candidates(math.inf)
    assert len(set(found)) == CANDIDATES
    assert Counter(leaf.top.name for leaf in found) == {f"team {number}": CANDIDATES // 4 for number in range(4)}


def test_a_flow_far_behind_has_no_other_candidate() -> None:
    queue = queue_of("abcd")
    for key in "bcd":
        queue.charge(queue.leaf([Share(key, 1.0)]), 100.0, 0.0)
    assert [leaf.name for leaf in queue.candidates(99.0)] == ["a"]
    assert queue.candidates(100.0)[0].name == "a" and len(queue.candidates(100.0)) == 4


def test_classes_are_not_deferred_for_each_other() -> None:
    queue = FairQueue[Item]()
    for name in ("chat", "batch"):
        for key in "ab":
            queue.put((name, ord(key)), queue.leaf([Share(f"class {name}", 1.0), Share(key, 1.0)]), 0, 0.0)
    assert [leaf.top.name for leaf in queue.candidates(math.inf, below_top=True)] == ["class chat"] * 2
    queue.flow([Share("class chat", 1.0, tier=0)]), queue.flow([Share("class batch", 1.0, rank=-1, tier=1)])
    assert {leaf.top.name for leaf in queue.candidates(math.inf, 0, below_top=True)} == {"class chat"}
    assert {leaf.top.name for leaf in queue.candidates(math.inf, 1, below_top=True)} == {"class batch"}


def test_flows_whose_tags_have_grown_leave_the_front_of_the_heap() -> None:
    """With few entries that are right at the front, other flows would never be candidates."""
    queue = queue_of("".join(chr(97 + number % 100) for number in range(400)))
    seen = set()
    for step in range(200):
        candidates = queue.candidates(5.0)
        preferred = candidates[step % len(candidates)]
        queue.settle(queue.pop(0.0, preferred=preferred)[1], 0.0, 4.0, 0.0)
        seen.add(preferred.name)
    assert len(seen) == 100


# No request is lost

STEPS = st.lists(st.tuples(st.sampled_from(["put", "pop", "remove", "displace"]), st.sampled_from(KEYS), st.integers(0, 30)), max_size=80)


@settings(deadline=None)
@given(steps=STEPS)
def test_no_request_is_lost_and_each_key_keeps_its_order(steps: list[tuple[str, str, int]]) -> None:
    queue = FairQueue[Item]()
    flows = {key: queue.leaf([Share(team, 1.0), Share(key, 1.0)]) for key, team in zip(KEYS, "xxyz", strict=True)}
    queued: dict[str, list[Item]] = {key: [] for key in KEYS}
    for at, (step, key, number) in enumerate(steps):
        mine, total = queued[key], sum(map(len, queued.values()))
        if step == "put":
            queue.put((key, at), flows[key], at, 0.0)
            mine.append((key, at))
        elif step == "remove" and mine:
            queue.remove(mine.pop(number % len(mine)), flows[key], 0.0)
        elif step == "pop" and total:
            item = pop(queue, number)
            assert queued[item[0]].pop(0) == item
        elif step == "displace":
            latest = queue.displaced_by(flows[key])
            assert latest is None or (latest == queued[latest[0]][-1] and latest[0] != key)
        assert set(queue) == {item for each in queued.values() for item in each} and len(queue) == sum(map(len, queued.values()))
        assert queue.oldest == min((item[1] for each in queued.values() for item in each), default=None)


def test_a_heap_does_not_grow_with_the_corrections() -> None:
    queue = queue_of("aabb")
    leaf = queue.leaf([Share("a", 1.0)])
    for _ in range(1000):
        queue.charge(leaf, 1.0, 0.0)
        queue.charge(leaf, -1.0, 0.0)
    assert leaf.parent is not None and len(leaf.parent._heap) < 100


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
    queue = queue_of(waiting, **weights)
    assert queue.displaced_by(queue.leaf([Share(comes, weights.get(comes, 1.0))])) == yields


def test_names_that_a_client_invents_do_not_pile_up_and_a_debt_stays() -> None:
    """Refused requests, and clients that disconnect have flows without a request."""
    queue = FairQueue[Item]()
    key = queue.flow([Share("key", 1.0)])
    for number in range(10 * MANY):
        queue.forget_some(key)
        leaf = queue.leaf([Share("key", 1.0), Share(f"user {number}", 1.0)])
        if number < 3:
            queue.put((leaf.name, number), leaf, number, 0.0)
        elif number < 2 * MANY:
            queue.put((leaf.name, number), leaf, number, 0.0)
            queue.remove((leaf.name, number), leaf, 0.0)
    assert len(key.children) <= MANY and len(queue) == 3
    assert pop(queue, 5.0) == ("user 0", 0)
    for number in range(2 * MANY):
        queue.forget_some(key)
        queue.leaf([Share("key", 1.0), Share(f"another {number}", 1.0)])
    assert key.children["user 0"].tag == 5.0
    assert {"user 1", "user 2"} <= key.children.keys()


def test_a_team_of_many_keys_gives_up_a_slot_to_another_team() -> None:
    queue = FairQueue[Item]()
    for number in range(6):
        queue.put((f"k{number}", number), queue.leaf([Share("many", 1.0), Share(f"k{number}", 1.0)]), number, 0.0)
    assert queue.displaced_by(queue.leaf([Share("many", 1.0), Share("k9", 1.0)])) is None
    assert queue.displaced_by(queue.leaf([Share("one", 1.0), Share("x", 1.0)])) is not None


@pytest.mark.parametrize(("priority", "weight"), [(None, 1.0), (0, 1.0), (-1, 2.0), (3, 0.125), (-10, 1024.0), (-99, 1024.0), (99, 2**-10)])
def test_a_step_of_priority_doubles_the_weight(priority: int | None, weight: float) -> None:
    assert weight_of(priority) == weight


def test_pairs_of_keys_that_keep_waiting_differ_by_one_request_each() -> None:
    weights = {"a": 0.25, "b": 1.0, "c": 8.0}
    served = served_by(FairQueue(), {name: [Share(name, weight)] for name, weight in weights.items()}, 999, {})
    for one, other in combinations(weights, 2):
        assert abs(served[one] / weights[one] - served[other] / weights[other]) <= 1 / weights[one] + 1 / weights[other] + 1e-9


# Deadlines


def test_the_requests_of_a_leaf_are_ordered_by_deadline_once_one_has_a_deadline() -> None:
    queue, dice = FairQueue[Item](), Random(1)
    queue.longest_wait = 60.0
    leaf = queue.leaf([Share("a", 1.0)])
    deadlines = {("a", number): float(60 + number) for number in range(3)}
    for number in range(3):
        queue.put(("a", number), leaf, number, number)
    for number in range(3, 400):
        deadlines["a", number] = dice.uniform(number, number + 60.0)
        queue.put(("a", number), leaf, number, number, deadlines["a", number])
        if number % 8:
            item = dice.choice(list(deadlines))
            queue.remove(item, leaf, number)
            del deadlines[item]
        assert leaf.first == min(deadlines, key=deadlines.__getitem__)
    assert len(leaf._by_deadline) <= 4 * len(deadlines)
    assert [queue.pop(400.0)[0] for _ in range(len(queue))] == sorted(deadlines, key=deadlines.__getitem__)
    assert not queue.waits_up_to(math.inf)


def test_the_expected_service_of_a_leaf_is_that_of_the_flows_above_it_too() -> None:
    queue = FairQueue[Item]()
    leaf = queue.leaf([Share("team", 1.0), Share("a", 1.0)])
    leaf.expect(2.0)
    leaf.expect(-0.5)
    assert leaf.parent is not None
    assert leaf.backlog == leaf.parent.backlog == 1.5
