"""Several gateways share the slots of a server by its metrics: single steps, and gateways that are played in virtual time."""

from __future__ import annotations

from random import Random
from statistics import mean

import pytest

from upstream.vllm.auto_max_inflight import AutoLimit, Bounds, LoadSample
from upstream.vllm.engine_counters import EngineMetrics
from upstream.vllm.server_share import next_part

WHOLE = 64
STEP = 0.05
"""Seconds of a step of the simulation."""
MEAN = 4.0
"""Seconds of a request on average."""


def sample(own: int, used: int, queued: int = 0) -> LoadSample:
    return LoadSample(0.0, EngineMetrics(used, 0, 0), own, queued)


@pytest.mark.parametrize(
    ("value", "seen", "expected"),
    [
        (10, sample(5, 5), WHOLE),  # alone
        (64, sample(5, 25), 44),  # what the others leave
        (64, sample(0, 64), 8),  # the part with which it can start
        (32, sample(32, 64, 3), 24),  # all slots are used
        (20, sample(20, 56, 3), 22),  # a quarter of the free slots
        (20, sample(22, 64, 3), 20),  # the last decrease has no effect yet
        (1, sample(1, 64, 3), 1),  # the lowest limit
    ],
)
def test_a_part_follows_the_metrics(value: int, seen: LoadSample, expected: int) -> None:
    assert next_part(AutoLimit(value), seen, Bounds(1, WHOLE)).value == expected


class Gateways:
    """Gateways in front of a server. Each samples it once a second, at a separate time, and has as many requests queued as it is given."""

    def __init__(self, count: int) -> None:
        self.limits = [AutoLimit(WHOLE)] * count
        self.in_flight = [0] * count
        self.busy = [False] * count
        self._draw = Random(count)
        self._steps = 0

    def run(self, seconds: float) -> list[list[int]]:
        """Let time pass. Return the requests in flight of all gateways in each step."""
        seen = []
        for _ in range(round(seconds / STEP)):
            self._steps += 1
            for number, limit in enumerate(self.limits):
                self.in_flight[number] -= sum(self._draw.random() < STEP / MEAN for _ in range(self.in_flight[number]))
                if self.busy[number]:
                    self.in_flight[number] = max(self.in_flight[number], limit.value)
            seen.append(list(self.in_flight))
            for number, limit in enumerate(self.limits):
                if self._steps % 20 == 20 * number // len(self.limits):
                    load = sample(self.in_flight[number], sum(self.in_flight), queued=self.busy[number])
                    self.limits[number] = next_part(limit, load, Bounds(1, WHOLE))
        return seen


@pytest.mark.parametrize("count", [2, 4])
def test_busy_gateways_share_a_server(count: int) -> None:
    gateways = Gateways(count)
    gateways.busy = [True] + [False] * (count - 1)
    assert gateways.run(20)[-1][0] == WHOLE, "a gateway alone uses all slots"
    gateways.busy = [True] * count
    waking = gateways.run(60)
    assert max(map(sum, waking)) <= WHOLE * (1 + (count - 1) / 8) + count, "each other gateway starts with an eighth"
    shared = gateways.run(120)
    parts = [mean(each) for each in zip(*shared, strict=True)]
    assert parts == pytest.approx([mean(parts)] * count, rel=0.1)
    assert max(map(sum, shared)) <= WHOLE + 2 * count
    assert mean(map(sum, shared)) > 0.93 * WHOLE
    gateways.busy = [True] + [False] * (count - 1)
    assert gateways.run(60)[-1][0] == WHOLE, "and again alone"
