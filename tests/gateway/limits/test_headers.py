"""The headers of limits, as OpenAI names them."""

from __future__ import annotations

import pytest

from gateway.limits.headers import duration, header_lines
from gateway.snapshot.snapshot import Limits


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0, "0s"),
        (0.0001, "1ms"),
        (0.017, "17ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (3725.5, "1h2m5.5s"),
        (86267.648, "23h57m47.648s"),
    ],
)
def test_durations_are_written_as_go_writes_them(seconds: float, written: str) -> None:
    assert duration(seconds).decode() == written


def test_the_tightest_limit_is_shown() -> None:
    wide, narrow = Limits(requests_per_minute=600), Limits(requests_per_minute=60, tokens_per_minute=5)
    requests, tokens = header_lines([(wide, 10.1, 0.0), (narrow, 67.0, 70.0)], 10.0).split(b"x-ratelimit-limit-tokens")
    assert requests == b"x-ratelimit-limit-requests: 60\r\nx-ratelimit-remaining-requests: 3\r\nx-ratelimit-reset-requests: 57s\r\n"
    assert tokens == b": 5\r\nx-ratelimit-remaining-tokens: 0\r\nx-ratelimit-reset-tokens: 1m0s\r\n"
    assert header_lines([(Limits(concurrent=1), 0.0, 0.0)], 0.0) == b""
