"""Follow an engine over a network that loses batches, and through replays and restarts of the engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kv_engine import PlainEngine
from tests.upstream.vllm.kv_events.test_blocks import SIZE, key_of
from upstream.vllm.kv_events.blocks import Changes
from upstream.vllm.kv_events.follower import EngineFollower

STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(("arrives", "lost")), st.lists(st.integers(0, 1), min_size=SIZE, max_size=12)),
        st.tuples(st.sampled_from(("restart", "clear")), st.just([])),
    ),
    max_size=40,
)


class Followed:
    """A follower, and the keys that it has reported. ``dropped``: batches of each replay that the engine's socket drops."""

    def __init__(self, engine: PlainEngine, *, can_replay: bool = True, dropped: int = 0) -> None:
        self.follower = EngineFollower(can_replay=can_replay)
        self.engine, self.dropped = engine, dropped
        self.reported: set[int] = set()
        self.replays: list[int] = []
        self.apply(self.follower.restart())
        self.replay()

    def apply(self, changes: list[Changes]) -> None:
        for each in changes:
            if each.cleared:
                self.reported.clear()
            self.reported = (self.reported - set(each.removed)) | set(each.inserted)
        assert self.reported == set(self.follower.blocks.keys)

    def add(self, batch: tuple[int, bytes] | None) -> None:
        if batch is not None:
            self.apply(self.follower.add(*batch))
            self.replay()

    def replay(self) -> None:
        """Replay as the follower requests. Each request must bring it forward, so that a few are enough."""
        attempts = 0
        while (start := self.follower.replay_from) is not None:
            attempts += 1
            assert attempts < 5 + len(self.engine.retained)
            self.replays.append(start)
            batches = [batch for batch in self.engine.retained if batch[0] >= start]
            if len(batches) > 3 + self.dropped:  # what is lost at the end, only the next batch shows
                del batches[3 : 3 + self.dropped]
            for batch in batches:
                self.apply(self.follower.add_replayed(*batch))
            self.apply(self.follower.end_replay())

    @property
    def truth(self) -> set[int]:
        return {key_of(prefix) for prefix in self.engine.cached}


def prompts(engine: PlainEngine, count: int, start: int = 0) -> list[tuple[int, bytes]]:
    """Compute different prompts. Returns their batches."""
    found = (engine.compute([number] * SIZE)[1] for number in range(start, start + count))
    return [batch for batch in found if batch is not None]


@pytest.mark.parametrize("dropped", [0, 1, 5])
def test_what_was_stored_before_is_replayed(dropped: int) -> None:
    engine = PlainEngine(block_size=SIZE)
    prompts(engine, 20)
    followed = Followed(engine, dropped=dropped)
    assert len(followed.reported) == 20 and followed.reported == followed.truth


def test_a_gap_is_replayed_from_the_last_batch() -> None:
    engine = PlainEngine(block_size=SIZE)
    followed = Followed(engine)
    batches = prompts(engine, 10)
    for index in (0, 1, 2, 7, 8, 9):
        followed.add(batches[index])
    assert followed.replays == [0, 2] and followed.follower.gaps == 1
    assert followed.reported == followed.truth


def test_what_the_buffer_no_longer_has_is_forgotten() -> None:
    engine = PlainEngine(block_size=SIZE, retained=3)
    followed = Followed(engine)
    batches = prompts(engine, 10)
    followed.add(batches[0])
    followed.add(batches[9])
    assert len(followed.reported) == 3 and followed.reported < followed.truth


def test_without_a_replay_endpoint_a_gap_forgets_everything() -> None:
    engine = PlainEngine(block_size=SIZE)
    followed = Followed(engine, can_replay=False)
    batches = prompts(engine, 10)
    for index in (0, 1, 5, 6):
        followed.add(batches[index])
    assert len(followed.reported) == 2 and followed.replays == []


def test_a_new_engine_replaces_everything_that_was_known() -> None:
    before = PlainEngine(block_size=SIZE)
    followed = Followed(before)
    for batch in prompts(before, 10):
        followed.add(batch)
    for count in (3, 10, 11, 30):  # fewer batches than before, as many, and more
        engine = followed.engine = PlainEngine(block_size=SIZE)
        *_, last = prompts(engine, count, start=100)
        followed.add(last)
        if last[0] != 10:  # the number of a next batch: only the new connection tells it from one
            assert followed.reported == followed.truth
        followed.apply(followed.follower.restart())
        assert followed.reported == set()
        followed.replay()
        assert followed.reported == followed.truth


