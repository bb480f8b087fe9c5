"""Long work yields: one step per event-loop iteration, one large body at a time, and no step that delays other requests."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Generator
from functools import partial
from time import thread_time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.system.steps import MEDIUM, SLICE, SMALL, Steps, finished
from tests.support.bodies import LIMIT, POSITIONS, TEXTS, UNITS, filled, processed, text
from tests.support.examples import examples
from tests.support.running import until
from upstream.http.inline_task import InlineTask

TOLERANCE = 5
"""The factor by which a machine may be slower than the one on which the limits were measured."""
LONGEST_STEP = 0.100 * TOLERANCE
PER_MB = 0.060 * TOLERANCE
DENSEST = 0.150 * TOLERANCE
"""CPU seconds per MB of one transformation of the densest body, which has a bracket in each byte and at most 1 MB."""


def counting(to: int, seen: list[int]) -> Generator[None, None, str]:
    for number in range(to):
        seen.append(number)
        yield
    return "done"


def busy(seconds: float, times: int) -> Generator[None, None, None]:
    for _ in range(times):
        until = thread_time() + seconds
        while thread_time() < until:
            pass
        yield


def test_the_result_without_pauses_is_the_same() -> None:
    seen: list[int] = []
    assert finished(counting(3, seen)) == "done" and seen == [0, 1, 2]


async def test_one_iteration_resumes_one_waiting_task() -> None:
    steps, resumed = Steps(), list[str]()

    async def work(name: str) -> None:
        for _ in range(3):
            await steps.pause()
            resumed.append(name)

    for name in "ab":
        InlineTask(work(name)).step()
    counts = []
    while len(resumed) < 6:
        before = len(resumed)
        await asyncio.sleep(0)
        counts.append(len(resumed) - before)
    assert resumed == list("ababab") and max(counts) == 1


async def test_work_yields_when_its_time_slice_is_used_up() -> None:
    steps, iterations, stop = Steps(), 0, False

    async def count() -> None:
        nonlocal iterations
        while not stop:
            iterations += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count())
    async with steps.admit(SMALL) as pace:
        await pace.run(busy(SLICE, 5))
    stop = True
    await counter
    assert iterations >= 5


async def test_large_bodies_are_processed_one_at_a_time_and_in_order() -> None:
    steps, order, inside = Steps(), list[str](), 0

    async def work(name: str, size: int) -> None:
        nonlocal inside
        async with steps.admit(size):
            inside += size > MEDIUM
            assert inside <= 1
            order.append(name)
            await steps.pause()
            await steps.pause()
            inside -= size > MEDIUM

    async def all_of_them() -> None:
        await asyncio.gather(*(work(str(number), LIMIT) for number in range(4)), work("medium", MEDIUM))

    await all_of_them()
    assert order == ["0", "medium", "1", "2", "3"], "a medium one does not wait for larger ones"


@pytest.mark.parametrize("where", ["waiting for its turn", "between two steps"])
async def test_a_cancelled_request_lets_the_next_one_run(where: str) -> None:
    steps, done = Steps(), list[int]()

    async def work(number: int) -> None:
        try:
            async with steps.admit(LIMIT) as pace:
                await pace.run(busy(SLICE, 3))
                done.append(number)
        except asyncio.CancelledError:
            done.append(-number)

    tasks = [InlineTask(work(number)) for number in (1, 2, 3)]
    for task in tasks:
        task.step()
    tasks[1 if where == "waiting for its turn" else 0].cancel()
    await until(lambda: len(done) == 3)
    assert sorted(done) == ([-2, 1, 3] if where == "waiting for its turn" else [-1, 2, 3])
    assert gc.isenabled()


async def test_the_collector_is_paused_while_a_body_is_processed() -> None:
    steps = Steps()
    assert gc.isenabled()
    async with steps.admit(LIMIT):
        assert not gc.isenabled()
        async with steps.admit(MEDIUM):
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="x"):
        async with steps.admit(LIMIT):
            raise ValueError("x")
    assert gc.isenabled()


# CPU time by body

FULL = {
    **{f"a text of {name}": partial(lambda piece: ("/v1/chat/completions", text(piece, LIMIT)), piece) for name, piece in TEXTS.items()},
    **{f"messages: {name}": partial(filled, "messages", unit, LIMIT) for name, unit in UNITS.items()},
    **{f"{position}: images": partial(filled, position, UNITS["images"], LIMIT) for position in POSITIONS},
}


@pytest.mark.parametrize("name", FULL)
def test_no_step_is_long_at_the_limits(name: str) -> None:
    """The shortest of several runs counts, because a busy machine lengthens any run."""
    path, body = FULL[name]()
    longest, rate = 1e9, 1e9
    for _ in range(5):
        costs = processed(path, body)
        longest = min(longest, max(cost.longest for cost in costs.values()))
        rate = min(rate, max(cost.total for cost in costs.values()) / (len(body) / 1e6))
        if longest < LONGEST_STEP / TOLERANCE and rate < PER_MB / TOLERANCE:
            break
    print(f"{name}: {len(body) / 1e6:.1f} MB, longest step {longest * 1e3:.0f} ms, {rate * 1e3:.0f} ms per MB")
    assert longest < LONGEST_STEP
    assert rate < (DENSEST if len(body) < 1_100_000 else PER_MB)


_SCALARS = st.sampled_from(
    [b"1", b"-1e19", b'"a"', b'"\\n"', b'"[{,:"', b"null", b'"1111111111111111111"', b'"data:,x"', b'"user"', b'"developer"']
)
_NAMES = st.sampled_from([b"role", b"content", b"image_url", b"url", b"type", b"function_call", b"arguments", b"input", b"a", b"source"])
_UNITS = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda values: b"[" + b",".join(values) + b"]")
        | st.lists(st.tuples(_NAMES, inner), max_size=3).map(lambda pairs: b"{" + b",".join(b'"%b":%b' % pair for pair in pairs) + b"}")
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(unit=_UNITS, position=st.sampled_from(sorted(POSITIONS)))
def test_twice_the_body_costs_about_twice(unit: bytes, position: str) -> None:
    for _ in range(4):
        once, twice = (_cost(*filled(position, unit, size)) for size in (200_000, 400_000))
        if twice < 3 * once + 0.005:
            break
    else:
        raise AssertionError(f"{once * 1e3:.1f} ms and {twice * 1e3:.1f} ms")
    assert twice < DENSEST * 0.4


def _cost(path: str, body: bytes) -> float:
    """Return the shorter CPU time of two runs."""
    return min(sum(cost.total for cost in processed(path, body).values()) for _ in range(2))


def test_the_costs_are_those_of_all_transformations() -> None:
    costs = processed(*filled("messages", UNITS["developer messages"], 100_000))
    assert costs.keys() == {"parse", "shape", "prepare", "estimate", "affinity_key", "encode"}
    assert all(cost.total >= cost.longest > 0 for cost in costs.values())
