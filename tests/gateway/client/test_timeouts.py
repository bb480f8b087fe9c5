"""How long a client may keep its connection waiting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.client.timeouts import KEEP_ALIVE, LEAST_RATE, Patience, Wait
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


def over_at(wait: Wait, *, rate: float = 0.0, message: object = None, seconds: int = 1000) -> int | None:
    """The second at which a client that sends or takes so many bytes in each is given up."""
    patience = Patience()
    return next((now for now in range(seconds) if patience.is_over(wait, message, int(now * rate), now, CLIENTS)), None)


@pytest.mark.parametrize("wait", LIMITS)
def test_silence_ends(wait: Wait) -> None:
    expected = int(LIMITS[wait]) + 1
    assert over_at(wait) == (expected if wait is not Wait.NOTHING else None)


def test_a_body_that_trickles_ends_and_a_slow_one_does_not() -> None:
    assert over_at(Wait.BODY, rate=1) == 61
    assert over_at(Wait.BODY, rate=LEAST_RATE * 0.9) == 61
    assert over_at(Wait.BODY, rate=LEAST_RATE * 1.1) is None


def test_a_body_that_begins_fast_and_then_trickles_ends() -> None:
    patience, moved = Patience(), 0
    for now in range(200):
        moved += 10_000_000 if now < 30 else 1
        if patience.is_over(Wait.BODY, None, moved, now, CLIENTS):
            break
    assert now == 122, "the second period is the first that brings too little"


def test_a_reader_that_takes_a_little_goes_on() -> None:
    assert over_at(Wait.READER, rate=0.1) is None


def test_what_is_written_meanwhile_is_no_progress() -> None:
    """Framing and heads are in the buffer and not among the bytes of the answer: the difference falls."""
    assert over_at(Wait.READER, rate=-7) == 31


@given(st.lists(st.tuples(st.sampled_from(list(Wait)), st.integers(0, 2), st.integers(0, 10_000_000)), max_size=300))
def test_nobody_is_given_up_before_the_time(looks: list[tuple[Wait, int, int]]) -> None:
    """Whatever happened before: only a run of looks at one and the same wait can end in giving up, if it is long enough."""
    patience, messages = Patience(), [object() for _ in range(3)]
    began, last = 0, None
    for now, (wait, message, moved) in enumerate(looks):
        if (wait, message) != last:
            began, last = now, (wait, message)
        if patience.is_over(wait, messages[message], moved, now, CLIENTS):
            assert now - began > LIMITS[wait]
