"""The harness from end to end at a tiny size, with the gateway as a user starts it and no peers."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.benchmarks import results
from tests.benchmarks.__main__ import STORED, run
from tests.benchmarks.stage import DIRECT, Scale


async def test_streams_are_measured_and_reported(tmp_path: Path) -> None:
    before = psutil.Process().children()  # such as a database that tests share
    await run(["streams", "flood"], ["vllm-gateway"], Scale(rounds=2, seconds=0.4, crowd=0.02), tmp_path)
    sections = results.read(tmp_path / STORED)
    assert list(sections) == ["flood", "streams"]
    for section, variant in ((sections["streams"], "50 events a second"), (sections["flood"], "4,000 events")):
        ours, direct = section.find("vllm-gateway", variant), section.find(DIRECT, variant)
        assert ours and direct
        assert (len(ours.values["cpu"]), len(direct.values["rate"])) == (2, 2)
        assert "cpu" not in direct.values and min(ours.values["rate"]) > 0
        assert section.absent == {} and list(section.proxies) == ["vllm-gateway"]
    assert [row.faults for row in sections["flood"].rows] == [[], []]
    assert "| vllm-gateway |" in (tmp_path / "performance-streams.md").read_text()
    assert psutil.Process().children() == before


async def test_pauses_are_measured_in_the_gateways_worker_and_in_the_bare_protocol(tmp_path: Path) -> None:
    await run(["pauses"], ["vllm-gateway"], Scale(rounds=1, crowd=0.01, pauses=2.0), tmp_path)
    section = results.read(tmp_path / STORED)["pauses"]
    assert [row.proxy for row in section.rows] == ["vllm-gateway", "… with both", "bare protocol"]
    for row in section.rows:
        assert not row.faults
        assert row.values["callback_most"][0] >= row.values["callback_p50"][0] > 0 < row.values["requests"][0]
        assert "longest callbacks" in row.notes[0]
    assert any("gateway.client.connection" in note for note in section.rows[0].notes), "the worker itself was measured"
