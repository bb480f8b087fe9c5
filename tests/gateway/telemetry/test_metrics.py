"""Prometheus reads exactly the counted values."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.admin.app import registry
from gateway.admin.engine_metrics import Engine
from gateway.api.usage import Usage
from gateway.key_management.key_list import LastUse
from gateway.snapshot.snapshot import Key, Snapshot
from gateway.telemetry.metrics import FAMILIES, PREFIX, CounterSums, ReadGaps, Series, WorkerMetrics, observe, sum_series
from gateway.telemetry.request_record import Continuation, RequestRecord
from gateway.telemetry.shared_counters import SharedCounters
from tests.support.running import key, model

NOTHING: dict[str, Any] = {
    "id": "req_1", "started": 1.0, "endpoint": "/v1/chat/completions",
    "status": 200, "code": None, "key": Key("team-a"), "model": "tiny",
    "server": "tiny#0", "stream": False, "request_bytes": 1, "response_bytes": 2, "usage": None,
    "incomplete": None, "retries": 0, "duration": 0.3,
    "overhead": 0.0004, "queued": 0.0, "first_byte": None, "first_token": None, "gaps": None, "user": None, "failures": (), "detail": None,
}  # fmt: skip


def record(**fields: Any) -> RequestRecord:
    return RequestRecord(**{**NOTHING, **fields})


@pytest.fixture
def counters() -> Iterator[SharedCounters]:
    made = SharedCounters.create("test", 1 << 20)
    yield made
    made.close()


class Shown:
    """An overview of boards alone."""

    def __init__(self, *boards: SharedCounters) -> None:
        self._boards = boards

    def series(self) -> dict[Series, list[float]]:
        return sum_series(self._boards)

    def not_ready(self) -> str | None:
        return None

    def degraded(self) -> list[str]:
        return []

    def status(self) -> dict[str, Any]:
        return {}

    async def status_with_logs(self) -> dict[str, Any]:
        return {}

    async def usage(self, parameters: Mapping[str, str]) -> dict[str, Any] | None:
        return None

    async def record(self, identity: str) -> dict[str, Any] | None:
        return None

    async def limits(self, query: Mapping[str, str]) -> dict[str, Any]:
        return {}

    async def keys(self) -> dict[str, Any]:
        return {}

    def teams(self) -> dict[str, Any]:
        return {}

    def keys_of_teams(self, teams: Iterable[str]) -> dict[str, int]:
        return dict.fromkeys(teams, 0)

    async def last_use(self, keys: Sequence[str]) -> LastUse:
        return LastUse()

    def engines(self) -> dict[str, Engine]:
        return {}

    def months(self) -> None:
        return None

    async def requests(self, parameters: Mapping[str, str]) -> None:
        return None

    async def request(self, identity: str) -> None:
        return None


def samples(*boards: SharedCounters) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = generate_latest(registry(Shown(*boards))).decode()
    return {
        (sample.name.removeprefix(PREFIX), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(PREFIX)
    }


def value(shown: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return shown[name, frozenset(labels.items())]


def test_a_request_is_counted_once_in_all_its_families(counters: SharedCounters) -> None:
    gaps = ReadGaps(0.0)
    for now in (0.01, 0.03, 200.0):
        gaps.mark(now)
    metrics = WorkerMetrics(counters)
    metrics.record_request(
        record(
            usage=Usage(10, 5, 3, 2), first_token=0.02, gaps=gaps, retries=1, incomplete="upstream", failures=(("tiny", "tiny#0", "stale"),)
        )
    )
    metrics.record_request(record(model=None, key=None, status=401, code="invalid_api_key", usage=Usage(1, 1)))
    shown = samples(counters)
    for kind, tokens in (("prompt", 10), ("completion", 5), ("cached", 3), ("reasoning", 2)):
        assert value(shown, "tokens_total", key="team-a", model="tiny", type=kind) == tokens
    assert value(shown, "requests_total", model="tiny", endpoint="/v1/chat/completions", code="200", error="") == 1
    assert value(shown, "requests_total", model="other", endpoint="/v1/chat/completions", code="401", error="invalid_api_key") == 1
    assert value(shown, "auth_failures_total", reason="invalid") == 1
    assert value(shown, "retries_total", model="tiny") == 1
    assert value(shown, "incomplete_total", model="tiny", reason="upstream") == 1
    assert value(shown, "server_failures_total", model="tiny", server="tiny#0", reason="stale") == 1
    assert value(shown, "inter_chunk_latency_seconds_count", model="tiny") == 3
    assert math.isclose(value(shown, "inter_chunk_latency_seconds_sum", model="tiny"), 200.0)
    assert value(shown, "inter_chunk_latency_seconds_bucket", model="tiny", le="0.01") == 1
    assert value(shown, "inter_chunk_latency_seconds_bucket", model="tiny", le="80.0") == 2
    assert value(shown, "inter_chunk_latency_seconds_bucket", model="tiny", le="+Inf") == 3
    assert value(shown, "time_to_first_token_seconds_count", model="tiny") == 1
    assert value(shown, "overhead_seconds_count") == 2


def test_a_stream_that_ends_before_its_first_token_has_no_time_to_it(counters: SharedCounters) -> None:
    gaps = ReadGaps(0.0)
    gaps.mark(0.01)
    WorkerMetrics(counters).record_request(record(first_token=None, gaps=gaps))
    shown = samples(counters)
    assert value(shown, "inter_chunk_latency_seconds_count", model="tiny") == 1
    assert not any(name == "time_to_first_token_seconds_count" for name, _ in shown)


def test_continuations_are_counted_with_their_cost(counters: SharedCounters) -> None:
    continued = Continuation("m#0", "moved", "token_ids", "continued", 0.3, lost_tokens=2, prompt_tokens=130)
    failed = Continuation("m#1", "disconnected", "regeneration", "failed")
    WorkerMetrics(counters).record_request(record(model="m", gaps=ReadGaps(0.0), continuations=(continued, failed)))
    shown = samples(counters)
    labels = {"model": "m", "path": "token_ids"}
    assert value(shown, "continuations_total", **labels, cause="moved", outcome="continued") == 1
    assert value(shown, "continuations_total", model="m", path="regeneration", cause="disconnected", outcome="failed") == 1
    assert value(shown, "continuation_gap_seconds_sum", **labels) == 0.3
    assert value(shown, "continuation_gap_seconds_count", **labels) == 1
    assert [value(shown, "continuation_tokens_total", model="m", type=kind) for kind in ("lost", "prompt")] == [2, 130]


def test_requests_with_the_same_status_are_distinguished_by_their_error(counters: SharedCounters) -> None:
    metrics = WorkerMetrics(counters)
    for code in ("no_healthy_server", "overloaded", "overloaded"):
        metrics.record_request(record(status=503, code=code))
    shown = samples(counters)
    labels = {"model": "tiny", "endpoint": "/v1/chat/completions", "code": "503"}
    assert value(shown, "requests_total", **labels, error="no_healthy_server") == 1
    assert value(shown, "requests_total", **labels, error="overloaded") == 2
    assert value(shown, "request_duration_seconds_count", model="tiny", endpoint="/v1/chat/completions") == 3


def test_a_keys_requests_are_counted_by_their_status(counters: SharedCounters) -> None:
    """For a token's subject, by the entry of the configuration: a token's own words never become a label."""
    metrics = WorkerMetrics(counters)
    metrics.record_request(record(usage=Usage(10, 5)))
    metrics.record_request(record())
    metrics.record_request(record(status=429, code="rate_limit_exceeded", model=None))
    metrics.record_request(record(key=Key("staff/alice", entry="staff"), usage=Usage(1, 1)))
    metrics.record_request(record(key=None, status=401, code="invalid_api_key"))
    shown = {labels: count for (name, labels), count in samples(counters).items() if name == "key_requests_total"}
    assert {(dict(labels)["key"], dict(labels)["code"]): count for labels, count in shown.items()} == {
        ("team-a", "200"): 2,
        ("team-a", "429"): 1,
        ("staff", "200"): 1,
    }


@settings(deadline=None)
@given(st.lists(st.floats(0, 10_000), max_size=30))
def test_a_histogram_is_its_values(values: list[float]) -> None:
    counters = SharedCounters.create("test", 1 << 20)
    try:
        metrics, family = WorkerMetrics(counters), FAMILIES["overhead_seconds"]
        for each in values:
            observe(metrics.cells("overhead_seconds"), family.buckets, each)
        shown = samples(counters)
        assert value(shown, "overhead_seconds_count") == len(values)
        assert math.isclose(value(shown, "overhead_seconds_sum"), sum(values), abs_tol=1e-6)
        for bound in family.buckets:
            name = "+Inf" if math.isinf(bound) else str(float(bound))
            assert value(shown, "overhead_seconds_bucket", le=name) == sum(each <= bound for each in values)
    finally:
        counters.close()


def test_series_exist_from_the_start(counters: SharedCounters) -> None:
    WorkerMetrics(counters).create_series(Snapshot(1, (key(),), (model(1),)))
    shown = samples(counters)
    for name in ("tiny", "other"):
        assert value(shown, "inflight_requests", model=name) == 0
        assert value(shown, "requests_total", model=name, endpoint="/v1/embeddings", code="200", error="") == 0
        assert value(shown, "incomplete_total", model=name, reason="client") == 0
    assert value(shown, "server_inflight", model="tiny", server="tiny#0") == 0
    assert value(shown, "auth_failures_total", reason="missing") == 0


def test_a_successor_keeps_counters_and_clears_gauges(counters: SharedCounters) -> None:
    first = WorkerMetrics(counters)
    first.record_request(record())
    for _ in range(3):
        first.in_flight("tiny").__enter__()
    successor = SharedCounters(os.dup(counters.fd))
    try:
        WorkerMetrics(successor).record_request(record())
        shown = samples(counters)
        assert value(shown, "inflight_requests", model="tiny") == 0
        assert value(shown, "requests_total", model="tiny", endpoint="/v1/chat/completions", code="200", error="") == 2
        assert value(shown, "request_duration_seconds_count", model="tiny", endpoint="/v1/chat/completions") == 2
    finally:
        successor.close()


def test_counters_of_all_workers_are_summed(counters: SharedCounters) -> None:
    other = SharedCounters.create("other", 1 << 20)
    try:
        WorkerMetrics(counters).record_request(record())
        WorkerMetrics(other).record_request(record())
        WorkerMetrics(other).record_request(record(model="more"))
        shown = samples(counters, other)
        assert value(shown, "requests_total", model="tiny", endpoint="/v1/chat/completions", code="200", error="") == 2
        assert value(shown, "requests_total", model="more", endpoint="/v1/chat/completions", code="200", error="") == 1
        assert value(shown, "overhead_seconds_count") == 3
    finally:
        other.close()


def test_the_series_of_other_workers_are_found_when_they_are_created(counters: SharedCounters) -> None:
    other = SharedCounters.create("other", 1 << 20)
    try:
        reader, peer = WorkerMetrics(counters, [other]), WorkerMetrics(other)
        assert not reader.peer_series("tokens_total", "a")
        for labels in (("a", "tiny", "prompt"), ("ab", "tiny", "prompt"), ("a", "tiny", "completion")):
            peer.cells("tokens_total", *labels)[0] = 3
        reader.cells("tokens_total", "a", "own", "prompt")
        peer.cells("key_requests_total", "a", "200")
        for _ in range(2):
            found = [(labels, list(cells)) for labels, cells in reader.peer_series("tokens_total", "a")]
            assert found == [(("tiny", "prompt"), [3]), (("tiny", "completion"), [3])]
    finally:
        other.close()


@settings(deadline=None)
@given(st.text(max_size=12).filter(lambda text: text.isprintable()), st.text(max_size=12).filter(lambda text: text.isprintable()))
def test_any_name_of_the_configuration_is_a_label(name: str, server: str) -> None:
    counters = SharedCounters.create("test", 1 << 20)
    try:
        WorkerMetrics(counters).cells("server_inflight", name, server)[0] = 1
        assert Series.decode(Series("server_inflight", (name, server)).encode()).labels == (name, server)
        assert value(samples(counters), "server_inflight", model=name, server=server) == 1
    finally:
        counters.close()


def test_every_family_is_shown_with_its_type(counters: SharedCounters) -> None:
    WorkerMetrics(counters)
    text = generate_latest(registry(Shown(counters))).decode()
    types = dict(line.split()[2:] for line in text.splitlines() if line.startswith(f"# TYPE {PREFIX}"))
    assert types == {PREFIX + name: family.kind for name, family in FAMILIES.items()}


def test_a_sum_covers_all_counters_and_new_series(counters: SharedCounters) -> None:
    other = SharedCounters.create("other", 1 << 20)
    try:
        tally = CounterSums([counters, other], {"requests_total": 0, "server_inflight": 1})
        assert tally.sum("requests_total", "tiny") == 0
        here, there = WorkerMetrics(counters), WorkerMetrics(other)
        for metrics, code in ((here, "200"), (here, "503"), (there, "200")):
            metrics.cells("requests_total", "tiny", "/v1/chat/completions", code, "")[0] += 2
        there.cells("server_inflight", "tiny", "tiny#0")[0] = 3
        assert (tally.sum("requests_total", "tiny"), tally.sum("server_inflight", "tiny#0")) == (6, 3)
        here.cells("server_inflight", "tiny", "tiny#0")[0] = 1
        here.cells("requests_total", "tiny", "/v1/completions", "200", "")[0] += 1
        assert (tally.sum("requests_total", "tiny"), tally.sum("server_inflight", "tiny#0")) == (7, 4)
    finally:
        other.close()


def test_a_series_without_space_is_dropped_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    counters = SharedCounters.create("little", 1 << 13)
    try:
        metrics = WorkerMetrics(counters)
        for number in range(1000):
            metrics.cells("limited_total", f"key-{number}", "concurrent")[0] += 1
        metrics.record_request(record(usage=Usage(1, 2, 0, 0)))
        assert metrics.cells("limited_total", "key-999", "concurrent")[0] == 1
        shown = sum_series([counters])
        dropped = sum(series.family == "limited_total" for series in shown)
        assert 10 < dropped < 1000 and shown[Series("limited_total", ("key-0", "concurrent"))] == [1.0]
        assert shown[Series("series_dropped_total", ())][0] >= 1000 - dropped
        assert len([entry for entry in caplog.records if "counter memory is full" in entry.message]) == 1
    finally:
        counters.close()
