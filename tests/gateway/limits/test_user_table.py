"""The counts of end users in bounded memory: use is never forgotten, and never counts for another end user."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from time import monotonic
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.limits.decision import Amounts, Holder
from gateway.limits.end_users import LONGEST_NAME
from gateway.limits.shared_counts import Buckets, BucketsFullError, CountsMovedError
from gateway.limits.states import StoreResult
from gateway.limits.user_table import UserTable, note_store_use, shown_users, users_held
from gateway.limits.windows import Moment, moment
from gateway.snapshot.snapshot import Allowance, Budget, Limits, PerUser
from tests.support.examples import examples

WALL = 1_800_000_000.0 // 86400 * 86400 + 1000.0
"""1,000 seconds after the start of a day."""
HOUR = Budget("1h", 3600.0, tokens=300)
LIMITS = Limits(requests_per_minute=10, tokens_per_minute=1000, tokens_per_day=500, concurrent=3, budgets=(HOUR,))
ONE = Amounts(requests=1, slots=1, tokens=10)
USED = Amounts(requests=1, tokens=10)


def each(most: int = 4, limits: Limits = LIMITS) -> Allowance:
    return Allowance("key a each user", limits, users=PerUser(max_users=most))


def at(seconds: float) -> Moment:
    return moment(1000.0 + seconds, WALL + seconds)


@contextmanager
def two_workers(allowance: Allowance) -> Iterator[tuple[tuple[Buckets, UserTable], tuple[Buckets, UserTable]]]:
    with (
        closing(Buckets.create("test", 2)) as control,
        closing(Buckets.inherited(os.dup(control.fd), 0)) as first,
        closing(Buckets.inherited(os.dup(control.fd), 1)) as second,
    ):
        yield (first, UserTable(first, allowance, 0.75)), (second, UserTable(second, allowance, 0.75))


def placed(table: UserTable, name: str, seconds: float) -> Holder:
    holder = table.allocate(name, at(seconds))
    assert holder is not None
    return holder


def used(buckets: Buckets, holder: Holder, seconds: float) -> list[float]:
    """Return the used tokens of the budgets: of the day, and of the hour."""
    return [state.used for state in buckets.budget_states(holder, at(seconds))]


def use(buckets: Buckets, holder: Holder, seconds: float, tokens: int = 10) -> None:
    reservation_ends: dict[int, float] = {}
    amounts = Amounts(1, 1, tokens)
    assert buckets.reserve_for_user([(holder, amounts)], at(seconds), reservation_ends) is None
    buckets.settle([(holder, amounts)], reservation_ends, Amounts(1, 0, tokens), at(seconds), at(seconds).now)


def test_workers_share_the_counts_of_an_end_user() -> None:
    with two_workers(each()) as ((first, one), (second, other)):
        use(first, placed(one, "jane", 0), 0)
        use(second, placed(other, "jane", 1), 1)
        use(second, placed(other, "joe", 1), 1)
        assert used(first, placed(one, "jane", 1), 1) == [20, 20] == used(second, placed(other, "jane", 1), 1)
        assert used(first, placed(one, "joe", 1), 1) == [10, 10]
        assert placed(one, "jane", 1).name == "key a user jane" and users_held(first, ["key a each user"]) == {"key a": 2}


def test_at_the_bound_only_an_end_user_without_use_makes_room() -> None:
    with closing(Buckets.private()) as buckets:
        table = UserTable(buckets, each(2), 0.75)
        use(buckets, placed(table, "jane", 0), 0)
        use(buckets, placed(table, "joe", 0), 0)
        for late in (1.5, 120.0, 3700.0, 85_000.0):
            assert table.allocate("ann", at(late)) is None, "the day still counts"
        assert users_held(buckets, ["key a each user"]) == {"key a": 2}
        ann = placed(table, "ann", 86_400.0)
        assert used(buckets, ann, 86_400.0) == [0, 0]
        assert placed(table, "bob", 86_400.0).offset != ann.offset == placed(table, "ann", 86_400.0).offset
        assert table.allocate("jane", at(86_400.0)) is None, "both are held"
        assert users_held(buckets, ["key a each user"]) == {"key a": 2}


@pytest.mark.parametrize(
    ("limits", "free_at"),
    [
        (Limits(requests_per_minute=1), 60.0),
        (Limits(tokens_per_minute=10), 60.0),
        (Limits(concurrent=3), 0.0),
        (Limits(budgets=(HOUR,)), 3600.0 * 25 / 24),
    ],
    ids=["requests", "tokens", "concurrent", "rolling"],
)
def test_use_is_held_as_long_as_it_counts(limits: Limits, free_at: float) -> None:
    with closing(Buckets.private()) as buckets:
        table = UserTable(buckets, each(1, limits), 0.75)
        use(buckets, placed(table, "jane", 0), 0)
        assert table.allocate("joe", at(max(free_at - 200, free_at * 0.9))) is None
        placed(table, "joe", max(free_at, 2.0))


def test_a_request_in_flight_holds_the_counts() -> None:
    with two_workers(each(1, Limits(concurrent=2))) as ((first, one), (_, other)):
        jane, reservation_ends = placed(one, "jane", 0), dict[int, float]()
        assert first.reserve_for_user([(jane, ONE)], at(0), reservation_ends) is None
        assert other.allocate("joe", at(1e6)) is None
        first.settle([(jane, ONE)], reservation_ends, USED, at(0), at(1e6).now)
        placed(other, "joe", 1e6)


def test_use_in_the_limits_store_holds_the_counts() -> None:
    with closing(Buckets.private()) as buckets:
        table = UserTable(buckets, each(1), 0.75)
        jane = placed(table, "jane", 0)
        (state, _) = buckets.budget_states(jane, at(0))
        note_store_use(buckets, [jane], StoreResult(None, [(LIMITS, 0.0, 0.0)], [(jane, state)]))
        until = _until(buckets, jane)
        assert table.allocate("joe", moment(until - 1, WALL)) is None
        joe = table.allocate("joe", moment(until + 1, WALL))
        assert joe is not None
        note_store_use(buckets, [jane], StoreResult(None, [(LIMITS, 0.0, 1e9)]))
        assert _until(buckets, joe) < 1e9, "counts that another end user has now stay unchanged"


def test_the_latest_use_in_the_limits_store_counts() -> None:
    with closing(Buckets.private()) as buckets:
        jane = placed(UserTable(buckets, each(1), 0.75), "jane", 0)
        for full, reset in ((0.0, 120.0), (monotonic() + 500.0, 500.0), (0.0, 500.0)):
            note_store_use(buckets, [jane], StoreResult(None, [(LIMITS, 0.0, full)]))
            assert _until(buckets, jane) == pytest.approx(monotonic() + reset, abs=30)


def test_a_worker_that_ends_holds_no_slots_of_end_users() -> None:
    with two_workers(each(1, Limits(concurrent=2))) as ((first, one), (second, other)):
        assert first.reserve_for_user([(placed(one, "jane", 0), ONE)], at(0), {}) is None
        jane = placed(other, "jane", 0)
        assert second.in_flight(jane) == 1
        with closing(Buckets.inherited(os.dup(first.fd), 0)):
            assert second.in_flight(jane) == 0, "a worker that begins has no requests in flight"


def test_an_observer_sees_the_end_users_by_name_without_a_lock() -> None:
    names = ["jane", "j%C3%BCrgen", "x" * LONGEST_NAME]
    with two_workers(each()) as ((first, one), (second, other)), closing(Buckets.inherited(os.dup(first.fd), 0)) as control:
        for number, name in enumerate(names):
            use(first, placed(one, name, 0), 0, 10 + number)
        assert users_seen(control, 0) == {f"key a user {name}": [10 + number, 10 + number] for number, name in enumerate(names)}
        assert users_seen(control, 5000) == {f"key a user {name}": [10 + number, 0] for number, name in enumerate(names)}
        for name in ("ann", "bob", "cem", "dan"):  # on the next day, they get the counts of the others
            use(second, placed(other, name, 86_400), 86_400)
        assert users_seen(control, 86_400) == {f"key a user {name}": [10, 10] for name in ("ann", "bob", "cem", "dan")}


def test_an_observer_leaves_an_end_user_out_whose_counts_move_meanwhile() -> None:
    with closing(Buckets.private()) as buckets:
        table = UserTable(buckets, each(1), 0.75)
        jane = placed(table, "jane", 0)
        assert list(users_seen(buckets, 0)) == ["key a user jane"]
        number = buckets.number_cell(jane)
        buckets.cells[number] += 1  # a worker has written the number of another end user, but not yet its name
        assert users_seen(buckets, 0) == {}
        buckets.cells[number] -= 1

        class UsedMeanwhile:
            """A moment that is read after the name: a worker gives the counts to another end user before the use is read."""

            def __getattr__(self, name: str) -> object:
                use(buckets, placed(table, "joe", 86_400), 86_400)
                return getattr(at(86_400), name)

        assert users_seen(buckets, 86_400, cast(Moment, UsedMeanwhile())) == {}, "the use is that of another end user"


def users_seen(buckets: Buckets, seconds: float, observed: Moment | None = None) -> dict[str, list[float]]:
    shown = shown_users(buckets, each(), range(10), observed or at(seconds))
    return {user.allowance.holder: [state.used for state in user.states] for user in shown}


def _until(buckets: Buckets, holder: Holder) -> float:
    return buckets.cells[buckets.number_cell(holder) + 1]


def test_counts_that_another_worker_has_given_away_are_not_used() -> None:
    with two_workers(each(1)) as ((first, one), (second, other)):
        jane = placed(one, "jane", 0)
        joe = placed(other, "joe", 2)
        assert jane.offset == joe.offset
        with pytest.raises(CountsMovedError):
            first.reserve_for_user([(jane, ONE)], at(2), {})
        use(second, joe, 2)
        assert one.allocate("jane", at(2)) is None
        assert used(first, placed(one, "joe", 2), 2) == [10, 10]


def test_a_new_end_user_keeps_its_counts_for_a_moment() -> None:
    with closing(Buckets.private()) as buckets:
        table = UserTable(buckets, each(1), 0.75)
        placed(table, "jane", 0)
        assert table.allocate("joe", at(0.5)) is None
        placed(table, "joe", 1.5)


def test_a_worker_that_missed_many_changes_reads_them_all() -> None:
    with two_workers(each(3, Limits(concurrent=1))) as ((_, one), (_, other)):
        placed(other, "first", 0)
        for number in range(2000):
            placed(one, f"u{number}", 2.0 * number)
        held = {placed(one, f"u{number}", 4000).offset for number in (1997, 1998, 1999)}
        assert {placed(other, f"u{number}", 4000).offset for number in (1997, 1998, 1999)} == held and len(held) == 3


def test_a_reload_may_add_a_window_and_change_the_bound() -> None:
    with closing(Buckets.private()) as buckets:
        before = UserTable(buckets, each(2), 0.75)
        use(buckets, placed(before, "jane", 0), 0)
        without = UserTable(buckets, each(2, Limits(requests_per_minute=10)), 0.75)
        placed(without, "joe", 0)
        ann = placed(without, "ann", 4000)
        again = UserTable(buckets, each(3), 0.75)
        assert used(buckets, placed(again, "ann", 4000), 4000) == [0, 0], f"what {ann.offset} counted before is not hers"
        assert placed(again, "third", 4000).offset not in {ann.offset}
        fewer = UserTable(buckets, each(1), 0.75)
        assert placed(fewer, "third", 4000) is not None, "it stays until it has no use"


def test_the_memory_is_a_bound_too() -> None:
    memory = mmap.mmap(-1, 1 << 15)
    struct.pack_into("<QQ", memory, 0, 1, 0)
    buckets = Buckets(memory)
    table = UserTable(buckets, each(1000), 0.75)
    found = [table.allocate(f"u{number}", at(0)) for number in range(100)]
    count = sum(each is not None for each in found)
    assert 0 < count < 100 and found[count:] == [None] * (100 - count)
    assert buckets.holder("key b", LIMITS).offset > 0, "there is memory for configured holders"
    with pytest.raises(BucketsFullError):
        UserTable(buckets, Allowance("key b each user", LIMITS, users=PerUser()), 0.75)


@given(steps=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5), st.floats(0.0, 4000.0), st.integers(0, 60)), max_size=60))
@settings(max_examples=examples(100))
def test_an_end_user_never_loses_use_and_never_gets_that_of_another(steps: list[tuple[int, int, float, int]]) -> None:
    """The model has what each end user has used of the day. Its counts are the same, or it has none at the bound."""
    model: dict[str, int] = {}
    with two_workers(each(3, Limits(tokens_per_day=10**9, budgets=(Budget("1h", 3600.0, tokens=10**9),)))) as workers:
        now, day = 0.0, 0
        for worker, number, passed, tokens in steps:
            now += passed
            if (now + 1000.0) // 86400 != day:
                day, model = int((now + 1000.0) // 86400), {}
            (buckets, table), name = workers[worker], f"u{number}"
            holder = table.allocate(name, at(now))
            if holder is None:
                assert not model.get(name), "an end user with use keeps its counts"
                continue
            assert used(buckets, holder, now)[0] == model.get(name, 0)
            use(buckets, holder, now, tokens)
            model[name] = model.get(name, 0) + tokens
