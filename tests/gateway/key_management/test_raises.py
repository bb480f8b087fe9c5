"""Temporary raises: what a request may say, and the limits that are in force."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.key_management.raises import Raise, configured_amounts, decode, encode, new_raise, parse_until, with_raises
from gateway.snapshot.money import MAX_COST_LIMIT, NANO
from gateway.snapshot.snapshot import Allowance, Budget, Limits

NOW = datetime(2026, 11, 25, 17, 30, tzinfo=UTC)
LIMITS = Limits(
    tokens_per_day=1000,
    cost_per_month=5 * NANO,
    concurrent=3,
    budgets=(Budget("7d", 604800.0, tokens=70, cost=NANO), Budget("day", tokens=10, soft=True)),
)
KEY = Allowance("key alice", LIMITS)


def made(limit: Any = "tokens_per_day", to: Any = "2x", until: Any = "18:00", **more: Any) -> Raise:
    return new_raise({"limit": limit, "to": to, "until": until, **more}, KEY, NOW, "token ci")


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("18:00", "2026-11-25T18:00:00+00:00"),
        ("17:30", "2026-11-26T17:30:00+00:00"),
        ("9:05", "2026-11-26T09:05:00+00:00"),
        ("2h", "2026-11-25T19:30:00+00:00"),
        ("1.5h", "2026-11-25T19:00:00+00:00"),
        ("2026-12-01", "2026-12-01T00:00:00+00:00"),
        ("2026-11-25T19:00", "2026-11-25T19:00:00+00:00"),
        ("2026-11-25T19:00:00+01:00", "2026-11-25T18:00:00+00:00"),
    ],
)
def test_the_end_is_a_time_of_day_a_time_or_a_duration(text: str, end: str) -> None:
    assert parse_until(text, NOW).isoformat() == end


@pytest.mark.parametrize(
    "text", ["", "24:00", "18", "18:60", "-2h", "0s", "2026-11-25", "2026-11-25T17:30Z", "400d", "9999-12-31", "noon", 18, None]
)
def test_an_end_that_is_no_future_time_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="until: expected"):
        parse_until(text, NOW)


@given(st.text() | st.from_regex(r"[0-9x:.\-TZhms+]{0,30}", fullmatch=True))
def test_no_text_raises_another_error(text: str) -> None:
    with suppress(ValueError):
        assert NOW < parse_until(text, NOW) <= NOW + timedelta(days=366)
    with suppress(ValueError):
        assert made(to=text).raised(1000) > 1000


@pytest.mark.parametrize(
    ("limit", "to", "amount"),
    [
        ("tokens_per_day", "2x", 2000),
        ("tokens_per_day", "1.5x", 1500),
        ("tokens_per_day", "1.0005x", 1000),
        ("tokens_per_day", 5000, 5000),
        ("tokens_per_day", "5000", 5000),
        ("cost_per_month", "2x", 10 * NANO),
        ("cost_per_month", 7.25, 7_250_000_000),
        ("cost_per_month", "9999999", MAX_COST_LIMIT * NANO),
        ("concurrent", "3x", 9),
        ("tokens_per_7d", "2x", 140),
        ("cost_per_7d", "2", 2 * NANO),
    ],
)
def test_a_limit_is_raised_by_a_factor_or_to_an_amount(limit: str, to: Any, amount: int) -> None:
    if amount == dict(configured_amounts(LIMITS))[limit]:
        with pytest.raises(ValueError, match="more than the configured limit"):
            made(limit, to)
        return
    raised = with_raises(KEY, [made(limit, to)])
    values = {name: getattr(raised.limits, name) for name in ("tokens_per_day", "cost_per_month", "concurrent")}
    week = raised.limits.budgets[0]
    assert (values | {"tokens_per_7d": week.tokens, "cost_per_7d": week.cost})[limit] == amount
    assert raised.limits.budgets[1] == LIMITS.budgets[1]  # the soft budget
    (each,) = raised.limits.raised
    assert (each.limit, each.configured, each.until) == (limit, dict(configured_amounts(LIMITS))[limit], NOW.timestamp() + 1800)
    assert dict(configured_amounts(raised.limits)) == dict(configured_amounts(LIMITS))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"limit": "token_per_day"}, "key alice has no such limit; did you mean `tokens_per_day`"),
        ({"limit": None}, "limit: key alice has no such limit"),
        ({"limit": "tokens_per_day "}, "limit: "),
        ({"to": "1x"}, "more than the configured limit"),
        ({"to": 1000}, "more than the configured limit"),
        ({"to": "0.5x"}, "more than the configured limit"),
        ({"to": -5}, "to: expected a factor"),
        ({"to": True}, "to: expected a factor"),
        ({"to": "1e9"}, "to: expected a factor"),
        ({"to": 1500.5}, "to: expected a factor"),
        ({"more": 1}, "there is no field more"),
    ],
)
def test_a_request_that_raises_nothing_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**fields)


def test_a_raise_never_lowers_a_limit() -> None:
    higher = Allowance("key alice", Limits(tokens_per_day=9000))
    assert with_raises(higher, [made(to=5000)]) is higher
    assert with_raises(higher, [made(to="2x")]).limits.tokens_per_day == 18_000
    unlimited = Allowance("key alice", Limits(concurrent=1))
    assert with_raises(unlimited, [made(to=5000)]) is unlimited


_RAISES = st.builds(
    Raise, st.sampled_from([name for name, _ in configured_amounts(LIMITS)]), st.floats(0, 4e9), st.floats(0, 4e9), st.text(),
    st.none() | st.sampled_from(["2", "1.5", "0.1"]), st.none() | st.integers(0, 2**62),
)  # fmt: skip


@given(st.lists(_RAISES, max_size=4))
def test_what_is_stored_is_read_again(raises: list[Raise]) -> None:
    assert decode(encode(raises)) == tuple(raises)
    before, after = (dict(configured_amounts(each)) for each in (LIMITS, with_raises(KEY, raises).limits))
    assert before == after


@pytest.mark.parametrize("text", ["", "{", "null", '[{"limit": 1}]', '[{"limit": "tokens_per_day"}]', "[1]"])
def test_a_stored_text_that_is_damaged_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="the stored raises are invalid"):
        decode(text)


def test_it_is_shown_as_it_was_requested() -> None:
    shown = json.loads(msgspec.json.encode(made("cost_per_month", "7.5").document()))
    assert shown == {
        "limit": "cost_per_month",
        "to": 7.5,
        "until": "2026-11-25T18:00:00Z",
        "created": "2026-11-25T17:30:00Z",
        "by": "token ci",
    }
    assert made(to="1.50x").document()["to"] == "1.50x"
