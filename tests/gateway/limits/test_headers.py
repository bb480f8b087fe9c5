"""The limits' headers, in OpenAI's words."""

from __future__ import annotations

import pytest

from gateway.limits.headers import duration, lines
from gateway.limits.rules import Standing


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
        (86267.648, "23h57m47.648s"),
    ],
)
def test_durations_are_written_as_go_writes_them(seconds: float, written: str) -> None:
    assert duration(seconds) == written


def test_the_tightest_limit_is_shown() -> None:
    shown = lines([Standing(600, 599, 0.1), Standing(60, 3, 57.0)], [])
    assert shown == b"x-ratelimit-limit-requests: 60\r\nx-ratelimit-remaining-requests: 3\r\nx-ratelimit-reset-requests: 57s\r\n"
    assert lines([], [Standing(5, 0, 1.0)]).startswith(b"x-ratelimit-limit-tokens: 5\r\n")
    assert lines([], []) == b""
