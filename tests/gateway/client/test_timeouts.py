"""How long a client may keep its connection waiting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.client.timeouts import KEEP_ALIVE, LEAST_RATE, Wait, WaitTimer
from gateway.snapshot.snapshot import Clients

CLIENTS = Clients(headers_timeout=10, body_timeout=60, write_timeout=30)
LIMITS = {
    Wait.FIRST_BYTE: 10.0,
    Wait.HEAD: 10.0,
    Wait.BODY: 60.0,
    Wait.REST: 60.0,
    Wait.READER: 30.0,
    Wait.NEXT_REQUEST: KEEP_ALIVE,
    Wait.NOTHING: 1e9,
}


def expired_at(wait: Wait, *, rate: float = 0.0, message: object = None, seconds: int = 1000) -> int | None:
    """Return the second at which the timeout of a client that moves ``rate`` bytes a second expires."""
    timer = WaitTimer()
    return next((now for now in range(seconds) if timer.has_expired(wait, message, int(now * rate), now, CLIENTS)), None)


@pytest.mark.parametrize("wait", LIMITS)
def test_silence_expires(wait: Wait) -> None:
    expected = int(LIMITS[wait]) + 1
    assert expired_at(wait) == (expected if wait is not Wait.NOTHING else None)


def test_a_body_that_trickles_expires_and_a_slow_body_does_not() -> None:
    assert expired_at(Wait.BODY, rate=1) == 61
    assert expired_at(Wait.BODY, rate=LEAST_RATE * 0.9) == 61
    assert expired_at(Wait.BODY, rate=LEAST_RATE * 1.1) is None


def test_a_body_that_starts_fast_and_then_trickles_expires() -> None:
    timer, moved = WaitTimer(), 0
    for now in range(200):
        moved += 10_000_000 if now < 30 else 1
        if timer.has_expired(Wait.BODY, None, moved, now, CLIENTS):
            break
    assert now == 122, "the second period is the first that brings too little"


def test_a_reader_that_receives_a_little_does_not_expire() -> None:
    assert expired_at(Wait.READER, rate=0.1) is None


def test_further_writes_are_not_progress() -> None:
    """Framing and headers are in the buffer but do not count as bytes of the body: the difference falls."""
    assert expired_at(Wait.READER, rate=-7) == 31


@given(st.lists(st.tuples(st.sampled_from(list(Wait)), st.integers(0, 2), st.integers(0, 10_000_000)), max_size=300))
def test_no_timeout_expires_early(checks: list[tuple[Wait, int, int]]) -> None:
    """Only consecutive checks of the same wait, for long enough, make it expire."""
    timer, messages = WaitTimer(), [object() for _ in range(3)]
    since, last = 0, None
    for now, (wait, message, moved) in enumerate(checks):
        if (wait, message) != last:
            since, last = now, (wait, message)
        if timer.has_expired(wait, messages[message], moved, now, CLIENTS):
            assert now - since > LIMITS[wait]
