"""A short run of the random forms."""

from __future__ import annotations

from tests.fuzz.forms import run
from tests.support.examples import examples


def test_a_server_reads_what_was_checked() -> None:
    report = run(seed=1, seconds=None, count=examples(2000))
    assert report.differences == ()
    assert report.accepted > report.count // 4
    assert report.accepted + report.refused == report.count
