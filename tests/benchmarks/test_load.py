"""The requests, the check of a response, and the output of wrk."""

from __future__ import annotations

import json
import re

import pytest

from tests.benchmarks import wire
from tests.benchmarks.load import LoadFailed, difference, summary
from tests.benchmarks.streams import percentile

OUTPUT = 'Running 3s test\nRESULT {"requests":%d,"bytes":%d,"microseconds":2000000,"p50":150,"p99":900,"p999":1500,%s}\n'
FINE = '"connect":0,"read":0,"write":0,"status":0,"timeout":0'


def test_sizes_are_as_the_report_says() -> None:
    assert 295 <= len(wire.chat()) <= 300
    assert 740 <= len(wire.completion()) <= 750
    assert len(wire.event(1)) == len(wire.event(10**18)) == 200
    assert 999_990 <= len(wire.chat(size=1_000_000)) <= 1_000_000


def test_an_event_is_json_with_its_creation_time() -> None:
    event = wire.event(123456789)
    assert json.loads(event.removeprefix(b"data: "))["object"] == "chat.completion.chunk"
    assert wire.stamp_in(event + wire.event(5)) == 123456789


def test_half_a_stamp_does_not_count() -> None:
    event = wire.event(123456789)
    assert wire.stamp_in(event[: event.index(b"@") + 10]) is None
    assert wire.stamp_in(b"data: [DONE]\n\n") is None


def test_a_run_without_faults() -> None:
    run = summary(OUTPUT % (100, 100 * 900, FINE), 750)
    assert (run.requests, run.seconds, run.p50, run.p99, run.p999, run.faults) == (100, 2.0, 0.00015, 0.0009, 0.0015, ())


def test_errors_and_lacking_bytes_are_faults() -> None:
    run = summary(OUTPUT % (100, 100 * 700, FINE.replace('"status":0', '"status":3')), 750)
    assert run.faults == ("3 × status", "5000 bytes too few")


def test_what_is_no_summary_is_an_error_with_the_words() -> None:
    with pytest.raises(LoadFailed, match=re.escape("unable to connect")):
        summary("unable to connect to 127.0.0.1", 750)


def test_a_response_may_differ_in_bytes_but_not_in_text() -> None:
    response = json.loads(wire.completion())
    assert difference(200, wire.completion()) is None
    assert difference(200, json.dumps(response, indent=1).encode()) is None
    response["choices"][0]["message"]["content"] = "No."
    assert str(difference(200, json.dumps(response).encode())).startswith("another answer")
    assert difference(503, b"busy") == "status 503: b'busy'"


def test_percentiles() -> None:
    assert [percentile(list(range(100)), share) for share in (0.5, 0.99, 0.999)] == [50.0, 99.0, 99.0]
    assert percentile([], 0.5) is None
