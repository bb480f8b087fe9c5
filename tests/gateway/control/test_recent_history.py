"""The last hour: rates and quantiles follow the counters, and memory does not follow the traffic."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest

from gateway.control.recent_history import COLUMNS, HOUR, STEP, RecentHistory, quantile, sampled
from gateway.telemetry.metrics import FAMILIES, Series
from gateway.telemetry.token_rates import ModelTokens

_BUCKETS = FAMILIES["time_to_first_token_seconds"].buckets


def series(requests: dict[str, float], *, first_tokens: float = 0, cut: float = 0, queued: float = 0) -> dict[Series, list[float]]:
    made = {Series("requests_total", ("m", "/v1/chat/completions", code, "")): [count] for code, count in requests.items()}
    made[Series("incomplete_total", ("m", "upstream"))] = [cut]
    made[Series("incomplete_total", ("m", "client"))] = [7]
    made[Series("queued_requests", ("m",))] = [queued]
    made[Series("time_to_first_token_seconds", ("m",))] = [first_tokens if bound == 0.5 else 0.0 for bound in _BUCKETS] + [1.0]
    return made


def shown(history: RecentHistory) -> dict[str, float | None]:
    return dict(zip(("time", *COLUMNS), history.points[-1], strict=True))


def test_a_point_has_the_rates_since_the_sample_before() -> None:
    history = RecentHistory()
    history.add(sampled(100.0, series({"200": 10, "429": 1, "499": 2}), (99.0, {}), {}), 1000.0)
    assert not history.points
    after = series({"200": 60, "429": 11, "499": 7, "503": 5}, first_tokens=40, cut=5, queued=3)
    history.add(sampled(105.0, after, (104.0, {"m": ModelTokens(500, 50), "n": ModelTokens(500, 0)}), {}), 1005.0)
    point = shown(history)
    assert point["time"] == 1005.0
    # 50 with 200 and 5 by clients that disconnected, of which 5 were truncated by a server
    assert (point["succeeded"], point["rejected"], point["errors"]) == (10.0, 2.0, 2.0)
    assert (point["prompt"], point["completion"], point["queued"]) == (200.0, 10.0, 3.0)
    counts = history.counts
    assert (counts.increase("failures", HOUR), counts.increase("rejected", HOUR), counts.covered(HOUR)) == ({"m": 10.0}, {"m": 10.0}, 5.0)
    first_token = point["first_token_p50"]
    assert first_token is not None and 0.25 < first_token <= 0.5


def test_a_restart_of_the_clock_or_of_a_counter_makes_no_negative_rate() -> None:
    history = RecentHistory()
    for at, count in ((10.0, 100.0), (15.0, 40.0), (15.0, 50.0)):
        history.add(sampled(at, series({"200": count}), None, {}), at)
    assert len(history.points) == 1 and shown(history)["succeeded"] == 0.0


@pytest.mark.parametrize(
    ("counts", "expected"), [((0, 0, 0), None), ((10, 0, 0), 0.5), ((0, 10, 0), 1.5), ((5, 5, 0), 1.0), ((0, 0, 3), 2.0), ((1, 0, 9), 2.0)]
)
def test_a_quantile_is_interpolated_and_never_beyond_the_last_bound(counts: tuple[float, ...], expected: float | None) -> None:
    assert quantile(0.5, (1.0, 2.0, float("inf")), counts) == expected


def clocked(hours: float) -> Iterator[float]:
    yield from (STEP * number for number in range(int(hours * HOUR / STEP)))


def test_increases_are_over_the_window_and_by_label() -> None:
    history = RecentHistory()
    for at in clocked(1.5):
        requests = series({"200": at, "500": at / 10})
        history.add(sampled(at, requests, None, {("server_restarts", "s"): float(at > 4000)}), at)
    increase = history.counts.increase
    assert increase("requests", 300)["m"] == pytest.approx(330, rel=0.2)
    assert increase("failures", HOUR)["m"] == pytest.approx(360, rel=0.05)
    assert history.counts.covered(HOUR) == pytest.approx(HOUR, abs=61)
    assert increase("requests", 300, 300)["m"] == pytest.approx(330, rel=0.2)
    assert increase("server_restarts", HOUR) == {"s": 1.0} and increase("server_restarts", 300) == {"s": 0.0}
    assert dict(history.counts.present("requests")) == {"m": pytest.approx(1.1 * at)}


def test_memory_is_constant_after_an_hour() -> None:
    history = RecentHistory()

    def run(first: int) -> None:
        for number in range(first, first + int(HOUR / STEP)):
            at = STEP * number
            history.add(sampled(at, series({"200": 3.0 * number, "500": float(number)}, first_tokens=number), None, {}), at)

    run(0)
    tracemalloc.start()
    try:
        run(720)
        first = tracemalloc.get_traced_memory()[0]
        for hour in range(2, 5):
            run(720 * hour)
        grown = tracemalloc.get_traced_memory()[0] - first
    finally:
        tracemalloc.stop()
    assert len(history.points) == HOUR / STEP and grown < 20_000