def test_a_batch_that_nothing_brings_back_ends_the_replays() -> None:
    engine = PlainEngine(block_size=SIZE)
    followed = Followed(engine)
    batches = prompts(engine, 9)
    del engine.retained[4]
    for batch in (*batches[:2], batches[8]):
        followed.add(batch)
    assert len(followed.reported) == 4 and followed.reported < followed.truth
    assert len(followed.replays) <= 3


def test_batches_that_arrive_during_a_replay_wait_for_its_end() -> None:
    engine = PlainEngine(block_size=SIZE)
    old = prompts(engine, 5)
    follower = EngineFollower()
    follower.restart()
    new = prompts(engine, 5, start=5)
    assert [changes for batch in (old[4], *new) for changes in follower.add(*batch)] == []
    inserted = [key for batch in old for changes in follower.add_replayed(*batch) for key in changes.inserted]
    assert len(inserted) == 5
    assert len(follower.end_replay()) == 5 and follower.replay_from is None
    assert set(follower.blocks.keys) == {key_of(prefix) for prefix in engine.cached}


def test_what_does_not_fit_into_the_memory_of_a_replay_is_replayed_next() -> None:
    engine = PlainEngine(block_size=SIZE, capacity=10, retained=20_000)
    followed = Followed(engine)
    follower = followed.follower
    follower.check()
    for batch in prompts(engine, 10_010):
        assert follower.add(*batch) == []
    followed.apply(follower.end_replay())
    while follower.replay_from is not None:
        followed.replay()
    assert follower.last_number < 10_009
    followed.add(prompts(engine, 1, start=20_000)[0])
    assert followed.reported == followed.truth


def test_a_check_finds_an_engine_with_fewer_batches() -> None:
    before = PlainEngine(block_size=SIZE)
    followed = Followed(before)
    for batch in prompts(before, 10):
        followed.add(batch)
    followed.engine = PlainEngine(block_size=SIZE)
    prompts(followed.engine, 3, start=100)
    followed.follower.check()
    followed.replay()
    assert followed.reported == followed.truth and followed.replays == [0, 9, 0]


def test_a_replay_that_is_cut_off_continues_with_its_last_batch() -> None:
    engine = PlainEngine(block_size=SIZE)
    batches = prompts(engine, 10)
    follower = EngineFollower()
    follower.restart()
    for batch in batches[:4]:
        follower.add_replayed(*batch)
    follower.request_replay()
    assert [follower.replay_from] == [3]
    for batch in batches[3:]:
        follower.add_replayed(*batch)
    follower.end_replay()
    assert follower.replay_from is None and set(follower.blocks.keys) == {key_of(prefix) for prefix in engine.cached}


def test_an_engine_without_a_replay_endpoint_is_not_checked() -> None:
    follower = EngineFollower(can_replay=False)
    follower.restart()
    follower.check()
    assert follower.replay_from is None


def test_an_invalid_batch_is_an_error() -> None:
    follower = EngineFollower(can_replay=False)
    follower.restart()
    with pytest.raises(ValueError, match="no batch"):
        follower.add(0, b"?")


@given(STEPS, st.integers(1, 12), st.integers(0, 3))
def test_a_new_connection_always_finds_what_the_engine_has(steps: list[Any], capacity: int, dropped: int) -> None:
    followed = Followed(PlainEngine(block_size=SIZE, capacity=capacity), dropped=dropped)
    for step, tokens in steps:
        if step == "restart":
            followed.engine = PlainEngine(block_size=SIZE, capacity=capacity)
        batch = followed.engine.clear() if step == "clear" else followed.engine.compute(tokens)[1]
        if step == "arrives":
            followed.add(batch)
    followed.apply(followed.follower.restart())
    followed.replay()
    assert followed.reported == followed.truth


@given(STEPS, st.integers(1, 12))
def test_the_next_batch_repairs_lost_ones(steps: list[Any], capacity: int) -> None:
    followed = Followed(PlainEngine(block_size=SIZE, capacity=capacity))
    for step, tokens in steps:
        batch = followed.engine.compute(tokens)[1] if tokens else followed.engine.clear()
        if step != "lost":
            followed.add(batch)
            if batch is not None:
                assert followed.reported == followed.truth
