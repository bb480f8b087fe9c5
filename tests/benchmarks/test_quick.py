"""The short comparison: its text, and a run at a tiny size."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.benchmarks import quick
from tests.benchmarks.peers import GATEWAY, Proxy
from tests.benchmarks.report import LATENCIES, REQUEST
from tests.benchmarks.results import Section
from tests.benchmarks.stage import Scale

MISSING = Proxy("envoy", "", lambda: "", lambda: "not installed: make bench-peers", lambda *_: pytest.fail("it is missing"))


def section() -> Section:
    """The gateway and one peer, in two rounds."""
    made = Section("JSON", "", 2, 9.0, {}, {}, 0.3, {"envoy": "not installed"})
    for cost in (40e-6, 60e-6):
        made.row("vllm-gateway", "quick").add({"cpu": cost, "p50": 1e-3, "p99": 2e-3, "p999": 3e-3}, ())
        made.row("nginx", "quick").add({"cpu": cost / 2, "p50": 1e-3, "p99": 4e-3}, ())
    made.row("nginx", "quick").add({}, ("7 × status",))
    return made


def test_the_text_has_medians_ratios_and_missing_peers() -> None:
    title, *lines = ["|".join(line.split()) for line in quick.lines(section(), (REQUEST, *LATENCIES))]
    assert title == "JSON|CPU|per|request,|µs|p50,|ms|p99,|ms|p99.9,|ms"
    assert lines == [
        "vllm-gateway|50.0|1.00|2.00|3.00",
        "nginx|25.0|1.00|4.00|-",
        "gateway|:|nginx|2.00|1.00|0.50|-",
        "!|nginx:|7|×|status",
        "!|envoy|was|not|measured:|not|installed",
        "!|other|processes|used|30%|of|the|machine:|compare|the|CPU|only",
    ]


def test_columns_are_aligned() -> None:
    table = [line for line in quick.lines(section(), (REQUEST, *LATENCIES)) if not line.startswith("!")]
    assert len({len(line) for line in table}) == 1


async def test_streams_are_compared_without_missing_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taskset = shutil.which("taskset")
    assert taskset
    (tmp_path / "taskset").symlink_to(taskset)
    monkeypatch.setenv("PATH", str(tmp_path))  # without wrk and nginx
    await quick.run([GATEWAY, MISSING], Scale(rounds=1, seconds=0.2, crowd=0.01))
    printed = capsys.readouterr().out
    missing = [f"not installed (Debian: apt-get install {program})" for program in ("wrk", "nginx")]
    assert f"64 connections: not measured: {', '.join(missing)}" in printed
    assert printed.count("! envoy was not measured: not installed: make bench-peers") == 2
    assert "300 streams of 50 events a second" in printed and "5,000 streams of 2 events a second" in printed
